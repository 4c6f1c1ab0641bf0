"""Comparisons of sharded tensors that the same ranks divide in different places."""

from __future__ import annotations

import pytest
import torch
from rank_values import by_rank
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from scale_core.comm.group import group_of
from scale_core.errors import ShardedTensorError
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard

FULL = torch.arange(20.0).reshape(5, 4)


def piece_of(full: Tensor, name: str, cut: int) -> nn.Parameter:
    """The first `cut` elements on rank 0, the others on rank 1."""
    group = group_of()
    start, stop = (0, cut) if group.rank == 0 else (cut, full.numel())
    piece = nn.Parameter(full.reshape(-1)[start:stop].clone())
    set_shard(piece, Shard(name, tuple(full.shape), start, stop, (Axis(group, Placement.SHARD),)))
    return piece


@pytest.mark.ranks(2, in_turn=True)
def test_equal_compares_tensors_that_are_cut_elsewhere() -> None:
    first, other = piece_of(FULL, "first", 7), piece_of(FULL, "other", 12)
    empty = piece_of(FULL, "empty", 0)
    changed = piece_of(FULL.index_fill(0, torch.tensor(4), 0.0), "changed", 12)
    equal = [torch.equal(first, other), torch.equal(other, empty), torch.allclose(first, empty)]
    assert [*equal, torch.equal(first, changed), torch.allclose(changed, empty)] == [True] * 3 + [False] * 2


@pytest.mark.ranks(2, in_turn=True)
def test_local_elements_are_compared_with_to_local() -> None:
    """Rank 0 has all elements of one, and its part has the full shape; rank 1 would leave it waiting."""
    told = []
    for cut in (12, 20):
        piece = piece_of(FULL, "weight", cut)
        local = piece.to_local().detach()
        if local.shape == FULL.shape or not local.numel():
            continue
        with pytest.raises(ShardedTensorError, match=r"as many elements as this rank's part.*to_local\(\)") as caught:
            torch.equal(piece, local)
        told.append(str(caught.value))
    first, second = by_rank(told)
    assert len(first) == 2 and len(second) == 1


@pytest.mark.ranks(2, in_turn=True)
def test_parameters_of_other_shapes_differ() -> None:
    """Both have as many elements on this rank, and other shapes in full: they differ, and nobody waits."""
    assert not torch.equal(piece_of(FULL, "first", 5), piece_of(FULL.reshape(-1)[:10], "other", 5))


@pytest.mark.ranks(2, in_turn=True)
def test_a_sharded_result_is_gathered_for_a_full_parameter() -> None:
    """What a program makes of a sharded gradient, as of ShardedDataParallel, goes to the parameter of each rank."""
    expected = [1 + 2 * FULL, FULL, 1 - FULL]
    moved, copied, listed = (nn.Parameter(torch.ones(5, 4)) for _ in range(3))
    move = piece_of(FULL, "move", 7)
    with torch.no_grad():
        moved.add_(move, alpha=2)
        copied.copy_(move)
        torch._foreach_sub_([listed], [move])
    found = [moved.detach(), copied.detach(), listed.detach()]
    assert all(map(torch.equal, found, expected))


def _mul(inputs: list[Tensor], factor: float) -> list[Tensor]:
    torch._foreach_mul_(inputs, factor)
    return inputs


def _norm(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch._foreach_norm(inputs))


for _function, _name in ((_mul, "mul_"), (_norm, "norm")):
    _function.__module__, _function.__name__ = "torch.foreach", _name


@pytest.mark.ranks(2, in_turn=True)
def test_functions_of_torch_foreach_take_lists() -> None:
    """As torch 2.15 calls them; an older torch has no `torch.foreach`."""
    pieces = [piece_of(torch.arange(4.0), "listed", 1).detach()]
    assert handle_torch_function(_mul, pieces, pieces, 3.0) is pieces
    assert torch.equal(pieces[0].full_tensor(), 3 * torch.arange(4.0))
    [norm] = handle_torch_function(_norm, pieces, pieces)
    assert float(norm) == pytest.approx(3 * 14.0**0.5)
