"""modules.py: linear layers of either kind, whose weight is divided in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_tp import parallelize
from scale_tp.conversion.modules import ColumnParallelMixin, RowParallelMixin, is_linear, is_transposed, output_dim
from scale_tp.layers.base import ParamSharding
from scale_tp.layers.linear_ops import SharedInput, linear
from scale_tp.layers.module_swap import local_parameter, swap_class
from scale_tp.split import Split

TWO = Group(1, 2, None, "fake", (0, 1))


class Conv1D(nn.Module):
    """As transformers have it: [inputs, outputs]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Deaf(nn.Linear):
    pass


def test_linear_layers_have_torchs_forward_or_are_transposed() -> None:
    assert is_linear(nn.Linear(2, 3)) and is_linear(Deaf(2, 3)) and is_linear(Conv1D(3, 2))
    assert not is_linear(OwnLinear(2, 3)) and not is_linear(nn.Bilinear(2, 2, 2))
    assert output_dim(nn.Linear(2, 3)) == 0 and output_dim(Conv1D(3, 2)) == 1


def test_both_kinds_compute_what_they_are() -> None:
    plain, transposed, x = nn.Linear(4, 3), Conv1D(3, 4), torch.randn(2, 5, 4)
    assert torch.equal(linear(x, plain.weight, plain.bias, transposed=is_transposed(plain)), plain(x))
    expected = x @ transposed.weight + transposed.bias
    torch.testing.assert_close(
        linear(x, transposed.weight, transposed.bias, transposed=is_transposed(transposed)), expected
    )
    torch.testing.assert_close(linear(x, transposed.weight, None, transposed=True), x @ transposed.weight)


def _rows(split_input: bool, *, reduce_output: bool = True, group: Group = TWO) -> nn.Linear:
    rows = nn.Linear(5, 3)
    facts: dict[str, Any] = {
        "split_input": split_input,
        "reduce_output": reduce_output,
        "sequence_parallel": False,
        "region_rng": None,
    }
    placement = ParamSharding((3, 5), 1, Split.even(5, 2))
    part = local_parameter(rows.weight, placement, group)
    swap_class(
        rows, RowParallelMixin, group, {"weight": placement}, path="blocks.0.down", split=placement.split, **facts
    )
    rows.weight = part
    return rows


def test_only_one_rank_adds_the_bias_to_its_summand() -> None:
    """The sum of the summands is the full layer's output. On each rank the bias has the full gradient."""
    summands = []
    for rank, features in enumerate((slice(0, 3), slice(3, 5))):
        rows = _rows(False, reduce_output=False, group=Group(rank, 2, None, "fake", (0, 1)))
        with torch.no_grad():
            rows.weight.fill_(2.0)
            rows.bias.copy_(torch.tensor([10.0, 20.0, 30.0]))
        summands.append(rows(torch.ones(4, 5)[:, features]))
        summands[-1].sum().backward()
        assert rows.bias.grad is not None and rows.bias.grad.tolist() == [4.0] * 3
    assert (summands[0] + summands[1]).tolist() == [[20.0, 30.0, 40.0]] * 4


def test_an_input_that_is_cut_in_another_way_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'blocks.0.down': expected the 5 input features to be divided as \[3, 2\] .*, got 3"
    ):
        _rows(False)(torch.zeros(1, 3))


def test_an_input_of_another_kind_is_refused_by_the_layers_name() -> None:
    for split_input, width in ((False, 2), (True, 5)):
        rows = _rows(split_input)
        with pytest.raises(TypeError, match=rf"'blocks.0.down': expected a tensor \[..., {width}\], got NoneType"):
            rows(None)
    with pytest.raises(ValueError, match=r"'blocks.0.down': expected an input \[..., 5\], got \[1, 3\]"):
        rows(torch.zeros(1, 3))
    columns, split = nn.Linear(4, 6), Split.even(6, 2)
    facts: dict[str, Any] = {
        "gather_output": False,
        "region_rng": None,
        "shared_input": SharedInput(TWO, 1, "copy"),
        "split": split,
    }
    shardings = {"weight": ParamSharding((6, 4), 0, split), "bias": ParamSharding((6,), 0, split)}
    parts = {name: local_parameter(param, shardings[name], TWO) for name, param in columns.named_parameters()}
    swap_class(columns, ColumnParallelMixin, TWO, shardings, path="blocks.0.up", **facts)
    for name, part in parts.items():
        columns.register_parameter(name, part)
    with pytest.raises(
        ValueError, match=r"'blocks.0.up': expected .* \[..., 4\], got \[1, 3\]: .* 'rowwise', or that one"
    ):
        columns(torch.zeros(1, 3))
    with pytest.raises(TypeError, match=r"'blocks.0.up': expected a tensor \[..., 4\], got NoneType"):
        columns(None)


class Gated(nn.Module):
    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(6, 20, dtype=torch.float64), nn.Linear(10, 6, dtype=torch.float64)
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, -1)
        return self.down(F.silu(gate) * up)


STYLES = {False: "packed_colwise", True: "interleaved_colwise"}


@pytest.mark.ranks(2)
def test_what_the_model_cuts_is_divided_so() -> None:
    """Of the gradient of the first layer from one process, and of the output."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for interleaved, style in STYLES.items():
        torch.manual_seed(0)
        plain = Gated(interleaved)
        model = parallelize(copy.deepcopy(plain), {"gate_up": style, "down": "rowwise"}, dist.group.WORLD)
        for each in (plain, model):
            each(x).square().sum().backward()
        found.append(float((model(x) - plain(x)).detach().abs().max()))
        grad = model.get_parameter("down.bias").grad
        assert grad is not None and plain.down.bias.grad is not None
        found.append(float((grad - plain.down.bias.grad).abs().max()))
    assert max(found) < 1e-12


@pytest.mark.parametrize("interleaved", [False, True])
def test_one_matrix_of_several_is_refused_with_the_styles(interleaved: bool) -> None:
    model = Gated(interleaved)
    message = r"'gate_up' gives 20 outputs, and 'down' takes 10 inputs.*'packed_colwise', or 'interleaved_colwise'"
    with pytest.raises(ValueError, match=message):
        parallelize(model, {"gate_up": "colwise", "down": "rowwise"}, Group(0, 2, None, "fake", (0, 1)))
    assert type(model.gate_up) is nn.Linear
