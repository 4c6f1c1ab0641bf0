"""contract.py: ranks that differ are told so by name, in time, and ranks that agree are left alone."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group, group_of
from scale_core.consistency import flight_recorder as last_words
from scale_core.consistency.contract import Contract, _RecordedEvent
from scale_core.consistency.execution_order import Event, PassKind
from scale_core.errors import ContractError, ScaleDistributedError, StepError, TransferError
from scale_core.testing import RankError, run_ranks, scaled_by_load

FORWARD = PassKind("forward of ", True, True)
BACKWARD = PassKind("backward", True, True)
EVALUATION = PassKind("forward of ", False, False)
LIMIT = scaled_by_load(3.0)


def run_step(contract: Contract, units: str, *, backward: str | None = None) -> None:
    """A training step that runs `units`, one letter each, and sends no data."""
    contract.begin(FORWARD, new_step=True)
    for unit in units:
        contract.record(Event("forward", unit))
    contract.end_unchecked()
    contract.begin(BACKWARD, new_step=False)
    for unit in reversed(units) if backward is None else backward:
        contract.record(Event("backward", unit))
    contract.end_checked()


def evaluate(contract: Contract, units: str) -> None:
    contract.begin(EVALUATION, new_step=True)
    for unit in units:
        contract.record(Event("forward", unit))
    contract.end_checked()


def caught(call: Callable[[], object]) -> tuple[str, str, int, str]:
    """The class, message, step and unit of the error that every rank must get."""
    with pytest.raises(ScaleDistributedError) as error:
        call()
    return type(error.value).__name__, str(error.value), error.value.step, error.value.unit


def differ_in_order_at_step(step: int) -> tuple[str, str, int, str]:
    contract = Contract(group_of(), LIMIT)
    for _ in range(step - 1):
        run_step(contract, "abc")
    return caught(lambda: run_step(contract, "acb" if contract.group.rank == 1 else "abc"))


def one_does_something_else(what: str) -> tuple[str, str, int, str]:
    """The ranks meet at different kinds of places."""
    contract = Contract(group_of(), LIMIT)
    if contract.group.rank == 1:
        if what == "agree":
            return caught(lambda: contract.check_equal("another model", ["x"]))
        return caught(lambda: evaluate(contract, "a"))
    return caught(lambda: run_step(contract, "a"))


@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize("num_ranks, who", [(2, [1]), (3, [0, 2]), (2, [0, 1])])
def test_whoever_fails_tells_the_others_at_the_next_comparison(num_ranks: int, who: list[int]) -> None:
    """At each event of the first step in turn; all go on afterwards."""
    contract = Contract(group_of(), LIMIT)
    mine, told = contract.group.rank in who, []
    for place in range(7):
        contract.begin(FORWARD if place < 4 else BACKWARD, new_step=True)
        for unit in "abc"[: place % 4]:
            contract.record(Event("forward", unit))
        assert contract.checks_every_event
        if mine:
            told.append(contract.abort(f"reason of {contract.group.rank}"))
        else:
            with pytest.raises(StepError) as error:
                if place == 3:
                    contract.end_unchecked()
                elif place == 6:
                    contract.end_checked(1, 2, 3)
                else:
                    contract.record(Event("forward", "c"))
            assert error.value.step == contract.step
            told.append(str(error.value))
        assert not contract.is_broken
        contract.history.reset()
    for _ in range(2):
        run_step(contract, "abc")
    contract.begin(FORWARD, new_step=True)
    assert not contract.checks_every_event
    reasons = "; ".join(f"rank {rank}: reason of {rank}" for rank in who)
    assert len(told) == 7
    assert all("aborted on all ranks" in words and reasons in words for words in told), told


def one_raises() -> tuple[str, str, int, str] | None:
    contract = Contract(group_of(), LIMIT)
    run_step(contract, "ab")
    run_step(contract, "ab")
    if contract.group.rank == 1:
        contract.begin(FORWARD, new_step=True)
        contract.report_failure(ValueError("bad batch\nwith details"))
        time.sleep(LIMIT + 2)
        return None
    return caught(lambda: run_step(contract, "ab"))


def one_dies(folder: str) -> None:
    last_words._GRACE_SECONDS = 0.2
    contract = Contract(group_of(), LIMIT)
    rank = contract.group.rank
    run_step(contract, "ab")
    run_step(contract, "ab")
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    error = caught(lambda: run_step(contract, "ab"))
    (Path(folder) / f"{rank}").write_bytes(pickle.dumps(error))
    time.sleep(5)  # Stay, so that nobody else takes this rank's end for the first.


@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_different_models_are_told_apart_before_the_first_pass(num_ranks: int) -> None:
    contract = Contract(group_of(), LIMIT)
    contract.check_equal("the model", ["a (3, 4)", "b (5,)"])
    lines = ["a (3, 4)", "b (5,)"] if contract.group.rank != 1 else ["a (3, 4)", "b (6,)", "c ()"]
    line, shorter, other = [
        caught(lambda: contract.check_equal("the model", lines)),
        caught(lambda: contract.check_equal("the model", lines[:1] if contract.group.rank != 1 else [])),
        caught(lambda: contract.check_equal(f"the model of {contract.group.rank == 1}", lines)),
    ]
    others = "rank 0" if num_ranks == 2 else "ranks 0, 2"
    assert line[0] == "ContractError"
    assert line[1].startswith(
        f"the ranks differ in the model, first at place 2: {others}: b (5,); rank 1: b (6,). Build the same model"
    )
    assert f"first at place 1: {others}: a (3, 4); rank 1: nothing more. " in shorter[1]
    assert "rank 1: the check of the model of True" in other[1]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("step", [1, 2])
def test_another_order_is_seen_before_its_collective_at_first(step: int, num_ranks: int) -> None:
    others = "rank 0" if num_ranks == 2 else "ranks 0, 2, 3"
    for rank, (kind, message, where, unit) in enumerate(run_ranks(differ_in_order_at_step, num_ranks, step)):
        assert (kind, where, unit) == ("ContractError", step, "c" if rank == 1 else "b")
        assert message.startswith(f"step {step}: the ranks are about to run different things: {others}: ")
        assert f"{others}: forward of unit 'b'; rank 1: forward of unit 'c'" in message
        assert "fully_shard(" in message


def test_a_later_step_out_of_the_recorded_order_is_an_error() -> None:
    for _, message, where, _ in run_ranks(differ_in_order_at_step, 2, 4):
        assert where == 4
        assert "unit 'b'" in message and "unit 'c'" in message and "rank 0" in message and "rank 1" in message


@pytest.mark.ranks(3)
@pytest.mark.fault(22)
@pytest.mark.parametrize("step", [1, 2])
def test_a_rank_that_runs_fewer_units_is_named_at_once(step: int) -> None:
    contract = Contract(group_of(), LIMIT)
    for _ in range(step - 1):
        evaluate(contract, "abc")
    kind, message, where, _ = caught(lambda: evaluate(contract, "ab" if contract.group.rank == 1 else "abc"))
    assert (kind, where) == ("ContractError", step)
    assert "ranks 0, 2: forward of unit 'c'; rank 1: the end of the pass" in message


@pytest.mark.ranks(2)
def test_the_end_of_a_pass_compares_all_of_it() -> None:
    """What the end's fingerprint is for: the order is only compared there."""
    contract = Contract(group_of(), LIMIT)
    for _ in range(3):
        run_step(contract, "abc")
    units = "ab" if contract.group.rank == 1 else "abc"

    def unchecked() -> None:
        contract.begin(BACKWARD, new_step=True)
        for unit in units:
            contract.history.add(Event("backward", unit))
            contract._unchecked_events.append(_RecordedEvent(contract.step, Event("backward", unit)))
        contract.end_checked()

    kind, message, where, _ = caught(unchecked)
    assert (kind, where) == ("ContractError", 4)
    assert "first at place 3: rank 0: step 4: backward of unit 'c'; rank 1: nothing more" in message


