"""What comes of wrong arguments: every public function and class, one wrong argument at a time.

    python tools/bad_inputs.py                         # all of them: a table
    python tools/bad_inputs.py scale_oss fully_shard   # those whose names contain a word, with what is not clear
    python tools/bad_inputs.py --smoke                 # the whole, too: it takes seconds
    python tools/bad_inputs.py --date 2026-11-23       # also writes benchmarks/results/2026-11-23-bad_inputs.*

Of each public callable there is a right call. For each of its parameters in turn, given in it or not, the right value
is exchanged for wrong ones that follow from the annotation: an object of no use, None, a number below zero, a number as
text, no number (NaN), a fraction, a word that is no choice, an empty list, a single value or text in the place of a
list, a class in the place of an object and the other way round. `RIGHT` has those that are right all the same.

An outcome is *clear* if it is a `ValueError`, a `TypeError` or an error of our tree, raised by our code, whose text
names the parameter, or says what was expected and what came. It is *unclear* if it is any other error: the text of
torch or Python, an `AttributeError`, an assertion. *Taken* means that there was no error.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scale_core.errors import ScaleError
from scale_tp import destroy_model_parallel

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from report import Table, save

MODULES = (
    "scale_core",
    "scale_snapshot",
    "scale_core.state",
    "scale_core.launch",
    "scale_core.testing.faults",
    "scale_snapshot.convert",
    "scale_adascale",
    "scale_checkpoint",
    "scale_fsdp",
    "scale_oss",
    "scale_pipe",
    "scale_tp",
    "scale_tp.megatron",
    "scale_train",
)
SGD = torch.optim.SGD
LIMIT_SECONDS = 5
Arguments = dict[str, Any]


class Useless:
    """An object that is nothing that anything expects."""

    def __repr__(self) -> str:
        return "<Useless>"


# Right calls.


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def params() -> list[nn.Parameter]:
    made = [*layers().parameters()]
    for param in made:
        param.grad = torch.ones_like(param)
    return made


def folder() -> str:
    return tempfile.mkdtemp(dir=_TEMPORARY.name)


_TEMPORARY = tempfile.TemporaryDirectory(prefix="bad-inputs-")
x = torch.ones(2, 4)


def saved() -> str:
    import scale_snapshot

    place = folder()
    scale_snapshot.save(place, 1, {"model": layers()})
    return place


def flat_saved() -> str:
    import scale_snapshot

    place = folder()
    scale_snapshot.save_snapshot(place, 1, {"x": torch.ones(2)})
    return place


def torch_saved() -> str:
    place = folder() + "/weights.pt"
    torch.save(layers().state_dict(), place)
    return place


def sharded() -> nn.Module:
    from scale_fsdp import fully_shard

    return fully_shard(layers())


def sharded_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded()
    return model, torch.optim.AdamW(model.parameters())


def sgd_and_model() -> Arguments:
    model = layers()
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1)}


def oss(model: nn.Module | None = None) -> Any:
    from scale_oss import OSS

    return OSS((model or layers()).parameters(), SGD, lr=0.1)


def adascale() -> Any:
    from scale_adascale import AdaScale

    return AdaScale(SGD(params(), lr=0.1))


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))


def memory_profile(model: nn.Module | None = None) -> Any:
    from scale_checkpoint.planner.profile import profile_memory

    return profile_memory(model or blocks(), x, repeats=1)


def costs(stages: int = 2) -> Any:
    from scale_pipe import Costs

    return Costs((1.0,) * stages, (1.0,) * stages, (1.0,) * stages, (0.0,) * (stages - 1))


def schedule() -> Any:
    from scale_pipe.schedules.classic import one_forward_one_backward

    return one_forward_one_backward(2, 4)


def simulation() -> Any:
    from scale_pipe import simulate

    return simulate(schedule(), costs())


def optim_and_params() -> Arguments:
    model = layers()
    return {"module": model, "sharded_optimizer": oss(model)}


def scheduler_and_optimizer() -> Arguments:
    optimizer = adascale()
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "optimizer": optimizer}


def spec(optim: type = SGD, **options: Any) -> Any:
    return optim, {"lr": 0.1, **options}


def full_state() -> Arguments:
    from scale_fsdp import full_optim_state_dict

    model, optimizer = sharded_and_optimizer()
    return {"full": full_optim_state_dict(model, optimizer), "model": model, "optimizer": optimizer}


def model_with_state() -> Arguments:
    from scale_core.state import sharded_state_dict

    model, optimizer = sharded_and_optimizer()
    return {"state": sharded_state_dict(model, optimizer), "model": model, "optimizer": optimizer}


def _saved_names() -> Arguments:
    given = model_with_state()
    return {"model": given["model"], "optimizer": given["optimizer"], "saved": given["state"]}


def pooled(optimizer: bool = True) -> Arguments:
    model, made = sharded_and_optimizer()
    return {"model": model, "optimizer": made} if optimizer else {"model": model}


def head(batch: int = 1) -> torch.Tensor:
    return torch.ones(batch, 2, 4, 8)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


CALLS: dict[str, Callable[[], Arguments]] = {
    "scale_core.LateRanks": dict,
    "scale_core.ShardedGradScaler": lambda: {"device": "cpu"},
    "scale_core.check_replicas": lambda: {"model": layers()},
    "scale_core.clip_grad_norm_": lambda: {"params": params(), "max_norm": 1.0},
    "scale_core.grad_norm": lambda: {"params": params()},
    "scale_core.group_of": dict,
    "scale_core.join": lambda: {"batches": [x, x]},
    "scale_core.num_parameters": lambda: {"model": layers()},
    "scale_core.hooks.gradients.register_grad_published_hook": lambda: {"callback": print},
    "scale_core.hooks.gradients.register_local_grad_hook": lambda: {"callback": print},
    "scale_core.hooks.gradients.register_reduced_grad_hook": lambda: {"callback": print},
    "scale_snapshot.save": lambda: {"directory": folder(), "step": 1, "objects": {"model": layers()}},
    "scale_snapshot.async_save": lambda: {"directory": folder(), "step": 1, "objects": {"model": layers()}},
    "scale_snapshot.load": lambda: {"directory": saved(), "objects": {"model": layers()}},
    "scale_snapshot.save_snapshot": lambda: {"directory": folder(), "step": 1, "state": {"x": torch.ones(2)}},
    "scale_snapshot.load_snapshot": lambda: {"directory": flat_saved(), "state": {"x": torch.ones(2)}},
    "scale_snapshot.latest": lambda: {"directory": saved()},
    "scale_snapshot.latest_snapshot": lambda: {"directory": saved()},
    "scale_snapshot.verify_snapshot": lambda: {"path": saved() + "/step-00000001"},
    "scale_snapshot.RandomState": dict,
    "scale_snapshot.PerRank": lambda: {"obj": SGD(params(), lr=0.1)},
    "scale_core.state.sharded_state_dict": lambda: pooled(),
    "scale_core.state.load_sharded_state_dict": lambda: model_with_state(),
    "scale_core.state.target_state_dict": _saved_names,
    "scale_core.launch.init_distributed": lambda: {"backend": "gloo", "limit_seconds": 2.0},
    "scale_core.testing.faults.kill_at": lambda: {"point": "all_gather"},
    "scale_core.testing.faults.stop_at": lambda: {"point": "all_gather"},
    "scale_core.testing.faults.raise_at": lambda: {"point": "all_gather"},
    "scale_core.testing.faults.enospc_at": lambda: {"point": "snapshot.written"},
    "scale_core.testing.faults.delay_at": lambda: {"point": "all_gather", "seconds": 1.0},
    "scale_core.testing.faults.begin_step": lambda: {"step": 1},
    "scale_snapshot.convert.convert_checkpoint": lambda: {"source": torch_saved(), "destination": folder() + "/made"},
    "scale_snapshot.convert.open_checkpoint": lambda: {"path": torch_saved()},
    "scale_adascale.AdaScale": lambda: {"optimizer": SGD(params(), lr=0.1)},
    "scale_adascale.AdaScaleOptions": dict,
    "scale_adascale.GainScheduler": scheduler_and_optimizer,
    "scale_adascale.fit_speed": lambda: {"seconds": {8: 0.1, 16: 0.2}},
    "scale_adascale.halves": lambda: {"batch": x},
    "scale_adascale.legw": lambda: {"scale": 2.0, "epoch": 1.0, "base_warmup_epochs": 2.0},
    "scale_adascale.linear": lambda: {"scale": 2.0},
    "scale_adascale.square_root": lambda: {"scale": 2.0},
    "scale_adascale.suggest_batch_size": lambda: {
        "seconds": {8: 0.1, 16: 0.15},
        "noise": 100.0,
        "base_batch_size": 8,
    },
    "scale_adascale.until_steps": lambda: {"batches": [x, x], "optimizer": adascale(), "steps": 1},
    "scale_checkpoint.LayerMemoryTracker": lambda: {"model": layers()},
    "scale_checkpoint.apply_checkpointing": lambda: {"module": layers(), "how": "recompute"},
    "scale_checkpoint.apply_plan": lambda: _plan(),
    "scale_checkpoint.planner.plan.best_plan": lambda: {"profile": memory_profile(), "budget_bytes": 10**9},
    "scale_checkpoint.check_recomputation": lambda: {"model": layers()},
    "scale_checkpoint.checkpoint_modules": lambda: {"model": layers(), "select": ["0"]},
    "scale_checkpoint.checkpoint_wrapper": lambda: {"module": linear()},
    "scale_checkpoint.wrapper.is_checkpointed": lambda: {"module": layers()},
    "scale_checkpoint.planner.step.measure_step": lambda: {"model": blocks(), "sample_input": x, "repeats": 1},
    "scale_checkpoint.planner.plan.memory_front": lambda: {"profile": memory_profile()},
    "scale_checkpoint.offload_activations": dict,
    "scale_checkpoint.recompute.batch_norm.patch_batchnorm": lambda: {"module": nn.BatchNorm1d(4)},
    "scale_checkpoint.plan_memory": lambda: {"model": blocks(), "sample_input": x, "budget_bytes": 10**9},
    "scale_checkpoint.planner.profile.profile_memory": lambda: {"model": blocks(), "sample_input": x, "repeats": 1},
    "scale_checkpoint.suggest_checkpoint_location": lambda: _traces(),
    "scale_fsdp.ShardOptions": dict,
    "scale_fsdp.FullyShardedDataParallel": lambda: {"module": layers()},
    "scale_fsdp.fully_shard": lambda: {"module": layers()},
    "scale_fsdp.OffloadOptimizer": lambda: {"optim_cls": torch.optim.AdamW, "params": sharded().parameters()},
    "scale_fsdp.ShardedEMA": lambda: {"model": sharded()},
    "scale_fsdp.wrapping.auto_wrap.auto_wrap": lambda: {"module": layers()},
    "scale_fsdp.state_dict.local.consolidate_local_state_dicts": lambda: _local_state(),
    "scale_fsdp.describe": lambda: {"model": sharded()},
    "scale_fsdp.wrapping.auto_wrap.enable_wrap": dict,
    "scale_fsdp.full_optim_state_dict": lambda: pooled(),
    "scale_fsdp.full_state_dict": lambda: pooled(optimizer=False),
    "scale_fsdp.fully_shard_modules": lambda: {"module": layers(), "policy": _policy()},
    "scale_fsdp.wrapping.auto_wrap.get_fsdp_instances": lambda: {"mod": sharded()},
    "scale_fsdp.no_split_policy": lambda: {"model": _no_split()},
    "scale_fsdp.wrapping.auto_wrap.plan_units": lambda: {"module": layers(), "policy": _policy()},
    "scale_fsdp.register_fsdp_forward_method": lambda: {"module": sharded(), "method_name": "extra_repr"},
    "scale_fsdp.reshard_to": lambda: pooled(optimizer=False),
    "scale_fsdp.shard_optim_state_dict": lambda: full_state(),
    "scale_fsdp.size_policy": lambda: {"min_num_params": 10},
    "scale_fsdp.wrapping.auto_wrap.wrap": lambda: {"module": layers()},
    "scale_oss.OSSOptions": dict,
    "scale_oss.OuterStep": dict,
    "scale_oss.LocalSGDOptions": dict,
    "scale_oss.OSS": lambda: {"params": params(), "optim": SGD, "lr": 0.1},
    "scale_oss.ShardedDataParallel": lambda: optim_and_params(),
    "scale_oss.LocalSGD": lambda: {**sgd_and_model(), "sync_every": 2},
    "scale_oss.SplitOptimizer": lambda: _split_optimizer(),
    "scale_oss.split_by": lambda: {"model": layers(), "matrix": spec(), "other": spec()},
    "scale_pipe.PipelineOptions": dict,
    "scale_pipe.Costs": lambda: {"forward": (1.0,), "input_gradient": (1.0,), "weight_gradient": (1.0,), "link": ()},
    "scale_pipe.DeferredBatchNorm": lambda: {"num_features": 4},
    "scale_pipe.DistributedPipe": lambda: {"module": layers(), "balance": [3], "chunks": 2},
    "scale_pipe.Pipe": lambda: {"module": layers(), "balance": [3], "devices": ["cpu"], "chunks": 2},
    "scale_pipe.schedules.placement.StagePlacement": lambda: {"rank_of": (0, 1)},
    "scale_pipe.partition.balance.balance_by_makespan": lambda: {
        "partitions": 2,
        "module": layers(),
        "sample": x,
        "num_micro_batches": 2,
        "seconds": 0.01,
    },
    "scale_pipe.balance_by_size": lambda: {"partitions": 2, "module": layers(), "input": x},
    "scale_pipe.balance_by_time": lambda: {"partitions": 2, "module": layers(), "sample": x, "seconds": 0.01},
    "scale_pipe.schedules.visualize.chrome_trace": lambda: {"simulation": simulation()},
    "scale_pipe.schedules.visualize.draw": lambda: {"simulations": simulation()},
    "scale_pipe.schedules.visualize.save_chrome_trace": lambda: {
        "simulation": simulation(),
        "path": folder() + "/trace.json",
    },
    "scale_pipe.schedules.visualize.save_drawing": lambda: {
        "simulations": simulation(),
        "path": folder() + "/drawing.svg",
    },
    "scale_pipe.schedules.zero_bubble.dual_pipe_v": lambda: {"num_ranks": 2, "num_micro_batches": 4},
    "scale_pipe.schedules.classic.gpipe": lambda: {"num_ranks": 2, "num_micro_batches": 4},
    "scale_pipe.schedules.classic.interleaved_1f1b": lambda: {"num_ranks": 2, "num_micro_batches": 4},
    "scale_pipe.schedules.classic.looped_breadth_first": lambda: {"num_ranks": 2, "num_micro_batches": 4},
    "scale_pipe.schedules.classic.one_forward_one_backward": lambda: {"num_ranks": 2, "num_micro_batches": 4},
    "scale_pipe.schedules.zero_bubble.v_half": lambda: {"num_ranks": 2, "num_micro_batches": 4},
    "scale_pipe.schedules.zero_bubble.v_min": lambda: {"num_ranks": 2, "num_micro_batches": 4},
    "scale_pipe.schedules.zero_bubble.zb_h1": lambda: {"num_ranks": 2, "num_micro_batches": 4},
    "scale_pipe.schedules.zero_bubble.zb_v": lambda: {"num_ranks": 2, "num_micro_batches": 4},
    "scale_pipe.schedules.solver.bounds.lower_bound": lambda: {
        "placement": schedule().placement,
        "num_micro_batches": 4,
        "costs": costs(),
    },
    "scale_pipe.simulate": lambda: {"schedule": schedule(), "costs": costs()},
    "scale_pipe.solve": lambda: {"costs": costs(), "num_ranks": 2, "num_micro_batches": 2, "visits": 10},
    "scale_pipe.schedules.validate.validate": lambda: {"schedule": schedule()},
    "scale_pipe.profile_stages": lambda: {"stages": [linear()], "seconds": 0.01, "input": x},
    "scale_pipe.shared_parameters": lambda: {"stages": [*layers()]},
    "scale_pipe.split": lambda: {"model": layers(), "cuts": ["1"]},
    "scale_pipe.verify_skippables": lambda: {"module": layers()},
    "scale_tp.ColumnParallelLinear": lambda: {"in_features": 4, "out_features": 4},
    "scale_tp.RowParallelLinear": lambda: {"in_features": 4, "out_features": 4},
    "scale_tp.ParallelAttention": lambda: {"embed_dim": 8, "num_heads": 2},
    "scale_tp.ParallelDropout": dict,
    "scale_tp.ParallelEmbedding": lambda: {"num_embeddings": 4, "embedding_dim": 4},
    "scale_tp.VocabParallelEmbedding": lambda: {"num_embeddings": 4, "embedding_dim": 4},
    "scale_tp.ParallelLayerNorm": lambda: {"normalized_shape": 4},
    "scale_tp.ParallelRMSNorm": lambda: {"normalized_shape": 4},
    "scale_tp.LayerOptions": dict,
    "scale_tp.Style": lambda: {"divides": "outputs"},
    "scale_tp.megatron.copy_to_tensor_model_parallel_region": lambda: {"input_": x},
    "scale_tp.megatron.reduce_from_tensor_model_parallel_region": lambda: {"input_": x},
    "scale_tp.megatron.scatter_to_tensor_model_parallel_region": lambda: {"input_": x},
    "scale_tp.megatron.gather_from_tensor_model_parallel_region": lambda: {"input_": x},
    "scale_tp.megatron.scatter_to_sequence_parallel_region": lambda: {"input_": x},
    "scale_tp.megatron.gather_from_sequence_parallel_region": lambda: {"input_": x},
    "scale_tp.megatron.reduce_scatter_to_sequence_parallel_region": lambda: {"input_": x},
    "scale_tp.megatron.divide": lambda: {"numerator": 4, "denominator": 2},
    "scale_tp.megatron.ensure_divisibility": lambda: {"numerator": 4, "denominator": 2},
    "scale_tp.full_state_dict": lambda: {"model": layers()},
    "scale_tp.load_full_state_dict": lambda: _full_model(),
    "scale_tp.async_tp.collective_matmul.gather_linear": lambda: {"input": x, "weights": [torch.ones(4, 4)]},
    "scale_tp.async_tp.collective_matmul.linear_scatter": lambda: {"input": x, "weight": torch.ones(4, 4)},
    "scale_tp.init_as_full": lambda: {"module": _column(), "function": lambda module: None},
    "scale_tp.initialize_model_parallel": lambda: _ranks() | {"tensor_model_parallel_size": 1},
    "scale_tp.join_sequence": lambda: {"tensor": torch.ones(2, 4)},
    "scale_tp.split_sequence": lambda: {"tensor": torch.ones(2, 4)},
    "scale_tp.megatron.model_parallel_cuda_manual_seed": lambda: {"seed": 1},
    "scale_tp.model_parallel_manual_seed": lambda: {"seed": 1},
    "scale_tp.parallelize": lambda: {"model": _net(), "plan": {"0": "colwise", "2": "rowwise"}},
    "scale_tp.position_ids": lambda: {"length": 4},
    "scale_tp.record_sequence_lengths": lambda: {"lengths": [4]},
    "scale_tp.layers.norm.register_grad_all_reduce": lambda: {"module": linear()},
    "scale_tp.ring_attention": lambda: {"query": head(), "key": head(), "value": head()},
    "scale_tp.ulysses_attention": lambda: {"query": head(), "key": head(), "value": head()},
    "scale_tp.split.split_heads": lambda: {"num_heads": 4, "num_key_value_heads": 2, "num_ranks": 2},
    "scale_tp.megatron.split_tensor_along_last_dim": lambda: {"tensor": x, "num_partitions": 2},
    "scale_tp.vocab_parallel_cross_entropy": lambda: {
        "vocab_parallel_logits": torch.ones(2, 4),
        "target": torch.tensor([0, 1]),
    },
}


def _plan() -> Arguments:
    from scale_checkpoint.planner.plan import best_plan

    model = blocks()
    return {"model": model, "plan": best_plan(memory_profile(model), 10**9)}


def _traces() -> Arguments:
    from scale_checkpoint import LayerMemoryTracker

    model = layers()
    with LayerMemoryTracker(model) as tracker:
        model(x).sum().backward()
    return {"traces": tracker.memory_traces, "num_checkpoints": 1}


def _local_state() -> Arguments:
    from scale_fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(layers())
    return {"local_state_dicts": [model.local_state_dict()]}


def _policy() -> Any:
    from scale_fsdp import size_policy

    return size_policy(10)


def _no_split() -> nn.Module:
    model = layers()
    model._no_split_modules = ["Linear"]  # type: ignore[assignment]
    return model


def _split_optimizer() -> Arguments:
    from scale_oss import OSS

    model = layers()
    matrix, other = ([p for p in model.parameters() if (p.ndim == 2) == two] for two in (True, False))
    return {"model": model, "matrix": OSS(matrix, SGD, lr=0.1), "other": OSS(other, SGD, lr=0.1)}


def _column() -> nn.Module:
    from scale_tp import ColumnParallelLinear

    return ColumnParallelLinear(4, 4)


def _ranks() -> Arguments:
    from scale_core.launch import init_distributed

    init_distributed("gloo", device="cpu")
    return {}


def _net() -> nn.Module:
    return layers()


def _full_model() -> Arguments:
    model = layers()
    return {"model": model, "tensors": model.state_dict()}


# Wrong values.


ALIASES = {
    "GroupLike": "ProcessGroup | DeviceMesh | None",
    "NewGroup": "ProcessGroup | DeviceMesh | None",
    "Optimizers": "Optimizer | None",
    "OptimizerLike": "Optimizer",
    "Checkpoint": "Literal['always', 'except_last', 'never']",
    "Order": "Literal['zigzag', 'contiguous']",
    "Op": "Literal['sum', 'max']",
    "Reduction": "Literal['none', 'mean', 'sum']",
    "Transport": "Literal['rendezvous', 'eager']",
    "Target": "Literal['host']",
    "SplitKind": "Literal['outputs', 'inputs']",
    "Input": "Literal['whole', 'inside']",
    "Output": "Literal['whole', 'inside']",
    "Sizes": "Sequence[int] | None",
    "Initializer": "Callable",
    "Attend": "Callable",
    "Init": "Callable | None",
    "Policy": "Callable",
    "KeywordPolicy": "Callable",
    "Progress": "Callable | None",
    "Resize": "Callable | None",
    "GradsHook": "Callable",
    "GradPublishedHook": "Callable",
    "M": "nn.Module",
    "_Module": "nn.Module",
    "State": "Mapping[str, Any]",
}
ANYTHING = {"Any", "object", "JSON", "Batch", "T"}


@dataclass(frozen=True)
class Wrong:
    """A wrong value, and the word for its sort."""

    sort: str
    value: Any

    def __str__(self) -> str:
        return f"{self.value!r:.40}"


def wrong_values(annotation: str, default: Any) -> Iterator[Wrong]:
    """Yields what is wrong for a parameter of this annotation."""
    for _ in range(2):
        annotation = re.sub(r"\b(?<!\.)\w+\b", lambda match: ALIASES.get(match[0], match[0]), annotation)
    outer = re.sub(r"\[.*?\](?=[ |]|$)", "", annotation)
    kinds = {kind.strip().rpartition(".")[2] for kind in outer.split("|")}
    if kinds & ANYTHING:
        return
    yield Wrong("an object of no use", Useless())
    if "None" not in kinds and default is not None:
        yield Wrong("None", None)
    if kinds & {"int", "float"}:
        yield Wrong("below zero", -3)
        yield Wrong("no number", float("nan"))
        if "str" not in kinds:
            yield Wrong("a number as text", "3")
        if "float" not in kinds:
            yield Wrong("a fraction", 2.5)
    if "bool" in kinds:
        yield Wrong("a word", "false")
    if kinds & {"str", "Literal", "PathLike", "Path"}:
        if not kinds & {"int", "float"}:
            yield Wrong("a number", 3)
        yield Wrong("empty", "")
    if "Literal" in kinds:
        yield Wrong("no choice", "no-such-choice")
    if kinds & {"Sequence", "Iterable", "Collection", "tuple", "list", "Mapping", "dict"}:
        if not kinds & {"int", "float"}:
            yield Wrong("a number", 3)
        yield Wrong("empty", {} if kinds & {"Mapping", "dict"} else [])
        if "str" not in kinds:
            yield Wrong("text", "layers")
    if "Module" in kinds or "Sequential" in kinds:
        yield Wrong("a class", nn.Linear)
    if kinds & {"Optimizer", "OSS", "AdaScale"}:
        yield Wrong("a class", SGD)
    if "type" in kinds:
        yield Wrong("an object", nn.Linear(2, 2))
    if "Tensor" in kinds:
        yield Wrong("a list", [1.0])
    if "dtype" in kinds:
        yield Wrong("text", "bfloat16")
    if "device" in kinds:
        yield Wrong("no choice", "no-such-device")
    if "Callable" in kinds and not kinds & {"int", "float"}:
        yield Wrong("a number", 3)


# Runs.


def target_of(name: str) -> Callable[..., Any]:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def run(target: Callable[..., Any], given: Arguments) -> None:
    """Calls it, begins generators, enters contexts, and waits; then there is no process group, as before."""
    try:
        _run(target, given)
    finally:
        destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _run(target: Callable[..., Any], given: Arguments) -> None:
    made = target(**given)
    if inspect.isgenerator(made) or type(made).__name__ == "join":
        next(iter(made), None)
    elif hasattr(made, "__enter__") and not isinstance(made, torch.Tensor | torch.optim.Optimizer | nn.Module | Path):
        with made:
            pass
    if hasattr(made, "wait"):
        made.wait()


@contextmanager
def limited() -> Iterator[None]:
    """Raises `TimeoutError` in what computes for longer than its limit."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"computes for {LIMIT_SECONDS} s, and goes on")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass
