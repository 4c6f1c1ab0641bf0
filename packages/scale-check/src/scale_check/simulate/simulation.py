"""One process simulates one rank of many: peak memory by kind, bytes sent, and the order of collectives.

Whether 175 billion parameters fit on 128 devices is a question about code: the real training step runs on tensors that
have sizes but no memory, among ranks that do not exist, and the simulation counts what one rank would have held and
sent. A change that keeps a buffer alive too long, or gathers twice, shows as other numbers. Where shards or optimizer
state are on the host, a simulated accelerator keeps the two memories apart.

On the simulated accelerator a model of torch's caching allocator allocates a block for every storage. So the simulation
also counts the memory that the allocator reserves, which is more than the tensors take.

Not counted: the transport's own buffers, the rounding of pinned host memory (up to the next power of two, unless
PYTORCH_ALLOC_CONF sets its `pinned_max_round_threshold_mb`), memory that is held until a side stream has caught up, and
values. Counted too much: while operators are watched, torch adds two gradients of one tensor into a third tensor, where
it would otherwise add in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from scale_check.simulate import ddp
from scale_check.simulate import fake_device as stand_in
from scale_check.simulate.caching_allocator import CachingAllocator
from scale_check.simulate.device_streams import StreamOrder
from scale_check.simulate.memory import Evidence, Memory, MemoryBlock, MemoryTracker, tensors_with_memory
from scale_check.simulate.races import Race, RaceChecker, RaceError
from scale_check.simulate.traffic import Collective, read_collective
from scale_core import compat
from scale_core.errors import ScaleError
from scale_core.flat.live_buffers import live_buffers
from scale_core.tree import tensors_in

_GIB = 2**30

# What is allocated while nothing more is known of it, by the phase that allocates it.
_GUESSES = {"forward": "activations", "backward": "temporaries", "step": "temporaries"}

# Operators that give a tensor other memory, or copy only its sizes; views aside, all others use the memory it has.
_NEED_NO_MEMORY = frozenset(
    f"aten::{name}"
    for name in (
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "resize_",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "new_zeros",
        "new_ones",
        "new_full",
        "zeros_like",
        "ones_like",
        "full_like",
    )
)

_ANSWERED_HERE = frozenset(("aten::is_set_to", "aten::is_pinned", "aten::_pin_memory", "aten::record_stream"))

# What scale_core.flat.buffer calls its buffers, and what they are here.
_FLAT_KINDS = {"shard": "parameters", "gathered": "gathered", "gradient": "reduction"}


class UseAfterReleaseError(ScaleError):
    """An operation was given a tensor whose memory was released by `resize_(0)`.

    See also: [what to do about a UseAfterReleaseError](../guides/troubleshooting.md#useafterreleaseerror).
    """

    # On a device it reads or writes memory of another tensor by then. Gather the buffer before it is used.


class Simulation(Memory):
    """What one rank holds and sends, filled while `simulate()` runs: the memory of `device`, and collectives.

    `on("cpu")` returns the memory of the host. On `device="sim"` it differs from the memory of the device.

    Kinds of memory are "parameters", "gradients" and "optimizer state", which on a sharded model are the local shards.
    "gathered" is for outputs of all-gathers, and for storages that are released and filled again; "reduction" is for
    inputs of reduce-scatters, "buffers" for buffers of modules. Other memory is "temporaries" if it is allocated in the
    backward pass or the step, for example by a recomputation, and "activations" if not. `label` names further kinds.

    Attributes:
        rank: The global rank that this process plays.
        world_size: The number of ranks of the world.
        device: Where the model computes: the host, or the stand-in for an accelerator.
        collectives: The collectives so far, in order.
        races: The races so far, where the simulation looks for them (`races=`).

    See also: [the guide to missing waits](../guides/races.md).
    """

    def __init__(
        self, rank: int, world_size: int, check: bool, device: torch.device, device_memory: int | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.collectives: list[Collective] = []
        self._check = check
        self._allocator = None if device.type == "cpu" else CachingAllocator(device_memory)
        super().__init__(MemoryTracker(self._allocator), self._claim_flat_buffers)
        # By type of device, the device itself first.
        self._memories = {device.type: self._tracker}
        self._memories.setdefault("cpu", MemoryTracker())
        self._stepping = 0
        self._aside = 0
        self._fake_mode = compat.active_fake_mode()
        self._checker: RaceChecker | None = None

    @property
    def races(self) -> list[Race]:
        return [] if self._checker is None else list(self._checker.races)

    @property
    def reserved_bytes(self) -> int:
        """The bytes that the device's caching allocator has reserved now, as in `torch.cuda.memory_reserved()`.

        Raises:
            ValueError: The simulation has only the host.
        """
        return self._caching_allocator().reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that it has reserved since `restart()`, as in `torch.cuda.max_memory_reserved()`.

        Raises:
            ValueError: The simulation has only the host.
        """
        return self._caching_allocator().peak_reserved_bytes

    @property
    def num_alloc_retries(self) -> int:
        """How often a full device made it free cached segments since `restart()`, as in `torch.cuda.memory_stats()`.

        Raises:
            ValueError: The simulation has only the host.
        """
        return self._caching_allocator().num_alloc_retries

    def empty_cache(self) -> None:
        """Gives reserved segments that no tensor uses back to the device, as `torch.cuda.empty_cache()` does.

        Raises:
            ValueError: The simulation has only the host.
        """
        self._caching_allocator()
        self._tracker.empty_cache()

    def compact(self) -> None:
        """Moves all tensors into new segments, as if nothing else had been allocated before.

        Use it after you have built and sharded a model as a whole, to see what a model needs that is built unit by unit
        or loaded shard by shard. Its shards don't take parts of the segments of full parameters. Call `restart()` next,
        which forgets the peak of the full model.

        Raises:
            ValueError: The simulation has only the host.
        """
        self._caching_allocator()
        self._tracker.compact()

    def _caching_allocator(self) -> CachingAllocator:
        if self._allocator is None:
            raise ValueError(
                "this simulation has only the host, which has no caching allocator: write "
                f"simulate(..., device='{compat.STAND_IN}') and make the model there"
            )
        return self._allocator

    def on(self, device: torch.device | str) -> Memory:
        """Returns the memory of the host, "cpu", or of `device`.

        Raises:
            ValueError: This simulation has no such device.
        """
        kind = str(device).split(":")[0]
        if kind not in self._memories:
            raise ValueError(
                f"this simulation has no memory on '{device}', but on {' and '.join(self._memories)}: "
                f"simulate(..., device='{compat.STAND_IN}') has one on '{compat.STAND_IN}' beside the host's"
            )
        return Memory(self._memories[kind], self._claim_flat_buffers)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """The bytes that this rank sent, by collective."""
        sent: Counter[str] = Counter()
        for collective in self.collectives:
            sent[collective.op] += collective.bytes_sent
        return dict(sent)

    def label(self, tensor: Tensor, kind: str) -> None:
        """Books a tensor's storage under `kind`, from its beginning to its end, whatever else it turns out to be."""
        self._claim([tensor], kind, Evidence.LABEL)

    def restart(self) -> None:
        """Forgets peak and collectives so far, but not what lives: call it between two steps to measure the second.

        Do not measure the first step: an optimizer's state exists only from its first step on.
        """
        self._claim_flat_buffers()
        self.collectives.clear()
        for tracker in self._memories.values():
            tracker.restart()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, tensors are real and nothing is booked: for code that asks for values, such as a `DeviceMesh`."""
        with self._not_counting(), compat.without_fake_tensors():
            yield

    def report(self) -> str:
        """A table of the peak by kind, for each memory, and of what was sent, by collective and phase."""
        lines = []
        for name in self._memories:
            memory = self.on(name)
            where = f" on {name}" if len(self._memories) > 1 else ""
            lines += [f"{f'rank {self.rank} of {self.world_size}{where}':<32}{'GiB':>12}"]
            lines += [f"  {kind:<30}{size / _GIB:12.3f}" for kind, size in memory.peak_by_kind.items()]
            lines += [f"  {'peak':<30}{memory.peak_bytes / _GIB:12.3f}"]
            if self._allocator is not None and name != "cpu":
                lines += [f"  {'reserved by the allocator':<30}{self.peak_reserved_bytes / _GIB:12.3f}"]
        lines += [f"{'sent':<32}{'GiB':>12}{'calls':>8}"]
        sent: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for collective in self.collectives:
            row = f"{collective.op} in {collective.phase}"
            sent[row] += collective.bytes_sent
            calls[row] += 1
        lines += [f"  {row:<30}{sent[row] / _GIB:12.3f}{count:8}" for row, count in calls.items()]
        return "\n".join(lines)

    # From here on: what the hooks of `simulate` call.

    @contextmanager
    def _not_counting(self) -> Iterator[None]:
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    def _close(self) -> None:
        for tracker in self._memories.values():
            tracker.close()

    def _tracker_of(self, kind: str) -> MemoryTracker:
        return self._memories["cpu"] if kind == "cpu" else self._tracker

    def _observe(self, tensor: Tensor, guess: str, made_by: str = "") -> MemoryBlock:
        return self._tracker_of(tensor.device.type).observe(tensor.untyped_storage(), guess, made_by)

    def _phase(self) -> str:
        if self._stepping:
            return "step"
        return "backward" if compat.graph_task_id() != -1 else "forward"

    def _run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs one operator and counts what it takes, makes and sends."""
        name = operator.name()
        if self._aside or name.startswith("prim::") or compat.active_fake_mode() is not self._fake_mode:
            return operator(*args, **kwargs)
        if name in _ANSWERED_HERE:
            return self._answer(name, *args)
        if name == "aten::_to_copy" and self.device.type != "cpu":
            compat.forget_value(args[0])  # It has no kernel for it on the device.
        phase = self._phase()
        self._look_at_inputs(operator, (*args, *kwargs.values()), _GUESSES[phase])
        sends = name.startswith(("c10d::", "_c10d_functional::"))
        if sends:
            collective = read_collective(name, args, rank=self.rank, phase=phase, check=self._check)
            if collective is None:
                if self._checker is not None:
                    self._checker.wait_functional(args[0])
                # torch's own stand-in for a wait makes a new tensor, which the real one does not.
                return args[0]
            self.collectives.append(collective)
        # torch keeps results of fake operators by their arguments, and would keep a storage that is one of them alive.
        with compat.without_fake_cache() if name.startswith("aten::set_.source_Storage") else nullcontext():
            result = operator(*args, **kwargs)
        for tensor in tensors_with_memory(result):
            block = self._observe(tensor, _GUESSES[phase], f"{name} in {phase}")
            if tensor.device.type == "cpu" and (kwargs.get("pin_memory") or _brings_to_host(name, args, kwargs)):
                block.pinned = True
        if sends:
            self._claim_buffers(name, args, result)
        if self._checker is not None:
            self._checker.run(operator, args, kwargs, result, needs=name not in _NEED_NO_MEMORY)
        return result

    def _answer(self, name: str, tensor: Tensor, *args: Any) -> Any:
        """What is asked of a tensor that torch does not know of fake ones."""
        if name == "aten::is_set_to":
            return _is_set_to(tensor, *args)
        if name == "aten::is_pinned":
            return self._is_pinned(tensor)
        if name == "aten::_pin_memory":
            with _OperatorMode(self):
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, pin_memory=True
                ).copy_(tensor)
        if self._checker is not None:
            self._checker.record_stream(tensor, *args)
        return None

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and self._observe(tensor, "temporaries").pinned

    def _look_at_inputs(self, operator: Any, arguments: Iterable[Any], guess: str) -> None:
        uses_memory = self._check and not operator.is_view and operator.name() not in _NEED_NO_MEMORY
        for tensor in tensors_with_memory(arguments):
            block = self._observe(tensor, guess)
            if block.released and uses_memory and tensor.numel():
                raise UseAfterReleaseError(
                    f"{operator.name()} in {self._phase()} got a tensor {tuple(tensor.shape)} of {tensor.dtype} whose "
                    f"storage was released ({block.kind}): gather it before it is used, or release it later"
                )

    def _claim_buffers(self, name: str, args: Sequence[Any], result: Any) -> None:
        functional = name.startswith("_c10d")
        if "allgather" in name or "all_gather" in name:
            self._claim(tensors_with_memory(result if functional else args[0]), "gathered", Evidence.TRAFFIC)
        elif "reduce_scatter" in name:
            self._claim(tensors_with_memory(args[0] if functional else args[1]), "reduction", Evidence.TRAFFIC)

    def _claim(self, tensors: Iterable[Tensor | None], kind: str, evidence: Evidence) -> None:
        for tensor in tensors:
            if tensor is None:
                continue
            for inner in compat.inner_tensors(tensor):
                if inner.device.type != "meta":
                    self._tracker_of(inner.device.type).claim(inner.untyped_storage(), kind, evidence)

    def _claim_flat_buffers(self) -> None:
        # What an optimizer never sees, such as the shards of frozen units, only `flat.buffer` can tell. A buffer that
        # was made outside of this simulation is none of its business.
        for kind, tensor in live_buffers():
            if self._tracker_of(tensor.device.type).knows(tensor.untyped_storage()):
                self._claim([tensor], _FLAT_KINDS[kind], Evidence.OPTIMIZER)

    def _resized(self, storage: torch.UntypedStorage, bytes_before: int) -> None:
        # A fake storage does not say where it is, but the tracker of its memory knows one that was made here.
        known = (tracker for tracker in self._memories.values() if tracker.knows(storage))
        tracker = next(known, None) or self._tracker_of(storage.device.type)
        tracker.resized(storage, bytes_before, _GUESSES[self._phase()])
        if self._checker is not None:
            self._checker.resized(storage, bytes_before, is_on_host=tracker is self._memories["cpu"])

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if self._fake_mode is not None:
            ddp.prepare(module)
        self._claim(module._parameters.values(), "parameters", Evidence.MODULE)
        self._claim(module._buffers.values(), "buffers", Evidence.MODULE)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping += 1
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._claim(params, "parameters", Evidence.OPTIMIZER)
        self._claim([param.grad for param in params], "gradients", Evidence.OPTIMIZER)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping -= 1
        for state in optimizer.state.values():
            self._claim(tensors_in(state), "optimizer state", Evidence.OPTIMIZER)


