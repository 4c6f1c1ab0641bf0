"""Segments, their costs by strategy and the boundary tensors between them, from a traced step and measured blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scale_checkpoint.planner.block_benchmark import BlockCost, BlockMemory
from scale_checkpoint.planner.blocks import KEEP, RECOMPUTE
from scale_checkpoint.planner.timeline import BoundaryTensor, Segment, StrategyCost, memory_state
from scale_checkpoint.planner.trace import StepTrace, Visit


def pool_seconds(measured: Sequence[Mapping[str, BlockCost]]) -> list[dict[str, BlockCost]]:
    """Gives visits that are equal in memory, under every strategy, the least of their times.

    Most models repeat one block, and the least time is the least disturbed.
    """
    costs_by_memory: dict[tuple[BlockMemory, ...], list[Mapping[str, BlockCost]]] = {}
    for costs in measured:
        costs_by_memory.setdefault(tuple(cost.memory for cost in costs.values()), []).append(costs)
    pooled = []
    for costs in measured:
        equals = costs_by_memory[tuple(cost.memory for cost in costs.values())]
        least = {name: min(cost[name].seconds for cost in equals) for name in costs}
        pooled.append({name: cost._replace(seconds=least[name]) for name, cost in costs.items()})
    return pooled


def assemble(
    trace: StepTrace, measured: Sequence[Mapping[str, BlockCost]], model_bytes: int, seconds: float
) -> tuple[tuple[Segment, ...], tuple[BoundaryTensor, ...]]:
    """Returns the segments of a step and the tensors between them.

    Subtracts from each segment's memory, in `trace` of a step with all blocks recomputed, the memory that the plan has
    kept. `measured` has the costs of each visit of a block in forward order, empty where it has no gradient;
    `model_bytes` lived before the step.
    """
    visits = trace.visits
    indices, boundary_tensors = _boundary_tensors(trace)
    remaining = iter(measured)
    all_costs = []
    for visit in visits:
        costs = _block_costs(visit, next(remaining), indices) if visit.name else {}
        all_costs.append(costs or {KEEP: StrategyCost(0.0, 0, *_peaks(visit), holds=_held(visit.saved, indices))})
    all_costs = _fit_to_step(all_costs, seconds)

    traced = [costs[RECOMPUTE] if RECOMPUTE in costs else costs[KEEP] for costs in all_costs]
    forward, backward, _ = memory_state(boundary_tensors, traced)
    starts = _backward_starts(visits)
    segments = tuple(
        Segment(
            name=visit.name or _name_between(visits, j),
            forward_bytes=model_bytes + visit.forward.start_bytes - forward[j],
            backward_bytes=model_bytes + starts[j] - backward[j],
            costs=costs,
        )
        for j, (visit, costs) in enumerate(zip(visits, all_costs, strict=True))
    )
    return segments, tuple(boundary_tensors)


def _fit_to_step(measured: Sequence[Mapping[str, StrategyCost]], seconds: float) -> list[dict[str, StrategyCost]]:
    """Makes the times of a step with all blocks recomputed add up to `seconds`; differences between strategies stay.

    A block alone takes a little more than in the step, and in small models that adds up. The time that the blocks
    don't take counts for the segment before them. Where the excess is most of a strategy's time, the measurement was
    disturbed: then strategies keep their ratios, and no time becomes negative.
    """
    in_blocks = sum(costs[RECOMPUTE].seconds for costs in measured if RECOMPUTE in costs)
    excess = max(0.0, 1 - seconds / in_blocks) if in_blocks else 0.0
    fitted = []
    for costs in measured:
        less = costs[RECOMPUTE].seconds * excess if RECOMPUTE in costs else 0.0
        if any(cost.seconds < 2 * less for cost in costs.values()):
            fitted.append({name: replace(cost, seconds=cost.seconds * (1 - excess)) for name, cost in costs.items()})
        else:
            fitted.append({name: replace(cost, seconds=cost.seconds - less) for name, cost in costs.items()})
    fitted[0] = {name: replace(cost, seconds=max(0.0, seconds - in_blocks)) for name, cost in fitted[0].items()}
    return fitted


def _boundary_tensors(trace: StepTrace) -> tuple[dict[int, int], list[BoundaryTensor]]:
    """The tensors that blocks take or return and that the step has made; their indices by number of the storage."""
    visits = trace.visits
    last_reader: dict[int, int] = {}
    for j, visit in enumerate(visits):
        for number in {*visit.inputs, *visit.outputs}:
            if number in trace.producer:
                last_reader[number] = max(last_reader.get(number, 0), j if number in visit.inputs else j + 1)
    for j, visit in enumerate(visits):
        for number in set(visit.saved) & last_reader.keys():
            if not visit.name:
                last_reader[number] = max(last_reader[number], j)
    tensors = [BoundaryTensor(trace.sizes[n], trace.producer[n], last) for n, last in last_reader.items()]
    return {number: index for index, number in enumerate(last_reader)}, tensors


def _block_costs(
    visit: Visit, measured: Mapping[str, BlockCost], indices: Mapping[int, int]
) -> dict[str, StrategyCost]:
    costs = {}
    for name, costs_of_block in measured.items():
        memory = costs_of_block.memory
        held_inputs = [number for number, is_held in zip(visit.inputs, memory.held_inputs, strict=True) if is_held]
        held_inputs += [number for number, is_held in zip(visit.outputs, memory.held_outputs, strict=True) if is_held]
        forward, backward = _peaks(visit) if name == RECOMPUTE else (memory.forward_bytes, memory.backward_bytes)
        costs[name] = StrategyCost(
            seconds=costs_of_block.seconds,
            kept_bytes=memory.kept_bytes,
            forward_bytes=forward,
            backward_bytes=backward,
            prefetched_bytes=costs_of_block.prefetched_bytes,
            prefetch_peak_bytes=memory.prefetch_peak_bytes if costs_of_block.prefetched_bytes else 0,
            holds=_held(held_inputs, indices),
        )
    return costs


def _held(storages: Sequence[int], indices: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sorted({indices[number] for number in storages if number in indices}))


def _peaks(visit: Visit) -> tuple[int, int]:
    """Peaks of a visit's forward and backward over the memory when they were entered."""
    backward = visit.backward
    backward_peak = 0 if backward is None else backward.peak_bytes - backward.start_bytes
    return visit.forward.peak_bytes - visit.forward.start_bytes, backward_peak


def _backward_starts(visits: Sequence[Visit]) -> list[int]:
    """The live bytes when each visit's backward was entered; where it has none, when the one behind it was left."""
    starts = []
    last = visits[-1].forward.end_bytes
    for visit in reversed(visits):
        starts.append(last if visit.backward is None else visit.backward.start_bytes)
        last = last if visit.backward is None else visit.backward.end_bytes
    return starts[::-1]


def _name_between(visits: Sequence[Visit], j: int) -> str:
    if j == 0:
        return "before the blocks"
    return "after the blocks" if j == len(visits) - 1 else f"after {visits[j - 1].name}"
