"""Faults that leave all ranks alive, with every technique: one start of two ranks per technique tries them one by one.

Both ranks run each program below. What it returns, or the error that it ends with, is what a test looks at. Each has a
process group of its own, which no other program has broken.
"""

from __future__ import annotations

import copy
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from fault_trainings import KINDS, NEVER, SNAPSHOTS, WIDTH, Block, Training, batch_of, build
from torch import Tensor, nn
from torch.optim import Adam

from scale_core import ShardedGradScaler, clip_grad_norm_, join
from scale_core.consistency import flight_recorder
from scale_core.errors import StepError
from scale_core.launch import StopSignal
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import faults, run_ranks
from scale_core.testing.faults import delay_at, raise_at
from scale_core.testing.ranks import scaled_by_load
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe
from scale_snapshot import latest_snapshot
from scale_tp import parallelize

mse = nn.functional.mse_loss
REPLICATED_DATA = ("tp", "pipe")  # Their ranks have one batch together.


class OddParameters(nn.Module):
    """Parameters of one element, of none, of integers, and with strides."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.count = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.strided = nn.Parameter(torch.ones(WIDTH, 4)[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scalar + self.strided + self.empty.sum() + self.count.sum()


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scalar


class Skipped(Block):
    """A block that rank 1 leaves out."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone() if dist.get_rank() else super().forward(x)


def blocks_of(*others: nn.Module) -> nn.Sequential:
    """Four blocks, of which `others` are the last, without dropout."""
    blocks = nn.Sequential(*(Block(index) for index in range(4 - len(others))), *others)
    for module in blocks.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return blocks


def seeded_blocks(*others: nn.Module, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return blocks_of(*others)


def replica_of(kind: str) -> int:
    return 0 if kind in REPLICATED_DATA else dist.get_rank()


def local_parameters(training: Training) -> list[Tensor]:
    return [local_tensor(param).detach().clone() for param in training.model.parameters()]


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# What a rank raises, or how late it is.


def signal_to_one_rank(kind: str, folder: Path) -> tuple[int, int, str]:
    """The step after which this rank stops, its exit code, and the newest snapshot."""
    training = build(kind, NEVER)
    with StopSignal() as stop:
        for step in range(1, 6):
            training.step(step)
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.on_any_rank(training.group):
                training.save(folder, step)
                break
    newest = latest_snapshot(folder / SNAPSHOTS)
    return step, stop.exit_code, newest.name if newest else ""


def error_in_forward(kind: str, folder: Path) -> tuple[str, bool]:
    """The error of this rank, and whether the losses after a second try are those without it."""
    expected = [build(kind, NEVER).step(1)]
    training, error = build(kind, NEVER), ""
    fault = raise_at("user.forward", 1, occurrence=2 if kind == "pipe" else 4)
    with faults.inject(fault):
        try:
            training.step(1)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised} {' '.join(getattr(raised, '__notes__', []))}"
            if not isinstance(raised, StepError | faults.InjectedError) or kind == "tp":
                return error, False
        return error, [training.step(1)] == expected


def late_rank(kind: str, folder: Path) -> bool:
    """Whether the losses are those without it."""
    expected, training = build(kind, NEVER), build(kind, NEVER)
    with faults.inject(delay_at("user.forward", 1, occurrence=2, seconds=0.3)):
        late = [training.step(step) for step in range(2)]
    return late == [expected.step(step) for step in range(2)]


def loss_without_memory(kind: str, folder: Path) -> tuple[str, bool]:
    """The first error in a pipeline, whose last stage computes the loss, and whether a second try works."""
    if kind != "pipe":
        return "", True
    training, expected = build(kind, NEVER), build(kind, NEVER).step(1)
    loss_fn = nn.functional.mse_loss

    def without_memory(*args: Tensor) -> Tensor:
        raise MemoryError("no memory for the loss")

    if dist.get_rank() == 1:
        nn.functional.mse_loss = without_memory
    try:
        error = error_of(lambda: training.step(1))
    finally:
        nn.functional.mse_loss = loss_fn
    return error, training.step(1) == expected


# Models, dtypes and weights that differ.


