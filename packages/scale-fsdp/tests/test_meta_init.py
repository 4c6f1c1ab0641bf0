"""Models that are built on the meta device: given values unit by unit, from rank 0, and never whole anywhere."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_cases import Net, batch, loss_of
from gpt_at_scale import GPT, LAYERS, Block, Embed, Head
from shard_arguments import shard_arguments
from torch import nn

from scale_check.exact import assert_equal, gather_values
from scale_check.simulate import simulate
from scale_core.comm.group import group_of
from scale_core.shard import shard_of
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    ShardOptions,
    class_policy,
    fully_shard,
    fully_shard_modules,
    name_policy,
)
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.wrapping.auto_wrap import auto_wrap, enable_wrap
from scale_snapshot import load_snapshot, save_snapshot


class Scale(nn.Module):
    """Has a parameter of its own, and no reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x * self.scale)


class Rotary(nn.Module):
    """A buffer that no checkpoint has, beside a weight; `forgets` says what its reset leaves out."""

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self.forgets = forgets
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("inv_freq", torch.empty(3), persistent=False)
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.forgets != "weight":
            self.weight.data.fill_(2.0)  # Past the version counter, as much code does it.
        if self.forgets != "inv_freq":
            self.inv_freq = 10.0 ** -torch.arange(3.0)
        if self.forgets != "mask":
            self.mask.copy_(torch.tensor([True, False, True]))

    def forward(self, x):
        return x * self.weight * self.inv_freq * self.mask


def on_meta(build, *args) -> nn.Module:
    with torch.device("meta"):
        return build(*args)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False))


@pytest.mark.parametrize("build", [layers, lambda: nn.Sequential(nn.MultiheadAttention(4, 2), nn.LSTM(3, 4))])
@pytest.mark.parametrize("flatten", [False, True])
def test_modules_initialize_themselves_as_their_constructors_do(build, flatten):
    torch.manual_seed(3)
    plain = build()
    torch.manual_seed(3)
    model = fully_shard_modules(
        on_meta(build), class_policy(nn.Linear), options=ShardOptions(flatten_parameters=flatten)
    )
    assert_equal(model, plain)


@pytest.mark.ranks(1, 3)
def test_what_is_sharded_under_the_meta_device_stays_there():
    torch.manual_seed(3)
    plain = layers()
    with torch.device("meta"):
        model = layers()
        for module in (model[0], model):
            fully_shard(module)
    assert all(param.is_meta and shard_of(param) is not None for param in model.parameters())
    with pytest.raises(RuntimeError, match="meta"):
        model(torch.ones(2, 3))
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in model:
        module.reset_parameters()
    model(torch.ones(2, 3)).sum().backward()
    assert model.state_dict().keys() == plain.state_dict().keys()
    states = [{name: each.state_dict()[name] for name, _ in plain.named_parameters()} for each in (model, plain)]
    assert_equal(*states)


def test_what_is_frozen_on_meta_stays_frozen():
    model = on_meta(layers)
    model[0].requires_grad_(False)
    fully_shard(model)
    assert [param.requires_grad for param in model.parameters()] == [False, False, True, True, True]


def test_init_is_called_with_each_module_on_meta():
    seen = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for number, param in enumerate(module.parameters(recurse=False)):
            param.fill_(number + 1.0)

    model = on_meta(lambda: nn.Sequential(Scale(), nn.ReLU()))
    fully_shard(model, options=ShardOptions(init=init))
    assert seen == ["Linear", "Scale"]
    assert [param.unique().tolist() for param in model.parameters()] == [[1.0], [1.0], [2.0]]


def test_values_of_parameters_that_init_assigns_are_taken():
    def init(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.full((2, 3), 4.0))

    model = fully_shard(on_meta(nn.Linear, 3, 2, False), options=ShardOptions(init=init))
    assert torch.equal(model.weight, torch.full((2, 3), 4.0))
    with pytest.raises(ValueError, match=r"assigned a parameter of shape \(2, 3\) to 'weight', expected \(3, 3\)"):
        fully_shard(on_meta(nn.Linear, 3, 3, False), options=ShardOptions(init=init))


@pytest.mark.parametrize("shard", [fully_shard, lambda model: fully_shard_modules(model, class_policy(nn.Linear))])
def test_a_module_that_cannot_initialize_itself_is_named(shard):
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Scale()))
    with pytest.raises(
        ValueError, match=r"'1.scale' is on the meta.*Scale has no reset_parameters.*ShardOptions\(init="
    ):
        shard(model)
    assert not units_in(model)
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize("forgets", ["weight", "inv_freq", "mask"])
def test_what_an_initialization_leaves_out_is_named(forgets):
    model = on_meta(lambda: nn.Sequential(Rotary(forgets)))
    with pytest.raises(ValueError, match=rf"'0.{forgets}' is on the meta device.*Rotary has written to it"):
        fully_shard(model)
    assert not units_in(model)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_buffers_that_are_not_saved_are_restored_by_reset():
    model = fully_shard(on_meta(lambda: nn.Sequential(Rotary())))
    assert torch.equal(model(torch.ones(1, 3)), Rotary()(torch.ones(1, 3)))


