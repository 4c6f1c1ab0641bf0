"""Finds the first tensor in which a training on several ranks differs from the same one in one process.

Each tensor of the one process is set beside what the ranks have of it: the same, or parts that together have its shape.
How large a difference may be is not typed in: it is measured beside the program's own rounding (see `noise`).
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from scale_check.recording import Key, Phase, Recording
from scale_check.summary import Recorded, Summary, cat, float_values, in_one_form, scaled, total
from scale_core.consistency.flight_recorder import title_of_ranks

# A difference above this multiple of the program's rounding is a bug. In right programs the largest one is below 10,
# and in wrong ones in float64 above a million: see `benchmarks/parity.py`.
BUG_RATIO = 100.0


_EQUAL_FACTORS = 1e-3  # How much factors of gradients that are one number may differ, and their residuals.

# What has to be there in one process where a rank has it; states may have other names on ranks.
_ON_BOTH_SIDES = (Phase.START, Phase.OUTPUT, Phase.LOSS, Phase.GRADIENT, Phase.WEIGHT)


class ParityVerdict(enum.Enum):
    """The verdict of a comparison.

        >>> from scale_check import ParityVerdict
        >>> [verdict.name for verdict in ParityVerdict]
        ['EQUAL', 'ROUNDING', 'BUG']

    See also: [the guide to comparing with one process](../guides/check.md).
    """

    EQUAL = "equal to the bit"
    ROUNDING = "equal but for rounding"
    BUG = "different"


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor that differs; of the gradients that an optimizer steps on, the one that differs most.

        >>> from scale_check import FirstDifference
        >>> difference = FirstDifference(1, "gradient of", "head.weight", (1,), (0, 3), 0.5, 0.25, ratio=4e6)
        >>> difference.name, difference.ranks  # rank 1 has 0.25 where one process has 0.5
        ('head.weight', (1,))

    Attributes:
        step: The optimizer's step, from 1.
        phase: The kind of the tensor, for example "gradient of".
        name: The module or the parameter, by its name in the plain model.
        ranks: The ranks that differ.
        index: Where it differs most, in the full tensor. None stands for all indices of a dimension: then `expected`
            and `actual` are sums of these elements.
        expected: The value of one process there.
        actual: The value of the ranks there.
        ratio: How many times the rounding of the program the difference is; infinite where a rank has no such tensor.
        why: The difference, if it is not a number, for example a shape or a missing tensor.

    See also: [the guide to comparing with one process](../guides/check.md).
    """

    step: int
    phase: str
    name: str
    ranks: tuple[int, ...]
    index: tuple[int | None, ...]
    expected: float
    actual: float
    ratio: float
    why: str = ""

    def __str__(self) -> str:
        ranks = title_of_ranks(self.ranks)
        name = "" if self.phase == Phase.RANDOM.value else f" {self.name or 'the model'}"
        verb = "are the same on" if self.phase == Phase.SAMPLES.value else "differs on"
        subject = f"step {self.step}: {self.phase}{name} {verb} {ranks}: "
        if self.why:
            return subject + self.why
        times = f"{self.ratio:,.0f}" if self.ratio < 1e6 else f"{self.ratio:.1e}"
        index = ", ".join(":" if part is None else str(part) for part in self.index)
        where = f"at [{index}] " if self.index else ""
        a_sum = "a sum of " if None in self.index else ""
        return (
            f"{subject}{where}one process has {a_sum}{self.expected:.9g}, the ranks have {self.actual:.9g}, which "
            f"is {times} times the rounding of this program"
        )


