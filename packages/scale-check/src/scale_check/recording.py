"""Records what a training computes: outputs of modules, their gradients, gradients of parameters, weights, states.

Hooks of the whole process see every module and every optimizer, so the model is left unchanged, whoever has wrapped it.
The outermost module that runs is the model. Tensors have the names of its modules and parameters, without what wrappers
add.
"""

from __future__ import annotations

import enum
import importlib
import re
import sys
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from scale_check.summary import Recorded, cat, float_values, kept, scaled, total

# What DDP, FSDP1, torch.compile and checkpoint wrappers put into the names of what they wrap.
_WRAPPERS = re.compile(r"(^|\.)(module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")

FLAT_PARAMS = (
    "the model is wrapped by torch's FullyShardedDataParallel (FSDP1). Its flat parameters can't be compared, because "
    "they don't have the names and shapes of the model. Shard it by fully_shard (FSDP2) of torch.distributed.fsdp or "
    "scale_fsdp"
)
"""The error text for a recording that `has_flat_params`."""


class Phase(enum.Enum):
    """What a recorded tensor is."""

    SAMPLES = "samples of"
    START = "weight at the start"
    OUTPUT = "output of"
    LOSS = "loss"
    OUTPUT_GRADIENT = "gradient of the output of"
    UNCLIPPED = "gradient before clipping of"
    GRADIENT = "gradient of"
    OPTION = "optimizer option"
    WEIGHT = "weight after the step:"
    BUFFER = "buffer after the step:"
    STATE = "optimizer state of"
    RANDOM = "random generator after the step"


class Key(NamedTuple):
    """Names a recorded tensor."""

    step: int  # of the optimizer, from 1
    phase: Phase
    name: str  # of a module or a parameter, without what wrappers add
    number: int = 0  # which call of the module, or which tensor of its output

    def of_all_calls(self) -> Key:
        """The key without its number."""
        return self._replace(number=0)

    def __str__(self) -> str:
        number = f", number {self.number + 1}" if self.number else ""
        name = "" if self.phase is Phase.RANDOM else f" {self.name or 'the model'}"
        return f"step {self.step}: {self.phase.value}{name}{number}"


@dataclass
class Recording:
    """What one process has computed, in the order of time."""

    tensors: dict[Key, Recorded] = field(default_factory=dict)
    draws: list[str] = field(default_factory=list)  # Modules that have drawn random numbers in their forward
    hides_gradients: bool = False  # The library has no full gradients when its optimizer steps.
    draws_of_loop: bool = False  # Random numbers were drawn between a loader and the model.
    has_sharded_outputs: bool = False  # A module had a DTensor as its output.
    has_flat_params: bool = False  # A model is wrapped by FSDP1, whose flat parameters have no names of the model.
    steps_on_copies: bool = False  # An optimizer has stepped on copies of parameters in a wider dtype.
    evaluated: set[str] = field(default_factory=set)  # Names of models that have run without gradients only.
    num_forwards: dict[int, int] = field(default_factory=dict)  # By step, how often the model ran with gradients.

    def keys_of(self, *phases: Phase) -> list[Key]:
        """The keys of some phases."""
        return [key for key in self.tensors if key.phase in phases]

    @property
    def num_steps(self) -> int:
        """How many steps of an optimizer it has."""
        return max((key.step for key in self.keys_of(Phase.WEIGHT)), default=0)

    @property
    def trains_nothing(self) -> bool:
        """Whether steps of an optimizer saw no gradient and changed no weight.

        A small step on a copy in float32 may be lost when it is rounded to a weight in bfloat16.
        """
        if self.hides_gradients or self.steps_on_copies or self.keys_of(Phase.GRADIENT):
            return False
        weights = {key: float_values(self.tensors[key]) for key in self.keys_of(Phase.WEIGHT)}
        before = {key: self.tensors.get(Key(1, Phase.START, key.name)) for key in weights}
        return bool(weights) and all(
            value is not None and torch.equal(float_values(value), weights[key]) for key, value in before.items()
        )

    def num_calls(self, step: int) -> int:
        """How many tensors the model itself gave in a step: as many times as it was called, or a multiple of that."""
        return sum(key.step == step and not key.name for key in self.keys_of(Phase.OUTPUT))


