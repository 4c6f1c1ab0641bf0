"""Full weights from the shards of all ranks: offline, in any order, and never from what does not belong together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_cases import Awkward, Layout

from scale_check.exact import assert_equal
from scale_core.testing import run_ranks
from scale_fsdp.state_dict.loading import LOCAL_METADATA
from scale_fsdp.state_dict.local import consolidate_local_state_dicts, consolidate_shards

Shards = tuple[list[dict[str, Any]], list[dict[str, Any]]]

LAYOUTS = {"units": Layout(wrapping="units"), "flat": Layout(wrapping="head first", atom="element", flatten=True)}
WORLD = 3


def save() -> dict[str, Any]:
    return {name: layout.shard(Awkward(4)).local_state_dict() for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def saved() -> dict[str, Shards]:
    """What three ranks have saved; in this process there is no process group."""
    ranks = run_ranks(save, WORLD)
    states = {name: [rank[name] for rank in ranks] for name in LAYOUTS}
    return {name: (each, [state._metadata[""][LOCAL_METADATA] for state in each]) for name, each in states.items()}


@pytest.fixture(params=LAYOUTS)
def shards(request: pytest.FixtureRequest, saved: dict[str, Shards]) -> Shards:
    return copy.deepcopy(saved[request.param])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_shards_in_any_order_are_the_plain_weights(shards: Shards, order: list[int]) -> None:
    whole = consolidate_local_state_dicts([shards[0][rank] for rank in order])
    plain = Awkward(4)
    assert_equal(whole, dict(plain.state_dict()), "weights")
    assert list(whole) == list(plain.state_dict())
    assert whole["head.weight"] is whole["embed.weight"]
    Awkward(0).load_state_dict(whole)


def test_the_weights_share_no_memory_with_the_shards(shards: Shards) -> None:
    whole = consolidate_shards(*shards)
    for rank in shards[0]:
        for tensor in rank.values():
            tensor.zero_()
    assert torch.equal(whole["scale"], Awkward(4).scale)
    assert torch.equal(whole["count"], torch.full((2,), 4.0))


def test_buffers_may_be_left_out(shards: Shards) -> None:
    whole = consolidate_shards(*shards, with_module_buffers=False)
    assert list(whole) == [name for name in Awkward().state_dict() if name != "count"]


def without(shards: Shards, rank: int) -> Shards:
    weights, metadata = shards
    return weights[:rank] + weights[rank + 1 :], metadata[:rank] + metadata[rank + 1 :]


def shift(metadata: dict[str, Any], bound: str, by: int) -> None:
    metadata["parameters"]["embed.weight"][bound] += by


MISFITS: dict[str, Callable[[Shards], Shards]] = {
    "expected the local state of each rank with its metadata, got 3 states and 2 metadata": lambda s: (s[0], s[1][:2]),
    "expected the local state of each rank with its metadata, got 0": lambda s: ([], []),
    "expected one shard of each of 3 ranks, but missing: rank 1": lambda s: without(s, 1),
    "of 3 ranks, but missing: ranks 1, 2": lambda s: without(without(s, 2), 1),
    "of 3 ranks, but given twice: rank 0; missing: rank 2": lambda s: (
        [*s[0][:2], s[0][0]],
        [*s[1][:2], dict(s[1][0])],
    ),
    "metadata 0 does not say which elements": lambda s: (s[0], [{}, *s[1][1:]]),
    "metadata 1 does not say which elements": lambda s: (s[0], [s[1][0], None, s[1][2]]),
}

DAMAGES: dict[str, tuple[int, Callable[[dict[str, Any]], None]]] = {
    "the shards of one run, got some of 3 and some of 4 ranks": (2, lambda data: data.update(world_size=4)),
    r"different models; first, 'body.0.weight': \(6, 5\) torch.float32 on rank 0, \(5, 6\) torch.float32 on rank 1": (
        1,
        lambda data: data["parameters"]["body.0.weight"].update(shape=[5, 6]),
    ),
    "'embed.weight': rank 1 holds elements .*, expected it to go on from": (1, lambda data: shift(data, "start", 1)),
    "'embed.weight': (the ranks hold 34 of 35 elements|rank 2 holds)": (2, lambda data: shift(data, "stop", -1)),
}


@pytest.mark.parametrize("message", MISFITS)
def test_shards_that_are_not_one_for_each_rank_are_refused(saved: dict[str, Shards], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        consolidate_shards(*MISFITS[message](saved["units"]))


@pytest.mark.parametrize("message", DAMAGES)
def test_shards_that_do_not_belong_together_are_refused(saved: dict[str, Shards], message: str) -> None:
    weights, metadata = copy.deepcopy(saved["flat"])
    rank, damage = DAMAGES[message]
    damage(metadata[rank])
    with pytest.raises(ValueError, match=message):
        consolidate_shards(weights, metadata)


def test_a_missing_or_resized_tensor_is_named_with_its_rank(saved: dict[str, Shards]) -> None:
    weights, metadata = copy.deepcopy(saved["units"])
    del weights[1]["body.0.bias"]
    with pytest.raises(ValueError, match=r"'body.0.bias' is missing in the shard of rank 1$"):
        consolidate_shards(weights, metadata)
    assert "body.0.bias" not in consolidate_shards(weights, metadata, strict=False)
    weights[0]["body.2.weight"] = torch.ones(100)
    with pytest.raises(
        ValueError, match=r"'body.2.weight' of rank 0: expected \d+ elements in 'body.2.weight', got 100"
    ):
        consolidate_shards(weights, metadata, strict=False)
    flat, metadata = copy.deepcopy(saved["flat"])
    flat[2]["body.flat_param_0"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"of rank 2: expected \d+ elements in 'body.flat_param_0', got 1"):
        consolidate_shards(flat, metadata)


def test_of_several_copies_of_the_model_one_will_do(saved: dict[str, Shards]) -> None:
    weights, metadata = copy.deepcopy(saved["units"])
    copies = [{**each, "replica": 1} for each in metadata]
    whole = consolidate_shards([*weights, *weights], [*copies, *metadata])
    assert torch.equal(whole["embed.weight"], Awkward(4).embed.weight)


def test_a_state_that_was_copied_into_another_dict_is_refused(saved: dict[str, Shards]) -> None:
    states = saved["units"][0]
    with pytest.raises(ValueError, match=r"state 1 of 3 does not say which elements its tensors are: .*`_metadata`"):
        consolidate_local_state_dicts([states[0], dict(states[1]), states[2]])
