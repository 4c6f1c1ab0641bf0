"""Finds the first tensor in which a training on several ranks differs from the same one in one process.

Each tensor of the one process is set beside what the ranks have of it: the same, or parts that together have its shape.
How large a difference may be is not typed in: it is measured beside the program's own rounding (see `noise`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from scale_check.recording import Key, Phase, Recording

# A difference above so many times the program's rounding is no rounding. In right programs it is below 10, and a wrong
# one in float64 is above a million: see `benchmarks/parity.py`.
BUG_RATIO = 100.0


# What has to be there in one process where a rank has it; states may have other names on ranks.
_ON_BOTH_SIDES = (Phase.START, Phase.OUTPUT, Phase.LOSS, Phase.GRADIENT, Phase.WEIGHT)


class ParityVerdict(enum.Enum):
    """What a comparison has found."""

    EQUAL = "equal to the bit"
    ROUNDING = "equal but for rounding"
    BUG = "different"


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor that differs.

    Attributes:
        step: The optimizer's step, from 1.
        phase: What the tensor is, such as "gradient of".
        name: The module or the parameter, by its name in the plain model.
        ranks: Which ranks have it otherwise; all of those whose parts were put together.
        index: Where it differs most, in the full tensor.
        expected: What one process has there.
        found: What the ranks have there.
        ratio: How many times the rounding of the program the difference is; infinite where a rank has no such tensor.
        why: What differs, where that is not a number: a shape, or a tensor that is missing.
    """

    step: int
    phase: str
    name: str
    ranks: tuple[int, ...]
    index: tuple[int, ...]
    expected: float
    found: float
    ratio: float
    why: str = ""

    def __str__(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        what = f"step {self.step}: {self.phase} {self.name or 'the model'} differs on {ranks}: "
        if self.why:
            return what + self.why
        times = f"{self.ratio:,.0f}" if self.ratio < 1e6 else f"{self.ratio:.1e}"
        return (
            f"{what}at {list(self.index)} one process has {self.expected:.9g}, and they have {self.found:.9g}, which "
            f"is {times} times the rounding of this program"
        )


@dataclass(frozen=True)
class Report:
    """The result of a comparison.

    Attributes:
        verdict: Equal to the bit, but for rounding, or different.
        first: The first difference that is no rounding; None where there is none.
        num_compared: How many tensors were compared.
        largest_ratio: Of all tensors, the largest difference beside the program's rounding.
        equal_before: The last tensor before the first difference, in words; "" where there is none.
        also: How many later tensors differ, too.
        num_nan: How many tensors have a NaN, at the same places.
    """

    verdict: ParityVerdict
    first: FirstDifference | None
    num_compared: int
    largest_ratio: float
    equal_before: str = ""
    also: int = 0
    num_nan: int = 0

    def __str__(self) -> str:
        if self.first is None:
            how = "" if self.verdict is ParityVerdict.EQUAL else f" (at most {self.largest_ratio:.1f} times it)"
            nan = f"; {self.num_nan} of them have a NaN, at the same places" if self.num_nan else ""
            return f"{self.num_compared} tensors are {self.verdict.value}{how}{nan}"
        before = f" The last tensor before it that is right: {self.equal_before}." if self.equal_before else ""
        also = f" {self.also} later ones differ, too." if self.also else ""
        return f"{self.first}.{before}{also}"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON knows it."""
        first = None if self.first is None else {**asdict(self.first), "text": str(self.first)}
        for number in ("expected", "found", "ratio"):
            if first is not None and not math.isfinite(first[number]):
                first[number] = str(first[number])
        return {
            "verdict": self.verdict.value,
            "num_compared": self.num_compared,
            "largest_ratio": self.largest_ratio if math.isfinite(self.largest_ratio) else str(self.largest_ratio),
            "first": first,
            "also": self.also,
            "num_nan": self.num_nan,
        }


@dataclass(frozen=True)
class _Compared:
    """One tensor beside that of the ranks."""

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
    found: list[_Compared] = []
    scale = _gradient_scale(plain, ranks)
    for key, expected in plain.tensors.items():
        if (compared := _compare_one(key, expected, ranks, noise.get(key, 0.0), scale)) is not None:
            found.append(compared)
    for key in dict.fromkeys(key for recording in ranks for key in recording.keys_of(*_ON_BOTH_SIDES)):
        if key not in plain.tensors:
            holders = tuple(rank for rank, recording in enumerate(ranks) if key in recording.tensors)
            found.append(_incomparable(key, holders, "one process has none"))
    wrong = [number for number, each in enumerate(found) if each.ratio > BUG_RATIO]
    largest = max((each.ratio for each in found), default=0.0)
    if not wrong:
        verdict = ParityVerdict.EQUAL if all(each.is_equal for each in found) else ParityVerdict.ROUNDING
        return Report(verdict, None, len(found), largest, num_nan=sum(each.has_nan for each in found))
    before = str(found[wrong[0] - 1].key) if wrong[0] else ""
    return Report(ParityVerdict.BUG, found[wrong[0]].difference, len(found), largest, before, len(wrong) - 1)


def _compare_one(
    key: Key, expected: Tensor, ranks: Sequence[Recording], noise: float, scale: float
) -> _Compared | None:
    held = {rank: recording.tensors[key] for rank, recording in enumerate(ranks) if key in recording.tensors}
    if key.phase is Phase.STATE and not held:
        return None  # Optimizers that divide their state among the ranks keep it under names of their own.
    if held.keys() != set(range(len(ranks))) and key.phase is not Phase.STATE:
        lacking = tuple(rank for rank in range(len(ranks)) if rank not in held)
        return _incomparable(key, lacking, "there is none")
    if expected.numel() == 1 and key.phase in (Phase.LOSS, Phase.OUTPUT, Phase.OUTPUT_GRADIENT):
        # A mean or a sum over the samples of each rank, and of a gradient what the loss of a rank was multiplied with.
        mean = torch.stack([part.double() for part in held.values()]).mean()
        candidates = (mean, mean * len(ranks), mean / len(ranks))
        target = expected.double().sum()
        closest = min(candidates, key=lambda found: float((found - target).abs().nan_to_num(math.inf)))
        return _difference(key, expected, closest.to(expected.dtype).view(expected.shape), tuple(held), noise)
    if key.phase is Phase.OUTPUT_GRADIENT:
        held = {rank: grad * scale for rank, grad in held.items()}
    whole = _assembled(expected, list(held.values()))
    if whole is not None:
        return _difference(key, expected, whole, tuple(held), noise)
    shapes = sorted({tuple(tensor.shape) for tensor in held.values()})
    if any(shape != tuple(expected.shape) for shape in shapes):
        if key.phase is Phase.STATE:
            return None  # Flat pieces of it.
        return _incomparable(
            key, tuple(held), f"its shape is {shapes[0]}, of which no joining makes {tuple(expected.shape)}"
        )
    each = [_difference(key, expected, tensor, (rank,), noise) for rank, tensor in held.items()]
    worst = max(each, key=lambda compared: compared.ratio)
    if key.phase is Phase.OUTPUT_GRADIENT and worst.ratio > BUG_RATIO:
        # Of what is the same for all samples, as the embedding of positions, each rank has a summand.
        total = torch.stack([tensor.double() for tensor in held.values()]).sum(0).to(expected.dtype)
        worst = min(worst, _difference(key, expected, total, tuple(held), noise), key=lambda compared: compared.ratio)
    return worst


def _assembled(expected: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
    """The parts of the ranks put together along the dimension in which they add up; None where each has all of it."""
    if len(parts) == 1 or any(part.ndim != expected.ndim for part in parts):
        return None
    for dim in range(expected.ndim):
        others = [size for place, size in enumerate(expected.shape) if place != dim]
        fits = all([size for place, size in enumerate(part.shape) if place != dim] == others for part in parts)
        if fits and sum(part.shape[dim] for part in parts) == expected.shape[dim]:
            return torch.cat([part.to(parts[0].dtype) for part in parts], dim)
    return None


def _difference(key: Key, expected: Tensor, found: Tensor, ranks: tuple[int, ...], noise: float) -> _Compared:
    if tuple(expected.shape) != tuple(found.shape):
        return _incomparable(key, ranks, f"its shape is {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if not expected.numel():
        return _Compared(key, 0.0, True, None)
    if torch.equal(expected, found.to(expected.dtype)) and not expected.isnan().any():
        return _Compared(key, 0.0, True, None)
    if expected.is_complex():
        expected, found = torch.view_as_real(expected), torch.view_as_real(found.to(expected.dtype))
    wide, other = expected.double().flatten(), found.double().flatten()
    apart = (wide - other).abs()
    apart[(wide == other) | (wide.isnan() & other.isnan())] = 0.0
    apart[apart.isnan()] = math.inf
    place = int(apart.argmax())
    ratio = float(apart[place]) / noise if noise else math.inf if float(apart[place]) else 0.0
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(place), expected.shape))
    values = float(wide[place]), float(other[place])
    difference = FirstDifference(key.step, key.phase.value, key.name, ranks, index, *values, ratio)
    return _Compared(key, ratio, float(apart[place]) == 0.0, difference, bool(wide.isnan().any()))


def _incomparable(key: Key, ranks: tuple[int, ...], why: str) -> _Compared:
    difference = FirstDifference(key.step, key.phase.value, key.name, ranks, (), math.nan, math.nan, math.inf, why)
    return _Compared(key, math.inf, False, difference)


def _gradient_scale(plain: Recording, ranks: Sequence[Recording]) -> float:
    """What the gradients of outputs are to be multiplied with on the ranks.

    A loss that is a mean is one over the rank's own samples, so its gradients are as many times larger as there are
    ranks; one that is a sum, or that all ranks compute of the whole batch, is not. The first gradient tells which.
    """
    for key in plain.keys_of(Phase.OUTPUT_GRADIENT):
        parts = [recording.tensors.get(key) for recording in ranks]
        tensors = [part for part in parts if part is not None]
        whole = _assembled(plain.tensors[key], tensors) if len(tensors) == len(ranks) else None
        if whole is None or not bool(whole.abs().max() > 0):
            continue
        expected = plain.tensors[key].double()
        as_mean = (whole.double() / len(ranks) - expected).abs().max()
        as_sum = (whole.double() - expected).abs().max()
        return 1 / len(ranks) if bool(as_mean < as_sum) else 1.0
    return 1.0
