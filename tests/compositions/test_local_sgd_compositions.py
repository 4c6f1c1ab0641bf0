"""LocalSGD with checkpointing, AdaScale and, between nodes, scale-fsdp inside of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_values import by_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import SGD, AdamW, Optimizer
from trainings import add_weights, assert_parity, drawn, recorded

import scale_snapshot
from scale_adascale import AdaScale
from scale_check.recording import Recording
from scale_checkpoint import checkpoint_wrapper
from scale_core.comm.group import Group
from scale_fsdp import full_state_dict, fully_shard
from scale_oss import LocalSGD

EVERY, STEPS, MICRO_BATCHES = 2, 6, 2


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 3)).double()


def backward(model: nn.Module, step: int, rank: int) -> None:
    """Two micro-batches of a rank."""
    for x in drawn(100 * step + rank, *[(4, 5)] * MICRO_BATCHES):
        (model(x).square().mean() / MICRO_BATCHES).backward()


def sgd(model: nn.Module, measures: bool) -> tuple[SGD, Optimizer]:
    """SGD and what steps: AdaScale that measures each rank's own micro-batches, since nobody averages gradients."""
    optimizer = SGD(model.parameters(), lr=0.3)
    adascale = AdaScale(optimizer, num_gradients_to_accumulate=MICRO_BATCHES, process_group=Group())
    return optimizer, adascale if measures else optimizer


def train(model: nn.Module, optimizer: Optimizer, steps: range, rank: int) -> list[float]:
    """Returns the gains."""
    gains = []
    for step in steps:
        backward(model, step, rank)
        gains.append(optimizer.gain() if isinstance(optimizer, AdaScale) else 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return gains


def two_models_that_are_averaged(measures: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
    """LocalSGD in one process: the gains of both models, and their last average."""
    models = [layers() for _ in range(2)]
    optimizers = [sgd(model, measures)[1] for model in models]
    gains: list[list[float]] = [[], []]
    for first in range(0, STEPS, EVERY):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            gains[rank] += train(model, optimizer, range(first, first + EVERY), rank)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            mean = (one.detach() + other.detach()) / 2
            one.detach().copy_(mean)
            other.detach().copy_(mean)
    return gains, models[0].state_dict()


@pytest.mark.composition("scale-checkpoint", "LocalSGD")
@pytest.mark.composition("scale-adascale", "LocalSGD")
@pytest.mark.composition("scale-adascale", "scale-checkpoint", "LocalSGD")
@pytest.mark.parametrize("measures, recomputes", [(True, False), (True, True), (False, True)])
@pytest.mark.ranks(2, in_turn=True)
def test_local_sgd_is_models_that_are_averaged(measures: bool, recomputes: bool) -> None:
    model, rank = layers(), dist.get_rank()
    if recomputes:
        model[1] = checkpoint_wrapper(model[1])
    optimizer, stepped = sgd(model, measures)
    local = LocalSGD(model, optimizer, sync_every=EVERY)
    trained = recorded([0.0] * STEPS, gain=train(model, stepped, range(STEPS), rank))
    add_weights(trained, model.state_dict())
    assert local.num_syncs == STEPS // EVERY
    if isinstance(stepped, AdaScale):
        stepped.unhook()
    gains, state = two_models_that_are_averaged(measures)
    assert not measures or max(gains[0]) > 1.01
    assert_parity(recorded([0.0] * STEPS, state, gain=gains[rank]), [trained])


@pytest.mark.ranks(2)
def test_adascale_over_ranks_that_do_not_average_is_refused() -> None:
    model = layers()
    optimizer = SGD(model.parameters(), lr=0.3)
    stepped = AdaScale(optimizer, num_gradients_to_accumulate=MICRO_BATCHES)
    LocalSGD(model, optimizer, sync_every=EVERY)
    backward(model, 0, dist.get_rank())
    with pytest.raises(RuntimeError, match=r"expected the ranks \[0, 1\] to have the same averaged gradients"):
        stepped.step()


def diloco(mesh: DeviceMesh, reshard: bool) -> dict[str, object]:
    model = layers()
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh["shard"], reshard_after_forward=reshard)
    optimizer = AdamW(model.parameters(), lr=0.02)
    local = LocalSGD.diloco(model, optimizer, sync_every=EVERY, process_group=mesh["node"])
    return {"model": model, "optimizer": optimizer, "local_sgd": local}


def two_nodes_of_two(folder: str, reshard: bool) -> tuple[Recording, Recording]:
    """Trains, with a snapshot half-way; returns the weights of that run and of one that goes on from the snapshot."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    rank, found = dist.get_rank(), []
    for resumes in (False, True):
        objects = diloco(mesh, reshard)
        model, optimizer, local = objects.values()
        if resumes:
            scale_snapshot.load(folder, objects)
        else:
            train(model, optimizer, range(2 * EVERY), rank)
            scale_snapshot.save(folder, 1, objects)
        train(model, optimizer, range(2 * EVERY, 4 * EVERY), rank)
        assert local.num_syncs == 4
        found.append(recorded([0.0], full_state_dict(model)))
    return found[0], found[1]


def diloco_in_one_process() -> dict[str, Tensor]:
    """Two nodes, each with the batches of its two ranks; the outer step is Nesterov's."""
    models = [layers() for _ in range(2)]
    optimizers = [AdamW(model.parameters(), lr=0.02) for model in models]
    slow = [param.detach().clone() for param in models[0].parameters()]
    momenta = [torch.zeros_like(value) for value in slow]
    for step in range(4 * EVERY):
        for node, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for rank in (2 * node, 2 * node + 1):
                backward(model, step, rank)
            _halve(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            for x, momentum, *params in zip(slow, momenta, *(model.parameters() for model in models), strict=True):
                difference = x - (params[0].detach() + params[1].detach()) / 2
                momentum.mul_(0.9).add_(difference)
                x.sub_((difference + momentum * 0.9) * 0.7)
                for param in params:
                    param.detach().copy_(x)
    return models[0].state_dict()


def _halve(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad.div_(2)


@pytest.mark.composition("LocalSGD", "scale-fsdp")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.ranks(4, in_turn=True)
def test_diloco_between_nodes_that_are_fully_sharded(tmp_path: Path, reshard: bool) -> None:
    expected = recorded([0.0], diloco_in_one_process())
    trained, resumed = zip(*by_rank(two_nodes_of_two(str(tmp_path), reshard)), strict=True)
    assert_parity(expected, trained)
    assert_parity(trained[0], resumed, rel=0.0)
