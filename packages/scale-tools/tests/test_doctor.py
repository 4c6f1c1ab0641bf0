"""`scale-train doctor`: a plain verdict on this machine, and, for what is faked here to be wrong, what to do."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from importlib import metadata
from typing import Any

import pytest
import torch

import scale_train
from scale_core import compat
from scale_core.comm.group import group_of
from scale_tools.doctor import command, environment, self_test
from scale_tools.doctor.environment import Finding, backends, devices, interfaces, versions
from scale_tools.doctor.options import DoctorOptions
from scale_tools.doctor.self_test import SelfTest, link_rates, step_difference
from scale_train.cli import main

RIGHT = SelfTest("gloo", 2, 3e-8, {"all_reduce": 2e9, "all_gather": 1e9})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that have found all well, and memory that was measured."""
    monkeypatch.setattr(command, "_on_new_ranks", lambda *_: RIGHT)
    monkeypatch.setattr(environment, "memory", lambda: [Finding("memory", "ok", "copied at host 9.0 GB/s")])


def found(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> dict[str, Any]:
    assert main(["doctor", "--json", *words]) == code
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_a_rank_that_fails_after_its_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, outcome in ((1, "the ranks ended with code 1"), (0, RIGHT)):
        monkeypatch.setattr(command, "launch_and_collect", lambda *_, code=code, **__: (code, [RIGHT, RIGHT]))
        assert command._on_new_ranks(DoctorOptions(), "cpu") == outcome


def _hang(options: DoctorOptions, device: str) -> None:
    time.sleep(600)


@pytest.mark.parametrize(("load", "said"), [(0.0, "0.15 s: they hang"), (1e4, "the machine may be too busy")])
def test_ranks_that_hang_are_ended_in_time_and_told(
    load: float, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_as_rank", _hang)
    monkeypatch.setattr(environment, "memory", list)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    before = time.monotonic()
    assert main(["doctor", "--device", "cpu", "--limit-seconds", "0.1"]) == 1
    assert time.monotonic() - before < 300
    out = capsys.readouterr().out
    assert "no result of the 2 ranks within 0.15 s" in out and said in out and "does not work: self-test" in out


def test_who_is_stopped_says_nothing_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "launch_and_collect", lambda *_, **__: (143, []))
    with pytest.raises(SystemExit) as ended:
        command._on_new_ranks(DoctorOptions(), "cpu")
    assert ended.value.code == 143


def test_two_ranks_are_started_and_train_and_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--limit-seconds", "300"]) == 0
    out = capsys.readouterr().out
    assert "a step of fully_shard on 2 ranks (gloo) equals one process" in out
    assert "each rank sends: all_reduce " in out and "copied at host " in out
    assert f"scale {scale_train.__version__}" in out and "gloo" in out
    assert out.splitlines()[-1].startswith("verdict    ok      training on several ranks works here (")


def test_json_has_the_numbers(capsys: pytest.CaptureFixture[str], quick: None) -> None:
    content = found(capsys, 0)
    by_name = {each["name"]: each for each in content["findings"]}
    assert content["verdict"] == "ok"
    assert by_name["self-test"]["values"] == {"difference": 3e-8, "ranks": 2, "backend": "gloo"}
    assert by_name["link"]["values"]["bytes_per_second"] == RIGHT.bytes_per_second
    assert by_name["versions"]["values"]["torch"] == torch.__version__


def test_packages_of_other_versions_are_named_with_their_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2020.1.0" if name == "scale-fsdp" else real(name))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "versions   FAILED" in out and "but scale-fsdp 2020.1.0: packages have one version together" in out
    assert f"python -m pip install scale-fsdp=={scale_train.__version__}" in out
    assert "verdict    FAILED  does not work: versions" in out


def test_an_interface_that_is_not_there_is_named_before_any_wait(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_on_new_ranks", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr(environment, "memory", list)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth_of_another")
    content = found(capsys, 1)
    (wrong,) = (each for each in content["findings"] if each["verdict"] == "failed")
    assert wrong["name"] == "network" and "GLOO_SOCKET_IFNAME=eth_of_another is not an interface" in wrong["text"]
    assert "lo" in wrong["text"] and wrong["advice"] == "unset GLOO_SOCKET_IFNAME, or name one of these"


def test_interfaces_are_read_as_each_transport_reads_them() -> None:
    first = socket.if_nameindex()[0][1]
    for right in (
        {"GLOO_SOCKET_IFNAME": first},
        {"NCCL_SOCKET_IFNAME": first[:1]},
        {"NCCL_SOCKET_IFNAME": "^nothing"},
        {},
    ):
        assert interfaces(right) == []
    for wrong in ({"GLOO_SOCKET_IFNAME": first + "x"}, {"NCCL_SOCKET_IFNAME": f"={first}x"}):
        assert [each.name for each in interfaces(wrong)] == ["network"]


def test_ranks_that_do_not_meet_or_differ_are_a_failed_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    for outcome, words in (
        ("LaunchError: the 2 ranks met, but could not connect to each other", "GLOO_SOCKET_IFNAME names the interface"),
        (SelfTest("gloo", 2, 0.25, {}), "differs from one process by 0.25"),
        (SelfTest("gloo", 2, math.nan, {}), "differs from one process by nan"),
    ):
        monkeypatch.setattr(command, "_on_new_ranks", lambda *_, outcome=outcome: outcome)
        assert main(["doctor"]) == 1
        out = capsys.readouterr().out
        assert "self-test  FAILED" in out and words in out and "does not work: self-test" in out
    assert command._advice("cuda").startswith("NCCL_DEBUG=INFO")


def test_what_torch_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "simulation_supported", lambda: False)
    assert (versions().verdict, versions().advice.split(";")[0]) == (
        "note",
        "`scale-train plan` needs torch 2.11 to 2.15",
    )
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "mpi")
    assert backends().verdict == "failed" and "gloo is missing" in backends().text
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert "without torch.distributed" in backends().text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert devices().verdict == "note" and "CUDA_VISIBLE_DEVICES" in devices().advice


def test_wrong_input_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, line in ((["--limit-seconds", "0"], "a number above 0"), (["--device", "cuda"], "take --device cpu")):
        assert main(["doctor", *words]) == 2
        assert line in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["doctor", "--device", "cuda"]) == 2
    assert "2 ranks need 2 GPUs, and there is one" in capsys.readouterr().err


@pytest.mark.ranks(2)
def test_the_test_notices_a_step_that_is_not_that_of_one_process() -> None:
    """The difference as it is, and of a step that does not average over the ranks."""
    group, host = group_of(), torch.device("cpu")
    self_test.SENT_BYTES["cpu"] = 1 << 16
    assert all(rate > 0 for rate in link_rates(group, host).values())
    right = step_difference(group, host)
    step = self_test._step
    self_test._step = lambda model, batch: step(model, batch[: self_test.SAMPLES] if len(batch) > 4 else batch * 2)
    wrong = step_difference(group, host)
    assert right <= self_test.MOST_DIFFERENCE < wrong
