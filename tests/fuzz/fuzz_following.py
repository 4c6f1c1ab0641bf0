"""Follows a program in plain PyTorch and as our packages run it, step by step, and says where they first differ.

The plain run is one process that computes each rank's passes one after the other. Its gradients are what data
parallelism defines: those of each rank by itself, added up in the order of the ranks and divided by their number.

How equal they must be, in units in the last place of the least precise dtype and relative to 1 and the largest element:

- 2**8 where the arithmetic is the same, up to what the place of a tensor in memory does to the order in which a
  matrix product adds up (6e-14 in fp64);
- 2**18 where sums of some hundred terms are in another order, as where layers are divided or gradients are clipped
  (6e-11), through a few steps whose optimizers amplify no rounding (`OPTIMIZERS`);
- with AdaScale, whose gains are differences of sums, 1e-5.

A true defect is larger by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from fuzz_programs import Evaluate, Fail, Freeze, Program, Reload, Train, Wrapping
from fuzz_wrappings import Wrapped, optimizer_of, read_into, scheduler_of
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_adascale import AdaScale
from scale_check.comparison import BUG_RATIO, compare
from scale_check.fuzz.models import Boom, Net, batch_of, build, loss_of, tensors_of
from scale_check.recording import Key, Phase, Recording
from scale_core.comm.group import Group

ALIKE, SLACK = 2**8, 2**18
EXPLODED = 1e6
"""Losses and norms from which on a program is not followed: it has diverged, and what is left is amplified rounding."""
SUMS_IN_ORDER = {"fully_shard", "FullyShardedDataParallel", "sharded_ddp"}
"""What adds gradients up in the order of the ranks, however many there are."""


class Plain:
    """The program in plain PyTorch."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank  # along the data axis
        self.net: Net = build(program.model, program.seed)
        self.now(program.wrapping)
        self.optimizer = self.optimizer_for(self.net)
        self.scheduler = scheduler_of(program, self.optimizer)

    def optimizer_for(self, net: nn.Module) -> Optimizer:
        """What steps the parameters of a plain model; each pass of each rank is a gradient to AdaScale."""
        program = self.program
        kind = getattr(torch.optim, program.optimizer)
        optimizer = optimizer_of(program, net.named_parameters(), lambda params: kind(params, **program.options))
        if not program.adascale:
            return optimizer
        passes = next(step.passes for step in program.steps if isinstance(step, Train))
        accumulated = passes * self.chunks * self.num_ranks
        return AdaScale(optimizer, num_gradients_to_accumulate=accumulated, process_group=Group())

    def now(self, wrapping: Wrapping) -> None:
        """Begins with what a wrapping makes of the data: how many ranks, micro-batches, and whose buffers."""
        self.num_ranks = wrapping.mesh[1]
        self.chunks = wrapping.pipeline.chunks if wrapping.pipeline else 1
        self.takes_first = bool(wrapping.options.get("broadcast_buffers")) and wrapping.pipeline is None
        self.begins_step = True
        first = {name: buffer.clone() for name, buffer in self.net.named_buffers()}
        self.buffers = [{name: buffer.clone() for name, buffer in first.items()} for _ in range(self.num_ranks)]

    def _run(self, batch: Tensor, rank: int) -> Any:
        """A forward pass of one rank, with the buffers of that rank."""
        for name, buffer in self.net.named_buffers():
            buffer.data = self.buffers[rank][name].clone()
        try:
            return self.net(batch)
        finally:
            self.buffers[rank] = {name: buffer.detach().clone() for name, buffer in self.net.named_buffers()}

    def _begin_pass(self, *, reduces: bool) -> None:
        """What wrappers do with buffers before a forward pass that follows one that reduces."""
        if self.takes_first and self.begins_step:
            self.buffers = [dict(self.buffers[0]) for _ in range(self.num_ranks)]
        self.begins_step = reduces

    def train(self, number: int, step: Train) -> tuple[list[float], float | None]:
        """One step; returns the losses of `rank`'s passes, and the norm where it clips."""
        program, found = self.program, []
        self.net.train(not step.evaluating)
        params = [param for param in self.net.parameters() if param.requires_grad]
        local: list[list[Tensor | None]] = [[None] * len(params) for _ in range(self.num_ranks)]
        for turn in range(step.passes):
            reduces = not step.no_sync or turn == step.passes - 1
            self._begin_pass(reduces=reduces)
            for rank in range(self.num_ranks):
                batch = batch_of(program.model, program.samples * self.chunks, program.seed, number, turn, rank)
                torch.manual_seed(hash((number, turn, rank)) % 2**31)
                total = 0.0
                for part in batch.chunk(self.chunks):
                    loss = loss_of(self._run(part, rank)) / step.passes / self.chunks
                    total += float(loss.detach())
                    if program.adascale:
                        (loss / self.num_ranks).backward()
                        continue
                    gradients = torch.autograd.grad(loss, params, allow_unused=True)
                    local[rank] = [_plus(one, other) for one, other in zip(local[rank], gradients, strict=True)]
                if rank == self.rank:
                    found.append(total)
            if reduces and not program.adascale:
                self._reduce(params, local)
                local = [[None] * len(params) for _ in range(self.num_ranks)]
        norm = None
        if step.clip is not None:
            norm = float(nn.utils.clip_grad_norm_(self.net.parameters(), step.clip, step.norm_type))
        self.optimizer.step()
        if step.schedule and self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=step.set_to_none)
        return found, norm

    def _reduce(self, params: list[nn.Parameter], local: list[list[Tensor | None]]) -> None:
        """Adds the mean over the ranks to `grad`; who has not used a parameter counts as zeros."""
        for param, *each in zip(params, *local, strict=True):
            if all(one is None for one in each):
                continue
            mean = sum(torch.zeros_like(param) if one is None else one for one in each) / self.num_ranks
            param.grad = _plus(param.grad, mean)

    def fail(self, number: int, step: Fail) -> None:
        """The forward passes that raise; buffers of the blocks before are changed."""
        self._begin_pass(reduces=False)
        self.begins_step = True
        self.net.train()
        self.net.fails_at = step.block
        for rank in range(self.num_ranks):
            batch = batch_of(self.program.model, self.program.samples, self.program.seed, number, 0, rank)
            torch.manual_seed(hash((number, 0, rank)) % 2**31)
            with suppress(Boom):
                self._run(batch, rank)
        self.net.fails_at = None
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, number: int, step: Evaluate) -> list[Tensor]:
        """The tensors of the output of `rank`."""
        program = self.program
        self._begin_pass(reduces=False)
        self.net.train(not step.evaluating)
        outputs = []
        for rank in range(self.num_ranks):
            batch = batch_of(program.model, program.samples * self.chunks, program.seed, number, 0, rank)
            torch.manual_seed(hash((number, 0, rank)) % 2**31)
            parts = [list(tensors_of(self._run(part, rank))) for part in batch.chunk(self.chunks)]
            outputs.append([torch.cat(each) for each in zip(*parts, strict=True)])
        return outputs[self.rank]

    def freeze(self, step: Freeze) -> None:
        """Freezes parameters, or thaws them."""
        self.optimizer.zero_grad()
        for name, param in self.net.named_parameters():
            if name.startswith(f"{step.prefix}."):
                param.requires_grad_(step.trains)
        self.optimizer.zero_grad()

    def state(self, *, saved: bool = False) -> dict[str, Tensor]:
        """Parameters, and the buffers of `rank`; of the first rank, as a snapshot has them, where `saved`."""
        buffers = self.buffers[0 if saved else self.rank]
        return {name: buffers.get(name, tensor) for name, tensor in dict(self.net.state_dict()).items()}


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


