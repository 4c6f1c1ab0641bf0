"""mesh_info.py: hybrid sharding, and what stays cut between few ranks after a forward."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import Case, assert_cases_train_as_plain
from fsdp_parity import assert_same_grads, sharded
from state_cases import Awkward, Layout, train, two_groups
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scale_check.exact import assert_equal, gather_values
from scale_core.errors import DivergenceError
from scale_core.shard import Placement, shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.state.state_dict import StateMismatch, load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.uneven_inputs import join
from scale_fsdp import ShardOptions, full_optim_state_dict, full_state_dict, fully_shard
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.state_dict.local import consolidate_local_state_dicts
from scale_snapshot import load_snapshot, save_snapshot

HYBRID = [
    Case(replicas=2, clip=True, steps=3),
    Case(replicas=2, reshard=False, wrapping="deep", accumulate=2, steps=2),
    Case(replicas=2, precision="bf16, fp32 reduction", accumulate=2, no_sync=True, checkpointing="around", steps=2),
    Case(replicas=2, flatten=True, model="mlp", optimizer="sgd", steps=2),
    Case(replicas=2, placement=(("move_params_to_cpu", True),), accumulate=2, steps=2),
]
PARTS = [
    Case(reshard=2, clip=True, steps=3),
    Case(reshard=2, precision="bf16", wrapping="deep", checkpointing="around", accumulate=2, steps=2),
    Case(reshard=1, accumulate=2, no_sync=True, steps=2),
    Case(reshard=4, steps=2),
    Case(reshard=2, accumulate=2, no_sync=True, flatten=True, wrapping="leaves", steps=2),
]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


PAIRS = (((0, 2), (1, 3)), ((0, 1), (2, 3)))  # the lines along both axes of a mesh of four ranks


@pytest.mark.ranks(5)
def test_a_mesh_of_some_ranks_waits_for_no_other_rank() -> None:
    def mesh_beside_another_rank() -> tuple[tuple[int, ...], float] | None:
        """Four of five ranks make a mesh of their own groups, of which the fifth knows nothing."""
        rank = dist.get_rank()
        rows = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3), (0, 1), (2, 3))}
        if rank == 4:
            return None
        if rank == 3:
            dist.new_group([rank], use_local_synchronization=True)  # It is in more groups than the others.
        replicas, shard = (next(rows[ranks] for ranks in line if rank in ranks) for line in PAIRS)
        names = ("replicas", "shard")
        mesh = DeviceMesh.from_group([replicas, shard], "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=names)
        model = fully_shard(nn.Linear(3, 2, bias=False), mesh)
        model(torch.full((1, 3), float(rank))).sum().backward()
        assert model.weight.grad is not None
        return units_in(model)[0].options.mesh_info.whole.ranks, model.weight.grad.flatten()[0].item()

    assert gather_values(mesh_beside_another_rank()) == [((0, 1, 2, 3), 1.5)] * 4 + [None]


@pytest.mark.ranks(4)
def test_replicas_that_diverge_are_found_at_the_next_check() -> None:
    """The error on each rank, and the passes that had gone well before."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard"))
    model = layers()
    for part in (*model, model):
        fully_shard(part, mesh, options=ShardOptions(check_replicas_every=2))
    passed = []
    with pytest.raises(DivergenceError) as caught:
        for number in range(1, 6):
            model(torch.ones(2, 4)).sum().backward()
            passed.append(number)
            if number == 1 and dist.get_rank() == 3:
                local_tensor(model[1].weight).data.view(-1)[0] += 1
    results = gather_values((str(caught.value), passed))
    assert all(result == results[0] for result in results)
    text, passed = results[0]
    assert passed == [1, 2]
    assert (
        "step 3: 1 of 6 tensors" in text and "'1.weight' [4, 8]: each of the ranks 1, 3 has values of its own" in text
    )


@pytest.mark.ranks(4)
def test_hybrid_sharding_equals_the_plain_model_to_the_bit() -> None:
    assert_cases_train_as_plain(HYBRID)


