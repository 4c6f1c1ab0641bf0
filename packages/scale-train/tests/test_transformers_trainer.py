"""transformers' Trainer over sharded models trains, saves and resumes as the plain one does on one process."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from scale_core.testing import ranks as testing
from scale_core.testing import run_ranks
from scale_train.huggingface import trainer as sharded_trainer
from scale_train.huggingface.trainer import ScaleTrainer, ScaleTrainerMixin

testing._PRELOADED += ["transformers.models.llama.modeling_llama", "transformers.trainer", "accelerate"]

VOCABULARY, LENGTH, GLOBAL_BATCH, STEPS = 37, 6, 8, 4
TOLERANCE = 1e-6  # gradients of ranks are summed in another order than samples of one batch


def build() -> PreTrainedModel:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def samples(seed: int, count: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def set_environment() -> int:
    """Sets the variables that torchrun sets; returns the number of ranks."""
    num_ranks = torch.distributed.get_world_size()
    os.environ.update(
        {"RANK": str(torch.distributed.get_rank()), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
        | {"LOCAL_RANK": str(torch.distributed.get_rank()), "MASTER_PORT": "29500"}
    )
    return num_ranks


def train(folder: str, sharding: str | None, resume: str | None = None, **more: Any) -> dict[str, Any]:
    """Losses by step, norms of gradients, evaluations and weights of a run; `sharding` None is the plain Trainer."""
    num_ranks = set_environment()
    accumulation = more.get("gradient_accumulation_steps", 1)
    options = {
        "per_device_train_batch_size": GLOBAL_BATCH // num_ranks // accumulation,
        "per_device_eval_batch_size": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # Otherwise a step is the sign of a gradient that is nothing but rounding.
        "max_grad_norm": 0.5,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        **more,
    }
    cls: Any
    cls, sharded = (Trainer, {}) if sharding is None else (ScaleTrainer, {"sharding": sharding})
    args = TrainingArguments(folder, **options)
    trainer = cls(build(), args, train_dataset=samples(1, 40), eval_dataset=samples(2, 16), **sharded)
    if sharding == "oss":
        trainer.evaluate()  # accelerate, left to itself, would then train without DistributedDataParallel
        trainer.state.log_history.clear()
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    found = {key: [line[key] for line in history if key in line] for key in ("loss", "grad_norm", "eval_loss")}
    trainer.save_model(folder)
    torch.distributed.barrier()
    weights = LlamaForCausalLM.from_pretrained(folder).state_dict()
    return {**found, "flos": trainer.state.total_flos, "weights": {k: v.tolist() for k, v in weights.items()}}


def assert_equal(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    for key, values in expected.items():
        if key == "weights":
            for name, weight in values.items():
                got = torch.tensor(found[key][name])
                torch.testing.assert_close(got, torch.tensor(weight), rtol=0, atol=tolerance, msg=name)
        else:
            assert found[key] == pytest.approx(values, abs=tolerance), key


SHARDINGS = ["fsdp", "sharded_ddp", "oss"]
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "label_smoothing_factor": 0.1,  # Its loss goes by the class of the model, which a wrapper hides.
    "lr_scheduler_type": "cosine",
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # so that it is the earlier one, which has to be loaded indeed
}
BF16 = {"bf16": True, "activation_checkpointing": True}
Runs = dict[str, Any]


def play(folder: str, shardings: list[str | None], resume: str | None = None, **more: Any) -> Runs:
    """Runs by their sharding; ranks start once for all, since importing takes seconds."""
    return {
        str(sharding): train(
            f"{folder}/{sharding}", sharding, resume and f"{folder}/{sharding}/{resume}", **{**SETTINGS, **more}
        )
        for sharding in shardings
    }


def play_plain_and_resume(folder: str) -> tuple[Runs, Runs]:
    (plain,) = play(folder, [None]).values()
    return plain, play(folder, ["fsdp", "oss"], "checkpoint-2")


def play_and_resume(folder: str) -> tuple[Runs, Runs]:
    whole = play(folder, [*SHARDINGS])
    return whole, play(folder, [*SHARDINGS], "checkpoint-2")


def play_in_bf16(folder: str, shardings: list[str | None]) -> Runs:
    return play(folder, shardings, **BF16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def of_two_ranks(folder: str) -> list[tuple[Runs, Runs]]:
    return run_ranks(play_and_resume, 2, folder)


@pytest.fixture(scope="module")
def of_one(folder: str, of_two_ranks: list[tuple[Runs, Runs]]) -> tuple[Runs, Runs]:
    return run_ranks(play_plain_and_resume, 1, folder)[0]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_it_trains_as_the_plain_trainer_on_one_process(
    sharding: str, of_two_ranks: list[tuple[Runs, Runs]], of_one: tuple[Runs, Runs]
) -> None:
    """Accumulates, clips, evaluates, loads the best model, and saves weights that `from_pretrained` reads."""
    for whole, _ in of_two_ranks:
        assert_equal(whole[sharding], of_one[0])


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_it_resumes_to_the_bit(sharding: str, of_two_ranks: list[tuple[Runs, Runs]]) -> None:
    for whole, resumed in of_two_ranks:
        assert_equal(resumed[sharding], whole[sharding], tolerance=0.0)


def test_what_two_ranks_saved_one_resumes(of_one: tuple[Runs, Runs]) -> None:
    plain, resumed = of_one
    for sharding in ("fsdp", "oss"):
        assert_equal(resumed[sharding], plain)


@pytest.mark.soak
def test_what_two_ranks_saved_four_resume(folder: str, of_one: tuple[Runs, Runs]) -> None:
    for runs in run_ranks(play, 4, folder, ["fsdp", "sharded_ddp"], "checkpoint-2"):
        for found in runs.values():
            assert_equal(found, of_one[0])


@pytest.mark.soak
def test_autocast_and_recomputation_are_the_plain_trainers(tmp_path: Path) -> None:
    """In bf16, gradients of other batches are rounded at other places: to 8 bits, as is the loss."""
    (expected,) = run_ranks(play_in_bf16, 1, str(tmp_path), [None])
    for runs in run_ranks(play_in_bf16, 2, str(tmp_path), [*SHARDINGS]):
        for found in runs.values():
            assert_equal(found, expected["None"], tolerance=2e-2)


def trainer_of(folder: str, sharding: str | None, model: Any = None, **more: Any) -> Any:
    options = {"max_steps": STEPS, "optim": "adamw_torch", "learning_rate": 1e-2, "adam_epsilon": 1e-3, **more}
    quiet = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    size = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "use_cpu": True, "ddp_backend": "gloo"}
    callbacks, count = options.pop("callbacks", None), options.pop("count", 40)
    args = TrainingArguments(folder, **{**quiet, **size, **options})
    cls: Any = Trainer if sharding is None else partial(ScaleTrainer, sharding=sharding)
    data = {"train_dataset": samples(1, count), "eval_dataset": samples(2, 7), "callbacks": callbacks}
    return cls(model or build(), args, **data)


def history_of(trainer: Any) -> list[list[float]]:
    keys = ("loss", "grad_norm", "eval_loss", "learning_rate")
    return [[line[key] for key in keys if key in line] for line in trainer.state.log_history]


def after(**options: Any) -> Callable[[str, str | None], Any]:
    def run(folder: str, sharding: str | None) -> Any:
        trainer = trainer_of(folder, sharding, **{k: v() if k == "callbacks" else v for k, v in options.items()})
        trainer.train()
        return history_of(trainer), trainer._train_batch_size, trainer.state.global_step

    return run


class OutOfMemoryOnce(TrainerCallback):
    """As the first batch size would be on every rank."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.train_batch_size == 2:
            raise RuntimeError("CUDA out of memory.")


