"""What stages may be given and may return: anything that can be sent, of any shape, on any stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Plain, assert_equal, assert_near, batch, check_grads, micro_batches, mlp, mse
from torch import Tensor, nn
from torch.nn import functional

from scale_pipe import DeferredBatchNorm, DistributedPipe, NoChunk, PipelineOptions, StageError, split
from scale_pipe.distributed.loss import check_mean_loss


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


@pytest.mark.ranks(2)
def test_stages_take_keywords_dataclasses_and_own_inputs() -> None:
    torch.manual_seed(0)
    takes, hands, ends, tanh = layers = Takes(), Hands(), Ends(), nn.Tanh()
    x, target = batch(6)
    bias, extra, shift = (batch(6, seed=seed)[0] for seed in (4, 5, 6))
    table = torch.randn(3, 8, generator=torch.Generator().manual_seed(7)).sum(0)
    pipe = DistributedPipe(nn.Sequential(*layers), "zb_v", balance=[1, 1, 1, 1], chunks=3)

    def call(model: nn.Module, inputs: Any) -> Any:
        x, bias, extra, shift = inputs
        return tanh(ends(hands(takes(x, bias=bias, table=table, scale=0.5), extra, 3), shift))

    parts = list(zip(zip(*(t.chunk(3) for t in (x, bias, extra, shift)), strict=True), target.chunk(3), strict=True))
    plain = Plain(nn.Sequential(*layers), pipe)
    expected = plain.step(parts, call=call, sizes=[2, 2, 2])
    args, kwargs = ((x,), {"bias": bias, "table": NoChunk(table), "scale": 0.5}) if dist.get_rank() == 0 else ((), {})
    stage_inputs: dict[int, dict[str, Any]] = {1: {"extra": extra, "times": 3}, 2: {"shift": shift}}
    loss = pipe.step(*args, target=target, loss_fn=mse, stage_inputs=stage_inputs, **kwargs)
    assert_equal(loss, expected)
    check_grads(pipe, plain.grads)
    pipe.evaluate(*args, stage_inputs=stage_inputs, **kwargs)
    stage_inputs[2] = {"shift": NoChunk(shift[0])}  # No other input of this stage is divided.
    output = pipe.evaluate(*args, stage_inputs=stage_inputs, **kwargs)
    if output is not None:
        with torch.no_grad():
            outputs = [call(plain.model, (*inputs[:3], shift[0])) for inputs, _ in parts]
        torch.testing.assert_close(output, torch.cat(outputs))


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


@pytest.mark.ranks(2)
def test_shapes_and_numbers_of_tensors_change_at_any_time() -> None:
    """From micro-batch to micro-batch, and from step to step."""
    torch.manual_seed(0)
    layers = [Grows(), Shrinks()]
    pipe = DistributedPipe(nn.Sequential(*layers), "1f1b", chunks=4)
    plain = Plain(nn.Sequential(*layers), pipe)
    for columns in ([3, 1, 4, 1], [3, 1, 5, 9], [2, 6, 5, 9], [2, 6, 5, 9], [40, 6, 5, 9]):
        x = torch.cat([torch.tensor(columns).repeat_interleave(2)[:, None], batch(8, 1)[0]], 1)
        plain.step_with(pipe, x, torch.zeros(8, 1))


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


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("frozen", [(), (0,), (2,)], ids=["none", "first", "middle"])
def test_results_without_gradients_are_as_in_the_plain_model(frozen: tuple[int, ...], schedule: str) -> None:
    """An unused result, a frozen stage before and between others, and transposed memory."""
    torch.manual_seed(0)
    layers = nn.Sequential(Parts(), First(), nn.Linear(8, 8), nn.Flatten(0), nn.Unflatten(0, (-1, 8)), nn.Linear(8, 8))
    for index in frozen:
        layers[index].requires_grad_(False)
    pipe = DistributedPipe(layers, schedule, balance=[1 + len(frozen), 5 - len(frozen)], chunks=3)
    Plain(layers, pipe).step_with(pipe, *batch(6))


class MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).mean()


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("inside", [True, False], ids=["the last stage returns the loss", "a loss without a target"])
def test_a_loss_needs_no_target(inside: bool) -> None:
    x, model = batch()[0].double(), mlp(2).double()
    expected = torch.stack([part.pow(2).mean() for part in model(x).chunk(4)]).mean()
    if inside:
        layers, loss_fn, schedule, balance = nn.Sequential(*mlp(2), MeanSquare()).double(), None, "zb_h1", [3, 4]
    else:
        layers, loss_fn, schedule, balance = mlp(2).double(), MeanSquare(), "gpipe", [3, 3]
    pipe = DistributedPipe(layers, schedule, balance=balance, chunks=4)
    assert_near(pipe.step(x, loss_fn=loss_fn), expected.detach())


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_recomputed_stages_have_the_same_gradients(mode: str) -> None:
    pipe = DistributedPipe(mlp(), "zb_v", balance=[3] * 4, chunks=4, checkpoint=mode)
    plain = Plain(mlp(), pipe)
    for _ in range(2):
        plain.step_with(pipe, *batch())


@pytest.mark.ranks(2)
def test_a_deferred_batch_norm_moves_once_per_step() -> None:
    norms = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    pipe = DistributedPipe(norms, "1f1b", balance=[1, 2], chunks=4, options=PipelineOptions(deferred_batch_norm=True))
    x, target = batch(6)  # Three micro-batches of the four that there could be.
    pipe.step(x, target=target, loss_fn=mse)
    for module in pipe.modules():
        if isinstance(module, DeferredBatchNorm):
            assert int(module.num_batches_tracked or 0) == 1
    if dist.get_rank() == 0:
        plain = nn.BatchNorm1d(8)
        plain(x)
        torch.testing.assert_close(pipe.state_dict()["0.running_var"], plain.running_var)


class Precise(nn.Linear):
    """In fp32 whatever is around it; so has to be its backward."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float())


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("schedule, balance", [("1f1b", [2, 2]), ("zb_v", [1, 1, 1, 1])])
def test_autocast_holds_for_forwards_and_the_loss(schedule: str, balance: list[int]) -> None:
    """And not for the backwards."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Precise(8, 8), Precise(8, 8), nn.Linear(8, 8))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse(output.float(), target)

    def call(model: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    pipe, (x, target) = DistributedPipe(model(), schedule, balance=balance, chunks=4), batch()
    plain = Plain(model(), pipe)
    expected = plain.step(micro_batches(x, target), loss_fn, call)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(pipe.step(x, target=target, loss_fn=loss_fn), expected)
    check_grads(pipe, plain.grads)


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


@pytest.mark.ranks(2)
def test_stages_cut_by_names_keep_the_names() -> None:
    torch.manual_seed(0)
    model, (x, target) = Block(), batch(6)
    names = {name for name, _ in model.named_parameters()}
    pipe = DistributedPipe(split(model, ["blocks.0", "blocks.2", "head"]), "zb_v", chunks=3)
    plain = Plain(model, pipe)
    expected = plain.step(micro_batches(x, target, 3), call=lambda model, x: model(x, gain=0.5))
    assert_equal(pipe.step(x, target=target, loss_fn=mse, gain=0.5), expected)
    check_grads(pipe, plain.grads)
    assert {name for name, _ in pipe.named_parameters()} <= names


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
def test_what_the_error_says_to_write_has_the_gradients_of_a_sum() -> None:
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
