"""A deferred batch norm has after each mini-batch the running statistics that a plain one has without a pipeline."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import checkpoint_wrapper
from scale_pipe import DeferredBatchNorm


def deferred(norm: nn.Module, chunks: int) -> Any:
    return DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(norm), chunks)


def assert_same_statistics(one: Any, other: Any) -> None:
    assert one.num_batches_tracked == other.num_batches_tracked
    torch.testing.assert_close(one.running_mean, other.running_mean)
    torch.testing.assert_close(one.running_var, other.running_var)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(10, 3), (10, 3, 4), (10, 3, 4, 5)])
def test_running_statistics_are_those_of_the_whole_mini_batch(momentum: float | None, shape: tuple[int, ...]) -> None:
    plain: Any = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](3, momentum=momentum).double()
    norm = deferred(plain, chunks=4)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        # Far from zero, where differences of sums go wrong.
        batch = torch.randn(shape, generator=generator).double() * 3 + 100
        plain(batch)
        for piece in batch.split([4, 2, 2, 2]):
            norm(piece)
        assert_same_statistics(norm, plain)
    assert torch.equal(norm.eval()(batch), nn.functional.batch_norm(batch, norm.running_mean, norm.running_var))


def test_each_micro_batch_is_normalized_by_itself() -> None:
    plain = nn.BatchNorm1d(3)
    norm, piece = deferred(plain, chunks=2), torch.randn(4, 3)
    assert torch.equal(norm(piece), plain(piece))


def test_fewer_micro_batches_than_chunks_are_a_mini_batch() -> None:
    plain, batch = nn.BatchNorm1d(3), torch.randn(6, 3)
    norm = deferred(plain, chunks=8)
    norm.begin_mini_batch(3)
    for piece in batch.chunk(3):
        norm(piece)
    plain(batch)
    assert_same_statistics(norm, plain)


def test_what_a_failed_mini_batch_has_left_is_forgotten() -> None:
    plain, batch = nn.BatchNorm1d(3), torch.randn(6, 3)
    norm = deferred(plain, chunks=2)
    norm(torch.randn(4, 3) + 50)
    norm.begin_mini_batch(2)
    for piece in batch.chunk(2):
        norm(piece)
    plain(batch)
    assert_same_statistics(norm, plain)


def test_a_recomputation_counts_nothing() -> None:
    plain, batch = nn.BatchNorm1d(3), torch.randn(6, 3, requires_grad=True)
    norm = deferred(plain, chunks=3)
    block = checkpoint_wrapper(nn.Sequential(norm, nn.Tanh()))
    outputs = [block(piece) for piece in batch.chunk(3)]
    before = copy.deepcopy(norm.state_dict())
    for output in reversed(outputs):
        output.sum().backward()
    plain(batch)
    assert_same_statistics(norm, plain)
    assert all(torch.equal(before[key], value) for key, value in norm.state_dict().items())


def test_conversion_keeps_tensors_modes_and_keys() -> None:
    shared = nn.BatchNorm1d(3)
    model: Any = nn.Sequential(shared, nn.Sequential(nn.BatchNorm2d(2, affine=False).eval(), shared), nn.ReLU())
    state = model.state_dict()
    tensors = [*model.parameters(), *model.buffers()]
    without = nn.BatchNorm1d(3, track_running_stats=False)
    sync = nn.SyncBatchNorm(3)
    model.extend([without, sync, nn.InstanceNorm1d(3, track_running_stats=True)])
    kinds = [type(part) for part in model[3:]]
    assert DeferredBatchNorm.convert_deferred_batch_norm(model, 4) is model
    assert type(model[0]) is DeferredBatchNorm and model[0] is model[1][1] and model[0].chunks == 4
    assert model[0].training and not model[1][0].training
    assert [type(part) for part in model[3:]] == kinds
    assert list(state) == list(model[:3].state_dict())
    assert all(one is other for one, other in zip(tensors, [*model[:3].parameters(), *model[:3].buffers()]))  # noqa: B905
    before = model[0]  # With the same chunks it stays; with others it is replaced, as a batch norm is.
    assert DeferredBatchNorm.convert_deferred_batch_norm(model, 4)[0] is before  # type: ignore[index]
    assert DeferredBatchNorm.convert_deferred_batch_norm(model, 2)[0] is model[0] is model[1][1]  # type: ignore[index]
    assert (before.chunks, model[0].chunks) == (4, 2) and model[0].running_mean is before.running_mean


def test_state_of_fairscale_with_what_it_has_collected_is_loaded() -> None:
    norm = DeferredBatchNorm(3)
    state: dict[str, Tensor] = {**norm.state_dict(), "sum": torch.ones(3), "sum_squares": torch.ones(3)}
    norm.load_state_dict(state)


def test_inputs_without_channels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected an input \[N, C, ...\] of at least 2 dimensions, got \[3\]"):
        DeferredBatchNorm(3)(torch.ones(3))


def test_conversion_keeps_hooks_and_attributes() -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(3, momentum=None))
    model[0].mine = "mine"
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    x = torch.randn(4, 3)
    expected = model(x)
    DeferredBatchNorm.convert_deferred_batch_norm(model)
    assert type(model[0]) is DeferredBatchNorm and model[0].mine == "mine" and model[0].momentum is None
    assert torch.equal(model(x), expected)


class Doubled(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_batch_norm_with_a_forward_of_its_own_stays_what_it_is() -> None:
    model = nn.Sequential(Doubled(3))
    DeferredBatchNorm.convert_deferred_batch_norm(model)
    assert type(model[0]) is Doubled


def test_a_mini_batch_without_samples_moves_nothing() -> None:
    plain, none, batch = nn.BatchNorm1d(3), torch.empty(0, 3), torch.randn(4, 3) + 7
    norm = deferred(plain, chunks=2)
    for pieces in ([none, none], batch.chunk(2), [none, batch]):
        plain(torch.cat([*pieces]))
        for piece in pieces:
            norm(piece)
        assert_same_statistics(norm, plain)


def test_what_cannot_be_deferred_is_refused() -> None:
    for chunks in (0, 1.5):
        for make in (
            DeferredBatchNorm(3).convert_deferred_batch_norm,
            lambda _, chunks: DeferredBatchNorm(3, chunks=chunks),
        ):
            with pytest.raises(ValueError, match=f"number of chunks must be positive integer, got {chunks}"):
                make(nn.ReLU(), chunks=chunks)
    lazy = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="'1' is a LazyBatchNorm1d, whose number of channels is not known yet"):
        DeferredBatchNorm.convert_deferred_batch_norm(lazy)
    assert type(lazy[0]) is nn.BatchNorm1d  # What is refused was not changed.
