"""Comparisons of the training of tensor parallel ranks, at a place that all of them reach together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import exchange, fingerprint_of
from scale_core.comm.group import Group
from scale_core.compat import active_fake_mode
from scale_core.consistency.contract import Contract
from scale_core.consistency.contract_errors import SAME_TRAINED
from scale_core.errors import TransferError
from scale_core.shard import Placement, shard_of
from scale_tp.failed_pass import add_explanation

FIRST_FORWARDS, EVERY_FORWARDS = 4, 10
"""Forwards in which optimizers' steps are compared each time, and the interval at which they are compared later."""


def compare_optimizer_steps(contract: Contract, named_params: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
    """Compares the steps since the last comparison, and which of these parameters train.

    Raises ContractError on all ranks where they differ.
    """
    if contract.group.backend == "fake" or active_fake_mode() is not None:
        return
    steps = contract.recorded_steps
    assert steps is not None
    trained = [name for name, param in named_params() if param.requires_grad]
    # No other record has so many integers, so that none of another check is taken for this one.
    record = [steps.status(), fingerprint_of(*trained), *[0] * 6]
    try:
        rows = exchange(record, contract.group)
    except TransferError as error:
        add_explanation(error, contract.group)
        raise
    statuses, fingerprints = ([row[column] for row in rows] for column in range(2))
    if len(set(fingerprints)) > 1:
        contract.check_equal("which parameters train", trained, SAME_TRAINED)
    if steps.differ(statuses):
        contract.named_params = named_params
        contract.compare_steps()
    else:
        steps.end(statuses)


def is_replica(param: Tensor, group: Group) -> bool:
    """Whether a parameter is marked as one that each rank of the group has in full."""
    # A gathered parameter has no mark until it is released.
    shard = shard_of(param)
    axes = () if shard is None else shard.axes
    return any(axis.group == group and axis.placement is Placement.REPLICATE for axis in axes)


def is_reproducible(tensor: Tensor) -> bool:
    """Whether ranks that compute the same with a tensor get the same bits.

    On accelerators sums by atomics may differ, so that replicas of tensor parallel ranks, which nobody averages, drift.
    """
    return tensor.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
