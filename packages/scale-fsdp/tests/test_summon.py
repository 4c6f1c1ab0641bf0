"""Full parameters in the places of shards: summoned to look at and change, and one unit at a time by apply()."""

import copy

import pytest
import torch
from fsdp_cases import Case, Net, shard
from torch import nn

from scale_check.exact import assert_equal
from scale_check.simulate import simulate
from scale_core.comm.group import group_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import ShardOptions, fully_shard
from scale_fsdp.runtime.unit import units_in

CASES = [Case(wrapping="deep"), Case(wrapping="leaves", flatten=True), Case(wrapper=True), Case(precision="bf16")]


def init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            module.bias.data.fill_(module.weight.shape[0])
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)


@pytest.mark.ranks(1, 2, 3, in_turn=True)
def test_weights_initialized_by_apply_are_the_plain_ones():
    for case in CASES:
        torch.manual_seed(1)
        plain = Net()
        model = shard(Case().build(), case)
        torch.manual_seed(3)
        plain.apply(init)
        torch.manual_seed(3 + group_of().rank)  # Rank 0 decides.
        kept = dict(model.named_parameters())
        assert model.apply(init) is model, "apply() returns the model"
        plain.load_state_dict({n: t for n, t in model.state_dict().items() if "norm" in n}, strict=False)
        assert_equal(model, plain, f"{case}")
        assert not any(param is not kept[name] for name, param in model.named_parameters())
        x = torch.arange(5).view(1, 5)
        assert not (case.precision == "fp32" and not torch.equal(model(x), plain(x)))


@pytest.mark.ranks(2, in_turn=True)
def test_a_function_that_fails_leaves_its_unit_as_it_was():
    model = shard(Case().build(), Case())
    before = model.state_dict()

    def fails(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.zero_()
        if module is model.head:
            raise KeyError("head")

    with torch.no_grad(), pytest.raises(KeyError, match="head"):
        model.apply(fails)
    assert_equal(model.head, {"weight": before["head.weight"]})
    with model.summon_full_params(), pytest.raises(RuntimeError, match="apply: the parameters of the root unit are in"):
        model.apply(init)
    model(torch.arange(5).view(1, 5)).sum().backward()


@pytest.mark.ranks(2, in_turn=True)
def test_a_tied_parameter_is_whole_in_all_its_places():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7)
            self.head.weight = self.embed.weight

    model = Tied()
    for module in (model.embed, model.head, model):
        fully_shard(module)
    with model.summon_full_params():
        assert model.head.weight is model.embed.weight
        assert model.head.weight.shape == (7, 3)
        model.head.weight.data.fill_(4.0)
    assert torch.equal(model.state_dict()["embed.weight"], torch.full((7, 3), 4.0))
    with model.head.summon_full_params(recurse=False):
        assert model.head.weight.shape == (7, 3)
        assert local_tensor(model.embed.weight).shape != (7, 3)
        model.head.weight.data.fill_(5.0)
    assert torch.equal(model.state_dict()["embed.weight"], torch.full((7, 3), 5.0))


@pytest.mark.ranks(2, in_turn=True)
def test_a_flat_parameter_is_not_listed_beside_the_whole_ones():
    """Inside, the module lists what the plain one does; afterwards the optimizer's flat parameter is where it was."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    for module in (model[0], model):
        fully_shard(module, options=ShardOptions(flatten_parameters=True))
    before = dict(model.named_parameters())
    with model.summon_full_params():
        inside = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert {name: id(param) for name, param in before.items()} == {n: id(p) for n, p in model.named_parameters()}
    with model.summon_full_params(recurse=False):
        assert set(dict(model.named_parameters())) == {"1.weight", "1.bias", "0.flat_param_0"}
    with torch.no_grad():
        listed: dict[str, list[str]] = {}
        model.apply(lambda module: listed.update({type(module).__name__: [n for n, _ in module.named_parameters()]}))
    assert listed["Sequential"] == ["0.flat_param_0", "1.weight", "1.bias"]
    plain.load_state_dict(inside)
    assert list(inside) == list(plain.state_dict())
    assert_equal(model, plain)


WIDTH, BLOCKS, WORLD = 256, 12, 4


@pytest.mark.simulation
def test_apply_gathers_one_unit_at_a_time():
    unit = (WIDTH * WIDTH + WIDTH) * 4
    with simulate(rank=1, world_size=WORLD) as simulation:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        for module in (*model, model):
            fully_shard(module)
        buffers = [buffer for each in units_in(model) for buffer in each.buffers]
        shards = sum(buffer.shard.numel() * buffer.shard.itemsize for buffer in buffers)
        simulation.restart()
        model.apply(lambda module: nn.init.zeros_(module.weight) if isinstance(module, nn.Linear) else None)
    assert shards + unit <= simulation.peak_bytes <= shards + 1.3 * unit, simulation.report()
