"""oss.py: OSS is an optimizer to whoever uses it, and refuses what would go wrong without a word."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from oss_cases import Distance, Lamb, plain_params, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from with_options import with_options

from scale_check.exact import assert_equal, gather_values
from scale_core.comm.group import Group, group_of
from scale_core.consistency.contract import Contract
from scale_core.errors import ContractError, DivergenceError
from scale_core.optim.step_hooks import watch_optimizers
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_oss import OSS, OSSOptions, ShardedDataParallel
from scale_oss.step import step_in_turn


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def data(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


class Prodigy(Distance):
    """Under a name that is known, and refused on shards."""


def one_owner_for_all(sharded: bool) -> dict[str, Any]:
    """An optimizer that looks at all tensors computes what one process does, and any rank can save it."""
    watch_optimizers()
    plain = layers()
    model = copy.deepcopy(plain)
    ours = OSS(param_groups(model), Prodigy, options=OSSOptions(together=True, bucket_numel=20))
    wrapped: Any = ShardedDataParallel(model, ours) if sharded else DistributedDataParallel(model)
    replica, theirs = DistributedDataParallel(plain), Prodigy(param_groups(plain))
    for step in range(4):
        for net, optimizer in ((wrapped, ours), (replica, theirs)):
            net(data(step, group_of().rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    ours.wait()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    expected = theirs.state_dict()
    for recipient in (0, 1):
        ours.consolidate_state_dict(recipient)
        if group_of().rank == recipient:
            assert_equal(ours.state_dict(), expected)
    again = OSS(param_groups(model), Prodigy, options=OSSOptions(together=True))
    again.load_state_dict(expected)
    return {"state": len(ours.optim.state), "d": [group["d"] for group in again.param_groups]}


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    wide = [param for param in model.parameters() if param.ndim > 1]
    return [{"params": wide}, {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.5}]


@pytest.mark.ranks(2)
def test_one_rank_updates_all_for_a_joint_optimizer() -> None:
    for first, second in zip(*gather_values([one_owner_for_all(sharded) for sharded in (True, False)]), strict=True):
        assert (first["state"], second["state"]) == (4, 0) and first["d"] == second["d"] != [0.01, 0.01]


def test_a_joint_optimizer_refuses_shards_and_meta_tensors() -> None:
    shard = nn.Parameter(torch.zeros(2))
    set_shard(shard, Shard("weight", (4,), 0, 2, (Axis(Group(), Placement.SHARD),)))
    with pytest.raises(ValueError, match=r"Distance needs all tensors on one rank, but 'weight' is a shard"):
        OSS([("weight", shard)], Distance, options=OSSOptions(together=True))
    with pytest.raises(ValueError, match=r"'weight' is on the meta device.*model\.to_empty"):
        OSS(nn.Linear(2, 2, device="meta").named_parameters(), torch.optim.Adam)


def test_the_first_rank_logs_how_parameters_are_divided(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="scale_oss"):
        OSS(layers().parameters(), torch.optim.Adam)
    assert "OSS of Adam: 4 parameters over 1 ranks in 1 buckets of " in caplog.text


def test_a_group_that_is_refused_leaves_nothing_behind() -> None:
    class Picky(torch.optim.SGD):
        """Takes no group of one parameter."""

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            if len(param_group["params"]) == 1:
                raise ValueError("one is too few")

    model, late = layers(), nn.Linear(3, 3)
    optimizer = OSS(model.parameters(), Picky, lr=0.1)
    refused = {"on the meta device": nn.Linear(2, 2, device="meta").parameters(), "one is too few": [late.weight]}
    for words, params in refused.items():
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group({"params": params})
        assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == len(optimizer.buckets) == 1
        model(late(data(0))).sum().backward()
        optimizer.step()
    before = late.weight.detach().clone()
    optimizer.add_param_group({"params": late.parameters()})
    optimizer.step()
    assert not torch.equal(late.weight, before)


def test_what_has_no_shape_or_no_size_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'weight' has no shape yet. Run the model once"):
        OSS(nn.LazyLinear(3).named_parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"expected bucket_numel of at least 1 element, got 0"):
        OSS(layers().parameters(), torch.optim.SGD, lr=0.1, options=OSSOptions(bucket_numel=0))


def test_parameters_in_a_sparse_layout_are_refused_by_name() -> None:
    dense, sparse = nn.Parameter(torch.ones(1)), nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match=r"expected dense parameters, got 'w' in torch\.sparse_coo: .*to_dense\(\)"):
        OSS([("v", dense), ("w", sparse)], torch.optim.SGD, lr=0.1)
    optimizer = OSS([dense], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="expected dense parameters"):
        optimizer.add_param_group({"params": [sparse]})
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1


@pytest.mark.fault(84)
def test_a_copy_that_would_update_nothing_is_refused() -> None:
    model = layers()
    optimizer = OSS(model.parameters(), torch.optim.Adam)
    for copied in (optimizer, ShardedDataParallel(model, optimizer)):
        with pytest.raises(TypeError, match=r"Copy the module and build OSS\(copied\.parameters\(\), \.\.\.\)"):
            copy.deepcopy(copied)
    copy.deepcopy(model)


@pytest.mark.ranks(2)
def test_the_state_is_shared_evenly_however_the_tensors_are_made() -> None:
    def state_numel(optimizer: OSS) -> int:
        state = optimizer.optim.state.values()
        return sum(
            value.numel() for entry in state for value in entry.values() if isinstance(value, Tensor) and value.ndim
        )

    model = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = OSS(model.parameters(), torch.optim.Adam)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    sizes = gather_values(state_numel(optimizer))
    assert max(sizes) - min(sizes) <= 2 * 210 and sum(sizes) == 2 * (200 * 200 + 12)


@pytest.mark.ranks(2)
def test_ranks_with_other_parameters_are_named() -> None:
    width = 3 + group_of().rank
    with pytest.raises(ContractError) as caught:
        OSS(nn.Linear(3, width).parameters(), torch.optim.SGD, lr=0.1)
    message = str(caught.value)
    assert "the ranks differ in the parameters given to OSS" in message
    assert "rank 1: parameter 0 of group 0 (4, 3)" in message


@pytest.mark.ranks(3)
def test_groups_that_are_added_later_train_and_are_clipped() -> None:
    """A group that is added later is clipped and stepped like the others."""
    plain = layers().double()
    model = copy.deepcopy(plain)
    ours = OSS(model[0].parameters(), torch.optim.Adam, lr=0.01, options=OSSOptions(bucket_numel=8))
    theirs = torch.optim.Adam(plain[0].parameters(), lr=0.01)
    rank, size = group_of().rank, group_of().size
    for step in range(3):
        if step == 1:
            ours.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
            theirs.add_param_group({"params": list(plain[2].parameters()), "lr": 0.1})
        grads = []
        for each in range(size):
            plain.zero_grad()
            plain(data(step, each).double()).square().mean().backward()
            grads.append([param.grad for param in plain.parameters()])
        for param, mine, *summands in zip(plain.parameters(), model.parameters(), *grads, strict=True):
            mean = sum(summands[1:], summands[0]) / size
            param.grad, mine.grad = mean, mean.clone()
        stepped = [param for group in theirs.param_groups for param in group["params"]]
        expected = torch.nn.utils.get_total_norm([param.grad for param in stepped])
        assert torch.allclose(ours.clip_grad_norm_(1e6), expected, rtol=1e-12)
        ours.step()
        theirs.step()
        for param, mine in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(param, mine), (rank, step)
    assert [group["lr"] for group in ours.param_groups] == [0.01, 0.1]


def test_a_scheduler_changes_the_rate_and_a_closure_is_called() -> None:
    model = layers()
    plain = copy.deepcopy(model)
    ours, theirs = OSS(model.parameters(), torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (ours, theirs)]
    for step in range(3):

        def closure(net: nn.Module, step: int, optimizer: Any) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(data(step)).square().mean()
            loss.backward()
            return loss

        losses = [
            each.step(lambda net=net, each=each, step=step: closure(net, step, each))
            for net, each in ((model, ours), (plain, theirs))
        ]
        assert torch.equal(*losses)
        for schedule in schedules:
            schedule.step()
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 0.0125
    for mine, param in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, param)


def test_what_is_no_closure_is_for_the_step_of_the_optimizer() -> None:
    class Counted(torch.optim.SGD):
        """Its step knows what to do with a number."""

        def step(self, closure: Any = None, *, seen: list[Any]) -> Any:  # type: ignore[override]
            seen.append(closure)
            return super().step()

    model, seen = layers(), list[Any]()
    optimizer = OSS(model.parameters(), Counted, lr=0.1)
    before = model[0].weight.detach().clone()
    model(data(0)).sum().backward()
    optimizer.step(0, seen=seen)
    assert seen == [0] and not torch.equal(model[0].weight, before)
    with pytest.raises(TypeError, match="'int' object is not callable"):  # As the plain one does.
        OSS(model.parameters(), torch.optim.SGD, lr=0.1).step(0)


def test_named_parameters_are_called_by_their_names() -> None:
    optimizer = OSS(layers().named_parameters(), torch.optim.SGD, lr=0.1)
    assert [name for bucket in optimizer.buckets for name in bucket.names] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]


def test_groups_dtypes_and_frozen_parameters_have_own_buckets() -> None:
    model = layers()
    model[0].bfloat16()
    model[2].bias.requires_grad_(False)
    optimizer = OSS([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}], lr=0.1)
    found = [(b.dtype, any(p.requires_grad for p in b.params), len(b.params)) for b in optimizer.buckets]
    assert found == [
        (torch.bfloat16, True, 2),
        (torch.float32, True, 1),
        (torch.float32, False, 1),
    ]
    assert [group["lr"] for group in optimizer.optim.param_groups] == [0.5, 0.1]


def test_who_updates_what_can_be_asked() -> None:
    model = layers()
    optimizer = OSS(model.parameters(), torch.optim.Adafactor, Group(rank=0, size=1))
    ((group,),) = optimizer.partition_parameters()
    assert [id(param) for param in group["params"]] == [id(param) for param in model.parameters()]


def test_a_converted_parameter_is_refused_a_replaced_one_not() -> None:
    model = layers()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()}, assign=False)
    model[0].weight.data = torch.full((8, 3), 2.0)
    model(data(0)).sum().backward()
    assert model[0].weight.grad is not None
    expected = torch.full((8, 3), 2.0).add(model[0].weight.grad, alpha=-0.1)
    optimizer.step()
    assert torch.equal(model[0].weight, expected)
    model.to(torch.float64)
    with pytest.raises(
        RuntimeError, match=r"was torch.float32 on cpu when OSS was built.*Convert or move the model first"
    ):
        optimizer.step()


def test_only_an_optimizer_class_is_taken() -> None:
    with pytest.raises(TypeError, match=r"expected optim to be a class of optimizers"):
        OSS(layers().parameters(), torch.optim.SGD(layers().parameters(), lr=0.1))  # type: ignore[arg-type]


@pytest.mark.ranks(1)
def test_a_dtensor_is_refused_with_what_shards_it() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layer = nn.Linear(2, 2)
    parallelize_module(layer, init_device_mesh("cpu", (1,)), ColwiseParallel())
    with pytest.raises(TypeError, match=r"OSS: 'weight' is a DTensor.*call fully_shard\(model, mesh=mesh"):
        OSS(layer.named_parameters(), torch.optim.SGD, lr=0.1)


def test_a_filter_chooses_whose_norm_is_meant() -> None:
    model = layers()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    first = {id(param) for param in model[0].parameters()}
    norm = optimizer.clip_grad_norm_(1.0, filter_params_fn=lambda params: [p for p in params if id(p) in first])
    assert norm.item() == pytest.approx(32**0.5)
    assert model[0].weight.grad is not None and model[0].weight.grad.max() < 0.2
    assert bool((model[2].weight.grad == 1).all())


def strided() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 4)).to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(torch.randn(3, 4).t())
    model[2].bias = nn.Parameter(torch.randn(4, 2)[:, 1])
    return model


@pytest.mark.ranks(1, 2)
def test_parameters_whose_strides_ddp_has_noted_keep_them() -> None:
    def train_strided(sharded: bool, **options: Any) -> tuple[list[Tensor], dict[str, Any]]:
        """Steps around a load of other weights; OSS is built after DistributedDataParallel."""
        model = strided()
        wrapped = DistributedDataParallel(model)
        params = list(model.parameters())
        strides = [param.stride() for param in params]
        made = (
            OSS(params, torch.optim.SGD, **with_options(OSSOptions, **options), lr=0.05, momentum=0.9)
            if sharded
            else None
        )
        optimizer = made or torch.optim.SGD(params, lr=0.05, momentum=0.9)
        rank = torch.distributed.get_rank()
        for step in range(4):
            optimizer.zero_grad()
            images = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            wrapped(images).square().mean().backward()
            optimizer.step()
            if step == 1:
                model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
        assert [param.stride() for param in params if param is not model[2].bias] == strides[:-1]
        if made is not None:
            made.consolidate_state_dict(0)
        state = optimizer.state_dict() if rank == 0 or made is None else {"state": {}}
        return [param.detach().clone() for param in params], state["state"]

    plain, plain_state = train_strided(sharded=False)
    for options in ({}, {"bucket_numel": 8}, {"elementwise": False}):
        sharded, state = train_strided(sharded=True, **options)
        assert all(torch.equal(own, theirs) for own, theirs in zip(sharded, plain, strict=True))
        for number, kept in state.items():
            assert torch.equal(kept["momentum_buffer"], plain_state[number]["momentum_buffer"])
    rounded, _ = train_strided(sharded=True, broadcast_fp16=True)
    assert all(torch.equal(param, param.half().float()) for param in rounded)
    torch.testing.assert_close(rounded, plain, rtol=2e-2, atol=2e-3)


def test_parameters_of_any_strides_get_memory_in_the_buffer() -> None:
    model = strided()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    assert all(
        param.is_contiguous() and not bucket.unflattened for bucket in optimizer.buckets for param in bucket.params
    )


@pytest.mark.ranks(2)
def test_what_has_no_gradient_is_left_alone() -> None:
    """A parameter without a gradient is not stepped: weight decay would move it."""
    model = layers()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1, weight_decay=0.5)
    before = model[2].weight.detach().clone()
    ddp.module[0](data(0)).sum().backward()
    optimizer.step()
    assert torch.equal(model[2].weight, before)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_negative_bound_of_the_norm_is_refused(max_norm: float) -> None:
    model = layers()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    model(data(0)).sum().backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    with pytest.raises(ValueError, match=r"expected max_norm of at least 0, got"):
        optimizer.clip_grad_norm_(max_norm)
    optimizer.clip_grad_norm_(torch.inf)
    after = [param.grad for param in model.parameters() if param.grad is not None]
    assert len(after) == 4 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_ranks_without_a_process_group_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"this is one of 2 ranks .* torch.distributed is not initialized"):
        OSS(torch.nn.Linear(2, 1).parameters(), torch.optim.SGD, lr=0.1)


KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "one by one": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "all together": (torch.optim.NAdam, {"lr": 0.01, "foreach": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_in_turn_are_stepped_as_all_at_once(kind: str) -> None:
    def groups_of(params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
        wide = [param for param in params.values() if param.ndim > 1]
        return [{"params": wide, "lr": 0.02}, {"params": [param for param in params.values() if param.ndim < 2]}]

    cls, kwargs = KINDS[kind]
    mine, theirs = plain_params(), plain_params()
    ours, plain = (
        OSS(groups_of(mine), cls, **with_options(OSSOptions, bucket_numel=40, **kwargs)),
        cls(groups_of(theirs), **kwargs),
    )
    assert len(ours.buckets) > 3
    turns: list[int] = []
    ours.optim.register_step_pre_hook(lambda *_: turns.append(sum(bucket.needs_gather for bucket in ours.buckets)))
    for step in range(3):
        for each, params in ((ours, mine), (plain, theirs)):
            train(each, params.values(), [step], without=[1])
            each.param_groups[0]["lr"] *= 0.5
    assert_equal(dict(mine), dict(theirs))
    assert_equal(ours.state_dict(all_ranks=True), plain.state_dict())
    assert turns == [*range(len(ours.buckets), 0, -1)] * 3  # Each was sent before the next one was stepped on.


def test_an_optimizer_of_which_nothing_is_known_takes_one_step() -> None:
    params = plain_params({"first": (3, 3), "second": (4, 2)})
    ours = OSS(params.values(), Lamb, options=OSSOptions(bucket_numel=4))
    assert len(ours.buckets) == 2
    train(ours, params.values(), range(3))
    assert ours.param_groups[0]["count"] == 3


def test_after_a_failure_nothing_is_stepped_on_and_all_is_sent() -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optim = torch.optim.SGD(params, lr=0.1)
    sent: list[int] = []
    for param in params:
        param.grad = torch.ones(2)
    groups = optim.param_groups

    def fail_from_the_second_on(*_: object) -> None:
        if sent:
            raise ZeroDivisionError

    optim.register_step_pre_hook(fail_from_the_second_on)
    failure = step_in_turn(optim, [params[:1], params[1:]], Contract(Group()), {}, sent.append)
    assert isinstance(failure, ZeroDivisionError)
    assert sent == [0, 1] and optim.param_groups is groups  # The other ranks wait for it.
    assert params[0].tolist() == pytest.approx([0.9, 0.9]) and params[1].tolist() == [1, 1]


@pytest.mark.fault(115)
@pytest.mark.ranks(3)
def test_replicas_that_diverge_are_named_before_a_step() -> None:
    """The error on this rank, and how many steps went well before."""
    every = 3
    change_at = 1
    model = layers()
    model.scale = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1, options=OSSOptions(check_replicas_every=every))
    wrapped = ShardedDataParallel(model, optimizer)
    with pytest.raises(DivergenceError) as caught:
        for step in range(8):
            if step == change_at and group_of().rank == 1:
                model.scale[0] = 5.0
            wrapped(data(step, group_of().rank)).sum().backward()
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    text, step = (str(caught.value), step)
    assert step == 3  # The first step and every third after it.
    assert "step 4: 1 of 5 tensors" in text
    assert "'scale' [3]: ranks 0, 2 hold equal values, and others than these: rank 1" in text


@pytest.mark.fault(26)
@pytest.mark.ranks(2)
def test_the_first_step_finds_different_initial_weights() -> None:
    model = nn.Linear(3, 2)
    model.bias.data += group_of().rank
    optimizer = OSS(model.named_parameters(), torch.optim.SGD, lr=0.1)
    model.weight.data.zero_()
    with pytest.raises(DivergenceError) as caught:
        optimizer.step()
    OSS(model.named_parameters(), torch.optim.SGD, lr=0.1, options=OSSOptions(check_replicas_every=0)).step()
    text = str(caught.value)
    assert "step 1: 1 of 2 tensors" in text and "'bias' [2]" in text


def test_an_interval_that_is_no_number_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a number of steps in check_replicas_every, got -1"):
        OSS(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1, options=OSSOptions(check_replicas_every=-1))
