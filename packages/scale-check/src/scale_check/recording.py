"""Records what a training computes: outputs of modules, their gradients, gradients of parameters, weights, states.

Hooks of the whole process see every module and every optimizer, so the model is left as it is, whoever has wrapped it.
The outermost module that runs is the model; names are those of its modules and parameters, without what wrappers add.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

# What DDP, FSDP1, torch.compile and checkpoint wrappers put into the names of what they wrap.
_WRAPPERS = re.compile(r"(^|\.)(module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?=\.|$)")


class Phase(enum.Enum):
    """What a recorded tensor is."""

    START = "weight at the start"
    OUTPUT = "output of"
    LOSS = "loss"
    OUTPUT_GRADIENT = "gradient of the output of"
    GRADIENT = "gradient of"
    WEIGHT = "weight after the step:"
    BUFFER = "buffer after the step:"
    STATE = "optimizer state of"


class Key(NamedTuple):
    """Names a recorded tensor."""

    step: int  # of the optimizer, from 1
    phase: Phase
    name: str  # of a module or a parameter, without what wrappers add
    number: int = 0  # which call of the module, or which tensor of its output

    def __str__(self) -> str:
        number = f", number {self.number + 1}" if self.number else ""
        return f"step {self.step}: {self.phase.value} {self.name or 'the model'}{number}"


@dataclass
class Recording:
    """What one process has computed, in the order of time."""

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    batch_sizes: dict[int, int] = field(default_factory=dict)  # by step, the first dimension of the model's first input

    def keys_of(self, *phases: Phase) -> list[Key]:
        """The keys of some phases."""
        return [key for key in self.tensors if key.phase in phases]


def plain_name(name: str) -> str:
    """The name that a module or a parameter has in the model itself.

    >>> plain_name("module.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return _WRAPPERS.sub("", name).lstrip(".")


def full_value(tensor: Tensor) -> Tensor:
    """The full tensor of one that may be a shard, on the host; called on all ranks that have a part of it."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    with torch.no_grad():
        whole = tensor.detach() if gather is None else gather().detach()
        return whole.to("cpu", copy=True)


class Recorder:
    """Records the trainings of this process while its hooks are registered; see `recording`."""

    def __init__(self, last_step: int | None = None, on_last: Callable[[], object] = lambda: None) -> None:
        self.recording = Recording()
        self.step = 1
        self._last_step, self._on_last = last_step, on_last
        self._depth = 0  # of module calls
        self._optimizer_depth = 0
        self._model: nn.Module | None = None
        self._names: dict[nn.Module, str] = {}
        self._calls: dict[tuple[Phase, str], int] = {}

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
            for handle in handles:
                stack.callback(handle.remove)
            yield

    def add_loss(self, loss: Tensor) -> None:
        """Records the loss of the step that has just ended."""
        self.recording.tensors[Key(self.step - 1, Phase.LOSS, "")] = full_value(loss)

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if _is_recomputing():
            return
        if self._depth == 0:
            self._begin(module, args)
        self._depth += 1

    def _begin(self, model: nn.Module, args: Any) -> None:
        sizes = (leaf.shape[0] for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor) and leaf.ndim)
        self.recording.batch_sizes.setdefault(self.step, next(sizes, 0))
        if self._model is not model:
            self._names = {}
            for name, module in model.named_modules():  # A wrapper and what it wraps have one name: the inner one.
                self._names[module] = plain_name(name)
            wrapped = {plain_name(name): module for name, module in model.named_modules()}
            self._names = {module: name for module, name in self._names.items() if wrapped[name] is module}
            if self._model is None:
                self._record_params(model, Phase.START)
            self._model = model

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_recomputing():
            return
        self._depth -= 1
        name = self._names.get(module)
        if output is None or name is None or not torch.is_grad_enabled():
            return
        for tensor in _tensors_in(output):
            number = self._calls.get((Phase.OUTPUT, name), 0)
            self._calls[Phase.OUTPUT, name] = number + 1
            key = Key(self.step, Phase.OUTPUT, name, number)
            self.recording.tensors[key] = full_value(tensor)
            if tensor.requires_grad:
                tensor.register_hook(_GradientHook(self, key._replace(phase=Phase.OUTPUT_GRADIENT)))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizer_depth += 1
        if self._optimizer_depth > 1 or self._model is None:
            return
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for name, param in self._model.named_parameters():
            if param.grad is not None and id(param) in stepped:
                self.recording.tensors[Key(self.step, Phase.GRADIENT, plain_name(name))] = full_value(param.grad)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizer_depth -= 1
        if self._optimizer_depth or self._model is None:
            return
        self._record_params(self._model, Phase.WEIGHT)
        for name, buffer in self._model.named_buffers():
            self.recording.tensors[Key(self.step, Phase.BUFFER, plain_name(name))] = full_value(buffer)
        names = {id(param): plain_name(name) for name, param in self._model.named_parameters()}
        for param, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and id(param) in names:
                    name = f"{names[id(param)]}: {key}"
                    self.recording.tensors[Key(self.step, Phase.STATE, name)] = full_value(value)
        self.step += 1
        self._calls.clear()
        if self._last_step is not None and self.step > self._last_step:
            self._on_last()

    def _record_params(self, model: nn.Module, phase: Phase) -> None:
        for name, param in model.named_parameters():
            self.recording.tensors[Key(self.step, phase, plain_name(name))] = full_value(param)


class _GradientHook:
    """Records the gradient of an output; a module that is called again in the backward pass has another one."""

    def __init__(self, recorder: Recorder, key: Key) -> None:
        self._recorder, self._key = recorder, key

    def __call__(self, grad: Tensor) -> None:
        tensors = self._recorder.recording.tensors
        key = self._key
        tensors[key] = tensors[key] + full_value(grad) if key in tensors else full_value(grad)


def _is_recomputing() -> bool:
    """Whether a backward pass runs: checkpointed modules run again in it."""
    graph_task: int = torch._C._current_graph_task_id()  # type: ignore[attr-defined, unused-ignore]
    return graph_task != -1


def _tensors_in(output: Any) -> list[Tensor]:
    """The floating-point tensors of a module's output."""
    if isinstance(output, Mapping):  # As those of transformers, whichever torch knows.
        output = list(output.values())
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
