"""scale-oss's LocalSGD between nodes, with scale-fsdp inside of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Optimizer

from scale_core import snapshot
from scale_core.testing import run_ranks
from scale_fsdp import full_state_dict, fully_shard
from scale_oss import LocalSGD

EVERY = 2


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def sharded(mesh: DeviceMesh, reshard: bool) -> tuple[nn.Module, Optimizer, LocalSGD]:
    model = layers()
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh["shard"], reshard_after_forward=reshard)
    optimizer = AdamW(model.parameters(), lr=0.02)
    return model, optimizer, LocalSGD.diloco(model, optimizer, sync_every=EVERY, process_group=mesh["node"])


def train(model: nn.Module, optimizer: Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def two_nodes_of_two(folder: str, reshard: bool) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    rank = torch.distributed.get_rank()
    model, optimizer, local = sharded(mesh, reshard)
    objects = {"model": model, "optimizer": optimizer, "local_sgd": local}
    train(model, optimizer, range(2 * EVERY), rank)
    snapshot.save(folder, 1, objects)
    train(model, optimizer, range(2 * EVERY, 4 * EVERY), rank)
    weights = full_state_dict(model)
    model, optimizer, local = sharded(mesh, reshard)
    snapshot.load(folder, {"model": model, "optimizer": optimizer, "local_sgd": local})
    train(model, optimizer, range(2 * EVERY, 4 * EVERY), rank)
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, weights[name]), name
    assert local.num_syncs == 4
    return weights


def in_one_process() -> dict[str, Tensor]:
    """Two nodes, each with the batches of its two ranks at once."""
    models = [layers() for _ in range(2)]
    optimizers = [AdamW(model.parameters(), lr=0.02) for model in models]
    slow = [param.detach().clone() for param in models[0].parameters()]
    momenta = [torch.zeros_like(value) for value in slow]
    for step in range(4 * EVERY):
        for node, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model(torch.cat([batch(step, 2 * node), batch(step, 2 * node + 1)])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            for x, u, *params in zip(slow, momenta, *(model.parameters() for model in models), strict=True):
                difference = x - (params[0].detach() + params[1].detach()) / 2
                u.mul_(0.9).add_(difference)
                x.sub_((difference + u * 0.9) * 0.7)
                for param in params:
                    param.detach().copy_(x)
    return models[0].state_dict()


@pytest.mark.composition("LocalSGD", "scale-fsdp")
@pytest.mark.parametrize("reshard", [True, False])
def test_diloco_between_nodes_that_are_fully_sharded(tmp_path: Path, reshard: bool) -> None:
    expected = in_one_process()
    for found in run_ranks(two_nodes_of_two, 4, str(tmp_path), reshard):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
