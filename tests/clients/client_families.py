"""Families of transformers under each technique: the cells of the table in the guide on models, and what fills them.

`PYTHONPATH=tests python tests/clients/client_families.py` prints the table.
"""

from __future__ import annotations

import ast
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from client_models import VOCABULARY, gpt2, llama, mixtral, qwen3_moe, t5, tokens
from torch import Tensor, nn
from trainings import mean_gradients
from transformers.models.bert.modeling_bert import BertConfig, BertForMaskedLM
from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralConfig, MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.models.vit.modeling_vit import ViTConfig, ViTForImageClassification
from transformers.models.whisper.modeling_whisper import WhisperConfig, WhisperForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

import scale_snapshot
from scale_checkpoint import checkpoint_modules
from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import class_policy, fully_shard_modules, no_split_policy, register_fsdp_forward_method
from scale_oss import OSS, ShardedDataParallel
from scale_snapshot import save_pretrained
from scale_tp import GPT2_PLAN, parallelize

disable_progress_bar()

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "trainers.md"
TOLERANCE = 1e-6
EXACT, NEAR = "to the bit", "within 1e-6"
NEW_TOKENS, STEPS = 4, 3

_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}


def bert() -> nn.Module:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**_SIZES, num_attention_heads=2, max_position_embeddings=32, **quiet))


def vit() -> nn.Module:
    image = {"image_size": 8, "patch_size": 4, "num_labels": 5, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(**{**_SIZES, **image}))


def whisper() -> nn.Module:
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8}
    length = {"max_source_positions": 10, "max_target_positions": 32}
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    rules = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=VOCABULARY, **sizes, **heads, **length, **words, **rules)
    )


def _speech(seed: int) -> Tensor:
    """float32 [2, mel bins, frames], the same on every rank for the same seed."""
    return torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(seed))


def _language(seed: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(seed), "labels": tokens(seed)}


def _images(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
        "labels": torch.randint(5, (2,), generator=generator),
    }


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Attributes:
        build: Makes the model, with random weights.
        batch: The model's keyword arguments, from a seed.
        blocks: Classes of its blocks where it has no `_no_split_modules`.
        plan: Of tensor parallelism, where it carries none.
        prompt: What `generate` is given; None where there is no `generate`.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]] = _language
    blocks: tuple[str, ...] = ()
    plan: Mapping[str, Any] | None = None
    prompt: Callable[[], dict[str, Tensor]] | None = lambda: {"input_ids": tokens(1)}


FAMILIES: dict[str, Family] = {
    "GPT-2": Family(gpt2, plan=GPT2_PLAN),
    "Llama": Family(llama),
    "Mistral": Family(lambda: MistralForCausalLM(MistralConfig(**_SIZES, **_HEADS, sliding_window=4))),
    "Qwen2": Family(lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, **_HEADS, tie_word_embeddings=True))),
    "Qwen3": Family(lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, **_HEADS, head_dim=4))),
    "Gemma": Family(lambda: GemmaForCausalLM(GemmaConfig(**_SIZES, **_HEADS, head_dim=4))),
    "Mixtral": Family(mixtral),
    "Qwen3-MoE": Family(qwen3_moe),
    "T5": Family(t5),
    "BERT": Family(bert, blocks=("BertLayer",), prompt=None),
    "ViT": Family(vit, _images, prompt=None),
    "Whisper": Family(
        whisper,
        lambda seed: {"input_features": _speech(seed), "labels": tokens(seed)},
        prompt=lambda: {"input_features": _speech(1)},
    ),
}


