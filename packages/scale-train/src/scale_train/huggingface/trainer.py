"""transformers' `Trainer` over sharded models and optimizers: a mixin for it and for trainers derived from it.

The program stays unchanged; the mixin changes methods that Trainer documents for subclasses: which model and
optimizer are built, what is written with the weights, and read again. Needs `scale-train[transformers]`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, Trainer
from transformers.utils.versions import require_version

import scale_snapshot
from scale_fsdp import FSDPModule, full_state_dict, fully_shard_modules, no_split_policy
from scale_oss import OSS, ShardedDataParallel

require_version(
    "transformers>=5.23",
    "Before, its Trainer saves weights on rank 0 only, and the other ranks of a sharded model would wait for it until "
    'their time limit. Write python -m pip install "transformers>=5.23"',
)

Sharding = Literal["fsdp", "sharded_ddp", "oss"]
_SNAPSHOTS = "scale"  # the directory inside of a checkpoint's


if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class ScaleTrainerMixin(_Base):
    """Gives a trainer of transformers, or one derived from it, a sharded model or optimizer. Name it first.

        class ShardedSFTTrainer(ScaleTrainerMixin, trl.SFTTrainer): ...

    Full weights are saved as by `save_pretrained`. In `checkpoint-N/scale` it also saves a snapshot of weights,
    optimizer and scheduler. Any number of ranks resumes from it, so all ranks must see the output directory.

    Args:
        args: Arguments of the trainer. Keywords that are not named here also go to the trainer.
        sharding: "fsdp" cuts parameters, gradients and optimizer state (`fully_shard`), "sharded_ddp" the last two
            (`ShardedDataParallel`), "oss" the optimizer state, with `DistributedDataParallel`.
        sharding_options: Keywords for `fully_shard_modules`, with `policy` if it is not to be the blocks that the model
            names in `_no_split_modules`; otherwise for `OSS`.

    Raises:
        ValueError: A different `sharding`, or an option of the trainer that it does not support.

    See also: [the guide to the Trainer](../guides/trainers.md#the-trainer).
    """

    def __init__(
        self,
        *args: Any,
        sharding: Sharding = "fsdp",
        sharding_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if sharding not in get_args(Sharding):
            raise ValueError(f"sharding: expected one of {', '.join(get_args(Sharding))}, got {sharding!r}")
        self.sharding = sharding
        self.sharding_options = dict(sharding_options or {})
        self.optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None  # the trainer's, which has no type
        self._num_flop_params: int | None = None  # of the full model; None as long as it isn't sharded
        super().__init__(*args, **kwargs)
        self._check_arguments()

    def create_accelerator_and_postprocess(self) -> None:
        """Builds the accelerator, which also sees the model inside our wrapper, because losses depend on its class."""
        super().create_accelerator_and_postprocess()
        unwrap_model = self.accelerator.unwrap_model

        def unwrap(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            inner = model.module if isinstance(model, ShardedDataParallel) else model
            unwrapped: nn.Module = unwrap_model(inner, *args, **kwargs)
            return unwrapped

        self.accelerator.unwrap_model = unwrap

    def _check_arguments(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            engine_name = "FSDP" if self.is_fsdp_enabled else "DeepSpeed"
            raise ValueError(
                f"the trainer is set up for accelerate's {engine_name}, which would shard the model a second time. "
                "Leave fsdp=, deepspeed= and accelerate's configuration file out; sharding= says how it is sharded"
            )
        if self.args.fp16:
            raise ValueError("fp16=True: accelerate's gradient scaler does not look at all shards. Write bf16=True")
        if self.args.torch_compile and self.sharding != "oss":
            raise ValueError(
                f"torch_compile=True: accelerate would compile around the collectives of sharding={self.sharding!r}. "
                "Leave it out, and compile the blocks before: for block in model.model.layers: block.compile()"
            )
        if self.optimizer is None:
            return
        if self.sharding == "fsdp" or not isinstance(_plain(self.optimizer), OSS):
            raise ValueError(
                f"optimizers: got {type(self.optimizer).__name__} over the full parameters, but sharding="
                f"{self.sharding!r} builds it over shards. Pass optimizer_cls_and_kwargs=(torch.optim.AdamW, "
                "{'lr': 1e-3}) instead, or optim= and learning_rate= of TrainingArguments"
            )

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Shards the model if that is asked for, and builds the optimizer over it."""
        if self.sharding == "fsdp":
            self._shard_model()
        elif self.optimizer is None:
            full_model: Any = self.model
            cls, kwargs = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, full_model)
            if cls is not OSS:  # as in the second of several trainings, each with a model of its own
                self.optimizer_cls_and_kwargs = (OSS, {"optim": cls, **self.sharding_options, **kwargs})
        optimizer: Optimizer = super().create_optimizer(model)
        if isinstance(optimizer, OSS) and optimizer.state:
            optimizer.consolidate_state_dict(-1)  # accelerate reads an optimizer's state before its first step.
        return optimizer

    def _shard_model(self) -> None:
        model: Any = self.model
        if isinstance(model, FSDPModule):
            return
        if isinstance(model, PreTrainedModel):
            self._num_flop_params = model.num_parameters(exclude_embeddings=True)
        else:
            self._num_flop_params = sum(param.numel() for param in model.parameters())
        options = dict(self.sharding_options)
        policy = options.pop("policy", None) or no_split_policy(model)
        fully_shard_modules(model, policy, **options)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training or self.sharding == "oss":
            if training and model is self.model:
                # accelerate marks a model that was evaluated first, and would then train it without DDP.
                model._is_accelerate_prepared = False  # type: ignore[assignment]
            wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
            return wrapped
        # Autocast is accelerate's. A model that it has prepared it will not wrap in DDP.
        self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        if self.sharding == "fsdp" or isinstance(model, ShardedDataParallel):
            return model
        return ShardedDataParallel(model, _plain(self.optimizer))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Returns the operations of a training step, of the full model and not of this rank's shards."""
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if self._num_flop_params is None or tokens is None:
            return int(super().floating_point_ops(inputs))
        return int(6 * tokens.numel() * self._num_flop_params)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves full weights; all ranks call it together."""
        if isinstance(self.model, FSDPModule) and state_dict is None:
            state_dict = full_state_dict(self.model, rank_0_only=True, device="cpu")
        elif isinstance(_plain(self.optimizer), OSS):
            _plain(self.optimizer).wait()  # The updated parameters arrive during the next forward pass.
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir, _SNAPSHOTS)
        if self.is_world_process_zero() and folder.exists():
            shutil.rmtree(folder)  # of an earlier run: a snapshot is never replaced
        _barrier()
        scale_snapshot.save(folder, self.state.global_step, self._objects())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if Path(checkpoint, _SNAPSHOTS).is_dir():
            scale_snapshot.load(Path(checkpoint, _SNAPSHOTS), self._objects())
            return
        if self.sharding == "fsdp" and Path(checkpoint, "optimizer.pt").exists():
            raise ValueError(
                f"{checkpoint} was saved by a plain Trainer, whose optimizer.pt has no names of parameters. Start from "
                "its weights, from_pretrained(checkpoint), or resume with sharding='oss' and save once"
            )
        super()._load_optimizer_and_scheduler(checkpoint)

    def _objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": _plain(self.optimizer), "scheduler": self.lr_scheduler}


class ScaleTrainer(ScaleTrainerMixin, Trainer):
    """transformers' `Trainer` with a sharded model or optimizer: see `ScaleTrainerMixin`.

        trainer = ScaleTrainer(model, args, train_dataset=train, sharding="fsdp")  # was Trainer(model, args, ...)
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model("weights")  # from_pretrained("weights") reads them

    See also: [the guide to the Trainer](../guides/trainers.md#the-trainer).
    """


def _plain(optimizer: Any) -> Any:
    """Returns the optimizer inside accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _barrier() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
