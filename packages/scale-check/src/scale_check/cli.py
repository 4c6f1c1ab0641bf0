"""The command `scale-check`.

Exit codes: 0 the ranks compute what one process does; 1 they don't; 2 the script failed, or the command is wrong. For
programs of `fuzz`, 1 is also for ranks that hang or die, and errors that all ranks raise are none.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from scale_check.comparison import ParityVerdict

_DESCRIPTION = "Tell if a difference between several ranks and one process is a bug or rounding."
_EXIT_CODES = "Exit codes: 0 the ranks compute what one process does, 1 they don't, 2 the script failed."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="scale-check", description=_DESCRIPTION, epilog=_EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser(
        "run",
        help="run a training script on several ranks and in one process, and name the first tensor that differs",
        usage="scale-check run [--ranks N] [--steps N] [--limit-seconds S] [--json] [-m] script.py [its arguments]",
    )
    run_parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    run_parser.add_argument("--steps", type=int, default=3, help="number of optimizer steps to compare (3)")
    run_parser.add_argument("--limit-seconds", type=float, default=600.0, help="time limit of each run (600)")
    run_parser.add_argument("--json", action="store_true", help="print the report as JSON")
    run_parser.add_argument("-m", dest="is_module", action="store_true", help="the script is a module, as in python -m")
    run_parser.add_argument("script", help="the training script, unchanged")
    run_parser.add_argument("rest", nargs=argparse.REMAINDER, help="its arguments")
    fuzz_parser = commands.add_parser(
        "fuzz", help="draw random trainings, run each with a library on several ranks and in one process, and compare"
    )
    fuzz_parser.add_argument(
        "--engine",
        required=True,
        help="the library: ddp, zero1, fsdp2, accelerate, deepspeed1, deepspeed2, deepspeed3, scale-fsdp, scale-oss, "
        "or module:Class",
    )
    fuzz_parser.add_argument("--programs", type=int, default=50, help="number of programs (50)")
    fuzz_parser.add_argument("--seed", type=int, default=0, help="seed of the first program (0)")
    fuzz_parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    fuzz_parser.add_argument("--no-shrink", action="store_true", help="do not make failing programs smaller")
    fuzz_parser.add_argument("--json", action="store_true", help="print one line of JSON per finding")
    options = parser.parse_args(arguments)
    if options.ranks < 2:
        parser.error("expected --ranks of at least 2")
    return _fuzz(parser, options) if options.command == "fuzz" else _run(parser, options)


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.steps < 1:
        parser.error("expected --steps of at least 1")
    if not options.is_module and not Path(options.script).exists():
        parser.error(f"{options.script}: no such file; of a module, write -m {options.script}")
    from scale_check.script.command import ScriptError, run_script

    try:
        report = run_script(
            [options.script, *options.rest],
            options.ranks,
            steps=options.steps,
            is_module=options.is_module,
            limit_seconds=options.limit_seconds,
        )
    except ScriptError as error:
        print(f"scale-check: {error}", file=sys.stderr)
        return 2
    except Exception:  # Code 1 says that the ranks compute something else.
        traceback.print_exc()
        return 2
    print(json.dumps(report.to_json()) if options.json else report)
    return int(report.verdict is ParityVerdict.BUG)


def _fuzz(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from scale_check.fuzz.command import FuzzFinding, fuzz
    from scale_check.fuzz.engines import engine_class

    try:
        engine_class(options.engine)
    except (ValueError, ImportError) as error:
        parser.error(f"--engine: {error}")
    if options.programs < 1:
        parser.error("expected --programs of at least 1")

    report = sys.stdout

    def tell(finding: FuzzFinding) -> None:
        if options.json:
            print(json.dumps(finding.to_json()), file=report, flush=True)
        elif finding.kind != "error":
            print(f"{finding.program!r}\n  {finding.kind}: {finding.text}\n", file=report, flush=True)

    seeds = range(options.seed, options.seed + options.programs)
    try:
        with redirect_stdout(sys.stderr):  # What programs and libraries print.
            summary = fuzz(options.engine, seeds, options.ranks, shrinks=not options.no_shrink, tell=tell)
    except Exception:
        traceback.print_exc()
        return 2
    print(summary, file=sys.stderr if options.json else sys.stdout)
    return int(not summary.is_right)


def run() -> int:
    """The entry point."""
    return main()


if __name__ == "__main__":
    sys.exit(main())
