"""What a rank measures of its own gradients."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from adascale_cases import assert_gain, assert_gain_of_passes, build, gradients_of, loss_of, net, plain_gain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_adascale import AdaScale
from scale_adascale.gain import Moments, bounded, gain
from scale_adascale.measurement.local_grad_norms import (
    LocalGradNorms,
    has_later_hook,
    has_post_accumulate_hook,
)
from scale_adascale.squared_norms import NormAccumulator, inner_product, part_of, sum_of_squares
from scale_core.comm.group import Group
from scale_core.hooks.gradients import gradient_hooks, has_local_grad_hooks
from scale_core.hooks.microbatch_grads import MicrobatchStep, StepSignature, register_pipeline
from scale_core.hooks.source_grads import mark_averaged, with_source_grads


def test_nobody_is_told_of_gradients_once_an_adascale_is_gone() -> None:
    model = nn.Linear(2, 1)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    assert has_local_grad_hooks()
    del optimizer
    gc.collect()
    assert not has_local_grad_hooks()


def test_a_module_in_two_reentrant_checkpoints_is_named() -> None:
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


def in_passes(model: nn.Sequential, step: MicrobatchStep, seeds: dict[int, int], share: float) -> None:
    """The gradients of several samples, layer after layer and not sample after sample."""
    losses = {sample: loss_of(model, seed) * share for sample, seed in seeds.items()}
    for layer in (model[2], model[0]):
        for sample, loss in losses.items():
            with step.micro_batch(sample):
                loss.backward(inputs=list(layer.parameters()), retain_graph=True)


def announced_step(model: nn.Sequential, seeds: dict[int, int], share: float) -> None:
    """A step of two samples."""
    step = MicrobatchStep(model.parameters())
    step.begin()
    in_passes(model, step, seeds, share)
    step.end([0.5] * 2)


def test_an_announced_step_is_measured_by_samples_in_any_passes() -> None:
    model, optimizer = build(4)
    for seeds in ({0: 1, 1: 2}, {0: 3, 1: 4}):
        announced_step(model, seeds, 0.25)
    assert_gain(optimizer, [1, 2, 3, 4])
    optimizer.step()


def test_a_step_that_is_aborted_counts_as_nothing() -> None:
    model, optimizer = build(4)
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
            announced_step(model, seeds, 0.25)
        gains.append(optimizer.gain())
        optimizer.zero_grad()
    assert gains[0] == gains[1] > 1


def test_more_samples_than_announced_are_refused_and_others_stay() -> None:
    model, optimizer = build()
    step = MicrobatchStep(model.parameters())
    step.begin()
    in_passes(model, step, {0: 1, 1: 2, 2: 3}, 0.5)
    with pytest.raises(
        RuntimeError, match=r"expected 2 backward passes.*but 3 came.*each micro-batch of a pipeline is one"
    ):
        step.end([1 / 3] * 3)
    model.zero_grad()
    announced_step(model, {0: 1, 1: 2}, 0.5)
    assert_gain(optimizer, [1, 2])


@pytest.mark.parametrize("leaves_one_out", [False, True])
def test_a_gradient_that_comes_in_parts_is_published_as_a_sum(leaves_one_out: bool) -> None:
    model, optimizer = build()
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
    assert_gain(optimizer, [1, 2])


def test_what_counts_elsewhere_does_not_count_here() -> None:
    model, optimizer = build()
    first = list(model[0].parameters())
    step = MicrobatchStep(model.parameters(), first, first)
    step.begin()
    in_passes(model, step, {0: 1, 1: 2}, 0.5)
    step.end([0.5] * 2)
    assert_gain(optimizer, [1, 2], slice(2, 3))


def test_a_step_of_other_parameters_is_nobody_elses() -> None:
    model, optimizer = build()
    step = MicrobatchStep(net().parameters())
    step.begin()
    assert not step.has_observers
    for seed in (1, 2):
        with step.micro_batch(0):
            (loss_of(model, seed) / 2).backward()
    step.end([1.0])
    assert optimizer.gain() > 1


def test_a_gradient_of_no_sample_and_two_of_one_are_refused() -> None:
    model, _optimizer = build()
    step = MicrobatchStep(model.parameters())
    step.begin()
    with pytest.raises(RuntimeError, match="between the backward passes of a pipeline's step"):
        loss_of(model, 1).backward()
    with step.micro_batch(0):
        loss_of(model, 1).backward()
        with pytest.raises(RuntimeError, match="has two gradients in one backward pass"):
            loss_of(model, 1).backward()
    step.fail()


def test_a_rank_of_frozen_parameters_counts_announced_samples() -> None:
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
    model, optimizer = build(3)
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


def test_a_refused_step_leaves_its_rank_as_where_it_began() -> None:
    """One model stands for each rank; gradients are put back in other tensors, as pipelines do."""
    for refuses in (False, True):
        model, optimizer = build(4)
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
        assert_gain(optimizer, [1, 2, 3, 4])
    fourth = MicrobatchStep(model.parameters())
    with pytest.raises(RuntimeError, match="but another step of the pipeline began after them"):
        fourth.begin()
    optimizer.zero_grad()


def test_measuring_can_not_end_within_an_announced_step() -> None:
    model, optimizer = build()
    step = MicrobatchStep(model.parameters())
    step.begin()
    assert [terms.words for terms in step.terms] == ["1 parameter group after 0 of 2 passes"]
    with pytest.raises(RuntimeError, match=r"unhook\(\) was called inside a pipeline's step"):
        optimizer.unhook()
    step.fail()
    optimizer.unhook()
    step = MicrobatchStep(model.parameters())
    step.begin()
    assert not step.has_observers


def test_a_parameter_that_takes_the_place_of_another_is_measured() -> None:
    model, optimizer = build()
    model[0].weight = new = nn.Parameter(model[0].weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = new
    optimizer.zero_grad()
    assert_gain_of_passes(model, optimizer, (1, 2))


def test_gradients_that_are_only_asked_for_are_of_no_pass() -> None:
    """As those of a gradient penalty, which torch.autograd.grad returns and adds to no parameter."""
    model, optimizer = build()
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


def test_gradients_are_heard_by_parameter_and_announced_step() -> None:
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


def test_unfrozen_and_replaced_parameters_are_heard_next_time() -> None:
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


def test_others_later_hooks_are_refused_until_it_listens_again() -> None:
    ears, (one, other) = Ears(), two()
    ears.register_hooks([one, other])
    one.register_hook(lambda grad: grad * 10)
    with pytest.raises(RuntimeError, match="registered after AdaScale's"):
        ears.check_hooks()
    ears.register_hooks([one, other])
    ears.check_hooks()
    (one * other).backward()
    assert (0, [20.0]) in ears.heard


def test_gradients_by_source_rank_are_measured_not_their_sum() -> None:
    """For example, of an expert. Autograd gives the sum over the ranks whose tokens the expert has computed."""
    ears, (one, other) = Ears(), two()
    mark_averaged(one, Group(0, 2, None, "fake", (0, 1)))
    ears.register_hooks([one, other])
    outputs = [with_source_grads(one, one, source) * factor for source, factor in ((0, 3.0), (1, 4.0))]
    ((outputs[0] + outputs[1]) * other).backward()
    assert one.grad is not None and one.grad.tolist() == [2 * 7.0]
    assert ears.heard == [(1, [7.0])]
    assert ears._of_pass[CPU].squares().tolist() == [6.0**2 + 8.0**2, 0.0]


@pytest.mark.parametrize("how", ["stopped", "gone"])
def test_nothing_is_heard_by_whoever_has_stopped_or_is_gone(how: str) -> None:
    ears, params = Ears(), two()
    ears.register_hooks(params)
    heard = ears.heard
    assert has_local_grad_hooks() and gradient_hooks.microbatch_steps
    if how == "stopped":
        ears.remove_hooks()
    else:
        del ears
    gc.collect()
    assert not has_local_grad_hooks() and not gradient_hooks.microbatch_steps
    (params[0] * params[1]).backward()
    assert heard == []


def same(grad: Tensor) -> Tensor:
    return grad


def of_ours(grad: Tensor) -> Tensor:
    return grad


of_ours.__module__ = "scale_anything"


def test_a_hook_is_followed_by_later_hooks_of_others() -> None:
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


def test_hooks_called_after_a_gradient_was_added_change_it_later() -> None:
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


def test_whoever_made_a_gradient_may_reuse_its_memory_at_once():
    accumulator, grads = NormAccumulator(3, CPU), [torch.full((size,), 2.0) for size in (3, 5000, 40000)]
    for number, grad in enumerate(grads):
        accumulator.set(number, grad)
        grad.fill_(9.0)
    assert accumulator.squares().tolist() == pytest.approx([12.0, 20000.0, 160000.0])


def test_gradients_of_one_number_add_up_and_cleared_ones_do_not():
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


def test_short_gradients_of_any_size_of_values_are_measured():
    for value in (1e-30, 1e30):
        accumulator = NormAccumulator(1, CPU)
        accumulator.set(0, torch.full((4,), value))
        assert accumulator.squares().tolist() == pytest.approx([4 * value**2], rel=1e-6)


def test_the_read_buffer_stays_so_that_gradients_are_freed():
    accumulator = NormAccumulator(1, CPU)
    accumulator.set(0, torch.ones(40960))
    before = accumulator._buffers[0].of_rows.data_ptr()
    accumulator.clear()
    accumulator.set(0, torch.ones(40960))
    assert accumulator._buffers[0].of_rows.data_ptr() == before


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_squares_and_products_are_those_of_fp64(size, dtype):
    # The products of small integers have the same sum in any order.
    one, other = (numbers(size, seed=seed).mul(2).round().to(dtype) for seed in (0, 1))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.vdot(one.to(wide), other.to(wide)).real
    assert sum_of_squares(one).item() == pytest.approx(one.to(wide).abs().square().sum().item(), rel=1e-6)
    assert torch.equal(inner_product(one, other), expected.double())


def test_parts_have_each_element_once():
    grad = numbers(7, 3)
    assert torch.equal(torch.cat([part_of(grad, number, 4) for number in range(4)]), grad.reshape(-1))


@pytest.mark.parametrize("rows", [([1, 2], [3, 4]), ([1, 2], [3, 4, 5]), ([5, 1, 1], [1, 4, 5]), ([0], [])])
def test_sparse_gradients_are_multiplied_where_both_have_rows(rows):
    def sparse(indices: list[int], seed: int) -> torch.Tensor:
        values = numbers(len(indices), 3, seed=seed)
        return torch.sparse_coo_tensor(torch.tensor([indices]), values, (7, 3), check_invariants=True)

    one, other = sparse(rows[0], 1), sparse(rows[1], 2)
    expected = (one.to_dense().double() * other.to_dense().double()).sum()
    torch.testing.assert_close(inner_product(one, other), expected)
    torch.testing.assert_close(inner_product(one, other.to_dense()), expected)


def test_sparse_matrices_of_complex_numbers_are_multiplied_too():
    places = torch.tensor([[0, 0, 2], [1, 3, 0]]), torch.tensor([[2, 0], [0, 3]])
    values = torch.tensor([1 + 2j, 2, 3j]), torch.tensor([1 - 1j, 5j])
    one, other = (
        torch.sparse_coo_tensor(i, v, (3, 4), check_invariants=True) for i, v in zip(places, values, strict=True)
    )
    assert inner_product(one, other).item() == torch.vdot(one.to_dense().view(-1), other.to_dense().view(-1)).real
