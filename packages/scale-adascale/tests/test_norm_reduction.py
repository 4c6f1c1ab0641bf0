"""What ranks measure together, against one process that computes every local gradient: DDP, tensor parallel, stages."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from adascale_cases import Plain, loss_of, net
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from scale_adascale import AdaScale, AdaScaleOptions
from scale_adascale.measurement.norm_reduction import NormReducer
from scale_core.comm.group import Group, group_of
from scale_core.shard import Axis, Placement, Shard, on_local_tensors
from scale_core.sharded_tensor.tensor import set_shard

GAIN = 1e-6  # relative


class Skipping(nn.Module):
    """The net, and a layer that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.extra = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.net(x)
        return self.extra(h) if x.sum() > 0 else h


def skipping() -> Skipping:
    torch.manual_seed(7)
    return Skipping()


def ddp(kind: str, num: int, unused: bool, *, always: bool = False) -> None:
    """Four steps: the gains of both groups and the weights equal the plain model's."""
    model = skipping() if unused else net()
    plain = Plain(
        skipping() if unused else net(), kind, num * dist.get_world_size(), lr=0.05, preconditioned=kind == "adam"
    )
    wrapped = DistributedDataParallel(model, find_unused_parameters=unused, gradient_as_bucket_view=always)
    inner = (Adam if kind == "adam" else SGD)(plain.groups_of(model), lr=0.05)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=num)
    for step in range(4):
        seeds = [100 * step + number for number in range(num * dist.get_world_size())]
        mine = seeds[dist.get_rank() * num : (dist.get_rank() + 1) * num]
        for seed in mine[:-1]:
            with nullcontext() if always else wrapped.no_sync():
                (loss_of(wrapped, seed) / num).backward()
        (loss_of(wrapped, mine[-1]) / num).backward()
        optimizer.step()
        gains = plain.step(seeds)
        assert [optimizer.gain(n) for n in range(len(gains))] == pytest.approx(gains, rel=GAIN)
        assert step or 1.01 < gains[0] < optimizer.scale - 0.01
        optimizer.zero_grad()
    torch.testing.assert_close(list(model.parameters()), list(plain.model.parameters()), rtol=0.0, atol=1e-5)


@pytest.mark.ranks(2, 3)
def test_under_ddp_the_gain_is_that_of_all_local_gradients():
    ddp("sgd", 1, False)
    ddp("sgd", 3, False)
    ddp("sgd", 2, False, always=True)
    ddp("sgd", 2, True)
    ddp("adam", 2, False)


def test_the_parts_of_long_gradients_sum_up_to_their_squares():
    """Each of three ranks reads a third of the long gradient, and one rank the short one."""
    params = [nn.Parameter(torch.zeros(numel, dtype=torch.float64)) for numel in (2**17 + 5, 7)]
    for param in params:
        param.grad = torch.linspace(-1.0, 1.0, param.numel(), dtype=torch.float64)
    groups = [Group(rank, 3, None, "fake", (0, 1, 2)) for rank in range(3)]
    reducers = [NormReducer(SGD(params, lr=0.1), group, Group(), preconditioned=False) for group in groups]
    squares = torch.stack([reducer._total_squares() for reducer in reducers]).sum(0)
    expected = torch.stack([param.grad.square().sum() for param in params])
    torch.testing.assert_close(squares, expected, rtol=1e-12, atol=0.0)


class Split(nn.Module):
    """The net, its hidden units divided between the ranks of a group: columns first, then rows."""

    def __init__(self, whole: nn.Sequential, group: Group) -> None:
        super().__init__()
        self.group = group
        rows = torch.arange(7).tensor_split(group.size)[group.rank]
        self.up = nn.Parameter(whole[0].weight.detach()[rows].clone())
        self.bias = nn.Parameter(whole[0].bias.detach()[rows].clone())
        self.down = nn.Parameter(whole[2].weight.detach()[:, rows].clone())
        self.shift = nn.Parameter(torch.full((3,), 0.1))  # Replicated.
        for param, full in ((self.up, whole[0].weight), (self.bias, whole[0].bias), (self.down, whole[2].weight)):
            piece = Shard("split", tuple(full.shape), 0, param.numel(), (Axis(group, Placement.SHARD),), gathered=False)
            set_shard(param, piece)
        set_shard(self.shift, Shard("shift", (3,), 0, 3, (Axis(group, Placement.REPLICATE),), gathered=False))

    @on_local_tensors
    def forward(self, x: Tensor) -> Tensor:
        partial = torch.tanh(x @ self.up.T + self.bias) @ self.down.T
        return _Sum.apply(partial, self.group) + self.shift