class Comparison:
    """Records what the program computes in plain PyTorch and wrapped, step by step, and compares by scale-check."""

    def __init__(self, program: Program, net: nn.Module) -> None:
        self._plain, self._wrapped = Recording(), Recording()
        self._where: list[str] = []
        eps = max(torch.finfo(param.dtype).eps for param in net.parameters())
        clips = any(isinstance(step, Train) and step.clip is not None for step in program.steps)
        alike = not clips and all(
            each.pipeline is None
            and each.mesh[0] * each.mesh[2] == 1
            and (each.mesh[1] <= 2 or each.kind in SUMS_IN_ORDER)
            for each in program.wrappings
        )
        self.tolerance = eps * (ALIKE if alike else SLACK)
        if program.adascale:
            self.tolerance = max(self.tolerance, 1e-5)

    def begin(self, where: str) -> None:
        """What comes now belongs here."""
        self._where.append(where)

    def add(self, name: str, found: Any, expected: Any) -> None:
        """Adds a tensor or a number of both; None where one has none. Another dtype is another name."""
        tensors = [None if value is None else _as_tensor(value) for value in (expected, found)]
        for recording, tensor in zip((self._plain, self._wrapped), tensors, strict=True):
            if tensor is not None:
                alike = all(other is None or other.dtype == tensor.dtype for other in tensors)
                key = Key(len(self._where), Phase.BUFFER, name if alike else f"{name} in {tensor.dtype}")
                recording.tensors[key] = tensor

    def add_state(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, in_part: bool = False) -> None:
        """Adds states, name by name; `in_part` where one rank has but some of the names."""
        for name in found if in_part else found | expected:
            self.add(name, found.get(name), expected.get(name))

    def first(self) -> str | None:
        """Says what differs first, or None."""
        rounding = {
            key: self.tolerance * (1 + _largest(tensor)) / BUG_RATIO for key, tensor in self._plain.tensors.items()
        }
        missing = next(iter(self._wrapped.tensors.keys() ^ self._plain.tensors.keys()), None)
        if missing is not None:
            return f"{self._where[missing.step - 1]}: {missing.name}: on one side alone"
        difference = compare(self._plain, [self._wrapped], rounding).first
        if difference is None:
            return None
        off = difference.why or f"off by {abs(difference.expected - difference.actual):.3g} at {list(difference.index)}"
        return f"{self._where[difference.step - 1]}: {difference.name}: {off}"


