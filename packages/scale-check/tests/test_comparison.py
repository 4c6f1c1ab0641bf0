"""What a comparison says of tensors that are missing, not finite, complex or single."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scale_check import ParityVerdict, Report
from scale_check.comparison import compare, with_samples_compared
from scale_check.recording import Key, Phase, Recording
from scale_check.summary import kept

WEIGHT = Key(1, Phase.WEIGHT, "weight")


def of(tensor: Tensor, key: Key = WEIGHT) -> Recording:
    return Recording({key: tensor})


def beside(plain: Tensor, *ranks: Tensor, key: Key = WEIGHT, noise: float = 1e-15) -> Report:
    return compare(of(plain, key), [of(tensor, key) for tensor in ranks], {key: noise})


def test_a_tensor_that_one_process_lacks_is_a_difference() -> None:
    report = compare(Recording(), [of(torch.ones(2)), Recording()], {})
    assert report.verdict is ParityVerdict.BUG
    assert str(report).startswith("step 1: weight after the step: weight differs on rank 0: one process has none")


def test_infinities_are_equal_and_their_neighbors_are_compared() -> None:
    plain = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    assert beside(plain, plain + 1e-16).verdict is not ParityVerdict.BUG
    assert beside(plain, plain.clone().fill_(2.0)).verdict is ParityVerdict.BUG


def test_a_nan_of_both_is_reported_and_of_one_is_a_difference() -> None:
    plain = torch.tensor([1.0, math.nan])
    report = beside(plain, plain.clone())
    assert report.verdict is ParityVerdict.EQUAL and str(report).endswith("1 of them have a NaN, at the same places")
    assert beside(torch.ones(2), plain).verdict is ParityVerdict.BUG


def test_imaginary_parts_count() -> None:
    plain = torch.ones(2, dtype=torch.complex64)
    assert beside(plain, plain + 5j).verdict is ParityVerdict.BUG


def test_of_one_number_the_ranks_have_a_mean_or_a_sum() -> None:
    key = Key(1, Phase.OUTPUT, "")
    for shape in ((), (1,)):
        plain = torch.full(shape, 2.0)
        assert beside(plain, torch.full(shape, 1.0), torch.full(shape, 3.0), key=key).first is None
        assert beside(plain, torch.full(shape, 0.5), torch.full(shape, 1.5), key=key).first is None
        assert beside(plain, torch.full(shape, 0.5), torch.full(shape, 9.5), key=key).first is not None


def test_of_the_gradients_of_a_step_the_most_wrong_is_named() -> None:
    keys = [Key(1, Phase.GRADIENT, name) for name in ("first", "right", "second", "third")]
    after = Key(1, Phase.WEIGHT, "first")
    plain = Recording(dict.fromkeys([*keys, after], torch.ones(2, dtype=torch.float64)))
    errors = dict(zip([*keys, after], (1e-6, 0.0, 1e-3, 1e-4, 1.0), strict=True))
    ranks = Recording({key: plain.tensors[key] + errors[key] for key in plain.tensors})
    report = compare(plain, [ranks], dict.fromkeys(plain.tensors, 1e-12))
    assert report.first is not None and (report.first.phase, report.first.name) == ("gradient of", "second")
    assert report.equal_before == "step 1: gradient of right" and report.also == 3
    assert [difference.name for difference in report.differences] == ["first", "second", "third", "first"]


def test_local_norms_before_an_average_are_no_difference() -> None:
    names = ("first", "second")
    before, after = ([Key(1, phase, name) for name in names] for phase in (Phase.UNCLIPPED, Phase.GRADIENT))
    plain = Recording(dict.fromkeys([*before, *after], torch.ones(2, dtype=torch.float64)))
    noise = dict.fromkeys(plain.tensors, 1e-12)
    locals_ = dict.fromkeys(before, torch.full((2,), 3.0, dtype=torch.float64))
    right = Recording({**plain.tensors, **locals_})
    report = compare(plain, [right], noise)
    assert report.verdict is ParityVerdict.EQUAL and report.num_compared == 2
    report = compare(plain, [Recording({**right.tensors, after[1]: plain.tensors[after[1]] + 1})], noise)
    assert report.first is not None and (report.first.phase, report.first.name) == ("gradient of", "second")
    of_all = Recording({**right.tensors, **dict.fromkeys(after, plain.tensors[after[0]] + 1)})
    report = compare(plain, [of_all], noise)
    assert report.first is not None and report.first.phase == "gradient before clipping of"


def test_a_multiple_that_clipping_hides_is_a_difference() -> None:
    before, after = Key(1, Phase.UNCLIPPED, "weight"), Key(1, Phase.GRADIENT, "weight")
    grad = torch.tensor([3.0, 4.0], dtype=torch.float64)

    def report(clipped: Tensor, *grads: Tensor) -> Report:
        plain = Recording({before: grad, after: clipped})
        ranks = [Recording({before: of_rank, after: clipped}) for of_rank in grads]
        return compare(plain, ranks, dict.fromkeys(plain.tensors, 1e-12))

    summed = report(grad / 5, grad * 2, grad * 2)
    assert summed.first is not None and summed.first.phase == "gradient before clipping of"
    # Each rank's own gradients; and norms that are only looked at.
    assert report(grad / 5, grad * 2, grad * 3).first is None
    assert report(grad, grad * 2, grad * 2).first is None


def test_gradients_that_are_all_multiplied_are_said_to_be() -> None:
    keys = [Key(1, Phase.GRADIENT, name) for name in ("first", "unused", "second")]
    grads = [torch.tensor(values, dtype=torch.float64) for values in ([3.0, -4.0], [0.0], [[5.0]])]
    plain = Recording(dict(zip(keys, grads, strict=True)))

    def report(*factors: float) -> Report:
        multiplied = [grad * factor for grad, factor in zip(grads, factors, strict=True)]
        return compare(plain, [Recording(dict(zip(keys, multiplied, strict=True)))] * 2, dict.fromkeys(keys, 1e-15))

    assert "All gradients of this step are 2 times those of one process." in str(report(2, 1, 2))
    assert report(2, 1, 2).to_json()["gradient_factor"] == 2
    assert report(2, 1, 1).gradient_factor is None and report(2, 1, 3).gradient_factor is None
    assert report(1 + 1e-6, 1, 1 + 1e-6).first is not None and report(1 + 1e-6, 1, 1 + 1e-6).gradient_factor is None
    assert "are 1.002 times" in str(report(1.002, 1, 1.002)) and report(1.002, 1, 1.0021).gradient_factor is None


def test_the_rank_whose_part_is_wrong_is_named() -> None:
    key = Key(1, Phase.OUTPUT, "layer")
    for num_columns in (3, 2**14):  # The larger one is kept as sums.
        plain = torch.zeros(4, num_columns, dtype=torch.float64)
        parts = [plain[:2].clone(), plain[2:].clone()]
        parts[1][0, 1] = 1.0
        recordings = [Recording({key: kept(part)}) for part in (plain, *parts)]
        report = compare(recordings[0], recordings[1:], {key: 1e-15})
        assert report.first is not None and report.first.ranks == (1,)


def test_one_other_difference_is_in_the_singular() -> None:
    plain = Recording({Key(1, Phase.WEIGHT, name): torch.zeros(1) for name in "abc"})
    for num_wrong, words in ((2, " 1 other differs, too."), (3, " 2 others differ, too.")):
        ranks = Recording({key: tensor + (key.name < "abcd"[num_wrong]) for key, tensor in plain.tensors.items()})
        assert str(compare(plain, [ranks], {})).endswith(words)


def test_ranks_with_the_same_samples_are_named_unless_the_model_is_divided() -> None:
    inner, outer = Key(1, Phase.OUTPUT, "0"), Key(1, Phase.OUTPUT, "")
    rows = torch.arange(4.0).view(2, 2)

    def verdict(*ranks: Recording) -> ParityVerdict:
        return with_samples_compared(Report(ParityVerdict.EQUAL, None, 2, 0.0), ranks).verdict

    def outputs(first: Tensor, last: Tensor, **kwargs: bool) -> Recording:
        return Recording({inner: first, outer: last}, **kwargs)

    assert verdict(outputs(rows, rows), outputs(rows, rows)) is ParityVerdict.BUG
    assert verdict(outputs(rows, torch.ones(())), outputs(rows, torch.ones(()))) is ParityVerdict.BUG
    assert verdict(outputs(rows, rows), outputs(rows * (1 + 1e-7), rows)) is not ParityVerdict.BUG
    equal_rows = torch.ones(2, 2)  # Of constant samples.
    assert verdict(outputs(rows, equal_rows), outputs(rows, equal_rows)) is not ParityVerdict.BUG
    sharded = outputs(rows, rows, has_sharded_outputs=True)
    assert verdict(sharded, sharded) is not ParityVerdict.BUG
    assert verdict(outputs(rows, rows)) is not ParityVerdict.BUG  # One rank.
    # Each rank has a part of a weight, and the module adds up what they compute.
    divided = [outputs(rows, rows) for _ in range(2)]
    for number, recording in enumerate(divided):
        recording.tensors[Key(1, Phase.WEIGHT, "weight")] = rows[number : number + 1]
    assert verdict(*divided) is not ParityVerdict.BUG
