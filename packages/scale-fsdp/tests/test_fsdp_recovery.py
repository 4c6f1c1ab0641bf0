"""recovery.py: one rank fails anywhere in a step; all ranks abort it, and train on as if it had not been."""

from __future__ import annotations

import copy
import functools
import gc
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch
from fsdp_parity import Step, assert_same_grads, put_mean_grads, sharded
from shard_arguments import shard_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import scale_core.flat.buffer
import scale_core.flat.gradient
import scale_fsdp.runtime.recovery
from scale_check.exact import assert_equal
from scale_core import StepError
from scale_core.comm.group import group_of
from scale_core.errors import ContractError, ScaleDistributedError
from scale_core.hooks.gradients import register_grad_published_hook
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import CommunicationPolicy, ShardOptions, fully_shard
from scale_fsdp.transports import hierarchical, quantized, quantized_collectives

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
        _fail("recomputation" if recomputing else "forward", self)
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
    step: int = 2
    reshard: bool | int = True
    accumulate: int = 1
    no_sync: bool = False
    at_micro_batch: int = 0


def data(step: int, rank: int, micro: int = 0) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


UNITS = ("blocks.0", "blocks.1", "blocks.2", "")


def shard(plain: Net, failure: Failure) -> Net:
    """A sharded copy; one block has its hooks before it is sharded, one after."""
    model = copy.deepcopy(plain)
    if failure.where in HOOKS:
        model.blocks[2].hook()
    for name in UNITS:
        fully_shard(model.get_submodule(name), reshard_after_forward=failure.reshard)
    if failure.where in HOOKS:
        model.blocks[1].hook()
    return model


def passes(*by_rank: list[tuple[int, int]]) -> Step:
    """The backward passes of each rank, by step and micro-batch; those of the first on all ranks if there is one."""

    def losses(model: nn.Module, rank: int, number: int) -> Iterable[Tensor]:
        for step, micro in by_rank[rank if len(by_rank) > 1 else 0]:
            yield model(data(step, rank, micro)).square().mean()

    return losses


def assert_leaves_no_trace(failures: list[Failure]) -> None:
    """Trains with a failing step, and beside it one process that never meets it."""
    for failure in failures:
        torch.manual_seed(0)
        plain = Net(failure.where == "recomputation")
        model = shard(plain, failure)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain)]
        for step in range(failure.step + (2 if failure.step else 3)):  # The second step knows the order of the first.
            raised = train(model, step, failure, fails=step == failure.step and group_of().rank == failure.rank)
            if step == failure.step:
                check(raised, failure)
                if failure.accumulate == 1:
                    assert all(param.grad is None for param in model.parameters()), failure
                model.zero_grad()
                continue
            assert raised is None, (failure, step, raised)
            micros = [(step, micro) for micro in range(failure.accumulate)]
            put_mean_grads(plain, passes(micros), step, group_of().size, no_sync=failure.no_sync)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(model, plain, failure)


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


def check(raised: Exception | None, failure: Failure) -> None:
    """The failing rank raises its own error, with a note; the others say whose it was."""
    is_own = group_of().rank == failure.rank
    text = str(raised) + "".join(getattr(raised, "__notes__", []))
    own_error = MemoryError if failure.where == "root" else ValueError
    assert isinstance(raised, own_error if is_own else StepError), (failure, raised)
    if is_own and failure.where in IN_BACKWARD:
        return  # Autograd has the error by then; only the others can be told.
    assert f"was aborted on all ranks, because rank {failure.rank} failed" in text, failure
    cause = "its backward pass failed after the" if failure.where in IN_BACKWARD else f"broken in .*{failure.where}"
    assert re.search(cause, text), (failure, text)


