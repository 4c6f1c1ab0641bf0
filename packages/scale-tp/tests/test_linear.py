"""linear.py: layers whose weight is divided by columns of the product or by its rows."""

from __future__ import annotations

import copy
import inspect
import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from with_options import with_options

from scale_check.exact import assert_equal
from scale_core.comm.group import Group, group_of
from scale_core.shard import Placement, shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp import ColumnParallelLinear, LayerOptions, RowParallelLinear, megatron
from scale_tp.megatron import copy_to_tensor_model_parallel_region
from scale_tp.split import Split, split_heads

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SIZES = [(5, 7), (1, 3), (4, 8), (6, 2), (3, 1)]


def input_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def small_integers(*shape: int) -> Tensor:
    """From -2 to 2, in turn."""
    return (torch.arange(math.prod(shape)) % 5 - 2).view(shape)


def round_weight(layer: Any) -> None:
    """Takes small integers for the weight: their sums are exact in any order, in bfloat16 as well."""
    with torch.no_grad():
        layer.weight.mul_(4).round_().clamp_(-3, 3)


def integer_input(*shape: int, dtype: torch.dtype) -> Tensor:
    return input_of(*shape).detach().mul(2).round().clamp(-3, 3).to(dtype).requires_grad_()


def plain_layer(in_features: int, out_features: int, bias: bool, dtype: torch.dtype, init: Any = None) -> nn.Linear:
    """The layer that is not divided, from the same seed, with a bias that is not only zeros."""
    torch.manual_seed(5)
    layer = nn.utils.skip_init(nn.Linear, in_features, out_features, bias=bias, dtype=dtype)
    (init or nn.init.xavier_normal_)(layer.weight)
    if bias:
        with torch.no_grad():
            layer.bias.copy_(small_integers(out_features))
    return layer


def fill_bias(layer: Any) -> None:
    with torch.no_grad():
        whole = small_integers(layer.out_features)
        layer.bias.copy_(whole)


