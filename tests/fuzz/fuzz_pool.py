"""Follows many programs on sets of ranks. To repeat a seed, and to make its program smaller for as long as it fails in
the same words:

    python tests/fuzz/fuzz_pool.py 1234
    python tests/fuzz/fuzz_pool.py 1234 --shrink
    python tests/fuzz/fuzz_pool.py 0 5000        # a range of seeds; what fails is printed

The program that is printed can be changed and given to `failure_of(program)` in place of a seed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from fuzz_following import follow
from fuzz_programs import Program, Train, code_of, program_of, smaller

from scale_check.fuzz.pool import kind_of, run_in_turn
from scale_core.testing import preload


def followed(program: Program, folder: Path) -> str | None:
    """What differs first on this rank, or None."""
    warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)  # DDP, of strided parameters
    return follow(program, folder)


def failures(programs: Sequence[Program]) -> Iterator[tuple[Program, str]]:
    """Runs programs, those of one world together, and yields those that fail, with what they fail with."""
    for world in sorted({program.world for program in programs}):
        for outcome in run_in_turn(followed, [program for program in programs if program.world == world], world):
            differing: dict[str, str] = {}  # What several ranks say alike is said once.
            for rank, text in enumerate(outcome.results):
                if text is not None:
                    differing.setdefault(kind_of(text), f"rank {rank}: {text}")
            if text := outcome.failure or "\n".join(differing.values()):
                yield outcome.program, text


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
