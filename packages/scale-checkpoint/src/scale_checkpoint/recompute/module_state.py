"""The state of a module in its forward, restored for its recomputation: modes, parameters and buffers.

| | changed by the forward | changed between forward and backward |
|---|---|---|
| mode (`train()`, `eval()`) | | restored |
| parameter | | assigned, frozen or thawed: restored; in place: an error |
| buffer | its values before, as a copy; the recomputation must change the same buffers | as a parameter |
| buffer of a norm | its values before; its backward reads the present ones, as in a plain norm (see DESIGN.md) | |

Which buffers a forward changes is learned from each module's first forward, for which all are copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import _StopRecomputationError

from scale_checkpoint.state import InternalOps
from scale_core.sharded_tensor.tensor import is_sharded

BufferHistory: TypeAlias = weakref.WeakKeyDictionary[nn.Module, dict[tuple[bool, str], bool]]
"""Whether a module's forwards have changed its buffers, by mode and name: a batch norm changes nothing in eval mode."""

UsedTensor: TypeAlias = tuple[nn.Module, dict[str, Tensor | None], str, Tensor, int, bool]
"""Module, its `_parameters` or `_buffers`, name, tensor, version (-1 where it does not matter), `requires_grad`.

A plain tuple: each forward makes one for every tensor, and few are ever looked at."""


