"""`--model`: models of transformers under each way to train, beside a plain loop; and folders for other programs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_trainings import changed, options_for, start
from tokenizers import Tokenizer, models
from torch.nn import functional
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from scale_core.comm.group import Group, group_of
from scale_core.testing import run_ranks
from scale_train import DataOptions, ModelOptions, Options, ParallelOptions, RunOptions
from scale_train.cli import main
from scale_train.configuration.checks import option_problems
from scale_train.data.text import Sampler, read_text, windows_at
from scale_train.data.tokenizer import open_tokenizer
from scale_train.errors import InputError
from scale_train.huggingface.model import TransformersSource, export_model
from scale_train.training.checkpoint import check_same_fields, load
from scale_train.training.state import LRSchedule
from scale_train.training.train import train_language_model
from scale_train.training.trainer import train_step

STEPS = 3
LLAMA = LlamaConfig(
    vocab_size=261, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture
def text(text: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(text.parent)
    torch.manual_seed(5)
    LlamaForCausalLM(LLAMA).save_pretrained("llama")
    Path("llama.json").write_text((Path("llama") / "config.json").read_text())
    return text


def model_options(text: Path, model: str, parallel: str, out: str = "", **more: Any) -> Options:
    folder = text.parent
    sizes = {"layers": None, "width": None, "heads": None, "sequence": 8, "batch": 4, "steps": STEPS, "warmup": 1}
    how = {"clip": 0.5, "optimizer_kernel": "plain", "seed": 1, "log_format": "plain", "sample_length": 3}
    where = {"model": folder / model, "out": folder / f"{out}-run", "export": folder / out if out else None}
    return options_for(text, parallel, **sizes, **how, **where, **more)


def plain_weights(options: Options, model: torch.nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in plain PyTorch, on one process."""
    content = read_text(options.data.text).train
    optimizer = AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1.0, betas=(0.9, 0.95), foreach=False,
    )  # fmt: skip
    sampler, losses = Sampler(len(content), 8, options.run.seed), []
    schedule = LRSchedule(options.optimizer.lr, 1, STEPS)
    for step in range(STEPS):
        tokens, targets = windows_at(content, sampler.starts(4), 8)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = schedule.at(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def test_a_folder_is_trained_as_by_a_plain_loop_and_exported(text, capsys):
    given = model_options(text, "llama", "none", "trained")
    _, expected = plain_weights(given, AutoModelForCausalLM.from_pretrained("llama", dtype=torch.float32).train())
    generation = json.loads((text.parent / "llama" / "generation_config.json").read_text())
    (text.parent / "llama" / "generation_config.json").write_text(json.dumps({**generation, "temperature": 0.25}))
    (text.parent / "llama" / "chat_template.jinja").write_text("{{ messages }}")
    summary = train_language_model(given, Group())
    found = AutoModelForCausalLM.from_pretrained(summary.export).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert main(["export", "trained-run", "again"]) == 0
    again = AutoModelForCausalLM.from_pretrained("again").state_dict()
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    for folder in (Path(summary.export), Path("again")):
        assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
        assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.25
        assert json.loads((folder / "config.json").read_text()).get("use_cache", True) is True
    shown = capsys.readouterr().out
    assert "2 layers x 16" in shown and "export         " in shown
    assert main(["export", "trained-run", "again"]) == 2
    assert "again" in capsys.readouterr().err


def trained_on_ranks(*asked: Options) -> list[tuple[list[float], dict[str, float]]]:
    found = []
    for options in asked:
        training = start(options)
        losses = []
        while not training.is_over:
            train_step(training)
            row = training.loss.clone()
            data = group_of(training.engine.dims, "loss")
            if data.size > 1:
                torch.distributed.all_reduce(row, group=data.process_group)
            losses.append(row.item() / data.size)
        found.append(losses)
    return found


@pytest.mark.soak
def test_two_ranks_train_a_model_of_transformers_as_a_plain_loop(text):
    from_folder, _ = plain_weights(model_options(text, "llama", "none"), AutoModelForCausalLM.from_pretrained("llama"))
    source = TransformersSource(text.parent / "llama.json", 1)
    drawn = source.build_on_meta()
    source.fill(drawn, torch.device("cpu"))
    from_config, _ = plain_weights(model_options(text, "llama.json", "none"), drawn)
    assert from_config != from_folder
    ways = ({"parallel": "fsdp"}, {"parallel": "oss"}, {"parallel": "sharded-ddp"}, {"parallel": "ddp"})
    more = ({"parallel": "none", "tensor_parallel": 2}, {"parallel": "fsdp", "checkpoint_activations": "all"})
    asked = [model_options(text, name, **way) for name in ("llama", "llama.json") for way in (*ways, *more)]
    for rank in run_ranks(trained_on_ranks, 2, *asked):
        for options, losses in zip(asked, rank, strict=True):
            expected = from_folder if options.model.model.name == "llama" else from_config
            assert losses == pytest.approx(expected, rel=1e-5), options.parallel


def export_of_shards(options: Options) -> str:
    return train_language_model(options, group_of()).export


def test_shards_are_exported_to_the_bit_and_judged_alike(text, capsys):
    given = model_options(text, "llama", "fsdp", "sharded")
    (folder, _) = run_ranks(export_of_shards, 2, given)
    model = AutoModelForCausalLM.from_pretrained(folder)
    training = start(changed(given, parallel="none"))
    load(training, text.parent / "sharded-run" / "checkpoints" / f"step-{STEPS:08}")
    saved = dict(training.engine.raw_model.named_parameters())
    assert all(torch.equal(param, saved[name]) for name, param in model.named_parameters())
    capsys.readouterr()
    judged = []
    for path in (folder, "sharded-run"):
        assert main(["ppl", str(path), "--text", str(text), "--sequence", "8", "--tokenizer", "byte", "--json"]) == 0
        judged.append(json.loads(capsys.readouterr().out))
    content = read_text([text])
    tokens = torch.cat([content.train, content.held_out]).long()
    starts = torch.arange((len(tokens) - 1) // 8) * 8
    windows = tokens[starts.unsqueeze(1) + torch.arange(9)]
    with torch.no_grad():
        logits = model(input_ids=windows[:, :-1]).logits.flatten(0, 1)
    nats = functional.cross_entropy(logits, windows[:, 1:].flatten()).item()
    for each in judged:
        assert each["loss"] == pytest.approx(nats, rel=1e-5)
        assert each["bits_per_byte"] == pytest.approx(nats / 0.6931471805599453, rel=1e-5)
        assert each["perplexity"] == pytest.approx(2.718281828459045**nats, rel=1e-4)


def test_what_does_not_go_with_transformers_is_refused(text):
    options = Options(
        DataOptions(sequence=64),
        ModelOptions(size="small", dropout=0.1, model=Path("llama")),
        ParallelOptions(parallel="pipe", context_parallel=2),
    )
    assert [problem.partition(":")[0].partition(" is for")[0] for problem in option_problems(options)] == [
        "--size", "--dropout", "--sequence 64", "--parallel pipe", "--context-parallel 2",
    ]  # fmt: skip
    Path("small.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 100}))
    assert (
        "vocabulary has 100 tokens, and the tokenizer has 256"
        in option_problems(Options(model=ModelOptions(model=Path("small.json"))))[0]
    )
    Path("odd.json").write_text(json.dumps({"model_type": "llama", "vocab_size": "many"}))
    for name, told in (
        ("odd.json", "llama: Validation error for field 'vocab_size': TypeError: Field 'vocab_size' expected int, got"),
        ("kind.json", "cannot build a causal language model of nope: Unrecognized model identifier: nope"),
    ):
        Path("kind.json").write_text(json.dumps({"model_type": "nope"}))
        with pytest.raises(InputError, match=re.escape(told)) as refused:
            TransformersSource(Path(name), 0).build_on_meta()
        assert str(refused.value).count("\n") == 0 and len(str(refused.value)) < 200
    for name, told in (("nowhere", "cannot be read"), ("text", "no config of transformers")):
        (problem,) = option_problems(Options(model=ModelOptions(model=Path(name))))
        assert told in problem
    (problem,) = option_problems(Options(run=RunOptions(export=Path("e"))))
    assert problem.startswith("--export: the GPT of --size")
    Path("full").mkdir()
    Path("full/file").write_text("")
    with pytest.raises(InputError, match="--export full: exists"):
        train_language_model(changed(model_options(text, "llama", "none"), export=Path("full"), out=None), Group())


def test_a_tokenizer_of_any_name_is_exported(text):
    vocabulary = {f"<{index}>": index for index in range(4)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")).save("own.json")
    model = LlamaForCausalLM(LLAMA)
    export_model(model, Path("exported"), open_tokenizer("own.json"), Path("llama.json"), Group())
    assert (Path("exported") / "tokenizer.json").read_bytes() == Path("own.json").read_bytes()
    assert not (Path("exported") / "own.json").exists()


def test_fields_of_another_transformers_are_no_other_model():
    own = {"model_type": "llama", "rope_theta": 1.0, "new": 1}
    check_same_fields({"model_type": "llama", "rope_theta": 1.0, "old": 2}, own, Path("p"))
    with pytest.raises(InputError, match=r"rope_theta is 2\.0 there, 1\.0 here"):
        check_same_fields({"model_type": "llama", "rope_theta": 2.0}, own, Path("p"))
    with pytest.raises(InputError, match="layers is 2 there, None here"):
        check_same_fields({"layers": 2}, own, Path("p"))


def test_a_window_is_no_longer_than_the_positions_of_the_model(text, capsys):
    assert main(["ppl", "llama", "--text", str(text), "--sequence", "33", "--device", "cpu"]) == 2
    assert "--sequence 33: llama has 32 positions; take at most 32" in capsys.readouterr().err


def test_a_checkpoint_of_another_config_is_refused(text, capsys):
    train_language_model(model_options(text, "llama", "none", "trained"), Group())
    other = json.loads(Path("llama.json").read_text())
    Path("other.json").write_text(json.dumps({**other, "rms_norm_eps": 0.5}))
    given = model_options(text, "other.json", "none")
    with pytest.raises(InputError, match=r"another model: rms_norm_eps is 1e-06 there, 0\.5 here"):
        train_language_model(changed(given, resume=text.parent / "trained-run", out=None), Group())


def test_gpt2_trains_from_its_config(text):
    GPT2Config(vocab_size=256, n_positions=8, n_embd=16, n_layer=2, n_head=2).save_pretrained("gpt2")
    training = start(model_options(text, "gpt2", "none"))
    assert isinstance(training.engine.raw_model, GPT2LMHeadModel)
    first = [param.clone() for param in training.engine.params()]
    train_step(training)
    assert all(not torch.equal(*pair) for pair in zip(first, training.engine.params(), strict=True))