def gradients(output: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Those of a loss that weighs each element of the output otherwise."""
    weights = small_integers(*output.shape).to(output.dtype)
    grads = torch.autograd.grad((output * weights).sum(), [t for t in tensors if t is not None])
    return list(map(local_tensor, grads))


def check(found: list[Tensor], expected: list[Tensor], case: object) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), (case, number, one, other)


def one_of_each(group: Group, in_features: int, out_features: int, bias: bool, stride: int, dtype: torch.dtype) -> None:
    case = (in_features, out_features, bias, stride, dtype)
    plain = plain_layer(in_features, out_features, bias, dtype)
    options: Any = {"stride": stride, "process_group": group, "dtype": dtype}
    torch.manual_seed(5)
    column = ColumnParallelLinear(in_features, out_features, bias, **with_options(LayerOptions, **options))
    assert torch.equal(column.get_master_weight(), plain.weight), case
    torch.manual_seed(5)
    row = RowParallelLinear(in_features, out_features, bias, **with_options(LayerOptions, **options))
    assert torch.equal(row.get_master_weight(), plain.weight), case
    if bias:
        assert not column.bias.any() and not row.bias.any()
        fill_bias(column)
        fill_bias(row)
    for layer in (plain, column, row):
        round_weight(layer)
    x = integer_input(2, 3, in_features, dtype=dtype)
    expected = plain(x)
    x_grad, *param_grads = gradients(expected, x, plain.weight, plain.bias)
    for gathers in (True, False):
        column.gather_output = gathers
        split, y = column.split, integer_input(2, 3, in_features, dtype=dtype)
        output = column(y)
        if gathers:
            check([output], [expected], case)
        else:
            check([output], [split.take(expected, group.rank, -1)], case)
            gathered = megatron.gather_from_tensor_model_parallel_region(output, group, sizes=split.sizes)
            output = split.join(gathered.split(split.sizes, -1), -1)
        column_grads = gradients(output, y, column.weight, column.bias)
        check(column_grads, [x_grad, *(split.take(grad, group.rank) for grad in param_grads)], case)
    for parallel in (True, False):
        row.input_is_parallel = parallel
        split, y = row.split, integer_input(2, 3, in_features, dtype=dtype)
        input = split.take(y, group.rank, -1) if parallel else y
        output = row(input)
        check([output], [expected], case)
        input_grad = split.take(x_grad, group.rank, -1) if parallel else x_grad
        row_grads = gradients(output, input, row.weight, row.bias)
        check(row_grads, [input_grad, split.take(param_grads[0], group.rank, 1), *param_grads[1:]], case)


@pytest.mark.ranks(2, 3)
def test_two_layers_of_integers_train_as_torchs_to_the_bit() -> None:
    """Whole numbers have sums that are exact in any order: equal to torch's layers to the bit, gradients as well."""
    group = group_of()

    def whole(layer: Any) -> Any:
        for param in layer.parameters():
            with torch.no_grad():
                param.mul_(8).round_()
        return layer

    first, second = whole(plain_layer(5, 11, True, torch.float32)), whole(plain_layer(11, 3, True, torch.float32))
    x, y = input_of(4, 5).mul(4).round().detach().requires_grad_(), None
    y = x.detach().clone().requires_grad_()
    column = ColumnParallelLinear(5, 11, gather_output=False, process_group=group)
    row = RowParallelLinear(11, 3, input_is_parallel=True, process_group=group)
    column.load_state_dict(first.state_dict())
    row.load_state_dict(second.state_dict())
    expected, found = second(first(x).relu()), row(column(y).relu())
    assert torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    for layer, plain in ((column, first), (row, second)):
        for name, param in layer.named_parameters():
            expected = layer.shardings[name].local_part(plain.get_parameter(name).grad, group.rank)
            assert torch.equal(local_tensor(param.grad), expected)


@pytest.mark.ranks(2, 3)
def test_an_input_of_another_split_is_refused_on_all_ranks() -> None:
    """A column parallel output of another split: one error, on all ranks, before anything is added."""
    group = group_of()
    column = ColumnParallelLinear(
        4, 9, gather_output=False, process_group=group, options=LayerOptions(split=_lopsided(9, group.size))
    )
    row = RowParallelLinear(9, 2, input_is_parallel=True, process_group=group)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"9 input features to be divided as .* must be divided in the same way"):
            row(column(input_of(2, 4)))
    fitting = RowParallelLinear(
        9, 2, input_is_parallel=True, process_group=group, options=LayerOptions(split=column.split)
    )
    assert fitting(column(input_of(2, 4))).shape == (2, 2)
    # Later, without asking: the full input in the place of this rank's shard.
    with pytest.raises(ValueError, match="got 9 of them"):
        fitting(input_of(2, 9))


@pytest.mark.ranks(2, 3)
def test_heads_that_are_copies_count_once() -> None:
    """Heads that are copies on several ranks: the whole is made of the first of each."""
    group = group_of()
    split = split_heads(4, 1, group.size).key_value
    layer = ColumnParallelLinear(3, 1, bias=False, process_group=group, options=LayerOptions(split=split))
    assert layer.get_master_weight().shape == (1, 3)
    assert layer(input_of(2, 3)).shape == (2, 1)
    assert shard_of(layer.weight).counted is (group.rank == 0)
    # Each rank computes something else with its copy, so the gradients of the copies are summed.
    own = ColumnParallelLinear(3, 1, gather_output=False, process_group=group, options=LayerOptions(split=split))
    (own(input_of(2, 3)) * (1 + group.rank)).sum().backward()
    total = sum(range(1, group.size + 1))
    assert torch.equal(own.bias.grad.to_local(), torch.tensor([2.0 * total]))
    torch.testing.assert_close(own.weight.grad.to_local(), total * input_of(2, 3).sum(0, keepdim=True))
    gathered = layer(input_of(2, 3))
    gathered.sum().backward()
    torch.testing.assert_close(layer.weight.grad.to_local(), input_of(2, 3).sum(0, keepdim=True))
    partly = Split(2, tuple(((0, 1),) if rank else ((0, 1), (1, 2)) for rank in range(group.size)))
    with pytest.raises(ValueError, match="to have all of theirs in common"):
        ColumnParallelLinear(3, 2, process_group=group, options=LayerOptions(split=partly))
    with pytest.raises(ValueError, match="would be added twice"):
        RowParallelLinear(1, 3, process_group=group, options=LayerOptions(split=split))