@pytest.mark.parametrize("what", ["agree", "evaluate"])
def test_ranks_at_places_of_different_kinds_are_named(what: str) -> None:
    mine = (
        "the check of another model" if what == "agree" else "rank 0: step 1: the end of the pass; rank 1: nothing more"
    )
    for kind, message, _, _ in run_ranks(one_does_something_else, 2, what):
        assert kind == "ContractError"
        assert mine in message


@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_that_deviate_alike_raise_no_alarm(num_ranks: int) -> None:
    contract = Contract(group_of(), LIMIT)
    rows: list[list[int]] = []
    for step, units in enumerate(("abc", "abc", "ac", "abc", "b", "", "cba", "abcabc", "abc", "abc")):
        run_step(contract, units)
        evaluate(contract, units[step % 2 :])
        assert contract.step == 2 * step + 2
    contract.begin(BACKWARD, new_step=False)
    rows = contract.end_checked(7, contract.group.rank, -1)
    # Left in the middle on every rank, as after an exception that everybody catches.
    contract.begin(FORWARD, new_step=True)
    contract.record(Event("forward", "a"))
    contract.report_failure(ValueError("seen by all"))
    run_step(contract, "abc")
    assert rows == [[7, rank, -1] for rank in range(num_ranks)]


@pytest.mark.ranks(2)
def test_the_order_is_known_from_the_second_pass_on() -> None:
    expected = [(False, [""]), (True, ["ab"]), (False, ["ab"]), (True, ["ba"])]
    contract, seen = Contract(group_of(), LIMIT), []
    for units in ("ab", "ab", "ba", "ba"):
        contract.begin(EVALUATION, new_step=True)
        order = ["".join(event.unit for event in contract.history.order)]
        contract.record(Event("forward", units[0]))
        assert contract.history.position == 1
        seen.append((contract.history.matches_last_order, order))
        contract.record(Event("forward", units[1]))
        contract.end_checked()
    assert seen == expected


