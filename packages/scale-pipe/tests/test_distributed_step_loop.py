"""How a pass ends and what is left of it: nothing but gradients, whatever was around it or came in its way."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Plain, batch, differences, micro_batches, mlp, mse, order_in, step_beside
from torch import Tensor, nn

from scale_core import ScaleDistributedError
from scale_core.testing import run_ranks
from scale_pipe import DistributedPipe, StageError


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_a_step_computes_gradients_in_whatever_mode_it_is_called(mode: Any) -> None:
    x, target = batch()
    pipe, plain = DistributedPipe(mlp(), "zb_v", balance=[6, 6], chunks=4), Plain(mlp())
    with mode():
        pipe.step(x, target=target, loss_fn=mse)
    pipe.step(x, target=target, loss_fn=mse)  # Gradients that were made in inference mode could not be added to.
    for _ in range(2):
        plain.step(micro_batches(x, target), mse, order_in(pipe))
    assert differences(pipe, plain.grads) == []


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


def test_a_view_that_a_custom_function_returns_is_the_next_stages_to_change() -> None:
    """Within a stage, torch refuses it and says to clone the view; between stages that is done."""
    x, target = batch()
    layers = [nn.Linear(8, 8), Viewing(copies=False), Triples(), nn.Linear(8, 8)]
    plain = Plain(nn.Sequential(layers[0], Viewing(copies=True), *layers[2:]))
    pipe = DistributedPipe(copy.deepcopy(nn.Sequential(*layers)), "gpipe", balance=[2, 2], chunks=4, stages_per_rank=2)
    assert step_beside(pipe, plain, x, target) == []
    whole = DistributedPipe(nn.Sequential(*layers), "gpipe", balance=[1, 3], chunks=4, stages_per_rank=2)
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
    layers, plain = nn.Sequential(Counts(), Scales()), Plain(nn.Sequential(Counts(), Scales()))
    plain.model.load_state_dict(layers.state_dict())
    x, target = batch()
    pipe = DistributedPipe(layers, "gpipe", balance=[1, 1], chunks=4)
    assert step_beside(pipe, plain, x, target) == []


def test_inputs_of_a_stage_that_are_not_cut_go_to_as_many_micro_batches_as_there_are() -> None:
    layers = nn.Sequential(Counts(), Scales())
    x, target = batch(3)
    pipe = DistributedPipe(layers, "gpipe", balance=[1, 1], chunks=4)
    output = pipe.evaluate(x, stage_inputs={1: {"times": 0.0}})
    assert torch.equal(output, torch.zeros(3, 8))
    pipe.step(x, target=target, loss_fn=mse, stage_inputs={1: {"times": 2.0}})


def test_a_step_that_is_interrupted_leaves_gradients_as_they_were_and_is_the_last() -> None:
    x, target = batch()
    pipe, plain = DistributedPipe(mlp(), "1f1b", balance=[12], chunks=4), Plain(mlp())
    pipe.step(x, target=target, loss_fn=mse)
    plain.step(micro_batches(x, target), mse, order_in(pipe))
    calls = []

    def interrupted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return mse(output, target)

    with pytest.raises(KeyboardInterrupt):
        pipe.step(x, target=target, loss_fn=interrupted)
    assert differences(pipe, plain.grads) == []
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


def test_an_evaluation_that_fails_leaves_the_gradients_of_wrappers() -> None:
    x, target = batch()
    pipe, plain = DistributedPipe(mlp(), "1f1b", balance=[12], chunks=4), Plain(mlp())
    pipe.stages[0] = Wrapper(pipe.stages[0])
    pipe.step(x, target=target, loss_fn=mse)
    plain.step(micro_batches(x, target), mse, lambda name: range(4))
    with pytest.raises(StageError, match="mat1 and mat2"):
        pipe.evaluate(x[:, :5])
    assert differences(pipe, plain.grads) == []


def test_wrappers_that_would_both_reduce_one_parameter_are_refused() -> None:
    x, target = batch()
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers[1].weight = layers[0].weight
    pipe = DistributedPipe(layers, "zb_v", balance=[1, 1], chunks=4)
    pipe.step(x, target=target, loss_fn=mse)
    for index, stage in pipe.stages.items():
        pipe.stages[index] = Wrapper(stage)
    for _ in range(2):
        with pytest.raises(
            StageError, match=r"1\.weight of stage 1 is one parameter with that of stage 0 on the same rank"
        ):
            pipe.step(x, target=target, loss_fn=mse)
    pipe.stages[1] = pipe.stages[1].module  # type: ignore[assignment]
    pipe.step(x, target=target, loss_fn=mse)


def test_one_optimizer_for_all_stages_has_stepped_none_before_the_last() -> None:
    x, target = batch()
    pipe = DistributedPipe(mlp(), "zb_v", balance=[6, 6], chunks=4)

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise OSError("no step")

    with pytest.raises(StageError) as raised:
        pipe.step(x, target=target, loss_fn=mse, optimizer=Fails(pipe.parameters(), lr=0.0))
    assert "had been stepped by then" not in str(raised.value)


def test_a_cap_of_memory_that_nothing_looks_at_is_refused() -> None:
    with pytest.raises(ValueError, match=r'memory_cap=2\.0 is for schedule="solve", and 1F1B does not look at it'):
        DistributedPipe(mlp(), "1f1b", balance=[12], memory_cap=2.0)


def test_an_evaluation_has_the_loss_the_output_or_both_as_it_is_asked() -> None:
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


def other_calls() -> dict[str, Any]:
    """Ranks that call different things: the error on this one, in how many seconds, and whether a step works after."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, target = batch()
    found: dict[str, Any] = {}
    for name in ("1f1b", "zb_v"):
        each = 1 if name == "1f1b" else 2
        pipe, plain = DistributedPipe(mlp(), name, balance=[12 // size // each] * size * each, chunks=4), Plain(mlp())
        plain.step(micro_batches(x, target), mse, order_in(pipe))
        pipe.step(x, target=target, loss_fn=mse)
        for odd in range(size):
            for evaluates in (rank == odd, rank != odd):
                began = time.monotonic()
                with pytest.raises(StageError) as raised:
                    pipe.evaluate(x) if evaluates else pipe.step(x, target=target, loss_fn=mse)
                seconds = time.monotonic() - began
                found[f"{name} {odd} {evaluates}"] = str(raised.value).splitlines()[0], seconds, evaluates
        found[name] = differences(pipe, plain.grads) + step_beside(pipe, plain, x, target)
    return found


def test_ranks_that_call_different_things_say_so_at_once_and_go_on() -> None:
    for results in zip(*(found.items() for found in run_ranks(other_calls, 3)), strict=True):
        assert len({key.rpartition(" ")[0] for key, _ in results}) == 1
        if " " not in results[0][0]:
            assert [wrong for _, wrong in results] == [[]] * 3
            continue
        texts, seconds, evaluates = zip(*(found for _, found in results), strict=True)
        assert len(set(texts)) == 1 and max(seconds) < 60
        first = next(rank for rank in range(3) if evaluates[rank] != evaluates[0])
        mine = "an evaluation with pipe.evaluate(...)" if evaluates[first] else "a step with pipe.step(...)"
        assert f"rank {first} began {mine}, and rank " in texts[0]