@pytest.mark.fault(84)
@pytest.mark.ranks(2, 3)
def test_shards_survive_copies_pickles_and_moves() -> None:
    """What is known of a parameter outlives a copy, a pickle, a move, and another tensor in its place."""
    group = group_of()
    layer = RowParallelLinear(5, 3, process_group=group)
    expected = shard_of(layer.weight)
    assert expected.shape == (3, 5)
    assert [axis.placement for axis in expected.axes] == [Placement.SHARD]
    assert [axis.placement for axis in shard_of(layer.bias).axes] == [Placement.REPLICATE]
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assigned = RowParallelLinear(5, 3, process_group=group)
    assigned.load_state_dict({k: v.clone() for k, v in layer.state_dict().items()}, assign=True)
    replaced = copy.deepcopy(layer)
    replaced.weight = nn.Parameter(layer.weight.detach().clone())
    meta = RowParallelLinear(5, 3, process_group=group, device="meta").to_empty(device="cpu")
    meta.load_state_dict(layer.state_dict())
    x = input_of(2, 5)
    for other in (copy.deepcopy(layer), loaded, assigned, replaced, meta, copy.deepcopy(layer).double().float()):
        assert shard_of(other.weight) == expected
        assert shard_of(other.bias) == shard_of(layer.bias)
        assert torch.equal(other(x), layer(x))


def _lopsided(total: int, num_ranks: int) -> Split:
    return Split.of_sizes([total - num_ranks + 1, *[1] * (num_ranks - 1)])


@pytest.mark.ranks(2, 3)
def test_both_layers_are_the_plain_one_to_the_bit() -> None:
    group, checked = group_of(), 0
    for dtype in (torch.float32, torch.bfloat16):
        for in_features, out_features in SIZES:
            for bias in (True, False):
                for stride in (1, 2) if out_features % 2 == 0 and in_features % 2 == 0 else (1,):
                    one_of_each(group, in_features, out_features, bias, stride, dtype)
                    checked += 1
    assert checked == 28


@pytest.mark.ranks(4)
def test_layers_of_different_groups_do_not_mix() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    outer, inner = mesh["outer"], mesh["inner"]
    x = input_of(2, 4)
    column = ColumnParallelLinear(4, 6, gather_output=False, process_group=outer)
    assert column.group.ranks == group_of(outer).ranks
    for group in (inner, dist.group.WORLD):
        row = RowParallelLinear(6, 3, input_is_parallel=True, process_group=group)
        with pytest.raises(ValueError, match=r"is divided between ranks .*, but its input comes from layers"):
            row(column(x).relu() * 2)
    # Whoever leaves one region may enter another one.
    whole = ColumnParallelLinear(4, 6, process_group=outer)
    next_one = RowParallelLinear(6, 3, process_group=inner)
    found = next_one(whole(x).relu())
    expected = F.linear(F.linear(x, whole.get_master_weight()).relu(), next_one.get_master_weight())
    torch.testing.assert_close(found, expected)
    # And within one region a layer may follow upon another.
    inside = ColumnParallelLinear(4, 6, gather_output=False, process_group=inner)(next_one.weight.new_ones(2, 4))
    assert RowParallelLinear(6, 3, input_is_parallel=True, process_group=inner)(inside).shape == (2, 3)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_process_has_the_plain_layer_to_the_bit(kind: Any, dtype: torch.dtype) -> None:
    plain = plain_layer(5, 7, True, dtype)
    torch.manual_seed(5)
    layer = kind(5, 7, dtype=dtype)
    fill_bias(layer)
    x, y = input_of(2, 3, 5, dtype=dtype), input_of(2, 3, 5, dtype=dtype)
    expected, found = plain(x), layer(y)
    assert torch.equal(found, expected)
    for one, other in zip(
        gradients(found, y, *layer.parameters()), gradients(expected, x, *plain.parameters()), strict=True
    ):
        assert torch.equal(one, other)
    assert shard_of(layer.weight) is None


