"""From what was followed and tried to numbers: segments, their ways, and what crosses between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scale_checkpoint.planner.block_benchmark import Trial
from scale_checkpoint.planner.strategies import KEEP, RECOMPUTE
from scale_checkpoint.planner.timeline import Crossing, Segment, Way, standing
from scale_checkpoint.planner.trace import StepTrace, Visit


@dataclass(frozen=True)
class Tried:
    """What a block took in one way.

    Attributes:
        trial: Its memory.
        seconds: Forward and backward.
        early_bytes: See `Way`.
    """

    trial: Trial
    seconds: float
    early_bytes: int


def pooled(tried: Sequence[Mapping[str, Tried]]) -> list[dict[str, Tried]]:
    """Gives visits that are equal in memory, in every way, the least of their times: most models repeat one block.

    Args:
        tried: By way, for each visit of a block.
    """
    alike: dict[tuple[Trial, ...], list[Mapping[str, Tried]]] = {}
    for ways in tried:
        alike.setdefault(_memory_of(ways), []).append(ways)
    pooled = []
    for ways in tried:
        equals = alike[_memory_of(ways)]
        pooled.append(
            {name: replace(each, seconds=min(e[name].seconds for e in equals)) for name, each in ways.items()}
        )
    return pooled


def _memory_of(ways: Mapping[str, Tried]) -> tuple[Trial, ...]:
    return tuple(each.trial for each in ways.values())


def assemble(
    trace: StepTrace, tried: Sequence[Mapping[str, Tried]], standing_bytes: int, seconds: float
) -> tuple[tuple[Segment, ...], tuple[Crossing, ...]]:
    """Takes from each segment's memory what the followed step's ways made stand there: the rest no plan changes.

    Args:
        trace: Of a step in which every block was computed again.
        tried: By way, for each visit of a block in the order of the forward; empty where it has no gradient.
        standing_bytes: What stood before the step.
        seconds: That the step took.

    Returns:
        The segments of the step, and the tensors that pass between them.
    """
    visits = trace.visits
    numbers, crossings = _crossings(trace)
    trials = iter(tried)
    names, ways = [], []
    for j, visit in enumerate(visits):
        options = _block_ways(visit, next(trials), numbers) if visit.name else {}
        if not options:
            options = {KEEP: Way(0.0, 0, *_needs(visit), holds=_held(visit.saved, numbers))}
        names.append(visit.name or _between(visits, j))
        ways.append(options)
    ways = _timed(ways, seconds)

    bare = [Segment(name, 0, 0, options) for name, options in zip(names, ways, strict=True)]
    followed = [options.get(RECOMPUTE, options.get(KEEP)) for options in ways]
    forward, backward, _ = standing(crossings, [way for way in followed if way is not None])
    starts = _backward_starts(visits)
    segments = tuple(
        replace(
            segment,
            forward_bytes=standing_bytes + visit.forward.start_bytes - forward[j],
            backward_bytes=standing_bytes + starts[j] - backward[j],
        )
        for j, (segment, visit) in enumerate(zip(bare, visits, strict=True))
    )
    return segments, tuple(crossings)


def _timed(ways: Sequence[Mapping[str, Way]], seconds: float) -> list[dict[str, Way]]:
    """Makes the times of a step with all blocks computed again add up to what it took; differences between ways stay.

    A trial takes a little more than the block does in the step, and in small models that adds up. What the blocks
    don't take counts for what lies before them. Where the trials took so much more that the difference is most of a
    way's time, they were disturbed: then ways keep their ratios, and no time becomes negative.
    """
    in_blocks = sum(options[RECOMPUTE].seconds for options in ways if RECOMPUTE in options)
    excess = max(0.0, 1 - seconds / in_blocks) if in_blocks else 0.0
    timed = []
    for options in ways:
        less = options[RECOMPUTE].seconds * excess if RECOMPUTE in options else 0.0
        if any(way.seconds < 2 * less for way in options.values()):
            scaled = {name: replace(way, seconds=way.seconds * (1 - excess)) for name, way in options.items()}
            timed.append(scaled)
        else:
            timed.append({name: replace(way, seconds=way.seconds - less) for name, way in options.items()})
    timed[0] = {name: replace(way, seconds=max(0.0, seconds - in_blocks)) for name, way in timed[0].items()}
    return timed


def _crossings(trace: StepTrace) -> tuple[dict[int, int], list[Crossing]]:
    """The tensors that blocks take or return and that the step has made; their numbers by those of the storages."""
    visits = trace.visits
    read: dict[int, int] = {}
    for j, visit in enumerate(visits):
        for number in {*visit.inputs, *visit.outputs}:
            if number in trace.born:
                read[number] = max(read.get(number, 0), j if number in visit.inputs else j + 1)
    for j, visit in enumerate(visits):
        for number in set(visit.saved) & read.keys():
            if not visit.name:
                read[number] = max(read[number], j)
    crossings = [Crossing(trace.sizes[number], trace.born[number], last) for number, last in read.items()]
    return {number: index for index, number in enumerate(read)}, crossings


def _block_ways(visit: Visit, tried: Mapping[str, Tried], numbers: Mapping[int, int]) -> dict[str, Way]:
    ways = {}
    for name, each in tried.items():
        trial = each.trial
        held = [number for number, is_held in zip(visit.inputs, trial.held_inputs, strict=True) if is_held]
        held += [number for number, is_held in zip(visit.outputs, trial.held_outputs, strict=True) if is_held]
        needs = _needs(visit) if name == RECOMPUTE else (trial.forward_bytes, trial.backward_bytes)
        early = (each.early_bytes, trial.end_bytes if each.early_bytes else 0)
        ways[name] = Way(each.seconds, trial.kept_bytes, *needs, *early, _held(held, numbers))
    return ways


def _held(storages: Sequence[int], numbers: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sorted({numbers[number] for number in storages if number in numbers}))


def _needs(visit: Visit) -> tuple[int, int]:
    """The most that a visit's forward and backward needed over what stood when they were entered."""
    backward = visit.backward
    needs = 0 if backward is None else backward.peak_bytes - backward.start_bytes
    return visit.forward.peak_bytes - visit.forward.start_bytes, needs


def _backward_starts(visits: Sequence[Visit]) -> list[int]:
    """What lived when each visit's backward was entered; where it has none, when the one behind it was left."""
    starts = []
    last = visits[-1].forward.end_bytes
    for visit in reversed(visits):
        starts.append(last if visit.backward is None else visit.backward.start_bytes)
        last = last if visit.backward is None else visit.backward.end_bytes
    return starts[::-1]


def _between(visits: Sequence[Visit], j: int) -> str:
    if j == 0:
        return "before the blocks"
    return "after the blocks" if j == len(visits) - 1 else f"after {visits[j - 1].name}"
