"""clip_grad.py: one norm for gradients that no rank holds alone, each element counted once."""

from __future__ import annotations

import math

import pytest
import torch
from rank_values import by_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import utils

from scale_core.comm.group import Group, group_of
from scale_core.optim.clip_grad import clip_grad_norm_, grad_norm
from scale_core.shard import Axis, Placement, Shard, on_local_tensors
from scale_core.sharded_tensor.tensor import set_shard

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


def units_apart(one: Tensor, other: Tensor) -> float:
    """How far two fp32 numbers are apart, in units in the last place."""
    _, exponent = math.frexp(other.item())
    return abs(one.item() - other.item()) / math.ldexp(1.0, exponent - 24)


def with_grad(grad: Tensor | None) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(2) if grad is None else torch.zeros_like(grad))
    param.grad = grad
    return param


def whole_grads(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Small integers, whose squares have the same sum in any order."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"weight": (7, 5), "bias": (3,), "scale": (), "empty": (0, 4), "table": (40, 30)}
    return {name: torch.randint(-9, 10, shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def piece_of(name: str, grad: Tensor, start: int, stop: int, *axes: Axis) -> nn.Parameter:
    param = with_grad(grad.reshape(-1)[start:stop].clone())
    set_shard(param, Shard(name, tuple(grad.shape), start, stop, axes))
    return param


def cut(name: str, grad: Tensor, group: Group) -> nn.Parameter:
    """This rank's even piece; the last ranks may hold nothing."""
    size = -(-grad.numel() // group.size)
    start, stop = min(group.rank * size, grad.numel()), min((group.rank + 1) * size, grad.numel())
    return piece_of(name, grad, start, stop, Axis(group, Placement.SHARD))


@pytest.mark.ranks("num_ranks", in_turn=True)
@pytest.mark.fault(72)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_local_tensors
def test_norm_and_clipped_gradients_equal_torch_s_on_the_whole(num_ranks: int) -> None:
    group = group_of()
    for norm_type in NORM_TYPES:
        for max_norm in (0.5, 1e6):
            grads = whole_grads(torch.float64)
            plain = [with_grad(grad.clone()) for grad in grads.values()]
            expected = utils.clip_grad_norm_([param for param in plain if param.numel()], max_norm, norm_type)
            local = [cut(name, grad, group) for name, grad in grads.items()]
            norm = clip_grad_norm_((param for param in local), max_norm, norm_type)
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            for param, whole in zip(local, plain, strict=True):
                assert param.grad is not None and whole.grad is not None
                torch.testing.assert_close(param.grad, cut("", whole.grad, group).grad, rtol=1e-12, atol=0)


@pytest.mark.fault(72)
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.ranks("num_ranks", in_turn=True)
def test_every_element_counts_once_whoever_holds_it(num_ranks: int) -> None:
    """Mixed: sharded, replicated, frozen, without a gradient on one rank or on all, in half precision."""
    group, grads = group_of(), whole_grads()
    sharded = cut("weight", grads["weight"], group)
    replicated = with_grad(grads["bias"].clone())
    marked = piece_of("table", grads["table"], 0, 1200, Axis(group, Placement.REPLICATE))
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    nowhere = cut("nowhere", torch.ones(8), group)
    nowhere.grad = None
    on_one = cut("on one", torch.full((2 * group.size,), 3.0), group)
    if group.rank:
        on_one.grad = None
    half = cut("half", torch.full((8,), 2.0).bfloat16(), group)
    found = grad_norm([sharded, replicated, marked, frozen, nowhere, on_one, half])
    counted = [grads["weight"], grads["bias"], grads["table"], torch.full((2,), 3.0), torch.full((8,), 2.0)]
    expected = torch.cat([grad.reshape(-1).double() for grad in counted]).norm()
    assert found.dtype == torch.float32
    assert units_apart(found, expected) <= 1
    assert len(set(by_rank(found.item()))) == 1


@pytest.mark.ranks(4, in_turn=True)
def test_over_two_axes_shards_combine_and_replicas_do_not() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    outer, inner = group_of(mesh["outer"]), group_of(mesh["inner"])
    grad = torch.randn(16, generator=torch.Generator().manual_seed(1))
    quarter = 8 * outer.rank + 4 * inner.rank
    # Every order of the axes and every order of the parameters: the ranks must still meet in one order.
    by_both = piece_of("both", grad, quarter, quarter + 4, Axis(outer, Placement.SHARD), Axis(inner, Placement.SHARD))
    turned = piece_of("turned", grad, quarter, quarter + 4, Axis(inner, Placement.SHARD), Axis(outer, Placement.SHARD))
    halves = slice(8 * inner.rank, 8 * inner.rank + 8)
    hybrid = piece_of(
        "hybrid", grad, halves.start, halves.stop, Axis(outer, Placement.REPLICATE), Axis(inner, Placement.SHARD)
    )
    halves = slice(8 * outer.rank, 8 * outer.rank + 8)
    rows = piece_of("rows", grad, halves.start, halves.stop, Axis(outer, Placement.SHARD))
    for params in ([turned, rows, hybrid, by_both], [by_both, hybrid, rows, turned], [rows, turned], [hybrid, turned]):
        for norm_type in NORM_TYPES:
            expected = torch.linalg.vector_norm(torch.cat([grad.double()] * len(params)), norm_type)
            assert units_apart(grad_norm(params, norm_type), expected) <= 2

    partial = piece_of("partial", grad, 0, 16, Axis(outer, Placement.REPLICATE), Axis(inner, Placement.PARTIAL))
    with pytest.raises(ValueError, match=rf"'partial' is a partial sum over ranks \[{inner.ranks[0]}, .*reduce it"):
        grad_norm([partial])


@pytest.mark.ranks("num_ranks", in_turn=True)
@pytest.mark.parametrize(
    "num_ranks, bad, bad_rank", [(3, math.nan, 0), (3, math.nan, 1), (3, math.nan, 2), (2, -math.inf, 1)]
)
def test_a_nan_or_infinity_on_one_rank_reaches_all(num_ranks: int, bad: float, bad_rank: int) -> None:
    grad = torch.ones(4 * num_ranks)
    grad[4 * bad_rank + 1] = bad
    param = cut("weight", grad, group_of())
    for norm_type in (2.0, math.inf):
        assert grad_norm([param], norm_type).item() == pytest.approx(abs(bad), nan_ok=True)


def test_half_precision_gradients_do_not_overflow() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        short, long = (
            with_grad(torch.full((100,), 1000.0, dtype=dtype)),
            with_grad(torch.full((9000,), 1000.0, dtype=dtype)),
        )
        assert units_apart(grad_norm([short, long]), torch.tensor(1000.0 * math.sqrt(9100))) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_factor_is_not_rounded_to_the_gradients_dtype(dtype: torch.dtype) -> None:
    # The sum of their squares is exact, so the norms and factors are the same on any processor.
    grad = torch.randint(-9, 10, (200,), generator=torch.Generator().manual_seed(0)).to(dtype)
    ours, theirs = with_grad(grad.clone()), with_grad(grad.clone())
    clip_grad_norm_([ours], 0.7)
    utils.clip_grad_norm_([theirs], 0.7)
    assert ours.grad is not None and theirs.grad is not None
    assert (ours.grad.double().norm() / 0.7 - 1).abs() < max(3e-6, torch.finfo(dtype).eps / 4)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_long_gradients_lose_no_precision() -> None:
    grad = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    assert units_apart(grad_norm([with_grad(grad)]), grad.double().norm()) <= 1


def test_all_double_gradients_give_a_double() -> None:
    param = with_grad(torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert grad_norm([param]).dtype == torch.float64
    assert grad_norm([param, with_grad(torch.zeros(2))]).dtype == torch.float32


@pytest.mark.ranks(2, in_turn=True)
def test_a_rank_without_gradients_clips_by_the_others_double() -> None:
    """The norm in fp64 of what has a gradient on rank 0 alone."""
    group = group_of()
    param = cut("weight", torch.full((4,), 1 / 3, dtype=torch.float64), group)
    if group.rank:
        param.grad = None
    norm = clip_grad_norm_([param], 0.25)
    first, second = by_rank((norm.dtype, norm.item()))
    assert first == second == (torch.float64, pytest.approx(math.sqrt(2 / 9), rel=1e-15))


def test_one_tensor_is_a_list_of_one() -> None:
    param = with_grad(torch.full((2, 2), 2.0))
    assert grad_norm(param).item() == 4
    assert clip_grad_norm_(param, 2.0).item() == 4
    assert param.grad is not None and param.grad.norm().item() == pytest.approx(2.0)


def test_no_gradient_is_a_norm_of_zero() -> None:
    assert grad_norm([]).item() == 0
    assert grad_norm([with_grad(None)]).item() == 0
    assert clip_grad_norm_([with_grad(torch.zeros(3))], 1.0).item() == 0


def test_nothing_to_clip_is_refused_with_what_to_pass() -> None:
    params = iter([with_grad(torch.ones(3))])
    assert clip_grad_norm_(params, 1.0).item() == pytest.approx(math.sqrt(3))
    for function in (clip_grad_norm_, grad_norm):
        with pytest.raises(ValueError, match=r"an iterator that has been used up.*list\(model.parameters\(\)\)"):
            function(params, 1.0)
        with pytest.raises(ValueError, match="used up"):
            function((param for param in ()), 1.0)
    with pytest.raises(
        ValueError, match=r"clip_grad_norm_: expected parameters, got an empty list.*model.parameters\(\)"
    ):
        clip_grad_norm_([], 1.0)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_a_norm_that_is_none_is_refused(norm_type: float) -> None:
    with pytest.raises(ValueError, match="norm_type > 0"):
        grad_norm([with_grad(torch.ones(2))], norm_type)


@pytest.mark.parametrize("max_norm", [-1.0, -math.inf, math.nan])
def test_a_bound_that_would_turn_gradients_round_is_refused(max_norm: float) -> None:
    param = with_grad(torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match=f"max_norm of at least 0, got {max_norm}"):
        clip_grad_norm_(param, max_norm)
    assert param.grad is not None and param.grad.tolist() == [3.0, 4.0]


def test_no_bound_only_measures_and_zero_leaves_nothing() -> None:
    param = with_grad(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(param, math.inf).item() == 5
    assert param.grad is not None and param.grad.tolist() == [3.0, 4.0]
    assert clip_grad_norm_(param, 0.0).item() == 5
    assert param.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_of_complex_gradients_the_magnitudes_count(norm_type: float) -> None:
    generator = torch.Generator().manual_seed(5)
    double = {"dtype": torch.float64, "generator": generator}
    grads = [torch.view_as_complex(torch.randn(300, 2, 2, **double)), torch.randn(4, **double)]
    plain, ours = ([with_grad(grad.clone()) for grad in grads] for _ in range(2))
    norm = clip_grad_norm_(ours, 0.5, norm_type)
    torch.testing.assert_close(norm, utils.clip_grad_norm_(plain, 0.5, norm_type), rtol=1e-12, atol=0)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=0)
    assert grad_norm(with_grad(grads[0].to(torch.complex64))).dtype == torch.float32


@pytest.mark.ranks(2, in_turn=True)
def test_columns_count_once_and_of_copies_one_counts() -> None:
    """Both ranks have one half of a matrix each by columns, and copies of two other tensors."""
    group, grads = group_of(), whole_grads(torch.float64)
    plain = [with_grad(grads[name].clone()) for name in ("table", "weight", "bias")]
    expected = utils.clip_grad_norm_(plain, 0.5).item()
    axes = (Axis(group, Placement.SHARD),)
    columns = with_grad(grads["table"].split([17, 13], 1)[group.rank].contiguous())
    ranges = (((0, 40),), (((0, 17), (17, 30))[group.rank],))
    set_shard(columns, Shard.of_ranges("", (40, 30), ranges, axes))
    copied = with_grad(grads["weight"].clone())
    set_shard(copied, Shard.of_ranges("", (7, 5), (((0, 7),), ((0, 5),)), axes, counted=group.rank == 0))
    replicated = with_grad(grads["bias"].clone())
    set_shard(replicated, Shard("", (3,), 0, 3, (Axis(group, Placement.REPLICATE),)))
    params = [columns, copied, replicated]
    assert clip_grad_norm_(params, 0.5).item() == pytest.approx(expected, rel=1e-12)
    assert grad_norm(params).item() == pytest.approx(0.5, rel=1e-5)
    # Every copy is scaled.
    assert copied.grad.norm().item() == pytest.approx(plain[1].grad.norm().item(), rel=1e-12)
