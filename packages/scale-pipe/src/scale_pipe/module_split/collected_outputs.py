"""Outputs that transformers' models collect in addition to the results of their modules, for example router logits.

Forward hooks append them to lists of the outer forward, so each stage would have outputs of its own modules only, and
the balance loss of a mixture of experts would silently lack layers. So the outputs that a module has appended travel
with the shapes of that call's result, and later stages append it in place of the call. The lists have no public access.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Collected = Mapping[str, list[Any]]
"""By the name of a list, what was appended to it."""


def install_collectors(model: nn.Module) -> None:
    """Registers transformers' hooks on a model that is about to be cut, if it is one of its own.

    Its first forward would, once for each model object: stages are such objects, and would register them again.
    """
    install = getattr(sys.modules.get("transformers.utils.output_capturing"), "maybe_install_capturing_hooks", None)
    pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if install is not None and pretrained is not None:
        for module in model.modules():  # The outer one first: it installs those inside.
            if isinstance(module, pretrained):
                install(module)


@contextmanager
def collecting() -> Iterator[dict[str, list[Any]]]:
    """Yields a dict that holds, at the end of the context, the values appended to the lists in it."""
    lists = _lists()
    lengths = {key: len(outputs) for key, outputs in lists.items()}
    added: dict[str, list[Any]] = {}
    yield added
    added.update({key: outputs[lengths[key] :] for key, outputs in lists.items() if len(outputs) > lengths[key]})


def add_collected(added: Collected) -> None:
    """Appends to the lists the values that a module has appended on its own stage."""
    for key, outputs in _lists().items() if added else ():
        outputs += added.get(key, ())


def _lists() -> dict[str, list[Any]]:
    """Returns the lists of the innermost forward that collects anything."""
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    lists = None if collector is None else collector.get()
    return {key: outputs for key, outputs in (lists or {}).items() if isinstance(outputs, list)}
