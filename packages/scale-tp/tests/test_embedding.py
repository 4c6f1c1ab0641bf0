"""embedding.py: tables that are divided by words or by features."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_core.comm.group import Group, group_of
from scale_core.shard import Placement, shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp import ParallelEmbedding, VocabParallelEmbedding, parallelize
from scale_tp.conversion.modules import is_embedding
from scale_tp.layers.embedding import local_ids, local_padding_idx
from scale_tp.megatron import gather_from_sequence_parallel_region
from scale_tp.split import Split

KINDS = [VocabParallelEmbedding, ParallelEmbedding]
TWO = Group(0, 2, ranks=(0, 1))
IDS = torch.tensor([[0, 6, 2, 2, 5], [6, 3, 6, 1, 0]])


def pair(kind: Any, num_words: int, features: int, group: Group, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """torch's embedding and ours, with the same values."""
    torch.manual_seed(2)
    plain = nn.Embedding(num_words, features, dtype=dtype, **options)
    nn.init.xavier_normal_(plain.weight)
    torch.manual_seed(2)
    torch.empty(num_words, features, dtype=dtype).normal_()  # What the plain layer drew first.
    ours = kind(num_words, features, process_group=group, dtype=dtype, **options)
    return plain, ours


def weights(output: Tensor) -> Tensor:
    return torch.linspace(-2, 1, output.numel()).view(output.shape).to(output.dtype)


def compare(kind: Any, num_words: int, features: int, dtype: torch.dtype, ids: Tensor, **options: Any) -> None:
    plain, ours = pair(kind, num_words, features, group_of(), dtype, **options)
    case, rank = (kind, num_words, features, dtype, options), ours.group.rank
    take = ours.shardings["weight"].local_part
    if "max_norm" not in options:
        assert torch.equal(ours.get_master_weight(), plain.weight), case
    for _ in range(2):
        expected, found = plain(ids), ours(ids)
        assert torch.equal(found, expected), case
        (expected * weights(expected)).sum().backward()
        (found * weights(found)).sum().backward()
    assert torch.equal(local_tensor(ours.weight), take(plain.weight, rank)), case
    grad, mine = plain.weight.grad, local_tensor(ours.weight.grad)
    assert mine.is_sparse == grad.is_sparse
    if mine.is_sparse:
        grad, mine = grad.to_dense(), mine.to_dense()
    assert torch.equal(mine, take(grad, rank)), case


@pytest.mark.ranks(2, 3)
def test_divided_tables_are_torchs_to_the_bit() -> None:
    group = group_of()
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            for num_words, features in ((7, 5), (8, 4), (7, 1)):
                compare(kind, num_words, features, dtype, IDS)
        for options in (
            {"padding_idx": 2},
            {"padding_idx": -1},
            {"padding_idx": 0},
            {"scale_grad_by_freq": True, "padding_idx": 3},
            {"sparse": True},
        ):
            compare(kind, 7, 5, torch.float32, IDS, **options)
        compare(kind, 2, 3, torch.float32, IDS % 2, padding_idx=1)
        compare(kind, 7, 5, torch.float32, torch.tensor(4))
    compare(VocabParallelEmbedding, 7, 5, torch.float32, IDS, max_norm=0.5)
    compare(VocabParallelEmbedding, 7, 5, torch.float32, IDS[:1], max_norm=0.4, norm_type=1.0, padding_idx=6)
    for ids in ([7], [-1], [0, 100]):
        for num_words, layers in ((7, KINDS), (2, (VocabParallelEmbedding,))):
            message = rf"words from 0 to {num_words - 1}, got some from {min(ids)} to {max(ids)}: .* out of range"
            for each in layers:
                with pytest.raises(IndexError, match=message):
                    each(num_words, 5, process_group=group)(torch.tensor(ids))
    # On a part of the sequence.
    plain, ours = pair(VocabParallelEmbedding, 7, 5, group, torch.float32)
    ours.sequence_parallel = True
    found = gather_from_sequence_parallel_region(ours(IDS), group, to_model_parallel=False)
    expected = plain(IDS)
    assert torch.equal(found, expected)
    (expected * weights(expected)).sum().backward()
    (found * weights(found)).sum().backward()
    assert torch.equal(ours.weight.grad.to_local(), ours.split.take(plain.weight.grad, group.rank))
    assert [axis.placement for axis in shard_of(ours.weight).axes] == [Placement.SHARD]
    # A rank without words has a gradient, too.
    few = VocabParallelEmbedding(1, 5, process_group=group)
    few(torch.tensor([0, 0])).sum().backward()
    assert few.weight.grad.to_local().shape == few.weight.to_local().shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"padding_idx": -2}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}])
