"""Programs on two ranks that other libraries train with other numbers than one process, without an error.

    python benchmarks/peers.py                     # runs all, and prints what each prints
    python benchmarks/peers.py fsdp2_order tp_prelu
    python benchmarks/peers.py --fuzz 100          # also 100 random programs with each library
    python benchmarks/peers.py --date 2026-11-29   # also writes results/2026-11-29-peers.*

Each file in `peers/` is one program, of some 30 lines, for `torchrun --nproc-per-node 2`; its first line says what is
wrong. It prints what one process computes and what the ranks do. Those of a library that is not installed are left out;
`--deepspeed-python` is the interpreter of an environment with DeepSpeed. Random programs are those of `scale-check
fuzz`, on two ranks, from seed 1000 on; errors are those that all ranks raise.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from report import Table, save

from scale_check.fuzz.command import fuzz

PROGRAMS = Path(__file__).parent / "peers"
LIMIT_SECONDS = 300
FIRST_SEED = 1000
ENGINES = ("ddp", "zero1", "fsdp2", "accelerate", "scale-fsdp", "scale-oss")


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


def fuzzed(num_programs: int) -> Table:
    """What random programs come to with each library."""
    rows = []
    for engine in ENGINES:
        seeds = range(FIRST_SEED, FIRST_SEED + num_programs)
        summary = fuzz(engine, seeds, 2, shrinks=False)
        different = [finding.program.seed for finding in summary.findings if finding.kind == "different"]
        counts = (num_programs - len(summary.findings), len(different), summary.count("error"), summary.count("ended"))
        rows.append([engine, *map(str, counts), ", ".join(map(str, different[:12]))])
        print(rows[-1], flush=True)
    heads = ["engine", "equal", "different", "errors", "hang or die", "seeds that differ"]
    return Table(f"{num_programs} random programs with each library", heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Programs that other libraries train with other numbers.")
    parser.add_argument("names", nargs="*", help="of files in peers/, without .py; all by default")
    parser.add_argument("--deepspeed-python", default=sys.executable)
    parser.add_argument("--fuzz", type=int, default=0, help="how many random programs with each library")
    parser.add_argument("--date", help="write the table to results/ under this date")
    options = parser.parse_args()
    known = versions(options.deepspeed_python)
    rows = []
    for path in sorted(PROGRAMS.glob("*.py")):
        library = next(
            (name for name in ("accelerate", "lightning", "deepspeed") if path.stem.startswith(name)), "torch"
        )
        if (options.names and path.stem not in options.names) or library not in known:
            continue
        says = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        python = options.deepspeed_python if library == "deepspeed" else sys.executable
        rows.append([path.stem, f"{library} {known[library]}", says, printed_by(path, python)])
        print(f"{rows[-1][0]}: {rows[-1][3]}", flush=True)
    table = Table("Programs that train with other numbers", ["program", "version", "what is wrong", "it prints"], rows)
    tables = [table, fuzzed(options.fuzz)] if options.fuzz else [table]
    if options.date:
        figures = [dict(zip(each.heads, row, strict=True)) for each in tables for row in each.rows]
        save("peers", options.date, __doc__ or "", tables, figures)


if __name__ == "__main__":
    main()
