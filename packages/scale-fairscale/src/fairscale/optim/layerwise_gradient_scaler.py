"""`LayerwiseGradientScaler`: a scale of its own for the gradients inside each layer.

Hooks multiply the gradient of a layer's output by its scale, and divide its inputs' gradients by it. So the gradient
inside is `scale` times the true one, and `unscale` divides what its parameters got. Between layers, where residuals and
parameters of other modules are, gradients have their true values; their dtype must be able to hold these.
Where a layer's gradient overflows, that step is skipped and its scale shrinks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from scale_core.tree import map_tensors, tensors_in

_FP32 = torch.finfo(torch.float32)


@dataclass
class LayerInfo:
    """One layer and its scale.

    Attributes:
        layer_name: Qualified.
        layer: The module.
        scaling_factor: What its gradients are multiplied by.
        found_inf_or_nan: Whether one of them was not finite since the last `update`.
        growth_tracker: Steps in a row in which all were.
        scale_layer: Whether it has a scale of its own.
        has_run: Whether the gradients of its parameters are scaled; a layer whose parameters alone are used never runs.
    """

    layer_name: str
    layer: nn.Module
    scaling_factor: float = 1.0
    found_inf_or_nan: bool = False
    growth_tracker: int = 0
    scale_layer: bool = False
    has_run: bool = False


class LayerwiseGradientScaler:
    """Scales gradients layer by layer: `scale()`, `loss.backward()`, `unscale()`, `step(optimizer)`, `update()`.

    Args:
        model: Its layers are the modules without modules of their own.
        layer_scale_dict: The first scale of layers, by qualified name; others have the scale 1.
        growth_factor: Above 1.
        backoff_factor: Below 1.
        growth_interval: After how many finite steps in a row a scale grows.
        min_scale: The least.
        max_scale: The greatest.

    Raises:
        AssertionError: A number out of its range.
        ValueError: A name is none of the model's layers, or its layer shares a parameter with another one.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_scale_dict: Mapping[str, float],
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 10000,
        min_scale: float = _FP32.tiny,
        max_scale: float = _FP32.max,
    ) -> None:
        assert growth_factor > 1.0, "The growth factor must be > 1.0."
        assert 0.0 < backoff_factor < 1.0, "The backoff factor must be < 1.0."
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._min_scale, self._max_scale = growth_interval, min_scale, max_scale
        layers = [(name, layer) for name, layer in model.named_modules() if name and not list(layer.children())]
        if unknown := sorted(set(layer_scale_dict) - {name for name, _ in layers}):
            raise ValueError(
                f"layer_scale_dict: the model has no layer {unknown[0]!r}; it has {[n for n, _ in layers]}"
            )
        self.layer_info = [
            LayerInfo(name, layer, float(layer_scale_dict.get(name, 1.0)), scale_layer=name in layer_scale_dict)
            for name, layer in layers
        ]
        self._refuse_shared_parameters()
        self._hooks: list[RemovableHandle] = []

    def scale(self) -> None:
        """Registers the hooks of the pass that comes."""
        self._remove_hooks()
        for info in self.layer_info:
            if info.scaling_factor != 1.0:
                before, after = functools.partial(_unscale_inputs, info), functools.partial(_scale_gradient, info)
                self._hooks.append(info.layer.register_forward_pre_hook(before, with_kwargs=True))
                self._hooks.append(info.layer.register_forward_hook(after))

    def unscale(self) -> None:
        """Divides the gradients of each layer's parameters by its scale."""
        for info in self.layer_info:
            grads = [param.grad for param in info.layer.parameters(recurse=False) if param.grad is not None]
            info.found_inf_or_nan |= not _finite(grads)
            if info.has_run:
                for grad in grads:
                    grad.div_(info.scaling_factor)
            info.has_run = False
        self._remove_hooks()

    def step(self, optimizer: Optimizer) -> None:
        """Steps, unless a gradient was not finite."""
        if not any(info.found_inf_or_nan for info in self.layer_info):
            optimizer.step()

    def update(self) -> None:
        """Grows or shrinks the scales of those layers that have one."""
        for info in self.layer_info:
            if info.scale_layer:
                if info.found_inf_or_nan:
                    info.scaling_factor = max(self._min_scale, info.scaling_factor * self._backoff_factor)
                    info.growth_tracker = 0
                elif info.growth_tracker + 1 >= self._growth_interval:
                    info.scaling_factor = min(self._max_scale, info.scaling_factor * self._growth_factor)
                    info.growth_tracker = 0
                else:
                    info.growth_tracker += 1
            info.found_inf_or_nan = False

    def get_layer_info(self) -> list[LayerInfo]:
        """Returns the layers and their scales."""
        return self.layer_info

    def get_backward_hooks(self) -> list[RemovableHandle]:
        """Returns the hooks that are registered now; none after `unscale`."""
        return self._hooks

    def _refuse_shared_parameters(self) -> None:
        """The sum of gradients that two layers have scaled cannot be divided."""
        first: dict[nn.Parameter, LayerInfo] = {}
        for info in self.layer_info:
            for name, param in info.layer.named_parameters(recurse=False):
                other = first.setdefault(param, info)
                if other is not info and (other.scale_layer or info.scale_layer):
                    raise ValueError(
                        f"layer_scale_dict: expected layers with parameters of their own, got {other.layer_name!r} and "
                        f"{info.layer_name!r}, which share {info.layer_name}.{name}; leave both out of layer_scale_dict"
                    )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _Unscale(torch.autograd.Function):
    """Returns a tensor unchanged, and divides its gradient.

    A view with a hook would lose the hook where the layer writes to its input, as `nn.ReLU(inplace=True)`; here torch
    raises.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.factor, None


def _unscale_inputs(info: LayerInfo, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Before a layer's forward: its inputs' gradients are divided on their way out."""
    factor = info.scaling_factor

    def unscaled(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        same: Tensor = _Unscale.apply(tensor, factor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return same

    return map_tensors(unscaled, (args, kwargs))


def _scale_gradient(info: LayerInfo, module: nn.Module, args: Any, output: Any) -> None:
    """After a layer's forward: its outputs' gradients are multiplied on their way in."""
    factor = info.scaling_factor
    info.has_run = True
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: grad * factor)


def _finite(grads: Any) -> bool:
    return all(grad is None or bool(torch.isfinite(grad).all()) for grad in grads)


__all__ = ["LayerInfo", "LayerwiseGradientScaler"]
