"""What tests of several packages share: small models, a training loop, and one comparison with one process.

A training is recorded as scale-check records it, and `assert_parity` compares the recordings of ranks with that of one
process by scale-check's comparison. Models are in float64, so that another order of sums stays far below `REL`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_adascale import AdaScale
from scale_check.comparison import BUG_RATIO, ParityVerdict, Report, compare
from scale_check.recording import Key, Phase, Recording, full_value, gradient_of, plain_name
from scale_core.comm.group import Group, group_of
from scale_moe import MoE

T = TypeVar("T")
REL = 1e-9


class Block(nn.Module):
    """A residual block: norm, up, down."""

    def __init__(self, width: int = 6, hidden: int = 10, bias: bool = True) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width, bias=bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class ExpertBlock(nn.Module):
    """A residual block: norm, experts."""

    def __init__(self, width: int, hidden: int, num_experts: int, routing: Any, **options: Any) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(width), MoE(width, hidden, num_experts, routing, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.norm(x))
        return y


class Net(nn.Module):
    """Blocks between an embedding and a head, in float64; of words, where both may have one weight, or of numbers."""

    def __init__(
        self,
        layers: int = 4,
        *,
        words: int = 0,
        inputs: int = 3,
        outputs: int = 2,
        tied: bool = False,
        block: Callable[[], nn.Module] = Block,
        width: int = 6,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(words, width) if words else nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(width, words or outputs, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Normal numbers in float64, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def recorded(losses: Sequence[float], state: Mapping[str, Tensor] | None = None, **numbers: Sequence[Any]) -> Recording:
    """Returns the recording of a training.

    Args:
        losses: Of each step; on ranks, the mean over the rank's own samples.
        state: The full parameters and buffers after the last step, by their names in the plain model.
        **numbers: What all ranks must have alike in each step, as norms and gains: a number or several.
    """
    tensors: dict[Key, Tensor] = {}
    for step, loss in enumerate(losses, start=1):
        tensors[Key(step, Phase.LOSS, "")] = torch.tensor(loss, dtype=torch.float64)
    for name, of_steps in numbers.items():
        for step, number in enumerate(of_steps, start=1):
            tensors[Key(step, Phase.BUFFER, name)] = torch.tensor(number, dtype=torch.float64)
    recording = Recording(tensors)
    add_weights(recording, state or {})
    return recording


def add_weights(recording: Recording, state: Mapping[str, Tensor]) -> None:
    """Adds full parameters and buffers after the last step."""
    last = max((key.step for key in recording.tensors), default=1)
    recording.tensors |= {Key(last, Phase.WEIGHT, name): tensor.detach().clone() for name, tensor in state.items()}


def train(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[nn.Module, int], Tensor],
    steps: Iterable[int],
    *,
    clip: Callable[[], Tensor] | None = None,
    gains: Callable[[], float | Sequence[float]] | None = None,
    state: Callable[[], Mapping[str, Tensor]] | None = None,
) -> Recording:
    """Trains, and returns losses, norms, gains and, by `state`, the full weights at the end.

    `loss_of(model, step)` returns a loss whose backward pass has not run, or, of accumulated micro-batches, a loss
    without a graph.
    """
    losses, norms, of_gains = [], [], []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if loss.requires_grad:
            loss.backward()
        losses.append(float(loss.detach()))
        if clip is not None:
            norms.append(float(clip()))
        if gains is not None:
            of_gains.append(gains())
        optimizer.step()
    return recorded(losses, state() if state is not None else None, norm=norms, gain=of_gains)


def assert_parity(
    expected: Recording,
    ranks: Sequence[Recording],
    *,
    rel: float = REL,
    norm_rel: float | None = None,
    in_parts: bool = False,
) -> Report:
    """Compares what ranks have recorded with what one process has, and names the first difference.

    Args:
        expected: Of one process.
        ranks: Of each rank.
        rel: The largest difference, of the largest element of a tensor; 0 asks for equal bits.
        norm_rel: The same of norms and gains, where that is another one.
        in_parts: Each rank has some of the weights, as of its stages, and all ranks together have all.

    Returns:
        What was compared; of the last rank, where each has a part.
    """
    rel_of = {Phase.BUFFER: rel if norm_rel is None else norm_rel}
    rounding = {
        key: rel_of.get(key.phase, rel) * _largest(tensor) / BUG_RATIO for key, tensor in expected.tensors.items()
    }
    if in_parts:
        missing = expected.tensors.keys() - {key for recording in ranks for key in recording.tensors}
        assert not missing, f"no rank has {', '.join(map(str, missing))}"
    for part in [[recording] for recording in ranks] if in_parts else [list(ranks)]:
        keys = part[0].tensors.keys() if in_parts else expected.tensors.keys()
        plain = Recording({key: tensor for key, tensor in expected.tensors.items() if key in keys})
        report = compare(plain, part, rounding)
        assert report.verdict is not ParityVerdict.BUG, str(report)
        assert report.num_compared, "nothing was compared"
    return report


Loss = Callable[[nn.Module, int, int], Tensor]
"""The loss of one rank in one step: `loss_of(model, rank, step)`, a scalar."""


def sgd(params: Iterable[nn.Parameter]) -> Optimizer:
    """With momentum, of what trains."""
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=0.1, momentum=0.9)


def mean_gradients(plain: nn.Module, loss_of: Loss, step: int, num_ranks: int) -> list[float]:
    """Puts the mean gradient of all ranks into a plain model, and returns their losses.

    Each rank's gradient is computed alone; they are added up in the order of the ranks and divided by their number, as
    data parallelism defines it. A parameter that a rank does not use counts as zeros.
    """
    losses, of_ranks = [], []
    for rank in range(num_ranks):
        plain.zero_grad()
        loss = loss_of(plain, rank, step)
        loss.backward()
        losses.append(loss.item())
        of_ranks.append([param.grad for param in plain.parameters()])
    for param, *grads in zip(plain.parameters(), *of_ranks, strict=True):
        param.grad = None
        if any(grad is not None for grad in grads):
            total = torch.zeros_like(param)
            for grad in grads:
                total += 0 if grad is None else grad
            param.grad = total / num_ranks
    return losses


def train_beside(
    plain: nn.Module,
    model: nn.Module,
    loss_of: Loss,
    make: Callable[[Iterable[nn.Parameter]], Optimizer] | tuple[Optimizer, Optimizer] = sgd,
    *,
    steps: int = 3,
    before: Callable[[nn.Module, int], None] = lambda model, step: None,
    gradients: bool = True,
    weights: bool = True,
    mean: Callable[[nn.Module, Loss, int, int], list[float]] = mean_gradients,
    rel: float = 0.0,
) -> Report:
    """Trains a model of this rank and the plain one, which takes the mean of all ranks' gradients, and compares them.

    Args:
        plain: On one process.
        model: The same, wrapped; its `state_dict()` is that of the plain model.
        loss_of: Called with each of both.
        make: Builds the optimizer of each; or both optimizers, the plain model's first.
        steps: How many.
        before: Called with each model before each step.
        gradients: Whether full gradients are compared as well, by their names in the plain model.
        weights: Whether the state at the end is compared.
        mean: What puts the gradients of all ranks into the plain model.
        rel: As of `assert_parity`: to the bit by default.

    Raises:
        AssertionError: A loss, a gradient or a weight at the end differs.
    """
    group = group_of()
    optimizers = make if isinstance(make, tuple) else (make(plain.parameters()), make(model.parameters()))
    expected, actual = Recording(), Recording()
    for step in range(steps):
        for each in (plain, model):
            before(each, step)
        loss_there = mean(plain, loss_of, step, group.size)[group.rank]
        loss = loss_of(model, group.rank, step)
        loss.backward()
        for recording, each, number in ((expected, plain, loss_there), (actual, model, loss.item())):
            recording.tensors[Key(step + 1, Phase.BUFFER, "loss")] = torch.tensor(number, dtype=torch.float64)
            for name, param in each.named_parameters() if gradients else ():
                if (grad := gradient_of(param)) is not None:
                    recording.tensors[Key(step + 1, Phase.GRADIENT, plain_name(name))] = full_value(grad)
        for optimizer in optimizers:
            optimizer.step()
        for each in (plain, model):
            each.zero_grad()
    for recording, each in ((expected, plain), (actual, model)) if weights else ():
        add_weights(recording, each.state_dict())
    return assert_parity(expected, [actual], rel=rel)


def _largest(tensor: Tensor) -> float:
    finite = tensor.double()[tensor.isfinite()] if tensor.ndim else tensor.double().view(1)
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return largest if math.isfinite(largest) and largest > 0 else 1.0


def gains_of_one_process(
    model: nn.Module,
    inner: Optimizer,
    loss_of: Callable[[nn.Module, int], Tensor],
    num_samples: int,
    steps: int,
    **options: Any,
) -> list[list[float]]:
    """Returns AdaScale's gain and that of each group in each step, where a sample is a backward pass of its own.

    Samples are numbered through all steps: `loss_of(model, number)`. AdaScale on one process is compared with its
    formula in scale-adascale's own tests.
    """
    optimizer = AdaScale(inner, num_gradients_to_accumulate=num_samples, process_group=Group(), **options)
    gains = []
    for step in range(steps):
        optimizer.zero_grad()
        for sample in range(num_samples):
            (loss_of(model, num_samples * step + sample) / num_samples).backward()
        optimizer.step()
        gains.append(gains_of(optimizer))
    optimizer.unhook()
    assert max(gain for gain, *_ in gains) > 1.001, "a gain of 1 is that of any training"
    return gains


def gains_of(optimizer: AdaScale) -> list[float]:
    """Returns the gain of all groups, and of each."""
    return [optimizer.gain(), *(optimizer.gain(number) for number in range(len(optimizer.param_groups)))]


def assert_same_gains(expected: list[list[float]], actual: list[list[float]], rel: float = 1e-6) -> None:
    """Compares the gains of each step; squares are summed in another order, and in float32 messages."""
    zeros = [0.0] * len(expected)
    of_both = [{f"gain {i}": column for i, column in enumerate(zip(*g, strict=True))} for g in (expected, actual)]
    assert_parity(recorded(zeros, **of_both[0]), [recorded(zeros, **of_both[1])], rel=rel)
