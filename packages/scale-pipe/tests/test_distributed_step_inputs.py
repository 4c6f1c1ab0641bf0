"""What stages may be given and may return: anything that can be sent, of any shape, on any stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Plain, batch, differences, micro_batches, mlp, mse, order_in, step_beside
from torch import Tensor, nn
from torch.nn import functional

from scale_core.testing import run_ranks
from scale_pipe import DeferredBatchNorm, DistributedPipe, NoChunk, StageError, split
from scale_pipe.distributed.step_inputs import check_mean_loss


@dataclass
class Mixed:
    """What a stage hands to the next: tensors that train and do not, one of them twice, a number and a word."""

    hidden: Tensor
    again: Tensor
    mask: Tensor
    scale: float
    words: dict[str, Any]


class Takes(nn.Module):
    """The first stage: keyword arguments, a mask that is no float, and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, bias: Tensor, table: Tensor, scale: float) -> Mixed:
        hidden = self.layer(x) + bias + table
        return Mixed(hidden, hidden, x > 0, scale, {"unused": [torch.sigmoid(hidden), None], "word": "kept"})


class Hands(nn.Module):
    """In the middle: has an argument of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, given: Mixed, extra: Tensor | None = None, times: int = 1) -> tuple[Tensor, Any]:
        assert given.hidden is given.again and given.mask.dtype is torch.bool and given.words["word"] == "kept"
        hidden = torch.where(given.mask, self.layer(given.hidden), given.again * given.scale) * times
        return (hidden if extra is None else hidden + extra, (given.mask, [given.scale]))


class Ends(nn.Module):
    """The last stage of three."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, given: tuple[Tensor, Any], shift: Tensor | None = None) -> Tensor:
        hidden, (mask, _) = given
        output: Tensor = self.layer(hidden.masked_fill(~mask, 0.5))
        return output if shift is None else output + shift


def nested() -> list[str]:
    """Keyword arguments, dataclasses, arguments of later stages, tensors that are not cut."""
    torch.manual_seed(0)
    layers = [Takes(), Hands(), Ends(), nn.Tanh()]
    x, target = batch(6)
    bias, extra, shift = (batch(6, seed=seed)[0] for seed in (4, 5, 6))
    table = torch.randn(3, 8, generator=torch.Generator().manual_seed(7)).sum(0)
    pipe = DistributedPipe(nn.Sequential(*layers), "zb_v", balance=[1, 1, 1, 1], chunks=3)
    inner: dict[int, dict[str, Any]] = {1: {"extra": extra, "times": 3}, 2: {"shift": shift}}

    def call(model: nn.Module, given: Any) -> Any:
        x, bias, extra, shift = given
        takes, hands, ends, tanh = layers
        mixed = takes(x, bias=bias, table=table, scale=0.5)
        return tanh(ends(hands(mixed, extra, 3), shift))

    parts = list(zip(zip(*(t.chunk(3) for t in (x, bias, extra, shift)), strict=True), target.chunk(3), strict=True))
    plain = Plain(nn.Sequential(*layers))
    expected = plain.step(parts, mse, order_in(pipe), call, sizes=[2, 2, 2])
    whole = {"bias": bias, "table": NoChunk(table), "scale": 0.5}
    first = (x,) if dist.get_rank() == 0 else ()
    loss = pipe.step(*first, target=target, loss_fn=mse, stage_inputs=inner, **(whole if first else {}))
    wrong = differences(pipe, plain.grads) + [f"loss {loss} and {expected}"] * (not torch.equal(loss, expected))
    pipe.evaluate(*first, stage_inputs=inner, **(whole if first else {}))
    inner[2] = {"shift": NoChunk(shift[0])}  # Nothing beside it that is cut.
    found = pipe.evaluate(*first, stage_inputs=inner, **(whole if first else {}))
    if found is not None:
        with torch.no_grad():
            outputs = [call(plain.model, (*given[:3], shift[0])) for given, _ in parts]
        wrong += ["a full tensor of a later stage"] * (not torch.allclose(found, torch.cat(outputs)))
    return wrong