def different_model(kind: str, folder: Path) -> str:
    blocks = seeded_blocks()
    if dist.get_rank() == 1:
        block = cast(Block, blocks[2])
        block.up, block.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)
    return error_of(lambda: build(kind, NEVER, blocks=blocks))


def different_dtype(kind: str, folder: Path) -> str:
    blocks = seeded_blocks().to(torch.float16 if dist.get_rank() else torch.bfloat16)
    return error_of(lambda: build(kind, NEVER, blocks=blocks))


def different_weights(kind: str, folder: Path) -> tuple[bool, bool]:
    """Whether this rank trains the weights that rank 0 has drawn, and whether those that it has drawn itself."""
    trained = local_parameters(build(kind, NEVER, blocks=seeded_blocks(seed=dist.get_rank())))
    of_rank_0, own = (
        local_parameters(build(kind, NEVER, blocks=seeded_blocks(seed=seed))) for seed in (0, dist.get_rank())
    )
    return (
        all(map(torch.equal, trained, of_rank_0)),
        all(map(torch.equal, trained, own)),
    )


def frozen_on_one_rank(kind: str, folder: Path) -> tuple[int, str]:
    """How many steps went well, and the error. Of a pipeline each parameter is on one rank only."""
    if kind == "pipe":
        return 0, ""
    training = build(kind, NEVER)
    for step in range(14):
        if step == 3 and dist.get_rank() == 1:
            training.model.get_parameter("0.norm.weight").requires_grad_(False)
        if (error := error_of(lambda: training.step(step))) != "nothing":  # noqa: B023
            return step, error
    return step, "nothing"


# Gradients that are no numbers.


def scaled_step(training: Training, kind: str, step: int, scaler: ShardedGradScaler, factor: float) -> None:
    """A forward and a backward, with a gradient of rank 1 times this factor."""
    x, target = batch_of(step, replica_of(kind))

    def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
        return cast(Tensor, scaler.scale(mse(output, target)))

    if kind in REPLICATED_DATA:
        handle = list(training.model.parameters())[2].register_hook(
            lambda grad: grad * (factor if dist.get_rank() else 1.0)
        )
        if kind == "pipe":
            cast(DistributedPipe, training.model).step(x, target=target, loss_fn=scaled_loss)
        else:
            scaled_loss(training.called(x), target).backward()
        handle.remove()
    else:
        (scaled_loss(training.called(x), target) * (factor if dist.get_rank() else 1.0)).backward()


def infinite_gradient(kind: str, folder: Path) -> list[tuple[bool, float]]:
    """Of each step whether it changed parameters of this rank, and the scale after it. The second has an infinity."""
    training, scaler, outcome = build(kind, NEVER), ShardedGradScaler(init_scale=1024.0), []
    for step in range(1, 4):
        before = local_parameters(training)
        scaled_step(training, kind, step, scaler, torch.inf if step == 2 else 1.0)
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        outcome.append((not all(map(torch.equal, before, local_parameters(training))), scaler.get_scale()))
    return outcome


def nan_gradient(kind: str, folder: Path) -> str:
    """What clipping says that must not meet a NaN."""
    training = build(kind, NEVER)
    scaled_step(training, kind, 1, ShardedGradScaler(init_scale=1.0), torch.nan)
    return error_of(lambda: torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0, error_if_nonfinite=True))


def norm_of_gradients(kind: str, folder: Path) -> tuple[float, float]:
    """The norm of the gradients, and that of one process."""
    with in_float64():
        blocks = seeded_blocks()
        plain, training = copy.deepcopy(blocks), build(kind, NEVER, blocks=blocks)
        training.backward(1)
        replicas = [0] if kind in REPLICATED_DATA else range(dist.get_world_size())
        losses = [mse(plain(x), target) for x, target in (batch_of(1, replica) for replica in replicas)]
        torch.stack(losses).mean().backward()
        norm = clip_grad_norm_(training.model.parameters(), 0.1)
        return float(norm), float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))


# Wrong and unusual use.


