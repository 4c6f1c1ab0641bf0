"""Strategies for Lightning's Trainer.

Ranks, process groups and launchers are as in Lightning's `DDPStrategy`. What is sharded, how a step enters the model
and what a checkpoint holds is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_fsdp import ShardOptions, full_state_dict, fully_shard, fully_shard_modules, register_fsdp_forward_method
from scale_fsdp.wrapping.auto_wrap import get_fsdp_instances
from scale_lightning.checkpoints import load_sharded, save_sharded
from scale_lightning.optimizers import (
    as_oss,
    load_whole_optimizer_state,
    replace_in_schedulers,
    use_sharded_scaler,
    whole_optimizer_state,
)
from scale_lightning.options import CheckpointOptions, FSDPOptions, OSSStrategyOptions, ShardedDDPOptions
from scale_oss import ShardedDataParallel

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class _ShardedCheckpoints(CheckpointOptions, DDPStrategy):
    """Whole checkpoints of rank 0, as Lightning's own strategies have them, or folders that all ranks write."""

    def setup_environment(self) -> None:
        super().setup_environment()
        use_sharded_scaler(self.precision_plugin)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """What is gathered in inference mode could not be trained with afterwards; without gradients it can."""
        with torch.inference_mode(False), torch.no_grad():
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation():
            return super().predict_step(*args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {} if self._state_dict_type == "sharded" else self._whole_state_dict()

    def _whole_state_dict(self) -> dict[str, Any]:
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._state_dict_type == "sharded":
            return {}
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return whole_optimizer_state(self._module, inner)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = Path(self.broadcast(str(filepath)))
        if self._state_dict_type == "full":
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        optimizers = self._named_optimizers() if "optimizer_states" in checkpoint else {}
        remainder = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        remainder["saved_optimizers"] = len(optimizers)
        save_sharded(path, checkpoint["global_step"], {"model": self._module, **optimizers}, remainder)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        if not path.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        objects = {"model": self._module, **self._named_optimizers()}
        remainder: dict[str, Any] = load_sharded(
            path, objects, weights_only=weights_only, strict=self._module.strict_loading
        )
        if remainder.pop("saved_optimizers"):
            remainder["optimizer_states"] = []  # Loaded already; Lightning asks whether there were any.
        return remainder

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if "state_dict" in checkpoint:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_whole_optimizer_state(self._module, optimizer, state)

    def _named_optimizers(self) -> dict[str, Optimizer]:
        return {f"optimizer_{number}": optimizer for number, optimizer in enumerate(self.optimizers)}

    def teardown(self) -> None:
        """As Lightning's, but that the model and the state stay where the ranks have their shards of them."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.model = self.lightning_module
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class ScaleFSDPStrategy(FSDPOptions, _ShardedCheckpoints):
    """Fully sharded data parallelism for the Trainer: each rank holds a shard of parameters, gradients and state.

    The LightningModule becomes the outermost unit, and the modules that `auto_wrap_policy` selects units inside of it.
    A `configure_model` that calls `fully_shard` itself chooses its own units; what it builds on the meta device is
    initialized unit by unit. Gradients are clipped as the arguments of `Trainer` say: by the norm over all ranks, or by
    value.

    Examples:
        >>> from scale_lightning import ScaleFSDPStrategy
        >>> strategy = ScaleFSDPStrategy()  # Trainer(strategy=strategy, accelerator="cpu", devices=2)

    See also: [the guide to Lightning](../guides/trainers.md#lightning).
    """

    def setup(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning gives it to each instance
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ValueError(
                    f"{type(callback).__name__} copies the model before it is sharded, and averages full parameters: "
                    "keep a scale_fsdp.ShardedEMA(module) in a callback of your own, made in on_fit_start and updated "
                    "in on_train_batch_end; or take strategy='scale_sharded_ddp'"
                )
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync is not None:
            self._layer_sync.apply(self._module)
        self.precision_plugin.convert_module(self._module)
        self.model = shard(self._module, self.root_device, self._policy, self._shard_options)
        for name in STEPS if self._module.automatic_optimization else STEPS[1:]:
            register_fsdp_forward_method(self._module, name)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def block_backward_sync(self) -> Any:
        return self._sharded.no_sync()

    @property
    def _sharded(self) -> Any:
        """The module, with the methods that `fully_shard` has added."""
        return self._module

    def _whole_state_dict(self) -> dict[str, Any]:
        return full_state_dict(self._module, rank_0_only=True, device="cpu")


class ScaleOSSStrategy(OSSStrategyOptions, _ShardedCheckpoints):
    """Optimizer state sharding for the Trainer: `DistributedDataParallel` averages, and `OSS` steps (ZeRO-1).

    The optimizers of `configure_optimizers` become `OSS` of the same class, groups and settings, in schedulers too; one
    that is an `OSS` already stays unchanged.

    Examples:
        >>> from scale_lightning import ScaleOSSStrategy
        >>> strategy = ScaleOSSStrategy()  # Trainer(strategy=strategy, accelerator="cpu", devices=2)

    See also: [the guide to Lightning](../guides/trainers.md#lightning).
    """

    _frozen: Mapping[str, nn.Parameter] = MappingProxyType({})  # When DistributedDataParallel was built

    def configure_ddp(self) -> None:
        self._frozen = {name: param for name, param in self._module.named_parameters() if not param.requires_grad}
        super().configure_ddp()

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        for name, param in self._frozen.items():
            if param.requires_grad:
                raise ValueError(
                    f"'{name}' was frozen when DistributedDataParallel was built around it, which averages no gradient "
                    "of it: take strategy='scale_sharded_ddp', which goes by what requires a gradient now, or freeze "
                    "it in on_fit_start, after the wrapper is built"
                )
        return super().optimizer_step(optimizer, *args, **kwargs)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        replaced = {optimizer: as_oss(optimizer, self._oss_options) for optimizer in self.optimizers}
        replace_in_schedulers([config.scheduler for config in self.lr_scheduler_configs], replaced)
        self.optimizers = list(replaced.values())


class ScaleShardedDDPStrategy(ShardedDDPOptions, ScaleOSSStrategy):
    """`ShardedDataParallel` and `OSS` for the Trainer: gradients and optimizer state are sharded (ZeRO-2).

    A LightningModule that optimizes by itself raises an error.

    Examples:
        >>> from scale_lightning import ScaleShardedDDPStrategy
        >>> strategy = ScaleShardedDDPStrategy()  # Trainer(strategy=strategy, accelerator="cpu", devices=2)

    See also: [the guide to Lightning](../guides/trainers.md#lightning).
    """

    def configure_ddp(self) -> None:
        """Nothing yet: the wrapper needs the optimizers."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        if not self._module.automatic_optimization:
            raise ValueError(
                f"{type(self._module).__name__} sets automatic_optimization=False, and under ShardedDataParallel its "
                "backward passes would run inside of the forward: use strategy='scale_oss', or let the Trainer optimize"
            )
        super().setup_optimizers(trainer)
        self.model = ShardedDataParallel(self._module, self.optimizers, **self._wrapper_options)

    def on_train_end(self) -> None:
        assert isinstance(self.model, ShardedDataParallel)
        self.model.wait()  # With `overlap_gather`, what the last step has sent is still on its way.

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert isinstance(self.model, ShardedDataParallel)
        with self.model.no_sync():
            yield


def shard(module: nn.Module, device: torch.device, policy: Any, options: Mapping[str, Any]) -> Any:
    """Returns the module with what it has outside of units sharded; one that is a unit already, unchanged."""
    if module in get_fsdp_instances(module):
        return module
    shard_options = options.get("options") or ShardOptions()
    if shard_options.compute_device is None:
        shard_options = replace(shard_options, compute_device=device)
    options = {**options, "options": shard_options}
    move_to(module, device)
    return fully_shard(module, **options) if policy is None else fully_shard_modules(module, policy, **options)


def move_to(module: nn.Module, device: torch.device) -> None:
    """Moves what has values to the device; what is on meta gets them later."""

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    module._apply(move)
