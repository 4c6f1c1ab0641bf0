"""stretches.py: where the sequence is divided, and what has to be known of the modules in between."""

from __future__ import annotations

import pytest
from torch import nn

from scale_tp.plan import Style, resolve
from scale_tp.stretches import Stretch, stretch_of


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)


class Block(nn.Module):
    """A perceptron of its own, and one in the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(4), Feed()
        self.other, self.last = nn.Linear(4, 6), nn.Linear(6, 4)


def _found(model: nn.Module, plan: dict[str, str | Style] | None = None) -> Stretch:
    modules = dict(model.named_modules())
    whole = {"(.*up|.*other)": "colwise", "(.*down|.*last)": "rowwise", **(plan or {})}
    return stretch_of(model, modules, resolve(whole, modules))


def _model() -> nn.Module:
    model = nn.Module()
    model.blocks, model.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(4)
    return model


def test_it_goes_over_the_blocks_and_norms_in_them_compute_on_a_part() -> None:
    stretch = _found(_model())
    assert stretch.path == "blocks" and len(stretch.blocks) == 2
    assert list(stretch.alike) == ["blocks.0.norm", "blocks.1.norm"]
    assert stretch.holds("blocks.1.feed.up") and not stretch.holds("norm")
    # What the block holds itself is gathered at the layer, since the block goes on with a part.
    assert list(stretch.gathering) == ["blocks.0.feed", "blocks.1.feed"]


def test_a_model_without_one_list_of_blocks_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"expected one nn.ModuleList of blocks that holds all .* got 0 lists and 2 such"
    ):
        _found(nn.Sequential(Block()))
    two = nn.Module()
    two.a, two.b = nn.ModuleList([Block()]), nn.ModuleList([Block()])
    with pytest.raises(ValueError, match=r"got 2 lists and 4 such layers: pass sequence_parallel=False"):
        _found(two)


def test_a_module_of_which_it_is_not_known_what_it_computes_on_is_refused() -> None:
    between = _model()
    between.blocks[1].feed.norm = nn.LayerNorm(6)
    with pytest.raises(ValueError, match=r"'blocks.1.feed.norm' \(LayerNorm\) stands between divided layers"):
        _found(between)
    assert "blocks.1.feed.norm" not in _found(between, {".*feed.norm": "replicated_with_grad_allreduce"}).alike
    mixing = _model()
    mixing.blocks[0].conv = nn.Conv1d(4, 4, 3)
    with pytest.raises(ValueError, match=r"'blocks.0.conv' \(Conv1d\) is not divided, and may need the whole sequence"):
        _found(mixing)
    assert list(_found(mixing, {".*conv": "sequence_parallel"}).alike) == ["blocks.0.norm", "blocks.1.norm"]
