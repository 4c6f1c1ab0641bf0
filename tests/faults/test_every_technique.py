"""Faults that leave all ranks alive, with every technique.

Each training has a process group of its own, which no other one has broken.
"""

from __future__ import annotations

import copy
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from fault_trainings import KINDS, NEVER, SNAPSHOTS, WIDTH, Block, Training, batch_of, build
from rank_values import by_rank
from torch import Tensor, nn
from torch.optim import Adam

from scale_core import ShardedGradScaler, clip_grad_norm_, join
from scale_core.consistency import flight_recorder
from scale_core.launch import StopSignal
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import faults
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


@pytest.mark.fault(9, place="rank 1 gets it in step 3")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_a_signal_to_one_rank_stops_and_saves_all(kind: str, tmp_path: Path) -> None:
    training = build(kind, NEVER)
    with StopSignal() as stop:
        for step in range(1, 6):
            training.step(step)
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.on_any_rank(training.group):
                training.save(tmp_path, step)
                break
    newest = latest_snapshot(tmp_path / SNAPSHOTS)
    assert newest is not None and (step, stop.exit_code, newest.name) == (3, 143, "step-00000003")


def error_in_forward(kind: str) -> tuple[str, Training]:
    """The error of this rank."""
    training, error = build(kind, NEVER), ""
    fault = raise_at("user.forward", 1, occurrence=2 if kind == "pipe" else 4)
    with faults.inject(fault):
        try:
            training.step(1)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised} {' '.join(getattr(raised, '__notes__', []))}"
    return error, training


@pytest.mark.fault(11, place="rank 1 raises in the forward of step 1")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_an_error_is_heard_by_all_and_the_step_is_repeated(kind: str) -> None:
    expected = build(kind, NEVER).step(1)
    error, training = error_in_forward(kind)
    if dist.get_rank() == 0:
        assert error.startswith("StageError: " if kind == "pipe" else "StepError: ") and "rank 1" in error, error
        assert "injected" in error and "Traceback" in error
    else:
        assert error.startswith("StageError: " if kind == "pipe" else "InjectedError: injected"), error
    assert training.step(1) == expected


@pytest.mark.fault(11, place="rank 1 raises in the forward of step 1")
@pytest.mark.parametrize("kind", ["tp"])
@pytest.mark.ranks(2, in_turn=True)
def test_an_error_in_a_tensor_parallel_group_ends_it(kind: str) -> None:
    error, _ = error_in_forward(kind)
    if dist.get_rank() == 0:
        text = r"TransferError: .* with rank 1 failed: it has closed the connection.*last checkpoint"
        assert re.match(text, error), error
    else:
        assert error.startswith("InjectedError: injected") and "start from the last checkpoint" in error, error


@pytest.mark.fault(19, place="rank 1 is late by 0.3 s in the forward of step 1")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_a_late_rank_changes_no_loss(kind: str) -> None:
    expected, training = build(kind, NEVER), build(kind, NEVER)
    with faults.inject(delay_at("user.forward", 1, occurrence=2, seconds=0.3)):
        late = [training.step(step) for step in range(2)]
    assert late == [expected.step(step) for step in range(2)]


