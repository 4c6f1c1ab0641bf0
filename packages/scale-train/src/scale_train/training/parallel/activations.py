"""What each block keeps for the backward pass: all, nothing, a selection, or as much as a budget allows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from scale_checkpoint import BudgetError, apply_checkpointing, apply_plan, plan_memory
from scale_checkpoint.planner.plan import MemoryPlan
from scale_checkpoint.wrapper import How
from scale_core.comm.group import Group, group_of
from scale_core.comm.mesh import ParallelDims
from scale_core.consistency.all_ranks import CollectiveCall
from scale_train.configuration.derived import budget_bytes
from scale_train.errors import InputError
from scale_train.model.gpt import GPT
from scale_train.options import Options


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, GPT):
        return list(model.blocks)
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


def checkpoint_blocks(model: nn.Module, choice: str, *, offload: bool) -> None:
    """Checkpoints each block, before or after it is sharded; a budget is for `plan_blocks`."""
    if budget_bytes(choice) is None:
        hows: dict[str, How] = {"none": "offload" if offload else "keep", "all": "recompute", "selective": "selective"}
        for block in _blocks_of(model):
            apply_checkpointing(block, hows[choice], offload_inputs=offload)


def plan_blocks(model: GPT, options: Options, dims: ParallelDims, group: Group) -> None:
    """With a budget, plans what each block keeps, the same on all ranks; an InputError on all.

    Rank 0 measures it. With experts all ranks measure together, because their layers exchange tokens. Tokens are
    random, because equal tokens would all go to the same experts.
    """
    budget = budget_bytes(options.parallel.checkpoint_activations)
    if budget is None:
        return
    sequences = max(1, options.data.batch // (dims.size("batch") * options.parallel.accumulate))
    generator = torch.Generator().manual_seed(group.rank)
    drawn = torch.randint(model.config.vocabulary, (sequences, options.data.sequence), generator=generator)
    tokens = drawn.to(model.embedding.weight.device)
    together = group_of(dims, "loss") if model.config.experts else Group()
    # fp32 master weights are the model's own; Adam keeps two more numbers for each, sharded or not.
    shared = options.parallel.parallel in ("oss", "sharded-ddp")
    adam_bytes = sum(8 * param.numel() for param in model.parameters()) // (dims.size("edp") if shared else 1)
    plan: MemoryPlan | None = None
    problem = ""
    if group.rank == 0 or together.size > 1:
        try:
            plan = plan_memory(model, (tokens, tokens), budget, other_bytes=adam_bytes, process_group=together)
        except BudgetError as error:
            problem = (
                f"no plan fits: a step, with Adam's state, takes at least {error.minimum_bytes} bytes; write "
                f"--checkpoint-activations budget:{error.minimum_bytes}B, or take a smaller --batch or --sequence"
            )
    block_plan = plan
    plan, problem = CollectiveCall(group, "planning memory", InputError).rank0(lambda: (plan, problem))
    if plan is None:
        raise InputError(f"--checkpoint-activations {options.parallel.checkpoint_activations}: {problem}")
    # Experts that do not divide evenly have other shapes on other ranks; what is done with each block is the same.
    if block_plan is not None and together.size > 1:
        plan = replace(plan, profile=block_plan.profile)
    apply_plan(model, plan)
