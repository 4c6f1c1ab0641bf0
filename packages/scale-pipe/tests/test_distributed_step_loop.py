"""How a pass ends and what is left of it: nothing but gradients, whatever was around it or came in its way."""

from __future__ import annotations

import copy
import gc
import re
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Plain, batch, check_grads, micro_batches, mlp, mse
from torch import Tensor, nn

from scale_core import ScaleDistributedError
from scale_pipe import DistributedPipe, PipelineOptions, StageError


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_a_step_computes_gradients_in_any_mode(mode: Any) -> None:
    x, target = batch()
    pipe = DistributedPipe(mlp(), "zb_v", balance=[6, 6], chunks=4)
    plain = Plain(mlp(), pipe)
    with mode():
        pipe.step(x, target=target, loss_fn=mse)
    pipe.step(x, target=target, loss_fn=mse)  # Gradients that were made in inference mode could not be added to.
    for _ in range(2):
        plain.step(micro_batches(x, target))
    check_grads(pipe, plain.grads)


class _ViewOfItsInput(torch.autograd.Function):
    """Squares; what its backward needs, autograd does not watch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * ctx.x * gradients[0]


class Viewing(nn.Module):
    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        view: Tensor = _ViewOfItsInput.apply(x)  # type: ignore[no-untyped-call]
        return view.clone() if self.copies else view


class Triples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3)


def test_the_next_stage_may_change_a_view_of_a_custom_function() -> None:
    """Within a stage, torch refuses it and says to clone the view; between stages that is done."""
    x, target = batch()
    layers = [nn.Linear(8, 8), Viewing(copies=False), Triples(), nn.Linear(8, 8)]
    pipe = DistributedPipe(
        copy.deepcopy(nn.Sequential(*layers)),
        "gpipe",
        balance=[2, 2],
        chunks=4,
        options=PipelineOptions(stages_per_rank=2),
    )
    Plain(nn.Sequential(layers[0], Viewing(copies=True), *layers[2:]), pipe).step_with(pipe, x, target)
    whole = DistributedPipe(
        nn.Sequential(*layers), "gpipe", balance=[1, 3], chunks=4, options=PipelineOptions(stages_per_rank=2)
    )
    with pytest.raises(StageError, match="is a view and is being modified inplace"):
        whole.step(x, target=target, loss_fn=mse)


class _Activation:
    """Something that lives as long as the graph of a micro-batch."""


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[Any]) -> Tensor:
        ctx.activation = _Activation()
        log.append(weakref.ref(ctx.activation))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Marks(nn.Module):
    """A layer that counts the micro-batches that are live."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.log = log
        self.peak = 0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Marked.apply(self.layer(x), self.log)  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(mark() is not None for mark in self.log))
        return output * output


@contextmanager
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(("schedule", "balance", "peak"), [("gpipe", [1], 6), ("1f1b", [1], 1), ("zb_v", [1, 1], 2)])
def test_a_micro_batch_lives_no_longer_than_the_schedule_says(schedule: str, balance: list[int], peak: int) -> None:
    log: list[Any] = []
    layers = [Marks(log) for _ in balance]
    x, target = batch(12)
    pipe = DistributedPipe(nn.Sequential(*layers), schedule, balance=balance, chunks=6)
    with without_collection():
        pipe.step(x, target=target, loss_fn=mse)
        assert max(layer.peak for layer in layers) == peak
        assert [mark for mark in log if mark() is not None] == []


def test_nothing_is_kept_of_a_step_that_has_failed() -> None:
    log: list[Any] = []
    x, target = batch()
    pipe = DistributedPipe(nn.Sequential(Marks(log)), "gpipe", chunks=4)
    with without_collection():
        told = ""
        try:
            pipe.step(x, target=target, loss_fn=lambda output, target: output)
        except StageError as error:  # pytest.raises would keep it, and its traceback what is looked for here.
            told = str(error)
        assert "has to be a tensor with one element" in told
        assert log and [mark for mark in log if mark() is not None] == []


class Counts(nn.Module):
    """Hands on a buffer that the next micro-batch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return self.layer(x), self.count


class Scales(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor], times: float = 1.0) -> Tensor:
        return given[0] * given[1] * times


def test_a_buffer_arrives_as_it_was_when_it_was_handed_on() -> None:
    layers = nn.Sequential(Counts(), Scales())
    model = copy.deepcopy(layers)
    pipe = DistributedPipe(layers, "gpipe", balance=[1, 1], chunks=4)
    Plain(model, pipe).step_with(pipe, *batch())


def test_undivided_inputs_of_a_stage_go_to_all_micro_batches() -> None:
    layers = nn.Sequential(Counts(), Scales())
    x, target = batch(3)
    pipe = DistributedPipe(layers, "gpipe", balance=[1, 1], chunks=4)
    output = pipe.evaluate(x, stage_inputs={1: {"times": 0.0}})
    assert torch.equal(output, torch.zeros(3, 8))
    pipe.step(x, target=target, loss_fn=mse, stage_inputs={1: {"times": 2.0}})


def test_an_interrupted_step_leaves_gradients_and_is_the_last() -> None:
    x, target = batch()
    pipe = DistributedPipe(mlp(), "1f1b", balance=[12], chunks=4)
    plain = Plain(mlp(), pipe)
    plain.step_with(pipe, x, target)
    calls = []

    def interrupted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return mse(output, target)

    with pytest.raises(KeyboardInterrupt):
        pipe.step(x, target=target, loss_fn=interrupted)
    check_grads(pipe, plain.grads)
    with pytest.raises(ScaleDistributedError, match=r"rank 0 left step 2: KeyboardInterrupt\(\)"):
        pipe.step(x, target=target, loss_fn=mse)


class Wrapper(nn.Module):
    """A data-parallel wrapper of somebody's, with gradients that wait for their reduction."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)

    def no_sync(self) -> Any:
        return nullcontext()


