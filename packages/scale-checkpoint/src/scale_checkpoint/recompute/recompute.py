"""A checkpointed module: its forward, on torch's non-reentrant checkpoint, and the recomputation in the backward.

`CheckpointedForward` is an attribute `forward` of the instance, in the place of its class's. The module stays itself,
with its class, its names and its keys. The attribute is below all hooks, so that a module that gathers its parameters
around its forward is not gathered again to recompute.

torch keeps the inputs, and computes the rest again when autograd first asks for a saved tensor. `_Call` adds the parts
it leaves out: random numbers of all devices, modes, parameters and buffers as the forward has found them, containers
among the inputs, kept results of chosen operators, and versions of saved tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError, checkpoint, noop_context_fn

from scale_checkpoint.offload.offload import MIN_BYTES, Sender, offload_activations, offload_inputs
from scale_checkpoint.offload.storage import Target
from scale_checkpoint.recompute import determinism_check
from scale_checkpoint.recompute.determinism_check import CompareOperators
from scale_checkpoint.recompute.module_state import BufferHistory, ModuleState, RestoredState, decides_results
from scale_checkpoint.recompute.policy import OperatorPolicy
from scale_checkpoint.recompute.selective import Key, ReuseResults, SavedResults, SaveResults
from scale_checkpoint.state import STATE
from scale_checkpoint.tree import extract_tensors, insert_tensors, unknown_classes
from scale_core.device import rng

ContextFunction: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Returns two contexts: one around the forward of a call, one around each recomputation of it."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The treatment of a module's activations."""

    recompute: bool = True  # keep the inputs alone, and compute the rest again
    keep: OperatorPolicy | None = None  # of a recomputed module, the operators whose results are kept as well
    offload_to: Target | None = None  # where kept tensors go; None leaves them on the device
    min_bytes: int = MIN_BYTES  # smaller storages are not offloaded
    preserve_random_state: bool = True
    context_fn: ContextFunction | None = None
    determinism_check: Literal["default", "none"] = "default"


class ModuleStats:
    """Observations of all calls of a module."""

    def __init__(self) -> None:
        self.buffers: BufferHistory = WeakKeyDictionary()
        self.unused = set[Key]()  # kept results that no recomputation has asked for


