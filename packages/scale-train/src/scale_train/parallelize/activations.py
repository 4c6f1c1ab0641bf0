"""What the blocks of a model do with their activations, as the command line asks for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from scale_checkpoint import BudgetError, MemoryPlan, apply_checkpointing, apply_plan, plan_memory
from scale_core.comm.group import Group
from scale_train.config.options import Options
from scale_train.config.resolve import budget_bytes
from scale_train.errors import InputError
from scale_train.model import GPT

CHOICES = ("none", "all", "selective")


def checkpoint_blocks(model: GPT, choice: str, *, offload: bool) -> None:
    """Checkpoints each block of a model, before or after it is spread over ranks.

    Args:
        model: Changed in place.
        choice: One of `CHOICES`: keep everything, nothing but each block's input, or that and what is dear. A budget is
            for `plan_blocks`.
        offload: Move what is kept to the host until the backward pass.
    """
    if budget_bytes(choice) is not None:
        return
    assert choice in CHOICES, choice
    for block in model.blocks:
        if choice == "none":
            apply_checkpointing(block, "offload" if offload else "keep")
        else:
            apply_checkpointing(block, "recompute" if choice == "all" else "selective", offload_inputs=offload)


def plan_blocks(model: GPT, options: Options, group: Group) -> None:
    """Plans what each block keeps, if a budget is asked for: measured on rank 0, and the same on all ranks.

    Args:
        model: Whole, where it will train; changed in place.
        options: Say the budget, and the shape of a micro-batch.
        group: All ranks.

    Raises:
        InputError: No plan fits the budget. On all ranks.
    """
    budget = budget_bytes(options.parallel.checkpoint_activations)
    if budget is None:
        return
    device = model.embedding.weight.device
    sequences = max(1, options.data.batch // (group.size * options.parallel.accumulate))
    tokens = torch.zeros(sequences, options.data.sequence, dtype=torch.int64, device=device)
    # fp32 master weights are the model's own; Adam keeps two more numbers for each, on one rank or shared by all.
    shared = options.parallel.parallel in ("oss", "sharded-ddp")
    adam_bytes = sum(8 * param.numel() for param in model.parameters()) // (group.size if shared else 1)
    plan: MemoryPlan | None = None
    told = ""
    if group.rank == 0:
        try:
            plan = plan_memory(model, (tokens, tokens), budget, beside_bytes=adam_bytes)
        except BudgetError as error:
            told = (
                f"no plan fits: a step, with Adam's state, takes at least {error.least_bytes} bytes; write "
                f"--checkpoint-activations budget:{error.least_bytes}B, or take a smaller --batch or --sequence"
            )
    if group.process_group is not None:
        said: list[Any] = [plan, told]
        dist.broadcast_object_list(said, group_src=0, group=group.process_group)
        plan, told = said
    if plan is None:
        raise InputError(f"--checkpoint-activations {options.parallel.checkpoint_activations}: {told}")
    apply_plan(model, plan)


def with_bare_flag(arguments: list[str]) -> list[str]:
    """Returns a command line in which `--checkpoint-activations` alone says "all"."""
    spelled = []
    for place, word in enumerate(arguments):
        spelled.append(word)
        following = arguments[place + 1] if place + 1 < len(arguments) else "--"
        if word == "--checkpoint-activations" and following.startswith("--"):
            spelled.append("all")
    return spelled
