"""A program's model as our packages train it: wrapped, stepped, clipped, saved and loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fuzz_programs import Evaluate, Fail, Freeze, Program, Train, Wrapping, flat_list
from shard_arguments import shard_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, OneCycleLR

from scale_adascale import AdaScale
from scale_check.fuzz.models import Boom, Net, batch_of, build, loss_of
from scale_checkpoint import checkpoint_modules
from scale_core import clip_grad_norm_
from scale_core.comm.group import Group
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from scale_oss import OSS, OSSOptions, ShardedDataParallel
from scale_pipe import DistributedPipe, Pipe, PipelineOptions, split
from scale_snapshot import load_snapshot, save_snapshot
from scale_tp import parallelize

LIMIT_SECONDS = 15.0
"""How long a rank waits for another one that has failed."""

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(*sizes: int) -> DeviceMesh:
    """A mesh of the ranks, made once: groups are kept as long as their ranks are."""
    names = ("pipe", "copies", "data", "tensor")[-len(sizes) :]
    if sizes not in _meshes:
        _meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return _meshes[sizes]


def optimizer_of(program: Program, named: Iterator[tuple[str, Tensor]], make: Callable[[Any], Optimizer]) -> Optimizer:
    """An optimizer with the parameter groups of the program."""
    params = list(named)
    if not program.groups:
        return make([param for _, param in params])
    special = [param for name, param in params if name.endswith(("bias", "scale"))]
    rest = [param for name, param in params if not name.endswith(("bias", "scale"))]
    return make([{"params": rest}, {"params": special, "lr": program.options["lr"] / 2, "weight_decay": 0.0}])


def scheduler_of(program: Program, optimizer: Optimizer) -> LRScheduler | None:
    """What changes the learning rates, and with one cycle the momentum."""
    if program.lr_schedule == "exponential":
        return ExponentialLR(optimizer, 0.8)
    if program.lr_schedule == "one_cycle":
        rates = [2 * group["lr"] for group in optimizer.param_groups]
        return OneCycleLR(optimizer, rates, total_steps=40, cycle_momentum="momentum" in program.options)
    return None


class Wrapped:
    """A model under one wrapping, on one rank.

    Args:
        program: What the model and the optimizer are.
        wrapping: How it is wrapped.
        seed: Of the values that it begins with.
    """

    def __init__(self, program: Program, wrapping: Wrapping, seed: int) -> None:
        self.program = program
        self.wrapping = wrapping
        self.pipe: DistributedPipe | None = None
        pipe, data, tensor = wrapping.mesh
        self.mesh = mesh_of(pipe, 1, data, tensor)
        self.data = self.mesh["data"].get_group()
        self.rank = self.mesh["data"].get_local_rank()
        net = build(program.model, seed)
        if wrapping.checkpoints_first:
            self._checkpoint(net)
        self.net: nn.Module = net
        if wrapping.pipeline is not None:
            self._build_pipeline(net)
        else:
            if wrapping.plan:
                parallelize(net, dict(wrapping.plan), self.mesh["tensor"])
            self._wrap_net(net)
        if not wrapping.checkpoints_first:
            self._checkpoint(net)
        if program.adascale:
            chunks = wrapping.pipeline.chunks if wrapping.pipeline else 1
            passes = next(step.passes for step in program.steps if isinstance(step, Train))
            self.optimizers = [
                AdaScale(
                    each,
                    num_gradients_to_accumulate=passes * chunks,
                    process_group=self.data,
                    model_parallel_group=self._model_parallel_group,
                )
                for each in self.optimizers
            ]
        self.schedulers = [each for each in (scheduler_of(program, one) for one in self.optimizers) if each]

    @property
    def _model_parallel_group(self) -> Any:
        """The ranks that have other parts of the model: with two such axes there is no third one."""
        pipe, data, tensor = self.wrapping.mesh
        if pipe > 1 and tensor > 1:
            assert data == 1
            return dist.group.WORLD
        return self.mesh["pipe"].get_group() if pipe > 1 else None

    def _checkpoint(self, net: nn.Module) -> None:
        hows = self.wrapping.checkpointed
        if hows:
            checkpoint_modules(net, lambda name, module: hows.get(name))

    def _make(self, named: Iterator[tuple[str, Tensor]], ranks: Any = None) -> Optimizer:
        """The optimizer of these parameters, sharded or not."""
        program = self.program
        kind: type[Optimizer] = getattr(torch.optim, program.optimizer)
        if ranks is None:
            return optimizer_of(program, named, lambda params: kind(params, **program.options))
        numel = self.wrapping.options["bucket_numel"]
        shared = OSSOptions(bucket_numel=numel, limit_seconds=LIMIT_SECONDS)
        return optimizer_of(program, named, lambda params: OSS(params, kind, ranks, options=shared, **program.options))

    def _wrap_net(self, net: Net) -> None:
        kind, options = self.wrapping.kind, self.wrapping.options
        self.module: nn.Module = net
        if kind in {"fully_shard", "FullyShardedDataParallel"}:
            ranks: Any = self.data
            if self.wrapping.copies:
                ranks = mesh_of(self.wrapping.copies, self.wrapping.mesh[1] // self.wrapping.copies, 1)
                ranks = ranks["copies", "data"]
            self._shard_units(net, ranks)
            if kind == "fully_shard":
                arguments = shard_arguments(limit_seconds=LIMIT_SECONDS, **self._shard_options())
                self.module = fully_shard(net, ranks, **arguments)
            else:
                self.module = FullyShardedDataParallel(net, ranks, limit_seconds=LIMIT_SECONDS, **options)
            self.optimizers = [self._make(self.module.named_parameters())]
        elif kind in {"ddp", "oss"}:
            self.module = self._ddp(net)
            self.optimizers = [self._make(net.named_parameters(), self.data if kind == "oss" else None)]
        elif kind == "sharded_ddp":
            self.optimizers = [self._make(net.named_parameters(), self.data)]
            self.module = self._sharded_ddp(net, self.optimizers[0])
        else:
            self._build_one_process(net)

    def _ddp(self, module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return DistributedDataParallel(
                module,
                process_group=self.data,
                broadcast_buffers=self.wrapping.options["broadcast_buffers"],
                find_unused_parameters=self._may_be_unused,
            )

    @property
    def _may_be_unused(self) -> bool:
        return any(block[0] in {"unused", "sometimes"} for block in flat_list(self.program.model.blocks))

    def _sharded_ddp(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        options = {key: value for key, value in self.wrapping.options.items() if key != "bucket_numel"}
        return ShardedDataParallel(module, optimizer, self.data, **options)

    def _shard_options(self) -> dict[str, Any]:
        """The arguments of `fully_shard`."""
        options = dict(self.wrapping.options)
        if options.pop("move_params_to_cpu", False):
            options["offload_policy"] = CPUOffloadPolicy()
        return options

    def _shard_units(self, net: nn.Module, ranks: Any) -> None:
        options = {key: value for key, value in self._shard_options().items() if key != "reshard_after_forward"}
        for name, reshards in sorted(self.wrapping.units, key=lambda unit: -unit[0].count(".")):
            try:
                module = net.get_submodule(name)
            except AttributeError:  # On another stage.
                continue
            if any(True for _ in module.parameters()) or self.pipe is None:
                fully_shard(
                    module,
                    ranks,
                    **shard_arguments(reshard_after_forward=reshards, limit_seconds=LIMIT_SECONDS, **options),
                )

    def _build_one_process(self, net: Net) -> None:
        layers = nn.Sequential(net.entry, *net.blocks, net.exit)
        balance = self.wrapping.options["balance"]
        self.module = Pipe(
            layers,
            balance=balance,
            devices=["cpu"] * len(balance),
            chunks=self.wrapping.options["chunks"],
            checkpoint=self.wrapping.options["checkpoint"],
        )
        self.optimizers = [self._make(net.named_parameters())]

    def _build_pipeline(self, net: Net) -> None:
        pipeline = self.wrapping.pipeline
        assert pipeline is not None
        self.pipe = self.module = DistributedPipe(
            split(net, list(pipeline.cuts)) if pipeline.cuts else [net],
            pipeline.schedule,
            chunks=pipeline.chunks,
            options=PipelineOptions(stages_per_rank=pipeline.stages_per_rank, limit_seconds=LIMIT_SECONDS),
            process_group=self.mesh["pipe"],
            checkpoint=pipeline.checkpoint,
        )
        kind = self.wrapping.kind
        self.optimizers = []
        for index, stage in self.pipe.stages.items():
            has_params = {name for name, module in stage.named_modules() if any(True for _ in module.parameters())}
            plan = {name: style for name, style in self.wrapping.plan.items() if name in has_params}
            if self.wrapping.mesh[2] > 1 and not plan:  # Alike on all of these ranks, and counted once.
                plan = {
                    name: "replicate" for name, part in stage.named_children() if any(True for _ in part.parameters())
                }
            if plan:
                parallelize(stage, plan, self.mesh["tensor"])
            trains = any(param.requires_grad for param in stage.parameters())
            if kind == "fully_shard" and has_params:
                self._shard_units(stage, self.data)
                if "" not in dict(self.wrapping.units):
                    fully_shard(
                        stage, self.data, **shard_arguments(limit_seconds=LIMIT_SECONDS, **self._shard_options())
                    )
            elif kind == "ddp" and trains:
                self.pipe.stages[index] = self._ddp(stage)
            elif kind == "sharded_ddp" and trains:
                optimizer = self._make(stage.named_parameters(), self.data)
                self.optimizers.append(optimizer)
                self.pipe.stages[index] = self._sharded_ddp(stage, optimizer)
            elif kind == "sharded_ddp" and has_params:  # All frozen: still of a group, as in the plain optimizer.
                self.optimizers.append(self._make(stage.named_parameters()))
        if kind != "sharded_ddp":
            self.optimizers = [self._make(self.pipe.named_parameters())]
        self.net = self.pipe

    # What is done.

    def train(self, number: int, step: Train) -> tuple[list[float], float | None]:
        """One step; returns the losses of this rank's passes, and the norm where it clips."""
        self.module.train(not step.evaluating)
        losses = [self._pass(number, turn, step) for turn in range(step.passes)]
        norm = None if step.clip is None else float(self._clip(step))
        for optimizer in self.optimizers:
            optimizer.step()
        if step.schedule:
            for scheduler in self.schedulers:
                scheduler.step()
        if step.zero_by_model and self.wrapping.kind != "sharded_ddp":
            self.module.zero_grad(set_to_none=step.set_to_none)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=step.set_to_none)
        return losses, norm

    def _pass(self, number: int, turn: int, step: Train) -> float:
        program, chunks = self.program, self.chunks
        batch = batch_of(program.model, program.samples * chunks, program.seed, number, turn, self.rank)
        torch.manual_seed(hash((number, turn, self.rank)) % 2**31)
        if self.pipe is not None:
            return float(self.pipe.step(batch, loss_fn=lambda output: loss_of(output) / step.passes))
        with self._no_sync() if step.no_sync and turn < step.passes - 1 else nullcontext():
            loss = loss_of(self.module(batch)) / step.passes
            loss.backward()
        return float(loss.detach())

    @property
    def chunks(self) -> int:
        """Into how many micro-batches a batch of one rank is cut."""
        return self.wrapping.pipeline.chunks if self.wrapping.pipeline else 1

    def _no_sync(self) -> AbstractContextManager[Any]:
        return self.module.no_sync() if hasattr(self.module, "no_sync") else nullcontext()

    def _clip(self, step: Train) -> Tensor:
        assert step.clip is not None
        if step.clip_by == "torch":
            return nn.utils.clip_grad_norm_(self.module.parameters(), step.clip, step.norm_type)
        if self.pipe is not None or hasattr(self.module, "clip_grad_norm_"):
            return self.module.clip_grad_norm_(step.clip, step.norm_type)
        optimizer = self.optimizers[0]
        optimizer = optimizer.optimizer if isinstance(optimizer, AdaScale) else optimizer
        if isinstance(optimizer, OSS):
            return optimizer.clip_grad_norm_(step.clip, step.norm_type)
        return clip_grad_norm_(list(self.module.parameters()), step.clip, step.norm_type)

    def fail(self, number: int, step: Fail) -> None:
        """A forward pass that raises, on all ranks, and is caught."""
        program = self.program
        batch = batch_of(program.model, program.samples, program.seed, number, 0, self.rank)
        torch.manual_seed(hash((number, 0, self.rank)) % 2**31)
        self.module.train()
        net = self.module.module if isinstance(self.module, ShardedDataParallel) else self.net
        net.fails_at = step.block
        try:
            loss_of(self.module(batch)).backward()
        except Boom:
            pass
        else:
            raise AssertionError("the forward pass did not fail")
        finally:
            net.fails_at = None
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def evaluate(self, number: int, step: Evaluate) -> Any:
        """The output of a pass without gradients; None where this rank has none."""
        program = self.program
        batch = batch_of(program.model, program.samples * self.chunks, program.seed, number, 0, self.rank)
        torch.manual_seed(hash((number, 0, self.rank)) % 2**31)
        self.module.train(not step.evaluating)
        with torch.no_grad() if step.mode == "no_grad" else torch.inference_mode():
            return self.module(batch) if self.pipe is None else self.pipe.evaluate(batch)

    def freeze(self, step: Freeze) -> None:
        """Freezes parameters, or thaws them."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for name, param in self._saved.named_parameters():
            if name.startswith(f"{step.prefix}."):
                param.requires_grad_(step.trains)
        for optimizer in self.optimizers:  # AdaScale looks anew which parameters there are.
            optimizer.zero_grad()

    # Its state.

    def save(self, folder: Path, step: int, *, with_optimizer: bool) -> None:
        """Writes a snapshot, on all ranks together."""
        optimizers = self.optimizers if with_optimizer else None
        save_snapshot(folder, step, sharded_state_dict(self._saved, optimizers))

    def load(self, folder: Path, step: int) -> None:
        """Reads a snapshot, on all ranks together."""
        model, optimizer = self._saved, self.optimizers
        read = load_snapshot(folder, lambda saved: target_state_dict(model, optimizer, saved), step=step)
        load_sharded_state_dict(read.state, model, optimizer, copy=False)

    @property
    def _saved(self) -> nn.Module:
        if self.wrapping.kind == "pipe":
            return self.net
        is_wrapper = isinstance(self.module, DistributedDataParallel | ShardedDataParallel)
        return self.module.module if is_wrapper else self.module

    @property
    def is_divided(self) -> bool:
        """Whether its state is what a snapshot gives."""
        return self.wrapping.mesh[2] > 1

    def state(self, folder: Path, step: int) -> dict[str, Tensor]:
        """The full parameters and buffers under the names of the plain model."""
        if not self.is_divided:  # Of a pipeline, what this rank has.
            return {name: tensor.clone() for name, tensor in self._saved.state_dict().items()}
        self.save(folder, step, with_optimizer=False)
        plain = build(self.program.model, 1)
        read_into(plain, None, folder, step)
        return dict(plain.state_dict())


def read_into(plain: nn.Module, optimizer: Optimizer | None, folder: Path, step: int) -> None:
    """Reads a snapshot into a plain model, on one rank by itself."""
    read = load_snapshot(folder, lambda saved: target_state_dict(plain, optimizer, saved), Group(), step=step)
    load_sharded_state_dict(read.state, plain, optimizer, copy=False)