def test_the_others_learn_why_a_rank_does_not_come() -> None:
    message = (run_ranks(one_raises, 2)[0] or ("", "", 0, ""))[1]
    assert "rank 1: " in message and "step 3: raised ValueError: bad batch" in message
    assert "details" not in message


@pytest.mark.ranks(2)
def test_a_wait_in_vain_is_explained_and_ends_the_contract() -> None:
    """A transfer fails: each rank says what it did, through the store, and the contract is of no more use."""
    contract = Contract(group_of(), LIMIT)
    run_step(contract, "ab")

    def wait() -> None:
        contract.begin(FORWARD, new_step=True)
        contract.record(Event("forward", "a"))
        with contract.waiting(Event("gather", "a")):
            exchange([0] * (5 + contract.group.rank), contract.group, limit_seconds=1.0)

    first = caught(wait)[1]
    later = [
        caught(again)[1]
        for again in (
            lambda: contract.begin(FORWARD, new_step=True),
            lambda: contract.check_equal("the model", ["x"]),
            lambda: contract.end_checked(),
        )
    ]
    assert first.startswith("step 2: gather of unit 'a': exchange with rank ")
    assert "rank 0: " in first and "rank 1: " in first and "failed in" in first
    assert all("broken since an earlier error" in message for message in later)


def test_survivors_of_a_dead_rank_are_told_who_left_no_word(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 of 3 was killed by SIGKILL"):
        run_ranks(one_dies, 3, str(tmp_path))
    errors = {path.name: pickle.loads(path.read_bytes()) for path in tmp_path.iterdir()}
    assert sorted(errors) == ["0", "2"]
    for kind, message, where, _ in errors.values():
        assert (kind, where) == ("ScaleDistributedError", 3)
        assert "rank 1: no flight record" in message


@pytest.mark.ranks(2)
def test_common_calls_are_compared_where_transports_mix_them_up() -> None:
    """What a transport without tags would mix up; here its messages go over gloo like any others."""
    group = replace(group_of(), backend="nccl")
    Contract(group).sync_point(Event("full parameters", "a"))
    messages = []
    for other in (
        lambda contract: contract.sync_point(Event("full parameters", "b")),
        lambda contract: run_step(contract, "a"),
    ):
        contract = Contract(group)
        with pytest.raises(ContractError) as caught:
            contract.sync_point(Event("full parameters", "a")) if group.rank == 0 else other(contract)
        messages.append(str(caught.value))
    other_unit, other_thing = messages[0], messages[1]
    assert "rank 0: full parameters of unit 'a'; rank 1: full parameters of unit 'b'" in other_unit
    assert "rank 0: full parameters of unit 'a'; rank 1: forward of unit 'a'" in other_thing


def test_alone_there_is_nobody_to_disagree_with() -> None:
    contract = Contract(Group())
    assert contract.is_single_rank
    contract.check_equal("the model", ["a"])
    run_step(contract, "ab")
    run_step(contract, "ba")
    contract.begin(EVALUATION, new_step=True)
    assert contract.end_checked(4) == [[4]]
    contract.report_failure(ValueError("mine"))
    assert contract.step == 3


def test_a_transfer_that_fails_elsewhere_is_no_other_error() -> None:
    contract = Contract(Group())
    with pytest.raises(KeyError), contract.waiting(Event("gather", "a")):
        raise KeyError("not a transfer")
    with (
        pytest.raises(
            ScaleDistributedError, match="step 0: gather of the root unit: all_gather with rank 1 failed: gone"
        ),
        contract.waiting(Event("gather", "")),
    ):
        raise TransferError("all_gather", 1, "gone")


def test_an_error_can_be_sent_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(ContractError("message", step=3, unit="a")))
    assert (type(error), str(error), error.step, error.unit) == (ContractError, "message", 3, "a")


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_a_limit_without_time_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="expected limit_seconds above 0, or None"):
        Contract(group_of(None), limit)
