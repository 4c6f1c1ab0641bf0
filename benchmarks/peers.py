"""Programs on two ranks that other libraries train with other numbers than one process, without an error.

    python benchmarks/peers.py                     # runs all, and prints what each prints
    python benchmarks/peers.py fsdp2_order tp_prelu
    python benchmarks/peers.py --fuzz 100          # also 100 random programs with each library, or with --engines fsdp2
    python benchmarks/peers.py --smoke             # runs one program
    python benchmarks/peers.py --date 2026-11-29   # also writes results/2026-11-29-peers.*; keeps its other rows

Each file in `peers/` is one program, of at most 30 lines, for `torchrun --nproc-per-node 2`; its first line says what
is wrong. It prints what one process computes and what the ranks do. Those of a library that is not installed are left
out; `--deepspeed-python` is the interpreter of an environment with DeepSpeed. Random programs are those of `scale-check
fuzz`, on two ranks, from seed 1000 on, or `--seed`; errors are those that all ranks raise.
`tests/clients/test_clients_peers.py` runs the programs of the installed libraries, and says which no longer differ.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from report import RESULTS, Table, save

from scale_check.fuzz.command import fuzz

PROGRAMS = Path(__file__).parent / "peers"
LIMIT_SECONDS = 300
FIRST_SEED = 1000
ENGINES = ("ddp", "zero1", "fsdp2", "accelerate", "scale-fsdp", "scale-oss")
SMOKE = ("ddp_unfreeze",)

_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan"
# "one process [1.5, 2.0], FSDP2 [1.5, 3.0]": a library's name has digits, and numbers have brackets or blanks before.
_PRINTED = re.compile(r"(?:one process|without a restart) (?P<expected>[\[(\d-].*?), (?P<actual>[A-Za-z].*)")


def numbers_in(text: str) -> list[float]:
    """The numbers in a text, but for those in names."""
    return [float(number) for number in re.findall(rf"(?<![\w-])(?:{_NUMBER})(?!\w)", text)]


def differs(line: str) -> bool:
    """Whether the ranks have printed other numbers than one process. Another form is a mended library, or an error."""
    if (printed := _PRINTED.search(line)) is None:
        return False
    expected, actual = numbers_in(printed["expected"]), numbers_in(printed["actual"].partition(" (before")[0])
    if len(expected) == len(actual):
        return any(not _is_close(*pair) for pair in zip(expected, actual, strict=True))
    return any(not any(_is_close(number, other) for other in expected) for number in actual)


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(1.0, abs(one))  # False for NaN.


def library_of(path: Path) -> str:
    """The distribution whose error a program shows."""
    return next((name for name in ("accelerate", "lightning", "deepspeed") if path.stem.startswith(name)), "torch")


def printed_by(path: Path, python: str) -> str:
    """What a program prints of its numbers, or how it has ended."""
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"did not end within {LIMIT_SECONDS} s"
    lines = [line for line in done.stdout.splitlines() if "one process" in line or "without a restart" in line]
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return lines[-1] if lines else f"{(errors or ['ended without a line'])[0].strip()[:200]}"


def versions(python: str) -> dict[str, str]:
    """The versions of the libraries."""
    found = {}
    for name in ("torch", "accelerate", "lightning"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    told = subprocess.run(
        [python, "-c", "import importlib.metadata; print(importlib.metadata.version('deepspeed'))"],
        capture_output=True,
        text=True,
    )
    return found | ({"deepspeed": told.stdout.strip()} if told.returncode == 0 else {})


def fuzzed(num_programs: int, engines: Sequence[str], first_seed: int) -> Table:
    """What random programs come to with each library."""
    rows = []
    for engine in engines:
        seeds = range(first_seed, first_seed + num_programs)
        summary = fuzz(engine, seeds, 2, shrinks=False)
        different = [finding.program.seed for finding in summary.findings if finding.kind == "different"]
        num_equal = num_programs - len(summary.findings)
        counts = (num_programs, num_equal, len(different), summary.count("error"), summary.count("ended"))
        rows.append([engine, *map(str, counts), ", ".join(map(str, different[:12]))])
        print(rows[-1], flush=True)
    heads = ["engine", "programs", "equal", "different", "errors", "hang or die", "seeds that differ"]
    return Table(f"Random programs with each library, from seed {first_seed} on", heads, rows)


def merged(table: Table, recorded: Sequence[Mapping[str, str]]) -> Table:
    """The table, with the rows of other programs or libraries that a file has recorded."""
    key = table.heads[0]
    rows = {row[key]: [row[head] for head in table.heads] for row in recorded if key in row}
    rows |= {row[0]: list(row) for row in table.rows}
    names = sorted(rows) if key == "program" else rows
    return Table(table.title, table.heads, [rows[name] for name in names])


def main() -> None:
    parser = argparse.ArgumentParser(description="Programs that other libraries train with other numbers.")
    parser.add_argument("names", nargs="*", help="of files in peers/, without .py; all by default")
    parser.add_argument("--deepspeed-python", default=sys.executable)
    parser.add_argument("--fuzz", type=int, default=0, help="how many random programs with each library")
    parser.add_argument("--date", help="write the table to results/ under this date")
    parser.add_argument("--engines", nargs="+", default=ENGINES, help="the libraries of random programs")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="of the first random program")
    parser.add_argument("--smoke", action="store_true", help="run one program")
    options = parser.parse_args()
    names = SMOKE if options.smoke else options.names
    known = versions(options.deepspeed_python)
    rows = []
    for path in sorted(PROGRAMS.glob("*.py")):
        library = library_of(path)
        if (names and path.stem not in names) or library not in known:
            continue
        says = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        python = options.deepspeed_python if library == "deepspeed" else sys.executable
        line = printed_by(path, python)
        rows.append([path.stem, f"{library} {known[library]}", says, "yes" if differs(line) else "no", line])
        print(f"{path.stem}: {line}", flush=True)
    heads = ["program", "version", "what is wrong", "differs", "it prints"]
    table = Table("Programs that train with other numbers", heads, rows)
    engines = fuzzed(options.fuzz, options.engines if options.fuzz else (), options.seed)
    if options.date:
        results = RESULTS / f"{options.date}-peers.json"
        recorded = json.loads(results.read_text(encoding="utf-8"))["results"] if results.exists() else []
        tables = [merged(each, recorded) for each in (table, engines)]
        tables = [each for each in tables if each.rows]
        figures = [dict(zip(each.heads, row, strict=True)) for each in tables for row in each.rows]
        save("peers", options.date, __doc__ or "", tables, figures)


if __name__ == "__main__":
    main()
