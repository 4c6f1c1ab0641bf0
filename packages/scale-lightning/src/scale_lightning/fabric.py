"""Strategies for Fabric: `fabric.setup(model, optimizer)` gives back the sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _Sharded
from torch import nn
from torch.optim import Optimizer

from scale_fsdp import full_state_dict
from scale_lightning.checkpoints import load_sharded, save_sharded
from scale_lightning.optimizers import (
    as_oss,
    load_whole_optimizer_state,
    replace_in_schedulers,
    use_sharded_scaler,
    whole_optimizer_state,
)
from scale_lightning.options import CheckpointOptions, FSDPOptions, OSSStrategyOptions, ShardedDDPOptions
from scale_lightning.trainer import move_to, shard
from scale_oss import ShardedDataParallel


class _NoSync(_BackwardSyncControl):
    """Fabric's `no_backward_sync`, by `no_sync()` of what the strategy has made of the module."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = getattr(module, "no_sync", nullcontext)() if enabled else nullcontext()
        return context


class _FabricShardedCheckpoints(CheckpointOptions, DDPStrategy):
    """Whole checkpoints of rank 0, or folders that all ranks write; see `trainer` for the same of the Trainer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control = _NoSync()
        self._modules: list[nn.Module] = []  # That were set up: an optimizer's state is saved by their names.

    def setup_environment(self) -> None:
        super().setup_environment()
        use_sharded_scaler(self.precision)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return plain(module).state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        plain(module).load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return whole_optimizer_state(self._module_of(optimizer), optimizer)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,  # Fabric names it
    ) -> None:
        path = Path(self.broadcast(str(path)))
        if self._state_dict_type == "full":
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter is not None:
            raise ValueError(
                'fabric.save(..., filter=...) chooses from full state dicts: give the strategy state_dict_type="full"'
            )
        remainder = {name: _state_of(obj) for name, obj in state.items() if not isinstance(obj, nn.Module | Optimizer)}
        save_sharded(path, 0, _parts(state), remainder)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(self.broadcast(str(path)))
        if isinstance(state, Optimizer):
            load_whole_optimizer_state(self._module_of(state), state, self._read(path, weights_only))
            return {}
        if not isinstance(state, dict) or not state:
            loaded: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return loaded
        parts = _parts(state)
        if path.is_dir():
            remainder = load_sharded(path, parts, weights_only=weights_only, strict=strict)
            saved = {**dict.fromkeys(parts), **remainder}
        else:
            saved = self._read(path, weights_only)
        if strict and (lacking := [name for name in state if name not in saved]):
            raise KeyError(f"{path} has no '{lacking[0]}', only {', '.join(saved)}: ask for these, or strict=False")
        for name, obj in list(state.items()):
            if name not in saved:
                continue
            value = saved.pop(name)
            if path.is_dir() and name in parts:
                continue
            if isinstance(obj, nn.Module):
                self.load_module_state_dict(obj, value, strict)
            elif isinstance(obj, Optimizer):
                load_whole_optimizer_state(self._module_of(obj), obj, value)
            elif hasattr(obj, "load_state_dict"):
                obj.load_state_dict(value)
            else:
                state[name] = value
        return saved

    def _read(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        read: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        return read

    def _module_of(self, optimizer: Optimizer) -> nn.Module:
        param_ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for module in self._modules:
            if param_ids <= {id(param) for param in module.parameters()}:
                return module
        raise ValueError(
            f"no module that was set up has the parameters of this {type(optimizer).__name__}: call "
            "fabric.setup(model, optimizer) first"
        )


class FabricScaleFSDPStrategy(FSDPOptions, _FabricShardedCheckpoints, _Sharded):
    """Fully sharded data parallelism for Fabric.

    `fabric.setup(model, optimizer)` shards the model and gives the optimizer its shards; an optimizer may as well be
    built after `fabric.setup_module(model)`.

    Examples:
        >>> from scale_lightning import FabricScaleFSDPStrategy
        >>> strategy = FabricScaleFSDPStrategy()  # Fabric(strategy=strategy, accelerator="cpu", devices=2)

    See also: [the guide to Lightning](../guides/trainers.md#lightning).
    """

    def module_to_device(self, module: nn.Module) -> None:
        move_to(module, self.root_device)

    def module_sharded_context(self) -> AbstractContextManager[None]:
        """Nothing: `setup_module` shards."""
        return nullcontext()

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """`empty_init` builds on the meta device; each unit is initialized when it is sharded."""
        return torch.device("meta") if empty_init else super().module_init_context(empty_init)

    def setup_module(self, module: nn.Module) -> Any:
        self._modules.append(shard(module, self.root_device, self._policy, self._shard_options))
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        names = {param: name for name, param in module.named_parameters()}
        listed = [
            [[names.get(p) for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers
        ]
        module = self.setup_module(module)
        shards = dict(module.named_parameters())
        for optimizer, groups in zip(optimizers, listed, strict=True):
            if optimizer.state:
                raise ValueError(
                    f"this {type(optimizer).__name__} has stepped already, on parameters that are sharded now: set it "
                    "up before its first step, and load its state afterwards"
                )
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [
                    param if name is None else shards[name] for name, param in zip(params, group["params"], strict=True)
                ]
        return module, optimizers, scheduler

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return full_state_dict(module, rank_0_only=True, device="cpu")


class FabricScaleOSSStrategy(OSSStrategyOptions, _FabricShardedCheckpoints):
    """Optimizer state sharding for Fabric: `DistributedDataParallel` averages, and `OSS` steps (ZeRO-1).

    Examples:
        >>> from scale_lightning import FabricScaleOSSStrategy
        >>> strategy = FabricScaleOSSStrategy()  # Fabric(strategy=strategy, accelerator="cpu", devices=2)

    See also: [the guide to Lightning](../guides/trainers.md#lightning).
    """

    def setup_module(self, module: nn.Module) -> Any:
        self._modules.append(module)
        return super().setup_module(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return as_oss(optimizer, self._oss_options)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        module = self.setup_module(module)
        return module, self._replaced(optimizers, scheduler), scheduler

    def _replaced(self, optimizers: Sequence[Optimizer], scheduler: Any) -> list[Optimizer]:
        replaced = {optimizer: as_oss(optimizer, self._oss_options) for optimizer in optimizers}
        replace_in_schedulers([] if scheduler is None else [scheduler], replaced)
        return list(replaced.values())


class FabricScaleShardedDDPStrategy(ShardedDDPOptions, FabricScaleOSSStrategy):
    """`ShardedDataParallel` and `OSS` for Fabric: gradients and optimizer state are sharded (ZeRO-2).

    The module and its optimizer are set up together.

    Examples:
        >>> from scale_lightning import FabricScaleShardedDDPStrategy
        >>> strategy = FabricScaleShardedDDPStrategy()  # Fabric(strategy=strategy, accelerator="cpu", devices=2)

    See also: [the guide to Lightning](../guides/trainers.md#lightning).
    """

    def setup_module(self, module: nn.Module) -> Any:
        """The module itself, to be evaluated; one that trains is set up with its optimizer."""
        self._modules.append(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise RuntimeError(self._err_msg_joint_setup_required())

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        self._modules.append(module)
        sharded = self._replaced(optimizers, scheduler)
        return ShardedDataParallel(module, sharded, **self._wrapper_options), sharded, scheduler


def plain(module: nn.Module) -> nn.Module:
    """The module inside of a data parallel wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel | ShardedDataParallel):
        return cast(nn.Module, module.module)
    return module


def _parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """The modules and optimizers of what Fabric saves."""
    parts = {name: obj for name, obj in state.items() if isinstance(obj, nn.Module | Optimizer)}
    return {name: plain(obj) if isinstance(obj, nn.Module) else obj for name, obj in parts.items()}


def _state_of(obj: Any) -> Any:
    return obj.state_dict() if hasattr(obj, "state_dict") else obj