def test_fairscales_arguments_are_accepted() -> None:
    names = ["in_features", "out_features", "bias", "gather_output", "init_method", "stride"]
    assert list(inspect.signature(ColumnParallelLinear).parameters)[:6] == names
    names[3] = "input_is_parallel"
    assert list(inspect.signature(RowParallelLinear).parameters)[:6] == names
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(3, 4, False, False, nn.init.ones_, 1, True)
        assert layer.bias is None
        assert torch.equal(layer.master_weight, torch.ones(4, 3))
        named = kind(
            in_features=3,
            out_features=4,
            bias=True,
            init_method=lambda x: x,
            stride=1,
            keep_master_weight_for_test=False,
        )
        assert named.master_weight is None
        assert "in_features=3, out_features=4, bias=True" in repr(named)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_on_meta_gets_the_values_of_the_plain_one_later(kind: Any) -> None:
    plain = plain_layer(5, 7, False, torch.float32)
    parts = []
    for rank in range(3):
        layer = kind(5, 7, device="meta", process_group=Group(rank, 3, ranks=(0, 1, 2)))
        assert layer.weight.is_meta
        layer.to_empty(device="cpu")
        torch.manual_seed(5)
        layer.reset_parameters()
        parts.append(layer.weight.to_local().detach())
        assert not layer.bias.any()
    assert torch.equal(layer.split.join(parts, layer.shardings["weight"].dim), plain.weight)


def test_a_whole_state_dict_is_loaded_by_parts() -> None:
    plain = plain_layer(5, 7, True, torch.float32)
    model = nn.Sequential(ColumnParallelLinear(5, 7, process_group=Group(1, 2, ranks=(0, 1))))
    whole = {f"0.{key}": value for key, value in plain.state_dict().items()}
    given = dict(whole)
    model.load_state_dict(given)
    assert torch.equal(model[0].weight.to_local(), plain.weight[4:])
    assert torch.equal(model[0].bias.to_local(), plain.bias[4:])
    assert all(given[key] is value for key, value in whole.items()), "what was given is left as it is"
    model.load_state_dict(model.state_dict(keep_vars=True))
    assert torch.equal(model[0].weight.to_local(), plain.weight[4:])
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**whole, "0.weight": torch.zeros(6, 5)})


@pytest.mark.ranks(2)
def test_each_rank_loads_its_part_of_a_state_of_dtensors() -> None:
    """All ranks of a DTensor gather it together, also if each rank takes different rows."""
    from torch.distributed.tensor import Shard, distribute_tensor

    plain, mesh = plain_layer(5, 7, True, torch.float32), init_device_mesh("cpu", (2,))
    layer = ColumnParallelLinear(5, 7, process_group=mesh)
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in plain.state_dict().items()}
    layer.load_state_dict(state)
    assert_equal(dict(layer.state_dict()), dict(plain.state_dict()))


def test_autocast_reaches_the_layer() -> None:
    layer = ColumnParallelLinear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 4)).dtype == torch.bfloat16


