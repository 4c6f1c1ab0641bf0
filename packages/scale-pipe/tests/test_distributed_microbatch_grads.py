"""`MicrobatchGrads`: observers learn of each gradient which micro-batch it belongs to.

One process holds all stages here; stages on several ranks are tested with scale-adascale, by whoever measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_core.comm.group import Group
from scale_core.hooks.microbatch_grads import MicrobatchStep, StepObserver, StepSignature, on_microbatch_steps
from scale_pipe import DistributedPipe, PipelineOptions, StageError
from scale_pipe.distributed.gradients.microbatch_grads import check_signatures, ranks_with_parameters
from scale_pipe.distributed.message import Flow, Slot
from scale_pipe.distributed.program import SharedParameter, microbatch_grad_slots
from scale_pipe.schedules.placement import StagePlacement

CHUNKS = 3


def layers(*, tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4)).double()
    if tied:
        model[3].weight = model[0].weight
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(2 * CHUNKS, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target


class Measures:
    """Keeps each gradient by parameter and micro-batch, as hooks see it or as it is handed over."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.step: MicrobatchStep | None = None
        self.found: dict[tuple[int, int], Tensor] = {}
        self.ends: list[int | None] = []
        self.weights: Sequence[float] = ()
        self.hooks = [param.register_hook(self._hook(number)) for number, param in enumerate(params)]
        self.handle = on_microbatch_steps(self.begins)

    def begins(self, step: MicrobatchStep) -> StepObserver:
        assert {id(param) for param in step.params} == {id(param) for param in self.params}
        self.step = step
        return StepObserver(self._ended, lambda: self.ends.append(None), self._whole)

    def _ended(self, weights: Sequence[float]) -> None:
        self.weights = weights
        self.ends.append(len(weights))

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            assert self.step is not None
            if self.params[number] not in self.step.in_parts:
                self._keep(number, grad)

        return hook

    def _whole(self, param: Tensor, grad: Tensor) -> None:
        self._keep([param is each for each in self.params].index(True), grad)

    def _keep(self, number: int, grad: Tensor) -> None:
        assert self.step is not None and self.step.sample is not None
        assert (number, self.step.sample) not in self.found
        self.found[number, self.step.sample] = grad.clone()

    def stop(self) -> None:
        self.handle.remove()
        for hook in self.hooks:
            hook.remove()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dual_pipe_v"])
def test_each_gradient_is_told_of_once_with_its_micro_batch(schedule: str, tied: bool) -> None:
    """However it is computed; of a weight that two stages have it is the sum of both, as autograd has it."""
    several = schedule in ("interleaved_1f1b", "zb_v", "dual_pipe_v")
    pipe = DistributedPipe(
        layers(tied=tied),
        schedule,
        balance=[2, 2] if several else [4],
        chunks=CHUNKS,
        options=PipelineOptions(stages_per_rank=1 + several),
    )
    measures = Measures(list(pipe.parameters()))
    x, target = batch()
    pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    measures.stop()
    model = layers(tied=tied)
    params = list(model.parameters())
    for sample, (part, to) in enumerate(zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)):
        loss = nn.functional.mse_loss(model(part), to) / CHUNKS
        for number, grad in enumerate(torch.autograd.grad(loss, params)):
            torch.testing.assert_close(measures.found.pop((number, sample)), grad, rtol=1e-12, atol=1e-14)
    assert measures.found == {} and measures.ends == [CHUNKS]


def test_a_step_that_fails_is_told_of_and_an_evaluation_is_not() -> None:
    pipe = DistributedPipe(layers(tied=True), "zb_v", balance=[2, 2], chunks=CHUNKS)
    measures = Measures(list(pipe.parameters()))
    x, target = batch()
    calls: list[int] = []

    def loss_fn(output: Tensor, to: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == CHUNKS:
            raise ArithmeticError("the last")
        return nn.functional.mse_loss(output, to)

    with pytest.raises(StageError, match="the last"):
        pipe.step(x, target=target, loss_fn=loss_fn)
    assert measures.ends == [None]
    pipe.evaluate(x, target=target, loss_fn=nn.functional.mse_loss)
    assert measures.ends == [None]
    measures.found.clear()
    pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    measures.stop()
    assert measures.ends == [None, CHUNKS]


def test_who_refuses_a_step_fails_it_before_anything_is_computed() -> None:
    pipe = DistributedPipe(layers(tied=False), balance=[4], chunks=CHUNKS)
    x, target = batch()

    def refuses(step: MicrobatchStep) -> StepObserver:
        raise RuntimeError("clip gradients later")

    handle = on_microbatch_steps(refuses)
    with pytest.raises(StageError, match=r"measured by: clip gradients later"):
        pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    handle.remove()
    assert all(param.grad is None for param in pipe.parameters())
    pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)