class Outcome:
    """What came of one wrong argument."""

    name: str
    parameter: str
    sort: str
    value: str
    outcome: str
    text: str


def judge(error: Exception, parameter: str, wrong: Wrong) -> str:
    """Whether an error says what was wrong."""
    if not isinstance(error, ValueError | TypeError | ScaleError):
        return "unclear"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename if trace is not None else ""
    if "/scale_" not in file:
        return "unclear"
    text = " ".join(map(str, error.args))
    names = {parameter, parameter.strip("_"), parameter.replace("_", " "), parameter.replace("_", "-")}
    named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE) for name in names)
    value = wrong.value
    came = type(value).__name__ in text or repr(value) in text or (isinstance(value, str) and value and value in text)
    return "clear" if named or ("expected" in text and came) else "unclear"


def outcomes_of(name: str) -> Iterator[Outcome]:
    """Runs one callable with all wrong arguments."""
    target = target_of(name)
    with limited():
        run(target, CALLS[name]())
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation = parameter.annotation
        annotation = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
        for wrong in wrong_values(annotation, parameter.default):
            right = RIGHT.get(f"{name}.{parameter.name}") or RIGHT.get(parameter.name) or ()
            if wrong.sort in right or (wrong.sort == "empty" and parameter.default == ()):
                continue
            given = CALLS[name]() | {parameter.name: wrong.value}
            outcome, text = "taken", ""
            try:
                with warnings.catch_warnings(record=True) as told, limited():
                    warnings.simplefilter("always")
                    run(target, given)
                if told:
                    outcome, text = "taken", str(told[0].message)
            except Exception as error:
                outcome, text = judge(error, parameter.name, wrong), f"{type(error).__name__}: {error}"
            yield Outcome(name, parameter.name, wrong.sort, str(wrong), outcome, text)


