"""cross_entropy.py: cross entropy over logits of which each rank has some words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scale_core.comm.group import Group, group_of
from scale_tp import ColumnParallelLinear, vocab_parallel_cross_entropy
from scale_tp.layers import cross_entropy as module
from scale_tp.layers.cross_entropy import (
    LossTerms,
    check_not_gathered,
    check_options,
    check_weight,
    local_stats,
    reduce_stats,
    row_chunks,
    vocab_split,
)
from scale_tp.megatron import gather_from_tensor_model_parallel_region
from scale_tp.split import Split

WORDS = 11
TARGET = torch.tensor([[0, 10, -100, 3, 3], [7, 2, 10, -100, 5]])


def logits_of(dtype: torch.dtype = torch.float64, words: int = WORDS) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*TARGET.shape, words, generator=generator, dtype=torch.float64).mul(4).to(dtype)


def plain(logits: Tensor, target: Tensor, z_loss: float = 0.0, ignore_index: int = -100, **options: Any) -> Tensor:
    """torch's, in the same wide dtype, with the square of the logarithm added."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat, reduction = wide.flatten(0, -2), options.pop("reduction", "none")
    losses = F.cross_entropy(flat, target.flatten(), reduction="none", ignore_index=ignore_index, **options)
    if (weight := options.get("weight")) is not None:
        counts = weight.to(losses.dtype)[target.flatten().clamp(min=0)] * (target.flatten() != ignore_index)
        torch.testing.assert_close(
            losses.sum() / counts.sum(), F.cross_entropy(flat, target.flatten(), ignore_index=ignore_index, **options)
        )
    else:
        counts = (target.flatten() != ignore_index).to(losses.dtype)
    extra = z_loss * flat.logsumexp(-1).square()
    losses = losses + extra.masked_fill(target.flatten() == ignore_index, 0)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


CASES: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.3, "z_loss": 1e-3, "reduction": "mean"},
    {"reduction": "sum"},
    {"reduction": "mean"},
    {"ignore_index": 3, "reduction": "mean"},
    {"label_smoothing": 1.0},
    {"weight": 0.3},
    {"weight": 1.7, "reduction": "mean"},
]


@contextmanager
def chunks_of(rows: int | None, width: int) -> Iterator[None]:
    """Widens so many rows at a time."""
    before = module._CHUNK_ELEMENTS
    module._CHUNK_ELEMENTS = before if rows is None else rows * max(width, 1)
    try:
        yield
    finally:
        module._CHUNK_ELEMENTS = before


def compare(group: Group, dtype: torch.dtype, words: int, chunk_rows: int | None, case: dict[str, Any]) -> None:
    target = TARGET.clamp(max=words - 1) if case.get("ignore_index") is None else TARGET.clamp(0, words - 1)
    whole = logits_of(dtype, words).requires_grad_()
    if "weight" in case:
        weight = torch.linspace(case["weight"], 2, words)
        case = {**case, "weight": weight.to(torch.promote_types(dtype, torch.float32))}
    split = Split.even(words, group.size)
    own = split.take(whole.detach(), group.rank, -1).clone()
    if chunk_rows is not None:  # A slice, as of the positions that have a next word.
        own = torch.cat([own, own[:, -1:]], 1)[:, :-1]
    own.requires_grad_()
    before = own.detach().clone()
    expected = plain(whole, target, **case)
    given = None if "z_loss" in case else words  # Not told, the ranks ask each other.
    with chunks_of(chunk_rows, own.shape[-1]):
        found = vocab_parallel_cross_entropy(own, target, vocabulary_size=given, process_group=group, **case)
    assert found.dtype == expected.dtype
    # fp64 says that the sums are right; in fp32, a sum that went through a narrower dtype would be off by 1e-2.
    close = dict.fromkeys(("rtol", "atol"), 1e-10 if found.dtype == torch.float64 else 1e-4)
    torch.testing.assert_close(found, expected, **close)
    weight = torch.linspace(-2, 1, found.numel(), dtype=found.dtype).view(found.shape)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    grad = split.take(whole.grad, group.rank, -1)
    if dtype == torch.bfloat16:  # One rounding of fp32 numbers that differ in the last place.
        close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(own.grad, grad, **close)
    assert torch.equal(own, before), "nobody writes to the logits"


