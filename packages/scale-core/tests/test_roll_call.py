import threading
import warnings
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from scale_core.errors import LaunchError
from scale_core.launch.roll_call import (
    RankFacts,
    compare,
    differences,
    facts_of,
    grace,
    roll_call,
    versions,
    warn_lead,
)


def facts(rank: int, world_size: int = 2, torch: str = "2.13.0", config: Any = None) -> RankFacts:
    return RankFacts(rank, world_size, {"torch": torch}, config, job={"SCALE_JOB_ID": "the test"})


def call_all(store: Any, everyone: list[RankFacts], timeout: float = 60.0) -> list[str]:
    """The name of the start, or the error, of each rank, which are threads here."""
    told = [""] * len(everyone)

    def call(place: int, mine: RankFacts) -> None:
        try:
            told[place] = roll_call(store, mine, timeout)
        except LaunchError as error:
            told[place] = str(error)

    threads = [threading.Thread(target=call, args=each) for each in enumerate(everyone)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_all_ranks_get_the_name_of_one_start() -> None:
    store = HashStore()
    first = call_all(store, [facts(rank, 3) for rank in (2, 0, 1)])
    again = call_all(store, [facts(rank, 3) for rank in (1, 2, 0)])
    assert len(set(first)) == len(set(again)) == 1 and first != again


def test_what_ended_ranks_left_in_the_store_is_passed_over() -> None:
    """One rank of an earlier start never came, and its rank 0 has ended without a verdict."""
    store = HashStore()
    store.set("start", "earlier")
    store.set("earlier/answer 1", "{}")
    store.add("earlier/answers", 1)
    names = call_all(store, [facts(1), facts(0)])
    assert names[0] == names[1] != "earlier"


@pytest.mark.parametrize(
    ("everyone", "message"),
    [
        ([facts(0), facts(1, torch="2.12.1")], "torch is 2.13.0 on rank 0 and 2.12.1 on rank 1: install the same"),
        ([facts(0), facts(1, world_size=3)], "WORLD_SIZE is 2 on rank 0 and 3 on rank 1"),
        ([facts(0), facts(0)], "two ranks have RANK=0"),
        ([facts(0, 3), facts(1, 3), facts(1, 3)], "two ranks have RANK=1"),
        (
            [facts(0, config={"lr": 1}), facts(1, config={"lr": 2})],
            "rank 0 and rank 1 have different configurations: lr is 1 and 2. Give all ranks the same config",
        ),
    ],
)
def test_ranks_that_do_not_belong_together_all_hear_why(everyone: list[RankFacts], message: str) -> None:
    assert all(told.startswith(message) for told in call_all(HashStore(), everyone))


def of_job(origin: str, rank: int = 0, **job: str) -> RankFacts:
    return RankFacts(rank, 2, {}, None, job, origin)


def test_ranks_of_one_launcher_begin_at_once_and_others_wait() -> None:
    for job in ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, {"TORCHELASTIC_RUN_ID": "a"}, {"agent": "12 on here"}):
        assert grace([of_job("a", **job), of_job("b", **job)], 300) == 0
    by_hand, elsewhere = (grace([of_job("a"), of_job(other)], 300) for other in "ab")
    assert 0 < by_hand < elsewhere
    allocation = [of_job("a", SLURM_JOB_ID="7", SLURM_STEP_ID="0"), of_job("b", SLURM_JOB_ID="7", SLURM_STEP_ID="1")]
    assert grace(allocation, 300) == elsewhere  # One allocation, two programs, or one program started by two srun.
    assert grace([of_job("a"), of_job("b")], 4) == 1  # The others wait little longer than the limit.


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "SCALE_JOB_ID"])
def test_ranks_of_two_jobs_are_told_at_once(name: str) -> None:
    trouble, _ = compare([of_job("a", **{name: "7"}), of_job("b", 1, **{name: "8"})])
    assert (
        trouble
        == f"{name} is 7 on rank 0 and 8 on rank 1; two jobs are at this port: give each a MASTER_PORT of its own"
    )


def test_a_second_rank_0_ends_a_start_but_no_running_job() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    told = [""]

    def lead() -> None:
        with pytest.raises(LaunchError) as caught:
            roll_call(store, facts(0), 60.0)
        told[0] = str(caught.value)

    thread = threading.Thread(target=lead)
    thread.start()
    warn_lead(store, RankFacts(0, 2, {}, None, process="process 8"))
    thread.join()
    assert told[0].startswith("two ranks have RANK=0, the other is process 8; two jobs are at this port")
    names = call_all(store, [facts(0), facts(1)])
    assert warn_lead(store, facts(0)) == facts(0).process and names[0] == names[1]


def test_who_did_not_come_is_named_on_every_rank() -> None:
    assert call_all(HashStore(), [facts(0, 4), facts(2, 4)], 1.0)[0].startswith("rank 1, 3 of 4 did not come")
    assert call_all(HashStore(), [facts(1)], 0.3) == ["rank 0 of 2 did not come within 0.3 s"]


def test_a_release_that_differs_in_its_third_number_is_a_warning() -> None:
    trouble, remark = compare([facts(0, torch="2.13.0+cpu"), facts(1, torch="2.13.1+cpu")])
    assert trouble == "" and "torch is 2.13.0+cpu on rank 0 and 2.13.1+cpu on rank 1" in remark
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call_all(store, [facts(0), facts(1, torch="2.13.1")])
    assert ["different releases" in str(warning.message) for warning in caught] == [True]


def test_differences_are_named_to_the_leaf() -> None:
    assert differences({"a": [1, 2]}, {"a": [1, 3]}) == ["a is [1, 2] and [1, 3]"]
    assert differences({}, {"a": {"b": None}}) == ["it is {} and missing", "a.b is missing and null"]
    assert differences({"a": 1}, {"a": 1}) == []


def test_numbers_that_are_none_are_no_difference() -> None:
    everyone = [facts(rank, config={"clip": float("nan")}) for rank in range(2)]
    assert compare(everyone) == ("", "")


def test_a_configuration_is_anything_that_json_knows() -> None:
    assert facts_of(1, 2, {"sizes": (1, 2)}).config == {"sizes": [1, 2]}
    with pytest.raises(TypeError, match="expected a config of what JSON knows"):
        facts_of(0, 1, {"model": object()})


def test_versions_are_those_of_what_is_loaded() -> None:
    assert {"Python", "torch", "scale_core"} <= versions().keys()
