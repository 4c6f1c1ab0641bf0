"""compat.py, rendezvous.py: the host gives up before NCCL, whose watchdog ends the process without an explanation."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scale_core import compat
from scale_core.comm.group import Group
from scale_core.comm.subgroups import new_group_limit
from scale_core.comm.work import limit_of
from scale_core.launch import rendezvous
from scale_core.launch.rendezvous import init_distributed


class StubBackend:
    """A backend of torch as far as limits go."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name = name
        self.options = SimpleNamespace(_timeout=timedelta(seconds=seconds))

    def name(self) -> str:
        return self._name

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    @property
    def seconds(self) -> float:
        return float(self.options._timeout.total_seconds())


class StubGroup:
    """A process group of torch as far as limits go: gloo for the host, NCCL for the device."""

    def __init__(self, seconds: float, devices: Sequence[str] = ("cpu", "cuda")) -> None:
        self.gloo, self.nccl = StubBackend("gloo", seconds), StubBackend("nccl", seconds)
        self._device_types = [torch.device(device) for device in devices]

    def _get_backend(self, device: torch.device) -> StubBackend:
        return self.nccl if device.type == "cuda" else self.gloo


def test_the_host_waits_less_than_nccl_in_a_users_group() -> None:
    for seconds, limit in ((20.0, 10.0), (600.0, 300.0), (900.0, 600.0), (1800.0, 600.0)):
        group: Any = StubGroup(seconds, ["cuda"])
        assert limit_of(group, None) == limit < group.nccl.seconds
    assert limit_of(StubGroup(20.0, ["cpu"]), None) == 20.0  # type: ignore[arg-type]


def test_a_new_group_has_the_limits_of_its_parent() -> None:
    whole: Any = StubGroup(300.0)
    compat.extend_nccl_limit(whole, timedelta(seconds=300))
    timeout = new_group_limit(Group(0, 2, whole, "nccl", (0, 1)))
    assert timeout is not None
    part: Any = StubGroup(timeout.total_seconds())
    assert limit_of(part, None) == limit_of(whole, None) == 300.0 < part.nccl.seconds == whole.nccl.seconds


def test_init_distributed_gives_nccl_five_minutes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = StubGroup(0.0)

    def init_process_group(*args: Any, timeout: timedelta, **kwargs: Any) -> None:
        for backend in (group.gloo, group.nccl):
            backend._set_default_timeout(timeout)

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(compat, "process_groups", lambda: [group])
    monkeypatch.setattr(rendezvous, "_rendezvous", lambda *args: None)
    monkeypatch.setattr(rendezvous, "group_of", Group)
    monkeypatch.setattr(compat, "is_fake_group", lambda group: False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    init_distributed(device="cpu", limit_seconds=60)
    assert (limit_of(group, None), group.gloo.seconds, group.nccl.seconds) == (60.0, 60.0, 360.0)