@pytest.mark.ranks(4)
def test_a_mesh_is_sharded_along_its_second_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shard"))
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh)
    shard = shard_of(model.weight)
    assert shard is not None
    axes = [(axis.placement, axis.group.ranks) for axis in shard.axes]
    results = gather_values(([shard.start, shard.stop], axes))
    assert [bounds for bounds, _ in results] == [[0, 8], [8, 16], [0, 8], [8, 16]]
    assert results[3][1] == [(Placement.REPLICATE, (1, 3)), (Placement.SHARD, (2, 3))]


@pytest.mark.ranks(4)
def test_partial_resharding_equals_the_plain_model_to_the_bit() -> None:
    assert_cases_train_as_plain(PARTS)


@pytest.mark.ranks(4)
def test_between_forward_and_backward_a_part_stays() -> None:
    """Whether the inner unit's full buffer is there, and how much of it stays: after its forward and its backward."""
    half = (4 * 8 + 8 + 24) // 2  # Each parameter starts at 16 bytes on each rank.
    model = layers()
    for layer in model:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model, reshard_after_forward=2)
    (buffer,) = units_in(model)[1].buffers
    seen = []
    for _ in range(2):
        loss = model(torch.ones(1, 4)).sum()
        seen.append(
            (bool(buffer.full.untyped_storage().nbytes()), None if buffer.part is None else buffer.part.numel())
        )
        loss.backward()
        seen.append(
            (bool(buffer.full.untyped_storage().nbytes()), None if buffer.part is None else buffer.part.numel())
        )
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert buffer.part is None
    assert seen == [(False, half), (False, None)] * 2


@pytest.mark.ranks(5)
def test_ranks_that_are_in_other_groups_too_find_their_neighbors() -> None:
    """Four of five ranks share a model, and two of them are in a group more than the others."""
    rank, four = dist.get_rank(), dist.new_group([0, 1, 2, 3])
    if rank in (1, 2):
        dist.new_group([1, 2], use_local_synchronization=True)
    if rank == 4:
        return
    torch.manual_seed(0)
    plain = layers()
    model = sharded(plain, ["0", "1", ""], four, reshard_after_forward=2)
    for each in (model, plain):
        each(torch.ones(2, 4)).square().mean().backward()
    assert_same_grads(model, plain)
    part = units_in(model)[1].buffers[0].groups.part
    assert part is not None and part.ranks == ((0, 1) if rank < 2 else (2, 3))


@pytest.mark.ranks(2)
def test_what_does_not_divide_or_is_no_mesh_for_this_is_refused() -> None:
    messages = []
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    for kwargs in (
        {"reshard_after_forward": 3},
        {"reshard_after_forward": 0},
        {"reshard_after_forward": "yes"},
        {"mesh": mesh},
        {"offload_policy": True},
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            fully_shard(layers(), **kwargs)
        messages.append(str(caught.value))
    assert "2 ranks do not divide into groups of 3: take one of 1, 2, or True" in messages[0]
    assert "groups of 0" in messages[1]
    assert "expected a bool, a number of ranks or None, got 'yes'" in messages[2]
    assert "one dimension" in messages[3] and "got 3 dimensions ('a', 'b', 'c')" in messages[3]
    assert "mesh['replicate', 'shard']" in messages[3]
    assert "expected a torch.distributed.fsdp.CPUOffloadPolicy or OffloadPolicy, got True" in messages[4]


def test_one_of_several_ranks_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"one of 2 ranks.*call scale_core.launch.init_distributed\(\)"):
        fully_shard(layers())


