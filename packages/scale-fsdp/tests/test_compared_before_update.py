"""recovery.py: an optimizer that updates in the backward pass gets no gradient of ranks that did different things.

Only where operations match by their order alone, as on NCCL: over gloo, tags keep the units apart.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import scale_fsdp.offload.backward
from scale_core.errors import ScaleDistributedError
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import run_ranks
from scale_core.testing.async_gloo import BACKEND
from scale_fsdp import OffloadOptimizer, ShardOptions, fully_shard

NUM_STEPS, NUM_LAYERS, LIMIT_SECONDS = 4, 4, 3.0


def skip_a_micro_batch_on_one_rank() -> list[str]:
    """Each step accumulates two micro-batches; in the last one rank 1 has the second only, and answers for the first.

    Rank 0 gathers for its second forward what rank 1 reduces in its only backward.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(NUM_LAYERS)))
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=False, options=ShardOptions(limit_seconds=LIMIT_SECONDS))
    optimizer = OffloadOptimizer(torch.optim.SGD, model.parameters(), lr=0.1, overlap_step=True)
    for _ in range(NUM_STEPS - 1):
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [shard.detach().clone() for shard in local_shards(model)]
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(ScaleDistributedError):
        monkeypatch.setattr(scale_fsdp.offload.backward, "CHUNK_ELEMENTS", 1)  # Each gradient is used when it comes.
        if dist.get_rank() == 0:
            with model.no_sync():
                model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
    shards = zip(model.named_parameters(), before, local_shards(model), strict=True)
    return [name for (name, _), old, new in shards if not torch.equal(old, new)]


def local_shards(model: nn.Module) -> list[Tensor]:
    return [local_tensor(param) for param in model.parameters()]


def test_no_parameter_has_changed_where_ranks_ran_different_micro_batches() -> None:
    assert run_ranks(skip_a_micro_batch_on_one_rank, 2, backend=BACKEND) == [[], []]
