"""State dicts are those of the plain model, whole and under its names, in both directions."""

import pytest
import torch
import torch.distributed as dist
from fsdp_parity import adam, sharded
from torch import Tensor, nn

from scale_check.exact import assert_equal
from scale_check.simulate import simulate
from scale_fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    full_optim_state_dict,
    full_state_dict,
    fully_shard,
)


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((2,), float(seed)))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


TOKENS = torch.tensor([1, 2, 5])
WAYS = {"root": [""], "units": ["embed", "body.0", "body", ""], "head first": ["head", "body", ""]}


@pytest.mark.ranks(1, 2, in_turn=True)
def test_the_state_dict_is_the_plain_one_in_both_directions():
    def check_tied(state: dict[str, Tensor]) -> None:
        assert state["head.weight"] is state["embed.weight"], "a tied parameter has become two"

    for way, units in WAYS.items():
        for kwargs in (
            {},
            {"flatten_parameters": True},
            {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)},
        ):
            model = sharded(Model(0), units, **kwargs)
            assert_equal(model, Model(0))
            assert list(model.state_dict()) == list(Model(0).state_dict()), f"order {list(model.state_dict())}"
            check_tied(model.state_dict())
            result = model.load_state_dict(Model(3).state_dict())
            assert not result.missing_keys and not result.unexpected_keys, f"{way}: {result}"
            assert_equal(model, Model(3))
            plain = Model(1)
            plain.load_state_dict(model.state_dict())
            assert_equal(model, plain)


@pytest.mark.ranks(2, in_turn=True)
def test_wrappers_at_several_levels_leave_no_trace_in_any_name():
    def wrapped(plain: nn.Module) -> nn.Module:
        """FullyShardedDataParallel at several levels."""
        plain.body[0] = FullyShardedDataParallel(plain.body[0])
        plain.body = FullyShardedDataParallel(plain.body)
        plain.embed = FullyShardedDataParallel(plain.embed)
        return FullyShardedDataParallel(plain)

    model, plain = wrapped(Model(0)), Model(0)
    assert_equal(model, plain)
    for ours, theirs in (
        (list(model.state_dict()), list(plain.state_dict())),
        ([name for name, _ in model.named_parameters()], [name for name, _ in plain.named_parameters()]),
        ([name for name, _ in model.named_buffers()], [name for name, _ in plain.named_buffers()]),
    ):
        assert ours == theirs, f"{ours} instead of {theirs}"
    assert not any("module" in name.split(".") for name, _ in model.named_modules())
    model.load_state_dict(Model(4).state_dict())
    assert_equal(model, Model(4))
    inner = model.body.state_dict()
    assert list(inner) == list(Model(0).body.state_dict()), f"of a unit inside: {list(inner)}"
    model.body.load_state_dict(Model(5).body.state_dict())
    assert_equal(model.body, Model(5).body)


@pytest.mark.ranks(1, 2, in_turn=True)
def test_a_module_inside_a_unit_has_the_plain_state_dict_too():
    """`model.body` is no unit, but inside of one."""
    for kwargs in ({}, {"flatten_parameters": True}):
        model = sharded(Model(0), ["body.0", ""], **kwargs)
        assert_equal(model.body, Model(0).body)
        assert_equal(model.head, Model(0).head)
        result = model.body.load_state_dict(Model(3).body.state_dict())
        assert result.missing_keys == result.unexpected_keys == []
        assert_equal(model.body, Model(3).body)
        assert_equal(model.embed, Model(0).embed)
        with pytest.raises(RuntimeError, match=r"2\.weight"):
            model.body.load_state_dict({**Model(3).body.state_dict(), "2.weight": torch.zeros(6, 5)})


@pytest.mark.ranks(2, in_turn=True)
def test_a_sharded_model_inside_a_plain_parent():
    plain = nn.Sequential(Model(0), nn.Linear(2, 2))
    parent = nn.Sequential(FullyShardedDataParallel(Model(0)), nn.Linear(2, 2))
    parent[1].load_state_dict(plain[1].state_dict())
    assert_equal(parent, plain)
    other = nn.Sequential(Model(6), nn.Linear(2, 2))
    parent.load_state_dict(other.state_dict())
    assert_equal(parent, other)


def test_prefix_and_keep_vars_work_as_in_torch():
    model, plain = sharded(Model(0), ["body", ""]), Model(0)
    assert list(model.state_dict(prefix="a.b.")) == list(plain.state_dict(prefix="a.b."))
    kept = model.state_dict(keep_vars=True)
    assert list(kept) == list(plain.state_dict(keep_vars=True))
    assert_equal(kept, plain.state_dict())


def test_what_was_saved_does_not_change_with_the_next_step():
    model = sharded(Model(0), ["body", ""])
    saved = model.state_dict()
    model(TOKENS).sum().backward()
    adam(model.parameters()).step()
    assert all(torch.equal(saved[name], p) for name, p in Model(0).named_parameters())