def _as_tensor(value: Any) -> Tensor:
    return value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def follow(program: Program, folder: Path) -> str | None:
    """Runs a program both ways; returns what differs first, or None. All ranks call it together."""
    wrapped = Wrapped(program, program.wrapping, program.seed)
    plain = Plain(program, wrapped.rank)
    comparison = Comparison(program, plain.net)
    in_part = wrapped.pipe is not None
    comparison.begin("at first")
    comparison.add_state(wrapped.state(folder, 1000), plain.state(saved=wrapped.is_divided), in_part=in_part)
    for number, step in enumerate(program.steps):
        comparison.begin(f"step {number}, {type(step).__name__}")
        if isinstance(step, Train):
            expected, norm = plain.train(number, step)
            losses, found = wrapped.train(number, step)
            if not all(abs(loss) < EXPLODED for loss in [*expected, norm or 0.0]):
                return comparison.first()
            comparison.add("losses", losses, expected)
            comparison.add("norm", found, norm)
            if program.adascale:
                comparison.add("gain", wrapped.optimizers[0].gain(), plain.optimizer.gain())
        elif isinstance(step, Evaluate):
            expected_output, output = plain.evaluate(number, step), wrapped.evaluate(number, step)
            if output is not None:
                for place, (one, other) in enumerate(zip(tensors_of(output), expected_output, strict=True)):
                    comparison.add(f"output {place}", one, other)
        elif isinstance(step, Fail):
            plain.fail(number, step)
            wrapped.fail(number, step)
        elif isinstance(step, Freeze):
            plain.freeze(step)
            wrapped.freeze(step)
        else:
            wrapped = _reloaded(program, wrapped, plain, step, folder, number)
        expected = plain.state(saved=wrapped.is_divided)
        comparison.add_state(wrapped.state(folder, 1001 + number), expected, in_part=in_part)
    _compare_saved(program, wrapped, plain, comparison, folder)
    return comparison.first()


def _reloaded(program: Program, wrapped: Wrapped, plain: Plain, step: Reload, folder: Path, number: int) -> Wrapped:
    """The model under another wrapping, with what the one before has saved."""
    wrapped.save(folder, number, with_optimizer=True)
    fresh = Wrapped(program, step.wrapping, step.seed)
    for before in program.steps[:number]:
        if isinstance(before, Freeze):
            fresh.freeze(before)
    fresh.load(folder, number)
    for scheduler in fresh.schedulers:  # As many as there are optimizers now; all were stepped alike.
        scheduler.load_state_dict(wrapped.schedulers[0].state_dict())
    for name, buffer in plain.net.named_buffers():
        buffer.data = plain.buffers[0][name].clone()
    plain.optimizer.zero_grad()  # Gradients are not saved.
    plain.rank = fresh.rank
    plain.now(step.wrapping)
    return fresh


def _compare_saved(program: Program, wrapped: Wrapped, plain: Plain, comparison: Comparison, folder: Path) -> None:
    """What is saved at the end loads into a plain model and its optimizer, and is what these have."""
    wrapped.save(folder, 999, with_optimizer=True)
    net = build(program.model, 2)
    for param, other in zip(net.parameters(), plain.net.parameters(), strict=True):
        param.requires_grad_(other.requires_grad)
    optimizer = plain.optimizer_for(net)
    scheduler_of(program, optimizer)
    read_into(net, optimizer, folder, 999)
    comparison.begin("saved")
    comparison.add_state(dict(net.state_dict()), plain.state(saved=True))
    names = {param: name for name, param in plain.net.named_parameters()}
    states = {names[param]: state for param, state in plain.optimizer.state.items() if state}
    for name, param in net.named_parameters():
        found, expected = optimizer.state.get(param, {}), states.get(name, {})
        for key in sorted(found.keys() | expected.keys()):
            comparison.add(f"{name}.{key}", found.get(key), expected.get(key))
    for place, (one, other) in enumerate(zip(optimizer.param_groups, plain.optimizer.param_groups, strict=True)):
        comparison.add(f"learning rate {place}", one["lr"], other["lr"])
