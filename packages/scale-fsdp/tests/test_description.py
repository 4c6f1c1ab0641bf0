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
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, describe, fully_shard
from scale_fsdp.description import DescribedBuffer, DescribedUnit, Description, format_table, size_text

GPT_UNITS = ["blocks.0", "blocks.1", "blocks.2", ""]


@pytest.mark.ranks(2)
def test_units_are_told_with_their_dtypes_padding_and_bytes():
    plain = Net()
    model = sharded(plain, GPT_UNITS, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    description, other = gather_values(describe(model))
    # The other rank may differ in what its elements that train take, and in nothing else.
    first, second = (replace(each.units[0].buffers[0], trained_bytes=0) for each in (description, other))
    assert first == second
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
    root, *blocks = (unit.buffers[0] for unit in description.units)
    assert description.shards == 4 * (root.shard_numel + 3 * blocks[0].shard_numel)
    # The root, one block, and the next one that is fetched ahead; in bf16, by both ranks' elements.
    assert description.gathered_at_most == 2 * 2 * (root.shard_numel + 2 * blocks[0].shard_numel)
    assert description.flat_gradients_at_most == 4 * 2 * max(root.shard_numel, blocks[0].shard_numel)
    assert description.gradients == description.state_of_elementwise_optimizer
    whole = 4 * description.num_elements
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


@pytest.mark.parametrize("reshard, num_units", [(True, 2), (False, 4)])
@pytest.mark.ranks(0, 2, in_turn=True)
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


# As a table that people read.

CPU = torch.device("cpu")
FULL, HALF = torch.float32, torch.bfloat16


def told_buffer(
    *names: str,
    numel: int,
    trains: bool = True,
    cut: tuple[str, ...] = (),
    copies: int = 1,
    compute: torch.device = CPU,
    kept: int = 0,
) -> DescribedBuffer:
    shard = -(-numel // 2)
    return DescribedBuffer(
        names, numel, shard, 2 * shard - numel, 2, copies, FULL, HALF, FULL, CPU, compute, trains,
        4 * shard, 2 * 2 * shard, kept, 4 * 2 * shard, 4 * shard * trains, cut,
    )  # fmt: skip


def test_it_reads_as_a_table():
    first = DescribedUnit(
        "embed", "Embedding", (told_buffer("embed.weight", numel=12345, cut=("embed.weight",)),), False, (), ("",)
    )
    second = DescribedUnit(
        "body", "Block", (told_buffer("a", "b", numel=2000, trains=False), told_buffer("c", numel=10)), True, (), ("",)
    )
    root = DescribedUnit("", "Model", (), True, ("embed",), ())
    description = Description(
        "Model", (root, first, second), 28_712, 57_000, 24_712, 49_384, 24_712, {"backward": ("", "body", "embed")}
    )
    assert format_table(description) == str(description)
    assert str(description).splitlines() == [
        "Model: 3 units, 4 parameters, 14,355 elements on 2 ranks",
        "parameters() yields this rank's shards of them; scale_core.shard.full_shape(param), full_numel(param) and",
        "num_parameters(model) count full parameters",
        "unit   class      parameters  elements  shard  padding  shards in  computes  reduces  lives on",
        "root   Model               0         0      0        0                                shares with embed",
        "embed  Embedding           1    12,345  6,173        1  float32    bfloat16  float32  cpu; "
        "stays gathered after its forward",
        "body   Block               2     2,000  1,000        0  float32    bfloat16  -        cpu; frozen",
        "                           1        10      5        0  float32    bfloat16  float32  cpu",
        "",
        "memory on this rank",
        "shards     28.0 KiB  always",
        "gathered   55.7 KiB  at most, in a forward or backward",
        "gradients  24.1 KiB  of the shards",
        "           48.2 KiB  at most in addition, of one unit before it is reduced",
        "optimizer  24.1 KiB  for each state of an elementwise one: 48.3 KiB with Adam",
        "",
        "cut at elements, since rows would pad too much",
        "  embed.weight",
        "",
        "order of use, backward",
        "  root, body, embed",
    ]


def test_what_lives_at_several_places_says_so():
    spread = told_buffer("weight", numel=2048, copies=3, compute=torch.device("cuda", 1), kept=1024)
    lines = str(
        Description("Model", (DescribedUnit("", "Model", (spread,), True, (), ()),), 0, 0, 0, 0, 0, {})
    ).splitlines()
    assert lines[0].endswith("on 6 ranks")
    assert lines[4].endswith("cpu, computes on cuda:1; 3 copies, each on 2 ranks; 1.0 KiB stay after its forward")


def test_sizes_are_written_in_the_unit_that_suits_them():
    sizes = [0, 1023, 1024, 1536, 5 * 2**20, 7 * 2**30, 3000 * 2**40]
    assert [size_text(size) for size in sizes] == [
        "0 B", "1,023 B", "1.0 KiB", "1.5 KiB", "5.0 MiB", "7.0 GiB", "3,000.0 TiB",
    ]  # fmt: skip


def test_long_lists_are_broken_between_names():
    names = tuple(f"layers.{number}.weight" for number in range(20))
    unit = DescribedUnit("", "Model", (told_buffer(*names, numel=40, cut=names),), True, (), ())
    lines = str(Description("Model", (unit,), 0, 0, 0, 0, 0, {})).splitlines()
    lines = lines[lines.index("cut at elements, since rows would pad too much") + 1 :]
    assert max(map(len, lines)) <= 102 and len(lines) > 1
    assert " ".join(line.strip() for line in lines) == ", ".join(names)
