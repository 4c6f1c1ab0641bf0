"""recovery.py: one rank fails anywhere in a step; all ranks abort it, and train on as if it had not been."""

from __future__ import annotations

import copy
import functools
import gc
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from fsdp_cases import differing_grads, differing_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import scale_core.flat.buffer
import scale_core.flat.reduction
import scale_core.quantization.collectives
import scale_fsdp.runtime.recovery
from scale_core.comm.group import group_of
from scale_core.errors import ContractError, ScaleDistributedError
from scale_core.hooks.autograd import register_grad_published_hook
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import run_ranks
from scale_fsdp import CommunicationPolicy, StepError, fully_shard
from scale_fsdp.runtime.unit import units_in

WIDTH = 5


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("broken in backward")


HOOKS = ("forward pre-hook", "forward hook", "backward pre-hook", "backward hook")
IN_BACKWARD = ("backward", "backward pre-hook", "backward hook")


def _fail(point: str, block: nn.Module, *_: Any) -> None:
    if block.fails == point:
        block.fails = ""
        raise ValueError(f"broken in {point}")


class Block(nn.Module):
    """Fails on purpose, once, where `fails` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.fails = ""

    def hook(self) -> None:
        self.register_forward_pre_hook(functools.partial(_fail, HOOKS[0]))
        self.register_forward_hook(functools.partial(_fail, HOOKS[1]))
        self.register_full_backward_pre_hook(functools.partial(_fail, HOOKS[2]))
        self.register_full_backward_hook(functools.partial(_fail, HOOKS[3]))

    def forward(self, x: Tensor) -> Tensor:
        recomputing = torch._C._current_graph_task_id() != -1
        if self.fails == ("recomputation" if recomputing else "forward"):
            self.fails = ""
            raise ValueError(f"broken in {'recomputation' if recomputing else 'forward'}")
        x = x + self.second(torch.tanh(self.first(x)))
        if self.fails == "backward" and not recomputing:
            self.fails = ""
            x = _Breaks.apply(x)
        return x


class Net(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.checkpointed = checkpointed
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        x = self.head(x)
        if self.fails:
            self.fails = ""
            raise MemoryError("broken in the root")
        return x


@dataclass(frozen=True)
class Failure:
    """Where a step fails.

    Attributes:
        where: "forward", "backward" or "recomputation" of a block, "root", or one of `HOOKS`.
        block: Of which block.
        rank: On which rank.
        step: In which step; the first is 0.
    """

    where: str
    block: int = 1
    rank: int = 1
    step: int = 3
    reshard: bool | int = True
    accumulate: int = 1
    no_sync: bool = False
    at_micro_batch: int = 0


def data(step: int, rank: int, micro: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def shard(plain: Net, failure: Failure) -> Net:
    """A sharded copy."""
    model = copy.deepcopy(plain)
    hooked_before, hooked_after = (model.blocks[2], model.blocks[1]) if failure.where in HOOKS else (None, None)
    for block in model.blocks:
        if block is hooked_before:
            block.hook()
        fully_shard(block, reshard_after_forward=failure.reshard)
        if block is hooked_after:
            block.hook()
    return fully_shard(model, reshard_after_forward=failure.reshard)


def fail_and_go_on(failure: Failure) -> list[str]:
    """Trains with a failing step, and beside it one process that never meets it; returns what differs."""
    rank, wrong = group_of().rank, []
    torch.manual_seed(0)
    plain = Net(failure.where == "recomputation")
    model = shard(plain, failure)
    optimizer, plain_optimizer = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain))
    for step in range(failure.step + 3):
        fails = step == failure.step
        raised = train(model, step, failure, fails=fails and rank == failure.rank)
        if fails:
            wrong += check(raised, failure)
            if any(param.grad is not None for param in model.parameters()) and failure.accumulate == 1:
                wrong.append("a gradient of the step that was aborted")
            model.zero_grad()
            continue
        if raised is not None:
            wrong.append(f"step {step}: {raised!r}")
        expected = mean_of(plain, whole_steps([step], failure))
        for name, grad in split(expected, plain).items():
            plain.get_parameter(name).grad = grad
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    return [f"{failure}: {line}" for line in wrong + differing_weights(model, plain)]


def train(model: nn.Module, step: int, failure: Failure, *, fails: bool) -> Exception | None:
    for micro in range(failure.accumulate):
        if fails and micro == failure.at_micro_batch:
            (model if failure.where == "root" else model.blocks[failure.block]).fails = failure.where
        try:
            if failure.no_sync and micro < failure.accumulate - 1:
                with model.no_sync():
                    model(data(step, group_of().rank, micro)).square().mean().backward()
            else:
                model(data(step, group_of().rank, micro)).square().mean().backward()
        except Exception as error:
            return error
    return None


def check(raised: Exception | None, failure: Failure) -> list[str]:
    """The failing rank raises its own error, with a note; the others say whose it was."""
    mine = group_of().rank == failure.rank
    text = str(raised) + "".join(getattr(raised, "__notes__", []))
    expected = MemoryError if failure.where == "root" else ValueError
    if not isinstance(raised, expected if mine else StepError):
        return [f"raised {raised!r}"]
    if mine and failure.where in IN_BACKWARD:
        return []  # Autograd has the error by then; only the others can be told.
    wanted = [rf"was aborted on all ranks, because rank {failure.rank} failed"]
    wanted.append(
        "its backward pass failed after the" if failure.where in IN_BACKWARD else f"broken in .*{failure.where}"
    )
    return [f"{text!r} lacks {pattern!r}" for pattern in wanted if not re.search(pattern, text)]


def run_failures(failures: list[Failure]) -> list[str]:
    for failure in failures:
        wrong = fail_and_go_on(failure)
        if wrong:
            return wrong
    return []


Passes = list[tuple[int, int]]
"""The passes whose gradients are in a sum, by step and micro-batch."""


Reductions = list[list[Passes]]
"""The sums that are averaged over the ranks, one after the other, by rank."""


def accumulated_gradients_stay(failures: list[Failure]) -> list[str]:
    """After a pass that failed, gradients are those of a process that never ran it.

    One step runs whole and leaves its gradients in `grad`, the next is aborted in one of its micro-batches, and one
    pass more brings all that was kept into `grad`. The plain model runs the passes that went well, rank by rank. Before
    that, the order of a step becomes known, which failures of one kind share.
    """
    models: dict[tuple[Any, ...], tuple[Net, Net]] = {}
    for failure in failures:
        key = (failure.where == "recomputation", failure.reshard, failure.accumulate, failure.no_sync)
        if key not in models:
            torch.manual_seed(0)
            plain = Net(failure.where == "recomputation")
            models[key] = plain, shard(plain, failure)
            train(models[key][1], 4, failure, fails=False)
        plain, model = models[key]
        model.zero_grad()
        train(model, 1, failure, fails=False)
        before = [param.grad.clone() for param in model.parameters()]
        raised = train(model, 2, failure, fails=group_of().rank == failure.rank)
        wrong = check(raised, failure)
        if failure.no_sync and any(
            param.grad is None or not torch.equal(local_tensor(param.grad), local_tensor(grad))
            for param, grad in zip(model.parameters(), before, strict=True)
        ):
            wrong.append("a gradient that had been reduced before has changed")
        model(data(3, group_of().rank)).square().mean().backward()
        wrong += different_sums(model, plain, failure)
        if wrong:
            return [f"{failure}: {line}" for line in wrong]
    return []


def whole_steps(steps: list[int], failure: Failure) -> Reductions:
    """Those of steps in which nothing fails."""
    size, reductions = group_of().size, []
    for step in steps:
        micros = [[(step, micro)] for micro in range(failure.accumulate)]
        together = [[(step, micro) for micro in range(failure.accumulate)]]
        reductions += [[passes] * size for passes in (together if failure.no_sync else micros)]
    return reductions


def mean_of(plain: nn.Module, reductions: Reductions) -> Tensor:
    """What all of them leave in the plain model's gradients, flat."""
    expected: list[Tensor] = []
    for by_rank in reductions:
        mean = sum(plain_sum(plain, rank, passes) for rank, passes in enumerate(by_rank)) / len(by_rank)
        expected = [mean] if not expected else [expected[0] + mean]
    return expected[0]


