"""Activations that are recomputed, or that leave the device and come back, have no race on simulated streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import scale_checkpoint.offload.store as store
from scale_check.simulate import RaceError, Simulation, simulate
from scale_checkpoint import apply_checkpointing, checkpoint_wrapper, offload_activations
from scale_checkpoint.offload.storage import _File, _OnDisk

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]

WIDTH, ROWS, STEPS = 32, 64, 3


@pytest.fixture(params=[False, True], ids=["", "backward_thread"])
def simulation(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    with simulate(device="sim", races=True, backward_thread=request.param) as simulation:
        yield simulation


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def model(wrap: Callable[[nn.Module], nn.Module] = nn.Identity) -> nn.Module:
    with torch.device("sim"):
        blocks = [block() for _ in range(4)]
    return nn.Sequential(*(blocks if wrap is nn.Identity else map(wrap, blocks)))


def train(module: Callable[[Tensor], Tensor]) -> None:
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, device="sim", requires_grad=True)
        module(x).sum().backward()


@pytest.mark.parametrize("offloads", [False, True])
def test_checkpointed_blocks_have_no_race(offloads: bool, simulation: Simulation) -> None:
    train(model(lambda module: checkpoint_wrapper(module, offload_to_cpu=offloads, min_bytes=0)))
    assert (simulation.on("cpu").peak_bytes > 0) == offloads


def test_selective_checkpointing_has_no_race(simulation: Simulation) -> None:
    blocks = model()
    for layer in blocks:
        apply_checkpointing(layer, [torch.ops.aten.addmm.default])
    train(blocks)


def test_offloaded_activations_have_no_race(simulation: Simulation) -> None:
    module = model()

    def compute(x: Tensor) -> Tensor:
        with offload_activations(min_bytes=0):
            result: Tensor = module(x)
            return result

    train(compute)
    assert simulation.on("cpu").peak_bytes > 0


def use_memory(file: _File, do: Callable[..., int], memory: Tensor, offset: int) -> None:
    """What a transfer does to the host's memory, which has no address here."""
    memory.clone() if do is os.pwrite else memory.zero_()


def test_activations_in_a_file_have_no_race(
    simulation: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_File, "transfer", use_memory)
    train(model(lambda module: checkpoint_wrapper(module, offload_to=tmp_path, min_bytes=0)))
    assert simulation.on("cpu").peak_bytes > 0


def test_a_file_write_that_does_not_wait_for_its_copy_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_File, "transfer", use_memory)
    monkeypatch.setattr(_OnDisk, "_write", lambda part, memory: part._file.transfer(os.pwrite, memory, 0))
    with pytest.raises(RaceError, match="aten::copy_ writes on side stream"), simulate(device="sim", races=True):
        train(model(lambda module: checkpoint_wrapper(module, offload_to=tmp_path, min_bytes=0)))


def test_a_device_that_waits_for_its_copies_has_no_race(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MAX_IN_FLIGHT_BYTES", ROWS * WIDTH * 4)
    train(model(lambda module: checkpoint_wrapper(module, offload_to_cpu=True, min_bytes=0)))


def test_activations_fetched_and_never_used_have_no_race(simulation: Simulation) -> None:
    module = model(lambda module: checkpoint_wrapper(module, offload_to_cpu=True, min_bytes=0))
    for _ in range(STEPS):
        unused, used = (module(torch.randn(ROWS, WIDTH, device="sim", requires_grad=True)) for _ in range(2))
        used.sum().backward()  # It has fetched ahead what left before it.
        del unused, used
        torch.ones(ROWS, WIDTH, device="sim")
