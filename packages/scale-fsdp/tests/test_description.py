"""What a sharded model is made of: numbers that follow from the layout and equal what is there."""

from dataclasses import replace

import pytest
import torch
from fsdp_cases import Net, batch, loss_of
from fsdp_parity import noise, sharded
from torch import nn

from scale_check.exact import gather_values
from scale_core.comm.group import group_of
from scale_core.flat.live_buffers import live_buffers
from scale_core.hooks.gradients import register_local_grad_hook
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, describe, fully_shard
from scale_fsdp.description import Description

GPT_UNITS = ["blocks.0", "blocks.1", "blocks.2", ""]


def described() -> Description:
    """What rank 0 of two says; the other one may differ in what its elements that train take, and in nothing else."""
    first, second = run_ranks(describe_gpt, 2)
    root, same = (replace(description.units[0].buffers[0], trained_bytes=0) for description in (first, second))
    assert root == same
    return first


def describe_gpt() -> Description:
    torch.manual_seed(7)
    model = sharded(Net(), GPT_UNITS, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return describe(model)


def test_units_are_told_with_their_parameters_dtypes_and_padding():
    plain, description = Net(), described()
    assert description.model_class == "Net"
    assert [(unit.name, unit.module_class) for unit in description.units] == [
        ("", "Net"),
        *((f"blocks.{number}", "Block") for number in range(3)),
    ]
    root, block = description.units[0], description.units[1]
    assert root.num_parameters == 1 and root.num_elements == plain.embed.weight.numel()
    assert block.num_elements == sum(param.numel() for param in plain.blocks[0].parameters())
    assert block.around == ("",) and block.shares_with == () and block.reshard_after_forward is True
    (buffer,) = block.buffers
    assert buffer.names[0] == "blocks.0.norm.weight"
    assert (buffer.dtype, buffer.compute_dtype, buffer.reduce_dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert buffer.num_ranks == 2 and buffer.device == torch.device("cpu") and buffer.trains
    assert 2 * buffer.shard_numel == buffer.num_elements + buffer.padding
    assert description.num_elements == sum(param.numel() for param in plain.parameters())


def test_bytes_follow_from_the_layout():
    description = described()
    root, *blocks = (unit.buffers[0] for unit in description.units)
    assert description.shards == 4 * (root.shard_numel + 3 * blocks[0].shard_numel)
    # The root, one block, and the next one that is fetched ahead; in bf16, by both ranks' elements.
    assert description.gathered_at_most == 2 * 2 * (root.shard_numel + 2 * blocks[0].shard_numel)
    assert description.flat_gradients_at_most == 4 * 2 * max(root.shard_numel, blocks[0].shard_numel)
    assert description.gradients == description.state_of_elementwise_optimizer
    whole = 4 * sum(param.numel() for param in Net().parameters())
    assert whole / 2 - 4 * 60 <= description.gradients <= description.shards


@pytest.mark.ranks(2)
def test_the_numbers_are_those_of_a_training():
    """Where the description differs from what lives while the model trains."""

    def take(most: dict[str, int]) -> None:
        """Counts the flat tensors that live now, the flat gradient that is about to be reduced among them."""
        now = {"shard": 0, "gathered": 0, "gradient": 0}
        for kind, tensor in live_buffers():
            now[kind] += tensor.nbytes
        for kind, number in now.items():
            most[kind] = max(most[kind], number)

    torch.manual_seed(7)
    model = sharded(Net(), GPT_UNITS)
    description = describe(model)
    most = {"shard": 0, "gathered": 0, "gradient": 0}
    for module in model.modules():
        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            register(lambda *_: take(most))
    register_local_grad_hook(lambda params, grads: take(most))  # Each flat gradient lives when it is told of.
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        loss_of(model(batch("gpt", step))).backward()
        gradients = sum(local_tensor(param.grad).nbytes for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    states = sum(local_tensor(state["exp_avg"]).nbytes for state in optimizer.state.values())
    told = (description.shards, description.gathered_at_most, description.flat_gradients_at_most)
    assert tuple(most.values()) == told, f"{most} live, {told} told"
    assert gradients == description.gradients and states == description.state_of_elementwise_optimizer


@pytest.mark.parametrize(("reshard", "num_units"), [(True, 2), (False, 4)])
@pytest.mark.ranks(0, 2)
def test_units_that_stay_gathered_count_all_the_time(reshard: bool, num_units: int) -> None:
    plain = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    description = describe(sharded(plain, ["0", "1", "2", "3", ""], reshard_after_forward=reshard))
    assert len([unit for unit in description.units if unit.name]) == 4
    # A world of one computes with its shards.
    assert description.gathered_at_most == (num_units * 256 if group_of().size > 1 else 0)


@pytest.mark.ranks(2)
def test_frozen_shared_and_cut_parameters_are_told():
    class Partly(nn.Module):
        """Frozen and shared parameters, and rows that would pad too much."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(3, 5), nn.Linear(5, 3, bias=False)
            self.body = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5))
            self.head.weight = self.embed.weight
            self.body[0].requires_grad_(False)

        def forward(self, ids):
            return self.head(self.body(self.embed(ids)))

    description = gather_values(describe(sharded(Partly(), ["embed", "head", "body", ""])))[0]
    units = {unit.name: unit for unit in description.units}
    assert units["head"].shares_with == ("embed",) and units["head"].buffers == ()
    frozen, trained = units["body"].buffers
    assert (frozen.trains, frozen.names) == (False, ("body.0.weight", "body.0.bias")) and frozen.trained_bytes == 0
    assert trained.names == ("body.1.weight", "body.1.bias") and trained.trained_bytes == 4 * 5
    assert description.cut_at_elements == ("embed.weight", "body.0.weight")


@pytest.mark.ranks(2)
def test_the_order_of_use_is_told_once_it_is_recorded():
    model = sharded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ["0", "1", ""])
    before = describe(model).gather_order
    model(noise(2, 3)).sum().backward()
    with torch.no_grad():
        model.eval()(noise(2, 3))
    before, after, inner = gather_values(
        [dict(before), dict(describe(model).gather_order), dict(describe(model[1]).gather_order)]
    )[0]
    assert before == {}
    assert after == {
        "forward of root, training": ("", "0", "1"),
        "backward with reduction": ("", "1", "0"),
        "forward of root, evaluation, without gradients": ("", "0", "1"),
    }
    assert inner["forward of root, training"] == ("",), "names are those that the module itself gives"


@pytest.mark.ranks(2)
def test_nothing_is_sent_so_one_rank_may_ask_alone():
    model = sharded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ["0", "1", ""], limit_seconds=2)
    assert gather_values(len(describe(model).units) if torch.distributed.get_rank() == 0 else 0)[0] == 3


def test_a_model_without_units_has_nothing_to_describe():
    with pytest.raises(ValueError, match=r"no module in this Linear is sharded: call fully_shard\(model\) first"):
        describe(nn.Linear(2, 2))


def test_printing_a_model_shows_its_units():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 2, bias=False)))
    model[0].bias.requires_grad_(False)
    fully_shard(model[0])
    fully_shard(model)
    text = repr(model)
    line = "bias=True, sharded: parameters() yields 1/1 of 32 elements, float32 and 1/1 of 8 elements, float32, frozen)"
    assert f"(0): Linear(in_features=4, out_features=8, {line}" in text
    assert text.startswith("Sequential(\n  sharded: parameters() yields 1/1 of 16 elements, float32\n")
    assert "sharded" in repr(FullyShardedDataParallel(nn.Linear(2, 2)))
    assert "sharded: no parameters of its own" in repr(fully_shard(nn.Dropout()))


@pytest.mark.ranks(2)
def test_printing_a_unit_shows_the_fraction_of_this_rank():
    module = nn.Module()
    module.table = nn.Parameter(torch.zeros(12345))
    assert fully_shard(module).extra_repr() == "sharded: parameters() yields 1/2 of 12,345 elements, float32"


@pytest.mark.parametrize("around", [False, True])
def test_printing_works_where_parameters_are_flat(around):
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    model = sharded(plain, [""] if around else ["0", ""], flatten_parameters=True)
    assert "sharded: parameters() yields 1/1 of" in repr(model)
