import os
import signal
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from scale_core.testing import RankError, run_ranks


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def sum_of_ranks() -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def pid_of_a_rank_without_group() -> tuple[int, bool, int]:
    return os.getpid(), dist.is_initialized(), torch.get_num_threads()


def raise_on_rank_1(kind: str) -> None:
    if dist.get_rank() == 1:
        raise {"value": ValueError("of rank 1"), "odd": Unpicklable(1, 2)}[kind]
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


def warn() -> None:
    warnings.warn("a deprecated call", DeprecationWarning, stacklevel=1)


class Dropped:
    def __del__(self) -> None:
        warnings.warn("dropped", ResourceWarning, stacklevel=1)


def drop_something() -> None:
    Dropped()


def say_something() -> None:
    print("hello from", dist.get_rank())
    os.write(2, b"and from C\n")


def abort_after_returning() -> int:
    vars(dist)["destroy_process_group"] = os.abort
    return 7


def return_a_function() -> object:
    return lambda: 0


def environment() -> tuple[str | None, str]:
    return os.environ.get("SCALE_TEST_WORD"), os.getcwd()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_rank_returns_its_own_result_in_order(num_ranks: int) -> None:
    expected = float(sum(range(num_ranks)))
    assert run_ranks(sum_of_ranks, num_ranks) == [(rank, expected) for rank in range(num_ranks)]


def test_without_a_backend_torch_distributed_is_left_alone() -> None:
    (pid, initialised, threads), (other, _, _) = run_ranks(pid_of_a_rank_without_group, 2, backend=None)
    assert len({pid, other, os.getpid()}) == 3
    assert not initialised
    assert threads == 1


def test_the_first_failing_rank_s_exception_is_raised_with_its_traceback() -> None:
    with pytest.raises(ValueError, match="of rank 1") as caught:
        run_ranks(raise_on_rank_1, 2, "value")
    (note,) = caught.value.__notes__
    assert note.startswith("raised on rank 1 of 2:")
    assert "in raise_on_rank_1" in note


def test_an_exception_that_does_not_unpickle_arrives_as_a_rank_error() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 raised Unpicklable: 1 and 2") as caught:
        run_ranks(raise_on_rank_1, 2, "odd")
    assert "in raise_on_rank_1" in caught.value.__notes__[0]


def test_a_killed_rank_is_named_with_its_signal_and_its_last_words() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL") as caught:
        run_ranks(die_on_rank_1, 2)
    assert "a last word" in caught.value.__notes__[0]


def test_the_limit_kills_the_ranks_and_says_where_they_were() -> None:
    with pytest.raises(TimeoutError) as caught:
        run_ranks(lost_rank_waits, 2, timeout=4.0)
    text = str(caught.value)
    assert "limit of 4 s" in text
    assert "rank 0: had returned" in text
    assert "in lost_rank_waits" in text.partition("rank 1: was here")[2]


def test_a_frozen_rank_is_killed_too() -> None:
    with pytest.raises(TimeoutError, match=r"rank 0: was here.*\n.*no answer"):
        run_ranks(freeze, 1, timeout=3.0, backend=None)


def test_warnings_that_are_errors_here_are_errors_on_the_ranks() -> None:
    with pytest.raises(DeprecationWarning, match="a deprecated call"), warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(warn, 1, backend=None)


def test_warnings_that_are_ignored_here_are_ignored_on_the_ranks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(warn, 1, backend=None) == [None]


def test_a_resource_warning_from_a_destructor_is_a_failure() -> None:
    with pytest.raises(ResourceWarning, match="dropped"):
        run_ranks(drop_something, 1, backend=None)


def test_an_abort_after_the_result_is_no_failure() -> None:
    assert run_ranks(abort_after_returning, 2) == [7, 7]


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(Exception, match="return_a_function"):
        run_ranks(return_a_function, 1, backend=None)


def test_what_ranks_print_reaches_the_caller_s_output(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(say_something, 2)
    assert capsys.readouterr().out == "hello from 0\nand from C\nhello from 1\nand from C\n"


def test_ranks_see_the_caller_s_present_environment_and_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    monkeypatch.setenv("SCALE_TEST_WORD", "now")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(environment, 1, backend=None) == [("now", os.path.realpath(tmp_path))]


def test_zero_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_ranks(sum_of_ranks, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_outlives_the_call() -> None:
    with pytest.raises(TimeoutError):
        run_ranks(freeze, 2, timeout=2.0, backend=None)
    (pid, _, _), _ = run_ranks(pid_of_a_rank_without_group, 2, backend=None)
    assert not os.path.exists(f"/proc/{pid}")