RIGHT: dict[str, tuple[str, ...]] = {
    "dim": ("below zero",),
    "sequence_dim": ("below zero",),
    "seed": ("below zero",),
    "padding_idx": ("below zero",),  # As torch's: from the end.
    "ignore_index": ("below zero",),
    "normalized_shape": ("empty",),  # As torch's: of a number.
    "scale_tp.ring_attention.scale": ("below zero",),  # As torch's attention.
    "scale_fsdp.FullyShardedDataParallel.mixed_precision": ("None",),  # As FSDP1's, whose default it is.
    "scale_core.check_replicas.step": ("below zero",),  # It is only told.
    "scale_core.testing.faults.begin_step.step": ("below zero",),  # The same.
    "scale_adascale.until_steps.first_epoch": ("below zero",),  # It is passed to `set_epoch`.
    "link": ("empty",),  # Of one stage.
    "params": ("empty",),  # Of a rank without any.
    "batches": ("empty",),
    "text": ("empty",),
    "directory": ("empty",),  # The current folder, as for `pathlib`.
    "path": ("empty",),
    "destination": ("empty",),
    "scale_snapshot.save.objects": ("empty",),  # A snapshot of `extra` alone.
    "scale_snapshot.async_save.objects": ("empty",),
    "scale_snapshot.save_snapshot.state": ("empty",),
    "scale_core.check_replicas.model": ("empty",),
    "scale_checkpoint.checkpoint_modules.select": ("empty",),
    "blocks": ("empty",),  # None is planned.
    "scale_pipe.shared_parameters.stages": ("empty",),
    "scale_pipe.split.cuts": ("empty",),  # One stage.
    "scale_pipe.split.hold": ("empty",),
    "scale_pipe.split.pass_on": ("empty",),
    "scale_pipe.verify_skippables.module": ("empty",),
    "scale_tp.async_tp.collective_matmul.gather_linear.weights": ("empty",),  # No product.
    # Whoever takes the options refuses these.
    "scale_adascale.AdaScaleOptions.power": ("an object of no use", "below zero", "no number", "a number as text"),
    "scale_fsdp.ShardOptions.limit_seconds": ("below zero", "no number"),
    "scale_oss.LocalSGDOptions.limit_seconds": ("below zero", "no number"),
    "scale_oss.OSSOptions.bucket_numel": ("below zero",),
    "scale_oss.OSSOptions.limit_seconds": ("below zero", "no number"),
    "scale_pipe.PipelineOptions.limit_seconds": ("below zero", "no number"),
    "scale_pipe.PipelineOptions.memory_cap": ("below zero", "no number", "empty"),
    "scale_pipe.PipelineOptions.stages_per_rank": ("below zero",),
    "scale_tp.LayerOptions.split": ("an object of no use",),
}
"""Sorts of wrong values that are right for a parameter, by its name or by its callable and name."""


