"""A transport for tests on the host that behaves as NCCL does: it finds what gloo forgives.

gloo matches messages by tag, adds in the order it likes, and is done when a call returns or soon after. NCCL is not so
kind, and most machines that run tests have no GPU. `AsyncGloo` moves real data between real ranks over gloo, with these
properties of NCCL:

1. Operations match by their order on a communicator. Tags are ignored. Two operations whose messages have the same
   number of bytes read each other's data; other messages wait until the limit.
2. A call returns before its transfer. Until `wait()`, results are NaN (the largest value in integers), so that a
   program without the wait computes with NaN.
3. An input that changes, or a result that is written, between the call and `wait()` is an error (on NCCL: a race).
4. Sums are made in the dtype of the tensors, in the order of a ring: each addition in bfloat16 rounds to bfloat16.
5. Limits count from the call, not from `wait()`. After one, the communicator is aborted, and the process ends some
   time later.
6. Each group has a communicator of its own, created by its first operation. So has each pair of ranks that send and
   receive. Where the default group has a `bound_device_id`, a new group splits it, for which all ranks have to come.

One property differs: NCCL's `wait()` makes a stream wait, and not the host. The host has no streams, so `wait()` blocks
here. Results appear in `wait()`, or in the worker thread if the caller took the future: a program that never waits
reads NaN on every machine, however fast the transfer is.

The environment variable `SCALE_TEST_BACKEND=ordered` makes `run_ranks` use it in place of gloo; `nox -s ordered` runs
the tests of all packages so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from scale_core import compat
from scale_core.comm.group_state import group_state
from scale_core.testing.communicator import Communicator, OrderedWork, Parts, Together

BACKEND = "ordered"
"""The name of the backend, as in `init_process_group(BACKEND)`."""
BACKEND_VARIABLE = "SCALE_TEST_BACKEND"
"""The environment variable with the backend that `run_ranks` uses in place of gloo."""
_SPLIT = "the split of the default group's communicator"
_c10d = cast(Any, dist)
_ProcessGroup: Any = dist.ProcessGroup


def register() -> None:
    """Makes "ordered" a backend of torch.distributed in this process, for tensors on the host."""
    if BACKEND not in dist.Backend.backend_list:
        compat.keep_flight_recorder_off(BACKEND)
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def rank_backend(backend: str | None) -> str | None:
    """Returns the backend of ranks: `SCALE_TEST_BACKEND` in place of "gloo", registered; others as they are."""
    chosen = os.environ.get(BACKEND_VARIABLE, "gloo") if backend == "gloo" else backend
    if chosen == BACKEND:
        register()
    return chosen


def _create(options: Any, _: object) -> AsyncGloo:
    default = dist.distributed_c10d._world.default_pg
    if isinstance(default, AsyncGloo) and default.bound_device_id is not None:
        default.perform_nocolor_split(default.bound_device_id)
    return AsyncGloo(options.store, options.group_rank, options.group_size, options.timeout)


class AsyncGloo(_ProcessGroup):  # type: ignore[misc]  # torch's stubs know other overloads
    """A process group whose operations behave as on NCCL; see the head of this file.

    It is its own backend: torch asks `_get_backend(device)` for the limit and for whether a communicator can be split.
    `recv` from any rank and `batch_isend_irecv` of messages that cross are not supported.
    """

    supports_splitting = True
    supports_coalescing = False
    group_desc = ""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._timeout, self._name = store, timeout, ""
        self._communicators: dict[str, Communicator] = {}
        group_state(self).moves_host_tensors = True

    # What torch asks a backend.

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> AsyncGloo:
        if torch.device(device).type != "cpu" and device != self.bound_device_id:
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self

    @property
    def options(self) -> Any:
        return SimpleNamespace(_timeout=self._timeout)

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self.group_desc = desc

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        for communicator in self._communicators.values():
            communicator.timeout = timeout

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Creates the communicator now, as NCCL does where a device is bound."""
        self._communicator()

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Takes part in the split of this communicator; all ranks have to come, also ranks that are in no new group."""
        self._exchange_byte(_SPLIT).wait()

    def abort(self) -> None:
        for communicator in self._communicators.values():
            communicator.abort("the communicator was aborted")

    def shutdown(self) -> None:
        for communicator in self._communicators.values():
            communicator.close()

    def __del__(self) -> None:
        for communicator in getattr(self, "_communicators", {}).values():
            communicator.close()

    # Collectives.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> OrderedWork:
        (tensor,) = tensors
        sends = dict.fromkeys(self._ranks, tensor)
        return self._reduce("all_reduce", sends, tensor, _Combine.of(opts, self.size()), in_chunks=True)

    def reduce(self, tensors: list[Tensor], opts: Any) -> OrderedWork:
        (tensor,) = tensors
        if self.rank() == opts.rootRank:
            sends, combine = {self.rank(): tensor}, _Combine.of(opts, self.size())
            return self._reduce("reduce", sends, tensor, combine, in_chunks=True)
        return self._communicator().start("reduce", {opts.rootRank: tensor}, {})

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> OrderedWork:
        sends, combine = dict(enumerate(inputs[0])), _Combine.of(opts, self.size())
        return self._reduce("reduce_scatter", sends, outputs[0], combine, in_chunks=False)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> OrderedWork:
        return self.reduce_scatter([output], [list(input.view(-1).tensor_split(self.size()))], opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> OrderedWork:
        return self._all_to_all("all_gather", inputs * self.size(), outputs[0])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> OrderedWork:
        return self.allgather([list(output.view(-1).tensor_split(self.size()))], [input])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> OrderedWork:
        return self._all_to_all("all_to_all", inputs, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> OrderedWork:
        return self._all_to_all("all_to_all", self._rows(input, input_sizes), self._rows(output, output_sizes))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> OrderedWork:
        (tensor,), root = tensors, opts.rootRank
        if self.rank() == root:
            return self._communicator().start("broadcast", dict.fromkeys(self._peers, tensor), {})
        return self._communicator().start("broadcast", {}, {root: tensor}, [tensor], lambda received: [received[root]])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> OrderedWork:
        if self.rank() == opts.rootRank:
            return self._all_to_all("gather", {self.rank(): inputs[0]}, outputs[0])
        return self._communicator().start("gather", {opts.rootRank: inputs[0]}, {})

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> OrderedWork:
        sources: Sequence[Tensor] | Parts = inputs[0] if self.rank() == opts.rootRank else {}
        return self._all_to_all("scatter", sources, {opts.rootRank: outputs[0]})

    def barrier(self, opts: Any = None) -> OrderedWork:
        return self._exchange_byte("barrier")

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Together:
        return Together([self.allreduce([tensor], opts) for tensor in tensors])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Together:
        return Together([self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Together:
        return Together([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    # The names of torch before 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> OrderedWork:
        return self._pair(peer).start("send", {int(peer > self.rank()): tensors[0]}, {})

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> OrderedWork:
        (tensor,), source = tensors, int(peer > self.rank())
        return self._pair(peer).start("recv", {}, {source: tensor}, [tensor], lambda received: [received[source]])

    @property
    def _ranks(self) -> range:
        return range(self.size())

    @property
    def _peers(self) -> list[int]:
        return [rank for rank in self._ranks if rank != self.rank()]

    def _communicator(self) -> Communicator:
        """The communicator of all ranks; its first use waits for them, on the host, as NCCL's does."""
        if "all ranks" not in self._communicators:
            args = self._store, self.rank(), self.size(), self._timeout, "all ranks"
            self._communicators["all ranks"] = Communicator(*args)
        return self._communicators["all ranks"]

    def _pair(self, peer: int) -> Communicator:
        low, high = sorted((peer, self.rank()))
        title = f"the pair of ranks {low} and {high}"
        if title not in self._communicators:
            self._communicators[title] = Communicator(self._store, int(self.rank() == high), 2, self._timeout, title)
        return self._communicators[title]

    def _rows(self, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        return list(tensor.split(sizes) if sizes else tensor.tensor_split(self.size()))

    def _exchange_byte(self, op: str) -> OrderedWork:
        sends, receives = ({peer: torch.zeros(1, dtype=torch.uint8) for peer in self._peers} for _ in range(2))
        return self._communicator().start(op, sends, receives)

    def _all_to_all(self, op: str, sources: Sequence[Tensor] | Parts, targets: Sequence[Tensor] | Parts) -> OrderedWork:
        """Sends a part to each rank that has a source, and fills each target with the part of its rank."""
        sends, receives = (parts if isinstance(parts, dict) else dict(enumerate(parts)) for parts in (sources, targets))

        def finish(received: Parts) -> list[Tensor]:
            return [received[peer] for peer in receives]

        return self._communicator().start(op, sends, receives, list(receives.values()), finish)

    def _reduce(self, op: str, sends: Parts, output: Tensor, combine: _Combine, *, in_chunks: bool) -> OrderedWork:
        """Combines what all ranks send here, in the order of a ring, which ends at the rank that keeps a chunk."""

        def finish(received: Parts) -> list[Tensor]:
            rows = [received[rank].view(-1) for rank in self._ranks]
            if not in_chunks:
                return [combine.in_ring_order(rows, last=self.rank())]
            chunks = zip(*(row.tensor_split(self.size()) for row in rows), strict=True)
            return [torch.cat([combine.in_ring_order(chunk, last) for last, chunk in enumerate(chunks)])]

        return self._communicator().start(op, sends, dict.fromkeys(self._ranks, output), [output], finish)


class _Combine(NamedTuple):
    """How a reduction combines two summands, and by what it divides the sum."""

    combine: Callable[[Tensor, Tensor], Tensor]
    divisor: int

    @staticmethod
    def of(options: Any, size: int) -> _Combine:
        op = dist.ReduceOp.SUM if options is None else options.reduceOp
        for reduce_op, combine in _COMBINE.items():
            if op == reduce_op:
                return _Combine(combine, size if reduce_op == dist.ReduceOp.AVG else 1)
        raise NotImplementedError(f"{BACKEND}: expected one of {[str(reduce_op) for reduce_op in _COMBINE]}, got {op}")

    def in_ring_order(self, summands: Sequence[Tensor], last: int) -> Tensor:
        """Combines the summands of all ranks, by rank, in their dtype, beginning with the rank after `last`."""
        result = summands[(last + 1) % len(summands)]
        for step in range(2, len(summands) + 1):
            result = self.combine(result, summands[(last + step) % len(summands)])
        return result if self.divisor == 1 else result / self.divisor


_COMBINE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
