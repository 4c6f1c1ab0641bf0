import pytest
import torch
from rank_values import by_rank
from torch.nn.parallel import DistributedDataParallel

from scale_core.comm.group import Group, group_of
from scale_core.shard import full_shape, shard_of
from scale_fsdp import CPUOffloadPolicy
from scale_oss import ShardedDataParallel
from scale_train.model.config import ModelConfig
from scale_train.model.gpt import GPT
from scale_train.options import OptimizerOptions, ParallelOptions
from scale_train.training.parallel.engine import make_engine
from scale_train.training.parallel.parallelize_gpt import parallel_dims, sharding_of

CPU = torch.device("cpu")


def parallelized(parallel: str, group: Group):
    torch.manual_seed(0)
    options = ParallelOptions(parallel=parallel)
    return make_engine(GPT(ModelConfig(1, 16, 2)), options, OptimizerOptions(), parallel_dims(options, group.size), CPU)


@pytest.mark.parametrize("parallel", ["fsdp", "sharded-ddp", "oss", "ddp", "none"])
def test_a_world_of_one_needs_no_torch_distributed(parallel):
    engine = parallelized(parallel, Group())
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    engine.model(tokens, tokens).backward()
    assert torch.nn.utils.clip_grad_norm_(engine.raw_model.parameters(), 1e-3).item() > 0
    squares = sum(float(param.grad.square().sum()) for param in engine.params_with_gradients())
    assert squares**0.5 == pytest.approx(1e-3, rel=1e-3)
    assert engine.model is engine.raw_model or isinstance(engine.model, ShardedDataParallel)


def test_weights_are_offloaded_where_cpu_offload_asks_for_it():
    for offloads in (False, True):
        how = sharding_of(ParallelOptions(parallel="fsdp", cpu_offload=offloads))
        assert isinstance(how["offload_policy"], CPUOffloadPolicy) == offloads


@pytest.mark.ranks(2)
def test_weight_decay_is_for_matrices_sharded_or_not():
    found = []
    for parallel in ("fsdp", "ddp", "oss", "sharded-ddp"):
        engine = parallelized(parallel, group_of())
        optimizer = engine.optimizer
        names = {param: name for name, param in engine.raw_model.named_parameters()}
        decayed = [
            names[param] for group in optimizer.param_groups if group["weight_decay"] for param in group["params"]
        ]
        sharded = all(shard_of(param) is not None for param in names)
        assert sharded or all(param.shape == full_shape(param) for param in names)
        found.append((decayed, sharded, isinstance(engine.model, DistributedDataParallel)))
    (by_shards, sharded, _), (whole, _, replicated), *others = by_rank(found)[0]
    assert by_shards == whole and sharded and replicated
    assert others == [(whole, False, True), (whole, False, False)]
    assert "embedding.weight" in whole and "blocks.0.attention.qkv.weight" in whole
    assert not any("norm" in name or "bias" in name for name in whole)
