import pickle

import pytest

from scale_core import errors
from scale_core.errors import ContractError, ScaleDistributedError, StepError, TransferError


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("Connection closed by peer [127.0.0.1]:1", "it has closed the connection, as a process does that ends"),
        ("Read error [127.0.0.1]:1: Connection reset by peer", "it has closed the connection"),
        ("Timed out waiting 6000ms for recv operation to complete", "no answer within 6 s"),
        ("Operation timed out!", "no answer within the limit"),
        ("Application timeout caused pair closure", "an earlier wait in this process group timed out"),
    ],
)
def test_what_a_transport_says_is_told_in_words_with_what_to_do(
    transport: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_last_snapshot", "runs/1/step-00000012")
    error = TransferError("all_gather", 1, transport, rank=0)
    assert str(error).startswith(f"all_gather with rank 1 failed: {said}")
    assert str(error).endswith("start from the last checkpoint, runs/1/step-00000012")
    assert (error.rank, error.peer, error.op, error.last_snapshot) == (0, 1, "all_gather", "runs/1/step-00000012")
    assert transport not in str(error) and str(error).startswith(error.fact)


def test_only_a_rank_that_has_closed_the_connection_is_gone() -> None:
    assert TransferError("exchange", 2, "Connection closed by peer").gone == 2
    assert TransferError("exchange", 2, "Timed out waiting 10ms").gone is None
    assert "with the group failed: a rank has closed" in str(TransferError("exchange", None, "closed by peer"))


def test_a_reason_of_our_own_stands_as_it_is() -> None:
    error = TransferError("all_gather", None, "it was canceled, or has failed before")
    assert str(error) == "all_gather with the group failed: it was canceled, or has failed before"


def test_errors_travel_between_processes_with_all_that_they_say() -> None:
    error = StepError("given up", step=3, unit="layers.1", rank=1, peer=2, op="a step")
    error.add_note("a note")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is StepError and str(found) == "given up" and found.__notes__ == ["a note"]
    assert (found.step, found.unit, found.rank, found.peer, found.op) == (3, "layers.1", 1, 2, "a step")


def test_one_branch_covers_all_that_happens_between_ranks() -> None:
    assert all(issubclass(kind, ScaleDistributedError) for kind in (ContractError, StepError, TransferError))
