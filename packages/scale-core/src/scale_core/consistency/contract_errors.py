"""The errors of a `Contract`: ranks that do different things, and transfers that have failed.

Each names the first difference, by rank, and the change of the program that mends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from scale_core.consistency.execution_order import Event
from scale_core.consistency.flight_recorder import (
    FlightRecorder,
    RankRecord,
    are_at_different_places,
    by_rank,
    format_desync,
)
from scale_core.errors import ContractError, ScaleDistributedError, TransferError, recovery_hint

SAME_MODEL = (
    "Build the same model on every rank, and wrap it in the same order: nothing before the first step may depend on "
    "the rank"
)
_SAME_ORDER = (
    "All ranks must run the same units in the same order; where the data decides which of them is used, make one "
    "unit of all that can be chosen: fully_shard(the module that holds them)"
)

SAME_TRAINED = (
    "Freeze the same parameters on all ranks: param.requires_grad_(...) must not depend on the rank, nor on its data"
)

_SAME_CALLS = (
    "Each of them moves data between these ranks. NCCL matches data by the order of calls only, so results may be "
    "wrong since then. Make the same calls on all of these ranks, in the same order, with inputs of the same shape"
)

_ON_ONE_RANK = (
    "For an evaluation that only one rank needs, call the model on all ranks and use the result on that rank; under "
    "ShardedDataParallel that rank can call model.module(batch)"
)


def unequal_lines(places: Sequence[RankRecord], what: str, mending: str) -> ContractError:
    """Ranks differ in `what` they have built, or are at different places in the program."""
    return ContractError(
        f"{format_desync(places, what)}. {_SAME_ORDER if are_at_different_places(places) else mending}"
    )


def unequal_events(places: Sequence[RankRecord], step: int, unit: str, rank: int) -> ContractError:
    """Ranks have run, or are about to run, different events; or they train different parameters."""
    is_one_place = len({(place.of, place.place, *place.events) for place in places}) == 1
    if is_one_place and len({tuple(place.trained) for place in places}) > 1:
        trained = [", ".join(place.trained) or "as at first" for place in places]
        message = f"step {step}: the ranks train different parameters: {by_rank(trained)}. {SAME_TRAINED}"
        return ContractError(message, step=step, rank=rank)
    message = f"step {step}: {format_desync(places, 'what they ran')}. {_SAME_ORDER}"
    return ContractError(message, step=step, unit=unit, rank=rank)


def unequal_calls(difference: str, step: int, rank: int) -> ContractError:
    """Ranks have called layers that are parallel over them in different orders, or with different inputs."""
    message = f"step {step}: the ranks made different calls: {difference}. {_SAME_CALLS}"
    return ContractError(message, step=step, rank=rank)


def broken_group(first_error: str, step: int, rank: int) -> ScaleDistributedError:
    """A group is used again after an error that has broken it."""
    return ScaleDistributedError(
        f"the process group is broken since an earlier error and can't be used again:\n{first_error}\n"
        f"{recovery_hint()}, or create a new process group",
        step=step,
        rank=rank,
    )


def failed_transfer(
    error: TransferError, place: Event | str, recorder: FlightRecorder, step: int, rank: int
) -> ScaleDistributedError:
    """A transfer has failed at an event or in a call; tells every rank's last events."""
    recorder.events.append(f"step {step}: failed in {place} ({error.fact})")
    recorder.publish()
    lines = [f"step {step}: {place}: {error.fact}", "What each rank did last:"]
    lines += [f"  rank {other}: {history}" for other, history in recorder.dump_all_ranks(error.gone).items()]
    lines.append(
        f"{_SAME_ORDER}. A rank that skips a batch, an evaluation or a checkpoint, or that has exited, leaves the "
        f"others waiting. {_ON_ONE_RANK}. The process group can't be used any more: {recovery_hint()}"
    )
    unit = place.unit if isinstance(place, Event) else ""
    return ScaleDistributedError("\n".join(lines), step=step, unit=unit, rank=rank, peer=error.peer, op=error.op)
