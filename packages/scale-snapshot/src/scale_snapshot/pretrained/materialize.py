"""Memory for a model on the meta device, before a checkpoint fills it."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor, nn

from scale_core.shard import Shard, on_local_tensors, shard_of
from scale_core.sharded_tensor.tensor import set_shard

Init = Callable[[nn.Module], object]


@torch.no_grad()
@on_local_tensors
def materialize(model: nn.Module, device: torch.device, init: Init | None, filled_later: Container[Tensor]) -> None:
    """Gives memory to meta tensors, and values to those buffers that nobody fills later; all else stays.

    Tied parameters stay tied, and parts of parameters that layers have divided stay the same.

    Args:
        model: Sharded, divided, cut into stages, or plain.
        device: Where the memory is.
        init: Called with each module that directly has such buffers, to fill them.
        filled_later: The buffers that need no values now.

    Raises:
        ValueError: A buffer has got no values.
    """
    ties: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                ties.setdefault(param, []).append((module, key))
    shards: dict[Tensor, Shard | None] = {param: shard_of(param) for param in ties}
    buffers = [
        (module, key, f"{path}.{key}".lstrip("."), buffer in filled_later)
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    if not ties and not buffers:
        return
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for old, ((first, first_key), *others) in ties.items():
        new = first._parameters[first_key]
        assert new is not None
        if (shard := shards[old]) is not None and shard_of(new) is None:
            set_shard(new, shard)
        for module, key in others:
            module._parameters[key] = new
    waiting = {(module, key): (name, module._buffers[key]) for module, key, name, is_filled in buffers if not is_filled}
    versions = {key: _version(buffer) for key, (_, buffer) in waiting.items()}
    for module in dict.fromkeys(module for module, _ in waiting):
        if init is not None:
            init(module)
    left = [
        name
        for (module, key), (name, buffer) in waiting.items()
        if module._buffers[key] is buffer and _version(buffer) == versions[module, key]
    ]
    if left:
        raise ValueError(
            f"no file has the buffer{'s' if len(left) > 1 else ''} {', '.join(left[:10])}, on the meta device: pass "
            "init=, a function that is called with each module that has such buffers and fills them, or build these "
            "modules outside of torch.device('meta')"
        )


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version
