"""reducer.py: a pass that fails, or is skipped, on some ranks is aborted on all, without a trace."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_check.exact import assert_equal, gather_values
from scale_core import StepError
from scale_core.comm.group import group_of
from scale_core.errors import ContractError, ScaleDistributedError
from scale_core.hooks.autograd import PendingForwards
from scale_core.sharded_tensor.replicated_parameter import unreduced_grad
from scale_oss import OSS, OSSOptions, ShardedDataParallel
from scale_oss.buckets.bucket import Bucket


@dataclass
class Fault:
    """Where a pass is to go wrong: nowhere, as long as `where` is empty."""

    where: str = ""
    ranks: list[int] = field(default_factory=list)

    def strikes(self, place: str) -> bool:
        return place == self.where and group_of().rank in self.ranks


class Gate(nn.Module):
    """Passes everything on, and fails in its forward or backward when asked to."""

    def __init__(self, place: str, fault: Fault) -> None:
        super().__init__()
        self.place, self.fault = place, fault

    def forward(self, x: Tensor) -> Tensor:
        if self.fault.strikes(f"{self.place}, forward"):
            raise ValueError(f"lost at the {self.place}, forward")
        y = x * 1
        if y.requires_grad:
            y.register_hook(self._check)
        return y

    def _check(self, grad: Tensor) -> None:
        if self.fault.strikes(self.place):
            raise ValueError(f"lost at the {self.place}")


def batch(step: int) -> Tensor:
    """A rank's own."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + group_of().rank))


class Case:
    """A model of three buckets, with a gate behind each layer but the last, beside the fault that they share."""

    def __init__(self, *, buffers: bool = True, bucket_numel: int = 75) -> None:
        self.fault = Fault()
        torch.manual_seed(0)
        front, middle = Gate("front", self.fault), Gate("middle", self.fault)
        layers = nn.Sequential(nn.Linear(6, 8), front, nn.Linear(8, 8), middle, nn.Linear(8, 2))
        if buffers:
            layers.append(nn.BatchNorm1d(2))
        self.optimizer = OSS(
            layers.parameters(), torch.optim.Adam, lr=0.1, options=OSSOptions(bucket_numel=bucket_numel)
        )
        self.model = ShardedDataParallel(layers, self.optimizer)
        assert bucket_numel != 75 or len(self.optimizer.buckets) == 3

    def loss(self, step: int) -> Tensor:
        loss: Tensor = self.model(batch(step)).square().mean()
        return loss

    def run(self, step: int) -> None:
        """A forward and a backward pass."""
        self.loss(step).backward()

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accumulate(self, step: int) -> None:
        with self.model.no_sync():
            self.run(step)

    def grads(self) -> list[Tensor | None]:
        return [None if param.grad is None else param.grad.clone() for param in self.model.parameters()]

    def fails(self, backward: Callable[[], None], ranks: list[int]) -> str:
        """Runs a backward pass that fails on these ranks; returns what was raised."""
        expected = ValueError if group_of().rank in ranks else StepError
        with pytest.raises(expected) as caught:
            backward()
        self.fault.where = ""
        return str(caught.value)

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


@pytest.mark.ranks(2, 3)
def test_a_backward_that_fails_on_some_ranks_leaves_no_trace() -> None:
    """Steps that fail between steps that don't; the others are those of a training without them."""

    def failures(size: int) -> list[tuple[str, list[int]]]:
        """Where the passes of `failing_steps` fail, and on which ranks."""
        everyone = list(range(size))
        backward = [("middle", [0]), ("front", [size - 1]), ("middle", everyone), ("front", [0]), ("front", [0])]
        return [("middle, forward", [0]), *backward, ("front, forward", [size - 1]), ("front, forward", everyone)]

    case, reference, messages, size = Case(), Case(), [], group_of().size
    for step, (where, ranks) in enumerate(failures(size)):
        case.fault.where, case.fault.ranks = where, ranks
        messages.append(case.fails(partial(case.run, 100 + step), ranks))
        case.step(step)
        reference.step(step)
    assert_equal(case.weights(), reference.weights())
    rank = group_of().rank
    for (where, failed), message in zip(failures(size), messages, strict=True):
        if rank in failed:
            assert message == f"lost at the {where}"
        else:
            assert f"was aborted on all ranks, because rank {failed[0]} failed. Parameters" in message
            assert "its backward pass failed" in message or f"ValueError: lost at the {where}" in message
            assert "Call optimizer.zero_grad(), and training can go on with the next batch" in message


