"""A transport as NCCL's, on the host: no tags, one stream of a rank, and a send ends when its receive has begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from scale_core.comm.group import Group
from scale_pipe.distributed import p2p
from scale_pipe.distributed.p2p import P2PChannel

_LIMIT = 30.0
_TENSOR, _ANSWER = 1, 2  # The only tags: which transfer a message is of, its place alone says.


class _Work:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            self._future.result(_LIMIT)
        except TimeoutError:
            raise RuntimeError("a transfer waits for one that is behind another") from None
        return True


class InOrder:
    """Sends and receives of this rank, one after the other.

    Args:
        ranks: Of the group, by the global ones.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._group = dist.new_group(list(ranks), timeout=timedelta(seconds=_LIMIT), use_local_synchronization=True)
        self._stream = ThreadPoolExecutor(1)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        (tensor,), answer = tensors, torch.zeros(1)

        def go() -> None:
            self._group.recv([answer], peer, _ANSWER).wait()
            self._group.send([tensor], peer, _TENSOR).wait()

        return self._do(go)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        (tensor,), answer = tensors, torch.zeros(1)

        def go() -> None:
            self._group.send([answer], peer, _ANSWER).wait()
            self._group.recv([tensor], peer, _TENSOR).wait()

        return self._do(go)

    def _do(self, go: Callable[[], None]) -> _Work:
        return _Work(self._stream.submit(go))

    def end(self) -> None:
        self._stream.shutdown(wait=False, cancel_futures=True)


@contextmanager
def in_order_transport(*ranks: int) -> Iterator[None]:
    """Lets pipelines over these ranks send their tensors so; headers stay as they are."""
    transport = InOrder(ranks)

    def set_device(self: P2PChannel, device: torch.device) -> None:
        self.device = device
        self.matches_by_order = self._on_device = True

    def torch_group(group: Group) -> Any:
        assert group.ranks == ranks
        return transport

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2PChannel, "set_device", set_device)
        patch.setattr(p2p, "torch_group", torch_group)
        yield
    transport.end()