@pytest.mark.ranks(2, in_turn=True)
def test_what_was_loaded_is_what_computes():
    for reshard in (True, False):
        model = sharded(Model(0), ["body", ""], reshard_after_forward=reshard).eval()
        model(TOKENS)  # leaves parameters gathered, without resharding
        model.load_state_dict(Model(2).state_dict())
        assert torch.equal(model(TOKENS), Model(2).eval()(TOKENS)), f"old weights, reshard {reshard}"


def test_a_half_precision_checkpoint_loads_into_fp32_shards():
    model = sharded(nn.Linear(3, 3), [""])
    half = {name: tensor.half() for name, tensor in nn.Linear(3, 3).state_dict().items()}
    model.load_state_dict(half)
    assert_equal(model, {name: tensor.float() for name, tensor in half.items()})


# Where it goes, and how much is full at a time on the way there.


@pytest.mark.ranks(3, in_turn=True)
def test_a_state_dict_goes_where_it_was_asked_to_be():
    """In a world of three, whose ranks 1 and 2 share the model."""

    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    plain, first = Model(0), dist.get_rank() == 1
    form = {"state_dict_on_rank_0_only": True, "state_dict_device": "meta"}
    for kwargs in ({}, {"flatten_parameters": True}):
        model = sharded(plain, ["body.0", "embed"], group, **kwargs)
        model = FullyShardedDataParallel(model, group, **kwargs, **form)
        state = model.state_dict()
        assert list(state) == (list(plain.state_dict()) if first else [])
        assert all(tensor.is_meta for tensor in state.values()), "on another device"
        # A unit inside has its own form, and the call's comes before that of the module.
        assert_equal(model.body, plain.body)
        whole = full_state_dict(model, rank_0_only=True, device="cpu")
        assert first or not whole, f"{list(whole)} on the second rank"
        assert_equal(whole, plain if first else {})
        assert_equal(full_state_dict(model), plain)
        parent = nn.ModuleDict({"model": model, "other": nn.Linear(2, 2)})
        expected = [f"model.{name}" for name in plain.state_dict()] if first else []
        around = list(parent.state_dict())
        assert around == [*expected, "other.weight", "other.bias"], f"in a plain parent: {around}"
        assert list(full_state_dict(parent, rank_0_only=True)) == (around if first else [])
        filled = {"before": torch.zeros(1)}
        model.state_dict(destination=filled, prefix="a.")
        assert list(filled) == ["before", *(f"a.{name}" for name in state)], f"a given destination: {list(filled)}"


def test_a_wrong_form_of_the_state_is_refused_at_sharding():
    with pytest.raises(TypeError, match="state_dict_on_rank_0_only: expected True or False, got 'yes'"):
        FullyShardedDataParallel(nn.Linear(2, 2), state_dict_on_rank_0_only="yes")
    with pytest.raises(RuntimeError, match="nowhere"):
        FullyShardedDataParallel(nn.Linear(2, 2), state_dict_device="nowhere")


SIZE, LAYERS, WORLD = 64, 5, 4
BYTES = SIZE * SIZE * 4


def layers_on_the_stand_in() -> nn.Module:
    """A unit for each layer, and a larger one around them."""
    with torch.device("sim"):
        model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
        model.register_parameter("own", nn.Parameter(torch.ones(2 * SIZE, SIZE)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.simulation
@pytest.mark.parametrize("rank", [0, 1])
def test_one_unit_at_a_time_is_full_and_rank_0_keeps_copies(rank):
    with simulate(rank, WORLD, device="sim") as simulation:
        model = layers_on_the_stand_in()
        shards = (LAYERS + 2) * BYTES // WORLD
        simulation.restart()
        assert simulation.current_bytes == shards
        state = full_state_dict(model, rank_0_only=True, device="cpu")
        assert len(state) == (LAYERS + 1 if rank == 0 else 0)
        assert simulation.peak_bytes == shards + 2 * BYTES  # the largest unit
        assert simulation.current_bytes == shards
        assert simulation.on("cpu").peak_bytes == (0 if rank else (LAYERS + 2) * BYTES)


@pytest.mark.simulation
@pytest.mark.parametrize("rank", [0, 1])
def test_one_kind_of_state_of_one_unit_is_whole_at_a_time(rank):
    with simulate(rank, WORLD, device="sim") as simulation:
        model = layers_on_the_stand_in()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for param in model.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
        shards = 2 * (LAYERS + 2) * BYTES // WORLD
        simulation.restart()
        assert simulation.current_bytes == shards
        state = full_optim_state_dict(model, optimizer)
        assert (state is None) == (rank == 1)
        unit, sent = (0 if rank else 2 * BYTES), 2 * BYTES // WORLD  # Only the recipient has the unit.
        assert simulation.peak_bytes == shards + unit + sent
        assert simulation.current_bytes == shards
        assert simulation.on("cpu").peak_bytes == (0 if rank else (LAYERS + 2) * BYTES)