def test_a_failed_evaluation_leaves_the_gradients_of_wrappers() -> None:
    x, target = batch()
    pipe, plain = DistributedPipe(mlp(), "1f1b", balance=[12], chunks=4), Plain(mlp(), lambda name: range(4))
    pipe.stages[0] = Wrapper(pipe.stages[0])
    pipe.step(x, target=target, loss_fn=mse)
    plain.step(micro_batches(x, target))
    with pytest.raises(StageError, match="mat1 and mat2"):
        pipe.evaluate(x[:, :5])
    check_grads(pipe, plain.grads)


def test_wrappers_that_both_reduce_one_parameter_are_refused() -> None:
    x, target = batch()
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers[1].weight = layers[0].weight
    pipe = DistributedPipe(layers, "zb_v", balance=[1, 1], chunks=4)
    pipe.step(x, target=target, loss_fn=mse)
    for index, stage in pipe.stages.items():
        pipe.stages[index] = Wrapper(stage)
    for _ in range(2):
        with pytest.raises(StageError, match=r"1\.weight of stage 1 is also a parameter of stage 0 on this rank"):
            pipe.step(x, target=target, loss_fn=mse)
    pipe.stages[1] = pipe.stages[1].module  # type: ignore[assignment]
    pipe.step(x, target=target, loss_fn=mse)


def test_one_optimizer_for_all_stages_steps_after_the_last() -> None:
    x, target = batch()
    pipe = DistributedPipe(mlp(), "zb_v", balance=[6, 6], chunks=4)

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise OSError("no step")

    with pytest.raises(StageError) as raised:
        pipe.step(x, target=target, loss_fn=mse, optimizer=Fails(pipe.parameters(), lr=0.0))
    assert "had been stepped by then" not in str(raised.value)


def test_a_cap_of_memory_that_nothing_looks_at_is_refused() -> None:
    with pytest.raises(ValueError, match=r'memory_cap=2\.0 is for schedule="solve", and has no effect on 1F1B'):
        DistributedPipe(mlp(), "1f1b", balance=[12], options=PipelineOptions(memory_cap=2.0))


def test_an_evaluation_has_the_loss_the_output_or_both() -> None:
    x, target = batch()
    pipe, model = DistributedPipe(mlp(), "zb_v", balance=[6, 6], chunks=4), mlp()
    with torch.no_grad():
        outputs = [model(part) for part in x.chunk(4)]
        losses = [mse(output, to) for output, to in zip(outputs, target.chunk(4), strict=True)]
        mean = losses[0] / 4 + losses[1] / 4 + losses[2] / 4 + losses[3] / 4
    assert torch.equal(pipe.evaluate(x), torch.cat(outputs))
    loss = pipe.evaluate(x, target=target, loss_fn=mse)
    assert torch.equal(loss, mean) and not loss.requires_grad
    loss, output = pipe.evaluate(x, target=target, loss_fn=mse, with_output=True)
    assert torch.equal(loss, mean) and torch.equal(output, torch.cat(outputs))
    assert torch.equal(pipe.evaluate(x, loss_fn=lambda output: output.sum()), sum(y.sum() / 4 for y in outputs))
    assert all(param.grad is None for param in pipe.parameters())
    with torch.inference_mode():  # Then too, what follows can train.
        assert torch.equal(pipe.evaluate(x, target=target, loss_fn=mse), mean)
    pipe.step(x, target=target, loss_fn=mse)
    for wrong, words in ((mse, "No target was given"), (lambda output: output, "has to be a tensor with one element")):
        with pytest.raises(StageError, match=words):
            pipe.evaluate(x, loss_fn=wrong)


@pytest.mark.fault(21)
@pytest.mark.ranks(3, in_turn=True)
@pytest.mark.parametrize("schedule, balance", [("1f1b", [4] * 3), ("zb_v", [2] * 6)])
def test_ranks_that_call_different_things_say_so_and_go_on(schedule: str, balance: list[int]) -> None:
    (rank, size), (x, target) = (dist.get_rank(), dist.get_world_size()), batch()
    pipe = DistributedPipe(mlp(), schedule, balance=balance, chunks=4)
    plain = Plain(mlp(), pipe)
    plain.step_with(pipe, x, target)
    for odd in range(size):
        for odd_evaluates in (True, False):
            evaluates = [(other == odd) == odd_evaluates for other in range(size)]
            first = next(other for other in range(size) if evaluates[other] != evaluates[0])
            call = "an evaluation with pipe.evaluate(...)" if evaluates[first] else "a step with pipe.step(...)"
            began = time.monotonic()
            with pytest.raises(StageError, match=re.escape(f"rank {first} began {call}, and rank ")) as caught:
                pipe.evaluate(x) if evaluates[rank] else pipe.step(x, target=target, loss_fn=mse)
            assert time.monotonic() - began < 60
            texts: list[Any] = [None] * size
            dist.all_gather_object(texts, str(caught.value).splitlines()[0])
            assert len(set(texts)) == 1
    check_grads(pipe, plain.grads)
    plain.step_with(pipe, x, target)
