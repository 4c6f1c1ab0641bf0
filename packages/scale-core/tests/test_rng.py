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
