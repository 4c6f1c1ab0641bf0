"""grad_scaler.py: all ranks of a group step, or none does, and their scales stay equal."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from scale_check.simulate import simulate
from scale_core.comm.group import Group, group_of
from scale_core.optim.clip_grad import clip_grad_norm_
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard

pytestmark = pytest.mark.local_tensors

SIZE, STEPS = 11, 24
INF = float("inf")


def piece_of(whole: Tensor, group: Group) -> nn.Parameter:
    """This rank's even piece, marked; the last ranks may hold nothing."""
    size = -(-whole.numel() // group.size)
    start, stop = (min(rank * size, whole.numel()) for rank in (group.rank, group.rank + 1))
    piece = nn.Parameter(whole[start:stop].clone())
    set_shard(piece, Shard("weight", tuple(whole.shape), start, stop, (Axis(group, Placement.SHARD),)))
    return piece


def inputs(step: int, numel: int = SIZE) -> Tensor:
    """What one element of fp16 overflows for, at every seventh step and at large scales."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(step)) * 8
    if step % 7 == 3:
        values[step % numel] = 60000.0
    return values


def backward(scaler: GradScaler, piece: nn.Parameter, x: Tensor) -> None:
    """An fp16 product as autocast makes it: the gradient overflows where scale times x does."""
    loss = (piece.half() * x.half()).float().sum() + 0 * piece.sum()
    scaler.scale(loss).backward()


def train(
    scaler: GradScaler,
    piece: nn.Parameter,
    cut: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    clip: Callable[[Sequence[nn.Parameter]], Any] | None,
) -> list[float]:
    """A whole run; returns the scale after each step."""
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(scaler, piece, cut(inputs(step)))
        if clip is not None:
            scaler.unscale_(optimizer)
            clip([piece])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adam, fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
}
SETTINGS: dict[str, Any] = {"init_scale": 2.0**12, "growth_interval": 3}


def as_torch_on_one_process(name: str, clips: bool) -> None:
    group, make = group_of(), OPTIMIZERS[name]
    whole = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    clip = (lambda params: clip_grad_norm_(params, 0.5)) if clips else None
    plain, piece = nn.Parameter(whole.clone()), piece_of(whole, group)
    expected = train(GradScaler("cpu", **SETTINGS), plain, lambda x: x, make([plain]), clip)
    assert len(set(expected)) > 3 and min(expected) < SETTINGS["init_scale"] < max(expected)
    scaler = ShardedGradScaler(**SETTINGS)
    assert train(scaler, piece, lambda x: piece_of(x, group).detach(), make([piece]), clip) == expected
    # A norm may differ in its last place, and fused kernels compute the last elements of a tensor otherwise.
    tolerance = 1e-10 if clips or "fused" in name else 0.0
    reference = piece_of(plain.detach(), group)
    torch.testing.assert_close(piece.detach(), reference.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.ranks("num_ranks", in_turn=True)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.fault(70)
def test_a_bad_gradient_on_one_rank_is_a_step_on_none(num_ranks: int) -> None:
    """In any dtype, and on any rank."""
    group = group_of()
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype, bad, bad_rank in product(dtypes, (INF, -INF, float("nan")), range(group.size)):
        param = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = ShardedGradScaler(init_scale=8.0)
        for step in range(2):
            scaler.scale(param.sum()).backward()
            assert param.grad is not None and param.grad.tolist() == [8, 8, 8]
            if step == 0 and group.rank == bad_rank:
                param.grad[1] = bad
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == (4 if step == 0 else 8)
            assert param.tolist() == ([1, 1, 1] if step == 0 else [0, 0, 0])
            scaler.update(8.0)


@pytest.mark.ranks(3, in_turn=True)
@pytest.mark.fault(70)
def test_ranks_without_elements_or_losses_step_too() -> None:
    """One rank holds an empty shard, one no gradient; the scale of one that computes no loss is made all the same."""
    group = group_of()
    rank = group.rank
    for make in OPTIMIZERS.values():
        for where, skipped in ((0, True), (0, False)):
            param = nn.Parameter(torch.ones(0 if rank == 1 else 2))
            optimizer = make([param])
            scaler = ShardedGradScaler(init_scale=4.0, growth_interval=1)
            if rank < 2:
                scaler.scale(param.sum()).backward()
            if skipped and rank == where:
                assert param.grad is not None
                param.grad[0] = INF
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (2 if skipped else 8)
            changed = bool((param != 1).any())
            assert changed == (rank == 0 and not skipped)


@pytest.mark.ranks("num_ranks", in_turn=True)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.fault(70)
def test_each_optimizer_has_its_verdict(num_ranks: int) -> None:
    group = group_of()
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=0.5) for param in params]
    scaler = ShardedGradScaler(init_scale=16.0)
    scaler.scale(params[0].sum() + params[1].sum()).backward()
    if group.rank == group.size - 1:
        assert params[0].grad is not None
        params[0].grad[1] = INF
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert params[0].tolist() == [1, 1] and params[1].tolist() == [0.5, 0.5]
    assert scaler.get_scale() == 8


@pytest.mark.ranks(3, in_turn=True)
def test_scales_that_differ_or_were_never_used_are_refused() -> None:
    group, param = group_of(), nn.Parameter(torch.ones(2))
    for name in OPTIMIZERS:
        scaler = ShardedGradScaler(init_scale=2.0 if group.rank else 4.0)
        scaler.scale(param.sum()).backward()
        with pytest.raises(RuntimeError, match=r"differently, by 2 to 4: call scaler\.load_state_dict"):
            scaler.step(OPTIMIZERS[name]([param]))
        scaler = ShardedGradScaler()
        with pytest.raises(RuntimeError, match=r"no rank has multiplied a loss .*scaler\.scale\(loss\)\.backward"):
            scaler.step(OPTIMIZERS[name]([param]))
    assert param.tolist() == [1, 1]


@pytest.mark.ranks(3, in_turn=True)
def test_a_group_that_lacks_ranks_of_a_shard_is_refused() -> None:
    """And that of one rank has a scale of its own."""
    group, param = group_of(), nn.Parameter(torch.ones(2))
    alone = [dist.new_group([rank]) for rank in range(group.size)][group.rank]
    piece = piece_of(torch.ones(4), group)
    scaler = ShardedGradScaler(process_group=alone)
    scaler.scale(piece.sum()).backward()
    with pytest.raises(ValueError, match=r"'weight' is shared by the ranks \[0, 1.*only the ranks \[\d\]"):
        scaler.step(torch.optim.SGD([piece], lr=1.0))

    scaler = ShardedGradScaler(init_scale=4.0, process_group=alone)
    scaler.scale(param.sum()).backward()
    if group.rank == 0:
        assert param.grad is not None
        param.grad[0] = INF
    scaler.step(torch.optim.SGD([param], lr=1.0))
    scaler.update()
    assert scaler.get_scale() == (2 if group.rank == 0 else 4)


each_training = pytest.mark.parametrize(
    "name, clips", [(name, clips) for name in OPTIMIZERS for clips in (False, True)]
)


@pytest.mark.ranks(3, in_turn=True)
@pytest.mark.fault(70)
@each_training
def test_three_ranks_step_together_or_not_at_all(name: str, clips: bool) -> None:
    as_torch_on_one_process(name, clips)


@each_training
def test_a_world_of_one_needs_no_torch_distributed(name: str, clips: bool) -> None:
    assert not dist.is_initialized()
    as_torch_on_one_process(name, clips)


def test_an_autocast_run_equals_torch_s_scaler_to_the_bit() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 2))
    results = []
    for scaler in (GradScaler("cpu", **SETTINGS), ShardedGradScaler(**SETTINGS)):
        model = copy.deepcopy(plain)
        optimizer, scales = torch.optim.AdamW(model.parameters(), lr=0.05), []
        for step in range(STEPS):
            x = inputs(step, 30).view(5, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append((scales, [param.detach() for param in model.parameters()]))
    (expected, theirs), (found, ours) = results
    assert found == expected and len(set(expected)) > 2
    assert all(map(torch.equal, ours, theirs))


def test_the_state_goes_round_and_into_torch_s_scaler() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = ShardedGradScaler(init_scale=64.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    for _ in range(3):
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    state = scaler.state_dict()
    assert state["scale"] == 64 and state["_growth_tracker"] == 3
    copies = [ShardedGradScaler(), GradScaler("cpu"), pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)]
    for other in copies[:2]:
        other.load_state_dict(state)
    for other in copies:
        assert other.state_dict() == state
        other.scale(param.sum()).backward()
        other.step(optimizer)
        other.update()
        assert other.get_scale() == 64 and other.state_dict()["_growth_tracker"] == 4


def test_one_that_is_disabled_is_as_if_there_were_none() -> None:
    scaler = ShardedGradScaler(init_scale=-1.0, enabled=False)
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    loss = param.sum()
    assert scaler.scale(loss) is loss and not scaler.is_enabled() and scaler.state_dict() == {}

    def closure() -> float:
        param.sum().backward()
        return 5.0

    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, closure) == 5.0
    scaler.update()
    assert param.tolist() == [0, 0] and scaler.get_scale() == 1.0


@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_closure_is_refused_before_it_runs(as_keyword: bool) -> None:
    def closure() -> float:
        raise AssertionError("ran")

    scaler = ShardedGradScaler()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(RuntimeError, match=r"write scaler\.scale\(closure\(\)\)\.backward\(\)"):
        if as_keyword:
            scaler.step(optimizer, closure=closure)
        else:
            scaler.step(optimizer, closure)


def test_a_new_scale_is_a_number_or_one_element() -> None:
    scaler = ShardedGradScaler()
    scaler.scale(torch.ones(()))
    for new in (4, 8.0, torch.tensor([16.0], dtype=torch.float64)):
        scaler.update(new)
        assert scaler.get_scale() == float(new)
    with pytest.raises(ValueError, match="one element"):
        scaler.update(torch.ones(2))
    with pytest.raises(ValueError, match="new_scale to be a finite number above 0, got 0"):
        scaler.update(0)


@pytest.mark.parametrize(
    "argument, value",
    [("init_scale", 0.0), ("init_scale", INF), ("growth_factor", 1.0), ("backoff_factor", 1.0), ("growth_interval", 0)],
)
def test_numbers_out_of_range_are_refused(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"expected {argument} to be"):
        ShardedGradScaler(**{argument: value})


def test_what_is_no_process_group_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="ProcessGroup"):
        ShardedGradScaler(process_group="world")  # type: ignore[arg-type]


def test_the_scale_stands_where_it_is_told_to() -> None:
    scaler = ShardedGradScaler(init_scale=2.0, device="cpu")
    assert scaler.scale([torch.ones(2), torch.ones(3)])[1].tolist() == [2, 2, 2]
    assert scaler.get_scale() == 2.0


@pytest.mark.simulation
def test_a_simulated_rank_steps_and_sends_five_numbers() -> None:
    with simulate(rank=1, world_size=4) as simulation:
        param = nn.Parameter(torch.ones(8))
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
        scaler = ShardedGradScaler()
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert "momentum_buffer" in optimizer.state[param]
        assert [collective.op for collective in simulation.collectives] == ["all_reduce"]
        assert simulation.bytes_sent["all_reduce"] == 30  # 2 * 3/4 * 20 bytes


def test_it_takes_a_device_first_as_torch_s_does():
    model = torch.nn.Linear(2, 1)
    for scaler in (ShardedGradScaler("cuda", 1024.0), ShardedGradScaler(torch.device("cpu"), init_scale=1024.0)):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        assert scaler.get_scale() == 1024.0
    with pytest.raises(TypeError, match=r"takes a device first.*ShardedGradScaler\(init_scale=1024.0\)"):
        ShardedGradScaler(1024.0)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [2.0, INF])
def test_gradients_on_the_host_are_divided_after_the_scale(value: float) -> None:
    """As with parameters that are offloaded: the device is still busy when the host divides."""
    device = torch.device("cuda", torch.cuda.current_device())
    params = [nn.Parameter(torch.ones(3, device=place)) for place in ("cpu", device)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = ShardedGradScaler(init_scale=8.0)
    scaler.scale(torch.ones((), device=device))
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    params[0].grad[1] = value
    torch.cuda._sleep(10**8)
    scaler.unscale_(optimizer)
    assert params[0].grad.tolist() == [0.25, value / 8, 0.25] and params[1].grad.tolist() == [0.25] * 3
    scaler.step(optimizer)
    scaler.update()
    assert params[0].tolist() == ([0.75] * 3 if value == 2.0 else [1.0] * 3)
    assert scaler.get_scale() == (8.0 if value == 2.0 else 4.0)
