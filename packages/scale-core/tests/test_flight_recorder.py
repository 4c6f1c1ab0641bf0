"""flight_recorder.py: what each rank did last reaches the others without the group, or it is said that none came."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scale_core import errors
from scale_core.comm.group import Group, group_of
from scale_core.consistency import flight_recorder as last_words
from scale_core.consistency.flight_recorder import FlightRecorder, unfinished_on_nccl
from scale_core.errors import recovery_hint
from scale_core.launch import init_distributed
from scale_core.launch.rendezvous import open_store
from scale_core.testing import run_ranks
from scale_core.testing.ranks import scaled_by_load
from scale_snapshot import load_snapshot, save_snapshot


def wait_in_different_things() -> dict[int, str]:
    last_words._GRACE_SECONDS = 0.5
    recorders = FlightRecorder(group_of()), FlightRecorder(group_of())
    mine = recorders[dist.get_rank()]
    mine.events.append("raised an error that is over")
    mine.publish(goes_on=dist.get_rank() == 1)
    dist.barrier()
    told = mine.dump_all_ranks()
    dist.barrier()
    return told


def test_a_rank_that_has_failed_in_something_else_says_in_what() -> None:
    first, second = run_ranks(wait_in_different_things, 2)
    assert first[1].startswith("no flight record")
    assert second[0] == "elsewhere: raised an error that is over"


def freeze_the_host_of_the_store(port: int) -> dict[int, str] | None:
    """Rank 0 serves the store, and stops for as long as rank 1 looks at what all did last."""
    ready = open_store("127.0.0.1", port, serve=False, timeout=60)
    rank = ready.add("rank", 1) - 1
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    os.environ["MASTER_PORT"] = ready.get("free port").decode()
    recorder = FlightRecorder(init_distributed(device="cpu", limit_seconds=600.0))
    recorder.events.append("here")
    if rank == 0:
        ready.set("pid", str(os.getpid()))
        ready.wait(["thawed"])
        return None
    host = int(ready.get("pid"))
    os.kill(host, signal.SIGSTOP)
    began = time.monotonic()
    try:
        recorder.publish()
        return recorder.dump_all_ranks()
    finally:
        seconds = time.monotonic() - began
        os.kill(host, signal.SIGCONT)
        ready.set("thawed", "")
        assert seconds < scaled_by_load(20)


def test_a_store_with_a_frozen_host_is_waited_for_within_limits() -> None:
    serving = open_store("127.0.0.1", 0, serve=True, timeout=60)
    free = open_store("127.0.0.1", 0, serve=True, timeout=60)
    serving.set("free port", str(free.port))
    del free
    (told,) = [told for told in run_ranks(freeze_the_host_of_the_store, 2, serving.port, backend=None) if told]
    assert told[1] == "here"
    assert told[0].startswith("not known: the rendezvous store does not answer; its host")


@pytest.mark.ranks(3)
def test_every_rank_reads_what_all_have_left() -> None:
    first, second = FlightRecorder(group_of()), FlightRecorder(group_of())
    rank = dist.get_rank()
    first.events.append(f"rank {rank} began")
    first.events.append(f"rank {rank} ended")
    second.events.append("of another contract")
    first.publish()
    second.publish()
    first, second = [first.dump_all_ranks(), second.dump_all_ranks()]
    assert first == {rank: f"rank {rank} began; then rank {rank} ended" for rank in range(3)}
    assert second == dict.fromkeys(range(3), "of another contract")


@pytest.mark.ranks(2)
def test_a_rank_that_left_no_word_is_named_after_a_short_wait() -> None:
    last_words._GRACE_SECONDS = 0.5
    words = FlightRecorder(group_of())
    words.events.append("here")
    if dist.get_rank() == 0:
        words.publish()
    words = words.dump_all_ranks()
    assert words[0] == "here"
    assert words[1].startswith("no flight record")


def test_unfinished_nccl_collectives_are_named_where_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps them where it was built with NCCL; here a stand-in for its dump."""
    entries = [
        {"profiling_name": "nccl:all_gather", "collective_seq_id": 6, "state": "completed", "input_sizes": [[4]]},
        {"profiling_name": "nccl:reduce_scatter", "collective_seq_id": 7, "state": "started", "input_sizes": [[8]]},
        {"profiling_name": "nccl:all_gather", "collective_seq_id": 8, "state": "scheduled", "input_sizes": [[4]]},
    ]

    def dump(**options: bool) -> bytes:
        assert options["onlyActive"]
        return pickle.dumps({"version": "2.10", "entries": entries})

    def broken(**options: bool) -> bytes:
        raise RuntimeError

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", dump, raising=False)
    told = ["NCCL: reduce_scatter number 7 of [[8]] is started", "NCCL: all_gather number 8 of [[4]] is scheduled"]
    assert unfinished_on_nccl() == told
    store = dist.HashStore()
    monkeypatch.setattr(last_words.compat, "default_store", lambda: store)
    recorder = FlightRecorder(Group(backend="nccl"))
    recorder.events.append("step 3: gather of unit 'a'")
    recorder.publish()
    assert recorder.dump_all_ranks()[0] == "; then ".join(["step 3: gather of unit 'a'", *told])
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", broken, raising=False)
    assert unfinished_on_nccl() == []
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_nccl_trace", raising=False)
    assert unfinished_on_nccl() == []


def test_only_the_last_few_words_are_told() -> None:
    words = FlightRecorder(Group())
    for number in range(20):
        words.events.append(str(number))
    assert words.recent == ["16", "17", "18", "19"]


def test_without_a_store_nobody_has_left_a_word_and_nobody_waits() -> None:
    words = FlightRecorder(Group())
    words.events.append("here")
    words.publish()
    assert list(words.dump_all_ranks()) == [0]
    assert words.dump_all_ranks()[0].startswith("no flight record")


def test_the_way_on_is_the_last_snapshot_written_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_last_snapshot", None)
    assert recovery_hint().endswith("start from the last checkpoint")
    for step in (1, 2):
        save_snapshot(tmp_path, step, {"x": torch.zeros(2)})
    assert recovery_hint().endswith(f"start from the last checkpoint, {tmp_path / 'step-00000002'}")
    load_snapshot(tmp_path, {"x": torch.ones(2)}, step=1)
    assert recovery_hint().endswith("step-00000001")
