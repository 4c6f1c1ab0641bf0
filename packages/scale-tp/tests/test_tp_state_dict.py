"""state_dict.py: plain names and full tensors, and pieces that are read at another number of ranks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallelize_cases import gpt2, llama, loss_of, tokens
from torch import Tensor, nn

from scale_check.simulate import simulate
from scale_core import ScaleDistributedError
from scale_core.comm import collectives
from scale_core.comm.group import group_of
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_core.state.dcp import dcp_target
from scale_core.testing import run_ranks
from scale_snapshot import load_pretrained, save_pretrained
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import GPT2_PLAN
from scale_tp.layers.linear import ColumnParallelLinear
from scale_tp.state_dict import full_state_dict, load_full_state_dict


def _divided(kind: str, seed: int = 0) -> nn.Module:
    model = gpt2() if kind == "gpt2" else llama(num_key_value_heads=2)
    if seed:
        for param in model.parameters():
            nn.init.normal_(param, generator=torch.Generator().manual_seed(seed))
    return parallelize(model, GPT2_PLAN if kind == "gpt2" else None, group_of())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    data = tokens(4)
    optimizer.zero_grad()
    loss = loss_of(model(input_ids=data).logits, data)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _save(folder: str) -> dict[str, tuple[dict[str, Tensor], list[Tensor]]]:
    found = {}
    for kind in ("llama", "gpt2"):
        model = _divided(kind)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        _step(model, optimizer)
        dcp.save({"train": sharded_state_dict(model, optimizer)}, checkpoint_id=f"{folder}/{kind}")
        found[kind] = full_state_dict(model), [_step(model, optimizer) for _ in range(2)]
    return found


def _load(folder: str, saved: dict[str, Any]) -> None:
    for kind in ("llama", "gpt2"):
        model = _divided(kind, seed=3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        target = dcp_target(f"{folder}/{kind}", model, optimizer, key="train")
        dcp.load({"train": target}, checkpoint_id=f"{folder}/{kind}")
        load_sharded_state_dict(target, model, optimizer, copy=False)
        whole, losses = saved[kind]
        found = full_state_dict(model, on_host=True)
        assert list(found) == list(whole) and all(torch.equal(found[name], whole[name]) for name in whole)
        for loss in losses:  # Training goes on as it would have, but for the order in which sums are rounded.
            torch.testing.assert_close(_step(model, optimizer), loss, rtol=0, atol=2e-6)
        again = _divided(kind, seed=3)
        load_full_state_dict(again, iter(whole.items()))
        assert all(torch.equal(value, whole[name]) for name, value in full_state_dict(again).items())


def test_a_state_is_read_at_another_number_of_ranks(tmp_path: Path) -> None:
    saved = run_ranks(_save, 4, str(tmp_path))[0]
    run_ranks(_load, 3, str(tmp_path), saved)
    run_ranks(_load, 1, str(tmp_path), saved)


def _plain(kind: str) -> Any:
    return gpt2() if kind == "gpt2" else llama(num_key_value_heads=2)


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_state_dict_is_full_and_read_by_the_plain_model(tmp_path: Path, kind: str) -> None:
    """As everybody saves it: of `state_dict()`, `save_pretrained` and `full_state_dict`."""
    model, plain = _plain(kind), _plain(kind)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize(model, GPT2_PLAN if kind == "gpt2" else None, group_of())
    state = model.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(value, expected[name]) and not value.requires_grad for name, value in state.items())
    for param in plain.parameters():
        nn.init.zeros_(param)
    plain.load_state_dict(state)
    model.load_state_dict(plain.state_dict())
    model.save_pretrained(tmp_path, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    read = type(plain).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in read.items())
    assert all(torch.equal(value, expected[name]) for name, value in full_state_dict(model).items())
    parts = model.state_dict(keep_vars=True)
    assert all(parts[name] is param for name, param in model.named_parameters())


@pytest.mark.ranks(2)
def test_a_tied_parameter_is_one_tensor_in_a_given_state_too() -> None:
    model = _divided("gpt2")
    state = model.state_dict()
    head = state["lm_head.weight"].clone()
    tied = (state[name].untyped_storage().data_ptr() for name in ("lm_head.weight", "transformer.wte.weight"))
    assert len(set(tied)) == 1
    with torch.no_grad():
        for param in model.parameters():
            param.data.add_(1.0)  # Without a trace in the version of the parameter.
    again = model.state_dict(destination=state, prefix="")
    assert again is state and torch.equal(again["lm_head.weight"], head + 1.0)


@pytest.mark.ranks(2)
def test_a_state_dict_of_one_rank_alone_is_refused() -> None:
    model = parallelize(gpt2(), GPT2_PLAN, dist.new_group(timeout=timedelta(seconds=3)))
    model.state_dict()
    if dist.get_rank() == 0:
        text = r"is divided between the ranks \[0, 1\], and not all of them have come to give their shards"
        # A transport without tags would take a collective of it for the next one of the other rank.
        with (
            mock.patch.object(collectives, "parts_by_rank", wraps=collectives.parts_by_rank) as begun,
            pytest.raises(ScaleDistributedError, match=text) as caught,
        ):
            model.state_dict()
        assert "call model.state_dict() on all ranks" in str(caught.value)
        assert begun.call_count == 0
    dist.barrier()


@pytest.mark.simulation
def test_a_simulated_state_dict_is_whole() -> None:
    with simulate(rank=1, world_size=2):
        layer = ColumnParallelLinear(4, 6, process_group=group_of())
        assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
            "weight": (6, 4),
            "bias": (6,),
        }


def test_whole_tensors_that_do_not_fit_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    given = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    load_full_state_dict(model, given)
    assert model[0].weight.tolist() == [[1.0] * 3] * 2 and model[1].num_batches_tracked == 1
    with pytest.raises(ValueError, match=r"'1.extra' is not a parameter or buffer of Sequential: rename it, or"):
        load_full_state_dict(model, given | {"1.extra": torch.ones(1)})
    load_full_state_dict(model, {"1.extra": torch.ones(1)}, strict=False)
    with pytest.raises(ValueError, match=r"'0.weight': expected a full tensor of shape \(2, 3\), got \(3, 2\)"):
        load_full_state_dict(model, given | {"0.weight": torch.ones(3, 2)})
    del given["1.bias"]
    with pytest.raises(ValueError, match=r"1 tensors of Sequential were not given, such as '1.bias'"):
        load_full_state_dict(model, given)


def test_the_full_state_of_a_plain_model_is_a_copy_of_its_own() -> None:
    model = nn.Linear(3, 2)
    state = full_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    state["weight"].zero_()
    assert model.weight.detach().abs().max() > 0


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