class _Sum(torch.autograd.Function):
    """Summed over the ranks; each summand gets the gradient of the sum."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group.process_group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.shift = net(), nn.Parameter(torch.full((3,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.shift


class Words(nn.Module):
    """An embedding, most of whose gradient is zero, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(10, 300, padding_idx=0), nn.Linear(300, 3)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.table(words).mean(1))
        return found


class Towers(nn.Module):
    """Two layers, one of which a batch uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, number: int) -> Tensor:
        found: Tensor = (self.second if number else self.first)(x)
        return found


def assert_gains(wrapped: DistributedDataParallel, optimizer: AdaScale, plain: Plain, data_rank: int) -> None:
    """Three steps of two passes on each of two data parallel ranks; each gain is computed from four samples."""
    for step in range(3):
        for number in range(2):
            with wrapped.no_sync() if number == 0 else torch.enable_grad():
                (loss_of(wrapped, 10 * step + 2 * data_rank + number) / 2).backward()
        optimizer.step()
        (expected,) = plain.step([10 * step + number for number in range(4)])
        assert optimizer.gain() == pytest.approx(expected, rel=GAIN)
        wrapped.zero_grad()


@pytest.mark.ranks(4)
def test_under_tensor_parallelism_each_element_counts_once():
    """Two columns of two ranks: along one they have other data, along the other other hidden units."""
    for kind in ("sgd", "adam"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        data, tensor = group_of(mesh["data"]), group_of(mesh["tensor"])
        model = Split(net(), tensor)
        plain = Plain(Shifted(), kind, 4, lr=0.05, one_group=True, preconditioned=kind == "adam")
        wrapped = DistributedDataParallel(model, process_group=data.process_group)
        inner = (Adam if kind == "adam" else SGD)(model.parameters(), lr=0.05)
        optimizer = AdaScale(inner, num_gradients_to_accumulate=2, process_group=data)
        assert_gains(wrapped, optimizer, plain, data.rank)


@pytest.mark.ranks(4)
def test_stages_of_a_pipeline_have_the_gain_of_the_whole_model():
    """Two pipelines of two stages: each rank has the parameters of one stage, though it computes all gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    data, stage = group_of(mesh["data"]), group_of(mesh["stage"])
    plain, model = Plain(net(), "sgd", 4, lr=0.0, one_group=True), net()
    wrapped = DistributedDataParallel(model, process_group=data.process_group)
    optimizer = AdaScale(
        SGD(model[2 * stage.rank].parameters(), lr=0.1),
        num_gradients_to_accumulate=2,
        process_group=mesh["data"],
        model_parallel_group=mesh["stage"],
    )
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0)  # The other stage's weights would not be updated.
    assert_gains(wrapped, optimizer, plain, data.rank)