@pytest.mark.fault(105, place="rank 1, the last stage, in step 1")
@pytest.mark.parametrize("kind", ["pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_a_loss_without_memory_fails_the_step_of_a_pipeline(kind: str) -> None:
    """The last stage computes the loss; a second try works."""
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
    assert re.match(r"StageError: .*stage 1 on rank 1 raised MemoryError .*: no memory for the loss", error), error
    assert training.step(1) == expected


# Models, dtypes and weights that differ.


@pytest.mark.fault(25, place="one block of rank 1 is wider")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_models_that_differ_are_refused_with_the_difference(kind: str) -> None:
    blocks = seeded_blocks()
    if dist.get_rank() == 1:
        block = cast(Block, blocks[2])
        block.up, block.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)
    error = error_of(lambda: build(kind, NEVER, blocks=blocks))
    assert error.startswith("ValueError: " if kind == "tp" else "ContractError: "), error
    assert re.search(r"rank 0: .*\b12, 8\b.*; rank 1: .*\b14, 8\b", error), error
    assert len(error) < 1000


@pytest.mark.fault(27, place="when the model is wrapped")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_dtypes_that_differ_are_refused(kind: str) -> None:
    blocks = seeded_blocks().to(torch.float16 if dist.get_rank() else torch.bfloat16)
    error = error_of(lambda: build(kind, NEVER, blocks=blocks))
    assert error.startswith("ValueError: " if kind == "tp" else "ContractError: "), error
    assert re.search(r"rank 0: .*torch\.bfloat16.*; rank 1: .*torch\.float16", error), error


def parameters_from(kind: str, seed: int) -> list[Tensor]:
    return local_parameters(build(kind, NEVER, blocks=seeded_blocks(seed=seed)))


@pytest.mark.fault(26, place="when the model is wrapped")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp"])
@pytest.mark.ranks(2, in_turn=True)
def test_all_ranks_begin_with_the_weights_of_rank_0(kind: str) -> None:
    trained, of_rank_0 = parameters_from(kind, dist.get_rank()), parameters_from(kind, 0)
    assert all(map(torch.equal, trained, of_rank_0))


@pytest.mark.fault(26, place="when the model is wrapped")
@pytest.mark.parametrize("kind", ["pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_a_stage_begins_with_the_weights_of_its_rank(kind: str) -> None:
    trained, *of_seeds = (parameters_from(kind, seed) for seed in (dist.get_rank(), 0, dist.get_rank()))
    assert [all(map(torch.equal, trained, each)) for each in of_seeds] == [dist.get_rank() == 0, True]


@pytest.mark.fault(97, place="on rank 1 after step 3")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp"])
@pytest.mark.ranks(2, in_turn=True)
def test_a_parameter_frozen_on_one_rank_is_named(kind: str) -> None:
    training = build(kind, NEVER)
    for step in range(14):
        if step == 3 and dist.get_rank() == 1:
            training.model.get_parameter("0.norm.weight").requires_grad_(False)
        if (error := error_of(lambda: training.step(step))) != "nothing":  # noqa: B023
            break
    assert step == 3 and error.startswith("ContractError: ") and "0.norm.weight" in error, error


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


@pytest.mark.fault(70, place="rank 1 in step 2 of 3")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_an_infinity_on_one_rank_is_a_step_on_none(kind: str) -> None:
    """Of each step whether it changes parameters of this rank, and the scale after it."""
    training, scaler, outcome = build(kind, NEVER), ShardedGradScaler(init_scale=1024.0), []
    for step in range(1, 4):
        before = local_parameters(training)
        scaled_step(training, kind, step, scaler, torch.inf if step == 2 else 1.0)
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        outcome.append((not all(map(torch.equal, before, local_parameters(training))), scaler.get_scale()))
    assert outcome == [(True, 1024.0), (False, 512.0), (True, 512.0)]


@pytest.mark.fault(71, place="rank 1 in step 1")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_clipping_refuses_a_nan_of_one_rank_on_all(kind: str) -> None:
    training = build(kind, NEVER)
    scaled_step(training, kind, 1, ShardedGradScaler(init_scale=1.0), torch.nan)
    params = list(training.model.parameters())
    error = error_of(lambda: torch.nn.utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True))
    assert error.startswith("RuntimeError: the norm of order 2.0 of the gradients on all ranks is nan"), error


@pytest.mark.fault(72)
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_the_norm_of_gradients_is_that_of_one_process(kind: str) -> None:
    with in_float64():
        blocks = seeded_blocks()
        plain, training = copy.deepcopy(blocks), build(kind, NEVER, blocks=blocks)
        training.backward(1)
        replicas = [0] if kind in REPLICATED_DATA else range(dist.get_world_size())
        losses = [mse(plain(x), target) for x, target in (batch_of(1, replica) for replica in replicas)]
        torch.stack(losses).mean().backward()
        norm = clip_grad_norm_(training.model.parameters(), 0.1)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert float(norm) == pytest.approx(float(expected), rel=1e-9)


# Wrong and unusual use.


@pytest.mark.fault(80)
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_a_model_wrapped_twice_is_refused(kind: str) -> None:
    blocks, group, plan = seeded_blocks(), cast(Any, dist.new_group()), {"*.up": "colwise", "*.down": "rowwise"}

    def wrap(model: Any) -> Any:
        if kind == "fsdp":
            return fully_shard(model, group)
        if kind == "oss":
            return ShardedDataParallel(model, optimizer, process_group=group)
        if kind == "tp":
            return parallelize(model, plan, group)
        balance = [2, 2] if model is blocks else [1, 1]
        return DistributedPipe(model, "1f1b", balance=balance, chunks=2, process_group=group)

    optimizer = OSS(blocks.parameters(), Adam, group, lr=0.02) if kind == "oss" else None
    text = {
        "fsdp": "ValueError: this Sequential is sharded already",
        "oss": "ValueError: ShardedDataParallel: another wrapper reduces the gradients of this optimizer already",
        "tp": "ValueError: '0.up' is divided already",
        "pipe": "TypeError: module must be nn.Sequential to be partitioned, but is DistributedPipe",
    }[kind]
    wrapped = wrap(blocks)
    error = error_of(lambda: wrap(wrapped))
    assert error.startswith(text), error


def optimizer_built_before(kind: str) -> str:
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


@pytest.mark.fault(81)
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp"])
@pytest.mark.ranks(2, in_turn=True)
def test_an_optimizer_built_before_is_refused(kind: str) -> None:
    text = "call step() and zero_grad() of the OSS" if kind == "oss" else "Adam was built before the model was sharded"
    error = optimizer_built_before(kind)
    assert error.startswith("RuntimeError: ") and text in error, error


@pytest.mark.fault(81)
@pytest.mark.parametrize("kind", ["pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_an_optimizer_built_before_a_pipeline_trains_it(kind: str) -> None:
    assert optimizer_built_before(kind) == "trains"


def assert_trains_as_plain(kind: str, *others: nn.Module) -> None:
    """Compares the losses of three steps with those of the same model on one process; in float64."""
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
    assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.fault(82)
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_parameters_of_odd_shapes_train_as_on_one_process(kind: str) -> None:
    with in_float64():
        assert_trains_as_plain(kind, OddParameters(), Block(3))


@pytest.mark.fault(87)
@pytest.mark.parametrize("kind", ["fsdp", "oss"])
@pytest.mark.ranks(2, in_turn=True)
def test_fewer_elements_than_ranks_train_as_on_one_process(kind: str) -> None:
    with in_float64():
        assert_trains_as_plain(kind, Scalar(), nn.Tanh(), nn.Tanh(), nn.Tanh())


@pytest.mark.fault(87)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(1, in_turn=True)
def test_one_rank_trains_as_plain_pytorch(kind: str) -> None:
    with in_float64():
        assert_trains_as_plain(kind)


@pytest.mark.fault(20, 21, place="rank 1 has one batch of three fewer")
@pytest.mark.parametrize("kind", ["tp"])
@pytest.mark.ranks(2, in_turn=True)
def test_fewer_batches_of_a_tensor_parallel_rank_are_an_error(kind: str) -> None:
    training = build(kind, NEVER, check_inputs=True)
    error = error_of(
        lambda: [training.step(step) for step in join(range(3 - dist.get_rank()), cast(Any, training.group))]
    )
    assert error.startswith("DivergenceError: ") and "must all be given the same" in error, error


# What ends a wait for the other rank at its limit.


def build_with_limit(kind: str, **options: Any) -> Training:
    flight_recorder._GRACE_SECONDS = 0.5  # A rank that waits in another group leaves no record.
    return build(kind, scaled_by_load(3.0), **options)


@pytest.mark.fault(20, 33, place="rank 1 leaves out step 2; the limit is 3 s")
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_a_group_is_broken_after_a_step_of_one_rank(kind: str) -> None:
    broken = {
        "tp": "an earlier wait in this process group timed out, which closed its connections",
        "pipe": "the ranks of the pipeline have lost each other in an earlier step:\n",
    }.get(kind, "the process group is broken since an earlier error and can't be used again:\n")
    training = build_with_limit(kind)
    training.step(0)
    if dist.get_rank() == 0:
        first, second = (error_of(lambda: training.step(1)) for _ in range(2))
        assert re.search("with rank 1 failed: no answer within", first), first
        assert broken in second and "with rank 1 failed: no answer within" in second, second
        assert "start from the last checkpoint" in first and "start from the last checkpoint" in second


def assert_waited_for_each_other(error: str) -> None:
    """Both name each other. The limit of one passes first, which closes the connection of the other."""
    other = 1 - dist.get_rank()
    assert re.search(f"with rank {other} failed: (no answer within|it has closed the connection)", error), error
    assert "start from the last checkpoint" in error, error
    assert any("no answer within" in each for each in by_rank(error))


@pytest.mark.fault(30, place="rank 0 saves while rank 1 steps; the limit is 3 s")
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
@pytest.mark.ranks(2, in_turn=True)
def test_a_save_on_one_rank_is_an_error_on_both(kind: str, tmp_path: Path) -> None:
    training = build_with_limit(kind)
    training.step(0)
    error = error_of(lambda: training.step(1) if dist.get_rank() else training.save(tmp_path, 1))
    assert_waited_for_each_other(error)
    assert not (tmp_path / SNAPSHOTS).exists() or latest_snapshot(tmp_path / SNAPSHOTS) is None


@pytest.mark.fault(22, place="rank 1 in the forward and backward of step 1; the limit is 3 s")
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tp"])
@pytest.mark.ranks(2, in_turn=True)
def test_a_divided_layer_left_out_by_one_rank_is_an_error(kind: str) -> None:
    training = build_with_limit(kind, blocks=seeded_blocks(Skipped(3)))
    error = error_of(lambda: training.step(1))
    assert_waited_for_each_other(error)
    assert error.startswith("TransferError: ")


@pytest.mark.fault(105, place="rank 1 in step 2; the limit is 3 s")
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tp"])
@pytest.mark.ranks(2, in_turn=True)
def test_a_backward_left_out_by_one_rank_is_an_error(kind: str) -> None:
    """Rank 1 has caught an error in its loss, and goes on to the next step."""
    training = build_with_limit(kind)
    training.step(0)
    x, target = batch_of(1, 0)
    loss = mse(training.called(x), target)
    error = error_of(lambda: training.step(2) if dist.get_rank() else loss.backward())
    assert_waited_for_each_other(error)
    assert error.startswith("TransferError: ")
