"""Devices are found by what users write, and one that is not there is named before anything is moved."""

from typing import Any

import pytest
import torch

from scale_pipe.one_process.pipe import devices_of

CPU = torch.device("cpu")


def test_devices_are_what_they_are_called() -> None:
    assert devices_of(["cpu", CPU, "meta"], [1, 1, 1]) == [CPU, CPU, torch.device("meta")]


def test_without_accelerators_all_partitions_are_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert devices_of(None, [1, 2]) == [CPU, CPU] and devices_of(None, None) == [CPU]


def test_an_accelerator_has_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert devices_of(None, [1, 1]) == [first, second]
    assert devices_of(["cuda", "cuda:0", "cpu"], None) == [second, first, CPU]
    with pytest.raises(
        ValueError, match=r"no device 'cuda:2', as devices\[1\] names it: this process sees 2 of the type"
    ):
        devices_of(["cuda:1", "cuda:2"], None)


def test_what_is_no_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    wrong: Any
    for wrong in ("gpu:0", None, "cuda:0", "cuda"):
        with pytest.raises(ValueError, match=r"there is no device .*, as devices\[1\] names it.*sees no accelerators"):
            devices_of(["cpu", wrong], None)
    for wrong in ("cpu", CPU, 2):
        with pytest.raises(TypeError, match=r"devices are a list, one for each partition, but got .*write devices=\["):
            devices_of(wrong, None)
