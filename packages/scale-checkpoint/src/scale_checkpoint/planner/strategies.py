"""Strategies for a block's activations, by name, and how a block is made to follow one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn

from scale_checkpoint.recompute.forward import get_forward, unwrap_forward, wrap_forward
from scale_checkpoint.recompute.policy import SELECTIVE, resolve_policy
from scale_checkpoint.wrapper import apply_checkpointing

KEEP = "keep"
RECOMPUTE = "recompute"
OFFLOAD = "offload"

Strategies: TypeAlias = Sequence[str] | Mapping[str, str | Sequence[str]]
"""Strategies by name: "keep", "recompute", "selective", "offload"; or names of your own for operators whose results are
kept, as {"keep": "keep", "recompute": "recompute", "attention": ["_scaled_dot_product.*"]}."""

_KNOWN = (KEEP, RECOMPUTE, SELECTIVE, OFFLOAD)


def resolve_strategies(strategies: Strategies | None, device: torch.device) -> dict[str, str | tuple[str, ...]]:
    """Returns what each strategy does, by name; "keep" and "recompute" are always among them.

    None takes all known ones, "offload" only where the device is not the host.
    """
    if strategies is None:
        strategies = [name for name in _KNOWN if name != OFFLOAD or device.type != "cpu"]
    if not isinstance(strategies, Mapping):
        unknown = [name for name in strategies if name not in _KNOWN]
        if unknown:
            raise ValueError(
                f"a strategy is one of {', '.join(map(repr, _KNOWN))}, got {unknown[0]!r}: write "
                f'strategies={{"{unknown[0]}": ["addmm"], ...}} for operators whose results are kept'
            )
        strategies = {name: name for name in strategies}
    resolved: dict[str, str | tuple[str, ...]] = {KEEP: KEEP, RECOMPUTE: RECOMPUTE}
    for name, how in strategies.items():
        if isinstance(how, str):
            if how not in _KNOWN:
                raise ValueError(
                    f"strategy {name!r}: expected {', '.join(map(repr, _KNOWN))} or operators, got {how!r}"
                )
            resolved[name] = how
        else:
            given: object = how
            operators = tuple(given) if isinstance(given, Sequence) else ()
            if not operators or not all(isinstance(operator, str) for operator in operators):
                raise TypeError(
                    f"strategy {name!r}: expected names of operators in a list of strings, since plans are saved, "
                    f"got {how!r}"
                )
            resolve_policy(operators)
            resolved[name] = operators
    return resolved


@contextmanager
def applied(module: nn.Module, how: str | Sequence[str]) -> Iterator[None]:
    """Inside, a module follows one strategy, as `apply_checkpointing` takes it; afterwards the one before."""
    before = get_forward(module)
    apply_checkpointing(module, how)
    try:
        yield
    finally:
        unwrap_forward(module)
        if before is not None:
            wrap_forward(module, before)
