"""`DistributedDataParallel` in a simulation: its C++ reducer reads values that simulated tensors do not have.

Two of its steps get help. The reducer all-reduces a bucket and takes the result out of a future, which torch's "fake"
process group leaves empty: a communication hook does the same in Python. And after the first step the ranks agree on
buckets in the order of their gradients: the indices that they exchange are real.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from scale_core import compat
from scale_core.tree import tensors_in

_GradBucket: Any = cast(Any, dist).GradBucket  # torch looks at this very annotation, so that it can't be a string.


def prepare(module: nn.Module) -> None:
    """Makes a `DistributedDataParallel` run without values, before its first forward pass; others stay as they are."""
    if not isinstance(module, DistributedDataParallel) or isinstance(module.reducer, _Reducer):
        return
    if not module._comm_hooks:
        module.register_comm_hook(module.process_group, _average)
    reducer: Any = _Reducer(module.reducer)
    module.reducer = reducer


class _Reducer:
    """The reducer of a `DistributedDataParallel`."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        with _RealIndices():
            return bool(self._reducer._rebuild_buckets())


class _RealIndices(TorchDispatchMode):
    """New tensors of int32 are real, on the host, and so is what is computed of real ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tensors = kwargs or {}, list(tensors_in(args))
        is_new = not tensors and kwargs.get("dtype") == torch.int32
        if is_new or (tensors and not any(map(compat.is_fake, tensors))):
            with compat.without_fake_tensors():
                return func(*args, **({**kwargs, "device": "cpu"} if is_new else kwargs))
        return func(*args, **kwargs)


def _average(group: dist.ProcessGroup, bucket: _GradBucket) -> torch.futures.Future[Tensor]:
    """As the reducer does: starts the collective when the bucket is full, and waits at the end of the backward pass."""
    gradients = bucket.buffer()
    gradients.div_(dist.get_world_size(group))
    work = dist.all_reduce(gradients, group=group, async_op=True)
    compat.queue_callback(work.wait)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future
