"""Compares some elements of each divided weight between the ranks, once, in a model's first forward.

Where a function draws into the parts from one seed, or a wrapper sends one rank's shards to the others, all ranks get
the same numbers. The model trains with them, and nothing else shows that it is a much smaller one. The elements are
taken where a layer is about to use its weight, so it does not matter where the weight is at other times.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_core.comm.collectives import exchange, fingerprint_of
from scale_core.comm.group import Group
from scale_core.compat import active_fake_mode
from scale_core.hooks.module_parts import ForEachShardHook
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp.layers.base import ParallelModule

_NUM_COMPARED = 32  # elements of a weight


def check_first_forward(model: nn.Module, group: Group) -> None:
    """Makes the first forward of a divided model an error where all ranks hold the same parts."""
    if group.size > 1 and group.backend != "fake":
        check = _ReplicaCheck(group)
        model.register_forward_pre_hook(check.pre_forward)
        model.register_forward_hook(check.post_forward, always_call=True)


class _ReplicaCheck(ForEachShardHook):
    """The hooks of that forward, which take themselves off when it has ended."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.done: WeakSet[nn.Module] = WeakSet()  # the model, or its parts
        self.names: list[str] = []
        self.samples: dict[str, Tensor] = {}
        self.handles: list[RemovableHandle] = []

    def pre_forward(self, model: nn.Module, args: Any) -> None:
        """Has each divided layer take a sample of its weights when it is called."""
        if torch.compiler.is_compiling() or model in self.done:
            return
        if active_fake_mode() is not None:
            self.done.add(model)
            return
        self._clear()
        for path, module in model.named_modules():
            if not isinstance(module, ParallelModule):
                continue
            for name in module.shardings:
                if _is_comparable(module, name):
                    self.names.append(f"{path}.{name}".lstrip("."))
                    take = partial(_take_sample, self.samples, self.names[-1], name)
                    self.handles.append(module.register_forward_pre_hook(take))

    def post_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """Compares the samples; after an error there is no output, and the next forward is the first one."""
        if torch.compiler.is_compiling():
            return
        names, samples, is_done = self.names, self.samples, model in self.done
        self._clear()
        if output is None:
            return
        self.done.add(model)
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]
                model._forward_hooks_always_called.pop(key, None)
        if is_done:
            return
        rows = exchange([_fingerprint(samples.get(name)) for name in names], self.group)
        used = {name: set(row) for name, row in zip(names, zip(*rows, strict=True), strict=True) if all(row)}
        equal = [name for name, fingerprints in used.items() if len(fingerprints) == 1]
        if equal:
            _report(equal, len(used), self.group)

    def _clear(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.names, self.samples, self.handles = [], {}, []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "done": None, "names": [], "samples": {}, "handles": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, done=WeakSet())


def _take_sample(samples: dict[str, Tensor], key: str, name: str, module: nn.Module, args: Any) -> None:
    """Forward pre-hook of a layer: takes some elements of a weight."""
    assert isinstance(module, ParallelModule)
    value = getattr(module, name, None)
    if not isinstance(value, Tensor):
        return
    part = local_tensor(value).detach()
    if tuple(part.shape) == module.shardings[name].local_shape(module.group.rank):
        flat = part.reshape(-1)
        samples[key] = flat[:: max(1, flat.numel() // _NUM_COMPARED)][:_NUM_COMPARED].clone()


def _is_comparable(module: ParallelModule, name: str) -> bool:
    """Whether all ranks have parts of one shape and of different elements; biases may be zeros on all of them."""
    shape, _, split = module.shardings[name]
    return len(shape) > 1 and split is not None and len(set(split.sizes)) == 1 and not split.has_copies


def _fingerprint(sample: Tensor | None) -> int:
    """A number for these values; 0 where they are all equal, as all zeros or all ones."""
    values = [] if sample is None else sample.tolist()
    return fingerprint_of(*values) if len(set(values)) > 1 else 0


def _report(equal: list[str], number: int, group: Group) -> None:
    shown = ", ".join(map(repr, equal[:3])) + (", ..." if len(equal) > 3 else "")
    message = (
        f"the ranks {list(group.ranks)} hold the same numbers in {len(equal)} of {number} divided weights ({shown}), "
        "of which each should have a part of its own. Either they were drawn into the parts: write "
        "scale_tp.init_as_full(model, lambda model: model.apply(initialize)). Or one rank's were sent to the others: "
        'give what does so, such as a data parallel wrapper, the ranks along the data axis, mesh["data"]. Then load or '
        "initialize them again"
    )
    if len(equal) == number:
        raise RuntimeError(message)
    warnings.warn(f"{message} (a model whose full weights repeat may have such parts)", stacklevel=2)
