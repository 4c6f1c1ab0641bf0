"""`ShardOptions`: what `fully_shard` takes beyond torch's arguments, in one object that all its doors share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from scale_core.arguments import checked_arguments
from scale_core.consistency.divergence import check_interval
from scale_core.flat.layout import Atom
from scale_fsdp.communication import CommunicationPolicy, check_communication

AtomChoice: TypeAlias = Atom | Callable[[str, tuple[int, ...]], Atom]
Init: TypeAlias = Callable[[nn.Module], Any] | Literal[False] | None


@checked_arguments(own="error_if_nonfinite init communication")
@dataclass(frozen=True)
class ShardOptions:
    """How `fully_shard` shards a unit, beyond torch's arguments; `fully_shard_modules` gives one to all units.

        >>> import torch
        >>> from scale_fsdp import ShardOptions, fully_shard
        >>> options = ShardOptions(limit_seconds=30, error_if_nonfinite=True)
        >>> model = fully_shard(torch.nn.Linear(4, 2), options=options)

    Attributes:
        flatten_parameters: Show the optimizer one flat tensor per dtype and kind (trained or frozen) in place of
            one local shard per parameter.
        atom: The block that is never cut between ranks: "auto", "element", "row", "parameter" or `BlockAtom(k)` of
            `scale_core.flat.layout`; or a function of a parameter's name and shape that returns one of these.
        buffer_dtype: The dtype of the module's floating-point buffers. None leaves them, which is nearly always right,
            because rotary frequencies and running statistics need fp32.
        compute_device: The device that computes. None is the mesh's accelerator, or the device of the parameters. For
            shards on the host, None is this rank's accelerator.
        init: Initializes parameters and buffers that are on the meta device. It uses memory of the compute device, and
            frees it after sharding. None is each module's own `reset_parameters`; a function is called with each module
            that directly has such parameters or buffers. False leaves the shards on meta and sends nothing. Then call
            `model.to_empty(device=...)` for memory, and load a checkpoint or call `reset_parameters()` for values. If
            `fully_shard` is called under `torch.device("meta")`, None is False.
        sync_module_states: Start from rank 0's parameters and buffers on all ranks. With False, all ranks must have
            built equal ones.
        limit_seconds: The longest wait for a rank, before all ranks raise. None is the process group's own time limit,
            at most ten minutes. The outermost unit's counts.
        error_if_nonfinite: If an output of a unit or a local gradient is infinite or NaN on one rank, abort the
            training step on all ranks. That rank raises a FloatingPointError, which names rank, unit and parameter. It
            costs one more read of these tensors, and two waits for the device per step. Not together with a gradient
            scaler, which needs infinite gradients to find its scale. The outermost unit's counts.
        check_replicas_every: With hybrid sharding, the number of training passes between comparisons of the shards'
            copies, beginning with the first pass; 0 is never. None is 100, or the value of
            `SCALE_CHECK_REPLICAS_EVERY`. A difference is a `DivergenceError`. The outermost unit's counts.
        communication: A `CommunicationPolicy`: parameters and gradients are sent in 8 or 4 bits. Losses are then
            near the losses of plain PyTorch, but not equal to them.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A device that torch does not know, or an interval below zero.

    See also: [the guide to FSDP](../guides/fsdp.md).
    """

    flatten_parameters: bool = False
    atom: AtomChoice = "auto"
    buffer_dtype: torch.dtype | None = None
    compute_device: torch.device | str | None = None
    init: Init = None
    sync_module_states: bool = True
    limit_seconds: float | None = None
    error_if_nonfinite: bool = False
    check_replicas_every: int | None = None
    communication: CommunicationPolicy | None = None

    def __post_init__(self) -> None:
        if self.init is not None and self.init is not False and not callable(self.init):
            raise TypeError(
                "init: expected a function of a module, None (its own reset_parameters) or False (no values yet), got "
                f"{self.init!r}"
            )
        check_interval(self.check_replicas_every)
        if not isinstance(self.error_if_nonfinite, bool):
            raise TypeError(f"error_if_nonfinite: expected True or False, got {self.error_if_nonfinite!r}")
        check_communication(self.communication)
