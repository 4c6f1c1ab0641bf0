"""The ways in which a block's activations may be treated, by name, and how a block is made to follow one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn

from scale_checkpoint.recompute.forward import treat, treat_no_more
from scale_checkpoint.recompute.forward import treated as forward_of
from scale_checkpoint.recompute.policy import SELECTIVE, policy_of
from scale_checkpoint.wrapper import apply_checkpointing

KEEP = "keep"
RECOMPUTE = "recompute"
OFFLOAD = "offload"

Ways: TypeAlias = Sequence[str] | Mapping[str, str | Sequence[str]]
"""Ways by name: "keep", "recompute", "selective", "offload"; or names of your own for operators whose results are kept,
as {"keep": "keep", "recompute": "recompute", "attention": ["_scaled_dot_product.*"]}."""

_KNOWN = (KEEP, RECOMPUTE, SELECTIVE, OFFLOAD)


def resolve(ways: Ways | None, device: torch.device) -> dict[str, str | tuple[str, ...]]:
    """Returns what each way does, by name; "keep" and "recompute" are always among them.

    Args:
        ways: None takes all; to move to the host only where the device is something else.
        device: Where the model is.

    Raises:
        ValueError: A name is unknown, or an operator has no such name.
        TypeError: Operators are given as something else than names.
    """
    if ways is None:
        ways = [way for way in _KNOWN if way != OFFLOAD or device.type != "cpu"]
    if not isinstance(ways, Mapping):
        strangers = [way for way in ways if way not in _KNOWN]
        if strangers:
            raise ValueError(
                f"a way is one of {', '.join(map(repr, _KNOWN))}, but {strangers[0]!r} was given; write "
                f'ways={{"{strangers[0]}": ["addmm"], ...}} for operators whose results are kept'
            )
        ways = {way: way for way in ways}
    hows: dict[str, str | tuple[str, ...]] = {KEEP: KEEP, RECOMPUTE: RECOMPUTE}
    for name, how in ways.items():
        if isinstance(how, str):
            if how not in _KNOWN:
                raise ValueError(f"the way {name!r} is {', '.join(map(repr, _KNOWN))} or operators, but is {how!r}")
            hows[name] = how
        else:
            hows[name] = _operators(name, how)
    return hows


def _operators(name: str, how: object) -> tuple[str, ...]:
    names = tuple(how) if isinstance(how, Sequence) else ()
    if not names or not all(isinstance(operator, str) for operator in names):
        raise TypeError(
            f"the way {name!r} is saved with plans, so it names operators in a list of strings, but is {how!r}"
        )
    policy_of(names)
    return names


@contextmanager
def treated(module: nn.Module, how: str | Sequence[str]) -> Iterator[None]:
    """Inside, a module's activations are treated in one way; afterwards as before.

    Args:
        module: A block.
        how: What `apply_checkpointing` takes.
    """
    before = forward_of(module)
    apply_checkpointing(module, how)
    try:
        yield
    finally:
        treat_no_more(module)
        if before is not None:
            treat(module, before)
