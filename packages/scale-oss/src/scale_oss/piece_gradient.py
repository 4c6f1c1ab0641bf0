"""The averaged gradient of a parameter under `ShardedDataParallel`: in this rank's piece, and shown as `param.grad`."""

from __future__ import annotations

import weakref
from typing import NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.shard import Shard, as_local, is_divided_shard, shard_of
from scale_core.sharded_tensor.elements import same_elements
from scale_core.sharded_tensor.replicated_parameter import unreduced_grad
from scale_core.sharded_tensor.tensor import ShardedTensor, mark_sharded
from scale_oss.buckets.bucket import Bucket
from scale_oss.state_dict import OSSStateDictMixin


class PieceGradient:
    """The record that a parameter carries (`ReducedGradient`); it keeps nobody alive."""

    def __init__(self, bucket: Bucket, index: int, optimizer: OSSStateDictMixin, wrapper: nn.Module) -> None:
        self.name, self._index, self._bucket = bucket.names[index], index, weakref.ref(bucket)
        self._optimizer, self._wrapper = weakref.ref(optimizer), weakref.ref(wrapper)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that steps with it."""
        return self._optimizer()

    @property
    def wrapper(self) -> nn.Module | None:
        """The module that averages it; None when that, or the optimizer, is gone."""
        return self._wrapper() if self._bucket() is not None else None

    def holder(self) -> Tensor:
        """Returns the piece. Raises RuntimeError where a gradient was not averaged yet."""
        bucket = self._live_bucket()
        if unreduced_grad(bucket.params[self._index]) is not None:
            raise_unreduced(self.name)
        return bucket.pieces[self._index]

    def read(self) -> Tensor | None:
        """Returns this rank's part of it, [elements of the piece], in the same memory."""
        piece = self._live_bucket().pieces[self._index]
        grad, shard = piece.grad, _shard(piece)
        if grad is None or not is_divided_shard(shard):
            return grad
        with as_local():
            return mark_sharded(grad.detach(), shard)

    def write(self, grad: Tensor | None) -> Tensor | None:
        """Replaces it by a `ShardedTensor`, or drops it; returns a gradient that is this rank's own instead."""
        bucket = self._live_bucket()
        param, piece = bucket.params[self._index], bucket.pieces[self._index]
        if grad is None:
            bucket.set_grad(self._index, None)
            return None
        shard, own_shard = shard_of(grad) if isinstance(grad, ShardedTensor) else None, shard_of(param)
        if shard is not None and same_elements(shard, _shard(piece)):
            local: Tensor = grad.to_local()  # type: ignore[attr-defined]  # It is a ShardedTensor.
            if (local.dtype, local.device) == (param.dtype, param.device) != (piece.dtype, piece.device):
                # The model was converted or moved, as to evaluate in half precision; its average is for the same step.
                piece.grad = local.to(piece.device, piece.dtype)
            else:
                bucket.set_grad(self._index, local)
            return None
        if shard is not None and (own_shard is None or not same_elements(shard, own_shard)):
            raise ValueError(
                f"'{self.name}'.grad = : got a part of {shard.title} {list(shard.shape)}, elements {shard.start:,} to "
                f"{shard.stop:,}, and the gradient of '{self.name}' is divided in other places. Assign what was "
                "computed from its own param.grad, or a full tensor, and call model.reduce()"
            )
        with as_local():
            is_accumulating = unreduced_grad(param) is not None
        if is_accumulating:
            return grad
        if is_divided_shard(_shard(piece)):
            bucket.set_grad(self._index, None)
            return grad
        bucket.set_grad(self._index, grad.view_as(piece))  # There are no other ranks, so it is the average.
        return None

    def wait(self) -> None:
        """Returns when the all-gather has written the parameter."""
        bucket = self._bucket()
        if bucket is None:
            raise RuntimeError(
                f"'{self.name}' was read after its optimizer was deleted, while its update was on its way from other "
                "ranks, so its values are not known: call optimizer.wait() before the optimizer is deleted"
            )
        try:
            if (optimizer := self._optimizer()) is None:
                bucket.wait()
            else:
                optimizer.contract.wait(bucket.gather_event, bucket.wait)
        except BaseException as error:
            error.add_note(f"'{self.name}' was used, which waits for its update from the other ranks")
            raise

    def _live_bucket(self) -> Bucket:
        bucket = self._bucket()
        assert bucket is not None, "asked for a gradient of a wrapper that is gone"
        return bucket


def raise_unreduced(name: str) -> NoReturn:
    """Raises the error of a gradient that is needed and was not averaged."""
    raise RuntimeError(
        f"the gradient of '{name}' has not been reduced: it was accumulated under no_sync(), or assigned as a full "
        "tensor. Call model.reduce(), or run the last backward() before the step outside of no_sync()"
    )


def _shard(piece: Tensor) -> Shard:
    shard = shard_of(piece)
    assert shard is not None, "each piece has its record"
    return shard
