"""State that was saved under the names of FairScale's or torchgpipe's `Pipe`, read by the layers' own names."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from scale_pipe.models.skip_words import declared_by

_OF_A_PARTITION = re.compile(r"partitions\.\d+\.(.+)", re.DOTALL)


def plain_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Renames the keys in `state_dict` that name a partition, so that they name the layer alone.

    What was saved as `partitions.1.3.weight` is `3.weight`, in whatever balance. There, a skippable layer holds the
    layer that was written, as its `module`: `partitions.1.3.module.weight` is `3.weight` as well.

    Args:
        module: Whose layers are meant.
        state_dict: Changed in place.
        prefix: Of the module's keys.
    """
    if "partitions" in module._modules:
        return  # A layer has this name itself.
    skippables = [name for name, part in module.named_modules() if declared_by(part) and "module" not in part._modules]
    for key in [key for key in state_dict if key.startswith(prefix)]:
        match = _OF_A_PARTITION.fullmatch(key[len(prefix) :])
        if match is None:
            continue
        plain = match.group(1)
        for name in skippables:
            if plain.startswith(f"{name}.module."):
                plain = name + plain[len(name) + len(".module") :]
        state_dict[prefix + plain] = state_dict.pop(key)