TWO = Group(0, 2, ranks=(0, 1))


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((-1, 3), {}, ValueError, "in_features to be at least 0, got -1"),
        ((3, 2.0), {}, TypeError, "out_features to be an integer, got 2.0"),
        ((7, 7), {"stride": 2}, ValueError, "stride to divide the 7 indices that are split, got stride=2"),
        ((4, 4), {"stride": 0}, ValueError, "stride to be at least 1, got 0"),
        ((4, 4), {"split": Split.even(5, 2)}, ValueError, "got one of 5 between 2"),
        ((4, 4), {"split": Split.even(4, 3)}, ValueError, "got one of 4 between 3"),
        ((4, 4), {"stride": 2, "split": Split.even(4, 2)}, ValueError, "stride or split, got both"),
        (
            (4, 4),
            {"split": [2, 2]},
            TypeError,
            r"a scale_tp.split.Split or None, got list: write Split.of_sizes",
        ),
        (
            (4, 4),
            {"init_method": "zeros"},
            TypeError,
            r"a function that fills a tensor in place, such as .* got 'zeros'",
        ),
        (
            (4, 4),
            {"dtype": torch.int32},
            ValueError,
            "expected dtype to be of floating point, .* got torch.int32: pass",
        ),
        (
            (4, 4),
            {"process_group": "model"},
            TypeError,
            "expected a ProcessGroup, a DeviceMesh, a ParallelDims or None, got str",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    kind: Any, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(*arguments, **with_options(LayerOptions, **{"process_group": TWO, **options}))


def test_an_input_of_another_size_is_refused() -> None:
    for kind in (ColumnParallelLinear, RowParallelLinear):
        for group in (Group(), TWO):
            with pytest.raises(ValueError, match=rf"{kind.__name__}: expected an input \[..., 4\], got \[2, 3\]"):
                kind(4, 6, process_group=group)(torch.ones(2, 3))
        with pytest.raises(TypeError, match=rf"{kind.__name__}: expected a tensor \[..., 4\], got list"):
            kind(4, 6)([1.0, 2.0, 3.0, 4.0])


def test_products_of_a_layer_are_those_of_torch() -> None:
    """Against torch's own function, on numbers whose sums are exact."""
    weight = torch.arange(12.0).view(4, 3)
    layer = ColumnParallelLinear(3, 4, bias=False)
    layer.load_state_dict({"weight": weight})
    assert torch.equal(layer(torch.ones(2, 3)), F.linear(torch.ones(2, 3), weight))


@pytest.mark.parametrize("sequence_dim", [2, -1, 5, -4])
@pytest.mark.parametrize("overlap_pieces", [None, 2])
def test_a_dimension_that_holds_no_sequence_is_refused(sequence_dim: int, overlap_pieces: int | None) -> None:
    options: Any = {"sequence_parallel": True, "sequence_dim": sequence_dim, "overlap_pieces": overlap_pieces}
    for layer in (
        ColumnParallelLinear(4, 6, **with_options(LayerOptions, process_group=TWO, **options)),
        RowParallelLinear(4, 6, **with_options(LayerOptions, process_group=TWO, **options)),
    ):
        message = rf"expected sequence_dim to be one of the input's .* got sequence_dim={sequence_dim} for an input"
        with pytest.raises(ValueError, match=message):
            layer(torch.zeros(1, 3, 4))


def test_a_number_of_pieces_that_is_none_is_refused() -> None:
    for kind in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(ValueError, match="expected overlap_pieces to be at least 1, got 0"):
            kind(4, 6, options=LayerOptions(overlap_pieces=0))
        with pytest.raises(TypeError, match="expected overlap_pieces to be an integer, got True"):
            kind(4, 6, options=LayerOptions(overlap_pieces=True))


def test_an_input_that_is_inside_is_not_brought_there_again() -> None:
    layer = ColumnParallelLinear(
        4, 6, gather_output=False, process_group=TWO, options=LayerOptions(input_is_inside=True)
    )
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(ValueError, match="ColumnParallelLinear: input_is_inside=True, but the input"):
        layer(x)
    round_weight(layer)
    (gradient,) = torch.autograd.grad(layer(inside := copy_to_tensor_model_parallel_region(x, TWO)).sum(), inside)
    assert torch.equal(gradient, layer.weight.to_local().sum(0).expand(2, 4))
    for options in ({"sequence_parallel": True}, {"overlap_pieces": 2}):
        with pytest.raises(ValueError, match=r"input_is_inside=True says that .* got .* as well\. Leave"):
            ColumnParallelLinear(4, 6, **with_options(LayerOptions, process_group=TWO, input_is_inside=True, **options))