def test_one_process_has_torchs_embedding_without_initialization(kind: Any, options: dict[str, Any]) -> None:
    compare(kind, 7, 5, torch.float32, IDS, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_fairscales_arguments_are_accepted(kind: Any) -> None:
    assert list(inspect.signature(kind).parameters)[:9] == [
        "num_embeddings",
        "embedding_dim",
        "padding_idx",
        "max_norm",
        "norm_type",
        "scale_grad_by_freq",
        "sparse",
        "init_method",
        "keep_master_weight_for_test",
    ]
    layer = kind(5, 4, None, None, 2.0, False, False, nn.init.ones_, True)
    assert torch.equal(layer.master_weight, torch.ones(5, 4))
    assert kind(5, 4, init_method=lambda x: x).weight.shape == (5, 4)
    assert repr(kind(5, 4, padding_idx=-1)) == f"{kind.__name__}(5, 4, padding_idx=4)"


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_on_meta_gets_the_values_of_the_plain_one_later(kind: Any) -> None:
    torch.manual_seed(3)
    whole = nn.init.xavier_normal_(torch.empty(7, 5))
    parts = []
    for rank in range(3):
        layer = kind(7, 5, device="meta", process_group=Group(rank, 3, ranks=(0, 1, 2))).to_empty(device="cpu")
        torch.manual_seed(3)
        layer.reset_parameters()
        parts.append(layer.weight.to_local().detach())
    assert torch.equal(layer.split.join(parts, layer.shardings["weight"].dim), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((-1, 3), {}, ValueError, "num_embeddings to be at least 0"),
        ((3, "4"), {}, TypeError, "embedding_dim to be an integer, got '4'"),
        ((7, 3), {"padding_idx": 7}, ValueError, "padding_idx to be one of 7 words, got 7"),
        ((7, 3), {"padding_idx": -8}, ValueError, "padding_idx to be one of 7 words, got -8"),
        ((7, 3), {"padding_idx": 1.0}, TypeError, "padding_idx to be an integer or None, got 1.0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    kind: Any, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(*arguments, process_group=TWO, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_what_are_no_words_is_refused(kind: Any) -> None:
    for group in (None, TWO):
        layer = kind(7, 3, process_group=group)
        with pytest.raises(TypeError, match=rf"{kind.__name__}: expected a tensor of words, got list: write torch"):
            layer([1])
        with pytest.raises(ValueError, match=r"expected words of .*, got torch.float32: call .long"):
            layer(torch.tensor([1.0]))
    with pytest.raises(IndexError, match="words from 0 to 6, got some from -1 to 3"):
        kind(7, 3)(torch.tensor([3, -1]))


def test_a_rank_has_words_and_features_by_fairscales_names() -> None:
    group = Group(1, 2, None, "fake", (0, 1))
    words = VocabParallelEmbedding(7, 5, process_group=group)
    assert (words.vocab_start_index, words.vocab_end_index, words.num_embeddings_per_partition) == (4, 7, 3)
    assert ParallelEmbedding(7, 5, process_group=group).embedding_dim_per_partition == 2


def test_a_norm_that_no_rank_can_measure_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_norm=1.0 needs whole rows.*use VocabParallelEmbedding"):
        ParallelEmbedding(7, 4, max_norm=1.0, process_group=TWO)


class Scaled(nn.Embedding):
    """An embedding with a forward of its own, as some models have."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


@pytest.mark.ranks(2)
@pytest.mark.fault(90)
def test_words_of_a_divided_embedding_are_the_plain_ones() -> None:
    group = group_of()
    ids = torch.tensor([[0, 6, 2, 2, 5], [6, 3, 6, 1, 0]])
    for kind in (nn.Embedding, Scaled):
        for num_words, padding in ((7, None), (7, 0), (7, 2), (7, 6), (1, 0)):
            torch.manual_seed(0)
            plain = nn.Sequential(kind(num_words, 5, padding_idx=padding))
            ours = parallelize(copy.deepcopy(plain), {"0": "embedding_rowwise"}, group)
            given = ids % num_words
            expected, found = plain(given), ours(given)
            assert torch.equal(found, expected)
            expected.sin().sum().backward()
            found.sin().sum().backward()
            grad = plain[0].weight.grad
            own_grad = ours[0].weight.grad.to_local()
            assert torch.equal(own_grad, ours[0].split.take(grad, group.rank)), (kind, num_words, padding)
            assert ours[0].padding_idx == padding
            for unknown in (num_words, -1):
                with pytest.raises(
                    IndexError, match=rf"'0': expected words from 0 to {num_words - 1}, .* out of range"
                ):
                    ours(torch.tensor([unknown]))
    by_width = parallelize(nn.Sequential(nn.Embedding(7, 5)), {"0": "embedding_colwise"}, group)
    with pytest.raises(IndexError, match="'0': expected words from 0 to 6, got some from 7 to 7"):
        by_width(torch.tensor([7]))
    for divided in (ours, by_width):
        with pytest.raises(TypeError, match="'0': expected a tensor of words, got list"):
            divided([1])
    counting = nn.Sequential(nn.Embedding(7, 5, scale_grad_by_freq=True))
    with pytest.raises(ValueError, match="'0': scale_grad_by_freq counts words"):
        parallelize(counting, {"0": "embedding_rowwise"}, group)


def test_what_is_an_embedding() -> None:
    assert is_embedding(Scaled(2, 3)) and not is_embedding(nn.Linear(2, 3))


def test_each_word_is_a_row_of_one_rank() -> None:
    ids = torch.arange(-1, 9).view(2, 5)
    for num_words, num_ranks in ((7, 2), (7, 3), (2, 3), (1, 1)):
        table, found = torch.arange(100, 100 + num_words), torch.zeros(ids.shape, dtype=torch.long)
        for (own,) in Split.even(num_words, num_ranks).ranges:
            part = table[own[0] : own[1]]
            rows, others, unknown = local_ids(ids, own, num_words)
            assert torch.equal(unknown, (ids < 0) | (ids >= num_words))
            assert (rows[unknown] == max(len(part), 1)).all()
            assert not rows[others & ~unknown].any()
            found[~others] += part[rows[~others]]
        known = (ids >= 0) & (ids < num_words)
        assert torch.equal(found, torch.where(known, ids + 100, 0))


def test_the_padding_word_is_one_ranks_alone() -> None:
    ranges = [own for (own,) in Split.even(7, 3).ranges]
    assert [local_padding_idx(3, own) for own in ranges] == [None, 0, None]
    assert [local_padding_idx(None, own) for own in ranges] == [None] * 3
