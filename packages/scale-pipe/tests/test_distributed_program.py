"""A rank's tasks: what travels is woven in where it is made and where it is needed, and nobody waits in a circle."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from pipe_schedules import BUILDERS

from scale_pipe.distributed.message import Flow, Slot
from scale_pipe.distributed.program import (
    AverageGrads,
    CrossStageTensors,
    RankProgram,
    Receive,
    Send,
    SharedParameter,
    SkipTransfer,
    SumSharedGrads,
    Task,
    build_programs,
    completed_sends,
    forward_only,
    probe_slots,
    shared_grad_slots,
    slots_of,
)
from scale_pipe.schedules.action import COMPUTES, Action, Kind
from scale_pipe.schedules.classic import interleaved_1f1b, one_forward_one_backward
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.zero_bubble import zb_v

PLAIN = CrossStageTensors()
BOTH = CrossStageTensors((SkipTransfer("far", 0, 2), SkipTransfer("near", 1, 2)), (SharedParameter("embed", (0, 2)),))


def written(tasks: tuple[Task, ...]) -> list[str]:
    """Tasks as words: `>far0.1` leaves stage 0 for 1, `<` arrives; gradients have a prime."""
    found = []
    for task in tasks:
        if isinstance(task, Send | Receive):
            slot = task.slot
            sign = ">" if isinstance(task, Send) else "<"
            prime = {Flow.GRADIENT: "'", Flow.SHARED: "+"}.get(slot.flow, "")
            found.append(f"{sign}{slot.name}{prime}{slot.source}{slot.target}")
        else:
            found.append(str(task) if isinstance(task, Action) else type(task).__name__)
    return found


def test_a_plan_has_skips_and_shared_gradients_woven_in() -> None:
    schedule = one_forward_one_backward(3, 1)
    assert [" ".join(written(tasks)) for tasks in build_programs(schedule, BOTH)] == [
        "F0.0 >01 >far02 <far'20 <'10 B0.0 AverageGrads >embed+02 <embed+20 SumSharedGrads S0",
        "<01 F1.0 >12 >near12 <'21 <near'21 B1.0 >'10 AverageGrads S1",
        "<far02 <12 <near12 F2.0 B2.0 >'21 >far'20 >near'21 AverageGrads <embed+02 >embed+20 SumSharedGrads S2",
    ]


def test_what_stays_on_a_rank_is_not_sent() -> None:
    schedule = zb_v(2, 1)  # Stages 0 and 3 on rank 0, 1 and 2 on rank 1.
    wiring = CrossStageTensors(
        (SkipTransfer("there", 0, 3), SkipTransfer("across", 0, 2)), (SharedParameter("tied", (0, 3)),)
    )
    words = written(build_programs(schedule, wiring)[0])
    assert ">across02" in words and not [word for word in words if "there" in word or "tied" in word]


def test_an_evaluation_has_forwards_and_what_they_need() -> None:
    schedule = one_forward_one_backward(3, 2)
    assert (
        " ".join(written(forward_only(build_programs(schedule, BOTH)[1])))
        == "<01 F1.0 >12 >near12 <01 F1.1 >12 >near12"
    )


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_list_ends_and_forgets_only_what_has_arrived(name: str, num_ranks: int) -> None:
    schedule = BUILDERS[name](num_ranks, 5)
    stages = schedule.num_stages
    wiring = CrossStageTensors(
        (SkipTransfer("whole", 0, stages - 1), SkipTransfer("part", 0, stages // 2)),
        (SharedParameter("t", (0, stages - 1)),),
    )
    whole = list(build_programs(schedule, wiring))
    for plans in (whole, [forward_only(tasks) for tasks in whole]):
        known = [completed_sends(plans, rank, stages, wiring) for rank in range(num_ranks)]
        done = follow(plans, known, stages, wiring)
        assert done == [len(tasks) for tasks in plans]
        if plans is whole and name == "1f1b":  # All but the last few are forgotten on the way.
            kept = [
                len([t for t in tasks if isinstance(t, Send)]) - sum(map(len, known[rank].values()))
                for rank, tasks in enumerate(plans)
            ]
            assert max(kept) <= 8


def follow(
    plans: list[tuple[Task, ...]], known: list[dict[int, list[Slot]]], stages: int, wiring: CrossStageTensors
) -> list[int]:
    """Runs all lists: sends are free, computations wait for what they take; returns how far each rank came."""
    positions, sent, taken = [0] * len(plans), set[Slot](), set[Slot]()
    moving = True
    while moving:
        moving = False
        for rank, tasks in enumerate(plans):
            received = {task.slot for task in tasks if isinstance(task, Receive)}
            while positions[rank] < len(tasks):
                index, task = positions[rank], tasks[positions[rank]]
                if isinstance(task, Send):
                    assert task.slot not in sent
                    sent.add(task.slot)
                elif isinstance(task, SumSharedGrads):
                    if not {slot for slot in received if slot.flow is Flow.SHARED} <= sent:
                        break
                elif isinstance(task, Action) and task.kind in COMPUTES:
                    needed = {slot for slot in slots_of(task, stages, wiring, inputs=True) if slot in received}
                    if not needed <= sent:
                        break
                    taken |= needed
                    assert set(known[rank].get(index, ())) <= taken, "forgotten before it was there"
                positions[rank] += 1
                moving = True
    return positions


def wirings(num_stages: int, seed: int) -> list[CrossStageTensors]:
    """None, all skips that there can be, and some of them, with shared parameters."""
    pairs = [(source, target) for target in range(num_stages) for source in range(target)]
    chosen = random.Random(seed)
    some = chosen.sample(pairs, chosen.randint(1, len(pairs)))
    tied = tuple(sorted(chosen.sample(range(num_stages), chosen.randint(2, num_stages))))
    everywhere = tuple(range(num_stages))
    return [
        PLAIN,
        CrossStageTensors(tuple(SkipTransfer(f"{source} to {target}", source, target) for source, target in pairs)),
        CrossStageTensors(
            tuple(SkipTransfer(f"number {number}", *pair) for number, pair in enumerate(some)),
            (SharedParameter("tied", tied), SharedParameter("everywhere", everywhere)),
        ),
    ]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_ranks_never_wait_in_a_circle_with_ordered_transfers(name: str, num_ranks: int) -> None:
    """So it is on NCCL: no tags, one stream of a rank, and large messages leave when their receives are there."""
    for number in (1, num_ranks - 1, num_ranks, 2 * num_ranks + 1):
        schedule = BUILDERS[name](num_ranks, number)
        for wiring in wirings(schedule.num_stages, seed=num_ranks * 100 + number):
            plans = build_programs(schedule, wiring)
            for lists in (plans, [forward_only(tasks) for tasks in plans]):
                meet(lists)
            if wiring is PLAIN:  # What was proved and drawn is what runs.
                assert [written_actions(tasks) for tasks in plans] == [
                    [str(action) for action in actions] for actions in schedule.actions
                ]


def meet(plans: Sequence[Sequence[Task]]) -> None:
    """Follows all lists, in each of which a transfer waits for its other side, and has to find it as its own."""
    positions = [0] * len(plans)

    def ahead(rank: int) -> Task | None:
        return next(iter(plans[rank][positions[rank] :]), None)

    moving = True
    while moving:
        moving = False
        for rank in range(len(plans)):
            while (task := ahead(rank)) is not None:
                if isinstance(task, Send | Receive):
                    other = ahead(task.peer)
                    opposite = Receive if isinstance(task, Send) else Send
                    if other != opposite(task.slot, rank) or type(other) is type(task):
                        break
                    positions[task.peer] += 1
                positions[rank] += 1
                moving = True
    assert positions == [len(tasks) for tasks in plans], "waits for ever"


def written_actions(tasks: Sequence[Task]) -> list[str]:
    """Tasks of a plan without skips and shared parameters, as the schedule writes them."""
    kinds = {
        (Send, Flow.ACTIVATION): "SA",
        (Send, Flow.GRADIENT): "SG",
        (Receive, Flow.ACTIVATION): "RA",
        (Receive, Flow.GRADIENT): "RG",
    }
    found = []
    for task in tasks:
        if isinstance(task, Send | Receive):
            stage = task.slot.source if isinstance(task, Send) else task.slot.target
            found.append(f"{kinds[type(task), task.slot.flow]}{stage}.{task.slot.micro_batch}")
        elif isinstance(task, Action):
            found.append(str(task))
    return found


def test_a_receive_is_before_its_reader_a_send_behind_its_maker() -> None:
    plans = build_programs(one_forward_one_backward(3, 4), BOTH)
    for rank, tasks in enumerate(plans):
        order = RankProgram(plans, rank, 3, BOTH)
        for index, task in enumerate(tasks):
            if isinstance(task, Action) and task.kind in COMPUTES:
                before = {other.slot for other in tasks[:index] if isinstance(other, Receive)}
                behind = {other.slot for other in tasks[index:] if isinstance(other, Send)}
                assert set(order.inputs[task]) <= before
                assert set(order.outputs[task]) <= behind


def test_gradients_of_shared_parameters_go_between_all_ranks() -> None:
    shared = (SharedParameter("tied", (0, 3, 4)),)
    assert [(slot.source, slot.target) for slot in shared_grad_slots(StagePlacement((0, 1, 2, 0, 2)), shared)] == [
        (0, 4),
        (4, 0),
    ]


def test_an_order_knows_the_last_turn_of_each_stage() -> None:
    schedule = zb_v(2, 3)
    plans = build_programs(schedule, PLAIN)
    order = RankProgram(plans, 0, 4, PLAIN)
    assert (
        order.splits_backward
        and sorted(order.backward_order) == [0, 3]
        and sorted(order.backward_order[0]) == [0, 1, 2]
    )
    assert [task for task in order.tasks if isinstance(task, AverageGrads)] == [AverageGrads()]
    assert {task.kind for task in order.tasks if isinstance(task, Action)} >= {Kind.STEP, Kind.FORWARD}


def test_a_slot_says_what_it_is() -> None:
    slot = Slot(Flow.ACTIVATION, "", 1, 2, 3)
    assert str(slot) == "activation of stage 1 for stage 2, micro-batch 3"
    assert str(slot.gradient_slot()) == "gradient of stage 2 for stage 1, micro-batch 3"
    assert str(Slot(Flow.ACTIVATION, "skip", 0, 2, 0)) == "activation 'skip' of stage 0 for stage 2, micro-batch 0"


def test_links_between_two_ranks_are_probed_there_and_back() -> None:
    probes = probe_slots(StagePlacement((0, 1, 1, 0)))
    assert list(probes) == [0, 2]
    assert [(slot.flow, slot.source, slot.target) for slot in probes[2]] == [(Flow.PROBE, 2, 3), (Flow.PROBE, 3, 2)]
    assert str(probes[0][1]) == "probe of the link of stage 1 for stage 0"


def test_all_ranks_but_the_first_receive_before_they_send() -> None:
    for schedule, wiring in itertools.product(
        (one_forward_one_backward(3, 4), zb_v(3, 4), interleaved_1f1b(3, 3, 2)),
        (PLAIN, CrossStageTensors((SkipTransfer("far", 0, 5), SkipTransfer("near", 0, 1)))),
    ):
        if wiring.skips and schedule.num_stages < 6:
            continue
        plans = build_programs(schedule, wiring)
        forwards = [forward_only(tasks) for tasks in plans]
        for rank in range(3):
            step, evaluation = (RankProgram(tasks, rank, schedule.num_stages, wiring) for tasks in (plans, forwards))
            assert step.first_receive == evaluation.first_receive
            assert (step.first_receive is None) == (schedule.placement.rank_of[0] == rank)
            assert step.first_receive is None or (step.first_receive.flow, step.first_receive.micro_batch) == (
                Flow.ACTIVATION,
                0,
            )
            for tasks in (step.tasks, evaluation.tasks):
                first = next(index for index, task in enumerate(tasks) if isinstance(task, Action))
                assert not any(isinstance(task, Send) for task in tasks[:first])
