import re
from pathlib import Path

import pytest

from scale_tools.why.reading import read_texts
from scale_tools.why.verdict import verdict

RECORDED = Path(__file__).parent / "recorded_logs"
"""What three ranks left behind under torchrun --log-dir --redirects 3 and SCALE_FLIGHT_RECORDS, in real runs; paths,
hosts and the lines of code in tracebacks were taken out."""


def texts_of(case: str, keep: str = "") -> dict[str, str]:
    return {name: text for name, text in read_texts([RECORDED / case]).items() if re.search(keep, name)}


@pytest.mark.parametrize(
    "case, rank, step, sentence",
    [
        ("raise", 1, 4, "rank 1 raised ValueError: no such token: 70000 in step 4"),
        (
            "late",
            1,
            0,
            "rank 1 raised MemoryError: out of memory: 3 GB for layers.1; ranks 0, 2 waited for it in the gather of "
            "unit 'layers.0' in step 4",
        ),
        (
            "kill",
            1,
            4,
            "rank 1 was killed by SIGKILL; ranks 0, 2 waited for it in the gather of unit 'layers.2' in step 4",
        ),
        (
            "exit",
            1,
            4,
            "rank 1 exited with code 3; ranks 0, 2 waited for it in the gather of unit 'layers.0' in step 4",
        ),
        (
            "freeze",
            1,
            4,
            "rank 1 never entered the gather of unit 'layers.0' in step 4, where ranks 0, 2 waited for it",
        ),
        (
            "order",
            1,
            4,
            "ranks 0, 2 waited for rank 1 in the gather of unit 'layers.2' in step 4, while rank 1 waited for rank 2 "
            "in the forward of unit 'layers.2': they ran different things",
        ),
        ("desync", None, 0, "the ranks differ in the settings, first at place 1: ranks 0, 1: lr 0.0; rank 2: lr 0.1"),
    ],
)
def test_recorded_runs_are_explained(case, rank, step, sentence):
    found = verdict(texts_of(case))
    assert (found.rank, found.step, found.sentence) == (rank, step, sentence)


@pytest.mark.parametrize("keep", ["records", r"attempt_0/0/"])
def test_a_rank_that_froze_is_named_by_either_source(keep):
    found = verdict(texts_of("freeze", keep))
    assert found.sentence.startswith("rank 1 never entered the gather of unit 'layers.0' in step 4")


LOGS = {
    "the launcher's line": (
        "out",
        "rank 2 was killed by SIGKILL; the others are ended\n",
        "rank 2 was killed by SIGKILL",
    ),
    "tagged lines of several ranks": (
        "all.log",
        "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: [gloo] Connection closed by peer\n"
        "[rank1]: Traceback (most recent call last):\n[rank1]: KeyError: 'weight'\n",
        "rank 1 raised KeyError: 'weight'",
    ),
    "an error with a cause": (
        "rank1.log",
        "Traceback (most recent call last):\n  File\nOSError: [Errno 28] No space left on device\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n  File\nscale_snapshot.SnapshotError: saving step-00000005 failed\n",
        "rank 1 raised SnapshotError: saving step-00000005 failed",
    ),
    "a rank lost in a save": (
        "rank0.log",
        "scale_core.ScaleDistributedError: saving runs/step-00000005 failed: exchange with rank 1 failed: it has "
        "closed the connection, as a process does that ends or times out\nWhat each rank did last:\n"
        "  rank 0: failed in saving runs/step-00000005 (exchange with rank 1 failed: it has closed the connection)\n"
        "  rank 1: no flight record: it has exited\n",
        "rank 1 ended without an error before saving runs/step-00000005, where rank 0 waited for it",
    ),
    "the training program's line": (
        "out",
        "scale-train, rank 0: lost the other ranks after step 12 (step 13: gather of unit 'blocks.0': all_gather with "
        "rank 1 failed: no answer within 300 s); go on with --resume scale-runs/lm-1\n",
        "rank 1 never entered the gather of unit 'blocks.0' in step 13, where rank 0 waited for it",
    ),
}


@pytest.mark.parametrize("name, text, sentence", LOGS.values(), ids=LOGS)
def test_one_log_may_be_enough(name, text, sentence):
    assert verdict({name: text}).sentence == sentence


def test_what_each_rank_did_last_comes_with_it():
    assert verdict(texts_of("kill")).details[0].startswith("rank 0: step 4: the end of the pass; then ")


def test_logs_that_say_nothing_have_no_verdict():
    assert verdict({"a.log": "loss 3.2\nloss 3.1\n"}).kind == "unknown"
    assert verdict({}).sentence == ""


@pytest.mark.parametrize(
    "text",
    [
        '{"format": "scale-flight-record", "rank": "one", "events": []}',
        '{"format": "scale-flight-record", "rank": 1, "events": 5}',
        '{"format": "scale-flight-record", "rank": 1, "events": [], "time": null}',
        '{"message": {"message": 5, "extraInfo": 3}}',
        "[1]",
        "[" * 100_000,
    ],
)
def test_a_json_file_of_another_kind_says_nothing(text):
    assert verdict({"rank1.json": text}).kind == "unknown"
