"""Runs many programs on one set of ranks, since ranks take longer to start than a program takes to run.

A program that fails, hangs or ends a rank ends its set; the rest goes on with a fresh one. To repeat a seed, and to
make its program smaller for as long as it fails in the same words:

    python packages/scale-train/tests/fuzz/fuzz_pool.py 1234
    python packages/scale-train/tests/fuzz/fuzz_pool.py 1234 --shrink
    python packages/scale-train/tests/fuzz/fuzz_pool.py 0 5000        # a range of seeds; what fails is printed

The program that is printed can be changed and given to `failure_of(program)` in place of a seed.
"""

from __future__ import annotations

import faulthandler
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from fuzz_following import follow
from fuzz_programs import Program, Train, code_of, program_of, smaller

from scale_core.testing import preload, run_ranks

LIMIT_SECONDS = 90.0
"""For one program, as generous as a machine with other work needs; programs take some tenths of a second."""


def play(programs: Sequence[Program], folder: str) -> list[str | None]:
    """On each rank: follows one program after the other, until one fails; returns what each has come to."""
    warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)  # DDP, of strided parameters
    verdicts: list[str | None] = []
    ours = dist.new_group(backend="gloo")  # What a program breaks must not keep the ranks from agreeing.
    rank = dist.get_rank()
    for number, program in enumerate(programs):
        if rank == 0:
            Path(folder, "number").write_text(str(number))
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
        own = _verdict(program, Path(folder, str(number)))
        all_of_them: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(all_of_them, own, group=ours)
        faulthandler.cancel_dump_traceback_later()
        failed: dict[str, str] = {}  # What several ranks say alike is said once.
        for each, text in enumerate(all_of_them):
            if text is not None:
                failed.setdefault(kind_of(text), f"rank {each}: {text}")
        verdicts.append("\n".join(failed.values()) or None)
        if failed:
            break
    return verdicts


def _verdict(program: Program, folder: Path) -> str | None:
    try:
        return follow(program, folder)
    except Exception as error:
        text = "".join(traceback.format_exception(error, chain=False, limit=-4))
        print(f"program {program.seed}: {text}", flush=True)  # In case that others wait until they are ended.
        return text
    finally:
        torch.set_grad_enabled(True)


def failures(programs: Sequence[Program]) -> Iterator[tuple[Program, str]]:
    """Runs programs, those of one world together, and yields those that fail, with what they fail with."""
    for world in sorted({program.world for program in programs}):
        rest = [program for program in programs if program.world == world]
        while rest:
            with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
                try:
                    verdicts = run_ranks(play, world, rest, folder, limit_seconds=LIMIT_SECONDS * (len(rest) + 2))[0]
                except Exception as error:
                    number = int(Path(folder, "number").read_text() or 0)
                    verdicts = [None] * number + ["\n".join([repr(error), *getattr(error, "__notes__", [])])]
            if verdicts[-1] is not None:
                yield rest[len(verdicts) - 1], verdicts[-1]
            rest = rest[len(verdicts) :]


def failure_of(program: Program) -> str | None:
    """What a program fails with, or None."""
    return next((text for _, text in failures([program])), None)


def shrunk(program: Program, text: str) -> tuple[Program, str]:
    """The smallest program that is found, by leaving out one thing after the other, to fail in the same words."""
    wanted = kind_of(text)
    while True:
        candidates = [each for each in smaller(program) if any(isinstance(step, Train) for step in each.steps)]
        found = next(((each, other) for each, other in failures(candidates) if kind_of(other) == wanted), None)
        if found is None:
            return program, text
        program, text = found


def kind_of(text: str) -> str:
    """What failures of one cause have in common: the exception, or what differs, without names and numbers."""
    errors = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception|Warning|Boom)\b.*)", text, re.MULTILINE)
    line = errors[-1] if errors else text.splitlines()[0]
    line = re.sub(r"^rank \d+: |step \d+, |/tmp/\S+", "", line.split(" off by ")[0])
    return re.sub(r"'[^']*'|\d+(\.\d+)*|(\bmodel\.|\bstage_0\.)*\b(entry|blocks|exit)\S*", "#", line)[:150]


def main() -> None:
    """Repeats a seed, or a range of them."""
    preload("fuzz_following", "scale_fsdp", "scale_oss", "scale_pipe", "scale_tp", "scale_checkpoint")
    numbers = [int(each) for each in sys.argv[1:] if each.isdigit()]
    seeds = range(numbers[0], numbers[-1]) if len(numbers) > 1 else numbers
    kinds: dict[str, list[int]] = {}
    for program, text in failures([program_of(seed) for seed in seeds]):
        if "--shrink" in sys.argv:
            program, text = shrunk(program, text)
        kinds.setdefault(kind_of(text), []).append(program.seed)
        if len(kinds[kind_of(text)]) == 1 or "--all" in sys.argv:
            print(f"{'=' * 100}\n{code_of(program)}\n{text}", flush=True)
    print("=" * 100)
    for kind, where in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(where)} times: {kind}: seeds {where[:12]}")
    print(f"{sum(map(len, kinds.values()))} of {len(seeds)} programs failed")


if __name__ == "__main__":
    main()
