"""torch's private functions, and differences of its versions: one function each.

No other file asks for a version. Where another file uses a name with an underscore, it has been the same over many
versions: an attribute of tensors or modules (`_version`, `_parameters`), a `_foreach` operator, a dispatch mode. Only
the simulated accelerator has a file of its own, `simulate.fake_device`.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_TORCH = "2.13"
"""The torch version, as major.minor, on which everything is tested and measured."""
SIMULATED_TORCH = (2, 11), (2, 15)
"""The oldest and the newest torch version, as major and minor, whose private parts simulations were tested with."""

STAND_IN = "sim"
"""The type of the device that stands in for an accelerator in a simulation."""

_HOST = torch.device("cpu")

# The autograd engine: a callback at the end of the backward pass that runs now; the number of the pass that
# runs on this thread, -1 outside of one; the number that the next operation's node gets.
queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
# The hooks that saved tensors go through, None without any: a checkpoint that isn't reentrant has them in its forward.
saved_tensor_hooks: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks
# Whether torch.profiler records now. If it ends while gloo still carries a collective that was started under it, torch
# 2.13 writes to memory that the profiler has freed, and the process crashes later.
profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled
# In place of a `record_function` while none records: making one takes 100 times as long as asking.
NO_RANGE: AbstractContextManager[object] = nullcontext()


def all_gather_single(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Any:
    """Starts torch's all-gather of [S] into [W * S]; torch 2.13 renamed it and deprecated the old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, shard, group=group, async_op=True)


def reduce_scatter_single(output: Tensor, full: Tensor, group: dist.ProcessGroup) -> Any:
    """Starts torch's reduce-scatter (sum) of [W * S] into [S]; torch 2.13 renamed it and deprecated the old name."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, full, group=group, async_op=True)


def control_device(group: dist.ProcessGroup, wished: torch.device = _HOST) -> torch.device:
    """The device of small control messages: the wished one if the group can reach it, else the host."""
    return wished if wished.type in _device_types(group) else _HOST


def nccl_trace() -> list[dict[str, Any]]:
    """The collectives on NCCL in torch's flight recorder that have not ended; [] without one."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None) if dist.is_available() else None
    if dump is None:
        return []
    try:
        # Pickled by torch in this process, a moment ago.
        trace = pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=True))
    except Exception:  # It only adds to an error, whatever it says in this version of torch.
        return []
    entries: list[dict[str, Any]] = trace.get("entries", []) if isinstance(trace, dict) else []
    return entries


def gloo_twin(group: dist.ProcessGroup, limit: timedelta, purpose: str, default_limit: timedelta) -> dist.ProcessGroup:
    """Returns a new gloo process group of the same ranks; all of them call this together, once for each purpose.

    Args:
        group: The process group with the ranks.
        limit: For the ranks to meet.
        purpose: A part of the keys in the store.
        default_limit: Of the new group's operations.
    """
    # It lives while it is referenced, and is in none of torch's lists: torch names new groups by how many
    # there are on a rank, so ranks that are in different numbers of groups could not make one when they need it.
    c10d = cast(Any, dist)
    store, rank, size = _twin_store(group, purpose), group.rank(), group.size()
    store.set(f"{_ARRIVED}{rank}", "")
    gloo = c10d.ProcessGroupGloo(store, rank, size, limit)
    gloo._set_default_timeout(default_limit)
    twin = c10d.ProcessGroup(store, rank, size)
    kind = c10d.ProcessGroup.BackendType.GLOO
    twin._set_default_backend(kind)
    twin._register_backend(_HOST, kind, gloo)
    twin_group: dist.ProcessGroup = twin
    return twin_group


_ARRIVED = "arrived/"


