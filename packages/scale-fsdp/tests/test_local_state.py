"""What a rank saves of itself goes back to that rank, into the same wrapping, and nowhere else."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_cases import WRAPPINGS, Awkward, Differences, Layout
from torch import nn

from scale_core.shard import shard_of
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, fully_shard
from scale_fsdp.state_dict.loading import LOCAL_METADATA


def through_a_file(value: Any) -> Any:
    """What comes back from a file that runs nothing."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def save_and_load() -> list[str]:
    found = Differences()
    for wrapping in WRAPPINGS:
        for flatten in (False, True):
            layout = Layout(wrapping=wrapping, flatten=flatten)
            old, new = layout.shard(Awkward(0)), layout.shard(Awkward(1))
            state = through_a_file({"weights": old.local_state_dict()})
            metadata = state["weights"]._metadata[""][LOCAL_METADATA]
            found.compare("metadata in JSON", json.loads(json.dumps(metadata)), metadata)
            result = new.load_local_state_dict(state["weights"])
            found.compare("missing", result.missing_keys + result.unexpected_keys, [])
            found.compare(str(layout), dict(new.state_dict()), dict(Awkward(0).state_dict()))
            # Other names than flat ones are those of the plain model, and each is this rank's shard.
            for name, tensor in () if flatten else old.local_state_dict(keep_vars=True).items():
                shard = shard_of(tensor)
                if isinstance(tensor, nn.Parameter) and (shard is None or shard.numel < tensor.numel()):
                    found.found.append(f"{name} is no shard")
            new.load_local_state_dict(dict(state["weights"]))  # Without metadata names and shapes are compared.
    return found.found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_rank_s_own_state_goes_both_ways(world: int) -> None:
    assert not [line for wrong in run_ranks(save_and_load, world) for line in wrong]


def test_it_shares_memory_with_the_shards_and_stands_under_the_prefix() -> None:
    model = FullyShardedDataParallel(Awkward())
    state = model.local_state_dict(prefix="a.")
    assert all(name.startswith("a.") for name in state)
    state["a.embed.weight"].zero_()
    assert not model.state_dict()["embed.weight"].any()
    given: dict[str, Any] = {"before": 1}
    assert model.local_state_dict(destination=given) is given
    assert list(given) == ["before", *(name.removeprefix("a.") for name in state)]


def test_it_shows_shards_where_the_module_shows_whole_parameters() -> None:
    for flatten in (False, True):
        model = fully_shard(Awkward(), flatten_parameters=flatten)
        names = list(model.local_state_dict())
        with model.summon_full_params():
            assert list(model.local_state_dict()) == names


def go_wrong() -> list[str]:
    rank = dist.get_rank()
    alone = dist.new_group([0]), dist.new_group([1])
    model = fully_shard(Awkward())
    state = model.local_state_dict()
    told: list[Any] = [None, None]
    dist.all_gather_object(told, state)
    finer = Layout(wrapping="units", atom="element").shard(Awkward())
    otherwise = Layout(flatten=True).shard(Awkward())
    lacking = dict(state)
    del lacking["scale"]
    before = {name: tensor.clone() for name, tensor in finer.state_dict().items()}
    attempts = [
        (model, told[1 - rank]),
        (fully_shard(Awkward(), alone[rank]), state),
        (finer, state),
        (otherwise, state),
        (otherwise, dict(state)),
        (model, lacking),
        (model, {**state, "extra": torch.ones(1)}),
        (model, {**state, "count": torch.ones(3)}),
        (model, {**state, "scale": "text"}),
    ]
    messages = []
    for each, given in attempts:
        try:
            each.load_local_state_dict(given)
            messages.append("took it")
        except ValueError as error:
            messages.append(str(error))
    if not all(torch.equal(tensor, before[name]) for name, tensor in finer.state_dict().items()):
        messages.append("something was written")
    with model.summon_full_params():
        try:
            model.load_local_state_dict(state)
        except RuntimeError as error:
            messages.append(str(error))
    missing = model.load_local_state_dict(lacking, strict=False).missing_keys
    return [*messages, str(missing)]


def test_the_state_of_another_rank_world_or_wrapping_is_refused_by_name() -> None:
    for rank, messages in enumerate(run_ranks(go_wrong, 2)):
        expected = [
            f"expected the state of rank {rank}, got that of rank {1 - rank}, of 2: read the file that this rank has",
            f"expected the state of one of 1 ranks, got that of rank {rank} of 2. Make full weights",
            "another wrapping; first, '",
            "another wrapping; first, 'scale': expected elements",
            "'flat_param_0' is missing",
            "'scale' is missing",
            "'extra' is unexpected",
            "'count': expected this rank's shape (2,), got (3,)",
            "'scale': expected a tensor, got str",
            "load_local_state_dict: the parameters of the root unit are in use",
            "['scale']",
        ]
        assert len(messages) == len(expected)
        assert all(part in message for part, message in zip(expected, messages, strict=True)), messages


def test_a_unit_that_borrows_from_outside_says_where_to_ask() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Sequential(nn.Linear(2, 3, bias=False)))
    model[1][0].weight = model[0].weight
    fully_shard(model[0], flatten_parameters=True)
    fully_shard(model[1])
    fully_shard(model)
    with pytest.raises(
        ValueError, match=r"'0.weight' belongs to a unit outside of this module: call this on the outer"
    ):
        model[1].local_state_dict()