@dataclass
class Trained:
    """A model and its optimizer under a technique, on this rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inner: Any  # The model of transformers.


def _sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _fully_shard(model: nn.Module, family: Family) -> Trained:
    policy = class_policy(*family.blocks) if family.blocks else no_split_policy(model)
    fully_shard_modules(model, policy)
    if family.prompt is not None:
        register_fsdp_forward_method(model, "generate")
    return Trained(model, _sgd(model.parameters()), model)


def _sharded_ddp(model: nn.Module, family: Family) -> Trained:
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    return Trained(ShardedDataParallel(model, optimizer), optimizer, model)


def _checkpointed(model: nn.Module, family: Family) -> Trained:
    names = family.blocks or tuple(model._no_split_modules)  # type: ignore[arg-type]
    chosen = checkpoint_modules(model, lambda _, module: "recompute" if type(module).__name__ in names else None)
    assert len(chosen) >= 2
    return _fully_shard(model, family)


def _checkpointed_by_itself(model: Any, family: Family) -> Trained:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Newer versions call it activation_checkpointing_enable.
        model.gradient_checkpointing_enable()
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return _fully_shard(model, family)


def _parallelize(model: nn.Module, family: Family) -> Trained:
    """By the plan that the model carries; where that asks for divided experts, by what the error says to write."""
    try:
        parallelize(model, family.plan, group_of())
    except ValueError as error:
        if "carries no plan" in str(error):
            raise NotApplicable("no plan") from error
        plan = re.search(r"parallelize\(model, (\{.*\})\)", str(error))
        if plan is None:
            raise
        parallelize(model, ast.literal_eval(plan[1]), group_of())
    return Trained(model, _sgd(model.parameters()), model)


class NotApplicable(Exception):
    """The technique does not apply to the family; the text is what the table says then."""


@dataclass(frozen=True)
class Technique:
    """A column of the table.

    Attributes:
        wrap: Puts a model under it, and builds its optimizer.
        own_batches: Whether each rank has a batch of its own; otherwise all have the same one.
        without_cache: Whether the model is called with `use_cache=False`.
    """

    wrap: Callable[[nn.Module, Family], Trained]
    own_batches: bool = True
    without_cache: bool = False


TECHNIQUES: dict[str, Technique] = {
    "`fully_shard`": Technique(_fully_shard),
    "`ShardedDataParallel`": Technique(_sharded_ddp),
    "and scale-checkpoint": Technique(_checkpointed, without_cache=True),
    "and its own checkpointing": Technique(_checkpointed_by_itself),
    "`parallelize`": Technique(_parallelize, own_batches=False),
}


def build(family: Family, seed: int = 11) -> nn.Module:
    """The same weights on every rank, from a seed."""
    torch.manual_seed(seed)
    return family.build().train()


def outcome(family_name: str, technique_name: str) -> str:
    """What stands in a cell: trains, is saved and goes on, is published and generates as the plain model does.

    On each rank the same words, or an AssertionError with what differs.
    """
    family, technique = FAMILIES[family_name], TECHNIQUES[technique_name]
    plain = build(family)
    try:
        trained = technique.wrap(build(family), family)
    except NotApplicable as why:
        return str(why)
    distance = _distance(plain, trained, family, technique)
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        _saves_and_goes_on(trained, family, technique, f"{folders[0]}/snapshot")
        _publishes(trained, plain, f"{folders[0]}/published")
        dist.barrier()
    if family.prompt is not None:
        _generates(trained, plain, family.prompt())
    assert distance <= TOLERANCE, f"{family_name} under {technique_name}: {distance} from the plain model"
    return EXACT if distance == 0 else NEAR


def _distance(plain: nn.Module, trained: Trained, family: Family, technique: Technique) -> float:
    """Trains both; returns by how much losses and weights are apart at most, on any rank."""
    group, optimizer = group_of(), _sgd(plain.parameters())
    apart = torch.zeros((), dtype=torch.float64)

    def step(model: nn.Module, rank: int, number: int) -> Tensor:
        return _loss(model, family, technique, rank, number)

    for number in range(STEPS):
        expected = mean_gradients(plain, step, number, group.size)[group.rank]
        loss = step(trained.model, group.rank, number)
        apart = torch.maximum(apart, (loss.detach().double() - expected).abs())
        _update(trained, loss)
        optimizer.step()
    ours, theirs = _whole(trained), plain.state_dict()
    assert list(ours) == list(theirs)
    for name, weight in theirs.items():
        apart = torch.maximum(apart, (ours[name].double() - weight.double()).abs().max())
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return apart.item()


def _loss(model: nn.Module, family: Family, technique: Technique, rank: int, number: int) -> Tensor:
    """The loss of one rank in one step, a scalar."""
    # What fills a cache of keys and values can't be computed again: checkpointed blocks are called without.
    options = {"use_cache": False} if technique.without_cache and family.prompt is not None else {}
    batch = family.batch(10 * number + (rank if technique.own_batches else 0))
    loss: Tensor = model(**batch, **options).loss
    return loss


def _update(trained: Trained, loss: Tensor) -> None:
    loss.backward()
    trained.optimizer.step()
    trained.optimizer.zero_grad()


def _whole(trained: Trained) -> dict[str, Tensor]:
    """The state dict of the plain model, on every rank."""
    state: dict[str, Tensor] = trained.inner.state_dict()
    return state


def _saves_and_goes_on(trained: Trained, family: Family, technique: Technique, folder: str) -> None:
    """A snapshot, and the full state dict, go into models of other weights, which then take the same step."""
    scale_snapshot.save(folder, STEPS, {"model": trained.model, "optimizer": trained.optimizer})
    again, copied = (technique.wrap(build(family, seed=12), family) for _ in range(2))
    scale_snapshot.load(folder, {"model": again.model, "optimizer": again.optimizer})
    copied.inner.load_state_dict(_whole(trained))
    assert not _differing(copied, trained)
    for each in (trained, again):
        _update(each, _loss(each.model, family, technique, group_of().rank, STEPS))
    assert not _differing(again, trained)


def _differing(one: Trained, other: Trained) -> list[str]:
    ours, theirs = _whole(one), _whole(other)
    return [name for name in ours.keys() | theirs.keys() if not torch.equal(ours[name], theirs[name])]


def _publishes(trained: Trained, plain: Any, folder: str) -> None:
    """The folder is read by `from_pretrained`, and holds the weights to the bit; the plain model has them from here."""
    save_pretrained(trained.model, folder)
    published = type(plain).from_pretrained(folder).state_dict()
    whole = _whole(trained)
    assert published.keys() == whole.keys()
    assert not [name for name, weight in whole.items() if not torch.equal(published[name], weight)]
    plain.load_state_dict(whole)


@torch.no_grad()
def _generates(trained: Trained, plain: Any, prompt: dict[str, Tensor]) -> None:
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    ours, theirs = (model.eval().generate(**prompt, **options) for model in (trained.inner, plain))
    assert torch.equal(ours, theirs), f"{ours.tolist()} instead of {theirs.tolist()}"


def outcomes(cells: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What stands in each of these cells; to be called on every rank."""
    return {cell: outcome(*cell) for cell in cells}


def all_cells() -> list[tuple[str, str]]:
    return [(family, technique) for family in FAMILIES for technique in TECHNIQUES]


def written_table(found: Mapping[tuple[str, str], str]) -> str:
    """The table of the guide."""
    lines = [["model", *TECHNIQUES], ["---"] * (1 + len(TECHNIQUES))]
    lines += [[family, *(found[family, technique] for technique in TECHNIQUES)] for family in FAMILIES]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(written_table(run_ranks(outcomes, 2, all_cells())[0]))