def different_sums(model: nn.Module, plain: nn.Module, failure: Failure) -> list[str]:
    """Compares `grad` with the plain gradients of the passes that went well, each sum reduced as it was."""
    size, last = group_of().size, failure.accumulate - 1
    reductions = whole_steps([1], failure)
    if not failure.no_sync:
        reductions += [[[(2, micro)]] * size for micro in range(failure.at_micro_batch)]
    kept = [failure.at_micro_batch if rank == failure.rank else last for rank in range(size)]
    waited = [[(2, micro) for micro in range(number)] if failure.no_sync else [] for number in kept]
    reductions.append([[*passes, (3, 0)] for passes in waited])
    wholes = split(mean_of(plain, reductions), plain)
    pieces = [
        whole.reshape(-1)[span.start : span.stop].view(span.shape)
        for unit in units_in(model)
        for buffer in unit.buffers
        for whole, span in zip([wholes[name] for name in buffer.names], buffer.spans, strict=True)
    ]
    grads = [param.grad for unit in units_in(model) for buffer in unit.buffers for param in buffer.sharded_params]
    return [
        "the gradients are not those of the passes that went well"
        for grad, piece in zip(grads, pieces, strict=True)
        if grad is None or not torch.equal(local_tensor(grad), piece)
    ][:1]