@pytest.mark.fault(105)
@pytest.mark.ranks(3)
def test_a_rank_that_leaves_out_a_backward_aborts_the_pass() -> None:
    """It goes on with the next batch: the others drop theirs, too."""
    case, reference = Case(), Case()
    for step, (rank, keeps) in enumerate([(0, False), (2, False), (0, True), (0, True), (2, True)]):
        kept = None
        if group_of().rank == rank:
            kept = case.loss(100 + step)  # What its loss raises, it catches.
            kept = kept if keeps else None
        else:
            message = case.fails(partial(case.run, 100 + step), [])
            assert "was aborted on all ranks, because rank " in message
            assert "its forward pass was followed by no backward pass: an error in its loss was caught" in message
        loss = case.loss(step)
        del kept  # As a variable of a loop, which is overwritten now.
        loss.backward()
        case.optimizer.step()
        case.optimizer.zero_grad()
        reference.step(step)
    assert_equal(case.weights(), reference.weights())


@pytest.mark.fault(105)
@pytest.mark.ranks(2)
def test_a_loss_that_one_rank_keeps_aborts_the_pass() -> None:
    """Whether a backward will still come to it nobody knows: no gradients of two batches are averaged."""
    case = Case(buffers=False)
    case.step(0)
    before = case.weights()
    kept = case.loss(1) if group_of().rank == 0 else None
    message = case.fails(partial(case.run, 2), [])
    assert "forward passes without a backward differ, [1, 0] by rank" in message
    assert_equal(case.weights(), before)
    case.step(3)
    assert kept is None or kept.requires_grad


@pytest.mark.ranks(2)
def test_forward_passes_that_all_ranks_drop_change_nothing() -> None:
    """They may: it costs one pass of zeros, the first time. And outputs may be changed in place, or used in part."""
    case, reference = Case(), Case()
    for step in range(4):
        case.loss(100 + step)
        case.step(step)
        reference.step(step)
    assert case.model._contract.step == 4 + 1
    for each in (case, reference):
        each.model.module.append(nn.Unflatten(1, (1, 2)))
    for step in range(4, 7):
        view = case.model(batch(step))
        view.mul_(2)
        first, second = case.loss(100), case.loss(101)
        (view.square().mean() + first).backward()
        del first, second
        case.optimizer.step()
        case.optimizer.zero_grad()
        doubled, first = reference.model(batch(step)) * 2, reference.loss(100)
        (doubled.square().mean() + first).backward()
        reference.optimizer.step()
        reference.optimizer.zero_grad()
    assert_equal(case.weights(), reference.weights())


@pytest.mark.ranks(2)
def test_gradients_accumulated_before_a_failing_pass_stay() -> None:
    """What was accumulated before the pass that fails stays, reduced or not; so training goes on as if it never was."""
    messages = []
    # Where each parameter has a bucket of its own, its gradient is taken over and not packed.
    for bucket_numel, (where, last) in itertools.product((75, 1), (("front", False), ("middle, forward", True))):
        case, reference = Case(bucket_numel=bucket_numel), Case(bucket_numel=bucket_numel)
        for each in (case, reference):
            each.run(0)
            each.accumulate(1)
        before = case.grads()
        case.fault.where, case.fault.ranks = where, [1]
        messages.append(case.fails(partial(case.run, 2), [1]))
        assert_equal(case.grads(), before)
        assert before[0] is not None
        for each in (case, reference):
            each.accumulate(3)
            if last:
                each.run(4)
            else:
                each.model.reduce()
            each.optimizer.step()
        assert_equal(case.weights(), reference.weights())
        assert all(unreduced_grad(param) is None for param in case.model.parameters())
    case = Case()
    for param in case.model.parameters():
        param.grad = torch.ones_like(param)  # Of another source than a pass of this model.
    before = case.grads()
    case.fault.where, case.fault.ranks = "front", [1]
    messages.append(case.fails(partial(case.run, 0), [1]))
    assert_equal(case.grads(), before)
    rank = group_of().rank
    assert len(messages) == 5
    assert all(("lost at" if rank else "so are gradients that were accumulated") in each for each in messages)


