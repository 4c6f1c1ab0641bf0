import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from scale_core.testing import RankError, run_ranks, scaled_by_load


def sum_of_ranks() -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def pid_of_a_rank_without_group() -> tuple[int, bool, int]:
    return os.getpid(), dist.is_initialized(), torch.get_num_threads()


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("of rank 1")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("a last word", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def lost_rank_waits() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def say_something() -> None:
    print("hello from", dist.get_rank())
    os.write(2, b"and from C\n")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_rank_returns_its_own_result_in_order(num_ranks: int) -> None:
    expected = float(sum(range(num_ranks)))
    assert run_ranks(sum_of_ranks, num_ranks) == [(rank, expected) for rank in range(num_ranks)]


def test_without_a_backend_torch_distributed_is_left_alone() -> None:
    (pid, initialised, threads), (other, _, _) = run_ranks(pid_of_a_rank_without_group, 2, backend=None)
    assert len({pid, other, os.getpid()}) == 3
    assert not initialised
    assert threads == 1


def test_the_first_failing_ranks_exception_is_raised() -> None:
    with pytest.raises(ValueError, match="of rank 1") as caught:
        run_ranks(raise_on_rank_1, 2)
    (note,) = caught.value.__notes__
    assert note.startswith("raised on rank 1 of 2:")
    assert "in raise_on_rank_1" in note


def test_a_killed_rank_is_named_with_signal_and_last_words() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL") as caught:
        run_ranks(die_on_rank_1, 2)
    assert "a last word" in caught.value.__notes__[0]


def test_the_limit_kills_the_ranks_and_says_where_they_were() -> None:
    with pytest.raises(TimeoutError) as caught:
        run_ranks(lost_rank_waits, 2, limit_seconds=4.0)
    text = str(caught.value)
    assert "limit of 4 s" in text
    assert "rank 0: had returned" in text
    assert "in lost_rank_waits" in text.partition("rank 1: was here")[2]


def test_a_frozen_rank_is_killed_too() -> None:
    with pytest.raises(TimeoutError, match=r"rank 0: was here.*\n.*no answer"):
        run_ranks(freeze, 1, limit_seconds=3.0, backend=None)


def test_what_ranks_print_reaches_the_caller_s_output(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(say_something, 2)
    said = capsys.readouterr().out.splitlines(keepends=True)
    # gloo of torch 2.8 says when it is connected.
    assert [line for line in said if not line.startswith("[Gloo] ")] == [
        "hello from 0\n",
        "and from C\n",
        "hello from 1\n",
        "and from C\n",
    ]


def test_zero_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_ranks(sum_of_ranks, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_outlives_the_call() -> None:
    with pytest.raises(TimeoutError):
        run_ranks(freeze, 2, limit_seconds=2.0, backend=None)
    (pid, _, _), _ = run_ranks(pid_of_a_rank_without_group, 2, backend=None)
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize(("load", "cores", "expected"), [(0.2, 2, 3.0), (8.0, 2, 12.0), (8.0, None, 24.0)])
def test_a_limit_follows_the_load(
    monkeypatch: pytest.MonkeyPatch, load: float, cores: int | None, expected: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert scaled_by_load(3.0) == expected