def wrapped_twice(kind: str, folder: Path) -> str:
    blocks, group = seeded_blocks(), cast(Any, dist.new_group())
    if kind == "fsdp":
        return error_of(lambda: fully_shard(fully_shard(blocks, group), group))
    if kind == "oss":
        optimizer = OSS(blocks.parameters(), Adam, group, lr=0.02)
        wrapped = ShardedDataParallel(blocks, optimizer, process_group=group)
        return error_of(lambda: ShardedDataParallel(wrapped, optimizer, process_group=group))
    if kind == "tp":
        plan = {"*.up": "colwise", "*.down": "rowwise"}
        return error_of(lambda: parallelize(parallelize(blocks, plan, group), plan, group))
    pipe = DistributedPipe(blocks, "1f1b", balance=[2, 2], chunks=2, process_group=group)
    return error_of(lambda: DistributedPipe(cast(Any, pipe), "1f1b", balance=[1, 1], chunks=2, process_group=group))


def optimizer_built_before(kind: str, folder: Path) -> str:
    """The error of its step; "trains" where it has changed all parameters of this rank."""
    blocks = seeded_blocks()
    optimizer = Adam(blocks.parameters(), lr=0.02)
    training = build(kind, NEVER, blocks=blocks)
    training.backward(1)
    before = local_parameters(training)
    if (error := error_of(optimizer.step)) != "nothing":
        return error
    changed = [not torch.equal(*both) for both in zip(before, local_parameters(training), strict=True)]
    return "trains" if all(changed) else f"changes {sum(changed)} of {len(changed)} parameters"


def trained_and_plain(kind: str, *others: nn.Module) -> tuple[list[float], list[float]]:
    """The losses of three steps, and those of the same model on one process."""
    blocks = seeded_blocks(*others)
    plain, training = copy.deepcopy(blocks), build(kind, NEVER, blocks=blocks)
    optimizer, losses, expected = Adam(plain.parameters(), lr=0.02), [], []
    replicas = [0] if kind in REPLICATED_DATA else range(dist.get_world_size())
    for step in range(3):
        losses.append(float.fromhex(training.step(step)))
        of_replicas = [mse(plain(x), target) for x, target in (batch_of(step, replica) for replica in replicas)]
        torch.stack(of_replicas).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(of_replicas[replica_of(kind)].item())
    return losses, expected


def odd_parameters(kind: str, folder: Path) -> tuple[list[float], list[float]]:
    with in_float64():
        return trained_and_plain(kind, OddParameters(), Block(3))


def fewer_elements_than_ranks(kind: str, folder: Path) -> tuple[list[float], list[float]]:
    if kind in REPLICATED_DATA:
        return [], []
    with in_float64():
        return trained_and_plain(kind, Scalar(), nn.Tanh(), nn.Tanh(), nn.Tanh())


def on_one_rank() -> list[tuple[list[float], list[float]]]:
    with in_float64():
        return [trained_and_plain(kind) for kind in KINDS]


# What ends a wait for the other rank at its limit.


def step_on_one_rank(kind: str, folder: Path) -> list[str]:
    """The errors of rank 0 in a step that rank 1 leaves out, and in the next one."""
    training = build(kind, scaled_by_load(3.0))
    training.step(0)
    return [] if dist.get_rank() else [error_of(lambda: training.step(1)) for _ in range(2)]


def save_on_one_rank(kind: str, folder: Path) -> tuple[str, bool]:
    """The error of this rank, and whether there is a snapshot."""
    training = build(kind, scaled_by_load(3.0))
    training.step(0)
    own = folder / "one-rank"
    error = error_of(lambda: training.step(1) if dist.get_rank() else training.save(own, 1))
    dist.barrier()
    return error, own.exists() and latest_snapshot(own / SNAPSHOTS) is not None


def layer_on_one_rank(kind: str, folder: Path) -> str:
    """The error of a step in which rank 1 leaves out a divided layer."""
    if kind != "tp":
        return ""
    training = build(kind, scaled_by_load(3.0), blocks=seeded_blocks(Skipped(3)))
    return error_of(lambda: training.step(1))


