"""The loss of a batch in which micro-batches have different numbers of targets that count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from distributed_cases import assert_near, check_grads
from torch import Tensor, nn
from torch.nn import functional

from scale_pipe import DistributedPipe, PipelineOptions, StageError
from scale_pipe.distributed.loss_graph import element_means

WORDS, IGNORED = 7, -100
CLASS_WEIGHTS = torch.linspace(0.5, 2, WORDS, dtype=torch.float64)


def layers() -> nn.Sequential:
    """[N, 5] of words to logits [N, 5, WORDS]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS)).double()


def words(*counted: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and targets [samples, 5], of which the first rows have so many targets that count, and the others 5."""
    torch.manual_seed(1)
    tokens, target = torch.randint(WORDS, (samples, 5)), torch.randint(WORDS, (samples, 5))
    for row, count in enumerate(counted):
        target[row, count:] = IGNORED
    return tokens, target


def flat(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    """Each place predicts the next word, as models of transformers compute it."""
    return flat(logits, functional.pad(target, (0, 1), value=IGNORED)[:, 1:])


def of_losses(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and whether they count, [N * 5] each."""
    return flat(logits, target, reduction="none"), target.flatten() != IGNORED


def masked(logits: Tensor, target: Tensor) -> Tensor:
    losses, counts = of_losses(logits, target)
    return (losses * counts).sum() / counts.sum()


def masked_by_floats(logits: Tensor, target: Tensor) -> Tensor:
    losses, counts = of_losses(logits, target)
    return (losses * counts.double()).sum() / counts.double().sum()


def selected(logits: Tensor, target: Tensor) -> Tensor:
    losses, counts = of_losses(logits, target)
    return losses[counts].mean()


def zero_without_words(logits: Tensor, target: Tensor) -> Tensor:
    if not (target != IGNORED).any():
        return logits.sum() * 0
    return flat(logits, target.clone())


def penalized(logits: Tensor, target: Tensor) -> Tensor:
    return flat(logits, target) + 0.1 * logits.square().mean()


MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flattened": flat,
    "transposed": lambda logits, target: functional.cross_entropy(logits.transpose(1, 2), target),
    "log probabilities": lambda logits, target: functional.nll_loss(
        logits.log_softmax(-1).flatten(0, 1), target.view(-1)
    ),
    "divided": lambda logits, target: flat(logits, target) / 4,
    "scaled": lambda logits, target: torch.tensor(2.0, dtype=torch.float64) * -(-flat(logits, target)).reshape(1),
    "class weights": partial(flat, weight=CLASS_WEIGHTS),
    "label smoothing": partial(flat, label_smoothing=0.1),
    "another index": partial(flat, ignore_index=3),
}


def compare(loss_fn: Any, batch: tuple[Tensor, Tensor], schedule: str = "1f1b") -> None:
    """A step and evaluations of a pipeline of two ranks have the loss and the gradients of the plain model."""
    tokens, target = batch
    plain, balance = layers(), [2, 2] if schedule == "1f1b" else [1, 1, 1, 1]
    pipe = DistributedPipe(copy.deepcopy(plain), schedule, balance=balance, chunks=4)
    expected = loss_fn(plain(tokens), target)
    expected.backward()
    losses = [pipe.step(tokens, target=target, loss_fn=loss_fn)]
    losses.append(pipe.evaluate(tokens, target=target, loss_fn=loss_fn))
    with torch.inference_mode():
        inputs = tokens.clone(), target.clone()
        losses.append(pipe.evaluate(inputs[0], target=inputs[1], loss_fn=loss_fn, with_output=True)[0])
    assert_near(losses, [expected.detach().reshape(())] * 3, "losses of a step, an evaluation and in inference mode")
    check_grads(pipe, {name: param.grad for name, param in plain.named_parameters()}, assert_near)  # type: ignore[misc]


NO_TARGET = words(0, 0, 3)
"""In the first micro-batch no target counts."""


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("name", MEANS)
def test_means_over_targets_are_those_of_the_batch(name: str) -> None:
    batches = [
        words(2, 1, 5, 5, 2),
        *([NO_TARGET] if name in ("flattened", "class weights", "label smoothing") else []),
    ]
    for tokens, target in batches:
        compare(MEANS[name], (tokens, target.masked_fill(target == IGNORED, 3) if name == "another index" else target))


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_micro_batches_of_uneven_size_count_their_targets(schedule: str) -> None:
    compare(flat, words(1, 4, samples=7), schedule)