def with_joined_calls(recording: Recording, count: int, whole: Container[Key] = ()) -> Recording:
    """The recording as if each `count` forwards in a row had been one, of their samples together.

    So one process that makes the micro-batches of all ranks, one after the other, is compared with ranks that make
    theirs at the same time. `whole` means the same as in `Recorder`.
    """
    tensors: dict[Key, Recorded] = {}
    of_calls: dict[Key, list[Recorded]] = {}
    for key, tensor in recording.tensors.items():
        if key.phase in (Phase.OUTPUT, Phase.OUTPUT_GRADIENT):
            of_calls.setdefault(key.of_all_calls(), []).append(tensor)
    for key, tensor in recording.tensors.items():
        several = of_calls.get(key.of_all_calls())
        width = len(several) // recording.num_forwards.get(key.step, 1) if several else 0  # Tensors of one forward.
        if several is None or not width or len(several) % (width * count):
            tensors[key] = tensor
            continue
        group, position = divmod(key.number, width * count)
        if position < width:  # Else it is joined with another one.
            start = group * width * count + position
            numbers = range(start, start + width * count, width)
            parts = [recording.tensors[key._replace(number=number)] for number in numbers]
            joined = scaled(total(parts), 1 / len(parts)) if not tensor.ndim else cat(parts, 0)
            joined_key = key._replace(number=group * width + position)
            as_it_is = joined_key.of_all_calls() in whole
            tensors[joined_key] = kept(joined, as_it_is=as_it_is) if isinstance(joined, Tensor) else joined
    return replace(recording, tensors=tensors)


def plain_name(name: str) -> str:
    """The name that a module or a parameter has in the model itself.

    >>> plain_name("module.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return _WRAPPERS.sub("", name).lstrip(".")


def full_value(tensor: Tensor, *, copies: bool = True) -> Tensor:
    """The full tensor of one that may be a shard, on the host; called on all ranks that have a part of it.

    Without `copies`, a tensor that is full already is returned itself.
    """
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    with torch.no_grad():
        if hasattr(tensor, "ds_tensor"):
            full: Tensor | None = _of_deepspeed("safe_get_full_fp32_param", tensor)
            if full is None:  # DeepSpeed's optimizer has no frozen parameters.
                with importlib.import_module("deepspeed").zero.GatheredParameters([tensor]):
                    full = tensor.detach().clone()
        else:
            full = tensor.detach() if gather is None else gather().detach()
        if full.layout is not torch.strided:  # Such as gradients of a sparse embedding.
            full = full.to_dense()
        # Ranks send contiguous tensors.
        return full.to("cpu", copy=True).contiguous() if copies else full.to("cpu")


def gradient_of(param: nn.Parameter) -> Tensor | None:
    """The gradient of a parameter, also where ZeRO-3 keeps it elsewhere; called on all ranks that have a part of it."""
    grad: Tensor | None = _of_deepspeed("safe_get_full_grad", param) if hasattr(param, "ds_tensor") else param.grad
    return grad


def _of_deepspeed(function: str, param: Tensor) -> Any:
    """Calls one of DeepSpeed's functions on a parameter whose values, gradient and state are in its own tensors."""
    return getattr(importlib.import_module("deepspeed.utils"), function)(param)


