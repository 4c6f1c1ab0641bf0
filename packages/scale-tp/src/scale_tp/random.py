"""Random number streams that are the same on all ranks of a group, and others that differ.

Equal results on all ranks need equal random numbers: initial weights, dropout outside of a divided layer. So the
generators of torch get equal seeds. A rank's own results may draw from a stream of its own, which takes their place
inside of `fork`, on the host and on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scale_core import compat
from scale_core.arguments import checked_arguments
from scale_core.comm.group import Group
from scale_core.device.rng import get_device_state, set_device_state
from scale_core.hooks.autograd import in_backward
from scale_core.hooks.module_parts import ForEachShardHook
from scale_tp.parallel_state import get_tensor_model_parallel_rank


class RNGState(NamedTuple):
    """The state of the generator of the host and, where there is an accelerator, of the generator of a device."""

    host: Tensor
    device: Tensor | None

    def equals(self, other: RNGState) -> bool:
        """Whether the same numbers come next."""
        if self.device is None or other.device is None:
            return self.device is other.device and torch.equal(self.host, other.host)
        return torch.equal(self.host, other.host) and torch.equal(self.device, other.device)


def get_rng_state(device: torch.device | None = None) -> RNGState:
    """Returns the state of the generators; a device says whose numbers are about to be drawn, None the current one."""
    accelerator = _with_generator(device)
    of_device = None if accelerator is None else get_device_state(accelerator)
    return RNGState(torch.get_rng_state(), of_device)


def set_rng_state(state: RNGState, device: torch.device | None = None) -> None:
    """Sets the generators to the state of `get_rng_state`; without an accelerator, only the generator of the host."""
    torch.set_rng_state(state.host)
    accelerator = _with_generator(device)
    if state.device is not None and accelerator is not None:
        set_device_state(accelerator, state.device)


def _with_generator(device: torch.device | None) -> torch.device | None:
    """The accelerator whose generator is meant; None on the host and in a simulation."""
    device = compat.accelerator() if device is None else compat.with_index(device)
    return None if device is None or device.type in ("cpu", "meta", compat.STAND_IN) else device


_MODEL_PARALLEL = "model-parallel-rng"
# FairScale and Megatron add this to the seed of a stream that differs between the ranks.
_OFFSET = 2718


class RNGStatesTracker:
    """Streams of random numbers by name, with the methods of FairScale's and Megatron's `CudaRNGStatesTracker`.

    A snapshot takes it as an object with a state on each rank:

        scale_snapshot.save(directory, step, {"model": model, "random": RandomState(), "streams": get_rng_tracker()})

    Examples:
        >>> import torch
        >>> from scale_tp.random import CudaRNGStatesTracker
        >>> tracker = CudaRNGStatesTracker()
        >>> tracker.add("dropout", 7)
        >>> with tracker.fork("dropout"):
        ...     first = torch.rand(2)
        >>> sorted(tracker.get_states())
        ['dropout']

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    is_per_rank = True

    def __init__(self) -> None:
        self._states: dict[str, RNGState] = {}
        self._seeds: set[int] = set()
        self._replay: _Replay | None = None
        self._inside: list[str] = []  # The streams that are being drawn from, the innermost last.

    def reset(self) -> None:
        """Forgets all streams."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, RNGState]:
        """Returns the state of each stream, for a checkpoint."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, RNGState]) -> None:
        """Sets the streams to states of `get_states`.

        Raises:
            TypeError: A state is none of those that `get_states` gives.
        """
        for name, state in states.items():
            argument: object = state
            if not (isinstance(argument, tuple) and len(argument) == 2 and isinstance(argument[0], torch.Tensor)):
                raise TypeError(
                    f"expected the state of the stream '{name}' to be one that get_states() gives, of the host and of "
                    f"the device, got {type(argument).__name__}: FairScale and Megatron keep only the "
                    "state of one generator, from which the streams can't go on. Restart the streams: "
                    "scale_tp.model_parallel_manual_seed(seed)"
                )
        self._states = {name: RNGState(*state) for name, state in states.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the streams and their seeds, for a snapshot; copies, so that drawing does not change them."""
        states = {name: state._asdict() for name, state in self._states.items()}
        return {"states": states, "seeds": sorted(self._seeds)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the streams to the states in a `state_dict`, in place of any others.

        Raises:
            ValueError: It is none of those that `state_dict` gives.
        """
        try:
            states = {name: RNGState(**state) for name, state in state_dict["states"].items()}
            seeds = set(state_dict["seeds"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                "expected the streams and seeds that state_dict() of a tracker gives: give what get_states() gave to "
                "set_states()"
            ) from error
        self._states, self._seeds = states, seeds

    def add(self, name: str, seed: int) -> None:
        """Begins a stream; the numbers in it are those that follow `torch.manual_seed(seed)`.

        Raises:
            ValueError: There is one of this name, or of this seed, which would give the same numbers.
        """
        if seed in self._seeds:
            raise ValueError(f"seed {seed} already exists: two streams of one seed are the same numbers")
        if name in self._states:
            raise ValueError(f"cuda rng state {name} already exists: choose another name, or call reset()")
        before = get_rng_state()
        torch.manual_seed(seed)
        self._states[name] = get_rng_state()
        self._seeds.add(seed)
        set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Inside, random numbers come from a stream; outside, all goes on as if nothing had been drawn.

        Nested forks of the same name continue one stream.

        Raises:
            KeyError: The stream does not exist.
            RuntimeError: It is asked for in a backward pass, by a recomputation that does not know the drawn numbers.
        """
        if name not in self._states:
            state_names = ", ".join(map(repr, self._states)) or "none"
            raise KeyError(
                f"cuda rng state {name} is not added (there are: {state_names}): call "
                "scale_tp.megatron.model_parallel_cuda_manual_seed(seed), or add(name, seed)"
            )
        replay = self._replay
        if replay is None and in_backward():
            raise RuntimeError(
                f"the stream '{name}' is asked for in a recomputation, which would get other numbers than the forward "
                "did: checkpoint(function, ..., use_reentrant=False, "
                "context_fn=scale_tp.random.get_rng_tracker().replayed)"
            )
        again = replay is not None and replay.again
        before, outer = get_rng_state(), self._inside[-1] if self._inside and not again else None
        if outer is not None:
            self._states[outer] = before
        fork = _Fork(name, self._states[name]) if replay is None else replay.fork(name, self._states[name])
        self._inside.append(name)
        set_rng_state(fork.start)
        try:
            yield
        finally:
            self._inside.pop()
            if not again:
                self._states[name] = get_rng_state()
                # A fork of the same name around this one goes on after the numbers drawn here.
                fork.end = None if outer is None else self._states.get(outer)
            set_rng_state(before if fork.end is None else fork.end)

    def replayed(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The `context_fn` for `torch.utils.checkpoint.checkpoint`, if streams are used inside.

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
    """One fork of a stream."""

    name: str
    start: RNGState  # of the stream
    end: RNGState | None = None  # of the numbers around, where they go on; None is where they stood before


@dataclass
class _Replay:
    """The forks of a checkpointed function, which its recomputation repeats (`again`)."""

    forks: list[_Fork] = field(default_factory=list)
    again: bool = False
    _next: int = 0

    def fork(self, name: str, now: RNGState) -> _Fork:
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


_tracker = RNGStatesTracker()


def get_rng_tracker() -> RNGStatesTracker:
    """Returns the tracker of this process.

    Examples:
        >>> import torch
        >>> from scale_tp import model_parallel_manual_seed
        >>> from scale_tp.random import get_rng_tracker
        >>> model_parallel_manual_seed(1)
        >>> with get_rng_tracker().fork():  # a stream of this rank
        ...     noise = torch.rand(2)

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return _tracker


get_cuda_rng_tracker = get_rng_tracker
CudaRNGStatesTracker = RNGStatesTracker


@checked_arguments
def model_parallel_manual_seed(seed: int) -> None:
    """Seeds torch's generators equally on all ranks, and a stream "model-parallel-rng" differently on each.

    Call it after `initialize_model_parallel`. Ranks that hold the same part of the model get the same stream.

    Examples:
        >>> import torch
        >>> from scale_tp import model_parallel_manual_seed
        >>> from scale_tp.random import get_rng_tracker
        >>> model_parallel_manual_seed(1)  # torch draws the same numbers on all ranks
        >>> with get_rng_tracker().fork():  # and in here others on each rank
        ...     noise = torch.rand(2)

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + _OFFSET + get_tensor_model_parallel_rank())


model_parallel_cuda_manual_seed = model_parallel_manual_seed


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, without reentry, for a function that draws from streams.

    Examples:
        >>> import torch
        >>> from scale_tp import checkpoint
        >>> layer = torch.nn.Linear(4, 4)
        >>> checkpoint(layer, torch.ones(2, 4, requires_grad=True)).sum().backward()

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=_tracker.replayed)


# Random numbers inside of a divided region: each rank draws its own, and outside all ranks go on with equal numbers.
#
# Where heads, features or positions are divided, ranks draw different numbers, and a number of them that depends on
# their part. So on the way in a seed is drawn, the same one on all ranks; inside, each goes on from that seed and its
# own number; on the way out all go back to the state of the way in. A recomputation from the same random state draws
# the same.


class RegionRNG(ForEachShardHook):
    """The random numbers of one part of a model that ranks divide."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._needed = False
        self._outside: RNGState | None = None

    def pre_forward(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the module that holds the part: where nothing is dropped, nothing has to be drawn."""
        self._needed = has_dropout(module)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of that module: the region may not have been left, as after an error."""
        self.exit()

    def enter_if_needed(self) -> None:
        """Goes on with numbers of this rank's own, if something may be dropped and it does not do so already."""
        if self._needed and self._outside is None:
            self.enter()

    def enter(self) -> None:
        """Goes on with numbers of this rank's own."""
        drawn = torch.randint(1 << 52, (1,), dtype=torch.float64)
        seed = int(compat.values_of(drawn, simulated=[0.0])[0])
        self._outside = get_rng_state()
        torch.manual_seed(seed * self.group.size + self.group.rank)

    def exit(self) -> None:
        """Goes back to the numbers that are equal on all ranks; without `enter` nothing happens."""
        outside, self._outside = self._outside, None
        if outside is not None:
            set_rng_state(outside)

    def reset(self) -> None:
        """Forgets that it was entered, as where a recomputation has ended inside."""
        self._outside = None

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "_needed": False, "_outside": None}


def may_drop(module: nn.Module) -> bool:
    """Whether a module has a dropout or an attribute that says how much is dropped, be it nothing by now."""
    return any(_drop_rate(below) is not None for below in module.modules())


def has_dropout(module: nn.Module) -> bool:
    """Whether a module in training may drop something now."""
    return module.training and any(below.training and _drop_rate(below) for below in module.modules())


def _drop_rate(module: nn.Module) -> float | None:
    """The largest probability with which a module drops by itself; None where it has none."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    rates = [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
    return max(rates, default=None)
