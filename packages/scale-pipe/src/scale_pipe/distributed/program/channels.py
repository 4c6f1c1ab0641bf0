"""What a rank does and sends in passes of each kind, for one schedule: lists of tasks, and links with their tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from scale_core import Event, message_tag
from scale_core.comm.collectives import HOST, UNIT_TAGS
from scale_core.comm.group import Group
from scale_pipe.distributed.comm.messages import Pass
from scale_pipe.distributed.comm.p2p import Links
from scale_pipe.distributed.microbatch_grads import sample_slots
from scale_pipe.distributed.program.plan import (
    Send,
    Slot,
    Wiring,
    forward_plan,
    plan,
    probe_slots,
    shared_slots,
)
from scale_pipe.distributed.program.rank_program import Order
from scale_pipe.distributed.state_dict import state_slots
from scale_pipe.schedules.schedule import Schedule


class Traffic(NamedTuple):
    """One rank's part of a schedule.

    Attributes:
        orders: What it does in passes of each kind. What goes forward is in both, with the same tags: so a rank that
            was called for one kind understands one that was called for the other.
        links: To the ranks beside it, in passes.
        probes: Over which links are measured.
        host_links: Beside passes, and for what all holders of a parameter tell each other: on the host.
        sample_links: For gradients of shared parameters by micro-batch, after a step that is measured.
    """

    orders: Mapping[Pass, Order]
    links: Links
    probes: Links
    host_links: Links
    sample_links: Links

    def compute_on(self, device: torch.device) -> None:
        """Says where this rank computes.

        Args:
            device: Where what arrives is put.
        """
        self.links.compute_on(device)
        self.probes.compute_on(device)
        self.sample_links.compute_on(device)


def traffic_of(
    schedule: Schedule,
    wiring: Wiring,
    group: Group,
    *,
    number: int,
    device: torch.device,
    limit_seconds: float | None,
) -> Traffic:
    """Makes all that follows from a schedule; no rank talks.

    Args:
        schedule: What runs.
        wiring: What connects the stages beside their order.
        group: The ranks of the pipeline.
        number: Of the pipeline: no message is taken for one of another pipeline.
        device: Where this rank computes.
        limit_seconds: The longest wait for one message.
    """
    plans = plan(schedule, wiring)
    of_each = {Pass.STEP: plans, Pass.EVALUATION: [forward_plan(tasks) for tasks in plans]}
    orders = {kind: Order(tasks, group.rank, schedule.num_stages, wiring) for kind, tasks in of_each.items()}
    slots = [task.slot for tasks in plans for task in tasks if isinstance(task, Send)]
    probes = [slot for pair in probe_slots(schedule.placement).values() for slot in pair]
    kept = [*shared_slots(schedule.placement, wiring.shared), *state_slots(schedule.placement)]
    samples = sample_slots(schedule.placement, wiring.shared, schedule.num_micro_batches)
    # Of what else this group sends, no message is taken for one of these.
    first = message_tag(Event(f"pipeline {number}", schedule.name)) - UNIT_TAGS.start
    num_tags = len(slots) + len(probes) + len(kept) + len(samples)
    tags = (UNIT_TAGS[(first + index) % len(UNIT_TAGS)] for index in range(num_tags))

    def linked(slots: Sequence[Slot], where: torch.device) -> Links:
        return Links(group, {slot: next(tags) for slot in slots}, where, limit_seconds)

    return Traffic(orders, linked(slots, device), linked(probes, device), linked(kept, HOST), linked(samples, device))
