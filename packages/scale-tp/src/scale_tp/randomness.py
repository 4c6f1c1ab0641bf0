"""Random numbers that are the same on all ranks of a group, and others that differ.

What all ranks compute alike has to draw alike: initial weights, dropout outside of a divided layer. So the generators
of torch are seeded alike. What each rank computes for itself may draw from a stream of its own, which is put in their
place for as long as `fork` lasts, on the host and on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_core.compat import in_backward
from scale_tp.groups import get_model_parallel_rank

_MODEL_PARALLEL = "model-parallel-rng"
# What FairScale and Megatron add to the seed of a stream that differs between the ranks.
_OFFSET = 2718


class StreamState(NamedTuple):
    """Where a stream of random numbers stands.

    Attributes:
        host: State of the generator of the host.
        device: State of that of the current CUDA device; None where CUDA is not used.
    """

    host: Tensor
    device: Tensor | None


class RandomStreams:
    """Streams of random numbers by name, beside the one that torch's generators are at.

    The names of its methods are those of FairScale's and Megatron's tracker.
    """

    def __init__(self) -> None:
        self._states: dict[str, StreamState] = {}
        self._seeds: set[int] = set()
        self._replay: _Replay | None = None

    def reset(self) -> None:
        """Forgets all streams."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, StreamState]:
        """Where each stream stands, for a checkpoint."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, StreamState]) -> None:
        """Puts streams back to where they stood."""
        self._states = {name: StreamState(*state) for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Begins a stream; the numbers in it are those that follow `torch.manual_seed(seed)`.

        Raises:
            ValueError: There is one of this name, or of this seed, which would give the same numbers.
        """
        if seed in self._seeds:
            raise ValueError(f"seed {seed} already exists: two streams of one seed are the same numbers")
        if name in self._states:
            raise ValueError(f"cuda rng state {name} already exists: choose another name, or call reset()")
        before = _current()
        torch.manual_seed(seed)
        self._states[name] = _current()
        self._seeds.add(seed)
        _go_to(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Inside, random numbers come from a stream; outside, all goes on as if nothing had been drawn.

        Raises:
            KeyError: There is no such stream.
            RuntimeError: It is asked for in a backward pass, by a recomputation that does not know what was drawn.
        """
        if name not in self._states:
            known = ", ".join(map(repr, self._states)) or "none"
            raise KeyError(
                f"cuda rng state {name} is not added (there are: {known}): call "
                "scale_tp.model_parallel_cuda_manual_seed(seed), or add(name, seed)"
            )
        replay = self._replay
        if replay is None and in_backward():
            raise RuntimeError(
                f"the stream '{name}' is asked for in a recomputation, which would get other numbers than the forward "
                "did: checkpoint(function, ..., use_reentrant=False, context_fn=scale_tp.get_rng_tracker().replayed)"
            )
        before = _current()
        start = self._states[name] if replay is None else replay.start_of(name, self._states[name])
        _go_to(start)
        try:
            yield
        finally:
            if replay is None or not replay.again:
                self._states[name] = _current()
            _go_to(before)

    def replayed(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What to give `torch.utils.checkpoint.checkpoint` as `context_fn`, where streams are used inside.

        A recomputation then gets the numbers that the forward got, and no stream goes on by it.
        """
        first = _Replay()
        return self._using(first), self._using(first, again=True)

    @contextmanager
    def _using(self, replay: _Replay, *, again: bool = False) -> Iterator[None]:
        before = self._replay
        self._replay = _Replay(replay.starts, again=True) if again else replay
        try:
            yield
        finally:
            self._replay = before


class _Replay:
    """Where streams stood each time that a checkpointed function asked for one."""

    def __init__(self, starts: list[tuple[str, StreamState]] | None = None, *, again: bool = False) -> None:
        self.starts: list[tuple[str, StreamState]] = [] if starts is None else starts
        self.again = again
        self._next = 0

    def start_of(self, name: str, now: StreamState) -> StreamState:
        if not self.again:
            self.starts.append((name, now))
            return now
        if self._next >= len(self.starts) or self.starts[self._next][0] != name:
            raise RuntimeError(
                f"the recomputation asks for the stream '{name}' where the forward did not: a checkpointed function "
                "must do the same both times"
            )
        self._next += 1
        return self.starts[self._next - 1][1]


_streams = RandomStreams()


def get_rng_tracker() -> RandomStreams:
    """Returns the streams of this process."""
    return _streams


get_cuda_rng_tracker = get_rng_tracker
CudaRNGStatesTracker = RandomStreams


def model_parallel_manual_seed(seed: int) -> None:
    """Seeds torch's generators alike on all ranks, and a stream "model-parallel-rng" differently on each.

    Call it after `initialize_model_parallel`. Ranks that hold the same part of the model get the same stream.
    """
    _streams.reset()
    torch.manual_seed(seed)
    _streams.add(_MODEL_PARALLEL, seed + _OFFSET + get_model_parallel_rank())


model_parallel_cuda_manual_seed = model_parallel_manual_seed


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, without reentry, for a function that draws from streams."""
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=_streams.replayed)


def _current() -> StreamState:
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return StreamState(torch.get_rng_state(), device)


def _go_to(state: StreamState) -> None:
    torch.set_rng_state(state.host)
    if state.device is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state.device)