def assert_accumulated_gradients_stay(failures: list[Failure]) -> None:
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
        check(raised, failure)
        if failure.no_sync:  # What had been reduced before has not changed.
            after = [local_tensor(param.grad) for param in model.parameters()]
            assert_equal(after, list(map(local_tensor, before)), failure)
        model(data(3, group_of().rank)).square().mean().backward()
        size, stopped = group_of().size, failure.at_micro_batch
        first = [(1, micro) for micro in range(failure.accumulate)]
        if failure.no_sync:  # Each rank keeps the passes that it had run itself.
            put_mean_grads(plain, passes(first), 1, size, no_sync=True)
            reduced = [param.grad for param in plain.parameters()]
            kept = [stopped if rank == failure.rank else failure.accumulate - 1 for rank in range(size)]
            second = [[*((2, micro) for micro in range(number)), (3, 0)] for number in kept]
            put_mean_grads(plain, passes(*second), 2, size, no_sync=True)
            for param, grad in zip(plain.parameters(), reduced, strict=True):
                param.grad = grad + param.grad
        else:
            put_mean_grads(plain, passes([*first, *((2, micro) for micro in range(stopped)), (3, 0)]), 1, size)
        assert_same_grads(model, plain, failure)


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
        self.what, self.lasts = what, what in ("quantize", "dequantize")
        modules: list[ModuleType] = [scale_core.flat.buffer, scale_core.flat.gradient, quantized, hierarchical]
        if self.lasts:
            modules.append(quantized_collectives)
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


