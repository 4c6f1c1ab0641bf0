"""What a rank measures of its own gradients."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from adascale_cases import gradients_of, loss_of, net, plain_gain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_adascale import AdaScale
from scale_adascale.gain import Moments, bounded, gain
from scale_adascale.measurement.local_grad_norms import (
    LocalGradNorms,
    NormAccumulator,
    has_later_hook,
    has_post_accumulate_hook,
)
from scale_adascale.squared_norms import sum_of_squares
from scale_core.comm.group import Group
from scale_core.hooks.gradients import has_local_grad_hooks
from scale_core.hooks.microbatch_grads import MicrobatchStep, StepSignature, microbatch_steps_wanted, register_pipeline


def test_nobody_is_told_of_gradients_once_an_adascale_is_gone() -> None:
    model = nn.Linear(2, 1)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    assert has_local_grad_hooks()
    del optimizer
    gc.collect()
    assert not has_local_grad_hooks()


def test_a_module_that_is_in_two_reentrant_checkpoints_of_one_pass_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    hidden = torch.ones(4, 3, requires_grad=True)
    for _ in range(2):
        hidden = checkpoint(model[0], hidden, use_reentrant=True)
    with pytest.raises(
        RuntimeError, match=r"a parameter of shape .* has two gradients in one backward pass.*use_reentrant=False"
    ):
        model[1](hidden).sum().backward()
    assert optimizer.gain() == 1.0


def test_hooks_of_another_adascale_are_nobody_elses() -> None:
    model = nn.Linear(2, 1)
    both = [AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2) for _ in range(2)]
    for sample in torch.eye(2):
        model(sample).sum().backward()
    assert both[0].gain() == both[1].gain() > 1


def sampled(num: int = 2) -> tuple[nn.Sequential, AdaScale]:
    model = net()
    return model, AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=num)


def in_passes(model: nn.Sequential, step: MicrobatchStep, seeds: dict[int, int], share: float) -> None:
    """The gradients of several samples, layer after layer and not sample after sample."""
    losses = {sample: loss_of(model, seed) * share for sample, seed in seeds.items()}
    for layer in (model[2], model[0]):
        for sample, loss in losses.items():
            with step.micro_batch(sample):
                loss.backward(inputs=list(layer.parameters()), retain_graph=True)


def test_a_step_that_is_announced_is_measured_by_its_samples_whatever_passes_it_has() -> None:
    model, optimizer = sampled(4)
    for seeds in ({0: 1, 1: 2}, {0: 3, 1: 4}):
        step = MicrobatchStep(model.parameters())
        step.begin()
        in_passes(model, step, seeds, 0.25)
        step.end([0.5] * 2)
    other = net()
    gradients = gradients_of(other, list(other.parameters()), [1, 2, 3, 4])
    assert optimizer.gain() == pytest.approx(plain_gain(gradients, 4.0), rel=1e-6)
    optimizer.step()


def test_a_step_that_is_aborted_counts_as_nothing() -> None:
    model, optimizer = sampled(4)
    gains = []
    for fails in (False, True):
        for seeds in ({0: 1, 1: 2}, {0: 3, 1: 4}):
            if fails:
                before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
                step = MicrobatchStep(model.parameters())
                step.begin()
                in_passes(model, step, {0: 5}, 1.0)
                step.fail()
                for param, grad in zip(model.parameters(), before, strict=True):
                    param.grad = grad
            step = MicrobatchStep(model.parameters())
            step.begin()
            in_passes(model, step, seeds, 0.25)
            step.end([0.5] * 2)
        gains.append(optimizer.gain())
        optimizer.zero_grad()
    assert gains[0] == gains[1] > 1


def test_more_samples_than_were_said_are_refused_and_those_before_them_stay() -> None:
    model, optimizer = sampled(2)
    step = MicrobatchStep(model.parameters())
    step.begin()
    in_passes(model, step, {0: 1, 1: 2, 2: 3}, 0.5)
    with pytest.raises(
        RuntimeError, match=r"expected 2 backward passes.*but 3 came.*each micro-batch of a pipeline is one"
    ):
        step.end([1 / 3] * 3)
    model.zero_grad()
    step = MicrobatchStep(model.parameters())
    step.begin()
    in_passes(model, step, {0: 1, 1: 2}, 0.5)
    step.end([0.5] * 2)
    other = net()
    expected = plain_gain(gradients_of(other, list(other.parameters()), [1, 2]), 2.0)
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("leaves_one_out", [False, True])
def test_a_gradient_that_comes_in_parts_is_the_sum_that_is_told_of(leaves_one_out: bool) -> None:
    model, optimizer = sampled(2)
    weight = model[2].weight
    for seeds in ((3, 4), (1, 2)) if leaves_one_out else ((1, 2),):
        model.zero_grad()
        step = MicrobatchStep(model.parameters(), [weight])
        step.begin()
        for sample, seed in enumerate(seeds):
            with step.micro_batch(sample):
                for _ in range(2):
                    (loss_of(model, seed) / 4).backward(inputs=[weight])
                (loss_of(model, seed) / 2).backward(inputs=list(model[0].parameters()))
            step.report_grad(weight, torch.autograd.grad(loss_of(model, seed) / 2, weight)[0])
        step.end([0.5] * 2)
    other = net()
    expected = plain_gain(gradients_of(other, list(other.parameters()), [1, 2]), 2.0)
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)


def test_what_counts_elsewhere_does_not_count_here() -> None:
    model, optimizer = sampled(2)
    first = list(model[0].parameters())
    step = MicrobatchStep(model.parameters(), first, first)
    step.begin()
    in_passes(model, step, {0: 1, 1: 2}, 0.5)
    step.end([0.5] * 2)
    other = net()
    expected = plain_gain(gradients_of(other, list(other[2].parameters()), [1, 2]), 2.0)
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)


def test_a_step_of_other_parameters_is_nobody_elses() -> None:
    model, optimizer = sampled(2)
    step = MicrobatchStep(net().parameters())
    step.begin()
    assert not step.has_observers
    for seed in (1, 2):
        with step.micro_batch(0):
            (loss_of(model, seed) / 2).backward()
    step.end([1.0])
    assert optimizer.gain() > 1


def test_a_gradient_of_no_sample_and_two_of_one_are_refused() -> None:
    model, _optimizer = sampled(2)
    step = MicrobatchStep(model.parameters())
    step.begin()
    with pytest.raises(RuntimeError, match="between the backward passes of a pipeline's step"):
        loss_of(model, 1).backward()
    with step.micro_batch(0):
        loss_of(model, 1).backward()
        with pytest.raises(RuntimeError, match="has two gradients in one backward pass"):
            loss_of(model, 1).backward()
    step.fail()


def test_a_rank_whose_parameters_are_all_frozen_counts_the_samples_of_a_step_that_is_announced() -> None:
    model = net().requires_grad_(False)
    others = Group(0, 2, None, "fake", (0, 1))
    with pytest.raises(ValueError, match="expected a parameter that is not frozen on each of the ranks"):
        AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), model_parallel_group=others)
    register_pipeline(model, others)
    AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), model_parallel_group=others)
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2, model_parallel_group=Group()
    )
    step = MicrobatchStep(model.parameters())
    step.begin()
    step.end([0.5] * 2)
    assert optimizer.gain() == 1.0
    optimizer.step()


def test_samples_of_unequal_size_tell_of_noise_what_they_know() -> None:
    """Of L = sum |w g|^2 and T = |sum w g|^2 the means are mu^2 W + s^2 and mu^2 + s^2, with W = sum w^2."""
    model, optimizer = sampled(3)
    weights = [0.5, 0.3, 0.2]
    step = MicrobatchStep(model.parameters())
    step.begin()
    for sample, weight in enumerate(weights):
        with step.micro_batch(sample):
            (loss_of(model, sample) * weight).backward()
    step.end(weights)
    other = net()
    rows = gradients_of(other, list(other.parameters()), [0, 1, 2])
    parts = [torch.cat([g.flatten() * weight for g in row]) for row, weight in zip(rows, weights, strict=True)]
    local = sum(float(part.square().sum()) for part in parts)
    total = float(torch.stack(parts).sum(0).square().sum())
    concentration = sum(weight**2 for weight in weights)
    square = (total - local) / (1 - concentration)
    expected = gain(bounded(Moments(3.0 * (total - square), square)), 3.0)
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)
    assert abs(expected - plain_gain(rows, 3.0)) > 1e-3


def test_a_step_that_is_refused_leaves_its_rank_as_those_where_it_began() -> None:
    """One model stands for each rank; gradients are put back in other tensors, as pipelines do."""
    for refuses in (False, True):
        model, optimizer = sampled(4)
        first = MicrobatchStep(model.parameters())
        first.begin()
        in_passes(model, first, {0: 1, 1: 2}, 0.25)
        first.end([0.5] * 2)
        handle = model[0].weight.register_hook(lambda grad: grad) if refuses else None
        second = MicrobatchStep(model.parameters())
        if refuses:
            with pytest.raises(RuntimeError, match="registered after AdaScale's"):
                second.begin()
        else:
            second.begin()
        second.fail()
        for param in model.parameters():
            param.grad = param.grad.clone()
        if handle is not None:
            handle.remove()
        third = MicrobatchStep(model.parameters())
        third.begin()
        in_passes(model, third, {0: 3, 1: 4}, 0.25)
        third.end([0.5] * 2)
        other = net()
        expected = plain_gain(gradients_of(other, list(other.parameters()), [1, 2, 3, 4]), 4.0)
        assert optimizer.gain() == pytest.approx(expected, rel=1e-6)
    fourth = MicrobatchStep(model.parameters())
    with pytest.raises(RuntimeError, match="but another step of the pipeline began after them"):
        fourth.begin()
    optimizer.zero_grad()


def test_measuring_can_not_end_in_the_middle_of_a_step_that_is_announced() -> None:
    model, optimizer = sampled(2)
    step = MicrobatchStep(model.parameters())
    step.begin()
    assert [terms.words for terms in step.terms] == ["1 parameter group after 0 of 2 passes"]
    with pytest.raises(RuntimeError, match=r"unhook\(\) inside of a pipeline's step"):
        optimizer.unhook()
    step.fail()
    optimizer.unhook()
    step = MicrobatchStep(model.parameters())
    step.begin()
    assert not step.has_observers


def test_a_parameter_that_takes_the_place_of_another_is_measured() -> None:
    model, optimizer = sampled(2)
    model[0].weight = new = nn.Parameter(model[0].weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = new
    optimizer.zero_grad()
    for seed in (1, 2):
        (loss_of(model, seed) / 2).backward()
    other = net()
    expected = plain_gain(gradients_of(other, list(other.parameters()), [1, 2]), 2.0)
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)


def test_gradients_that_are_only_asked_for_are_of_no_pass() -> None:
    """As those of a gradient penalty, which torch.autograd.grad returns and adds to no parameter."""
    model, optimizer = sampled(2)
    params = list(model.parameters())
    for seed in (1, 2):
        found = torch.autograd.grad(loss_of(model, seed), params, create_graph=True)
        (loss_of(model, seed) / 2 + sum(grad.square().sum() for grad in found)).backward()
    other = net()
    rows = []
    for seed in (1, 2):
        found = torch.autograd.grad(loss_of(other, seed), list(other.parameters()), create_graph=True)
        penalised = loss_of(other, seed) + 2 * sum(grad.square().sum() for grad in found)
        rows.append([grad.double() for grad in torch.autograd.grad(penalised, list(other.parameters()))])
    assert optimizer.gain() == pytest.approx(plain_gain(rows, 2.0), rel=1e-6)


class Ears(LocalGradNorms):
    def __init__(self) -> None:
        super().__init__(self.begin, self.end, self.signature)
        self.heard: list[tuple[int, list[float]]] = []
        self.steps: list[MicrobatchStep] = []

    def begin(self) -> None: ...

    def end(self, weights: Sequence[float]) -> None: ...

    def signature(self) -> StepSignature:
        return StepSignature((0,), "")

    def _count(self, index: int, grad: Tensor) -> None:
        assert not grad.requires_grad
        self.heard.append((index, grad.tolist()))

    def _begin_step(self, step: MicrobatchStep) -> None:
        self.steps.append(step)


def two() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0]))]


def test_each_gradient_is_heard_by_the_number_of_its_parameter_and_steps_that_are_announced() -> None:
    ears, (one, other) = Ears(), two()
    other.requires_grad_(False)
    ears.register_hooks([one, other])
    assert ears.can_get_grads
    (one * other * 3).backward()
    assert ears.heard == [(0, [6.0])]
    other.grad = torch.ones(1)
    assert ears.grads_of([one, other]) == [one.grad, None]
    step = MicrobatchStep([one])
    step.begin()
    assert ears.steps == [step] and not step.has_observers
    assert ears.indices_of([torch.ones(1), other]) == {1}


def test_what_was_unfrozen_or_put_in_the_place_of_another_is_heard_from_the_next_time_on() -> None:
    ears, (one, other) = Ears(), two()
    other.requires_grad_(False)
    ears.register_hooks([one, other])
    other.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"was unfrozen after.*optimizer\.zero_grad\(\)"):
        ears.check_hooks()
    ears.register_hooks([one, other])
    ears.check_hooks()
    new = nn.Parameter(torch.tensor([5.0]))
    ears.register_hooks([new, other])
    (one * other * new).backward()
    assert sorted(ears.heard) == [(0, [2.0]), (1, [5.0])]


def test_hooks_of_others_that_come_later_are_refused_until_it_listens_again() -> None:
    ears, (one, other) = Ears(), two()
    ears.register_hooks([one, other])
    one.register_hook(lambda grad: grad * 10)
    with pytest.raises(RuntimeError, match="registered after AdaScale's"):
        ears.check_hooks()
    ears.register_hooks([one, other])
    ears.check_hooks()
    (one * other).backward()
    assert (0, [20.0]) in ears.heard


@pytest.mark.parametrize("how", ["stopped", "gone"])
def test_nothing_is_heard_by_whoever_has_stopped_or_is_gone(how: str) -> None:
    ears, params = Ears(), two()
    ears.register_hooks(params)
    heard = ears.heard
    assert has_local_grad_hooks() and microbatch_steps_wanted()
    if how == "stopped":
        ears.remove_hooks()
    else:
        del ears
    gc.collect()
    assert not has_local_grad_hooks() and not microbatch_steps_wanted()
    (params[0] * params[1]).backward()
    assert heard == []


def same(grad: Tensor) -> Tensor:
    return grad


def of_ours(grad: Tensor) -> Tensor:
    return grad


of_ours.__module__ = "scale_anything"


def test_a_hook_is_followed_by_those_of_others_that_came_after_it() -> None:
    param = nn.Parameter(torch.ones(2))
    before = param.register_hook(same)
    handle = param.register_hook(of_ours)
    param.register_hook(of_ours)
    assert has_later_hook(param, before) is False  # Those of this house change nothing.
    assert has_later_hook(param, handle) is False
    after = param.register_hook(same)
    assert has_later_hook(param, handle) is True and has_later_hook(param, after) is False
    after.remove()
    assert has_later_hook(param, handle) is False


def test_hooks_that_are_called_when_a_gradient_was_added_change_it_later() -> None:
    param = nn.Parameter(torch.ones(2))
    assert has_post_accumulate_hook(param) is False
    param.register_post_accumulate_grad_hook(of_ours)
    assert has_post_accumulate_hook(param) is False
    handle = param.register_post_accumulate_grad_hook(same)
    assert has_post_accumulate_hook(param) is True
    handle.remove()
    assert has_post_accumulate_hook(param) is False


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_the_squares_are_those_of_each_gradient_alone(dtype):
    torch.manual_seed(0)
    # The squares of small integers have the same sum in any order.
    grads = [torch.randint(-4, 5, shape).to(dtype) for shape in ((3,), (1024,), (0,), (2, 1024), (5, 999), ())]
    accumulator = NormAccumulator(len(grads) + 1, CPU)
    for _ in range(2):
        for number, grad in reversed(list(enumerate(grads))):
            accumulator.set(number, grad)
        expected = torch.stack([*(sum_of_squares(grad) for grad in grads), torch.tensor(0.0, dtype=torch.float64)])
        torch.testing.assert_close(accumulator.squares(), expected, rtol=2e-7, atol=0.0)
        accumulator.clear()
        grads = [2 * grad for grad in grads]


def test_whoever_has_made_a_gradient_may_use_its_memory_again_at_once():
    accumulator, grads = NormAccumulator(3, CPU), [torch.full((size,), 2.0) for size in (3, 5000, 40000)]
    for number, grad in enumerate(grads):
        accumulator.set(number, grad)
        grad.fill_(9.0)
    assert accumulator.squares().tolist() == pytest.approx([12.0, 20000.0, 160000.0])


def test_gradients_of_one_number_may_be_added_and_what_was_cleared_counts_no_more():
    accumulator = NormAccumulator(3, CPU)
    accumulator.set(0, torch.full((2000,), 9.0))
    accumulator.clear()
    assert accumulator.squares().tolist() == [0.0, 0.0, 0.0]
    for value in (1.0, 2.0):
        accumulator.add(1, torch.full((2,), value))
    accumulator.set(2, torch.full((3,), 2.0))
    assert accumulator.squares().tolist() == pytest.approx([0.0, 10.0, 12.0])


def test_a_gradient_may_have_another_size_or_layout_each_time():
    accumulator = NormAccumulator(1, CPU)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1, 4]]), torch.ones(3, 2), (9, 2), check_invariants=True)
    for grad, expected in ((sparse, 10.0), (torch.ones(1030), 1030.0), (torch.ones(7, 3).T, 21.0), (sparse, 10.0)):
        accumulator.set(0, grad)
        assert accumulator.squares().tolist() == pytest.approx([expected])
        accumulator.clear()


def test_short_gradients_are_measured_however_small_or_large_they_are():
    for value in (1e-30, 1e30):
        accumulator = NormAccumulator(1, CPU)
        accumulator.set(0, torch.full((4,), value))
        assert accumulator.squares().tolist() == pytest.approx([4 * value**2], rel=1e-6)


def test_what_is_read_into_stays_so_that_the_allocator_can_use_gradients_again():
    accumulator = NormAccumulator(1, CPU)
    accumulator.set(0, torch.ones(40960))
    before = accumulator._buffers[0].of_rows.data_ptr()
    accumulator.clear()
    accumulator.set(0, torch.ones(40960))
    assert accumulator._buffers[0].of_rows.data_ptr() == before