@contextmanager
def simulate(
    rank: int = 0,
    world_size: int = 1,
    *,
    fake: bool = True,
    check: bool = True,
    device: str = "cpu",
    device_memory: int | None = None,
    races: bool | Literal["collect"] = False,
    backward_thread: bool = False,
) -> Iterator[Simulation]:
    """Inside, this process is one rank of a world of which no other rank exists.

    The default process group is torch's "fake" one: collectives return at once and move nothing. Build the model, run
    two steps and read what was counted; state that an optimizer makes at its first step counts from the second on.

        >>> with simulate(rank=0, world_size=128) as sim:
        ...     layer = torch.nn.Linear(20_000, 20_000, bias=False)
        ...     torch.distributed.all_reduce(layer.weight.data)
        >>> sim.peak_bytes
        1600000000
        >>> sim.bytes_sent
        {'all_reduce': 3175000000}

    Args:
        rank: The rank to play.
        world_size: How many ranks there are.
        fake: Tensors have sizes but no memory. With False they are real, as large as they look; the counts are the
            same to the byte, but the values are wrong wherever they depend on other ranks.
        check: Raise where an operation uses memory that was released, or a collective's buffers do not fit.
        device: Where the model computes. "cpu" is the host, and all is in one memory. "sim" stands in for an
            accelerator, which has a memory of its own: tensors come there by `device="sim"`, as they would by
            `device="cuda"`. The process keeps this device type, but has no such accelerator outside.
        device_memory: On "sim", the bytes of the accelerator. If they are all reserved, the caching allocator frees the
            segments that it keeps for later. A program that needs more goes on, with `peak_reserved_bytes` above it.
        races: On "sim", raise where two streams, collectives or host threads use the same memory and nothing puts the
            two uses in an order. With "collect" nothing is raised; `Simulation.races` has all that was found.
        backward_thread: On "sim", run each backward pass in a thread of its own, as torch does on an accelerator.

    Raises:
        ValueError: The rank or the device does not exist; real tensors on the stand-in; races on the host. Inside:
            buffers that do not fit a collective.
        RuntimeError: There is a default process group already, or torch is not of the version that this needs. For
            the stand-in: there is a real accelerator, whose place it would take.
        UseAfterReleaseError: Inside: an operation was given released memory.
        RaceError: Inside, or at the end: two uses of the same memory have no order.

    See also: [the guide to missing waits](../guides/races.md).
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"expected a rank from 0 to {world_size - 1} in a world of {world_size}, got rank {rank}")
    if device not in ("cpu", compat.STAND_IN):
        raise ValueError(f"simulate: expected device to be 'cpu' or '{compat.STAND_IN}', got {device!r}")
    if device == compat.STAND_IN and not fake:
        raise ValueError(
            f"simulate: '{device}' is not a real device, so its tensors can't be real: leave fake=False out, "
            "or simulate on device='cpu'"
        )
    if device == "cpu" and device_memory is not None:
        raise ValueError(
            f"simulate: device_memory= is the memory of an accelerator, and device='cpu' has none: write "
            f"device='{compat.STAND_IN}', or leave it out"
        )
    if device == "cpu" and (races or backward_thread):
        raise ValueError(
            f"simulate: the host has no streams to order: write simulate(..., device='{compat.STAND_IN}', races=True)"
        )
    with ExitStack() as stack:
        here = torch.device("cpu") if device == "cpu" else stack.enter_context(stand_in.available(backward_thread))
        stack.enter_context(compat.fake_default_group(rank, world_size, device))
        if fake:
            stack.enter_context(compat.fake_tensors())
        simulation = Simulation(rank, world_size, check, here, device_memory)
        if races:
            stack.enter_context(_looking_for_races(simulation, raises=races is True))
        yield stack.enter_context(track_memory(simulation))


@contextmanager
def _looking_for_races(simulation: Simulation, raises: bool) -> Iterator[None]:
    order = StreamOrder()
    simulation._checker = checker = RaceChecker(order, simulation._is_pinned, raises)
    handles = compat.watching_waits(checker.wait, get_future=checker.future, is_completed=checker.is_completed)
    with order.activated(), handles:
        try:
            yield
        finally:
            checker.close()
        if raises and checker.races:  # One that nobody could raise, or that a hook has kept to itself.
            raise RaceError(checker.races[0])


@contextmanager
def track_memory(simulation: Simulation) -> Iterator[Simulation]:
    """Inside, the bytes that this process takes and sends are counted, also of real tensors among real ranks."""
    with ExitStack() as stack:
        stack.callback(simulation._close)
        stack.enter_context(compat.watching_resizes(simulation._resized))
        # DTensor computes shapes of results with fake tensors of the full size, which a real run does not allocate.
        stack.enter_context(compat.around_dtensor_shapes(simulation._not_counting))
        # Backward passes run on this thread, in one order, and an error in them keeps its traceback.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.callback(register_module_forward_pre_hook(simulation._before_forward).remove)
        stack.callback(register_optimizer_step_pre_hook(simulation._before_step).remove)
        stack.callback(register_optimizer_step_post_hook(simulation._after_step).remove)
        stack.enter_context(_OperatorMode(simulation))
        yield simulation


class _OperatorMode(TorchDispatchMode):
    """Shows every operator on plain tensors to the simulation."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(compat.is_wrapper, types)):
            return NotImplemented  # a wrapper such as DTensor: its own operators on plain tensors come by afterwards
        return self._simulation._run(func, args, kwargs or {})


def _brings_to_host(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator is `tensor.to("cpu", non_blocking=True)` of a device, whose result torch pins."""
    return name == "aten::_to_copy" and bool(kwargs.get("non_blocking")) and args[0].device.type != "cpu"


def _is_set_to(tensor: Tensor, other: Tensor) -> bool:
    def place(tensor: Tensor) -> tuple[object, ...]:
        return id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()

    return place(tensor) == place(other)
