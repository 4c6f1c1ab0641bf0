"""Random numbers that are the same on all ranks of a group, and others that differ.

What all ranks compute alike has to draw alike: initial weights, dropout outside of a divided layer. So the generators
of torch are seeded alike. What each rank computes for itself may draw from a stream of its own, which is put in their
place for as long as `fork` lasts, on the host and on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scale_core import compat
from scale_core.comm.group import Group
from scale_core.compat import in_backward
from scale_core.part_hooks import ForEachPart
from scale_tp.parallel_state import get_model_parallel_rank


class StreamState(NamedTuple):
    """Where a stream of random numbers stands.

    Attributes:
        host: State of the generator of the host.
        device: State of that of a CUDA device; None where CUDA is not used.
    """

    host: Tensor
    device: Tensor | None

    def equals(self, other: StreamState) -> bool:
        """Whether the same numbers come next."""
        if self.device is None or other.device is None:
            return self.device is other.device and torch.equal(self.host, other.host)
        return torch.equal(self.host, other.host) and torch.equal(self.device, other.device)


def random_state(device: torch.device | None = None) -> StreamState:
    """Returns where the random numbers stand.

    Args:
        device: Whose numbers are about to be drawn; None is the current CUDA device, where there is one.
    """
    if device is None:
        return StreamState(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None)
    return StreamState(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)


def go_to(state: StreamState, device: torch.device | None = None) -> None:
    """Puts the random numbers back to where they stood.

    Args:
        state: As `random_state` gave it; without CUDA, what it says of a device is left out.
        device: As it was given to `random_state`.
    """
    torch.set_rng_state(state.host)
    if state.device is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state.device, "cuda" if device is None else device)


_MODEL_PARALLEL = "model-parallel-rng"
# What FairScale and Megatron add to the seed of a stream that differs between the ranks.
_OFFSET = 2718


class RandomStreams:
    """Streams of random numbers by name, beside the one that torch's generators are at.

    The names of its methods are those of FairScale's and Megatron's tracker.
    """

    def __init__(self) -> None:
        self._states: dict[str, StreamState] = {}
        self._seeds: set[int] = set()
        self._replay: _Replay | None = None
        self._inside: list[str] = []  # The streams that are being drawn from, the innermost last.

    def reset(self) -> None:
        """Forgets all streams."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, StreamState]:
        """Where each stream stands, for a checkpoint."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, StreamState]) -> None:
        """Puts streams back to where they stood.

        Raises:
            TypeError: A state is none of those that `get_states` gives.
        """
        for name, state in states.items():
            given: object = state
            if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], torch.Tensor)):
                raise TypeError(
                    f"expected the state of the stream '{name}' to be one that get_states() gives, of the host and of "
                    f"the device, got {type(given).__name__}: FairScale and Megatron keep that of one generator alone, "
                    "from which the streams can't go on; begin them anew, scale_tp.model_parallel_manual_seed(seed)"
                )
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
        before = random_state()
        torch.manual_seed(seed)
        self._states[name] = random_state()
        self._seeds.add(seed)
        go_to(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Inside, random numbers come from a stream; outside, all goes on as if nothing had been drawn.

        Within each other, forks of one name go on with one stream.

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
        again = replay is not None and replay.again
        before, outer = random_state(), self._inside[-1] if self._inside and not again else None
        if outer is not None:
            self._states[outer] = before
        fork = _Fork(name, self._states[name]) if replay is None else replay.fork(name, self._states[name])
        self._inside.append(name)
        go_to(fork.start)
        try:
            yield
        finally:
            self._inside.pop()
            if not again:
                self._states[name] = random_state()
                # A fork of the same name around this one goes on behind what was drawn here.
                fork.end = None if outer is None else self._states.get(outer)
            go_to(before if fork.end is None else fork.end)

    def replayed(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What to give `torch.utils.checkpoint.checkpoint` as `context_fn`, where streams are used inside.

        A recomputation then gets the numbers that the forward got, and no stream goes on by it.
        """
        first = _Replay()
        return self._using(first), self._using(first, again=True)

    @contextmanager
    def _using(self, replay: _Replay, *, again: bool = False) -> Iterator[None]:
        before = self._replay
        self._replay = _Replay(replay.forks, again=True) if again else replay
        try:
            yield
        finally:
            self._replay = before


@dataclass
class _Fork:
    """One time that a stream was asked for.

    Attributes:
        name: Which one.
        start: Where it stood.
        end: Where the numbers around go on; None is where they stood before.
    """

    name: str
    start: StreamState
    end: StreamState | None = None


class _Replay:
    """Each time that a checkpointed function asked for a stream."""

    def __init__(self, forks: list[_Fork] | None = None, *, again: bool = False) -> None:
        self.forks: list[_Fork] = [] if forks is None else forks
        self.again = again
        self._next = 0

    def fork(self, name: str, now: StreamState) -> _Fork:
        if not self.again:
            self.forks.append(_Fork(name, now))
            return self.forks[-1]
        if self._next >= len(self.forks) or self.forks[self._next].name != name:
            raise RuntimeError(
                f"the recomputation asks for the stream '{name}' where the forward did not: a checkpointed function "
                "must do the same both times"
            )
        self._next += 1
        return self.forks[self._next - 1]


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


# Random numbers inside of what is divided: each rank draws its own, and outside all of them go on alike.
#
# What ranks compute alike has to drop alike. But where heads, features or positions are divided, ranks draw other
# numbers, and how many depends on what each has. So on the way in a seed is drawn, the same one on all ranks; inside,
# each goes on from that seed and its own number; on the way out all go back to where they stood when they went in. A
# recomputation that begins from the same random state draws the same.


class DividedRandomness(ForEachPart):
    """The random numbers of one part of a model that ranks divide.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._wanted = False
        self._outside: StreamState | None = None

    def before(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook of the module that holds the part: where nothing is dropped, nothing has to be drawn."""
        self._wanted = drops(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of that module, for what has not been left, as after an error."""
        self.leave()

    def enter_if_wanted(self) -> None:
        """Goes on with numbers of this rank's own, if something may be dropped; within, nothing happens."""
        if self._wanted and self._outside is None:
            self.enter()

    def enter(self) -> None:
        """Goes on with numbers of this rank's own."""
        drawn = torch.randint(1 << 52, (1,), dtype=torch.float64)
        seed = int(compat.values_of(drawn, simulated=[0.0])[0])
        self._outside = random_state()
        torch.manual_seed(seed * self.group.size + self.group.rank)

    def leave(self) -> None:
        """Goes back to the numbers that all ranks draw alike; without `enter` nothing happens."""
        outside, self._outside = self._outside, None
        if outside is not None:
            go_to(outside)

    def forget(self) -> None:
        """Takes it that nothing has been entered, as where a recomputation has ended without leaving."""
        self._outside = None

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "_wanted": False, "_outside": None}


def drops(module: nn.Module) -> bool:
    """Whether a module in training may drop something: by a dropout or an attribute that says how much."""
    if not module.training:
        return False
    return any(_drops_itself(below) for below in module.modules() if below.training)


def _drops_itself(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any(
        name.find("drop") >= 0 and isinstance(value, float) and value > 0 for name, value in vars(module).items()
    )