def test_nothing_is_hooked_where_nobody_listens_nor_after_a_step() -> None:
    pipe = DistributedPipe(layers(tied=True), "zb_v", balance=[2, 2], chunks=CHUNKS)
    x, target = batch()
    hooked: list[bool] = []

    def loss_fn(output: Tensor, to: Tensor) -> Tensor:
        hooked.append(any(param._backward_hooks for param in pipe.parameters()))
        return nn.functional.mse_loss(output, to)

    pipe.step(x, target=target, loss_fn=loss_fn)
    handle = on_microbatch_steps(lambda step: StepObserver(lambda number: None, lambda: None, lambda param, grad: None))
    pipe.step(x, target=target, loss_fn=loss_fn)
    handle.remove()
    assert hooked == [False] * CHUNKS + [True] * CHUNKS
    assert not any(param._backward_hooks for param in pipe.parameters())


def test_a_measured_optimizer_steps_when_the_step_has_ended() -> None:
    pipe = DistributedPipe(layers(tied=False), "zb_v", balance=[2, 2], chunks=CHUNKS)
    told: list[str] = []
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: told.append("steps"))
    x, target = batch()
    handle = on_microbatch_steps(lambda step: StepObserver(lambda number: told.append("ended"), lambda: None, print))
    pipe.step(x, target=target, loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    handle.remove()
    assert told == ["ended", "steps"]


def test_gradients_of_samples_go_to_the_first_rank_with_them() -> None:
    placement = StagePlacement.wave(2)
    slots = microbatch_grad_slots(placement, [SharedParameter("up", (0, 1, 3)), SharedParameter("down", (0, 3))], 2)
    assert slots == [Slot(Flow.SAMPLE, "up", 1, 0, batch) for batch in range(2)]


class Twice(nn.Module):
    """Multiplies by a weight outside of a checkpoint and inside of it."""

    def __init__(self, weight: nn.Parameter, reentrant: bool) -> None:
        super().__init__()
        self.weight, self.reentrant = weight, reentrant

    def forward(self, x: Tensor) -> Tensor:
        def again(hidden: Tensor) -> Tensor:
            return torch.tanh(hidden) @ self.weight

        hidden = x @ self.weight
        found: Tensor = checkpoint(again, hidden, use_reentrant=True) if self.reentrant else again(hidden)
        return found


def test_a_shared_weight_in_a_reentrant_checkpoint_is_told_once() -> None:
    def model(reentrant: bool) -> nn.Sequential:
        own = layers(tied=False)
        return nn.Sequential(Twice(own[0].weight, reentrant), own[1], own[2], Twice(own[0].weight, False))

    pipe = DistributedPipe(
        model(True), "interleaved_1f1b", balance=[2, 2], chunks=CHUNKS, options=PipelineOptions(stages_per_rank=2)
    )
    measures = Measures(list(pipe.parameters()))
    x, target = batch()
    pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    measures.stop()
    plain = model(False)
    weight = plain[0].weight
    for sample, (part, to) in enumerate(zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)):
        (expected,) = torch.autograd.grad(nn.functional.mse_loss(plain(part), to) / CHUNKS, [weight])
        torch.testing.assert_close(measures.found[0, sample], expected, rtol=1e-12, atol=1e-14)


def test_micro_batches_of_unequal_size_have_their_weights() -> None:
    pipe = DistributedPipe(layers(tied=False), balance=[4], chunks=CHUNKS)
    measures = Measures(list(pipe.parameters()))
    x, target = batch()
    pipe.step(x[:5], target=target[:5], loss_fn=nn.functional.mse_loss)
    measures.stop()
    assert list(measures.weights) == [0.4, 0.4, 0.2]


def test_other_terms_are_refused_where_a_rank_would_wait() -> None:
    both, alone = StepSignature((0, 1), "one"), StepSignature((0,), "one")
    check_signatures({0: [both], 1: [both]})
    check_signatures({0: [alone], 1: []})
    check_signatures({0: [alone, both], 1: [both], 2: []})
    check_signatures({0: [StepSignature((0, 4), "its")], 1: []})  # With a rank of another pipeline.
    with pytest.raises(RuntimeError, match=r"rank 0 has one, and rank 1 nothing.*model_parallel_group="):
        check_signatures({0: [both], 1: []})
    with pytest.raises(RuntimeError, match="rank 1 has one and two, and rank 0 one"):
        check_signatures({1: [both, StepSignature((0, 1), "two")], 0: [both]})


def test_ranks_whose_stages_have_no_parameters_are_left_out() -> None:
    placement, group = StagePlacement.loop(2), Group(1, 2, None, "gloo", (4, 7))
    has, has_none = nn.Linear(1, 1), nn.Tanh()
    assert ranks_with_parameters([has, has], placement, group) is group
    assert ranks_with_parameters([has, has_none], placement, group) == Group()
    assert ranks_with_parameters([has_none, has], placement, group) == Group()