@pytest.mark.ranks(2, backend="cuda:gloo")
def test_a_model_on_the_host_needs_no_backend_for_it() -> None:
    # "cuda:gloo" stands for NCCL alone: a group that no tensor on the host can pass.
    model, plain = Layout(wrapping="units").shard(Awkward()), Awkward()
    optimizers = [torch.optim.Adam(two_groups(each), lr=0.1) for each in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        train(each, optimizer)
    assert_equal(model, plain)
    state = [full_optim_state_dict(*pair, recipient_rank=None) for pair in zip((model, plain), optimizers, strict=True)]
    assert_equal(*state)
    norms = []
    for _ in join(range(1 + torch.distributed.get_rank())):
        model(torch.tensor([1, 2])).sum().backward()
        norms.append(model.clip_grad_norm_(1.0))
    assert len(norms) == 2 and all(0 < norm < torch.inf for norm in norms)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.ranks(2, in_turn=True)
def test_an_expert_of_each_rank_counts_in_norms_and_is_saved(tmp_path, flatten):
    class Mixture(nn.Module):
        """An expert of its own on each rank, after and before what all ranks share."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.dense, self.norm = nn.Linear(4, 4), nn.Linear(4, 3)
            torch.manual_seed(1 + rank)
            self.expert = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.tanh(self.expert(self.dense(x))))

    def dense_of(model: Mixture) -> list[nn.Parameter]:
        return [*model.dense.parameters(), *model.norm.parameters()]

    folder = tmp_path / str(flatten)
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([r]) for r in range(world)][rank]
    plain = [Mixture(r) for r in range(world)]
    model = Mixture(rank)
    fully_shard(model.expert, alone, options=ShardOptions(flatten_parameters=flatten))
    fully_shard(model, options=ShardOptions(flatten_parameters=flatten))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for each, x in zip(plain, inputs, strict=True):
        each(x).square().sum().backward()
    shared = [torch.stack([p.grad for p in params]).mean(0) for params in zip(*map(dense_of, plain), strict=True)]
    experts = [p.grad for each in plain for p in each.expert.parameters()]
    norms = []
    ways = [model.clip_grad_norm_, lambda *args: torch.nn.utils.clip_grad_norm_(model.parameters(), *args)]
    for norm_type, clip in itertools.product((2.0, 3.0, torch.inf), ways):
        model(inputs[rank]).square().sum().backward()
        expected = torch.nn.utils.get_total_norm([*shared, *experts], norm_type)
        norms.append(clip(0.5, norm_type).item())
        torch.testing.assert_close(norms[-1], expected.item(), rtol=1e-6, atol=0)
        own = torch.cat([p.grad.reshape(-1) for p in plain[rank].expert.parameters()]) * (0.5 / (norms[-1] + 1e-6))
        got = torch.cat([p.grad.reshape(-1) for p in model.expert.parameters()])
        torch.testing.assert_close(got[: own.numel()], own)  # A flat parameter has padding behind them.
        model.zero_grad()
    model(inputs[rank]).square().sum().backward()
    optimizer.step()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert_equal(full_state_dict(model), before)  # On every rank, with its own expert.
    state = sharded_state_dict(model)
    assert f"model.expert.weight@{rank}" in state and "model.dense.weight" in state
    path = save_snapshot(folder, 1, state)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    seen: dict[str, object] = {}
    loaded = load_snapshot(path.parent, lambda saved: target_state_dict(model, None, seen.setdefault("saved", saved)))
    fewer = {key.replace("@0", "@9"): value for key, value in seen["saved"].items()}  # As of ranks that are not here.
    with pytest.raises(StateMismatch, match=r"unexpected in it: model\.expert\.weight@9"):
        target_state_dict(model, None, fewer | {key: seen["saved"][key] for key in state})
    load_sharded_state_dict(loaded.state, model)
    assert_equal(model, before)
    save_snapshot(folder, 2, sharded_state_dict(model, optimizer))
    moments = {param: dict(values) for param, values in optimizer.state.items()}
    fresh = torch.optim.Adam(model.parameters(), lr=0.7)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    loaded = load_snapshot(folder, lambda saved: target_state_dict(model, fresh, saved), step=2)
    load_sharded_state_dict(loaded.state, model, fresh, copy=False)
    assert fresh.param_groups[0]["lr"] == 0.1 and fresh.state.keys() == moments.keys()
    assert_equal([*fresh.state.values()], [moments[param] for param in fresh.state])
    assert_equal(model, before)
    calls = [
        lambda: full_optim_state_dict(model, optimizer),
        lambda: full_state_dict(model, rank_0_only=True),
        lambda: None if flatten else get_model_state_dict(model),
    ]
    for call in calls[: 2 if flatten else 3]:
        with pytest.raises(RuntimeError, match=r"unit 'expert' is over ranks .*sharded_state_dict\(model, optimizer\)"):
            call()
    states = [None] * world
    dist.all_gather_object(states, model.local_state_dict())
    with pytest.raises(ValueError, match=r"'expert\.weight' is another parameter on each rank"):
        consolidate_local_state_dicts(states)
    first, second = gather_values(norms)
    assert first == second
