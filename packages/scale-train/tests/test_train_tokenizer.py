"""Tokenizers of the library tokenizers, JSON-lines files, and tokens that are kept on disk."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional

import scale_snapshot
from scale_core.comm.group import Group
from scale_train import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions, RunOptions
from scale_train.cli import main
from scale_train.configuration.checks import option_problems
from scale_train.configuration.derived import gpt_config
from scale_train.data.text import check_length, read_data, read_text, windows_at
from scale_train.data.tokenizer import FileTokenizer, open_tokenizer
from scale_train.errors import InputError
from scale_train.model.gpt import GPT
from scale_train.trained_model.loading import TrainedModel
from scale_train.training.train import train_language_model
from scale_train.training.trainer import held_out_starts

LINES = [f"the quick brown fox {number} jumps over the lazy dog\n" for number in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A folder as that of a model, with a small byte-pair encoding."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet)
    made.train_from_iterator(LINES, trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return folder


@pytest.fixture
def options(tokenizer, tmp_path, monkeypatch) -> Options:
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text("".join(json.dumps({"id": i, "body": line}) + "\n\n" for i, line in enumerate(LINES)))
    data = DataOptions((Path("text.jsonl"),), "body", str(tokenizer), Path("cache"), sequence=8, batch=4)
    return Options(data=data, parallel=ParallelOptions(parallel="none", device="cpu"))


def test_tokens_are_those_of_the_library_with_separators(options, tokenizer):
    text, library = read_data(options), Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = library.token_to_id("<end>")
    held = [token for line in LINES[19::20] for token in (end, *library.encode(line).ids)]
    assert text.held_out.tolist() == held and text.tokenizer.decode(held[1:-1]).startswith(LINES[19].rstrip())
    assert text.num_documents == 60 and text.tokens_per_byte == len(held) / sum(len(line) + 1 for line in LINES[19::20])
    assert "every 20th document, 3 documents" in text.describe() and " tokens)" in text.describe()
    assert gpt_config(options).vocabulary == 300 == library.get_vocab_size()


def test_tokens_are_read_from_the_disk_the_next_time(options, monkeypatch):
    first = read_data(options)
    assert [path.name for path in Path("cache").glob("*/*")].count("train") == 1
    with monkeypatch.context() as patch:
        patch.setattr(FileTokenizer, "encode", lambda *_: pytest.fail("tokenized again"))
        again = read_data(options)
    assert again.fingerprint() == first.fingerprint() and again.tokens_per_byte == first.tokens_per_byte
    Path("no-folder").write_text("")
    lost = read_text([Path("text.jsonl")], first.tokenizer, text_field="body", cache=Path("no-folder"))
    assert lost.fingerprint() == first.fingerprint()


def test_a_long_text_is_encoded_in_pieces_that_end_with_a_line(tokenizer, monkeypatch):
    opened = open_tokenizer(str(tokenizer))
    monkeypatch.setattr("scale_train.data.tokenizer._PIECE_CHARACTERS", 200)
    (tokens,) = opened.encode(["".join(LINES).encode()])
    assert opened.decode(tokens) == "".join(LINES)
    assert tokens == [
        token for (line,) in zip(LINES, strict=True) for token in next(iter(opened.encode([line.encode()])))
    ]


def test_bits_per_byte_are_those_of_plain_pytorch(options, capsys):
    options = Options(
        options.data, ModelOptions(layers=1, width=16, heads=2), options.parallel, OptimizerOptions(steps=2),
        RunOptions(out=Path("run"), sample_length=4, prompt="the quick"),
    )  # fmt: skip
    summary = train_language_model(options, Group())
    weights, text = GPT(gpt_config(options)), read_data(options)
    scale_snapshot.load(Path("run/checkpoints"), {"model": weights}, only_given=True)
    starts = held_out_starts(len(text.held_out), 8, 0)
    tokens, targets = windows_at(text.held_out, starts, 8)
    nats = functional.cross_entropy(weights(tokens).flatten(0, 1), targets.flatten()).item()
    assert summary.held_out_bits_per_byte == pytest.approx(nats / math.log(2) * text.tokens_per_byte, rel=1e-6)
    assert summary.sample.startswith("the quick") and torch.isfinite(weights(tokens)).all()


def test_a_trained_model_is_judged_by_its_own_tokenizer(options, tokenizer, monkeypatch, capsys):
    shutil.copytree(tokenizer, "mine")
    options = Options(
        replace(options.data, tokenizer="mine"), ModelOptions(layers=1, width=16, heads=2), options.parallel,
        OptimizerOptions(steps=2), RunOptions(out=Path("run"), sample_length=0),
    )  # fmt: skip
    train_language_model(options, Group())
    home = Path.cwd()
    weights = GPT(gpt_config(options))
    scale_snapshot.load(Path("run/checkpoints"), {"model": weights}, only_given=True)
    content = read_text([Path("text.jsonl")], open_tokenizer("mine"), text_field="body", held_out_every=1)
    (home / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    words = ["ppl", str(home / "run"), "--text", str(home / "text.jsonl"), "--text-field", "body", "--device", "cpu"]
    capsys.readouterr()
    for _ in range(2):  # the second time with the tokens of the disk
        assert main([*words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        starts = torch.arange((len(content.held_out) - 1) // 8) * 8
        tokens, targets = windows_at(content.held_out, starts, 8)
        nats = functional.cross_entropy(weights(tokens).flatten(0, 1), targets.flatten()).item()
        assert found["loss"] == pytest.approx(nats, rel=1e-5)
    shutil.copy(home / "mine" / "tokenizer.json", "moved.json")
    assert main([*words, "--tokenizer", "moved.json"]) == 0
    Path("changed.json").write_bytes(Path("moved.json").read_bytes() + b"\n")
    for asked in ("changed.json", "byte"):
        assert main([*words, "--tokenizer", asked]) == 2
        assert f"--tokenizer {asked}: " in (told := capsys.readouterr().err) and "trained with another one" in told
    open_tokenizer.cache_clear()
    shutil.rmtree(home / "mine")
    assert main(words) == 2
    assert "name the tokenizer of" in capsys.readouterr().err


def test_tokens_that_a_model_does_not_know_are_refused(tokenizer):
    trained = TrainedModel(torch.nn.Identity(), "byte", None, 8, 299, None, None, "a model")
    with pytest.raises(InputError, match="it has 300 tokens, and a model knows 299"):
        trained.open_tokenizer(str(tokenizer))
    assert trained.open_tokenizer(None).vocabulary == 256


def test_what_is_no_tokenizer_and_no_json_is_named(options, monkeypatch):
    Path("bad.json").write_text("{}")
    for name, words in (
        (".", "cannot be read: there is no tokenizer.json in it"),
        ("nowhere.json", "cannot be read"),
        ("bad.json", "no tokenizer.json of the library"),
    ):
        (problem,) = option_problems(Options(DataOptions(tokenizer=name)))
        assert problem.startswith(f"--tokenizer {name}: ") and words in problem
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (problem,) = option_problems(Options(DataOptions(tokenizer="other.json")))
    assert problem.endswith("not installed: pip install 'scale-train[tokenizers]'")
    with pytest.raises(InputError, match=r"line 1 has no text in 'text', but id, body; name the field"):
        read_text([Path("text.jsonl")])
    Path("text.jsonl").write_text('{"text": "a"}\n{"text"\n')
    with pytest.raises(InputError, match=r"--text text.jsonl: line 2 is not JSON"):
        read_text([Path("text.jsonl")])
    Path("text.jsonl").write_text('{"text": "a"}\n{"text": "b"}')
    assert bytes(read_text([Path("text.jsonl")]).train.tolist()) == b"\0a\0b"


def test_too_few_tokens_are_told(options):
    with pytest.raises(InputError, match="too few tokens for --sequence 10000"):
        check_length(read_data(options), 10_000)