@pytest.mark.ranks(2, 3)
def test_logits_of_all_words_on_each_rank_are_refused() -> None:
    """All words on each rank would count as many times."""
    group = group_of()
    head, x = ColumnParallelLinear(3, WORDS, process_group=group), torch.randn(2, 6, 3)
    part = ColumnParallelLinear(3, WORDS, gather_output=False, process_group=group)(x[:, 1:])
    for logits in (
        head(x)[:, :-1],
        head(x[:, 1:]).float() / 2,
        torch.ones(WORDS) * head(x[:, 1:]),
        torch.zeros(WORDS) + head(x[:, 1:]),
        gather_from_tensor_model_parallel_region(part, group, dim=2),
        head(x[:, 1:]).detach(),
        torch.cat([head(x[:, 1:])[:1], head(x[:, 1:])[1:]]) @ torch.eye(WORDS),
    ):
        with pytest.raises(
            ValueError, match=r"same logits on all ranks, of 11 words, as from a layer that gathers .* gather_output=Fa"
        ):
            vocab_parallel_cross_entropy(logits, TARGET, process_group=group)


@pytest.mark.ranks(2, 3)
def test_equal_logits_that_are_parts_are_taken() -> None:
    group = group_of()
    # Zeros of each rank's words, as of a head that begins with zeros, are the same on all ranks as well.
    zeros = torch.zeros(2, 5, 4)
    found = vocab_parallel_cross_entropy(zeros, TARGET.clamp(0, 3), process_group=group)
    torch.testing.assert_close(found, torch.full((2, 5), 4.0 * group.size).log())
    # So may be parts in a vocabulary whose size is known.
    own = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    words = {"vocabulary_size": 4 * group.size, "process_group": group}
    found = vocab_parallel_cross_entropy(own, TARGET.clamp(0, 3), **words)
    torch.testing.assert_close(found, plain(torch.cat([own] * group.size, -1), TARGET.clamp(0, 3)))
    # What each rank takes of gathered logits is fine.
    head, x = ColumnParallelLinear(3, WORDS, process_group=group), torch.randn(2, 6, 3)
    own = Split.even(WORDS, group.size).take(head(x[:, 1:]), group.rank, -1)
    found = vocab_parallel_cross_entropy(own, TARGET, process_group=group)
    torch.testing.assert_close(found, plain(head(x[:, 1:]), TARGET))


@pytest.mark.ranks(2, 3)
def test_logits_that_overflow_and_impossible_words_are_torchs() -> None:
    """Logits that overflow in their own dtype, and words that can't come."""
    group = group_of()
    whole = logits_of(torch.float32).mul(1e4)
    whole[..., :6] = -torch.inf
    whole[..., 3], whole[..., 0], whole[..., 2], whole[..., 5] = 1.0, 2.0, 3.0, -4.0
    own = Split.even(WORDS, group.size).take(whole, group.rank, -1)
    found = vocab_parallel_cross_entropy(own, TARGET, vocabulary_size=WORDS, process_group=group)
    torch.testing.assert_close(found, plain(whole, TARGET))
    whole = torch.full((1, WORDS), -torch.inf)
    whole[0, 0] = 0.0
    own = Split.even(WORDS, group.size).take(whole, group.rank, -1).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, torch.tensor([0]), vocabulary_size=WORDS, process_group=group)
    loss.sum().backward()
    assert loss.item() == 0.0
    assert not own.grad.any()


@pytest.mark.ranks(2, 3)
def test_the_loss_and_its_gradient_are_torchs() -> None:
    group = group_of()
    for case in CASES:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            compare(group, dtype, WORDS, None, case)
        compare(group, torch.float64, WORDS, 3, case)
        compare(group, torch.float64, 2, 3, case | {"ignore_index": 1})  # A rank may have no words.
    for words in (5, 6, 5):  # The first rank has as many of each.
        compare(group, torch.float64, words, None, {"z_loss": 0.0})


@pytest.mark.ranks(2, 3, in_turn=True)
@pytest.mark.parametrize("target", [WORDS, -1, 1000])
def test_a_target_beyond_the_vocabulary_is_refused(target: int) -> None:
    group = group_of()
    own = Split.even(WORDS, group.size).take(logits_of(), group.rank, -1)
    with pytest.raises(IndexError, match="words from 0 to 10, or ignore_index=-100, got another one"):
        vocab_parallel_cross_entropy(own, torch.full(TARGET.shape, target), vocabulary_size=WORDS, process_group=group)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_process_needs_no_initialization(case: dict[str, Any], dtype: torch.dtype) -> None:
    compare(group_of(), dtype, WORDS, 4, case)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_targets_may_be_integers_of_any_size(dtype: torch.dtype) -> None:
    target = TARGET.clamp(min=0)
    found = vocab_parallel_cross_entropy(logits_of(), target.to(dtype), label_smoothing=0.1)
    assert torch.equal(found, vocab_parallel_cross_entropy(logits_of(), target, label_smoothing=0.1))