def left_out() -> list[str]:
    """Public callables without a right call here: errors, records of figures, and what takes no argument."""
    names = []
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            value = target_of(f"{module}.{name}")
            if callable(value) and f"{module}.{name}" not in CALLS:
                names.append(f"{module}.{name}")
    return names


def table_of(found: Sequence[Outcome], head: str, key: Callable[[Outcome], str]) -> Table:
    rows = []
    groups: dict[str, list[Outcome]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    for group_name, outcomes in [*groups.items(), ("all", list(found))]:
        counts = Counter(each.outcome for each in outcomes)
        number = len({each.name for each in outcomes})
        rows.append([group_name, str(number), *(str(counts[outcome]) for outcome in ("clear", "unclear", "taken"))])
    return Table(f"Calls by {head}", [head, "functions and classes", "clear", "unclear", "taken"], rows)


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns 1 where a right call fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names")
    parser.add_argument("--smoke", action="store_true", help="the whole")
    parser.add_argument("--date", help="writes results/DATE-bad_inputs.json and .md")
    options = parser.parse_args(arguments)
    os.chdir(_TEMPORARY.name)  # An empty path is the current folder.
    found: list[Outcome] = []
    broken = []
    for name in CALLS:
        if not options.words or any(word in name for word in options.words):
            print(name, file=sys.stderr, flush=True)
            try:
                found += outcomes_of(name)
            except Exception as error:
                broken.append(f"{name}: the right call fails: {type(error).__name__}: {error}")
    if options.words:
        for each in found:
            if each.outcome != "clear":
                print(f"{each.outcome:8} {each.name}({each.parameter}={each.value}) {each.text[:150]!r}")
    tables = [
        table_of(found, "package", lambda each: each.name.split(".")[0]),
        table_of(found, "wrong value", lambda each: each.sort),
    ]
    print(*(table.markdown() for table in tables), sep="\n")
    print("\n".join(broken))
    if options.date and not broken:
        save("bad_inputs", options.date, __doc__ or "", tables, [asdict(each) for each in found])
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
