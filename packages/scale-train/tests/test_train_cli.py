import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch

from scale_train import cli
from scale_train.cli import main, parse
from scale_train.configuration.resolve import MAX_RANKS_PER_CORE

SMALL = "--layers 1 --width 16 --heads 2 --sequence 16 --batch 4 --steps 3 --save-every 2 --evaluate-every 2"
ALONE = "--text text --parallel none --device cpu --sample-length 5 --log-every 1"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("text").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)
    Path("empty").write_bytes(b"")
    torch.save({"a": torch.ones(1)}, "weights.pt")


def lm(arguments: str) -> int:
    """Runs the command with these arguments, and with those of a small model that are not among them."""
    given, small = arguments.split(), SMALL.split()
    pairs = zip(small[::2], small[1::2], strict=True)
    return main(["lm", *(word for flag, value in pairs if flag not in given for word in (flag, value)), *given])


def the_only_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, (out, err)
    return err


TOO_MANY = (os.cpu_count() or 1) * MAX_RANKS_PER_CORE + 1


@pytest.mark.fault(91)
@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--text nowhere", "--text nowhere: no such file or folder"),
        ("--text empty", "expected text, but found 0 bytes"),
        ("--text text --sequence 2000", "too few tokens for --sequence 2000"),
        ("--text text --batch 7 --ranks 2", "--batch 7 does not divide into 2 ranks"),
        (f"--text text --batch {TOO_MANY} --device cpu --ranks {TOO_MANY}", "more ranks than this machine's devices"),
        ("--text text --size gpt3-175b --ranks 2 --layers 96 --width 122880 --heads 96", "and this machine has"),
        ("--text text --batch 10000000 --sequence 10000000 --ranks 2", "the input of one block of all local ranks is"),
        (f"--text {'x' * 300}", "cannot be read (File name too long)"),
        (f"--text text --parallel none --resume {'x' * 300}", "cannot be read (File name too long)"),
        ("--text text --dropout 2", "--dropout 2.0: a number from 0"),
        ("--text text --size huge", "--size huge: no such size"),
        ("--text text --parallel none --ranks 2", "--parallel none is one process"),
        ("--text text --parallel oss --batch 5 --ranks 2", "--batch 5 does not divide into 2 ranks"),
        ("--text text --parallel sharded-ddp --resume nowhere --ranks 1", "--resume nowhere: no such folder"),
        ("--text text --resume nowhere --parallel none", "--resume nowhere: no such folder"),
        (
            "--text text --resume weights.pt --parallel none",
            "snapshot convert weights.pt weights.pt-snapshot",
        ),
    ],
)
def test_wrong_input_is_one_clear_line_and_code_2(capsys, arguments, words):
    assert lm(arguments) == 2
    assert words in the_only_line(capsys)
    assert not Path("scale-runs").exists()


@pytest.mark.fault(91)
def test_an_unknown_option_is_code_2_and_help_is_code_0(capsys):
    assert main(["lm", "--stpes", "3"]) == 2
    assert main(["lm", "--parallel", "sharded"]) == 2
    assert main(["lm", "--help"]) == 0
    assert "--checkpoint-activations" in capsys.readouterr().out


def test_a_built_in_command_reads_no_entry_points(capsys, monkeypatch):
    monkeypatch.setattr(cli, "installed_commands", lambda: pytest.fail("entry points were read"))
    assert main(["lm", "--help"]) == 0
    assert "--steps" in capsys.readouterr().out


def test_options_have_the_names_of_the_manual():
    words = (
        "lm --text a b --ranks 2 --parallel ddp --precision bf16 --accumulate 2 --checkpoint-activations "
        "--reshard-after-forward false --clip 0.5 --size gpt3-125m --untied-embeddings --resume r --log-format json"
    )
    options = parse(shlex.split(words))
    assert options.data.text == (Path("a"), Path("b"))
    assert (options.parallel.ranks, options.parallel.parallel, options.parallel.precision) == (2, "ddp", "bf16")
    assert options.parallel.checkpoint_activations == "all" and not options.parallel.reshard_after_forward
    assert options.optimizer.clip == 0.5 and options.model.untied_embeddings and options.run.resume == Path("r")


def test_a_run_leaves_checkpoints_metrics_and_a_picture(capsys):
    assert lm(f"--out run --log-format json {ALONE}") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    end = events[-1]
    assert end["event"] == "end" and end["steps"] == 3 and end["held_out_bits_per_byte"] > 0
    assert end["held_memory_bytes"] == [end["ddp_memory_bytes"]]
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    assert Path("run/loss.png").stat().st_size > 1000


def test_a_finished_run_that_is_resumed_reports_its_memory(capsys):
    assert lm(f"--out run --log-format json {ALONE}") == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    before = Path("run/metrics.jsonl").read_text()
    assert lm(f"--resume run --log-format json {ALONE}") == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["held_memory_bytes"] == first["held_memory_bytes"] == [first["ddp_memory_bytes"]]
    assert Path("run/metrics.jsonl").read_text() == before


def test_a_prompt_of_any_bytes_is_continued(capsys):
    odd = os.fsdecode(b"\xff\xfe")
    assert lm(f"--out run --prompt {odd} --sync-each-micro-batch=false {ALONE}") == 0
    assert "warning: --sync-each-micro-batch has no effect with --parallel none\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag, told",
    [
        ("--heads 4", "a checkpoint of another model: heads is 2 there, 4 here"),
        ("--width 32", "embedding.weight is [256, 16] there, [256, 32] here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(capsys, flag, told):
    assert lm(f"--out run {ALONE}") == 0
    capsys.readouterr()
    assert lm(f"--resume run {flag} {ALONE}") == 2
    assert told in the_only_line(capsys)


def test_a_model_of_no_numbers_is_no_checkpoint(capsys):
    too_fast = "--lr 1e30 --clip 0 --warmup 0 --steps 9 --save-every 1"
    assert lm(f"--out run {too_fast} {ALONE.removesuffix('1')}100") == 1
    assert "which is not saved: take a smaller --lr" in capsys.readouterr().err
    assert os.listdir("run/checkpoints") == ["step-00000001"]


def test_a_second_run_never_writes_into_the_first_ones_folder(capsys):
    assert lm(f"--out run {ALONE}") == 0
    capsys.readouterr()
    assert lm(f"--out run {ALONE}") == 2
    assert "--out run: exists" in the_only_line(capsys)


def test_a_loss_that_is_no_number_ends_the_run_with_code_1(capsys):
    assert lm(f"--lr 1e30 --clip 0 --warmup 0 --steps 9 {ALONE}") == 1
    assert re.search(r"the loss is (nan|inf).* at step \d+, which is not saved", capsys.readouterr().err)