class CheckpointedForward:
    """A module's forward with its activations recomputed or offloaded; copied and pickled with the module."""

    def __init__(self, module: nn.Module, config: CheckpointConfig) -> None:
        # The module's own, as other libraries patch it in; otherwise it is found in the class.
        self.__setstate__((module, config, vars(module).get("forward")))

    def __getstate__(self) -> tuple[nn.Module, CheckpointConfig, Callable[..., Any] | None]:
        return self._owner, self.config, self.patched

    def __setstate__(self, state: tuple[nn.Module, CheckpointConfig, Callable[..., Any] | None]) -> None:
        module, self.config, self.patched = state
        self._module = weakref.ref(module)  # The module holds this; so there is no reference cycle.
        self._stats = ModuleStats()
        self._is_initialized = False  # Until it was seen to be.

    def __getattr__(self, name: str) -> Any:
        if name in ("__wrapped__", "__name__", "__qualname__") and "_module" in vars(self):
            plain = self._plain_forward(self._owner)
            if name == "__wrapped__":
                return plain
            return getattr(plain.func if isinstance(plain, partial) else plain, name)
        raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, config = self._owner, self.config
        forward = self._plain_forward(module)
        if not torch.is_grad_enabled() or STATE.disabled:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler knows torch's own function, and sees to random numbers and buffers itself.
            if not config.recompute:
                return forward(*args, **kwargs)
            if config.context_fn is None:
                return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
            # Dynamo looks at the kind of the function, which it has not yet loaded where it comes from an attribute.
            contexts = partial(config.context_fn)
            return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=contexts)
        if not self._is_initialized:
            self._is_initialized = not any(map(is_lazy, chain(module.parameters(), module.buffers())))
            if not self._is_initialized:
                # The first forward of a lazy module makes its parameters and buffers: there is nothing of before to
                # compute it again from, so this one keeps everything.
                return forward(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # torch's own errors speak of its inside.
            raise RuntimeError(
                f"transforms of torch.func (vmap, grad, jvp) can't run a {module._get_name()} that is checkpointed or "
                "offloaded: call them inside of `with scale_checkpoint.disable_checkpointing():`"
            )
        if not config.recompute:
            assert config.offload_to is not None
            with offload_activations(module, to=config.offload_to, min_bytes=config.min_bytes):
                return forward(*args, **kwargs)
        if config.offload_to is None:
            return run_recomputed(module, forward, args, kwargs, config, self._stats)
        with offload_inputs(module, config.offload_to, config.min_bytes):
            return run_recomputed(module, forward, args, kwargs, config, self._stats)

    def is_of(self, module: nn.Module) -> bool:
        """Whether it belongs to this module, and not to the original of which this is a shallow copy."""
        return self._module() is module

    @property
    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward was deleted: keep the module, and call it")
        return module

    def _plain_forward(self, module: nn.Module) -> Callable[..., Any]:
        return partial(type(module).forward, module) if self.patched is None else self.patched


def get_forward(module: nn.Module) -> CheckpointedForward | None:
    """Returns a module's checkpointed forward; None where its forward is its own or belongs to another module."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, CheckpointedForward) and forward.is_of(module) else None


def wrap_forward(module: nn.Module, forward: CheckpointedForward) -> None:
    """Sets a checkpointed forward on a module that has none."""
    object.__setattr__(module, "forward", forward)
    if _check_shallow_copy not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_check_shallow_copy)


def unwrap_forward(module: nn.Module) -> None:
    """Puts a module's own forward back, or the one that was patched in before it was wrapped."""
    present = vars(module).get("forward")
    if not isinstance(present, CheckpointedForward):
        return
    if not present.is_of(module):  # A shallow copy shares its hooks with the original, which goes on to need them.
        module.__dict__["_forward_pre_hooks"] = module._forward_pre_hooks.copy()
    for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _check_shallow_copy]:
        del module._forward_pre_hooks[number]
    if present.patched is None:
        del module.__dict__["forward"]
    else:
        object.__setattr__(module, "forward", present.patched)


def _check_shallow_copy(module: nn.Module, args: Any) -> None:
    """Before a module's forward, which knows only the module that it was made for."""
    forward = vars(module).get("forward")
    if isinstance(forward, CheckpointedForward) and forward._module() is not module:
        title = module._get_name()
        raise RuntimeError(
            f"this {title} is a shallow copy of a {title} that is checkpointed or offloaded, and would run the forward "
            "of the original: take copy.deepcopy, or wrap the copy by itself, with apply_checkpointing(copy, "
            '"recompute") or "keep" (nn.DataParallel makes such copies, too: take DistributedDataParallel)'
        )


def run_recomputed(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: CheckpointConfig,
    stats: ModuleStats,
) -> Any:
    """Runs a module's bound forward so that autograd keeps only its inputs; returns its result."""
    function: Callable[..., Any] = forward
    tensors: Sequence[Tensor] = args
    structure = None
    if kwargs or not all(isinstance(arg, Tensor) for arg in args):
        tensors, structure = extract_tensors((args, kwargs))
        function = _Nested(forward, (args, kwargs), structure)
    call = _Call(module, function, structure, config, stats)
    result = checkpoint(
        call, *tensors, use_reentrant=False, preserve_rng_state=False, determinism_check=config.determinism_check
    )
    if call.failure is None:
        return result
    failure, call.failure = call.failure, None
    try:
        raise failure
    finally:
        del failure  # Its traceback holds this frame.


class _Nested:
    """A forward with containers among its arguments, as a function of the tensors alone.

    The forward gets the caller's own containers, which it may fill; a recomputation gets new ones, as those were.
    """

    def __init__(self, forward: Callable[..., Any], given: tuple[Any, Any], rest: Any) -> None:
        self._forward, self._rest = forward, rest
        self._given: tuple[Any, Any] | None = given

    def __call__(self, *tensors: Tensor) -> Any:
        inputs, self._given = self._given, None
        args, kwargs = insert_tensors(self._rest, tensors) if inputs is None else inputs
        return self._forward(*args, **kwargs)


