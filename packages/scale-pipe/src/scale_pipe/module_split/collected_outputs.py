"""What a model of transformers collects beside the results of its modules, such as the logits of its routers.

Its forward finds them in lists that forward hooks of the modules fill. Where it is cut, each stage would fill its own.
So what was collected in the call of a module goes along with what is known of that call, and later stages, on which the
module is not called, add it to their lists in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Collected = Mapping[str, list[Any]]
"""By the name of a list, what was added to it."""


def install_collectors(model: nn.Module) -> None:
    """Has transformers register these hooks on a model that is about to be cut, if it is one of its own.

    It would do so in the first forward that collects anything, once for each model. Stages would be models of their
    own, and their modules get the hooks anew wherever the model is cut a second time, or called whole.
    """
    install = getattr(sys.modules.get("transformers.utils.output_capturing"), "maybe_install_capturing_hooks", None)
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if install is not None and kind is not None:
        for module in model.modules():  # The outer one first: it cares for those inside.
            if isinstance(module, kind):
                install(module)


@contextmanager
def collecting() -> Iterator[dict[str, list[Any]]]:
    """Around the call of a module; yields what will be there behind it: what it has added to the lists."""
    lists = _lists()
    before = {key: len(found) for key, found in lists.items()}
    added: dict[str, list[Any]] = {}
    yield added
    for key, found in lists.items():
        if len(found) > before[key]:
            added[key] = found[before[key] :]


def add_collected(added: Collected) -> None:
    """Adds to the lists what a module has added on its own stage.

    Args:
        added: Of its call.
    """
    if added:
        for key, found in _lists().items():
            found += added.get(key, ())


def _lists() -> dict[str, list[Any]]:
    """The lists of the innermost forward under way that collects anything; none where nothing is collected."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    lists = None if collector is None else collector.get()
    return {key: found for key, found in (lists or {}).items() if isinstance(found, list)}