class Grows(nn.Module):
    """Returns as many columns as the first value of its input says: another shape for each micro-batch and step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        columns = int(x[0, 0])
        hidden = (x[:, 1:2] * self.weight).expand(-1, columns)
        return (hidden, hidden.t()) if columns % 2 else (hidden * 2,)


class Shrinks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1))

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        return sum(((part * self.weight).mean() for part in given), torch.zeros(())).expand(2, 1)


def dynamic() -> list[str]:
    """Shapes, and how many tensors there are, change from micro-batch to micro-batch and from step to step."""
    torch.manual_seed(0)
    layers, wrong = [Grows(), Shrinks()], []
    pipe, plain = DistributedPipe(nn.Sequential(*layers), "1f1b", chunks=4), Plain(nn.Sequential(*layers))
    for step, columns in enumerate(([3, 1, 4, 1], [3, 1, 5, 9], [2, 6, 5, 9], [2, 6, 5, 9], [40, 6, 5, 9])):
        x, target = torch.randn(8, 2), torch.zeros(8, 1)
        x[:, 0] = torch.tensor(columns).repeat_interleave(2)
        x = torch.cat([x[:, :1], batch(8, 1)[0]], 1)
        wrong += [f"{step}: {words}" for words in step_beside(pipe, plain, x, target)]
    return wrong


class Parts(nn.Module):
    """Two results, of which the next stage uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.used(x), self.unused(x), torch.arange(3)


class First(nn.Module):
    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        return torch.relu_(given[0])


def gradients_that_are_not_there() -> list[str]:
    """An unused result, a frozen stage before and between others, and transposed memory."""
    wrong = []
    for frozen in ((), (0,), (2,)):
        torch.manual_seed(0)
        layers = nn.Sequential(
            Parts(), First(), nn.Linear(8, 8), nn.Flatten(0), nn.Unflatten(0, (-1, 8)), nn.Linear(8, 8)
        )
        for index in frozen:
            layers[index].requires_grad_(False)
        for schedule in ("1f1b", "zb_h1"):
            x, target = batch(6)
            pipe = DistributedPipe(layers, schedule, balance=[1 + len(frozen), 5 - len(frozen)], chunks=3)
            layers.zero_grad()
            wrong += step_beside(pipe, Plain(layers), x, target)
    return wrong


def loss_in_the_model() -> list[str]:
    """The last stage returns the loss itself; a loss function without a target."""
    x, model, wrong = batch()[0].double(), mlp(2).double(), []
    expected = torch.stack([part.pow(2).mean() for part in model(x).chunk(4)]).mean()
    inside = nn.Sequential(*mlp(2), _MeanSquare()).double()
    for pipe, loss_fn in (
        (DistributedPipe(inside, "zb_h1", balance=[3, 4], chunks=4), None),
        (DistributedPipe(mlp(2).double(), "gpipe", balance=[3, 3], chunks=4), _MeanSquare()),
    ):
        loss = pipe.step(x, loss_fn=loss_fn)
        wrong += [f"{loss} and {expected}"] * (not torch.allclose(loss, expected, rtol=1e-10))
    return wrong


class _MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).mean()


def checkpointed() -> list[str]:
    """Recomputed stages, with a mask that is drawn again; deferred batch norms."""
    wrong = []
    for mode in ("always", "except_last", "never"):
        model, x, target = mlp(), *batch(8)
        pipe, plain = DistributedPipe(mlp(), "zb_v", balance=[3] * 4, chunks=4, checkpoint=mode), Plain(model)
        for _ in range(2):
            wrong += [f"{mode}: {words}" for words in step_beside(pipe, plain, x, target)]
    norms = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    pipe = DistributedPipe(norms, "1f1b", balance=[1, 2], chunks=4, deferred_batch_norm=True)
    x, target = batch(6)  # Three micro-batches of the four that there could be.
    pipe.step(x, target=target, loss_fn=mse)
    whole = nn.BatchNorm1d(8)
    whole(x)
    for module in pipe.modules():
        if isinstance(module, DeferredBatchNorm):
            wrong += ["the batch norm has not moved"] * (int(module.num_batches_tracked or 0) != 1)
    if dist.get_rank() == 0:
        moved = pipe.state_dict()["0.running_var"]
        wrong += [f"{moved} and {whole.running_var}"] * (not torch.allclose(moved, whole.running_var))
    return wrong