class Recorder:
    """Records the trainings of this process while its hooks are registered; see `recording`.

    Args:
        last_step: After this step `on_last` is called; None records all steps.
        on_last: What to do then.
        whole: The keys, without numbers, of large tensors that are kept as they are. Others are summed up. None keeps
            all tensors.
    """

    def __init__(
        self,
        last_step: int | None = None,
        on_last: Callable[[], object] = lambda: None,
        *,
        whole: Container[Key] | None = None,
    ) -> None:
        self.recording = Recording()
        self._whole = whole
        self.step = 1
        self._begun_step = 1  # The last step whose weights at the start are recorded.
        self._last_step, self._on_last = last_step, on_last
        self._depth = 0  # of module calls
        self._states: list[Tensor] = []  # of the random generator, when the modules that run now began
        self._handles: list[RemovableHandle] = []  # of hooks on tensors
        self._optimizer_depth = 0
        self._stepped_copies = False  # An optimizer has stepped on tensors that are no parameters of the models.
        self._models: dict[nn.Module, str] = {}  # The outermost modules that have run, with the name of each
        self._names: dict[nn.Module, str] = {}  # Of all modules in them
        self._copies: dict[Tensor, str] = {}  # What optimizers step on in the place of parameters, with their names
        self._calls: dict[tuple[Phase, str], int] = {}
        self._params_of_shape: dict[torch.Size, deque[tuple[str, nn.Parameter]]] = {}  # In the order of next use

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Registers the hooks of the process."""
        handles = (
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        with ExitStack() as stack:
            stack.callback(self._remove_tensor_hooks)
            for handle in handles:
                stack.callback(handle.remove)
            yield
            self._end_step()

    def add(self, key: Key, tensor: Tensor) -> None:
        """Records a tensor, or the sums of it. A gradient of an output that arrives in several parts is their sum."""
        as_it_is = self._whole is None or key.of_all_calls() in self._whole
        value = kept(full_value(tensor, copies=False), as_it_is=as_it_is)
        if isinstance(value, Tensor):  # The training changes its own.
            value = value.clone(memory_format=torch.contiguous_format)
        earlier = self.recording.tensors.get(key) if key.phase is Phase.OUTPUT_GRADIENT else None
        self.recording.tensors[key] = value if earlier is None else total([earlier, value])

    def add_loss(self, loss: Tensor | float) -> None:
        """Records the loss of the step that has just ended."""
        self._end_step()
        value = full_value(loss) if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
        self.recording.tensors[Key(self.step - 1, Phase.LOSS, "")] = value

    def add_random_state(self) -> None:
        """Records the state of the CPU's random generator after the step that has just ended."""
        self.recording.tensors[Key(self.step - 1, Phase.RANDOM, "")] = torch.get_rng_state()

    def add_before_clipping(self, tensors: Iterable[Tensor]) -> None:
        """Records the tensors that are gradients of parameters; their norm is taken next."""
        for tensor in tensors:
            if (name := self._param_of_gradient(tensor)) is not None:
                self.add(Key(self.step, Phase.UNCLIPPED, name), tensor)

    def _param_of_gradient(self, tensor: Tensor) -> str | None:
        """The name of the parameter whose gradient a tensor is.

        Programs that take a norm for each gradient take them in the order of the parameters, or in a similar one. So
        the search begins behind the last one that was found.
        """
        if isinstance(tensor, nn.Parameter):
            return None
        if not self._params_of_shape:
            for name, param in self._named_params():
                self._params_of_shape.setdefault(param.shape, deque()).append((name, param))
        params = self._params_of_shape.get(tensor.shape, deque())
        for position, (name, param) in enumerate(params):
            if param.grad is tensor:
                params.rotate(-position - 1)
                return name
        return None

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if _is_recomputing():
            return
        if self._depth == 0:
            self._end_step()
        if self._depth == 0 and module not in self._models and module not in self._names and self._is_seen(module):
            self._add_model(module)
        if self._depth == 0 and self.step > self._begun_step and torch.is_grad_enabled() and _is_trainable(module):
            # A program may change its weights after the optimizer's step: it decays, averages or clamps them. The ranks
            # gather sharded ones together. Modules without weights, for example metrics, may run on one rank only.
            self._begun_step = self.step
            self._record_params(Phase.START)
        if self._depth == 0 and torch.is_grad_enabled() and module in self._models:
            self.recording.evaluated.discard(self._models[module])
        self._depth += 1
        self._states.append(torch.get_rng_state())

    def _is_seen(self, model: nn.Module) -> bool:
        """False for one that runs without gradients before the model that is trained: a teacher, or that model."""
        return torch.is_grad_enabled() or "" in self._models.values() or not _is_trainable(model)

    def _add_model(self, model: nn.Module) -> None:
        """The first model that is trained has no name; others, for example losses, are named for their class."""
        # A wrapper and what it wraps have one name, which stands for the inner one.
        inner = {plain_name(name): module for name, module in model.named_modules()}
        prefix = ""
        if "" in self._models.values() or not _is_trainable(model):
            kind = type(inner[""]).__name__.removeprefix("FSDP")
            number = sum(name.partition(" ")[0] == kind for name in self._models.values())
            prefix = f"{kind} {number + 1}" if number else kind
        self._models[model] = prefix
        fsdp1 = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
        self.recording.has_flat_params |= any(isinstance(module, fsdp1) for module in model.modules())
        if not torch.is_grad_enabled():
            self.recording.evaluated.add(prefix)
        self._params_of_shape.clear()
        self._names |= {module: _joined(prefix, name) for name, module in inner.items()}
        self._record_params(Phase.START, model)

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_recomputing():
            return
        self._depth -= 1
        name = self._names.get(module)
        if not torch.equal(self._states.pop(), torch.get_rng_state()) and name is not None:
            self.recording.draws.append(name)
        if output is None or name is None or not torch.is_grad_enabled():
            return
        if not name:
            self.recording.num_forwards[self.step] = self.recording.num_forwards.get(self.step, 0) + 1
        for tensor, order in _tensors_in(output):
            number = self._calls.get((Phase.OUTPUT, name), 0)
            self._calls[Phase.OUTPUT, name] = number + 1
            key = Key(self.step, Phase.OUTPUT, name, number)
            self.recording.has_sharded_outputs |= hasattr(tensor, "full_tensor")
            self.add(key, tensor if order is None else tensor[order])
            if tensor.requires_grad:
                hook = _GradientHook(self, key._replace(phase=Phase.OUTPUT_GRADIENT), order)
                self._handles.append(tensor.register_hook(hook))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizer_depth += 1
        if not self._stepped_copies:
            self._record_copies(optimizer)
        if self._optimizer_depth > 1 or self._stepped_copies:
            return
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        named = list(self._named_params())
        # DeepSpeed's optimizers step on tensors of their own, group by group, and the parameters get the values later.
        of_others = bool(named) and all(id(param) not in stepped for _, param in named)
        self._stepped_copies = of_others and "deepspeed" in sys.modules
        for name, param in named:
            if self._stepped_copies or id(param) in stepped:
                grad = gradient_of(param)
                if grad is not None:
                    self.add(Key(self.step, Phase.GRADIENT, name), grad)
                elif self._stepped_copies and param.requires_grad:  # ZeRO-1 and 2 have divided it already.
                    self.recording.hides_gradients = True
        for number, group in enumerate(optimizer.param_groups):
            for option, value in group.items():
                if isinstance(value, float) or (isinstance(value, Tensor) and not value.ndim):
                    key = Key(self.step, Phase.OPTION, f"{option} of group {number}")
                    self.recording.tensors[key] = torch.tensor(float(value), dtype=torch.float64)

    def _record_copies(self, optimizer: Optimizer) -> None:
        """Records the gradients of copies, in a wider dtype, that the optimizer steps on in the place of parameters.

        They are recorded in the dtype of the parameter, whose rounding they have. If fewer copies than parameters have
        the same values, for example the ones of norms on a rank that steps on some of them, their names are not known.
        """
        named = dict(self._named_params())
        param_ids = {id(param) for param in named.values()}
        narrow = {name: param for name, param in named.items() if param.is_floating_point() and param.numel()}
        copies = [param for group in optimizer.param_groups for param in group["params"] if id(param) not in param_ids]
        copies = [copy for copy in copies if copy.grad is not None and copy.is_floating_point()]
        taken = set(self._copies.values())
        of_names: dict[tuple[str, ...], list[Tensor]] = {}
        for copy in copies:
            candidates = {name: p for name, p in narrow.items() if p.dtype.itemsize < copy.dtype.itemsize}
            if not candidates or copy in self._copies:
                continue
            names = tuple(name for name, p in candidates.items() if name not in taken and _is_copy(copy, p))
            of_names.setdefault(names, []).append(copy)
            if not self.recording.steps_on_copies:
                is_copy = bool(names) or _is_flat_copy(_local(copy), [_local(param) for param in candidates.values()])
                self.recording.steps_on_copies = is_copy
        for names, of_values in of_names.items():
            if len(names) == len(of_values):
                self._copies.update(zip(of_values, names, strict=True))
        for copy in copies:
            if (name := self._copies.get(copy)) is not None:
                grad = copy.grad.to(named[name].dtype)
                self.add(Key(self.step, Phase.STATE, f"{name}: gradient of its copy"), grad)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizer_depth -= 1
        if self._optimizer_depth or not self._models or self._stepped_copies:
            return
        self._record_weights()
        names = {id(param): name for name, param in self._named_params()}
        for param, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and id(param) in names:
                    self.add(Key(self.step, Phase.STATE, f"{names[id(param)]}: {key}"), value)
        self._begin_next_step()

    def _end_step(self) -> None:
        """Ends a step of an optimizer of copies: what it has computed is in the parameters by now."""
        if self._stepped_copies:
            self._stepped_copies = False
            self._record_weights()
            self._begin_next_step()

    def _record_weights(self) -> None:
        self._record_params(Phase.WEIGHT)
        for model, prefix in self._models.items():
            for name, buffer in model.named_buffers():
                self.add(Key(self.step, Phase.BUFFER, _joined(prefix, plain_name(name))), buffer)

    def _begin_next_step(self) -> None:
        self.step += 1
        self._calls.clear()
        self._params_of_shape.clear()
        self._remove_tensor_hooks()
        if self._last_step is not None and self.step > self._last_step:
            self._on_last()

    def _remove_tensor_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _named_params(self, *models: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of some models, or of all, each once."""
        seen: set[nn.Parameter] = set()
        for model in models or self._models:
            for name, param in model.named_parameters():
                if param not in seen:
                    seen.add(param)
                    yield _joined(self._models[model], plain_name(name)), param

    def _record_params(self, phase: Phase, *models: nn.Module) -> None:
        for name, param in self._named_params(*models):
            self.add(Key(self.step, phase, name), param)


class _GradientHook:
    """Records the gradient of an output; a module that is called again in the backward pass has another one."""

    def __init__(self, recorder: Recorder, key: Key, order: Tensor | None) -> None:
        self._recorder, self._key, self._order = recorder, key, order

    def __call__(self, grad: Tensor) -> None:
        self._recorder.add(self._key, grad if self._order is None else grad[self._order])


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _is_trainable(model: nn.Module) -> bool:
    return any(param.requires_grad for param in model.parameters())


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _is_copy(copy: Tensor, param: Tensor) -> bool:
    """Whether a tensor is a copy of a parameter, of which `perturb` may have changed the last place."""
    if copy.shape != param.shape or hasattr(copy, "full_tensor") != hasattr(param, "full_tensor"):
        return False
    # All ranks have to find the same, also those whose shard is empty: they gather the gradient of the copy together.
    value, rounded = full_value(param, copies=False), full_value(copy, copies=False).to(param.dtype)
    return torch.allclose(rounded.to(copy.dtype), value.to(copy.dtype), rtol=2 * torch.finfo(param.dtype).eps, atol=0.0)


def _is_flat_copy(copy: Tensor, params: Sequence[Tensor]) -> bool:
    """Whether a tensor has values of several parameters one after the other, and zeros between them."""
    dtype = params[0].dtype
    values = torch.cat([param.flatten().to(copy) for param in params if param.dtype is dtype])
    rounded = copy.flatten().to(dtype).to(copy.dtype)
    return bool(rounded.any()) and bool((torch.isin(rounded, values) | (rounded == 0)).all())


def _is_recomputing() -> bool:
    """Whether a backward pass runs: checkpointed modules run again in it."""
    graph_task: int = torch._C._current_graph_task_id()  # type: ignore[attr-defined, unused-ignore]
    return graph_task != -1


def _tensors_in(output: Any) -> list[tuple[Tensor, Tensor | None]]:
    """The floating-point tensors of a module's output, each with the order in which its rows are recorded, if any."""
    if isinstance(output, Mapping):  # As those of transformers, whichever torch knows.
        output = list(output.values())
    tensors: list[tuple[Tensor, Tensor | None]] = []
    for leaf in pytree.tree_leaves(output, is_leaf=lambda value: isinstance(value, PackedSequence)):
        if isinstance(leaf, PackedSequence):
            tensors.append((leaf.data, _order_by_sample(leaf)))
        elif isinstance(leaf, Tensor):
            tensors.append((leaf, None))
    return [(tensor, order) for tensor, order in tensors if tensor.is_floating_point()]


def _order_by_sample(sequences: PackedSequence) -> Tensor:
    """The rows of packed sequences, one sequence after the other: so the sequences of all ranks can be joined."""
    numbers = torch.arange(len(sequences.data), device=sequences.data.device)
    padded, _ = pad_packed_sequence(sequences._replace(data=numbers), batch_first=True, padding_value=-1)
    return padded[padded >= 0]