def backward_on_one_rank(kind: str, folder: Path) -> str:
    """The first error of a rank of which rank 1 has caught one in its loss, and goes on to the next step."""
    if kind != "tp":
        return ""
    training = build(kind, scaled_by_load(3.0))
    training.step(0)
    x, target = batch_of(1, 0)
    loss = mse(training.called(x), target)
    return error_of(lambda: training.step(2) if dist.get_rank() else loss.backward())


def join_on_one_rank(kind: str, folder: Path) -> str:
    """What comes of `join` where ranks have one batch together."""
    if kind not in REPLICATED_DATA:
        return ""
    training = build(kind, NEVER, check_inputs=True)
    return error_of(
        lambda: [training.step(step) for step in join(range(3 - dist.get_rank()), cast(Any, training.group))]
    )


Program = Callable[[str, Path], Any]
PROGRAMS: tuple[Program, ...] = (
    signal_to_one_rank,
    error_in_forward,
    late_rank,
    loss_without_memory,
    different_model,
    different_dtype,
    different_weights,
    frozen_on_one_rank,
    infinite_gradient,
    nan_gradient,
    norm_of_gradients,
    wrapped_twice,
    optimizer_built_before,
    odd_parameters,
    fewer_elements_than_ranks,
    join_on_one_rank,
)
AT_THE_LIMIT: tuple[Program, ...] = (step_on_one_rank, save_on_one_rank, layer_on_one_rank, backward_on_one_rank)


def run_programs(programs: Sequence[Program], kind: str, folder: str) -> dict[str, Any]:
    flight_recorder._GRACE_SECONDS = 0.5  # A rank that waits in a barrier leaves no record.
    outcomes = {}
    for program in programs:
        try:
            outcomes[program.__name__] = program(kind, Path(folder))
        except Exception as error:
            outcomes[program.__name__] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return outcomes