@pytest.mark.ranks(3)
def test_a_pass_that_fails_under_no_sync_is_aborted_later() -> None:
    """The others hear of it when they reduce; each goes back to where it stood before the pass that raised on it."""
    case, reference, messages = Case(bucket_numel=20), Case(bucket_numel=20), []
    for turn, (where, by_hand) in enumerate(itertools.product(("middle", "front", "front, forward"), (False, True))):
        step = 10 * turn
        case.accumulate(100 + step)
        case.fault.where, case.fault.ranks = where, [1]
        if group_of().rank != 1:
            case.accumulate(101 + step)
        before = case.grads()
        if group_of().rank == 1:
            backward = partial(case.accumulate, 101 + step)
        else:
            backward = case.model.reduce if by_hand else partial(case.run, 102 + step)
        messages.append(case.fails(backward, [1]))
        assert_equal(case.grads(), before)
        assert before[0] is not None
        case.optimizer.zero_grad()
        case.model.zero_grad()
        for each in (case, reference):
            each.accumulate(step)
            each.step(step + 1)
    assert_equal(case.weights(), reference.weights())
    rank = group_of().rank
    assert len(messages) == 6
    for message in messages:
        assert message.startswith("lost at the") if rank == 1 else "because rank 1 failed. Parameters" in message


@pytest.mark.ranks(2)
def test_what_is_refused_on_one_rank_is_refused_on_all() -> None:
    """What this package refuses in the middle of a pass on one rank is refused on all; so is a manual reduction."""
    case = Case()
    case.step(0)
    before = case.weights()
    create_graph = group_of().rank == 0
    with pytest.raises(RuntimeError) as caught:
        case.loss(1).backward(create_graph=create_graph)
    assert isinstance(caught.value, StepError) != create_graph
    for param in case.model.parameters():
        param.grad = None
    case.optimizer.step()  # There is nothing to step with.
    assert_equal(case.weights(), before)
    case.step(2)
    mine, others = gather_values(str(caught.value))
    assert "has a gradient of its own" in mine and "because rank 0 failed" in others


