"""The first fifteen minutes on one GPU: what no CPU can show of all techniques, with the figures that are expected.

    python benchmarks/gpu_first.py --out /tmp/gpu                     # all parts, at most 15 minutes together
    python benchmarks/gpu_first.py --out /tmp/gpu --parts parity gpt  # some of them
    python benchmarks/gpu_first.py --out /tmp/gpu --stand-in          # on the CPU, in its smallest form
    python benchmarks/gpu_first.py --smoke                            # the same, into a folder that is removed

Each part is a process with a limit of its own, and leaves `PART.json` in the folder: its figures, those that were
expected, and the end of its output. A part that fails, hangs or is killed keeps what it had measured, and the next one
runs. Two ranks share the device over gloo, since NCCL refuses two ranks on one device: their streams are real, their
collectives are not NCCL's. Part `nccl` calls NCCL with one rank. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MINUTES = 15.0
SIMULATED_GIB = 26.11  # of the GPT of part `gpt`
_TAIL = 4000  # characters of a part's output that are kept


@dataclass(frozen=True)
class Expected:
    """What the figures whose names match `pattern` should be.

    Attributes:
        pattern: A regular expression for full names.
        at_most: The largest value; None is no bound.
        at_least: The smallest value; None is no bound.
        equal: The value; None is any.
        like: A regular expression for the full value; "" is any.
    """

    pattern: str
    at_most: float | None = None
    at_least: float | None = None
    equal: Any = None
    like: str = ""

    def __str__(self) -> str:
        if self.equal is not None or self.like:
            return str(self.like or self.equal)
        bounds = [f">= {self.at_least:g}"] if self.at_least is not None else []
        return " and ".join(bounds + ([f"<= {self.at_most:g}"] if self.at_most is not None else []))

    def is_met(self, value: Any) -> bool:
        if self.equal is not None:
            return bool(value == self.equal)
        if self.like:
            return re.fullmatch(self.like, str(value)) is not None
        if not isinstance(value, int | float):
            return False
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)


@dataclass(frozen=True)
class Part:
    """One part of the fifteen minutes.

    Attributes:
        name: Its function in `gpu_parts`.
        limit_seconds: It is ended then.
        expected: Of its figures on a GPU; others are only shown.
        environment: Variables of its process.
    """

    name: str
    limit_seconds: float
    expected: tuple[Expected, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


NO_ERROR = Expected(".*: error", equal="none")
# The order is that of worth: what is last is missing where time is short.
PARTS = [
    Part("versions", 45, (Expected("torch", like=r"2\.(11|13)\..*"), Expected("NCCL", like=r"2\.\d+\..*"))),
    Part("nccl", 30, (Expected(".*", equal="equal"),)),
    Part(
        "parity",
        150,
        (
            Expected(".*: delayed equals undelayed", equal=True),
            Expected(".*: relative difference to plain PyTorch", at_most=1e-5),
            NO_ERROR,
        ),
    ),
    Part("tests", 120, (Expected(".*: failures", equal=0), NO_ERROR)),
    Part(
        "waits",
        75,
        (
            Expected("(fsdp|fsdp, bf16|fsdp, int8|oss|tensor parallel): waits", equal=0),
            Expected("(adascale|scaler|experts): waits", at_most=1),
            NO_ERROR,
        ),
    ),
    Part(
        "offload",
        150,
        (
            Expected("scale-fsdp, half of the state on the host: over .*", at_most=1.3),
            Expected(".*overlap_step: over FSDP2.*", at_most=0.67),
            NO_ERROR,
        ),
    ),
    Part(
        "gpt",
        75,
        (
            Expected("scale-fsdp over plain", at_most=1.03),
            Expected("scale-fsdp over FSDP2", at_most=1.0),
            Expected("scale-fsdp: TFLOP/s.*", at_least=300),
            Expected("scale-fsdp: allocated over simulated", at_least=0.98, at_most=1.02),
            # By `gpu_parts.simulated_peak` on torch 2.13: torch 2.11 can't be simulated.
            Expected("scale-fsdp: allocated GiB", at_least=0.98 * SIMULATED_GIB, at_most=1.02 * SIMULATED_GIB),
        ),
    ),
    Part("gpt_expandable", 30, (), {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    Part(
        "kernels",
        45,
        (
            Expected("ring_attention over scaled_dot_product_attention", at_most=1.3),
            Expected("MoE over its grouped products", at_most=2),
        ),
    ),
    Part("sanitizer", 120, (Expected(".*: reports", equal=0), Expected(".*: failures", equal=0))),
    Part("trace", 45),
]


def run(part: Part, folder: Path, *, stand_in: bool, limit_seconds: float) -> dict[str, Any]:
    """Runs one part and writes its JSON file."""
    figures, begin = folder / f"{part.name}.figures", time.monotonic()
    figures.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--run", part.name, "--out", str(folder), "--figures", str(figures)]
    environment = {**os.environ, **({} if stand_in else part.environment)}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command + ["--stand-in"] * stand_in,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = "ok" if process.wait(limit_seconds) == 0 else f"failed with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            status = f"ended after its {limit_seconds:.0f} s"
        with suppress(ProcessLookupError):  # What it has started may outlive it.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        tail = output.read()[-_TAIL:]
    content = {
        "part": part.name,
        "status": status,
        "stand_in": stand_in,
        "seconds": round(time.monotonic() - begin, 1),
        "figures": compared(part, read(figures), stand_in=stand_in),
        "output": tail,
    }
    figures.unlink(missing_ok=True)
    (folder / f"{part.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return content


def read(figures: Path) -> dict[str, Any]:
    """The figures that a part has recorded; a line that was cut off is left out."""
    lines = figures.read_text().splitlines(keepends=True) if figures.exists() else []
    return dict(json.loads(line) for line in lines if line.endswith("\n"))


def compared(part: Part, measured: dict[str, Any], *, stand_in: bool) -> dict[str, Any]:
    """Each figure with what was expected of it, if anything; on the stand-in nothing is."""
    figures: dict[str, Any] = {}
    for name, value in measured.items():
        entry = figures[name] = {"measured": value}
        expected = next((each for each in part.expected if re.fullmatch(each.pattern, name)), None)
        if expected is not None and not stand_in:
            entry |= {"expected": str(expected), "met": expected.is_met(value)}
    return figures


def show(content: dict[str, Any]) -> None:
    print(f"{content['part']}: {content['status']}, {content['seconds']} s", flush=True)
    for name, entry in content["figures"].items():
        verdict = "" if "met" not in entry else f"  [{'ok' if entry['met'] else 'NOT'}: {entry['expected']}]"
        print(f"    {name}: {str(entry['measured'])[:150]}{verdict}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the folder for one JSON file of each part")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all parts together")
    parser.add_argument("--stand-in", action="store_true", help="the smallest form, on the CPU")
    parser.add_argument("--smoke", action="store_true", help="--stand-in, into a folder that is removed")
    parser.add_argument("--run", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            return run_all(Path(folder), options.parts, options.minutes, stand_in=True)
    if options.out is None:
        parser.error("--out is missing: the folder for one JSON file of each part, such as --out /tmp/gpu")
    if options.run:
        import gpu_parts
        import torch

        device = torch.device("cpu") if options.stand_in else torch.device("cuda", 0)
        gpu_parts.run_part(options.run, options.out, options.figures, device, short=options.stand_in)
        return 0
    import torch

    stand_in = options.stand_in or not torch.cuda.is_available()
    if stand_in and not options.stand_in:
        print("there is no CUDA device here: each part runs on the CPU, in its smallest form", flush=True)
    return run_all(options.out, options.parts, options.minutes, stand_in=stand_in)


def run_all(folder: Path, names: Sequence[str], minutes: float, *, stand_in: bool) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    is_good = True
    for part in PARTS:
        remaining = end - time.monotonic()
        if part.name not in names or remaining < 1:
            continue
        content = run(part, folder, stand_in=stand_in, limit_seconds=min(part.limit_seconds, remaining))
        show(content)
        met = all(entry.get("met", True) for entry in content["figures"].values())
        is_good = is_good and content["status"] == "ok" and met
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
