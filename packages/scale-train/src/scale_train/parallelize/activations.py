"""Activation checkpointing and offload of blocks, by the options of the command line."""

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
    """Checkpoints each block, before or after it is sharded; a budget is for `plan_blocks`."""
    if budget_bytes(choice) is not None:
        return
    assert choice in CHOICES, choice
    for block in model.blocks:
        if choice == "none":
            apply_checkpointing(block, "offload" if offload else "keep")
        else:
            apply_checkpointing(block, "recompute" if choice == "all" else "selective", offload_inputs=offload)


def plan_blocks(model: GPT, options: Options, group: Group) -> None:
    """With a budget, plans what each block keeps: measured on rank 0, the same on all ranks; an InputError on all."""
    budget = budget_bytes(options.parallel.checkpoint_activations)
    if budget is None:
        return
    device = model.embedding.weight.device
    sequences = max(1, options.data.batch // (group.size * options.parallel.accumulate))
    tokens = torch.zeros(sequences, options.data.sequence, dtype=torch.int64, device=device)
    # fp32 master weights are the model's own; Adam keeps two more numbers for each, sharded or not.
    shared = options.parallel.parallel in ("oss", "sharded-ddp")
    adam_bytes = sum(8 * param.numel() for param in model.parameters()) // (group.size if shared else 1)
    plan: MemoryPlan | None = None
    problem = ""
    if group.rank == 0:
        try:
            plan = plan_memory(model, (tokens, tokens), budget, other_bytes=adam_bytes)
        except BudgetError as error:
            problem = (
                f"no plan fits: a step, with Adam's state, takes at least {error.minimum_bytes} bytes; write "
                f"--checkpoint-activations budget:{error.minimum_bytes}B, or take a smaller --batch or --sequence"
            )
    if group.process_group is not None:
        message: list[Any] = [plan, problem]
        dist.broadcast_object_list(message, group_src=0, group=group.process_group)
        plan, problem = message
    if plan is None:
        raise InputError(f"--checkpoint-activations {options.parallel.checkpoint_activations}: {problem}")
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
