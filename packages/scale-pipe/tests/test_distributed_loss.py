"""The loss of a batch in which micro-batches have different numbers of targets that count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from scale_core.testing import run_ranks
from scale_pipe import DistributedPipe, StageError
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

EMPTY = ("flattened", "class weights", "label smoothing")
"""What is tried with a micro-batch of which no target counts, as well."""


def differences(title: str, loss_fn: Any, batch: tuple[Tensor, Tensor], *, schedule: str = "1f1b") -> list[str]:
    """What a step and an evaluation of a pipeline of two ranks do other than the plain model."""
    tokens, target = batch
    if title == "another index":
        target = target.masked_fill(target == IGNORED, 3)
    plain, balance = layers(), [2, 2] if schedule == "1f1b" else [1, 1, 1, 1]
    pipe = DistributedPipe(copy.deepcopy(plain), schedule, balance=balance, chunks=4)
    expected = loss_fn(plain(tokens), target)
    expected.backward()
    losses = {"step": pipe.step(tokens, target=target, loss_fn=loss_fn)}
    losses["evaluation"] = pipe.evaluate(tokens, target=target, loss_fn=loss_fn)
    with torch.inference_mode():
        inputs = tokens.clone(), target.clone()
        losses["inference"], _ = pipe.evaluate(inputs[0], target=inputs[1], loss_fn=loss_fn, with_output=True)
    close = partial(torch.allclose, rtol=1e-12, atol=1e-14, equal_nan=True)
    wrong = [
        f"{title}: {name} {loss}" for name, loss in losses.items() if not close(loss, expected.detach().reshape(()))
    ]
    grads = {name: param.grad for name, param in plain.named_parameters()}
    for name, param in pipe.named_parameters():
        grad = grads[name]
        assert param.grad is not None and grad is not None
        wrong += [f"{title}: {name}"] * (not close(param.grad, grad))
    return wrong


def refused(loss_fn: Any, batch: tuple[Tensor, Tensor], **options: Any) -> str:
    """The error of a step, which leaves no gradient."""
    tokens, target = batch
    pipe = DistributedPipe(layers(), "1f1b", balance=[2, 2], chunks=4)
    if options.pop("with_optimizer", False):
        options["optimizer"] = torch.optim.SGD(pipe.parameters(), lr=0.1)
    before = [param.detach().clone() for param in pipe.parameters()]
    try:
        pipe.step(tokens, target=target, loss_fn=loss_fn, **options)
    except StageError as error:
        assert all(param.grad is None for param in pipe.parameters())
        assert all(map(torch.equal, pipe.parameters(), before))
        return str(error)
    return "taken"


def _by_count(total: Tensor, target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """What the error says to write."""

    def loss_fn(output: Tensor, part: Tensor) -> Tensor:
        return flat(output, part, reduction="sum") / total * (len(target) / len(part))

    return loss_fn


def on_two_ranks() -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    outcomes["means"] = [
        wrong
        for title, loss_fn in MEANS.items()
        for padding in ([2, 1, 5, 5, 2], [0, 0, 3])[: 1 + (title in EMPTY)]
        for wrong in differences(title, loss_fn, words(*padding))
    ]
    uneven = words(1, 4, samples=7)
    outcomes["uneven"] = differences("uneven", flat, uneven) + differences("zb_v", flat, uneven, schedule="zb_v")
    outcomes["no target"] = differences("no target", flat, words(*[0] * 8))
    outcomes["same everywhere"] = [
        wrong
        for name in (shifted, masked, selected, penalized)
        for batch in (words(), words(*[3] * 8))
        for wrong in differences(name.__name__, name, batch)
    ]
    for batch in (words(2, 1, 5), uneven):
        total = (batch[1] != IGNORED).sum()
        outcomes.setdefault("by count", []).extend(differences("by count", _by_count(total, batch[1]), batch))
    for loss_fn in (shifted, masked, masked_by_floats, selected, penalized):
        outcomes[loss_fn.__name__] = refused(loss_fn, words(2, 1, 5), with_optimizer=True)
    for loss_fn in (shifted, masked, selected, zero_without_words):
        outcomes[f"{loss_fn.__name__}, none"] = refused(loss_fn, words(0, 0))
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("name", ["means", "uneven", "no target", "same everywhere", "by count"])
def test_loss_and_gradients_are_those_of_the_batch(name: str, outcomes: list[dict[str, Any]]) -> None:
    assert [outcome[name] for outcome in outcomes] == [[], []]


@pytest.mark.parametrize(
    "name, counted",
    [
        ("shifted", "1, 8, 8, 8"),
        ("masked", "3, 10, 10, 10"),
        ("masked_by_floats", "3, 10, 10, 10"),
        ("selected", "3, 10, 10, 10"),
        ("shifted, none", "0, 8, 8, 8"),
        ("masked, none", "0, 10, 10, 10"),
        ("selected, none", "0, 10, 10, 10"),
        ("zero_without_words, none", "0, 10, 10, 10"),
    ],
)
def test_a_mean_of_means_is_refused(name: str, counted: str, outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert f"the loss is a mean over {counted} elements in micro-batches of 2, 2, 2, 2 samples" in outcome[name]
        assert "count = (target != -100).sum()" in outcome[name]


def test_means_that_want_different_weights_are_refused(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert "adds a mean over the targets that count and a mean over 70, 70, 70, 70 other" in outcome["penalized"]


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
        pipe = DistributedPipe(copy.deepcopy(model), "gpipe", balance=[1, 1], stages_per_rank=2, chunks=4)
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