def autocast() -> list[str]:
    """Around a step autocast holds for the forwards and the loss, and not for the backwards."""
    wrong = []
    for schedule, balance in (("1f1b", [2, 2]), ("zb_v", [1, 1, 1, 1])):
        pipe, plain = DistributedPipe(_mixed(), schedule, balance=balance, chunks=4), Plain(_mixed())
        x, target = batch(8)
        parts = micro_batches(x, target)
        expected = plain.step(parts, _mse_of_floats, order_in(pipe), _call_in_autocast)
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe.step(x, target=target, loss_fn=_mse_of_floats)
        wrong += differences(pipe, plain.grads) + [f"{loss} and {expected}"] * (not torch.equal(loss, expected))
    return wrong


class _Precise(nn.Linear):
    """In fp32 whatever is around it; so has to be its backward."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float())


def _mixed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), _Precise(8, 8), _Precise(8, 8), nn.Linear(8, 8))


def _call_in_autocast(model: nn.Module, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def _mse_of_floats(output: Tensor, target: Tensor) -> Tensor:
    return mse(output.float(), target)


class Block(nn.Module):
    """A model that is no sequence, cut by names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + gain * block(hidden)
        output: Tensor = self.head(hidden)
        return output


def by_names() -> list[str]:
    """Stages that `split` makes, with their names."""
    torch.manual_seed(0)
    model = Block()
    x, target = batch(6)
    plain = Plain(model)
    pipe = DistributedPipe(split(model, ["blocks.0", "blocks.2", "head"]), "zb_v", chunks=3)
    parts = micro_batches(x, target, 3)
    expected = plain.step(parts, mse, order_in(pipe), partial(_call_with, gain=0.5))
    loss = pipe.step(x, target=target, loss_fn=mse, gain=0.5)
    wrong = differences(pipe, plain.grads) + [f"{loss} and {expected}"] * (not torch.equal(loss, expected))
    names = {name for name, _ in model.named_parameters()}
    return wrong + [name for name, _ in pipe.named_parameters() if name not in names]


def _call_with(model: nn.Module, x: Tensor, **kwargs: Any) -> Any:
    return model(x, **kwargs)


CASES: dict[str, Callable[[], list[str]]] = {
    case.__name__: case
    for case in (
        nested,
        dynamic,
        gradients_that_are_not_there,
        loss_in_the_model,
        checkpointed,
        by_names,
        autocast,
    )
}


def all_cases() -> dict[str, list[str]]:
    return {name: case() for name, case in CASES.items()}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, list[str]]]:
    return run_ranks(all_cases, 2)


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_is_the_plain_model(name: str, outcomes: list[dict[str, list[str]]]) -> None:
    assert [outcome[name] for outcome in outcomes] == [[], []]


@pytest.mark.parametrize(
    "loss_fn, title",
    [
        (nn.MSELoss(reduction="sum"), "MSELoss"),
        (partial(functional.cross_entropy, reduction="sum"), "cross_entropy"),
        (partial(partial(functional.mse_loss, reduction="sum"), weight=None), "mse_loss"),
        (partial(nn.L1Loss(reduction="sum")), "L1Loss"),
    ],
)
def test_a_sum_is_refused(loss_fn: Any, title: str) -> None:
    with pytest.raises(
        ValueError, match=f'{title} has reduction="sum"\\. Write reduction="mean"; or, .* N \\* sum_loss'
    ):
        check_mean_loss(loss_fn)


def test_means_and_what_says_nothing_are_taken() -> None:
    means: list[Any] = [
        None,
        nn.MSELoss(),
        nn.KLDivLoss(reduction="batchmean"),
        functional.mse_loss,
        partial(functional.mse_loss, reduction="mean"),
        partial(partial(functional.mse_loss, reduction="sum"), reduction="mean"),
        lambda output: output.sum(),
    ]
    for loss_fn in means:
        check_mean_loss(loss_fn)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # That is what is meant.
def test_a_step_refuses_it_and_what_the_error_says_to_write_has_the_gradients_of_the_sum() -> None:
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    batch, target = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    sum_loss = nn.MSELoss(reduction="sum")
    expected = torch.autograd.grad(sum_loss(layers(batch), target), list(layers.parameters()))
    pipe = DistributedPipe(layers, "gpipe", balance=[2], chunks=2)
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(StageError, match='MSELoss has reduction="sum"'):
            call(batch, target=target, loss_fn=sum_loss)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    loss = pipe.step(batch, target=target, loss_fn=lambda output, target: 5 * sum_loss(output, target) / len(target))
    torch.testing.assert_close(loss, sum_loss(layers(batch), target).detach())
    for parameter, gradient in zip(pipe.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