@pytest.mark.ranks(2)
def test_a_batch_without_a_target_that_counts_is_nan() -> None:
    compare(flat, words(*[0] * 8))


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("loss_fn", [shifted, masked, selected, penalized])
def test_any_mean_is_taken_if_all_micro_batches_count_alike(loss_fn: Any) -> None:
    for batch in (words(), words(*[3] * 8)):
        compare(loss_fn, batch)


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("batch", [words(2, 1, 5), words(1, 4, samples=7)], ids=["even", "uneven"])
def test_what_the_error_says_to_write_is_the_mean_of_the_batch(batch: tuple[Tensor, Tensor]) -> None:
    count = (batch[1] != IGNORED).sum()

    def loss_fn(output: Tensor, part: Tensor) -> Tensor:
        return flat(output, part, reduction="sum") / count * (len(batch[1]) / len(part))

    compare(loss_fn, batch)


def error_of(loss_fn: Any, batch: tuple[Tensor, Tensor]) -> str:
    """The error of a step, which leaves weights as they are, and no gradient."""
    pipe = DistributedPipe(layers(), "1f1b", balance=[2, 2], chunks=4)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    before = [param.detach().clone() for param in pipe.parameters()]
    with pytest.raises(StageError) as caught:
        pipe.step(batch[0], target=batch[1], loss_fn=loss_fn, optimizer=optimizer)
    assert all(param.grad is None for param in pipe.parameters())
    assert all(map(torch.equal, pipe.parameters(), before))
    return str(caught.value)


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize(
    "loss_fn, counted, number",
    [
        (shifted, (2, 1, 5), "1, 8, 8, 8"),
        (masked, (2, 1, 5), "3, 10, 10, 10"),
        (masked_by_floats, (2, 1, 5), "3, 10, 10, 10"),
        (selected, (2, 1, 5), "3, 10, 10, 10"),
        (shifted, (0, 0), "0, 8, 8, 8"),
        (masked, (0, 0), "0, 10, 10, 10"),
        (selected, (0, 0), "0, 10, 10, 10"),
        (zero_without_words, (0, 0), "0, 10, 10, 10"),
    ],
)
def test_a_mean_of_means_is_refused(loss_fn: Any, counted: tuple[int, ...], number: str) -> None:
    text = error_of(loss_fn, words(*counted))
    assert f"the loss is a mean over {number} elements in micro-batches of 2, 2, 2, 2 samples" in text
    assert "count = (target != -100).sum()" in text


@pytest.mark.ranks(2)
def test_means_that_want_different_weights_are_refused() -> None:
    text = "adds a mean over the targets that count and a mean over 70, 70, 70, 70 other"
    assert text in error_of(penalized, words(2, 1, 5))


class LossInside(nn.Module):
    """The last stage of a model that computes its own loss of the shifted words."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, WORDS)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return shifted(self.linear(hidden), labels)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_loss_that_the_model_computes_is_looked_at_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 8), LossInside()).double()
    for padding, right in (((), True), ((2, 1), False)):
        tokens, labels = words(*padding)
        pipe = DistributedPipe(
            copy.deepcopy(model), "gpipe", balance=[1, 1], options=PipelineOptions(stages_per_rank=2), chunks=4
        )
        inputs = {1: {"labels": labels}}
        if right:
            expected = model[1](model[0](tokens), labels)
            torch.testing.assert_close(pipe.step(tokens, stage_inputs=inputs), expected.detach())
        else:
            with pytest.raises(StageError, match="the loss is a mean over 1, 8, 8, 8 elements"):
                pipe.step(tokens, stage_inputs=inputs)


def test_the_graph_tells_means_with_factors_and_numbers() -> None:
    x, target = torch.ones(4, 3, requires_grad=True), torch.tensor([0, 1, IGNORED, 2])
    switch = torch.tensor(False)
    loss = (
        functional.cross_entropy(x, target) * 0.5
        + functional.mse_loss(x, torch.zeros(4, 3)) / 4
        - torch.where(switch, x.mean(), x[:2].mean().nan_to_num())
        + x.sum() / torch.tensor(3)
        + x.sum() / torch.tensor(2.5)
        + x.sum() / x.square().sum()
        + x.mean().exp()
        + x.detach().mean()
    )
    means = {(float(mean.factor), float(mean.num_elements)): mean.cross_entropy for mean in element_means(loss)}
    assert list(means) == [(0.5, 3), (0.25, 12), (0, 12), (-1, 6), (1, 3), (1, 2.5)]
    entropy = means.pop((0.5, 3))
    assert entropy is not None and entropy.ignore_index == IGNORED and torch.equal(entropy.target, target)
    assert not any(means.values())
    assert element_means(x.detach().mean()) == []


def test_a_function_with_hooks_of_its_own_is_passed() -> None:
    class Passed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    loss: Tensor = Passed.apply(torch.ones(4, requires_grad=True).mean())  # type: ignore[no-untyped-call]
    assert [mean.num_elements for mean in element_means(loss)] == [4]
