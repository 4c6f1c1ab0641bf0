"""The model in stages on several ranks, with the face that the loop, the evaluation and the checkpoints know.

Every rank builds the whole model, which is cut at blocks, and keeps its stages. All ranks see the whole batch; the
pipeline cuts it into micro-batches. What a checkpoint holds has the names of the whole model, a tied weight its first
one, so that any number of stages goes on from it, and any other way to spread a model too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from scale_core.exchange import exchange_text
from scale_core.group import Group
from scale_core.state import GROUPS
from scale_pipe import DistributedPipe, split
from scale_train.model import GPT, IGNORED
from scale_train.options import ParallelOptions, stages_per_rank


class Pipeline(nn.Module):
    """A GPT in stages. All ranks call its methods together, with the same batch.

    Args:
        model: Whole, on any device; equal on all ranks.
        options: Say the schedule, the stages and the micro-batches.
        group: The ranks, in the order of the stages.
        device: Of this rank.
    """

    def __init__(self, model: GPT, options: ParallelOptions, group: Group, device: torch.device) -> None:
        super().__init__()
        self.config, self.group, self.device = model.config, group, device
        self.shapes = {name: list(param.shape) for name, param in model.named_parameters()}
        # The name under which a checkpoint has each parameter: a tied one stands there once.
        first = {param: name for name, param in model.named_parameters()}
        self._saved_names = {name: first[param] for name, param in model.named_parameters(remove_duplicate=False)}
        each = stages_per_rank(options, group.size)
        self.pipe = DistributedPipe(
            split(model, cuts(len(model.blocks), each * group.size)),
            options.schedule,
            chunks=options.chunks,
            stages_per_rank=each,
            group=group,
            device=device,
        )

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Adds the gradients of a batch's mean loss to this rank's parameters; returns the loss, a scalar.

        Args:
            tokens: `[batch, sequence]`, int64.
            targets: The same shape.
        """
        return self.pipe.step(tokens.to(self.device), targets.to(self.device))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """Logits or loss of a batch, without gradients, the same on all ranks; see `GPT.forward`.

        Args:
            tokens: `[batch, sequence]`, int64.
            targets: The same shape.
            reduction: Of the loss.
        """
        found = self.pipe.evaluate(tokens.to(self.device))
        last = self.pipe.schedule.placement.rank_of[-1]
        shape = (*tokens.shape, self.config.vocabulary)
        logits = torch.empty(shape, device=self.device) if found is None else found.float().contiguous()
        if targets is None:
            return self._from(last, logits)
        loss = logits.new_zeros(())
        if found is not None:
            of = targets.to(self.device).flatten()
            loss = functional.cross_entropy(logits.flatten(0, 1), of, ignore_index=IGNORED, reduction="sum")
        loss = self._from(last, loss)
        return loss / targets.numel() if reduction == "mean" else loss

    def clip(self, max_norm: float) -> Tensor:
        """Scales the gradients of all ranks by their common norm; returns the norm before, a scalar."""
        return self.pipe.clip_grad_norm_(max_norm)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters by the names that checkpoints know."""
        for name, param in self.pipe.named_parameters(remove_duplicate=remove_duplicate):
            yield f"{prefix}.{self._saved_names[name]}".lstrip("."), param

    # What is saved. Each rank has its own keys; the optimizer's groups are those of all.

    def whole_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the optimizer's groups with the parameters of all ranks, in the order of the model.

        Args:
            groups: As JSON, with this rank's names.
        """
        by_rank = [json.loads(text) for text in exchange_text(json.dumps(groups), self.group)]
        whole = []
        for number, mine in enumerate(groups):
            names = {name for theirs in by_rank for name in theirs[number]["params"]}
            whole.append({**mine, "params": [name for name in self.shapes if name in names]})
        return whole

    def part_of(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what of a whole state is this rank's.

        Args:
            saved: As `scale_core.state.sharded_state_dict` names it.
        """
        own = {name for name, _ in self.named_parameters()}
        part = {}
        for key, value in saved.items():
            kind, _, name = key.partition(".")
            if key == GROUPS:
                part[key] = [{**each, "params": [name for name in each["params"] if name in own]} for each in value]
            elif name in own or (kind == "optim" and name.rpartition(".")[0] in own) or kind not in ("model", "optim"):
                part[key] = value
        return part

    def _from(self, rank: int, tensor: Tensor) -> Tensor:
        """Returns a rank's tensor, on all of them."""
        if self.group.size > 1:
            dist.broadcast(tensor, self.group.ranks[rank], group=self.group.process_group)
        return tensor


def cuts(num_blocks: int, num_stages: int) -> list[str]:
    """Returns the blocks at which stages begin: as even as can be, the later ones with one more.

        >>> cuts(10, 4)
        ['blocks.2', 'blocks.5', 'blocks.7']

    Args:
        num_blocks: Of the model.
        num_stages: At most as many.
    """
    return [f"blocks.{stage * num_blocks // num_stages}" for stage in range(1, num_stages)]
