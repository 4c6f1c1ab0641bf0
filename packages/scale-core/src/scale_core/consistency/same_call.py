"""Comparison of calls between ranks: shapes, dtypes and options that have to be the same on all of them.

A call is compared before its messages when it comes for the first time. Later calls are compared at the end of a pass.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest

from scale_core import compat
from scale_core.comm.collectives import exchange, exchange_text, fingerprint_of
from scale_core.comm.group import Group, group_of
from scale_core.comm.group_state import CallLog, group_state
from scale_core.consistency.execution_order import Event, message_tag


def check_same_call(what: str, signature: str, group: Group, *, each_time: bool = False) -> int:
    """Returns the message tag of a call whose signature (shapes, dtypes, options) has to be the same on all ranks.

    A call that was compared once costs no message later. Over gloo its messages carry the tag, so that ranks which
    differ later time out and never read each other's data. NCCL has no tags, so the contract of the model around it
    compares at the end of each pass all calls since the last one (`calls_that_differ`).

    Args:
        what: The name of the call.
        signature: The facts that have to be equal, with "; " between them. An error shows the first that differs.
        group: The ranks that call it together.
        each_time: Compare it also where it was equal before, for calls whose messages do not carry the tag.

    Raises:
        TransferError: A rank did not come.
        ValueError: On all ranks: they differ.
    """
    tag = message_tag(Event(what, signature))
    if group.process_group is None or group.backend == "fake":
        return tag
    known, own = group.state.compared_calls, fingerprint_of(what, signature)
    if each_time or own not in known:
        if len({row[0] for row in exchange([own], group)}) > 1:
            facts = _first_difference(exchange_text(f"{what}: {signature}", group))
            by_rank = "; ".join(f"rank {rank}: {fact}" for rank, fact in enumerate(facts))
            raise ValueError(f"the ranks are about to do different things: {by_rank}: make the same call on all")
        known.add(own)
    if not each_time:
        calls, CallLog.is_used = group.state.calls, True
        calls.fingerprint = fingerprint_of(calls.fingerprint, own)
        calls.last.append(f"{what}: {signature}")
    return tag


def _first_difference(calls: Sequence[str]) -> list[str]:
    """Returns of each call its name and its first fact that is not the same in all of them."""
    rows = zip_longest(*(call.split("; ") for call in calls), fillvalue="nothing further")
    index, facts = next((index, facts) for index, facts in enumerate(rows) if len(set(facts)) > 1)
    names = [f"{call.partition(':')[0]}: " if index else "" for call in calls]
    return [name + fact for name, fact in zip(names, facts, strict=True)]


def forget_calls(ranks: Sequence[int]) -> None:
    """Forgets the calls in all groups of these ranks (global numbers): the step was aborted, so they need not agree."""
    for group in _groups_with_calls(ranks):
        group.state.calls.clear()


def calls_that_differ(ranks: Sequence[int], limit_seconds: float) -> str:
    """Returns the first call in which ranks differ since they last compared, by rank; "" where there is none.

    Each group that has made calls compares its own, because others may have inputs of other sizes.

    Args:
        ranks: Global numbers; groups that have a rank outside of them are left out. They all call this together.
        limit_seconds: How long to wait for a rank.

    Raises:
        TransferError: A rank did not come.
    """
    difference = ""
    for group in _groups_with_calls(ranks):
        fingerprint = group.state.calls.fingerprint
        if len({row[0] for row in exchange([fingerprint], group, limit_seconds=limit_seconds)}) > 1:
            text = json.dumps(list(group.state.calls.last))
            texts = exchange_text(text, group, limit_seconds=limit_seconds)
            rows = zip_longest(*map(json.loads, texts), fillvalue="no further call")
            calls = next((row for row in rows if len(set(row)) > 1), ("calls before the last 1,000",) * group.size)
            titles = [f"rank {rank}: {call}" for rank, call in zip(group.ranks, calls, strict=True)]
            difference = difference or "; ".join(titles)
        group.state.calls.clear()
    return difference


def _groups_with_calls(ranks: Sequence[int]) -> list[Group]:
    """The groups of some of these ranks that have compared a call, in one order on all ranks."""
    groups = [group_of(group) for group in compat.process_groups() if group_state(group).compared_calls]
    return sorted((group for group in groups if {*group.ranks} <= {*ranks}), key=lambda group: group.ranks)