Outcomes = Callable[[str, Program], list[Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Gives what a program returned on each rank, with a technique."""

    @cache
    def run(kind: str, programs: tuple[Program, ...]) -> list[dict[str, Any]]:
        return run_ranks(run_programs, 2, programs, kind, str(tmp_path_factory.mktemp(kind)))

    def outcomes_of(kind: str, program: Program) -> list[Any]:
        programs = AT_THE_LIMIT if program in AT_THE_LIMIT else PROGRAMS
        return [of_rank[program.__name__] for of_rank in run(kind, programs)]

    return outcomes_of


@pytest.mark.fault(9, place="rank 1 gets it in step 3")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_a_signal_to_one_rank_stops_and_saves_all(kind: str, outcomes: Outcomes) -> None:
    assert outcomes(kind, signal_to_one_rank) == [(3, 143, "step-00000003")] * 2


@pytest.mark.fault(11, place="rank 1 raises in the forward of step 1")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "pipe"])
def test_an_error_is_heard_by_all_and_the_step_is_repeated(kind: str, outcomes: Outcomes) -> None:
    (first, first_repeats), (second, second_repeats) = outcomes(kind, error_in_forward)
    assert first.startswith("StageError: " if kind == "pipe" else "StepError: ") and "rank 1" in first, first
    assert "injected" in first and "Traceback" in first
    assert second.startswith("StageError: " if kind == "pipe" else "InjectedError: injected"), second
    assert first_repeats and second_repeats


@pytest.mark.fault(11, place="rank 1 raises in the forward of step 1")
@pytest.mark.parametrize("kind", ["tp"])
def test_an_error_in_a_tensor_parallel_group_ends_it(kind: str, outcomes: Outcomes) -> None:
    (first, _), (second, _) = outcomes(kind, error_in_forward)
    assert re.match(r"TransferError: .* with rank 1 failed: it has closed the connection.*last checkpoint", first), (
        first
    )
    assert second.startswith("InjectedError: injected") and "start from the last checkpoint" in second, second


@pytest.mark.fault(19, place="rank 1 is late by 0.3 s in the forward of step 1")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_a_late_rank_changes_no_loss(kind: str, outcomes: Outcomes) -> None:
    assert outcomes(kind, late_rank) == [True, True]


@pytest.mark.fault(105, place="rank 1, the last stage, in step 1")
@pytest.mark.parametrize("kind", ["pipe"])
def test_a_loss_without_memory_fails_the_step_of_a_pipeline(kind: str, outcomes: Outcomes) -> None:
    for error, repeats in outcomes(kind, loss_without_memory):
        assert re.match(r"StageError: .*stage 1 on rank 1 raised MemoryError .*: no memory for the loss", error), error
        assert repeats


@pytest.mark.fault(25, place="one block of rank 1 is wider")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_models_that_differ_are_refused_with_the_difference(kind: str, outcomes: Outcomes) -> None:
    for error in outcomes(kind, different_model):
        assert error.startswith("ValueError: " if kind == "tp" else "ContractError: "), error
        assert re.search(r"rank 0: .*\b12, 8\b.*; rank 1: .*\b14, 8\b", error), error
        assert len(error) < 1000


@pytest.mark.fault(27, place="when the model is wrapped")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_dtypes_that_differ_are_refused(kind: str, outcomes: Outcomes) -> None:
    for error in outcomes(kind, different_dtype):
        assert error.startswith("ValueError: " if kind == "tp" else "ContractError: "), error
        assert re.search(r"rank 0: .*torch\.bfloat16.*; rank 1: .*torch\.float16", error), error


@pytest.mark.fault(26, place="when the model is wrapped")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp"])
def test_all_ranks_begin_with_the_weights_of_rank_0(kind: str, outcomes: Outcomes) -> None:
    (is_of_rank_0, _), (is_of_rank_0_too, _) = outcomes(kind, different_weights)
    assert is_of_rank_0 and is_of_rank_0_too


@pytest.mark.fault(26, place="when the model is wrapped")
@pytest.mark.parametrize("kind", ["pipe"])
def test_a_stage_begins_with_the_weights_of_its_rank(kind: str, outcomes: Outcomes) -> None:
    assert outcomes(kind, different_weights) == [(True, True), (False, True)]


@pytest.mark.fault(97, place="on rank 1 after step 3")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp"])
def test_a_parameter_frozen_on_one_rank_is_named(kind: str, outcomes: Outcomes) -> None:
    for num_steps, error in outcomes(kind, frozen_on_one_rank):
        assert num_steps == 3 and error.startswith("ContractError: ") and "0.norm.weight" in error, error


@pytest.mark.fault(70, place="rank 1 in step 2 of 3")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_an_infinity_on_one_rank_is_a_step_on_none(kind: str, outcomes: Outcomes) -> None:
    assert outcomes(kind, infinite_gradient) == [[(True, 1024.0), (False, 512.0), (True, 512.0)]] * 2


@pytest.mark.fault(71, place="rank 1 in step 1")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_clipping_refuses_a_nan_of_one_rank_on_all(kind: str, outcomes: Outcomes) -> None:
    for error in outcomes(kind, nan_gradient):
        assert error.startswith("RuntimeError: the norm of order 2.0 of the gradients on all ranks is nan"), error


@pytest.mark.fault(72)
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_the_norm_of_gradients_is_that_of_one_process(kind: str, outcomes: Outcomes) -> None:
    for norm, expected in outcomes(kind, norm_of_gradients):
        assert norm == pytest.approx(expected, rel=1e-9)


@pytest.mark.fault(80)
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_a_model_wrapped_twice_is_refused(kind: str, outcomes: Outcomes) -> None:
    text = {
        "fsdp": "ValueError: this Sequential is sharded already",
        "oss": "ValueError: ShardedDataParallel: another wrapper reduces the gradients of this optimizer already",
        "tp": "ValueError: '0.up' is divided already",
        "pipe": "TypeError: module must be nn.Sequential to be partitioned, but is DistributedPipe",
    }[kind]
    for error in outcomes(kind, wrapped_twice):
        assert error.startswith(text), error


@pytest.mark.fault(81)
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp"])
def test_an_optimizer_built_before_is_refused(kind: str, outcomes: Outcomes) -> None:
    text = "call step() and zero_grad() of the OSS" if kind == "oss" else "Adam was built before the model was sharded"
    for error in outcomes(kind, optimizer_built_before):
        assert error.startswith("RuntimeError: ") and text in error, error


@pytest.mark.fault(81)
@pytest.mark.parametrize("kind", ["pipe"])
def test_an_optimizer_built_before_a_pipeline_trains_it(kind: str, outcomes: Outcomes) -> None:
    assert outcomes(kind, optimizer_built_before) == ["trains"] * 2


@pytest.mark.fault(82)
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_parameters_of_odd_shapes_train_as_on_one_process(kind: str, outcomes: Outcomes) -> None:
    for losses, expected in outcomes(kind, odd_parameters):
        assert losses == pytest.approx(expected, rel=1e-9) and len(losses) == 3


@pytest.mark.fault(87)
@pytest.mark.parametrize("kind", ["fsdp", "oss"])
def test_fewer_elements_than_ranks_train_as_on_one_process(kind: str, outcomes: Outcomes) -> None:
    for losses, expected in outcomes(kind, fewer_elements_than_ranks):
        assert losses == pytest.approx(expected, rel=1e-9) and len(losses) == 3


@pytest.mark.fault(87, techniques=("fsdp", "oss", "tp", "pipe"))
def test_one_rank_trains_as_plain_pytorch() -> None:
    (of_kinds,) = run_ranks(on_one_rank, 1)
    assert len(of_kinds) == len(KINDS)
    for losses, expected in of_kinds:
        assert losses == pytest.approx(expected, rel=1e-9) and len(losses) == 3


@pytest.mark.fault(20, 21, place="rank 1 has one batch of three fewer")
@pytest.mark.parametrize("kind", ["tp"])
def test_fewer_batches_of_a_tensor_parallel_rank_are_an_error(kind: str, outcomes: Outcomes) -> None:
    for error in outcomes(kind, join_on_one_rank):
        assert error.startswith("DivergenceError: ") and "must all be given the same" in error, error


@pytest.mark.fault(20, 33, place="rank 1 leaves out step 2; the limit is 3 s")
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_a_group_is_broken_after_a_step_of_one_rank(kind: str, outcomes: Outcomes) -> None:
    broken = {
        "tp": "an earlier wait in this process group timed out, which closed its connections",
        "pipe": "the ranks of the pipeline have lost each other in an earlier step:\n",
    }.get(kind, "the process group is broken since an earlier error and can't be used again:\n")
    (first, second), _ = outcomes(kind, step_on_one_rank)
    assert re.search("with rank 1 failed: no answer within", first), first
    assert broken in second and "with rank 1 failed: no answer within" in second, second
    assert "start from the last checkpoint" in first and "start from the last checkpoint" in second


def assert_waited_for_each_other(errors: list[str]) -> None:
    """Both name each other. The limit of one passes first, which closes the connection of the other."""
    for rank, error in enumerate(errors):
        assert re.search(f"with rank {1 - rank} failed: (no answer within|it has closed the connection)", error), error
        assert "start from the last checkpoint" in error, error
    assert any("no answer within" in error for error in errors), errors


@pytest.mark.fault(30, place="rank 0 saves while rank 1 steps; the limit is 3 s")
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_a_save_on_one_rank_is_an_error_on_both(kind: str, outcomes: Outcomes) -> None:
    of_ranks = outcomes(kind, save_on_one_rank)
    assert_waited_for_each_other([error for error, _ in of_ranks])
    assert not any(has_saved for _, has_saved in of_ranks)


@pytest.mark.fault(22, place="rank 1 in the forward and backward of step 1; the limit is 3 s")
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tp"])
def test_a_divided_layer_left_out_by_one_rank_is_an_error(kind: str, outcomes: Outcomes) -> None:
    errors = outcomes(kind, layer_on_one_rank)
    assert_waited_for_each_other(errors)
    assert all(error.startswith("TransferError: ") for error in errors)


@pytest.mark.fault(105, place="rank 1 in step 2; the limit is 3 s")
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tp"])
def test_a_backward_left_out_by_one_rank_is_an_error(kind: str, outcomes: Outcomes) -> None:
    errors = outcomes(kind, backward_on_one_rank)
    assert_waited_for_each_other(errors)
    assert all(error.startswith("TransferError: ") for error in errors)