def plain_sum(plain: nn.Module, rank: int, passes: Passes) -> Tensor:
    plain.zero_grad()
    for step, micro in passes:
        plain(data(step, rank, micro)).square().mean().backward()
    return torch.cat([param.grad.reshape(-1) for param in plain.parameters() if param.grad is not None])


def split(flat: Tensor, plain: nn.Module) -> dict[str, Tensor]:
    named = dict(plain.named_parameters())
    parts = flat.split([param.numel() for param in named.values()])
    return {name: part.view(param.shape) for (name, param), part in zip(named.items(), parts, strict=True)}


class TwoDtypes(nn.Module):
    """A unit of two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.tanh(self.linear(x)) * self.scale).float()


class Scarce:
    """A function that finds no memory on rank 1 in its call number `fails_at`; where it `lasts`, from there on."""

    def __init__(self, what: str) -> None:
        quantized = what in ("quantize", "dequantize")
        modules = [
            scale_core.quantization.collectives if quantized else scale_core.flat.reduction,
            scale_core.flat.buffer,
        ]
        self.what, self.lasts = what, quantized
        self.places = [module for module in modules if hasattr(module, what)]
        self.own, self.number, self.fails_at = getattr(self.places[0], what), 0, -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number, self.number = self.number, self.number + 1
        fails = number == self.fails_at or (self.lasts and number > self.fails_at >= 0)
        if fails and group_of().rank == 1:
            raise torch.OutOfMemoryError(f"no memory for {self.what}")
        return self.own(*args, **kwargs)

    def step(self, model: nn.Module, number: int) -> BaseException | None:
        """Runs a forward and a backward, and returns what was raised."""
        self.number = 0
        with pytest.MonkeyPatch.context() as patch:
            for place in self.places:
                patch.setattr(place, self.what, self)
            try:
                model(data(number, group_of().rank)).square().mean().backward()
            except (torch.OutOfMemoryError, StepError) as error:
                return error
        return None


def without_memory(what: str, options: Mapping[str, Any]) -> list[str]:
    """Each transfer of a step in turn finds no memory on rank 1; returns what differs from a model that never met it.

    Args:
        what: "all_gather" or "reduce_scatter", of scale_core; or with "_quantized" behind it; "quantize" or
            "dequantize", which then find none until the step is aborted.
        options: Of `fully_shard`.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(TwoDtypes(), TwoDtypes(), nn.Linear(WIDTH, 2))
    models = [copy.deepcopy(plain), copy.deepcopy(plain)]
    for model in models:
        for unit in (*model[:2], model):
            fully_shard(unit, limit_seconds=10.0, **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    scarce, wrong = Scarce(what), []
    for step in range(60):
        scarce.fails_at = step - 2
        raised = scarce.step(models[0], step)
        if step >= 2 and scarce.number <= scarce.fails_at:  # There were no more of them.
            models[1](data(step, group_of().rank)).square().mean().backward()
            break
        if (raised is not None) != (step >= 2):
            wrong.append(f"{what} {scarce.fails_at}: raised {raised!r}")
        if raised is None:
            models[1](data(step, group_of().rank)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        elif any(param.grad is not None for param in models[0].parameters()):
            wrong.append(f"{what} {scarce.fails_at}: a gradient of the step that was aborted")
    for model in models:
        model.zero_grad()
        model(data(70, group_of().rank)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    return wrong + differing_weights(*models) + ([] if 4 < step < 59 else [f"{step - 2} times {what}"])


def without_memory_at_first(what: str, options: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """As above, each transfer of the very first step of another copy; without options beside plain PyTorch."""
    wrong, scarce = [], Scarce(what)
    torch.manual_seed(0)
    plain = nn.Sequential(TwoDtypes(), TwoDtypes(), nn.Linear(WIDTH, 2))
    while not wrong:
        scarce.fails_at += 1
        model, other = copy.deepcopy(plain), copy.deepcopy(plain)
        for each in (model, other) if options else (model,):
            for unit in (*each[:2], each):
                fully_shard(unit, limit_seconds=10.0, **options)
        raised = scarce.step(model, 0)
        if scarce.number <= scarce.fails_at:
            return wrong if scarce.fails_at > 4 else [f"only {scarce.fails_at} times {what}"]
        if raised is None:
            wrong.append(f"{what} {scarce.fails_at}: nothing was raised")
        for each in (model, other):
            each(data(1, 0)).square().mean().backward()
        if options:
            theirs = dict(other.named_parameters())
            differing = [name for name, p in model.named_parameters() if not torch.equal(p.grad, theirs[name].grad)]
        else:
            differing = differing_grads(model, other)
        wrong += [f"{what} {scarce.fails_at}: {line}" for line in differing]
    return wrong


def run_without_memory() -> list[str]:
    cases = [("all_gather", True), ("reduce_scatter", True), ("all_gather", False)]
    wrong = [line for what, reshard in cases for line in without_memory(what, {"reshard_after_forward": reshard})]
    return wrong + [line for what in ("all_gather", "reduce_scatter") for line in without_memory_at_first(what)]


def run_without_memory_to_round(at_first: bool) -> list[str]:
    """On four ranks: shards over all, in two nodes, and in two copies."""
    both = CommunicationPolicy(gather="int8", reduce="int4", error_feedback=True)
    every: list[dict[str, Any]] = [
        {"communication": both},
        {"communication": replace(both, node_size=2)},
        {
            "communication": CommunicationPolicy(replicate="int8", error_feedback=True),
            "mesh": init_device_mesh("cpu", (2, 2)),
        },
    ]
    run = without_memory_at_first if at_first else without_memory
    return [
        f"{options}: {line}" for options in every for what in ("quantize", "dequantize") for line in run(what, options)
    ]


def fails_after_the_comparison(ranks: list[int]) -> str:
    """Whoever is told of gradients raises on these ranks; returns what the next pass says."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(WIDTH, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        fails = step == 2 and group_of().rank in ranks

        def told(_: object, fails: bool = fails) -> None:
            if fails:
                raise MemoryError("broken by who is told")

        handle = register_grad_published_hook(told)
        try:
            with pytest.raises(MemoryError) if fails else nullcontext():
                model(data(step, group_of().rank)).square().mean().backward()
        finally:
            handle.remove()
        if not fails:
            optimizer.step()
        optimizer.zero_grad()
    try:
        model(data(3, group_of().rank)).square().mean().backward()
    except ContractError as error:
        return str(error)
    return ""


def evaluation_is_aborted() -> None:
    torch.manual_seed(0)
    model = Net(False).eval()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with torch.no_grad():
        for _ in range(2):
            expected = model(data(0, 0))
        model.blocks[2].fails = "forward" if group_of().rank == 0 else ""
        with pytest.raises(ValueError if group_of().rank == 0 else StepError):
            model(data(0, 0))
        assert torch.equal(model(data(0, 0)), expected)


def all_fail_in_the_first_step() -> list[str]:
    """Each in its own way, at one place: they meet there, and go on. Returns what they were told."""
    torch.manual_seed(0)
    plain, told = Net(False), []
    model = shard(plain, Failure(HOOKS[0]))
    for places in (("forward", HOOKS[1]), (HOOKS[0], "forward"), ("root", "root")):
        where = places[group_of().rank]
        (model if where == "root" else model.blocks[1]).fails = where
        with pytest.raises((ValueError, MemoryError), match=f"in the {where}|in {where}") as caught:
            model(data(0, group_of().rank))
        told.append(caught.value.__notes__[0])
    model(data(0, 0)).square().mean().backward()
    plain(data(0, 0)).square().mean().backward()
    return told + differing_grads(model, plain)


class Box:
    """An output in which no tensor is found, so that a gradient of a parameter is what begins the backward."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Boxed(nn.Module):
    """Fails in the backward of what is behind its last layer, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.fails = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Box:
        hidden = self.first(x)
        return Box(self.last(_Breaks.apply(hidden) if self.fails else hidden))


def fails_before_any_event() -> str:
    """Rank 1 has a gradient and nothing that it could name; returns what is said of it."""
    model = fully_shard(Boxed(), limit_seconds=10.0)
    model.fails = group_of().rank == 1
    with pytest.raises(ValueError if model.fails else StepError) as caught:
        model(data(0, 0)).held.sum().backward()
    return str(caught.value)


def third_micro_batch_fails() -> str:
    """No step is known as a whole, and passes of this kind are compared no more: the others wait in vain."""
    model = Net(False)
    for block in model.blocks:
        fully_shard(block, limit_seconds=3.0)
    fully_shard(model, limit_seconds=3.0)
    failure = Failure("forward", accumulate=3, no_sync=True, at_micro_batch=2)
    raised = train(model, 0, failure, fails=group_of().rank == 1)
    assert isinstance(raised, ValueError if group_of().rank == 1 else ScaleDistributedError)
    gc.collect()
    return str(raised)


def serving_fails() -> str:
    """The rank that has failed finds no memory to serve the others: its words are there all the same."""
    model = Net(False)
    for block in model.blocks:
        fully_shard(block, limit_seconds=3.0)
    fully_shard(model, limit_seconds=3.0)
    mine = group_of().rank == 1
    for step in range(3):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            if step == 2 and mine:
                warnings.simplefilter("ignore")  # torch says that the model's hook has failed as well.
                model.blocks[1].fails = "forward"
                patch.setattr(scale_fsdp.runtime.recovery, "_replay", _without_memory)
            try:
                model(data(step, group_of().rank)).sum().backward()
            except (ValueError, ScaleDistributedError) as error:
                gc.collect()
                return str(error)
    return "nothing was raised"


def _without_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no memory to serve")


def alone() -> None:
    """A world of one: the error is the user's, and the model is as before."""
    model = fully_shard(Net(False))
    for where in ("forward", "backward"):
        for _ in range(2):
            model(data(0, 0)).sum().backward()
        model.zero_grad()
        model.blocks[0].fails = where
        with pytest.raises(ValueError, match=f"broken in {where}"):
            model(data(0, 0)).sum().backward()
        assert all(param.grad is None for param in model.parameters())
    model(data(0, 0)).sum().backward()


PLACES = [Failure("forward", block) for block in range(3)] + [Failure("backward", block) for block in range(3)]


@pytest.mark.fault(11)
def test_a_step_that_fails_on_one_rank_is_aborted_on_all_and_leaves_no_trace() -> None:
    cases = [*PLACES, Failure("root"), Failure("forward", rank=0, step=1), Failure("recomputation", 0)]
    cases += [Failure("recomputation", 2, rank=0)]
    cases += [Failure(where, 1 + number % 2, rank=number % 2) for number, where in enumerate(HOOKS)]
    assert run_ranks(run_failures, 2, cases) == [[], []]


@pytest.mark.gloo("four ranks' sums in rank order, to the bit")
def test_it_is_so_whatever_stays_gathered_and_however_gradients_accumulate() -> None:
    cases = [
        Failure("forward", 1, reshard=False),
        Failure("backward", 1, reshard=False, rank=0),
        Failure("forward", 2, accumulate=3, no_sync=True, at_micro_batch=0),
        Failure("backward", 0, accumulate=3, no_sync=True, at_micro_batch=1),
        Failure("backward", 2, accumulate=2, no_sync=True, at_micro_batch=1, reshard=False),
    ]
    assert run_ranks(run_failures, 2, cases) == [[], []]
    cases = [Failure("forward", 1, rank=2, reshard=2), Failure("backward", 1, rank=3, reshard=2)]
    assert run_ranks(run_failures, 4, cases) == [[]] * 4


EVERYWHERE = [*PLACES, Failure("root"), *(Failure("recomputation", block) for block in range(3))]


def test_accumulated_gradients_are_kept_wherever_the_last_pass_fails() -> None:
    cases = [
        replace(place, accumulate=2, no_sync=no_sync, at_micro_batch=1, rank=number % 2)
        for number, place in enumerate(EVERYWHERE)
        for no_sync in (False, True)
    ]
    assert run_ranks(accumulated_gradients_stay, 2, cases) == [[], []]


@pytest.mark.gloo("three ranks' sums in rank order, to the bit")
def test_each_rank_keeps_what_it_had_before_the_pass_that_raised_on_it() -> None:
    """Under no_sync the others meet the one that failed in the last micro-batch only."""
    cases = [
        replace(place, accumulate=3, no_sync=True, at_micro_batch=micro, reshard=bool(micro))
        for micro in (0, 1)
        for place in (PLACES[1], PLACES[4], EVERYWHERE[6], EVERYWHERE[8])
    ]
    assert run_ranks(accumulated_gradients_stay, 3, cases) == [[]] * 3


def test_a_rank_without_memory_for_a_transfer_itself_still_serves_it_to_the_others() -> None:
    """What a gather takes is the likeliest place to run out of memory, and then nothing was sent yet."""
    assert run_ranks(run_without_memory, 2) == [[], []]


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_it_serves_both_halves_of_a_gather_that_is_quantized_between_nodes(reshard: bool) -> None:
    options = {"reshard_after_forward": reshard, "communication": CommunicationPolicy(gather="int8", node_size=2)}
    assert run_ranks(without_memory, 4, "all_gather_quantized", options) == [[]] * 4


@pytest.mark.parametrize("at_first", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_rank_without_memory_to_quantize_still_sends_its_messages(at_first: bool) -> None:
    """Those who wait for them need not wait until their time limit, wherever it happens and however long it lasts."""
    assert run_ranks(run_without_memory_to_round, 4, at_first) == [[]] * 4


def test_a_rank_that_fails_when_the_others_have_gone_on_is_found_out_in_the_next_pass() -> None:
    """Otherwise they would train on with parameters of two different steps."""
    for message in run_ranks(fails_after_the_comparison, 2, [1]):
        assert "failure after the comparison" in message and "rank 1" in message
    assert run_ranks(fails_after_the_comparison, 2, [0, 1]) == ["", ""]


@pytest.mark.fault(21)
def test_an_evaluation_is_aborted_too() -> None:
    run_ranks(evaluation_is_aborted, 3)


def test_in_the_first_step_all_are_told_at_the_next_comparison() -> None:
    cases = [replace(place, step=0, rank=number % 2) for number, place in enumerate(EVERYWHERE)]
    cases += [Failure(where, 1 + number % 2, rank=number % 2, step=0) for number, where in enumerate(HOOKS)]
    cases += [
        replace(place, step=0, accumulate=2, no_sync=no_sync, at_micro_batch=1, reshard=no_sync)
        for place in (PLACES[1], PLACES[4])
        for no_sync in (False, True)
    ]
    assert run_ranks(run_failures, 2, cases) == [[], []]


def test_in_the_first_step_ranks_that_all_fail_do_not_wait_for_each_other() -> None:
    for told in run_ranks(all_fail_in_the_first_step, 2):
        assert len(told) == 3 and all("because ranks 0, 1 failed" in words for words in told), told


def test_a_backward_that_fails_before_its_first_event_names_none() -> None:
    messages = run_ranks(fails_before_any_event, 2)
    assert messages[1] == "broken in backward"
    assert "its backward pass failed, with an error that is raised there" in messages[0]


@pytest.mark.parametrize("fails", [third_micro_batch_fails, serving_fails])
def test_where_it_can_not_be_served_the_others_find_its_last_words(fails: Callable[[], str]) -> None:
    messages = run_ranks(fails, 2)
    assert messages[1] == "broken in forward"
    assert "rank 1: " in messages[0] and "raised ValueError: broken in forward" in messages[0]


def test_in_a_world_of_one_the_error_is_the_users_own() -> None:
    alone()
