"""Weights of transformers, in and out of divided models that are never whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallelize_cases import gpt2, llama, loss_of, tokens
from torch import nn

from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_snapshot import load_pretrained, save_pretrained
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import GPT2_PLAN


def build(name: str) -> Any:
    if name == "gpt2":
        return gpt2()
    return llama(num_key_value_heads=1, tie_word_embeddings=name == "llama tied")


NAMES = ["llama", "llama tied", "gpt2"]


def load_and_save(folder: str) -> list[str]:
    wrong = []
    for name in NAMES:
        with torch.device("meta"):
            model: nn.Module = build(name)
        parallelize(model, GPT2_PLAN if name == "gpt2" else None, group_of())
        load_pretrained(model, f"{folder}/{name}")
        plain = build(name)
        plain.load_state_dict(plain.from_pretrained(f"{folder}/{name}").state_dict())
        ours, theirs = model.state_dict(), plain.state_dict()
        wrong += [f"{name}: {key}" for key in theirs if not torch.equal(ours[key], theirs[key])]
        data = tokens(4)
        losses = [loss_of(each(input_ids=data).logits, data) for each in (model.eval(), plain.eval())]
        wrong += [f"{name}: losses {losses}"] * (not torch.allclose(*losses, rtol=1e-5, atol=0))
        if name == "llama tied":
            wrong += ["not tied any more"] * (model.lm_head.weight is not model.model.embed_tokens.weight)
        save_pretrained(model, f"{folder}/{name} again", max_shard_size="4KB")
    return wrong


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_parts_are_read_in_place_and_written_between_ranks(tmp_path: Path, world: int) -> None:
    """Columns of a matrix, heads of a fused one, and copies of key-value heads that several ranks hold."""
    for name in NAMES:
        build(name).save_pretrained(tmp_path / name, max_shard_size="4KB")
    assert not any(run_ranks(load_and_save, world, str(tmp_path)))
    for name in NAMES:
        again = type(build(name)).from_pretrained(f"{tmp_path}/{name} again")
        assert all(
            torch.equal(one, other) for one, other in zip(again.parameters(), build(name).parameters(), strict=True)
        )
