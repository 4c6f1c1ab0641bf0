"""sequence_region.py: where the sequence is divided, and what has to be known of the modules in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_tp.conversion import sequence_region
from scale_tp.conversion.sequence_region import SequenceRegion, find_sequence_region, install_sequence_region
from scale_tp.conversion.styles import Style, resolve_styles


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


def _found(model: nn.Module, plan: dict[str, str | Style] | None = None) -> SequenceRegion:
    modules = dict(model.named_modules())
    whole = {"(.*up|.*other)": "colwise", "(.*down|.*last)": "rowwise", **(plan or {})}
    return find_sequence_region(model, modules, resolve_styles(whole, modules))


def _model() -> nn.Module:
    model = nn.Module()
    model.blocks, model.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(4)
    return model


def test_norms_in_the_blocks_compute_on_a_part() -> None:
    region = _found(_model())
    assert region.path == "blocks" and len(region.blocks) == 2
    assert list(region.replicated) == ["blocks.0.norm", "blocks.1.norm"]
    assert region.contains("blocks.1.feed.up") and not region.contains("norm")
    # What the block holds itself is gathered at the layer, since the block goes on with a part.
    assert list(region.gathering) == ["blocks.0.feed", "blocks.1.feed"]


def test_a_model_without_one_list_of_blocks_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"expected one nn.ModuleList of blocks that holds all .* got 0 lists and 2 such"
    ):
        _found(nn.Sequential(Block()))
    two = nn.Module()
    two.a, two.b = nn.ModuleList([Block()]), nn.ModuleList([Block()])
    with pytest.raises(ValueError, match=r"got 2 lists and 4 such layers: pass sequence_parallel=False"):
        _found(two)


def test_a_module_of_unknown_computation_is_refused() -> None:
    between = _model()
    between.blocks[1].feed.norm = nn.LayerNorm(6)
    with pytest.raises(ValueError, match=r"'blocks.1.feed.norm' \(LayerNorm\) is between divided layers"):
        _found(between)
    assert "blocks.1.feed.norm" not in _found(between, {".*feed.norm": "replicated_with_grad_allreduce"}).replicated
    mixing = _model()
    mixing.blocks[0].conv = nn.Conv1d(4, 4, 3)
    with pytest.raises(ValueError, match=r"'blocks.0.conv' \(Conv1d\) is not divided, and may need the full sequence"):
        _found(mixing)
    assert list(_found(mixing, {".*conv": "sequence_parallel"}).replicated) == ["blocks.0.norm", "blocks.1.norm"]


class Part(nn.Module):
    """A block that may fail; it gives its input."""

    fails = False

    def forward(self, x: Tensor | None = None, **named: Any) -> Any:
        if self.fails:
            raise MemoryError("as by an allocator")
        return x


class Passing(nn.Module):
    """Calls some of its blocks."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Part(), nn.Sequential(nn.Dropout(dropout)), Part()])
        self.called = slice(0, 2)

    def forward(self, x: Tensor, **named: Any) -> Tensor:
        for block in self.blocks[self.called]:
            x = block(x, **named)
        return x


def _passing(rank: int, dropout: float = 0.5) -> Passing:
    """One process plays a rank of two: nothing is sent before the last block."""
    model = Passing(dropout)
    install_sequence_region(model, SequenceRegion("blocks", model.blocks, {}, {}), Group(rank, 2, None, "fake", (0, 1)))
    return model


def test_a_forward_that_calls_one_end_alone_is_refused() -> None:
    """All ranks would go on with a part, or put together what all of them have."""
    model = _passing(0)
    with pytest.raises(RuntimeError, match=r"'blocks' was entered at its first block, but its last one was not called"):
        model(torch.zeros(1, 4, 2))
    model.called = slice(1, 3)
    with pytest.raises(RuntimeError, match=r"'blocks' was left behind its last block, but its first one was not call"):
        model(torch.zeros(1, 4, 2))
    model.called = slice(1, 2)
    assert model(torch.zeros(1, 4, 2)).shape == (1, 4, 2)


def test_after_an_error_inside_ranks_draw_alike_again() -> None:
    states = []
    for rank in range(2):
        torch.manual_seed(3)
        model = _passing(rank)
        model.blocks[0].fails = True
        with pytest.raises(MemoryError):
            model(torch.zeros(1, 4, 2))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_without_dropout_the_random_state_is_not_touched() -> None:
    model, before = _passing(0, 0.0), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="was entered at its first block"):
        model(torch.zeros(1, 4, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_only_the_first_result_of_the_last_block_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, of blocks that also return a cache."""
    monkeypatch.setattr(sequence_region, "gather_sequence", lambda part, *_, **__: torch.cat([part, part], 1))
    state = sequence_region._RegionState("blocks", sequence_region.RegionRNG(Group()))
    gather, part = sequence_region._GatherOutput(Group(), state), torch.ones(1, 2, 3)
    full, cache = gather(nn.Identity(), (), (part, "cache"))
    assert full.shape == gather(nn.Identity(), (), part).shape == (1, 4, 3) and cache == "cache"


def test_a_block_called_in_another_way_is_refused_with_a_fix() -> None:
    model = _passing(0)
    with pytest.raises(
        TypeError, match=r"to be given the sequence as its first argument, .* got states, mask: pass it"
    ):
        model.blocks[0](states=torch.zeros(1, 4, 2), mask=None)


def test_blocks_with_dropout_are_refused_outside_the_forward() -> None:
    """Behind the last one nobody would lead the ranks back to the same random numbers."""
    model = _passing(0)
    with pytest.raises(RuntimeError, match=r"'blocks' drops something, and its first block was called outside of the"):
        model.blocks[0](torch.zeros(1, 4, 2))
    model.eval()
    assert model.blocks[0](torch.zeros(1, 4, 2)).shape == (1, 2, 2)
