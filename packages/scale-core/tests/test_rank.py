"""rank.py: a rank lives in the caller's world, and answers whatever its function does."""

import os
import warnings

import pytest
import torch.distributed as dist

from scale_core.testing import RankError, run_ranks


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_something_odd() -> None:
    if dist.get_rank() == 1:
        raise Unpicklable(1, 2)
    dist.barrier()


def warn() -> None:
    warnings.warn("a deprecated call", DeprecationWarning, stacklevel=1)


class Dropped:
    def __del__(self) -> None:
        warnings.warn("dropped", ResourceWarning, stacklevel=1)


def drop_something() -> None:
    Dropped()


def abort_after_returning() -> int:
    vars(dist)["destroy_process_group"] = os.abort
    return 7


def return_a_function() -> object:
    return lambda: 0


def environment() -> tuple[str | None, str]:
    return os.environ.get("SCALE_TEST_WORD"), os.getcwd()


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


@pytest.mark.fault(96)
def test_an_abort_after_the_result_is_no_failure() -> None:
    assert run_ranks(abort_after_returning, 2) == [7, 7]


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(Exception, match="return_a_function"):
        run_ranks(return_a_function, 1, backend=None)


def test_ranks_see_the_caller_s_present_environment_and_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    monkeypatch.setenv("SCALE_TEST_WORD", "now")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(environment, 1, backend=None) == [("now", os.path.realpath(tmp_path))]


def test_an_exception_that_does_not_unpickle_is_a_rank_error() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 raised Unpicklable: 1 and 2") as caught:
        run_ranks(raise_something_odd, 2)
    assert "in raise_something_odd" in caught.value.__notes__[0]
