"""Which generators were drawn from, and the same numbers drawn again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scale_core.device import rng


def test_only_generators_that_were_drawn_from_are_replayed() -> None:
    before = rng.generator_states()
    assert rng.drawn_since(before) == []
    first = torch.rand(3)
    drawn = rng.drawn_since(before)
    assert [one.generator for one in drawn] == [torch.default_generator]
    following = torch.default_generator.get_state()
    with rng.replayed(drawn):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.default_generator.get_state(), following)
    with pytest.raises(KeyError), rng.replayed(drawn):
        raise KeyError
    assert torch.equal(torch.default_generator.get_state(), following)


def test_an_accelerator_that_is_initialized_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = rng.generator_states()
    found: list[Any] = [torch.default_generator, SimpleNamespace(device=torch.device("cuda", 0))]
    monkeypatch.setattr(rng, "_generators", lambda: found)
    with pytest.raises(RuntimeError, match=r"call torch.cuda.init\(\)"):
        rng.drawn_since(before)
    # And those of several devices are told apart.
    generators = [torch.default_generator, torch.Generator()]
    monkeypatch.setattr(rng, "_generators", lambda: generators)
    before = rng.generator_states()
    torch.rand(1, generator=generators[1])
    assert [one.generator for one in rng.drawn_since(before)] == [generators[1]]


def test_a_thread_may_read_generators_of_host_and_one_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = [torch.device("cuda", index) for index in range(3)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", [SimpleNamespace(device=device) for device in devices])
    with rng.only_device(devices[1]):
        assert [one.device for one in rng._generators()] == [torch.device("cpu"), devices[1]]
    with rng.only_device(torch.device("cpu")):
        assert [one.device for one in rng._generators()] == [torch.device("cpu")]
    assert [one.device for one in rng._generators()] == [torch.device("cpu"), *devices]


class _Module:
    """As the module of a device type in torch: the state of each device is a number that drawing raises."""

    def __init__(self, **attributes: Any) -> None:
        self.states = [torch.tensor([number], dtype=torch.uint8) for number in (3, 7)]
        self.__dict__.update(attributes)

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.states)

    def draw(self, index: int) -> None:
        self.states[index] = self.states[index] + 1


class _WithState(_Module):
    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.states[device.index].clone()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = state.clone()


def _use(module: _Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the module that of this process's accelerator."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("hpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: {"hpu": module}[kind])


def test_random_numbers_of_any_accelerator_are_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = _WithState()
    _use(module, monkeypatch)
    before = rng.generator_states()
    assert [str(state.generator.device) for state in before] == ["cpu", "hpu:0", "hpu:1"]
    module.draw(1)
    drawn = rng.drawn_since(before)
    assert [str(state.generator.device) for state in drawn] == ["hpu:1"]
    with rng.replayed(drawn):
        assert module.states == [torch.tensor([3]), torch.tensor([7])]
    assert module.states == [torch.tensor([3]), torch.tensor([8])]


def test_an_accelerator_with_unknown_random_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout would silently differ between a forward and its recomputation."""
    _use(_Module(), monkeypatch)
    with pytest.raises(RuntimeError, match=r"numbers of 'hpu' can't be drawn again: torch\.hpu has no get_rng_state"):
        rng.generator_states()


def test_generators_that_a_module_lists_are_taken_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator()
    _use(_Module(default_generators=(generator,)), monkeypatch)
    assert [state.generator for state in rng.generator_states()] == [torch.default_generator, generator]
