"""Runs a program in one process on the whole batch, and wrapped on several ranks, and compares what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from scale_check import noise
from scale_check.batches import converted_batches, part_of
from scale_check.comparison import ParityVerdict, Report, compare
from scale_check.recording import FLAT_PARAMS, Key, Phase, Recorder, Recording
from scale_check.summary import float_values
from scale_core.launch.launcher import check_may_start
from scale_core.testing import run_ranks

_NUM_NOISE_RUNS = 2
_REPEATED = 2**10  # Units in the last place that a loss may differ in a second run: memory lies elsewhere then.

Build = Callable[[], nn.Module]
Step = Callable[[nn.Module, Optimizer, Any], Tensor | None]
Wrap = Callable[[nn.Module], nn.Module | tuple[nn.Module, Optimizer]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class ParityError(AssertionError):
    """The ranks compute different numbers than one process.

    Attributes:
        report: What was compared, and the first difference.

    See also: [the guide to comparing with one process](../guides/check.md).
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def sgd_with_momentum(params: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer of `parity` where none is given."""
    return SGD(params, lr=0.1, momentum=0.9)


def unwrapped(model: nn.Module) -> nn.Module:
    """The wrapper of `parity` where none is given: the model itself."""
    return model


def mean_square_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    """The step of `parity` where none is given: the mean square of the model's output."""
    optimizer.zero_grad()
    output: Tensor = model(batch)
    loss = output.square().mean()
    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    optimizer.step()
    return loss


@dataclass(frozen=True)
class ParityProgram:
    """What `parity` was given."""

    build: Build
    step: Step
    wrap: Wrap
    optimizer: MakeOptimizer
    batches: tuple[Any, ...]
    data: str
    dtype: torch.dtype | None
    seed: int

    @noise.full_precision()
    def run(
        self,
        wrap: Wrap | None,
        rank: int,
        num_ranks: int,
        perturbation: int = 0,
        cast_eps: float = 0.0,
        casts: noise.CastRecorder | None = None,
    ) -> Recording:
        """Trains in this process, and returns what was computed; `casts` sees the steps and not `build`."""
        torch.manual_seed(self.seed)
        model = self.build()
        if self.dtype is not None:
            model = model.to(self.dtype)
        if perturbation:
            noise.perturb(model, perturbation, cast_eps)
        wrapped = model if wrap is None else wrap(model)
        model, optimizer = wrapped if isinstance(wrapped, tuple) else (wrapped, self.optimizer(wrapped.parameters()))
        recorder = Recorder()
        torch.manual_seed(self.seed)  # A wrapper or an optimizer may have drawn.
        with recorder.hooks(), casts or nullcontext():
            for batch in self.batches:
                local_batch = batch if self.data == "all" else part_of(batch, rank, num_ranks)
                loss = self.step(model, optimizer, local_batch)
                if loss is not None:
                    recorder.add_loss(loss)
                recorder.add_random_state()
        return recorder.recording

    def run_on_rank(self) -> Recording:
        """Trains the wrapped model on a rank of the default group."""
        rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return self.run(self.wrap, rank, num_ranks)

    def run_wrapped(self, num_ranks: int, limit_seconds: float) -> Sequence[Recording]:
        """Trains the wrapped model on ranks that it starts, or in this process if one is enough."""
        if num_ranks != 1:
            return run_ranks(self.run_on_rank, num_ranks, limit_seconds=limit_seconds)
        with torch.random.fork_rng(devices=[]):
            return [self.run(self.wrap, 0, 1)]

    def measure(self) -> tuple[Recording, Mapping[Key, float]]:
        """Trains the plain model in this process; returns what it computes, and the rounding of each tensor."""
        with torch.random.fork_rng(devices=[]):
            plain = self.run(None, 0, 1)
            _check_draws_nothing(plain)
            casts = noise.CastRecorder()
            again = self.run(None, 0, 1, casts=casts)
            _check_repeats(plain, again, casts.eps)
            seeds = range(1, _NUM_NOISE_RUNS + 1)
            perturbed = [self.run(None, 0, 1, seed) for seed in seeds]
            of_casts = [self.run(None, 0, 1, seed, casts.eps) for seed in seeds if casts.eps]
        return plain, noise.measure(plain, perturbed, of_casts, casts.eps)


def parity(
    build: Build,
    step: Step = mean_square_step,
    wrap: Wrap = unwrapped,
    ranks: int = 2,
    *,
    batches: Iterable[Any],
    optimizer: MakeOptimizer = sgd_with_momentum,
    data: Literal["split", "all"] = "split",
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
    limit_seconds: float = 300.0,
) -> Report:
    """Compares a wrapped program on several ranks with the plain one in one process, tensor by tensor, in time.

    It compares the outputs of all modules, the loss, the gradients of these outputs and of the parameters, and after
    each step weights, buffers, the optimizer's state and the random generator. Each difference is a multiple of the
    program's own rounding, which is measured, so you choose no tolerance.

    Args:
        build: Returns the plain model; functions are at the top level of a module, as for `run_ranks`.
        step: One step of training, `step(model, optimizer, batch)`: forward, backward, `optimizer.step()`. It returns
            the loss, a mean over the samples of its batch, or None.
        wrap: Wraps the plain model on each rank, as `DistributedDataParallel` or `fully_shard` does. It may return the
            wrapped model and its optimizer.
        ranks: How many processes; gloo connects them.
        batches: The batches of all ranks together, one for each step: trees of tensors with the samples in the first
            dimension. Each rank gets the same number of samples.
        optimizer: Builds the optimizer of the parameters; SGD with momentum by default.
        data: "split" gives each rank its part of the samples, as data parallelism needs, and "all" all of them, as
            tensor parallelism does.
        dtype: The dtype of the model and of floating-point batches. In float64 a bug is far above any rounding; None
            converts nothing.
        seed: Set before `build`, the same in all processes.
        limit_seconds: For the ranks.

    Returns:
        What was compared, where all is equal, or equal but for rounding.

    Raises:
        ParityError: They differ. It names step, phase, module or parameter, ranks, index and both values.
        ValueError: The ranks don't divide the samples; a batch has values other than tensors, numbers and texts; a
            function is not at the top level of a module; the model is wrapped by FSDP1; or the model draws random
            numbers, for example by dropout, because they differ between ranks.

    Example:
        >>> import torch
        >>> report = parity(lambda: torch.nn.Linear(4, 2), ranks=1, batches=[torch.ones(2, 4)])
        >>> report.verdict
        <ParityVerdict.EQUAL: 'equal to the bit'>

    See also: [the guide to comparing with one process](../guides/check.md).
    """
    for function in (build, step, wrap, optimizer) if ranks > 1 else ():
        check_may_start("parity", function)
    checked_batches = converted_batches(batches, dtype, num_parts=ranks if data == "split" else 1)
    program = ParityProgram(build, step, wrap, optimizer, checked_batches, data, dtype, seed)
    plain, rounding = program.measure()
    recordings = program.run_wrapped(ranks, limit_seconds)
    if any(recording.has_flat_params for recording in recordings):
        raise ValueError(f"parity: {FLAT_PARAMS}")
    report = compare(plain, recordings, rounding)
    if report.verdict is ParityVerdict.BUG:
        raise ParityError(report)
    return report


def _check_repeats(plain: Recording, again: Recording, cast_eps: float) -> None:
    """Refuses a program whose loss is another one when it runs again: its "rounding" would hide any bug."""
    dtypes = {plain.tensors[key].dtype for key in plain.keys_of(Phase.START)}
    eps = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
    eps = max(eps, cast_eps)
    for key in plain.keys_of(Phase.LOSS):
        loss, other = (float_values(value).item() for value in (plain.tensors[key], again.tensors[key]))
        if abs(loss - other) > _REPEATED * eps * max(1.0, abs(loss)):
            raise ValueError(
                f"parity: in step {key.step} the loss of one process is {loss:.6g} in one run and {other:.6g} in the "
                "next: let build and step keep nothing between runs, such as a scheduler of learning rates"
            )


def _check_draws_nothing(plain: Recording) -> None:
    if plain.draws:
        raise ValueError(
            f"parity: '{plain.draws[0]}' draws random numbers in its forward, which are others on each rank: build the "
            "model without, such as with Dropout(p=0)"
        )