def test_where_nothing_counts_the_mean_is_no_number_as_in_torch() -> None:
    logits, target = torch.randn(2, 5), torch.full((2,), -100)
    assert vocab_parallel_cross_entropy(logits, target, reduction="mean").isnan()
    assert vocab_parallel_cross_entropy(logits, target, reduction="sum").item() == 0.0
    empty = vocab_parallel_cross_entropy(torch.randn(0, 5), torch.zeros(0, dtype=torch.long))
    assert empty.shape == (0,)


class Storages(TorchDispatchMode):
    """The bytes of each storage that an operation makes, in order."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.num_bytes: list[int] = []
        self._kept = [tensor.untyped_storage() for tensor in known]  # While they live, no other one has their place.
        self._places = {storage.data_ptr() for storage in self._kept}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self._places:
                self._kept.append(storage)
                self._places.add(storage.data_ptr())
                self.num_bytes.append(storage.nbytes())
        return result


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda logits: logits,
    "without the last position": lambda logits: logits[:, :-1],
    "every other word": lambda logits: logits[..., ::2],
    "sequence first": lambda logits: logits.transpose(0, 1),
    "as often as the batch": lambda logits: logits[:1].expand(4, -1, -1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_than_a_chunk_of_the_logits_is_copied(way: str, dtype: torch.dtype) -> None:
    base = torch.randn(4, 9, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits = WAYS[way](base).requires_grad_()
    before, version, words = base.clone(), base._version, logits.shape[-1]
    target = torch.randint(words, logits.shape[:-1], generator=torch.Generator().manual_seed(2))
    chunk, options = 3, {"label_smoothing": 0.1, "z_loss": 1e-3}
    with chunks_of(chunk, words), Storages(base, target) as forward:
        losses = vocab_parallel_cross_entropy(logits, target, **options)
    assert max(forward.num_bytes) == chunk * words * 4
    seed = torch.ones_like(losses)
    with Storages(base, target, losses, seed) as backward:
        (grad,) = torch.autograd.grad(losses, logits, seed)
    *rest, largest = sorted(backward.num_bytes)
    assert largest == grad.untyped_storage().nbytes() == logits.numel() * dtype.itemsize, "the gradient, and once"
    assert rest[-1] == chunk * words * 4
    # As if the same logits had memory of their own, which nobody has written to.
    own = logits.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    expected = vocab_parallel_cross_entropy(own, target, **options)
    (expected_grad,) = torch.autograd.grad(expected, own, seed)
    if way == "every other word":  # Words that stand apart are summed in another order, and what comes rounded to it.
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad, expected_grad, rtol=max(1e-4, torch.finfo(dtype).eps), atol=1e-5)
    else:
        assert torch.equal(losses, expected) and torch.equal(grad, expected_grad)
    assert torch.equal(base, before) and base._version == version


def test_a_chunk_has_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 8 * 256)
    logits, target = torch.randn(64, 256).bfloat16(), torch.arange(64)
    with Storages(logits, target) as found:
        vocab_parallel_cross_entropy(logits, target)
    assert max(found.num_bytes) == 8 * 256 * 4


@pytest.mark.parametrize(
    ("logits", "target", "options", "message"),
    [
        (torch.ones(2, 3), torch.zeros(3, dtype=torch.long), {}, r"got \[2, 3\] and \[3\]"),
        (torch.ones(2, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long), {}, "logits of floating point"),
        (
            torch.ones(2, 3).to(torch.float8_e4m3fn),
            torch.zeros(2, dtype=torch.long),
            {},
            "of 16 bits or more, got torch.float8_e4m3fn",
        ),
        (torch.ones(2, 3), torch.zeros(2), {}, "a target of integers, the words, got torch.float32"),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.long), {"label_smoothing": 1.5}, "from 0 to 1, got 1.5"),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.long), {"label_smoothing": "a"}, "to be a number, got 'a'"),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.long), {"z_loss": None}, "z_loss to be a number, got None"),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.long), {"z_loss": math.nan}, "z_loss to be finite, got nan"),
        (
            torch.ones(2, 3),
            torch.zeros(2, dtype=torch.long),
            {"ignore_index": None},
            "to be an integer, got None",
        ),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.long), {"ignore_index": 1.5}, "to be an integer, got 1.5"),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.long, device="meta"), {}, "device of the logits, cpu, got meta"),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.long), {"reduction": "avg"}, "none, mean, sum, got 'avg'"),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.long), {"vocabulary_size": 3.0}, "to be an integer, got 3.0"),
        (
            torch.ones(2, 3),
            torch.zeros(2, dtype=torch.long),
            {"weight": torch.ones(2)},
            r"weight to be \[3\] .*got \[2\]",
        ),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.long), {"weight": [1.0]}, "weight to be a tensor, got list"),
        (
            torch.ones(2, 3),
            torch.zeros(2, dtype=torch.long),
            {"weight": torch.ones(3), "z_loss": 0.1},
            "weight without label_smoothing and z_loss, got 0.0 and 0.1",
        ),
        (torch.ones(2, 3), [0, 1], {}, "expected a target to be a tensor, got list"),
        (
            torch.ones(2, 3),
            torch.zeros(2, dtype=torch.long),
            {"vocabulary_size": 9, "process_group": Group(1, 2, ranks=(0, 1))},
            "logits of 4 words on rank 1, of the 9 that 2 ranks have, got 3: divide",
        ),
    ],
)
def test_what_does_not_fit_is_refused(logits: Tensor, target: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        vocab_parallel_cross_entropy(logits, target, **options)


def test_terms_of_a_rank_are_those_of_its_words() -> None:
    logits, target = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([5, 7, 0, -100])
    terms = LossTerms(Group(), 5, 9, -100, 0.1, 0.0, 3)  # It has the words 5 to 7 of 9.
    largest, total, chosen, summed = local_stats(logits, target, target != -100, terms)
    assert torch.equal(largest, logits.amax(1))
    torch.testing.assert_close(total, (logits - largest[:, None]).exp().sum(1))
    torch.testing.assert_close(summed, logits.sum(1))
    assert chosen.tolist() == [logits[0, 0].item(), logits[1, 2].item(), 0.0, 0.0]
    own = torch.stack([largest, total, chosen, summed])
    assert all(torch.equal(one, other) for one, other in zip(reduce_stats(own, Group(), 3), own, strict=True))


def test_chunks_are_all_rows_in_order_in_any_memory() -> None:
    whole = torch.arange(60.0).view(4, 5, 3)
    for logits in (whole, whole[:, :-1], whole.transpose(0, 1), whole[0, 0]):
        found = list(row_chunks(logits, 3))
        rows = logits.reshape(-1, 3)
        assert [number for place, _ in found for number in range(place.start, place.stop)] == [*range(len(rows))]
        assert torch.equal(torch.cat([chunk for _, chunk in found]), rows)
        assert max(len(chunk) for _, chunk in found) <= 3


TWO = Group(1, 2, ranks=(0, 1))


def test_words_are_divided_evenly_where_their_number_is_given() -> None:
    assert vocab_split(4, 9, TWO).sizes == (5, 4) and vocab_split(7, None, Group()).sizes == (7,)
    with pytest.raises(ValueError, match="expected logits of 4 words on rank 1, of the 9 that 2 ranks have, got 9"):
        vocab_split(9, 9, TWO)


def test_options_of_a_loss_are_accepted_as_any_kind_of_number() -> None:
    check_options(0, 1, -100, "mean")
    with pytest.raises(TypeError, match="label_smoothing to be a number, got True"):
        check_options(True, 0.0, -100, "mean")


@pytest.mark.parametrize("weight", [torch.ones(5), torch.ones(1, 9), torch.ones(9, dtype=torch.int64)])
def test_a_weight_is_one_number_for_each_word_of_all_ranks(weight: torch.Tensor) -> None:
    terms = LossTerms(TWO, 5, 9, -100, 0.0, 0.0, 16)
    check_weight(torch.ones(9), terms)
    with pytest.raises(ValueError, match=r"expected weight to be \[9\] of floating point, one number for each word"):
        check_weight(weight, terms)


def test_ranks_that_have_the_same_logits_have_all_of_them() -> None:
    stats = torch.rand(2, 4, 3)
    check_not_gathered(stats, 5, TWO)
    stats[1] = stats[0]
    with pytest.raises(
        ValueError, match=r"of the words that rank 1 of 2 has, got the same logits on all ranks, of 5 wo"
    ):
        check_not_gathered(stats, 5, TWO)
    stats[:, 1] = 5.0  # All logits are equal, as of a head of zeros: that tells nothing.
    check_not_gathered(stats, 5, TWO)
    check_not_gathered(stats[..., :0], 5, TWO)