@pytest.mark.ranks(2)
def test_buckets_of_two_models_are_never_taken_for_each_other() -> None:
    """As in adversarial training. Buckets of one size and number: nobody may take one for the other."""

    class Product(nn.Module):
        """One matrix, or two."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.second = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor, both: bool = True) -> Tensor:
            y: Tensor = x @ self.first
            return y @ self.second if both else y

    found = []
    for wraps in (ShardedDataParallel, None):
        judge, maker = Product(), Product()
        optimizers = [OSS(each.parameters(), torch.optim.SGD, lr=1e-3) for each in (judge, maker)]
        models = [
            wraps(model, optimizer) if wraps is not None else DistributedDataParallel(model)
            for model, optimizer in zip((judge, maker), optimizers, strict=True)
        ]
        for step in range(3):
            models[0](models[1](batch(step))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for optimizer in optimizers:
            optimizer.wait()
        found.append([param.detach().clone() for each in (judge, maker) for param in each.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    models = [ShardedDataParallel(each, OSS(each.parameters(), lr=1e-3)) for each in (Product(), Product())]
    with pytest.raises(ContractError) as caught:
        models[0](models[1](batch(0)), group_of().rank == 1).sum().backward()
    message = "\n".join([str(caught.value), *caught.value.__notes__])
    assert re.search(
        r"rank 0: reduction of unit 'bucket 0 of optimizer (\d+)'; rank 1: .* of optimizer (?!\1)", message
    )
    assert "ShardedDataParallel(module, [optimizer, other_optimizer])" in message


@pytest.mark.ranks(2)
def test_a_rank_that_fails_after_the_comparison_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has its gradients by then: the next pass names the one that has none."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer)
    wrapped(batch(0)).sum().backward()
    fails = group_of().rank == 1

    def commit(bucket: Bucket, frozen: object = ()) -> None:
        raise MemoryError("no memory for the sum")

    with monkeypatch.context() as patch:
        if fails:
            patch.setattr(Bucket, "commit", commit)
        with pytest.raises(MemoryError) if fails else nullcontext():
            wrapped(batch(1)).sum().backward()
    with pytest.raises(ContractError, match=r"rank 1: .*failure after the comparison"):
        wrapped(batch(2)).sum().backward()


@pytest.mark.ranks(2)
def test_a_rank_that_has_left_is_found_out() -> None:
    """A rank that leaves is named to the others, once they have waited for it."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optimizer = OSS(layers.parameters(), torch.optim.SGD, lr=0.1, options=OSSOptions(limit_seconds=1))
    model = ShardedDataParallel(layers, optimizer)
    if group_of().rank == 1:
        time.sleep(3)
        return
    with pytest.raises(ScaleDistributedError):
        model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(ScaleDistributedError, match="is broken since an earlier error") as caught:
        model(torch.ones(1, 6)).sum().backward()
    assert "bucket 0" in str(caught.value)


# What becomes of the outputs of a forward pass, as autograd tells it.

WEIGHT = torch.ones(3, requires_grad=True)


class Listener:
    """Counts how often a backward has come to a forward's outputs."""

    def __init__(self) -> None:
        self.num_met = 0

    def meet(self) -> None:
        self.num_met += 1


LISTENER = Listener()


def followed() -> PendingForwards:
    return PendingForwards(LISTENER.meet)


def forward(forwards: PendingForwards) -> Tensor:
    y = WEIGHT * 2
    forwards.watch({"y": y, "twice": [y]})
    return y


@pytest.mark.parametrize("use", [torch.Tensor.sum, lambda y: y.mul_(2).sum(), lambda y: y.view(3, 1).mul_(2).sum()])
def test_a_backward_through_an_output_is_seen(use: object) -> None:
    forwards = followed()
    y = forward(forwards)
    use(y).backward()  # type: ignore[operator]
    del y
    assert forwards.num_unmatched == 0 and not forwards.has_skipped(in_step=True)


def test_an_output_that_is_a_view_may_be_changed_in_place() -> None:
    forwards = followed()
    view = (WEIGHT * 2).view(3, 1)
    forwards.watch(view)
    view.mul_(3)
    view.sum().backward()
    del view
    assert forwards.num_unmatched == 0


def test_what_has_no_gradient_is_not_waited_for() -> None:
    forwards = followed()
    forwards.watch([WEIGHT, torch.ones(2), "words"])
    assert forwards.num_unmatched == 0


def test_a_pass_is_left_out_when_its_output_is_gone() -> None:
    forwards = followed()
    y = forward(forwards)
    assert not forwards.has_skipped(in_step=False)
    del y
    assert forwards.has_skipped(in_step=False)
    forwards.drop_skipped()
    assert forwards.num_unmatched == 0 and not forwards.has_skipped(in_step=True)


def test_in_step_an_output_that_is_kept_tells_as_well() -> None:
    forwards = followed()
    forward(forwards).sum().backward()
    forwards.reset_baseline()
    kept = forward(forwards)
    assert forwards.has_skipped(in_step=True) and not forwards.has_skipped(in_step=False)
    forwards.accept_baseline()
    assert not forwards.has_skipped(in_step=True)
    kept.sum().backward()
    assert forwards.num_unmatched == 0


