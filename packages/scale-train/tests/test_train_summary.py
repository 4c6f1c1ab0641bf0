from dataclasses import asdict

from scale_train.tokenizer import ByteTokenizer
from scale_train.training.train import RunSummary


def report(**changes) -> RunSummary:
    facts = {
        "steps": 400,
        "held_out_bits_per_byte": 2.34567,
        "parallel": "fsdp",
        "held_memory_bytes": (6_600_000, 6_500_000),
        "ddp_memory_bytes": 13_200_000,
        "peak_memory_bytes": (400_000_000, 410_000_000),
        "device": "cpu",
        "sample": "def f():\n    pass",
        "checkpoint": "run/checkpoints/step-00000400",
        "plot": "run/loss.png",
    }
    return RunSummary(**{**facts, **changes})


def test_the_report_shows_loss_memory_and_a_sample():
    shown = "\n".join(report().lines())
    for words in (
        "2.346 bits per byte",
        "6.6 MB",
        "6.5 MB",
        "13.2 MB",
        "410 MB",
        "| def f():",
        "step-00000400",
        "loss.png",
    ):
        assert words in shown


def test_without_a_sample_nothing_is_said_of_one():
    assert not any("sample" in line for line in report(sample="").lines())


def test_machines_get_the_same_facts():
    assert asdict(report())["held_memory_bytes"] == (6_600_000, 6_500_000)


def test_generated_bytes_never_move_the_terminal():
    assert ByteTokenizer().decode(b"\0a\n\tb\x1b[2Jc\xff\r") == "a\n\tb\ufffd[2Jc\ufffd\ufffd"