@pytest.mark.ranks(2)
def test_sharding_along_an_unknown_axis_is_refused_by_name():
    group = group_of()
    alone = [dist.new_group([rank]) for rank in range(group.size)][group.rank]
    param = nn.Parameter(torch.ones(2))
    set_shard(param, Shard("embed.weight", (4,), 2 * group.rank, 2 * group.rank + 2, (Axis(group, Placement.SHARD),)))
    optimizer = SGD([param], lr=0.1)
    assert AdaScale(optimizer, process_group=alone).scale == 1.0  # Found: the other direction is that of the model.
    with pytest.raises(ValueError, match=r"embed\.weight") as error:
        AdaScale(optimizer, process_group=alone, model_parallel_group=alone)
    assert "model_parallel_group=" in str(error.value)
    set_shard(param, Shard("embed.weight", (2,), 0, 2, (Axis(group, Placement.PARTIAL),)))
    with pytest.raises(ValueError, match=r"embed\.weight") as error:
        AdaScale(optimizer)
    assert "partial sum over the ranks [0, 1]" in str(error.value)
    with pytest.raises(ValueError, match="number of ranks in process_group, 2, got 8"):
        AdaScale(optimizer, world_size=8)
    with pytest.raises(ValueError, match="'split' is divided over") as error:
        AdaScale(SGD(Split(net(), group).parameters(), lr=0.1))  # Tensor parallelism, and nothing said of it.
    assert "over the ranks [0, 1] by a layer that computes with its piece" in str(error.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what it imports beside.
        from torch.distributed.optim import ZeroRedundancyOptimizer
    zero = ZeroRedundancyOptimizer(net().parameters(), Adam, lr=0.1)
    with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer does not tell .*preconditioned=False"):
        AdaScale(zero)
    assert AdaScale(zero, options=AdaScaleOptions(preconditioned=False)).scale == 2.0
    frozen = net().requires_grad_(group.rank == 1)
    if group.rank == 0:
        with pytest.raises(ValueError, match="gets no gradient, and the others would wait"):
            AdaScale(SGD(frozen.parameters(), lr=0.1), process_group=alone, model_parallel_group=group)


@pytest.mark.ranks(2)
def test_gradients_of_which_some_are_not_averaged_are_refused():
    """Those that come first are zero, or averaged, and others are not."""
    words = torch.randint(1, 10, (4, 3), generator=torch.Generator().manual_seed(dist.get_rank()))
    for wrapped in ("", "table", "head", "all"):
        model = Words()
        optimizer = AdaScale(SGD(model.parameters(), lr=0.1))
        if wrapped == "all":
            whole = DistributedDataParallel(model)
            whole(words).square().mean().backward()
            assert 1 < optimizer.gain() < 2
            optimizer.step()
            continue
        table, head = (
            DistributedDataParallel(layer) if wrapped == name else layer for name, layer in model.named_children()
        )
        head(table(words).mean(1)).square().mean().backward()
        with pytest.raises(RuntimeError, match="to have the same averaged gradients"):
            optimizer.step()
        optimizer.unhook()


@pytest.mark.ranks(2)
def test_gradients_averaged_by_hand_or_never_are_refused():
    """So are two stages of a pipeline of which AdaScale was not told."""
    group = group_of()
    for stages in (False, True):
        model = net()
        params = model[2 * group.rank].parameters() if stages else model.parameters()
        optimizer = AdaScale(SGD(params, lr=0.1))
        loss_of(model, 1 if stages else group.rank).backward()
        for param in [] if stages else model.parameters():
            dist.all_reduce(param.grad)
        weight = model[0].weight.detach().clone()
        for method in (optimizer.step, optimizer.gain):
            with pytest.raises(RuntimeError, match="expected the ranks") as error:
                method()
            assert "averaged by hand after backward()" in str(error.value)
        assert torch.equal(model[0].weight, weight) and optimizer.progress == 0
        optimizer.unhook()
        optimizer.step()
        assert not torch.equal(model[2 * group.rank].weight, net()[2 * group.rank].weight)


@pytest.mark.ranks(2)
def test_other_parameter_groups_and_unused_layers_of_a_rank():
    """More parameter groups would make sums of other lengths; a layer that one batch uses gets zero from the other."""
    group = group_of()
    model = net()
    params = list(model.parameters())
    groups = [params] if group.rank == 0 else [params[:1], params[1:]]
    optimizer = AdaScale(SGD([{"params": each} for each in groups], lr=0.1))
    wrapped = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"number of parameter groups on all ranks.*got 1, 2 on the ranks 0, 1"):
        loss_of(wrapped, group.rank).backward()
    with pytest.raises(RuntimeError, match="expected 1 backward passes since the last step, got 0"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.unhook()
    model = Towers()
    optimizer = AdaScale(SGD(model.first.parameters(), lr=1e-30), smoothing=0.0)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    found = []
    for seed, used in ((0, 0), (1, 1)):  # First by the first rank, then by the second.
        wrapped(torch.full((2, 5), seed + 1.0), (group.rank + used) % 2).square().mean().backward()
        optimizer.step()
        found.append(optimizer.gain())
        model.zero_grad()
    with pytest.raises(RuntimeError, match="expected 1 backward passes since the last step, got 0"):
        optimizer.step()
    optimizer.unhook()
    assert found == [2.0, 2.0]  # One gradient and zero: noise is as large as can be.