def absent_from_twin(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a group that have not come to `gloo_twin` yet; [] where its store can't say."""
    store = _twin_store(group, "host")
    try:
        return [rank for rank in range(group.size()) if not store.check([f"{_ARRIVED}{rank}"])]
    except RuntimeError:  # The rank that has the store is gone.
        return []


def _twin_store(group: dist.ProcessGroup, purpose: str) -> Any:
    return cast(Any, dist).PrefixStore(f"scale_core/{purpose}", dist.distributed_c10d._get_process_group_store(group))


def _device_types(group: dist.ProcessGroup) -> list[str]:
    return [torch.device(device).type for device in cast(Any, group)._device_types]


_WATCHDOG_MARGIN = timedelta(minutes=5)


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """The longest wait of the host in a group: the limit of its backends, or less where one of them is NCCL.

    NCCL's limit counts from the call, and a minute after it NCCL ends the process. The host waits five minutes less, or
    half of a shorter limit, so that its error comes first. That error names the missing rank.
    """
    limits: list[tuple[str, timedelta]] = [(b.name(), b.options._timeout) for b in _backends(group)]
    return min(max(limit - _WATCHDOG_MARGIN, limit / 2) if name == "nccl" else limit for name, limit in limits)


def new_group_limit(group: dist.ProcessGroup) -> timedelta:
    """The timeout for a new group that is to have the `time_limit` of this group."""
    limit: timedelta = max(backend.options._timeout for backend in _backends(group))
    return limit


def extend_nccl_limit(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Sets NCCL's limit in a group to five minutes above `limit`, which is for the host; other backends keep theirs."""
    for backend in _backends(group):
        if backend.name() == "nccl":
            backend._set_default_timeout(limit + _WATCHDOG_MARGIN)


def abort_communicators(group: dist.ProcessGroup) -> None:
    """Ends, on this rank, what a group's backends other than gloo have started, and fails all that comes later."""
    for backend in _backends(group):
        if backend.name() != "gloo":
            with suppress(RuntimeError):  # Some can't be aborted; their limit ends what they have started.
                backend.abort()


def _backends(group: dist.ProcessGroup) -> list[Any]:
    return [cast(Any, group)._get_backend(device) for device in cast(Any, group)._device_types]


def default_store() -> Store | None:
    """The rendezvous store, or None where there is none."""
    if not dist.is_initialized():
        return None
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def add_gradients(edges: Iterable[GradientEdge], gradients: Iterable[Tensor], leaves: Iterable[Tensor]) -> None:
    """Goes backward from `edges`, and adds to the `grad` of leaves, as `torch.autograd.backward` does."""
    # The engine is called as that calls it in torch 2.8 to 2.15, without the steps before: it would look at shapes
    # that come from the engine itself, and copy the context, which takes longer than all of the engine's own work where
    # graphs are small. Where torch has no such engine any more, it is called itself; so it is in a simulation, which
    # looks after what it calls.
    edges, gradients, leaves = tuple(edges), tuple(gradients), tuple(leaves)
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None or stand_in() is not None:
        torch.autograd.backward(edges, gradients, inputs=leaves)
        return
    engine.run_backward(edges, gradients, False, False, leaves, allow_unreachable=True, accumulate_grad=True)


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """The edge that takes a tensor's gradient; it keeps the graph behind it alive without the tensor."""
    # torch 2.8 forgets the node of a user's `autograd.Function` with its last tensor. A view has a node of torch's own.
    if "ownership_token" not in GradientEdge._fields and isinstance(tensor.grad_fn, cast(Any, torch._C)._FunctionBase):
        with torch.enable_grad():
            tensor = tensor.view_as(tensor)
    return get_gradient_edge(tensor)


def forbids_in_place(tensor: Tensor) -> bool:
    """Whether autograd refuses to change a view in place: one made by a Python function, or one of several."""
    if not (tensor.requires_grad and tensor._is_view()):
        return False
    private = cast(Any, torch._C)._autograd
    return bool(private._get_creation_meta(tensor) != private.CreationMeta.DEFAULT)


def is_autograd_grad(leaf: Tensor) -> bool:
    """Whether the current pass is one of torch.autograd.grad for this leaf, which accumulates no gradient."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError as error:  # Which nodes run is a question that torch does not answer there.
        return "autograd.grad" in str(error)
    return False


def accelerator() -> torch.device | None:
    """The current accelerator, or its stand-in in a simulation; None where there is none."""
    if (simulated := stand_in()) is not None:
        return simulated
    current = torch.accelerator.current_accelerator(check_available=True)
    return None if current is None else torch.device(current.type, torch.accelerator.current_device_index())


def stand_in() -> torch.device | None:
    """The device that stands in for an accelerator in the simulation that runs now; None outside of one."""
    module = getattr(torch, STAND_IN, None)
    return torch.device(STAND_IN, 0) if module is not None and module.is_available() else None


def with_index(device: torch.device) -> torch.device:
    """The device as its tensors name it: "cuda" is the current one, for example "cuda:0"."""
    has_index = cast(Any, device).index is not None  # torch says that it always has.
    current = None if has_index or device.type == "cpu" else accelerator()
    return current if current is not None and current.type == device.type else device


def backend_of(group: dist.ProcessGroup | None = None) -> str:
    """Returns the backend of a group, the default one if None: "nccl", "gloo" or "fake", else torch's name of it.

    If a group has one backend for each kind of device, this is the accelerator's.
    """
    name = str(dist.get_backend(group))
    if name == "undefined":  # init_process_group() without a backend: torch took the one for this machine's devices.
        name = dist.get_backend_config(group)  # for example "cuda:nccl"
    return next((known for known in ("nccl", "fake", "gloo") if known in name), name.rpartition(":")[2])


def is_fake_group(group: dist.ProcessGroup) -> bool:
    """Whether the backend of a group is "fake"."""
    # torch does not list groups of `gloo_twin`, and `get_backend` raises for them.
    return group in process_groups() and dist.get_backend(group) == "fake"


def process_groups() -> list[dist.ProcessGroup]:
    """The process groups of this rank, the default one first."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    return list(dist.distributed_c10d._world.pg_map)


def new_group_of_members(ranks: list[int], timeout: timedelta | None) -> Any:
    """Makes a process group that its members alone call.

    If the default group was made with `device_id=`, torch would split its communicator. NCCL then waits for all ranks
    of it, also for ranks that never call (pytorch/pytorch#129965).
    """
    default: Any = dist.group.WORLD
    device, default.bound_device_id = default.bound_device_id, None
    try:
        return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    finally:
        default.bound_device_id = device


def can_set_data(param: Tensor, memory: Tensor) -> bool:
    """Whether `param.data = memory` is possible: torch's own check when it converts a module's parameters."""
    return bool(torch._has_compatible_shallow_copy_type(param, memory))


def flatten_mesh(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of all ranks of a mesh; None is the default group, where it has all of them."""
    if mesh.size() == dist.get_world_size():
        return None
    with without_fake_tensors():
        flat: DeviceMesh = mesh._flatten()
    return flat.get_group()


def ranks_of_mesh(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of a mesh, in row-major order, also where tensors are fake."""
    with without_fake_tensors():
        return tuple(mesh.mesh.flatten().tolist())


def spans_world(mesh: DeviceMesh) -> bool:
    """Whether a mesh, or the one that it is a part of, has all ranks; one of `DeviceMesh.from_group` may not."""
    return root_mesh(mesh).size() == dist.get_world_size()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that a mesh is a slice of, or the mesh itself if it is not a slice."""
    if hasattr(mesh, "_get_root_mesh"):
        root: DeviceMesh = mesh._get_root_mesh()
    else:  # torch 2.8
        root = cast(Any, dist.device_mesh)._mesh_resources.get_root_mesh(mesh)
    return root


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps torch.compile out of a function; the code around it is compiled up to a graph break."""
    kept_out: Callable[P, R] = cast(Any, torch)._disable_dynamo(function)
    return kept_out


def is_tracing() -> bool:
    """Whether torch.compile traces a function now. Then the compiler reads tensors, and not the program."""
    return TracingContext.try_get() is not None


def ends_recomputation(error: BaseException) -> bool:
    """Whether torch ends a checkpoint's recomputation by this exception, once it has all that it needs."""
    return type(error).__name__ == "_StopRecomputationError"


def torch_version() -> tuple[int, int]:
    """The major and minor version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def reduces_in_param_dtype() -> bool:
    """Whether FSDP2's policy without a `reduce_dtype` means the parameter's own dtype, and not `param_dtype`."""
    return torch_version() >= (2, 15)


def simulation_supported() -> bool:
    """Whether this torch version has the private parts that a simulation uses."""
    oldest, newest = SIMULATED_TORCH
    return oldest <= torch_version() <= newest


def simulation_versions() -> str:
    """The torch versions of simulations in words, for example "2.11 to 2.15"."""
    return " to ".join(f"{major}.{minor}" for major, minor in SIMULATED_TORCH)


def require_simulation() -> None:
    """Refuses a torch version on which simulations were not tested."""
    if not simulation_supported():
        raise RuntimeError(
            f"simulation needs private parts of torch {simulation_versions()}, but this is torch {torch.__version__}: "
            f"install torch=={DEFAULT_TORCH}.* to simulate"
        )


@contextmanager
def fake_default_group(rank: int, world_size: int, device: str = "cpu") -> Iterator[None]:
    """A default group in which only this rank exists: its collectives return at once and move nothing."""
    require_simulation()
    if dist.is_initialized():
        raise RuntimeError(
            f"expected no default process group, got one of {dist.get_world_size()} ranks "
            f"({dist.get_backend()}): call torch.distributed.destroy_process_group() first"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    devices = dist.Backend.backend_capability["fake"]
    dist.Backend.backend_capability["fake"] = list(dict.fromkeys((*devices, device)))
    try:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        dist.Backend.backend_capability["fake"] = devices


def fake_tensors() -> AbstractContextManager[object]:
    """A context in which new tensors have a shape, a dtype and a storage size, but no memory."""
    require_simulation()
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):
        # With True, `torch.tensor(0, device="sim")` makes a tensor of the host and moves it. The stand-in has no kernel
        # that would make it in its own memory.
        avoid_device_init = True

    mode: AbstractContextManager[object] = Mode()
    return mode


def without_fake_tensors() -> AbstractContextManager[object]:
    """A context in which tensors are real again, for code that needs values (a `DeviceMesh`, for one)."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    mode: AbstractContextManager[object] = unset_fake_temporarily()
    return mode


def without_fake_cache() -> AbstractContextManager[object]:
    """Inside, fake operators are not looked up among those that have run, nor kept there."""
    from torch._subclasses.fake_tensor import disable_fake_tensor_cache

    mode: Any = active_fake_mode()
    return nullcontext() if mode is None else disable_fake_tensor_cache(mode)


def active_fake_mode() -> object | None:
    """The innermost fake mode; another one than the caller's means that torch only computes a shape."""
    from torch import _guards

    return _guards.active_fake_mode()


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a simulation and has no memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def forget_value(tensor: Tensor) -> None:
    """Makes a fake tensor forget the value that torch knows of it, as of `torch.tensor(1)`, and computes with."""
    if is_fake(tensor):
        cast(Any, tensor).constant = None


def can_swap_memory() -> bool:
    """Whether this torch can move memory from one storage to another; 2.8 can't."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchanges the memory of two storages, if one has none; all views see that."""
    cast(Any, storage)._swap_data_ptr_(other)


def is_unshared(tensor: Tensor) -> bool:
    """Whether a tensor has no other view and no other owner in C++, as by DLPack."""
    storage = tensor.untyped_storage()  # Counts as one more.
    return cast(Any, tensor)._use_count() == 1 and torch._C._storage_Use_Count(storage._cdata) <= 2


def plain_tensor_types() -> frozenset[type]:
    """The tensor types that have one storage. Others, for example DTensor, are wrappers."""
    from torch._subclasses.fake_tensor import FakeTensor

    return frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor))


def is_wrapper(kind: type[Tensor]) -> bool:
    """Whether a type of tensors has operators of its own, as DTensor has, and `ShardedTensor` has not."""
    return kind not in plain_tensor_types() and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def waited(tensor: Tensor) -> Tensor:
    """The plain tensor of one that a functional collective is still filling, or the tensor itself."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        plain: Tensor = tensor.wait()
        return plain
    return tensor


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside a wrapper, for example DTensor, or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    return [inner for part in parts if isinstance(part, Tensor) for inner in inner_tensors(part)]


def wrap_no_grad_function(function: Callable[..., Any], around: Callable[..., Any]) -> None:
    """Replaces one of torch's clipping functions by `around(own, ...)`, also where it was imported by name."""
    # They are closures that call the wrapped function without gradients: that is replaced inside of them.
    unwrapped = cast(Any, function).__wrapped__
    (cell,) = (cell for cell in function.__closure__ or () if cell.cell_contents is unwrapped)
    cell.cell_contents = functools.partial(around, unwrapped)


def available_device(device: torch.device | str) -> torch.device | None:
    """The device, or None where this machine has no accelerator of that type."""
    requested = torch.device(device)
    current = accelerator()
    missing = requested.type not in ("cpu", "meta") and (current is None or current.type != requested.type)
    return None if missing else requested


def values_of(tensor: Tensor, *, simulated: list[float]) -> list[float]:
    """The values of a tensor [n] as numbers: the one place where a step waits for the device."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor):
        tensor.cpu()  # The host waits for it here, too.
        return list(simulated)
    values: list[float] = tensor.tolist()
    return values


def group_of_operation(group: Any) -> dist.ProcessGroup:
    """The process group that a collective operator's group argument stands for."""
    if isinstance(group, str):
        group = cast(Any, dist.distributed_c10d)._resolve_process_group(group)
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return cast(dist.ProcessGroup, group)


@contextmanager
def watching_resizes(callback: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Calls `callback(storage, bytes_before)` after each `UntypedStorage.resize_`, which no dispatch mode sees."""
    storage_type = cast(Any, torch.UntypedStorage)
    original = storage_type.resize_

    def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        before = storage.nbytes()
        result = original(storage, num_bytes)
        callback(storage, before)
        return result

    storage_type.resize_ = resize
    try:
        yield
    finally:
        storage_type.resize_ = original


@contextmanager
def without_step_hooks() -> Iterator[None]:
    """Inside, optimizers step without the hooks that a program has registered for all optimizers."""
    from torch.optim import optimizer

    module: Any = optimizer
    hooks = (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks)
    registered = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for emptied, before in zip(hooks, registered, strict=True):
            emptied.update(before)


@contextmanager
def around_dtensor_shapes(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, DTensor computes the shapes of its results, with fake tensors of the full size, in `context()`."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    def propagate(self: object, op_schema: object) -> Any:
        with context():
            return original(self, op_schema)

    propagator._propagate_tensor_meta_non_cached = propagate
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = original


@contextmanager
def watching_waits(callback: Callable[[dist.Work], None], **replaced: Callable[[Any], Any]) -> Iterator[None]:
    """Calls `callback(work)` after each wait for a handle of torch's "fake" process group, or for its future.

    `replaced` are methods of the handle, such as `get_future`, by what is called in their place.
    """
    kind: Any = cast(Any, torch._C)._distributed_c10d.FakeWork
    names = ("wait", "synchronize", "block_current_stream", "get_future")
    originals = {name: getattr(kind, name) for name in {*names, *replaced}}

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            callback(work)
            return result

        return wait

    for name in names:
        setattr(kind, name, watched(originals[name]))
    for name, method in replaced.items():
        setattr(kind, name, lambda work, method=method: method(work))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)


def keep_flight_recorder_off(backend: str) -> None:
    """Keeps torch's flight recorder, from 2.15 on, from groups that are written in Python: it needs a C++ backend."""
    recording: set[str] = getattr(cast(Any, dist).distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(backend)


def work_of(handle: Any) -> dist.Work:
    """The handle that a program gets for the handle of a collective operator."""
    work: dist.Work = cast(Any, dist.Work).unbox(handle)
    return work


storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Returns how many tensors and other objects have a storage, given its `_cdata`."""