@pytest.mark.parametrize("units", [[], ["embed"], ["embed", "head"]])
def test_tied_parameters_on_meta_stay_tied(units):
    class Tied(nn.Module):
        """The head is the embedding; each is a unit of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    torch.manual_seed(5)
    embed = nn.Embedding(7, 3)
    torch.manual_seed(5)
    model = on_meta(Tied)
    for name in units:
        fully_shard(model.get_submodule(name))
    fully_shard(model)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, embed.weight)
    assert len(list(model.parameters())) == 2
    model(torch.tensor([1, 2])).sum().backward()
    assert model.embed.weight.grad is not None


def test_progress_is_told_after_each_unit():
    told = []

    def progress(*what) -> None:
        told.append(what)

    fully_shard_modules(on_meta(layers), class_policy(nn.Linear), progress=progress)
    assert told == [(1, 3, "0"), (2, 3, "2"), (3, 3, "")]
    told.clear()
    with enable_wrap():
        model = auto_wrap(on_meta(layers), class_policy(nn.Linear), progress=progress)
    assert told == [(1, 2, "0"), (2, 2, "2")]
    assert isinstance(model[0], FullyShardedDataParallel)
    assert not model[2].weight.is_meta


def test_an_init_of_the_wrong_kind_is_refused():
    with pytest.raises(TypeError, match="init: expected a function of a module"):
        fully_shard(on_meta(layers), options=ShardOptions(init="normal"))
    with pytest.raises(ValueError, match=r"init=False waits for a checkpoint, but '0.weight' has values already"):
        fully_shard(layers(), options=ShardOptions(init=False))


WIDTH, BLOCKS, WORLD = 256, 12, 4


@pytest.mark.simulation
def test_no_more_than_one_unit_is_whole_at_a_time():
    unit = (WIDTH * WIDTH + WIDTH) * 4
    with simulate(rank=1, world_size=WORLD) as simulation:
        model = on_meta(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))))
        fully_shard_modules(model, class_policy(nn.Linear))
        buffers = [buffer for each in units_in(model) for buffer in each.buffers]
        shards = sum(buffer.shard.numel() * buffer.shard.itemsize for buffer in buffers)
    assert BLOCKS * unit / WORLD <= shards < 1.01 * BLOCKS * unit / WORLD
    assert simulation.peak_bytes <= shards + 1.01 * unit, simulation.report()
    assert simulation.bytes_sent.keys() == {"broadcast"}


@pytest.mark.simulation
def test_shards_on_the_host_are_initialized_unit_by_unit():
    unit = (WIDTH * WIDTH + WIDTH) * 4
    with simulate(rank=1, world_size=WORLD, device="sim") as simulation:
        model = on_meta(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))))
        fully_shard_modules(model, class_policy(nn.Linear), offload_policy=CPUOffloadPolicy())
        assert {param.device.type for param in model.parameters()} == {"cpu"}
        empty = on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)))
        fully_shard(empty, options=ShardOptions(init=False), offload_policy=CPUOffloadPolicy())
        empty.to_empty(device=simulation.device)
        assert {param.device.type for param in empty.parameters()} == {"cpu"}
        assert units_in(empty)[0].buffers[0].compute_device.type == "sim"
    assert unit <= simulation.peak_bytes <= 1.01 * unit, simulation.report()
    assert simulation.on("cpu").peak_bytes < 1.1 * (BLOCKS + 1) * unit / WORLD, simulation.report()


@pytest.mark.simulation
@pytest.mark.parametrize("num_layers", [4, pytest.param(LAYERS, marks=pytest.mark.soak)])
def test_a_large_gpt_needs_an_eighth_and_a_block(num_layers):
    with simulate(rank=3, world_size=8) as simulation:
        model = on_meta(GPT, num_layers)
        numel = sum(param.numel() for param in model.parameters())
        fully_shard_modules(model, class_policy(Block, Embed, Head))
        shards = sum(param.numel() * param.itemsize for param in model.parameters())
    largest = 12 * 5120**2 * 4 * 1.001  # A block, and its padding.
    assert numel * 4 / 8 <= shards < 1.001 * numel * 4 / 8
    assert simulation.peak_bytes <= 1.001 * shards + largest, simulation.report()


@pytest.mark.ranks(2, 3)
def test_all_ranks_begin_with_the_weights_of_rank_0():
    def shard_blocks(model: nn.Module, **kwargs) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, **shard_arguments(**kwargs))
        return fully_shard(model, **shard_arguments(**kwargs))

    def trained(model: nn.Module, rank: int) -> dict:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            loss_of(model(batch("gpt", step, rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    rank = group_of().rank
    torch.manual_seed(rank)
    model = shard_blocks(on_meta(Net))
    start = model.state_dict()
    torch.manual_seed(0)
    rank_0s = shard_blocks(on_meta(Net), sync_module_states=False)  # All ranks with rank 0's seed.
    assert_equal(rank_0s, start, "start")
    real = Net()
    real.load_state_dict(start)
    expected = trained(shard_blocks(real), rank)
    assert_equal(trained(model, rank), expected, "end")
    if rank:
        torch.manual_seed(9)
        mixed = shard_blocks(on_meta(Net))
    else:
        plain = Net()
        plain.load_state_dict(start)
        mixed = shard_blocks(plain)
    assert_equal(mixed, start, "rank 0's")
    scales = fully_shard(on_meta(Scale) if rank else Scale())  # Only rank 0 could make them, and does.
    assert torch.equal(scales.state_dict()["scale"], torch.ones(3)), "values of rank 0 alone"


@pytest.mark.ranks(2)
def test_where_one_rank_cannot_initialize_all_of_them_say_so():
    rank, messages = group_of().rank, []
    for build in (lambda: on_meta(Scale) if rank == 0 else Scale(), lambda: on_meta(Scale)):
        with pytest.raises(ValueError, match="meta") as caught:
            fully_shard(build())
        messages.append(str(caught.value))
    (own, both_0), (others, both_1) = gather_values(messages)
    assert own.startswith("'scale' is on the meta device")
    assert others.startswith("rank 0 has a parameter or buffer on the meta device that nothing initializes")
    assert both_0 == both_1 == own


# Models that wait for a checkpoint.


def deferred(build=layers, **kwargs) -> nn.Module:
    return fully_shard_modules(on_meta(build), name_policy("0"), **shard_arguments(init=False, **kwargs))


def equal(model: nn.Module, plain: nn.Module) -> bool:
    x = torch.ones(2, 3)
    return torch.equal(model.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("flatten", [False, True])
def test_a_full_checkpoint_goes_straight_into_a_model_on_meta(flatten):
    plain = layers()
    model = deferred(flatten_parameters=flatten)
    assert all(param.is_meta for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"'1.weight' of the root unit is on the meta device.*to_empty\(device="):
        model(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="on the meta device and have no memory yet"):
        model.load_state_dict(plain.state_dict())
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert model.to_empty(device="cpu") is model
    with pytest.raises(RuntimeError, match=r"nothing was written to '1.weight' of the root unit.*load a checkpoint"):
        model(torch.ones(2, 3))
    model.load_state_dict(plain.state_dict())
    assert equal(model, plain)


def test_what_a_checkpoint_lacks_is_no_number():
    model = deferred().to_empty(device="cpu")
    state = layers().state_dict()
    del state["0.bias"]
    model.load_state_dict(state, strict=False)
    assert model(torch.ones(2, 3)).isnan().all()


def test_a_buffer_that_is_not_saved_must_be_written_first():
    plain = nn.Sequential(Rotary())
    model = deferred(lambda: nn.Sequential(Rotary())).to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=r"the buffer '0.inv_freq' has had no values since it was on the"):
        model(torch.ones(2, 3))
    model[0].inv_freq.copy_(plain[0].inv_freq)
    with pytest.raises(RuntimeError, match=r"the buffer '0.mask' has had no values"):
        model(torch.ones(2, 3))
    model[0].mask = plain[0].mask
    assert equal(model, plain)


def test_a_model_on_meta_neither_gives_nor_takes_a_state():
    model, full = deferred(), fully_shard(layers())
    for call in (lambda: sharded_state_dict(model), lambda: load_sharded_state_dict(sharded_state_dict(full), model)):
        with pytest.raises(ValueError, match=r"0.weight is on the meta device.*model.to_empty\(device=...\) before"):
            call()


@pytest.mark.ranks(2)
def test_a_sharded_checkpoint_goes_straight_into_a_model_on_meta(tmp_path):
    directory = str(tmp_path)
    torch.manual_seed(group_of().rank)
    model = fully_shard_modules(layers(), name_policy("0"))
    state = model.state_dict()
    save_snapshot(f"{directory}/ours", 1, sharded_state_dict(model))
    dcp.save(sharded_state_dict(model), checkpoint_id=f"{directory}/torch")

    def by_snapshot(empty: nn.Module) -> None:
        load_snapshot(f"{directory}/ours", lambda saved: target_state_dict(empty, None, saved))

    def by_torch(empty: nn.Module) -> None:
        dcp.load(sharded_state_dict(empty), checkpoint_id=f"{directory}/torch")

    for load in (by_snapshot, by_torch):
        empty = fully_shard(on_meta(layers), options=ShardOptions(init=False)).to_empty(device="cpu")
        load(empty)
        empty(torch.ones(2, 3))  # batch norm counts
        loaded = empty.state_dict()
        weights = [{name: each[name] for name in state if name[0] != "1"} for each in (loaded, state)]
        assert_equal(*weights, load.__name__)