@dataclass(frozen=True)
class Report:
    """The result of a comparison.

        >>> import torch
        >>> from scale_check import parity
        >>> report = parity(lambda: torch.nn.Linear(4, 2), ranks=1, batches=[torch.ones(2, 4)])
        >>> report.first is None, report.num_compared > 0
        (True, True)

    Attributes:
        verdict: Equal to the bit, but for rounding, or different.
        first: The first difference that is not rounding; None where there is none.
        num_compared: How many tensors were compared.
        largest_ratio: The largest difference of all tensors, as a multiple of the program's rounding.
        equal_before: The last tensor before the first difference, in words; "" where there is none.
        also: How many more tensors differ.
        num_nan: How many tensors have a NaN, at the same places.
        differences: The difference of each tensor that differs, in the order of time.
        gradient_factor: How many times as large as in one process all gradients of the first difference's step are;
            None if it is not one number for all of them, or if the first difference is not a gradient.

    See also: [the guide to comparing with one process](../guides/check.md).
    """

    verdict: ParityVerdict
    first: FirstDifference | None
    num_compared: int
    largest_ratio: float
    equal_before: str = ""
    also: int = 0
    num_nan: int = 0
    differences: tuple[FirstDifference, ...] = ()
    gradient_factor: float | None = None

    def __str__(self) -> str:
        if self.first is None:
            how = "" if self.verdict is ParityVerdict.EQUAL else f" (at most {self.largest_ratio:.1f} times it)"
            nan = f"; {self.num_nan} of them have a NaN, at the same places" if self.num_nan else ""
            return f"{self.num_compared} tensors are {self.verdict.value}{how}{nan}"
        before = f" The last tensor before it that is right: {self.equal_before}." if self.equal_before else ""
        also = f" {self.also} {'other differs' if self.also == 1 else 'others differ'}, too." if self.also else ""
        factor = self.gradient_factor
        all_gradients = f" All gradients of this step are {factor:.4g} times those of one process." if factor else ""
        return f"{self.first}.{all_gradients}{before}{also}"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON knows it."""
        first = None if self.first is None else {**asdict(self.first), "text": str(self.first)}
        for number in ("expected", "actual", "ratio"):
            if first is not None and not math.isfinite(first[number]):
                first[number] = str(first[number])
        return {
            "verdict": self.verdict.value,
            "num_compared": self.num_compared,
            "largest_ratio": self.largest_ratio if math.isfinite(self.largest_ratio) else str(self.largest_ratio),
            "first": first,
            "also": self.also,
            "gradient_factor": self.gradient_factor,
            "num_nan": self.num_nan,
        }


@dataclass(frozen=True)
class _Compared:
    """A tensor of the one process, compared with the tensor of the ranks."""

    key: Key
    ratio: float
    is_equal: bool
    difference: FirstDifference | None
    has_nan: bool = False


def compare(plain: Recording, ranks: Sequence[Recording], noise: Mapping[Key, float]) -> Report:
    """Compares what one process has recorded with what each rank has.

    Args:
        plain: Of one process.
        ranks: Of each rank.
        noise: Of each tensor of the one process, by how much rounding changes it; see `noise.measure`.
    """
    plain, *ranks = _without_models_of_some_ranks(plain, *ranks)
    comparisons: list[_Compared] = []
    of_one_rank = _calls_of_one_rank(plain, ranks)
    scale = _gradient_scale(plain, ranks, of_one_rank)
    for key, expected in plain.tensors.items():
        if key in of_one_rank:
            rank, actual = of_one_rank[key]
            actual = scaled(actual, scale) if key.phase is Phase.OUTPUT_GRADIENT else actual
            comparisons.append(_difference(key, expected, actual, (rank,), noise.get(key, 0.0)))
        elif (comparison := _compare_one(key, expected, ranks, noise.get(key, 0.0), scale)) is not None:
            comparisons.append(comparison)
    for key in dict.fromkeys(key for recording in ranks for key in recording.keys_of(*_ON_BOTH_SIDES)):
        if key not in plain.tensors:
            holders = tuple(rank for rank, recording in enumerate(ranks) if key in recording.tensors)
            comparisons.append(_incomparable(key, holders, "one process has none"))
    comparisons = _without_local_norms(comparisons, plain, ranks)
    differing = [number for number, comparison in enumerate(comparisons) if comparison.ratio > BUG_RATIO]
    largest = max((comparison.ratio for comparison in comparisons), default=0.0)
    if not differing:
        are_equal = all(comparison.is_equal for comparison in comparisons)
        verdict = ParityVerdict.EQUAL if are_equal else ParityVerdict.ROUNDING
        num_nan = sum(comparison.has_nan for comparison in comparisons)
        return Report(verdict, None, len(comparisons), largest, num_nan=num_nan)
    first = _most_wrong(comparisons, differing)
    is_right = set(range(first)).difference(differing)
    differences = tuple(comparisons[number].difference for number in differing)
    key = comparisons[first].key
    factor = _gradient_factor(plain, ranks, key) if key.phase in (Phase.UNCLIPPED, Phase.GRADIENT) else None
    return Report(
        ParityVerdict.BUG,
        comparisons[first].difference,
        len(comparisons),
        largest,
        str(comparisons[max(is_right)].key) if is_right else "",
        len(differing) - 1,
        differences=tuple(difference for difference in differences if difference is not None),
        gradient_factor=factor,
    )


def _without_models_of_some_ranks(plain: Recording, *ranks: Recording) -> list[Recording]:
    """The recordings without weights of models that only some ranks evaluate, for example rank 0 an average."""
    evaluated = set[str]().union(*(recording.evaluated for recording in ranks))
    names = {name for name in evaluated if any(name not in recording.evaluated for recording in ranks)}
    if not names:
        return [plain, *ranks]

    def is_compared(key: Key) -> bool:
        of_model = any(key.name.startswith(f"{name}.") for name in names)
        return not of_model or key.phase not in (Phase.START, Phase.WEIGHT, Phase.BUFFER)

    return [
        replace(recording, tensors={key: value for key, value in recording.tensors.items() if is_compared(key)})
        for recording in (plain, *ranks)
    ]


def _calls_of_one_rank(plain: Recording, ranks: Sequence[Recording]) -> dict[Key, tuple[int, Recorded]]:
    """The rank and its output, or gradient of it, for each call of a module that a program calls once for each sample.

    If it loops over its samples, the one process calls the module for the samples of rank 0, then of rank 1.
    """
    # Not each output has a gradient, so only outputs are counted.
    num_plain, *num_ranks = (
        Counter(key.of_all_calls() for key in recording.keys_of(Phase.OUTPUT)) for recording in (plain, *ranks)
    )
    calls: dict[Key, tuple[int, Recorded]] = {}
    for key, count in num_plain.items():
        num_calls_by_rank = {num[key] for num in num_ranks}
        per_forward, is_uneven = divmod(count, len(ranks) * plain.num_forwards.get(key.step, 1))  # of a rank
        if len(ranks) == 1 or is_uneven or num_calls_by_rank != {count // len(ranks)}:
            continue
        for number in range(count):
            part, call = divmod(number, per_forward)
            forward, rank = divmod(part, len(ranks))
            for phase in (Phase.OUTPUT, Phase.OUTPUT_GRADIENT):
                key_of_plain = key._replace(phase=phase, number=number)
                actual = ranks[rank].tensors.get(key_of_plain._replace(number=forward * per_forward + call))
                expected = plain.tensors.get(key_of_plain)
                if actual is not None and expected is not None and tuple(actual.shape) == tuple(expected.shape):
                    calls[key_of_plain] = rank, actual
    return calls


def _gradient_factor(plain: Recording, ranks: Sequence[Recording], key: Key) -> float | None:
    """How many times too large all gradients of a step are on all ranks: the reduction sums, or divides twice.

    None for a factor of about 1: then something else is wrong.
    """
    factors = []
    for other in plain.keys_of(key.phase):
        if other.step != key.step:
            continue
        for recording in ranks:
            if (grad := recording.tensors.get(other)) is None or grad.shape != plain.tensors[other].shape:
                return None
            expected, actual = (float_values(value) for value in in_one_form([plain.tensors[other], grad]))
            if not expected.any() and not actual.any():
                continue
            factor = float(expected @ actual / (expected @ expected))
            error = (actual - factor * expected).abs().max() / expected.abs().max()
            if abs(factor - 1) <= _EQUAL_FACTORS or not bool(error <= _EQUAL_FACTORS * min(1.0, abs(factor - 1))):
                return None
            factors.append(factor)
    if not factors or max(factors) - min(factors) > _EQUAL_FACTORS * min(abs(factors[0]), abs(factors[0] - 1)):
        return None
    return factors[0]


def with_samples_compared(report: Report, ranks: Sequence[Recording]) -> Report:
    """The report of a right program, or that all its ranks train on the same samples.

    Then each rank computes what one process does with these samples, so no tensor differs. If the ranks divide the
    model, a weight or an output depends on the rank, or is sharded.
    """
    outputs, weights = (
        [{key: recording.tensors[key] for key in recording.keys_of(phase)} for recording in ranks]
        for phase in (Phase.OUTPUT, Phase.WEIGHT)
    )
    if len(ranks) == 1 or any(recording.has_sharded_outputs for recording in ranks):
        return report
    if not _has_different_rows(outputs[0]):
        return report
    if any(not _are_identical(of_ranks[0], other) for of_ranks in (outputs, weights) for other in of_ranks[1:]):
        return report
    why = (
        "each computes what all others do. If the model is the same on all ranks, give each rank samples of its own: "
        "by a DistributedSampler, or by a seed that depends on the rank"
    )
    first = FirstDifference(1, Phase.SAMPLES.value, "", tuple(range(len(ranks))), (), math.nan, math.nan, math.inf, why)
    return replace(report, verdict=ParityVerdict.BUG, first=first, largest_ratio=math.inf, differences=(first,))


def _has_different_rows(outputs: Mapping[Key, Recorded]) -> bool:
    """Whether outputs of the model depend on the sample; of all its modules, if the model itself returns its loss."""
    with_rows = {key: value for key, value in outputs.items() if value.ndim and value.shape[0] > 1}
    of_model = [value for key, value in with_rows.items() if not key.name] or list(with_rows.values())
    rows = [value.sums[0] if isinstance(value, Summary) else value for value in of_model]
    return any(bool((row != row[0]).any()) for row in rows)


def _are_identical(outputs: Mapping[Key, Recorded], others: Mapping[Key, Recorded]) -> bool:
    if outputs.keys() != others.keys():
        return False
    pairs = [(float_values(value), float_values(others[key])) for key, value in outputs.items()]
    return all(torch.equal(*pair) for pair in pairs)


def _without_local_norms(
    comparisons: Sequence[_Compared], plain: Recording, ranks: Sequence[Recording]
) -> list[_Compared]:
    """Leaves out the gradients before clipping of steps in which they were not clipped next.

    A program may take norms of each rank's own gradients, and average them after that. A wrong gradient is also wrong
    once it is clipped, so a step that has one which is right then is such a step. The exception is an error that
    clipping hides: all ranks have the same multiple of the gradient, and one process has clipped its own.
    """
    wrong = {comparison.key for comparison in comparisons if comparison.ratio > BUG_RATIO}
    right_later = [
        key for key in wrong if key.phase is Phase.UNCLIPPED and key._replace(phase=Phase.GRADIENT) not in wrong
    ]
    of_ranks = {key.step for key in right_later if not _is_hidden_by_clipping(key, plain, ranks)}
    return [each for each in comparisons if each.key.phase is not Phase.UNCLIPPED or each.key.step not in of_ranks]


def _is_hidden_by_clipping(key: Key, plain: Recording, ranks: Sequence[Recording]) -> bool:
    stepped_on = plain.tensors.get(key._replace(phase=Phase.GRADIENT))
    if stepped_on is None or torch.equal(float_values(plain.tensors[key]), float_values(stepped_on)):
        return False  # Nothing was clipped.
    first, *others = (float_values(recording.tensors[key]) for recording in ranks)
    return all(torch.equal(first, other) for other in others)


def _most_wrong(comparisons: Sequence[_Compared], differing: Sequence[int]) -> int:
    """The number of the first difference; among gradients that an optimizer steps on, of the largest difference.

    If gradients are clipped by the norm of all of them, an error in one changes all others a little.
    """
    key = comparisons[differing[0]].key
    if key.phase is not Phase.GRADIENT:
        return differing[0]
    of_step = [number for number in differing if comparisons[number].key[:2] == key[:2]]
    return max(of_step, key=lambda number: comparisons[number].ratio)


def _compare_one(
    key: Key, expected: Recorded, ranks: Sequence[Recording], noise: float, scale: float
) -> _Compared | None:
    by_rank = {rank: recording.tensors[key] for rank, recording in enumerate(ranks) if key in recording.tensors}
    if key.phase is Phase.STATE and not by_rank:
        return None  # Optimizers that divide their state among the ranks keep it under names of their own.
    if key.phase is Phase.OPTION and by_rank.keys() != set(range(len(ranks))):
        return None  # Some make groups of their own.
    if key.phase in (Phase.UNCLIPPED, Phase.GRADIENT) and any(recording.hides_gradients for recording in ranks):
        return None
    if key.phase is Phase.UNCLIPPED and by_rank.keys() != set(range(len(ranks))):
        return None  # The other ranks take norms of gradients in a different way.
    if by_rank.keys() != set(range(len(ranks))) and key.phase is not Phase.STATE:
        missing_ranks = tuple(rank for rank in range(len(ranks)) if rank not in by_rank)
        return _incomparable(key, missing_ranks, "there is none")
    if key.phase is Phase.RANDOM:
        other_ranks = tuple(rank for rank, state in by_rank.items() if not _are_equal(expected, state))
        why = "the ranks draw more or fewer random numbers than one process, or have another seed"
        return _incomparable(key, other_ranks, why) if other_ranks else _Compared(key, 0.0, True, None)
    if expected.numel() == 1 and key.phase in (Phase.LOSS, Phase.OUTPUT, Phase.OUTPUT_GRADIENT):
        # Each rank has the mean over its own samples, or a summand; a loss may also be multiplied by the ranks' number.
        mean = torch.stack([float_values(part).sum() for part in by_rank.values()]).mean()
        candidates = (mean, mean * len(ranks), mean / len(ranks))
        target = float_values(expected).sum()
        closest = min(candidates, key=lambda candidate: float((candidate - target).abs().nan_to_num(math.inf)))
        return _difference(key, expected, closest.to(expected.dtype).view(expected.shape), tuple(by_rank), noise)
    if key.phase is Phase.OUTPUT_GRADIENT:
        by_rank = {rank: scaled(grad, scale) for rank, grad in by_rank.items()}
    parts = list(by_rank.values())
    dim = _dim_of_parts(expected, parts)
    if dim is not None:
        joined = cat(parts, dim)
        wrong = tuple(compress(by_rank, _wrong_parts(expected, joined, parts, dim, noise)))
        return _difference(key, expected, joined, wrong or tuple(by_rank), noise)
    shapes = sorted({tuple(tensor.shape) for tensor in by_rank.values()})
    if any(shape != tuple(expected.shape) for shape in shapes):
        if key.phase is Phase.STATE:
            return None  # Flat pieces of it.
        return _incomparable(
            key, tuple(by_rank), f"its shape is {shapes[0]}, of which no joining makes {tuple(expected.shape)}"
        )
    of_ranks = [_difference(key, expected, tensor, (rank,), noise) for rank, tensor in by_rank.items()]
    worst = max(of_ranks, key=lambda comparison: comparison.ratio)
    are_losses = key.phase is Phase.OUTPUT and sum(size > 1 for size in expected.shape) < 2
    if (are_losses or key.phase is Phase.OUTPUT_GRADIENT) and worst.ratio > BUG_RATIO:
        # Several losses at once are means over the samples of a rank, or sums. An output of more dimensions is neither:
        # if only its sum is right, ranks that divide a layer lack an all-reduce. Of the gradient of an output that all
        # samples share, such as an embedding of positions, each rank has a summand.
        of_all = total(parts)
        for summed in (of_all, scaled(of_all, 1 / len(parts))) if key.phase is Phase.OUTPUT else (of_all,):
            of_total = _difference(key, expected, summed, tuple(by_rank), noise)
            worst = min(worst, of_total, key=lambda comparison: comparison.ratio)
    return worst


def _are_equal(expected: Recorded, actual: Recorded) -> bool:
    return isinstance(expected, Tensor) and isinstance(actual, Tensor) and torch.equal(expected, actual)


def _dim_of_parts(expected: Recorded, parts: Sequence[Recorded]) -> int | None:
    """The dimension along which the parts of the ranks make a tensor; None where each rank has all of it."""
    if len(parts) == 1 or any(part.ndim != expected.ndim for part in parts):
        return None
    for dim in range(expected.ndim):
        others = [size for position, size in enumerate(expected.shape) if position != dim]
        fits = all([size for position, size in enumerate(part.shape) if position != dim] == others for part in parts)
        if fits and sum(part.shape[dim] for part in parts) == expected.shape[dim]:
            return dim
    return None


def _wrong_parts(expected: Recorded, joined: Recorded, parts: Sequence[Recorded], dim: int, noise: float) -> list[bool]:
    """Which parts are wrong. None of them, if sums of the parts are kept and their error is in another dimension."""
    expected, joined = in_one_form([expected, joined])
    if isinstance(expected, Summary) and isinstance(joined, Summary):
        distances = (expected.sums[dim] - joined.sums[dim]) / math.sqrt(expected.numel_of_sum(dim))
        of_parts = distances.split([part.shape[dim] for part in parts])
    else:
        assert isinstance(expected, Tensor) and isinstance(joined, Tensor)
        wide = torch.complex128 if expected.is_complex() else torch.float64
        of_parts = (expected.to(wide) - joined.to(wide)).split([part.shape[dim] for part in parts], dim)
    return [bool((part.abs() > BUG_RATIO * noise).any()) for part in of_parts]


def _difference(key: Key, expected: Recorded, actual: Recorded, ranks: tuple[int, ...], noise: float) -> _Compared:
    if tuple(expected.shape) != tuple(actual.shape):
        return _incomparable(key, ranks, f"its shape is {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not expected.numel():
        return _Compared(key, 0.0, True, None)
    expected, actual = in_one_form([expected, actual])
    if isinstance(actual, Tensor):
        actual = actual.to(expected.dtype)
    expected_values, actual_values = float_values(expected), float_values(actual)
    if torch.equal(expected_values, actual_values):  # No NaN is equal to another one.
        return _Compared(key, 0.0, isinstance(expected, Tensor), None)  # Equal sums prove no equal bits.
    distance = (expected_values - actual_values).abs()
    distance[(expected_values == actual_values) | (expected_values.isnan() & actual_values.isnan())] = 0.0
    distance[distance.isnan()] = math.inf
    position = int(distance.argmax())
    ratio = float(distance[position]) / noise if noise else math.inf if float(distance[position]) else 0.0
    index, unit = _index(expected, position)
    values = float(expected_values[position]) * unit, float(actual_values[position]) * unit
    difference = FirstDifference(key.step, key.phase.value, key.name, ranks, index, *values, ratio)
    return _Compared(key, ratio, float(distance[position]) == 0.0, difference, bool(expected_values.isnan().any()))


def _index(value: Recorded, place: int) -> tuple[tuple[int | None, ...], float]:
    """The index of one of the `float_values`, and the factor that makes it an element or a sum of the tensor."""
    if isinstance(value, Summary):
        dim, position = value.place(place)
        index = tuple(position if other == dim else None for other in range(value.ndim))
        return index, math.sqrt(value.numel_of_sum(dim))
    shape = (*value.shape, 2) if value.is_complex() else value.shape
    return tuple(int(part) for part in torch.unravel_index(torch.tensor(place), shape)), 1.0


def _incomparable(key: Key, ranks: tuple[int, ...], why: str) -> _Compared:
    difference = FirstDifference(key.step, key.phase.value, key.name, ranks, (), math.nan, math.nan, math.inf, why)
    return _Compared(key, math.inf, False, difference)


def _gradient_scale(
    plain: Recording, ranks: Sequence[Recording], of_one_rank: Mapping[Key, tuple[int, Recorded]]
) -> float:
    """What the gradients of outputs are to be multiplied with on the ranks.

    A loss that is a mean is one over the rank's own samples, so its gradients are as many times larger as there are
    ranks; one that is a sum, or that all ranks compute of the whole batch, is not. The first gradient tells which.
    """
    for key in plain.keys_of(Phase.OUTPUT_GRADIENT):
        if key in of_one_rank:
            joined = of_one_rank[key][1]
        else:
            parts = [recording.tensors.get(key) for recording in ranks]
            tensors = [part for part in parts if part is not None]
            dim = _dim_of_parts(plain.tensors[key], tensors) if len(tensors) == len(ranks) else None
            if dim is None:
                continue
            joined = cat(tensors, dim)
        joined_values, expected = (float_values(value) for value in in_one_form([joined, plain.tensors[key]]))
        if not bool(joined_values.abs().max() > 0):
            continue
        as_mean = (joined_values / len(ranks) - expected).abs().max()
        as_sum = (joined_values - expected).abs().max()
        return 1 / len(ranks) if bool(as_mean < as_sum) else 1.0
    return 1.0