def assert_serves_without_memory(what: str, options: Mapping[str, Any], num_blocks: int = 2) -> None:
    """Each transfer of a step in turn finds no memory on rank 1; compares with a model that never met it.

    Args:
        what: "all_gather" or "reduce_scatter", of scale_core; or with "_quantized" behind it; "quantize" or
            "dequantize", which then find none until the step is aborted.
        options: Of `fully_shard`.
        num_blocks: In the model, each a unit.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(*(TwoDtypes() for _ in range(num_blocks)), nn.Linear(WIDTH, 2))
    models = [copy.deepcopy(plain), copy.deepcopy(plain)]
    for model in models:
        for unit in (*model[:-1], model):
            fully_shard(unit, **shard_arguments(limit_seconds=10.0, **options))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    scarce = Scarce(what)
    for step in range(60):
        scarce.fails_at = step - 2
        raised = scarce.step(models[0], step)
        if step >= 2 and scarce.number <= scarce.fails_at:  # There were no more of them.
            models[1](data(step, group_of().rank)).square().mean().backward()
            break
        assert (raised is not None) == (step >= 2), (what, scarce.fails_at, raised)
        if raised is None:
            models[1](data(step, group_of().rank)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        else:
            assert all(param.grad is None for param in models[0].parameters()), (what, scarce.fails_at)
    assert 4 < step < 59, what
    for model in models:
        model.zero_grad()
        model(data(70, group_of().rank)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_equal(*models, (what, options))


def assert_serves_at_first(what: str, options: Mapping[str, Any] = MappingProxyType({})) -> None:
    """As above, each transfer of the very first step of another copy; without options beside plain PyTorch."""
    scarce = Scarce(what)
    torch.manual_seed(0)
    plain = nn.Sequential(TwoDtypes(), TwoDtypes(), nn.Linear(WIDTH, 2))
    while True:
        scarce.fails_at += 1
        model, other = copy.deepcopy(plain), copy.deepcopy(plain)
        for each in (model, other) if options else (model,):
            for unit in (*each[:2], each):
                fully_shard(unit, **shard_arguments(limit_seconds=10.0, **options))
        raised = scarce.step(model, 0)
        if scarce.number <= scarce.fails_at:
            break
        assert raised is not None, (what, scarce.fails_at)
        for each in (model, other):
            each(data(1, 0)).square().mean().backward()
        if options:
            assert_equal([p.grad for p in model.parameters()], [p.grad for p in other.parameters()], scarce.fails_at)
        else:
            assert_same_grads(model, other, (what, scarce.fails_at))
    assert scarce.fails_at > 4, what


PLACES = [Failure("forward", block) for block in range(3)] + [Failure("backward", block) for block in range(3)]


@pytest.mark.fault(11)
@pytest.mark.ranks(2)
def test_a_step_that_fails_on_one_rank_leaves_no_trace() -> None:
    cases = [*PLACES, Failure("root"), Failure("forward", rank=0, step=1), Failure("recomputation", 0)]
    cases += [Failure("recomputation", 2, rank=0)]
    cases += [Failure(where, 1 + number % 2, rank=number % 2) for number, where in enumerate(HOOKS)]
    assert_leaves_no_trace(cases)


@pytest.mark.ranks(2)
def test_it_is_so_whatever_stays_gathered_and_is_accumulated() -> None:
    cases = [
        Failure("forward", 1, reshard=False),
        Failure("backward", 1, reshard=False, rank=0),
        Failure("forward", 2, accumulate=3, no_sync=True, at_micro_batch=0),
        Failure("backward", 0, accumulate=3, no_sync=True, at_micro_batch=1),
        Failure("backward", 2, accumulate=2, no_sync=True, at_micro_batch=1, reshard=False),
    ]
    assert_leaves_no_trace(cases)


@pytest.mark.gloo("four ranks' sums in rank order, to the bit")
@pytest.mark.ranks(4)
def test_it_is_so_where_parts_stay_gathered() -> None:
    assert_leaves_no_trace([Failure("forward", 1, rank=2, reshard=2), Failure("backward", 1, rank=3, reshard=2)])


EVERYWHERE = [*PLACES, Failure("root"), *(Failure("recomputation", block) for block in range(3))]


@pytest.mark.ranks(2)
def test_accumulated_gradients_outlive_a_failing_pass() -> None:
    cases = [
        replace(place, accumulate=2, no_sync=no_sync, at_micro_batch=1, rank=number % 2)
        for number, place in enumerate(EVERYWHERE)
        for no_sync in (False, True)
    ]
    assert_accumulated_gradients_stay(cases)


@pytest.mark.gloo("three ranks' sums in rank order, to the bit")
@pytest.mark.ranks(3)
def test_each_rank_keeps_what_it_had_before_its_failing_pass() -> None:
    """Under no_sync the others meet the one that failed in the last micro-batch only."""
    cases = [
        replace(place, accumulate=3, no_sync=True, at_micro_batch=micro, reshard=bool(micro))
        for micro in (0, 1)
        for place in (PLACES[1], PLACES[4], EVERYWHERE[6], EVERYWHERE[8])
    ]
    assert_accumulated_gradients_stay(cases)


@pytest.mark.ranks(2)
def test_a_rank_without_memory_for_a_transfer_serves_the_others() -> None:
    """What a gather takes is the likeliest place to run out of memory, and then nothing was sent yet."""
    for what, reshard in (("all_gather", True), ("reduce_scatter", True), ("all_gather", False)):
        assert_serves_without_memory(what, {"reshard_after_forward": reshard})
    for what in ("all_gather", "reduce_scatter"):
        assert_serves_at_first(what)


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.ranks(4)
def test_it_serves_both_halves_of_a_gather_between_nodes(reshard: bool) -> None:
    options = {"reshard_after_forward": reshard, "communication": CommunicationPolicy(gather="int8", node_size=2)}
    assert_serves_without_memory("all_gather_quantized", options)


@pytest.mark.parametrize("at_first", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.ranks(4)
def test_a_rank_without_memory_to_quantize_sends_its_messages(at_first: bool) -> None:
    """Those who wait for them need not wait until their time limit, wherever it happens and however long it lasts."""
    both = CommunicationPolicy(gather="int8", reduce="int4", error_feedback=True)
    every: list[dict[str, Any]] = [
        {"communication": both},
        {"communication": replace(both, node_size=2)},
        {
            "communication": CommunicationPolicy(replicate="int8", error_feedback=True),
            "mesh": init_device_mesh("cpu", (2, 2)),
        },
    ]
    for options in every:
        for what in ("quantize", "dequantize"):
            if at_first:
                assert_serves_at_first(what, options)
            else:
                assert_serves_without_memory(what, options, num_blocks=1)


@pytest.mark.parametrize("failing_ranks", [[1], [0, 1]])
@pytest.mark.ranks(2, in_turn=True)
def test_a_rank_that_fails_later_than_the_others_is_found_out(failing_ranks: list[int]) -> None:
    """Whoever is told of gradients raises; otherwise ranks would train on with parameters of two different steps."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(WIDTH, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        fails = step == 2 and group_of().rank in failing_ranks

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
    words = r"(?s)failure after the comparison.*rank 1|rank 1.*failure after the comparison"
    with pytest.raises(ContractError, match=words) if failing_ranks == [1] else nullcontext():
        model(data(3, group_of().rank)).square().mean().backward()