def train_adapters(folder: str, sharding: str | None) -> Any:
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        model: Any = build()
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    kept = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    trainer = trainer_of(folder, sharding, adapted(), **kept, **best)
    trainer.train()
    trainer.save_model(f"{folder}/adapter")
    torch.distributed.barrier()
    saved = load_file(f"{folder}/adapter/adapter_model.safetensors")
    resumed = trainer_of(folder, sharding, adapted())
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return history_of(trainer), history_of(resumed), [[name, saved[name].tolist()] for name in sorted(saved)]


def train_compiled_blocks_twice(folder: str, sharding: str | None) -> Any:
    model: Any = build()
    for block in model.model.layers:
        block.compile(backend="eager")
    trainer = trainer_of(folder, sharding, model)
    trainer.train()
    before = history_of(trainer)
    trainer.train()
    return before, history_of(trainer)


def only_predict(folder: str, sharding: str | None) -> Any:
    trainer = trainer_of(folder, sharding)
    predicted = trainer.predict(samples(3, 7))
    return [predicted.metrics["test_loss"], trainer.evaluate()["eval_loss"], predicted.predictions.tolist()]


STOPS: dict[str, Any] = {
    "max_steps": 20,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}
EPOCHS: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "count": 27}
FEATURES: dict[str, Callable[[str, str | None], Any]] = {
    "an uneven last batch": after(**EPOCHS, gradient_accumulation_steps=2),
    "without the last batch": after(**EPOCHS, dataloader_drop_last=True, eval_strategy="epoch"),
    "by length": after(train_sampling_strategy="group_by_length"),
    "stopped early": after(**STOPS, callbacks=lambda: [EarlyStoppingCallback(1, 1e3)]),
    "a batch size that fits": after(auto_find_batch_size=True, callbacks=lambda: [OutOfMemoryOnce()]),
    "Adagrad, which has a state before it steps": after(optim="adagrad"),
    "adapters": train_adapters,
    "compiled blocks, trained twice": train_compiled_blocks_twice,
    "predictions alone": only_predict,
}