def test_a_pass_of_several_forwards_is_aborted_as_one() -> None:
    forwards = followed()
    (forward(forwards) + forward(forwards)).sum().backward()
    forwards.reset_baseline()
    first, second = forward(forwards), forward(forwards)
    del first
    assert forwards.has_skipped(in_step=False)
    forwards.drop_skipped()
    del second
    assert not forwards.has_skipped(in_step=False)


def test_what_all_ranks_drop_is_expected_as_long_as_they_do() -> None:
    forwards = followed()
    for _ in range(3):
        forward(forwards)
        if forwards.has_skipped(in_step=False):
            forwards.accept_baseline()
        forward(forwards).sum().backward()
        assert forwards.num_unmatched == 1
        forwards.reset_baseline()
        assert forwards.num_unmatched == 0
        forward(forwards)
        assert not forwards.has_skipped(in_step=False)
        forwards.clear()
    forward(forwards).sum().backward()
    forwards.reset_baseline()  # Nothing was dropped this time.
    forward(forwards)
    assert forwards.has_skipped(in_step=False)


def test_listeners_hear_of_every_backward_before_it_goes_on() -> None:
    forwards, heard = followed(), []
    for counts in (True, False):
        before = LISTENER.num_met
        y = WEIGHT * 2
        y.register_hook(lambda _, before=before: heard.append(LISTENER.num_met - before))
        forwards.watch(y * 1, counts=counts)  # Dropped, and of no pass.
        z = y * 3
        forwards.watch(z, counts=counts)
        z.sum().backward()
        assert LISTENER.num_met == before + 1
    assert heard == [1, 1] and forwards.num_unmatched == 1


# Parameters that are frozen when they have a gradient from under `no_sync()`: plain PyTorch keeps and steps on it.


class Chosen(nn.Sequential):
    """Rank 1 leaves the last layer out."""

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        for layer in self[:4]:
            x = layer(x)
        y: Tensor = self[4](x) if not rank else x
        return y


def chosen() -> Chosen:
    torch.manual_seed(1)
    return Chosen(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 3)).double()


FREEZE: dict[str, Callable[[nn.Sequential], object]] = {
    "a parameter": lambda model: model[0].weight.requires_grad_(False),
    "a layer": lambda model: model[0].requires_grad_(False),
    "a layer and a parameter": lambda model: (model[2].requires_grad_(False), model[0].bias.requires_grad_(False)),
    "on one rank only, what it alone has used": lambda model: model[4].requires_grad_(False),
}


def freeze_what_waits(what: str, when: str, bucket_numel: int) -> None:
    def noise(seed: int) -> Tensor:
        return torch.randn(2, 5, generator=torch.Generator().manual_seed(seed)).double()

    rank, world = group_of().rank, group_of().size
    plain, model = chosen(), chosen()
    replicas = [chosen() for _ in range(world)]
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.1, options=OSSOptions(bucket_numel=bucket_numel))
    wrapped = ShardedDataParallel(model, optimizer)
    for number, each in [*enumerate(replicas), (rank, model)]:
        called: nn.Module = wrapped if each is model else each
        used = number if "one rank" in what else 0
        with wrapped.no_sync():
            called(noise(number), used).square().sum().backward()
        if when == "between passes":
            FREEZE[what](each)
        loss = called(noise(10 + number), used).square().sum()
        if when == "in a pass":
            FREEZE[what](each)
        loss.backward()
    for param, *of_ranks in zip(*(each.parameters() for each in (plain, *replicas)), strict=True):
        grads = [other.grad for other in of_ranks]
        if any(grad is not None for grad in grads):
            param.grad = torch.stack([torch.zeros_like(param) if grad is None else grad for grad in grads]).mean(0)
    torch.optim.AdamW(plain.parameters(), lr=0.1).step()
    optimizer.step()
    torch.testing.assert_close(list(wrapped.parameters()), list(plain.parameters()), rtol=0, atol=1e-10)


@pytest.mark.ranks(1, 2)
def test_what_is_frozen_keeps_the_gradient_that_waits() -> None:
    ways = itertools.product(FREEZE, ("between passes", "in a pass"), (7, 1 << 20))
    for way in ways:
        freeze_what_waits(*way)
