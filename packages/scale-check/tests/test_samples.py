"""The samples of the ranks become those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from scale_check.script.data import OutOfSamples, Samples, keeping, replaying


def loader_of(first: float, loader_class: type[DataLoader[Any]] = DataLoader) -> DataLoader[Any]:
    return loader_class(TensorDataset(torch.arange(first, first + 4)), batch_size=2)


def kept_by_ranks(loader_class: type[DataLoader[Any]] = DataLoader, num_batches: int = 3) -> list[Samples]:
    ranks = [Samples(), Samples()]
    for rank, samples in enumerate(ranks):
        with keeping(samples):
            for _ in zip(range(num_batches), loader_of(10.0 * rank, loader_class), strict=False):
                pass
    return ranks


def replayed(samples: Samples, loader_class: type[DataLoader[Any]] = DataLoader) -> list[list[float]]:
    with replaying(samples):
        return [batch.tolist() for (batch,) in loader_of(100.0, loader_class)]


class OwnIter(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for indices in self.batch_sampler or ():
            yield [torch.tensor([self.dataset[index][0] for index in indices])]


class InheritedIter(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


@pytest.mark.parametrize("loader_class", [DataLoader, OwnIter, InheritedIter])
def test_one_process_has_the_batches_of_all_ranks(loader_class: type[DataLoader[Any]]) -> None:
    samples = Samples.together(kept_by_ranks(loader_class))
    assert replayed(samples, loader_class) == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_a_class_defined_while_samples_are_kept_is_read_too() -> None:
    samples = Samples()
    with keeping(samples):

        class Late(InheritedIter):
            def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
                yield from super().__iter__()

        assert len(list(loader_of(0.0, Late))) == 2
    assert [len(iteration) for iteration in samples.of_loaders[0]] == [2]


def test_loaders_have_their_methods_back() -> None:
    before = DataLoader.__iter__, DataLoader.__len__, OwnIter.__iter__
    with pytest.raises(KeyError), keeping(Samples()):
        raise KeyError
    assert (DataLoader.__iter__, DataLoader.__len__, OwnIter.__iter__) == before
    assert "__init_subclass__" not in vars(DataLoader)


def test_batches_in_turn_are_as_many_as_of_all_ranks() -> None:
    samples = Samples.in_turn(kept_by_ranks())
    assert replayed(samples) == [[0, 1], [10, 11], [2, 3], [12, 13]]
    with replaying(samples):
        assert len(loader_of(0.0)) == 4


def test_a_batch_that_no_rank_has_read_is_an_error() -> None:
    samples = Samples.together(kept_by_ranks(num_batches=1))
    with pytest.raises(OutOfSamples):
        replayed(samples)


def tokenized(*rows: list[int], length: int, pad: int = 30) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor([row + [pad] * (length - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
        "labels": torch.tensor([row + [-100] * (length - len(row)) for row in rows]),
        "score": torch.arange(len(rows)),
    }


def samples_of(batch: Any) -> Samples:
    samples = Samples()
    samples.of_loaders = {0: [[batch]]}
    return samples


def test_tokens_are_padded_to_the_longest_of_all_ranks() -> None:
    ranks = [samples_of(tokenized([5, 6, 7], [8], length=3)), samples_of(tokenized([5], [8], length=1))]
    padded = Samples.of_one_length(ranks)
    assert padded is not None
    expected = tokenized([5], [8], length=3)
    assert all(torch.equal(padded[1].of_loaders[0][0][0][name], tensor) for name, tensor in expected.items())
    assert torch.equal(ranks[1].of_loaders[0][0][0]["input_ids"], torch.tensor([[5], [8]]))


def test_tokens_of_one_length_are_left_as_they_are() -> None:
    ranks = [samples_of(tokenized([5, 6], length=2)), samples_of(tokenized([8], length=2))]
    assert Samples.of_one_length(ranks) is None


def test_batches_without_a_mask_are_not_padded() -> None:
    ranks = [samples_of({"input_ids": torch.ones(2, length)}) for length in (3, 4)]
    assert Samples.of_one_length(ranks) is None


def test_samples_are_equal_if_all_ranks_have_had_the_same() -> None:
    ranks = kept_by_ranks()
    assert not Samples.are_equal(ranks)
    assert Samples.are_equal([ranks[0], ranks[0]])
    assert Samples.are_equal([samples_of(tokenized([5], length=1)) for _ in range(2)])
    assert not Samples.are_equal([samples_of({"x": torch.ones(2)}), samples_of({"y": torch.ones(2)})])
    for sparse in (torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)):
        assert not Samples.are_equal([samples_of(sparse), samples_of(sparse)])  # torch.equal takes none of them.
