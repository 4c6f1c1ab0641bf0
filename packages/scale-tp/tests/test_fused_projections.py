"""One layer that computes several projections: as the model cuts its output, so the ranks must divide it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_tp import parallelize


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
