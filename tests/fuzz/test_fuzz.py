"""Random programs of training, each compared with plain PyTorch in one process after every step.

The default run follows a fixed number of seeds, some minute of them. `nox -s soak` follows more, and as many as
SCALE_FUZZ_SEEDS says, for instance

    SCALE_FUZZ_SEEDS=0:20000 nox -s soak -- tests/fuzz

which is some hours. What a program is made of stands in `scale_check.fuzz.models`, what is done with it in
`fuzz_programs`, how our packages run it in `fuzz_wrappings`, how plain PyTorch does and how equal both must be in
`fuzz_following`.

A seed that fails is printed with its program and the command that repeats it; with `--shrink` that command leaves out
one thing after the other for as long as the program fails in the same words. Then:

- if plain PyTorch does not define what the program asks for, the generator must not draw it;
- if our packages refuse it by an error that says what to write instead, the same;
- if it is a defect, it gets a test of its own beside the code that is wrong. Until it is mended, a line of `NOT_YET`
  keeps it from hiding others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import fuzz_programs
import pytest
from fuzz_pool import failure_of, failures, shrunk
from fuzz_programs import Evaluate, Fail, Program, Train, Wrapping, code_of, program_of, smaller

from scale_check.fuzz.pool import kind_of

DEFAULT_SEEDS = range(60)
SOAK_SEEDS = "60:4000"


def told(failed: Sequence[tuple[Program, str]]) -> str:
    """What is printed of programs that fail."""
    command = "python tests/fuzz/fuzz_pool.py {} --shrink"
    return "\n\n".join(
        f"{code_of(program)}\n{text}\nrepeat it by: {command.format(program.seed)}" for program, text in failed
    )


def check(seeds: Sequence[int]) -> None:
    failed = list(failures([program_of(seed) for seed in seeds]))
    assert not failed, f"{len(failed)} of {len(seeds)} programs differ from plain PyTorch\n{told(failed)}"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_programs_equal_plain_pytorch(world):
    check([seed for seed in DEFAULT_SEEDS if program_of(seed).world == world])


@pytest.mark.soak
def test_many_random_programs_equal_plain_pytorch():
    first, last = map(int, os.environ.get("SCALE_FUZZ_SEEDS", SOAK_SEEDS).split(":"))
    check(range(first, last))


def test_a_seed_is_one_program_and_prints_as_its_code():
    for seed in range(20):
        program = program_of(seed)
        assert program == program_of(seed)
        assert eval(code_of(program), vars(fuzz_programs)) == program
        assert program_of(seed, 4).world == 4


def test_smaller_programs_have_one_thing_less():
    program = program_of(3)
    found = list(smaller(program))
    assert program not in found
    assert {len(each.steps) for each in found} == {len(program.steps), len(program.steps) - 1}


def small(**changes: object) -> Program:
    """A program of one step on two ranks."""
    program = replace(
        program_of(0, 2),
        wrapping=Wrapping("fully_shard", (1, 2, 1)),
        optimizer="SGD",
        options={"lr": 0.1},
        groups=False,
        lr_schedule=None,
        adascale=False,
        steps=(Train(),),
    )
    model = replace(program.model, words=0, tied=False, blocks=(("linear", True), ("layernorm",)))
    return replace(program, model=model, **changes)


def test_what_differs_is_found_named_and_made_smaller():
    # Known to differ: a flat parameter's gradient is zeros for what no pass has used, so that its weight decays.
    wrapping = Wrapping("fully_shard", (1, 2, 1), options={"flatten_parameters": True})
    program = small(wrapping=wrapping, options={"lr": 0.1, "weight_decay": 0.1}, steps=(Evaluate(), Train()))
    program = replace(program, model=replace(program.model, blocks=(("unused",),), output="tensor"))
    text = failure_of(program)
    assert text is not None
    assert "step 1, Train: blocks.0.spare: off by" in text
    less, other = shrunk(program, text)
    assert less == replace(program, steps=(Train(),))
    assert kind_of(other) == kind_of(text)


def test_a_program_that_raises_does_not_keep_others_from_running():
    wrong = small(steps=(Fail(block=7),))  # There is no such block, so that nothing fails.
    found = list(failures([small(), wrong, small(), small(seed=5)]))
    assert [program for program, _ in found] == [wrong]
    assert "the forward pass did not fail" in found[0][1]