class _Call:
    """The function that torch's checkpoint calls: the first time the forward, then recomputations of it."""

    def __init__(
        self, module: nn.Module, function: Callable[..., Any], rest: Any, config: CheckpointConfig, stats: ModuleStats
    ) -> None:
        self._module, self._function, self._rest = module, function, rest
        self._state = ModuleState(module, stats.buffers)
        self._generators = rng.generator_states() if config.preserve_random_state else []
        self._drawn: list[rng.GeneratorState] = []
        self._kept: SavedResults | None = None
        if config.keep is not None:
            to = config.offload_to
            send = None if to is None else Sender([module], to, config.min_bytes).send
            self._kept = SavedResults(config.keep, stats.unused, send)
        # Innermost, so that a dispatch mode sees the operators of the module and no others.
        context_fn: ContextFunction = config.context_fn or noop_context_fn
        self._forward_context, self._recompute_context = context_fn()
        self._check = determinism_check.active
        self._steps: list[Any] = []  # the operators of the forward, for the check
        self._has_begun = self._is_over = False
        self.failure: BaseException | None = None  # the exception of the forward, until it is raised to the caller
        # Versions by the identity of the tensor that torch's checkpoint holds, so that the forward numbers none.
        self._versions: dict[int, int] = {}
        # By the object that autograd holds for a tensor until the node that saved it is done: the backward that has
        # unpacked it.
        self._unpacked: WeakKeyDictionary[Any, tuple[int, Tensor]] = WeakKeyDictionary()

    def __call__(self, *tensors: Tensor) -> Any:
        if self._has_begun:
            return self._recompute(tensors)
        self._has_begun = True
        was_checkpointing, STATE.checkpointing = STATE.checkpointing, True
        try:
            return self._forward(tensors)
        except BaseException as error:  # torch before 2.13 would leave its contexts open, and their hooks in force.
            self.failure = error
        finally:
            STATE.checkpointing = was_checkpointing

    def _forward(self, tensors: Sequence[Tensor]) -> Any:
        versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
        with ExitStack() as stack:
            stack.enter_context(self._forward_hooks())
            if self._kept is not None:
                stack.enter_context(SaveResults(self._kept))
            if self._check is not None:
                self._steps = stack.enter_context(CompareOperators(self._check, self._module)).steps
            stack.enter_context(self._forward_context)
            result = self._function(*tensors)
        self._state.finish()
        self._drawn = rng.drawn_since(self._generators) if self._generators else []
        self._is_over = True
        # Autograd would notice as well, but in the backward, and could not say where.
        for tensor, version in zip(tensors, versions, strict=True):
            if version >= 0 and tensor._version != version and self._needs_gradients(tensors):
                raise RuntimeError(
                    f"the forward of a {self._module._get_name()} changes a tensor {list(tensor.shape)} that it is "
                    "given in place, so it could not be computed again: let it change a copy (inplace=False where its "
                    "first layer has that), or leave it out of the checkpointed ones"
                )
        return result

    def _needs_gradients(self, tensors: Sequence[Tensor]) -> bool:
        return any(tensor.requires_grad for tensor in tensors) or any(used[-1] for used in self._state.used)

    def _recompute(self, tensors: Sequence[Tensor]) -> None:
        if not self._is_over:  # A backward inside of the forward recomputes the part that has run so far.
            self._state.record_changes()
            self._drawn = rng.drawn_since(self._generators) if self._generators else []
        check = self._check if self._is_over else None
        # The operator at which torch would end it may be the one that differs.
        to_the_end = self._is_over and (check is not None or any(map(decides_results, self._state.changed)))
        before = STATE.checkpointing, STATE.recompute_depth, STATE.disabled
        STATE.checkpointing, STATE.recompute_depth, STATE.disabled = False, before[1] + 1, False
        try:
            with ExitStack() as stack:
                read: Mapping[int, Tensor] = {}
                restored = RestoredState(self._state)
                if self._drawn:
                    stack.enter_context(rng.replayed(self._drawn))
                if restored.is_needed:
                    read = stack.enter_context(restored)
                if self._kept is not None:
                    self._kept.fetch()
                    stack.enter_context(ReuseResults(self._kept))
                if check is not None:
                    stack.enter_context(CompareOperators(check, self._module, self._steps))
                stack.enter_context(self._recompute_hooks(to_the_end, read))
                stack.enter_context(self._recompute_context)
                self._function(*tensors)
        except _StopRecomputationError:  # By which torch ends it as soon as it has all that was saved.
            self._note_unused()
            raise
        finally:
            STATE.checkpointing, STATE.recompute_depth, STATE.disabled = before
        self._note_unused()

    def _note_unused(self) -> None:
        if self._kept is not None and self._is_over:
            self._kept.note_unused()

    def _forward_hooks(self) -> saved_tensors_hooks:
        """Hooks on saved tensors that are called in the place of the hooks of torch's checkpoint, and call those."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def unpack_checked(packed: Any) -> Tensor:
            try:
                # Operators read each once; the backward of a user's own autograd.Function may read it again.
                if isinstance(torch._C._current_autograd_node(), torch._C._FunctionBase):
                    tensor = self._unpack_for_function(packed, unpack)
                else:
                    tensor = unpack(packed)  # This is where it is recomputed.
            except Exception as error:
                error.add_note(self._note(error))
                raise
            if tensor._version != self._versions[id(tensor)]:
                raise RuntimeError(
                    f"the forward of a {self._module._get_name()}, which is checkpointed, modifies a tensor "
                    f"{list(tensor.shape)} by an inplace operation after autograd has saved it: let it change a copy "
                    "(inplace=False where a layer has that), as it would have to without checkpointing"
                )
            return tensor

        return saved_tensors_hooks(pack, unpack_checked)

    def _unpack_for_function(self, packed: Any, unpack: Callable[[Any], Tensor]) -> Tensor:
        # torch gives each saved tensor away once. It lives as in the plain module: until autograd releases the node.
        backward = torch._C._current_graph_task_id()
        unpacked = self._unpacked.get(packed)
        if unpacked is None or unpacked[0] != backward:
            unpacked = self._unpacked[packed] = backward, unpack(packed)
        return unpacked[1]

    def _recompute_hooks(self, to_the_end: bool, read: Mapping[int, Tensor]) -> saved_tensors_hooks:
        """Hooks around the hooks of torch's recomputation; the backward reads `read[id(tensor)]` for a tensor."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        versions = self._versions
        current_operator = torch._C._autograd._get_sequence_nr
        has_all, unwritten = False, -1

        def pack_recomputed(tensor: Tensor) -> Any:
            nonlocal has_all, unwritten
            if has_all:  # Only a backward inside of the recomputation comes back to tensors saved from now on.
                return tensor.detach() if tensor.requires_grad else tensor
            is_result = tensor.grad_fn is not None or tensor.requires_grad or tensor._version or tensor._is_view()
            if not is_result and tensor.is_floating_point() and not isinstance(tensor, nn.Parameter):
                unwritten = current_operator()  # It may write to it yet: `rrelu` saves its noise, then draws it.
            replacement = read.get(id(tensor), tensor)
            replacement = replacement.detach() if replacement.requires_grad else replacement  # As torch would.
            version = replacement._version
            if versions.setdefault(id(replacement), version) != version:
                # Saved before, at another version; or the number belonged to a tensor which is gone.
                replacement = replacement.detach()
                versions[id(replacement)] = version
            try:
                return pack(replacement)
            except _StopRecomputationError:
                if not to_the_end and unwritten != current_operator():
                    raise
                has_all = True
            return tensor.detach() if tensor.requires_grad else tensor

        return saved_tensors_hooks(pack_recomputed, unpack)

    def _note(self, error: Exception) -> str:
        note = f"This happened while the forward of a {self._module._get_name()} was computed again."
        unknown = [] if self._rest is None else unknown_classes(self._rest)
        if unknown:
            return (
                f"{note} It was given a {' and a '.join(unknown)}, which the recomputation gets in its present "
                "state: if the forward has changed it, as it changes a cache, do without (model.config.use_cache = "
                "False in transformers, or use_cache=False in the call, as for T5), or register its class with "
                "torch.utils._pytree, so that it is given as it was."
            )
        if isinstance(error, CheckpointError):  # It says debug=True, of torch's own function.
            return (
                f"{note} `with scale_checkpoint.check_recomputation(model):` around forward and backward says in which "
                "module and operator the two begin to differ."
            )
        return note