class BufferBefore(NamedTuple):
    """A buffer before a forward."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None  # None where no forward has changed it


class ChangedBuffer(NamedTuple):
    """A buffer that a forward has changed."""

    module: nn.Module
    name: str
    before: Tensor  # its values before the forward; nobody else writes to it
    after: Tensor | None  # the buffer after it
    version: int  # of `after`


class ModuleState:
    """Modes, parameters and buffers of a module and all that it holds, around one forward; made before it runs."""

    def __init__(self, module: nn.Module, history: BufferHistory) -> None:
        self._history = history
        self._parts = _parts_of(module)
        self._before: list[BufferBefore] = []
        self.modes = [(part, part.training) for part in self._parts]
        self.changed: list[ChangedBuffer] = []
        self.unchanged: list[tuple[nn.Module, str]] = []
        self.used: list[UsedTensor] = []
        for part in self._parts:
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    versions = history.get(part)
                    may_change = True if versions is None else versions.get((part.training, name), True)
                    copy = _copy(buffer) if may_change else None
                    self._before.append(BufferBefore(part, name, buffer, _version(buffer), copy))

    def record_changes(self) -> None:
        """After the forward, or within it before a recomputation of its first part: notes changed buffers.

        Raises:
            RuntimeError: The forward has changed, for the first time, a buffer that it had left alone before.
        """
        self.changed = []
        for part, name, buffer, version, copy in self._before:
            now = part._buffers.get(name)
            is_replaced = now is not buffer
            # Those of a norm count as changed in eval mode, too: kernels of later forwards write to them unseen.
            has_changed = is_replaced or _version(buffer) != version or isinstance(part, _NormBase)
            has_changed = has_changed or (copy is not None and _differ(copy, buffer))
            if has_changed and copy is None and not (is_replaced and _version(buffer) == version):
                raise RuntimeError(
                    f"the forward of a {part._get_name()} has changed its buffer '{name}' {list(buffer.shape)} "
                    "after calls in which it had not, so a recomputation could not begin from its values before: "
                    "let every forward change it, or leave the module out of the checkpointed one"
                )
            if has_changed:
                # A replaced buffer is still there as it was; one changed in place is there as a copy.
                before = buffer if copy is None else copy
                self.changed.append(ChangedBuffer(part, name, before, now, _version(now)))
            versions = self._history.setdefault(part, {})
            versions[part.training, name] = has_changed or versions.get((part.training, name), False)
        changed = {(change.module, change.name) for change in self.changed}
        self.unchanged = [
            (part, name)
            for part in self._parts
            for name, buffer in part._buffers.items()
            if buffer is not None and (part, name) not in changed and not isinstance(part, _NormBase)
        ]

    def finish(self) -> None:
        """After the forward: notes changed buffers, and the tensors that it may have computed with."""
        self.record_changes()
        copied = {(change.module, change.name) for change in self.changed}
        for part in self._parts:
            parameters: dict[str, Tensor | None] = part._parameters  # type: ignore[assignment]
            for name, tensor in parameters.items():
                if tensor is not None and not tensor.is_inference():
                    self.used.append((part, parameters, name, tensor, tensor._version, tensor.requires_grad))
            for name, tensor in part._buffers.items():
                if tensor is not None:
                    # Those of a norm change with each forward, and a recomputation in training reads none of them.
                    any_version = isinstance(part, _NormBase) or tensor.is_inference() or (part, name) in copied
                    version = -1 if any_version else tensor._version
                    self.used.append((part, part._buffers, name, tensor, version, tensor.requires_grad))
        self._parts, self._before = [], []

    def replaced(self) -> list[UsedTensor]:
        """Before a recomputation: returns the tensors that the module no longer holds, or that were frozen or thawed.

        `torch.func.functional_call` takes its parameters out of the module, and users assign new ones. Parameters that
        an engine has released, as a gathered parameter for its shard, is left to the engine.

        Raises:
            RuntimeError: A parameter or buffer was changed in place since the forward.
        """
        changes = []
        for used in self.used:
            module, owner, name, tensor, version, requires_grad = used
            now = owner.get(name)
            if now is not tensor and not _can_be_restored(tensor, now, is_buffer=owner is module._buffers):
                continue
            if version >= 0 and tensor._version != version:
                raise RuntimeError(_changed_in_place(used))
            if now is not tensor or tensor.requires_grad is not requires_grad:
                changes.append(used)
        return changes


class RestoredState(AbstractContextManager[dict[int, Tensor]]):
    """Around a recomputation: the module is as its forward has found it; afterwards it is as before.

    Entering returns, by the identity of the copy of a norm's buffer, the present buffer, which the backward reads.

    Raises:
        RuntimeError: A parameter or buffer was changed in place since the forward; or, at the end, the recomputation
            has changed other buffers than the forward.
    """

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._modes = [(part, training) for part, training in state.modes if part.training is not training]
        self._tensors = state.replaced()
        self.is_needed = bool(self._modes or self._tensors or state.changed or state.unchanged)

    def __enter__(self) -> dict[int, Tensor]:
        copies = [_copy(change.before) for change in self._state.changed]
        for part, training in self._modes:
            part.training = training
        self._held = [(used, used[1].get(used[2]), used[3].requires_grad) for used in self._tensors]
        for _, owner, name, tensor, _, requires_grad in self._tensors:
            owner[name] = tensor
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad = requires_grad
        self._unchanged = [(part, name, part._buffers.get(name)) for part, name in self._state.unchanged]
        self._versions = [_version(buffer) for _, _, buffer in self._unchanged]
        self._changed: list[tuple[ChangedBuffer, Tensor, int, Tensor | None]] = []
        read: dict[int, Tensor] = {}
        for change, copy in zip(self._state.changed, copies, strict=True):
            current = change.module._buffers.get(change.name)
            self._changed.append((change, copy, _version(copy), current))
            change.module._buffers[change.name] = copy
            is_as_left = current is change.after and _version(current) == change.version
            if current is not None and is_as_left and not decides_results(change):
                read[id(copy)] = current
        return read

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        has_stopped = isinstance(error, _StopRecomputationError)  # early, so it may not have come to a change
        mismatch = self._buffer_mismatch(has_stopped)
        for part, name, buffer in self._unchanged:
            part._buffers[name] = buffer
        for change, _, _, current in self._changed:
            change.module._buffers[change.name] = current
        for (_, owner, name, tensor, _, _), current, requires_grad in self._held:
            owner[name] = current
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad = requires_grad
        for part, training in self._modes:
            part.training = not training
        if mismatch is None:
            return
        if error is None or has_stopped:
            raise RuntimeError(mismatch)
        error.add_note(mismatch)

    def _buffer_mismatch(self, has_stopped: bool) -> str | None:
        # An attribute of Python that decides whether a buffer is changed decides otherwise the second time.
        for (part, name, buffer), version in zip(self._unchanged, self._versions, strict=True):
            if part._buffers.get(name) is not buffer or _version(buffer) != version:
                return _describe_mismatch(part, name, "left alone", "changed")
        for change, copy, version, _ in self._changed:
            is_untouched = change.module._buffers.get(change.name) is copy and _version(copy) == version
            if is_untouched and not has_stopped and decides_results(change) and not _differ(change.before, copy):
                return _describe_mismatch(change.module, change.name, "changed", "left alone")
        return None


def decides_results(change: ChangedBuffer) -> bool:
    """Whether a forward may compute with a buffer that it changes; a norm, which changes its statistics, does not."""
    return not isinstance(change.module, _NormBase)


def _describe_mismatch(module: nn.Module, name: str, then: str, now: str) -> str:
    return (
        f"the forward of a {type(module).__name__} has {then} its buffer '{name}', which its recomputation has {now}: "
        "let inputs, parameters and buffers alone decide that, and no attribute, counter or clock; let a table that "
        "grows look at its own shape, or grow it once before training, or leave the module out of the checkpointed one"
    )


def _changed_in_place(used: UsedTensor) -> str:
    module, owner, name, tensor, _, _ = used
    kind, fix = "parameter", "call loss.backward() before optimizer.step(), and change parameters after it"
    if owner is module._buffers:
        kind, fix = "buffer", f"change it after loss.backward(), or assign a new tensor, module.{name} = ..."
    return (
        f"the {kind} '{name}' {list(tensor.shape)} of a {module._get_name()} was changed in place "
        f"between the forward and the backward of a checkpointed module, which is computed again with it: {fix}"
    )


def _can_be_restored(then: Tensor, now: Tensor | None, is_buffer: bool) -> bool:
    """Whether a tensor that the module no longer holds is unchanged.

    Engines that gather parameters swap them, too, and see to the recomputation themselves: parameters they release are
    sharded, has another shape than the parameter in its place, or no memory.
    """
    if is_buffer:
        return type(then) is Tensor
    if not isinstance(now, nn.Parameter) or is_sharded(then) is not is_sharded(now):
        return False
    if type(then) is Tensor:
        return True
    same_kind = (now.shape, now.dtype, now.device) == (then.shape, then.dtype, then.device)
    return same_kind and (type(then) is not nn.Parameter or _has_memory(then))


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize


def _version(tensor: Tensor | None) -> int:
    # Tensors made in inference mode count no versions.
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _differ(copy: Tensor, buffer: Tensor) -> bool:
    # A simulated tensor has no values, only a version.
    if type(copy) is not Tensor or copy.is_meta:
        return False
    with InternalOps():
        return not torch.equal(copy, buffer)


def _copy(buffer: Tensor) -> Tensor:
    with InternalOps():
        return buffer.detach().clone(memory_format=torch.preserve_format)


def _parts_of(module: nn.Module) -> Sequence[nn.Module]:
    """The module and all that it holds, each once; `modules()` in a form that costs little at every call."""
    parts, waiting = {id(module): module}, [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in parts:
                parts[id(child)] = child
                waiting.append(child)
    return list(parts.values())