def numbers_in(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in numbers_in(each)]
    return [value]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of transformers, about its own options
@pytest.mark.ranks(2, limit_seconds=600)
def test_features_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    folder = str(tmp_path)
    set_environment()
    found = {
        name: {str(sharding): run(f"{folder}/{name}/{sharding}", sharding) for sharding in [None, *SHARDINGS]}
        for name, run in FEATURES.items()
    }
    for name, by_sharding in found.items():
        expected = numbers_in(by_sharding.pop("None"))
        for sharding, its in by_sharding.items():
            for got, wanted in zip(numbers_in(its), expected, strict=True):
                is_number = isinstance(wanted, float)
                assert got == (pytest.approx(wanted, rel=1e-5, abs=2e-6) if is_number else wanted), (name, sharding)


def train_sft(folder: str, shards: bool) -> dict[str, Any]:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class ShardedSFTTrainer(ScaleTrainerMixin, SFTTrainer):
        pass

    num_ranks = set_environment()
    words = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2", unk_token="0")
    data = Dataset.from_dict({"input_ids": [sample["input_ids"].tolist() for sample in samples(1, 40)]})
    args = SFTConfig(
        folder,
        per_device_train_batch_size=GLOBAL_BATCH // num_ranks,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    cls = ShardedSFTTrainer if shards else SFTTrainer
    trainer = cls(build(), args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    history = trainer.state.log_history
    return {key: [line[key] for line in history if key in line] for key in ("loss", "grad_norm")}


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL sets it itself
def test_the_sft_trainer_of_trl_runs_on_the_mixin(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    (expected,) = run_ranks(train_sft, 1, f"{tmp_path}/plain", False)
    for found in run_ranks(train_sft, 2, f"{tmp_path}/sharded", True):
        assert_equal(found, expected)


def refused(folder: str, more: dict[str, Any]) -> None:
    args = TrainingArguments(folder, use_cpu=True, report_to="none", **more.pop("args", {}))
    model = build()
    if more.pop("with_optimizer", False):
        more["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    ScaleTrainer(model, args, train_dataset=samples(1, 4), **more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sharding": "zero"}, "sharding: expected one of fsdp, sharded_ddp, oss, got 'zero'"),
        ({"args": {"torch_compile": True}}, "torch_compile=True: .* block.compile()"),
        ({"with_optimizer": True}, r"optimizers: got SGD .* optimizer_cls_and_kwargs=\(torch.optim.AdamW"),
    ],
)
def test_what_does_not_go_with_sharding_is_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refused(str(tmp_path), more)


def test_a_transformers_that_saves_on_one_rank_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("scale_train.huggingface.trainer")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.22.0")
    with pytest.raises(ImportError, match=r"transformers>=5\.23 is required.*found transformers==5\.22\.0(?s:.)*pip"):
        importlib.reload(module)


def test_an_earlier_snapshot_is_removed_before_any_rank_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for the first one, which removes it."""
    earlier, events = tmp_path / "scale", []
    earlier.mkdir()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: events.append(("barrier", earlier.exists())))
    monkeypatch.setattr(sharded_trainer.scale_snapshot, "save", lambda *_: events.append(("save", earlier.exists())))
    trainer: Any = SimpleNamespace(is_world_process_zero=lambda: True, state=SimpleNamespace(global_step=3))
    trainer._objects = dict
    ScaleTrainerMixin._save_optimizer_and_scheduler(trainer, str(tmp_path))
    assert events == [("barrier", False), ("save", False)]