@pytest.mark.fault(21)
@pytest.mark.ranks(3)
def test_an_evaluation_is_aborted_too() -> None:
    torch.manual_seed(0)
    model = sharded(Net(False).eval(), UNITS)
    with torch.no_grad():
        for _ in range(2):
            expected = model(data(0, 0))
        model.blocks[2].fails = "forward" if group_of().rank == 0 else ""
        with pytest.raises(ValueError if group_of().rank == 0 else StepError):
            model(data(0, 0))
        assert torch.equal(model(data(0, 0)), expected)


@pytest.mark.ranks(2)
def test_in_the_first_step_all_are_told_at_the_next_comparison() -> None:
    cases = [replace(place, step=0, rank=number % 2) for number, place in enumerate(EVERYWHERE)]
    cases += [Failure(where, 1 + number % 2, rank=number % 2, step=0) for number, where in enumerate(HOOKS)]
    cases += [
        replace(place, step=0, accumulate=2, no_sync=no_sync, at_micro_batch=1, reshard=no_sync)
        for place in (PLACES[1], PLACES[4])
        for no_sync in (False, True)
    ]
    assert_leaves_no_trace(cases)


@pytest.mark.ranks(2)
def test_in_the_first_step_ranks_that_all_fail_do_not_wait() -> None:
    """Each in its own way, at one place: they meet there, and go on."""
    torch.manual_seed(0)
    plain = Net(False)
    model = shard(plain, Failure(HOOKS[0]))
    for places in (("forward", HOOKS[1]), (HOOKS[0], "forward"), ("root", "root")):
        where = places[group_of().rank]
        (model if where == "root" else model.blocks[1]).fails = where
        with pytest.raises((ValueError, MemoryError), match=f"in the {where}|in {where}") as caught:
            model(data(0, group_of().rank))
        assert "because ranks 0, 1 failed" in caught.value.__notes__[0]
    model(data(0, 0)).square().mean().backward()
    plain(data(0, 0)).square().mean().backward()
    assert_same_grads(model, plain)


@pytest.mark.ranks(2)
def test_a_backward_that_fails_before_its_first_event_names_none() -> None:
    """Rank 1 has a gradient and nothing that it could name."""

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

    model = fully_shard(Boxed(), options=ShardOptions(limit_seconds=10.0))
    model.fails = group_of().rank == 1
    words = "^broken in backward$" if model.fails else "its backward pass failed, with an error that is raised there"
    with pytest.raises(ValueError if model.fails else StepError, match=words):
        model(data(0, 0)).held.sum().backward()


LAST_WORDS = re.compile("rank 1: .*raised ValueError: broken in forward", re.DOTALL)


@pytest.mark.ranks(2)
def test_ranks_that_wait_in_vain_find_the_others_error() -> None:
    """No step is known as a whole, and passes of this kind are compared no more."""
    model = sharded(Net(False), UNITS, limit_seconds=3.0)
    failure = Failure("forward", accumulate=3, no_sync=True, at_micro_batch=2)
    raised = train(model, 0, failure, fails=group_of().rank == 1)
    if group_of().rank == 1:
        assert isinstance(raised, ValueError) and str(raised) == "broken in forward"
    else:
        assert isinstance(raised, ScaleDistributedError) and LAST_WORDS.search(str(raised)), raised
    del raised
    gc.collect()


@pytest.mark.ranks(2)
def test_ranks_that_are_not_served_find_the_others_error() -> None:
    """The rank that has failed finds no memory to serve the others."""

    def without_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory to serve")

    model, fails = sharded(Net(False), UNITS, limit_seconds=3.0), group_of().rank == 1
    for step in range(2):
        model(data(step, group_of().rank)).sum().backward()
    error, words = (ValueError, "^broken in forward$") if fails else (ScaleDistributedError, LAST_WORDS)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        if fails:
            warnings.simplefilter("ignore")  # torch says that the model's hook has failed as well.
            model.blocks[1].fails = "forward"
            patch.setattr(scale_fsdp.runtime.recovery, "_replay", without_memory)
        with pytest.raises(error, match=words):
            model(data(2, group_of().rank)).sum().backward()
    gc.collect()


def test_in_a_world_of_one_the_error_is_the_users_own() -> None:
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
