"""module_swap.py: modules keep their class and their names, and have this rank's shards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scale_tp
from scale_core.comm.group import Group, group_of
from scale_core.sharded_module import mixed_class
from scale_tp.conversion.modules import ColumnParallelMixin, RowParallelMixin
from scale_tp.layers.base import ParamSharding
from scale_tp.layers.linear_ops import SharedInput
from scale_tp.layers.module_swap import local_parameter, swap_class
from scale_tp.split import Split

TWO = Group(1, 2, None, "fake", (0, 1))


def _columns() -> nn.Linear:
    module, split = nn.Linear(4, 3), Split.even(3, 2)
    shardings = {"weight": ParamSharding((3, 4), 0, split), "bias": ParamSharding((3,), 0, split)}
    parts = {name: local_parameter(param, shardings[name], TWO) for name, param in module.named_parameters()}
    entrance = SharedInput(TWO, 1, "inside")
    facts = {"path": "up", "split": split, "shared_input": entrance, "gather_output": False, "region_rng": None}
    swap_class(module, ColumnParallelMixin, TWO, shardings, **facts)
    for name, part in parts.items():
        module.register_parameter(name, part)
    return module


def test_a_divided_module_keeps_its_class_its_names_and_its_part() -> None:
    module, x = _columns(), torch.randn(2, 4)
    assert isinstance(module, nn.Linear) and type(module).__name__ == "Linear"
    shapes = {name: tuple(param.to_local().shape) for name, param in module.named_parameters()}
    assert shapes == {"weight": (1, 4), "bias": (1,)}
    assert "one of 2 shards" in repr(module)
    for other in (module, copy.deepcopy(module)):
        assert type(other) is type(module)
        torch.testing.assert_close(other(x), x @ module.weight.to_local().T + module.bias.to_local())
    whole = nn.Linear(4, 3)
    module.load_state_dict(whole.state_dict())
    assert torch.equal(module.weight.to_local(), whole.weight[2:])


def test_one_class_is_made_of_each_pair_of_classes() -> None:
    assert type(_columns()) is type(_columns())
    rows = nn.Linear(3, 3)
    swap_class(rows, RowParallelMixin, TWO, {})
    assert type(rows) is not type(_columns()) and isinstance(rows, RowParallelMixin)
    with pytest.raises(AssertionError, match=r"RowParallelMixin declares none of .*'gathers'"):
        swap_class(nn.Linear(3, 3), RowParallelMixin, TWO, {}, gathers=True)


class Registered(nn.Linear):
    """Asks its subclasses for an argument."""

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind


def test_a_class_whose_subclasses_take_arguments_is_divided() -> None:
    mixed = mixed_class(ColumnParallelMixin, Registered)
    assert issubclass(mixed, Registered) and not hasattr(mixed, "kind")


def test_a_part_has_memory_of_its_own() -> None:
    whole = nn.Parameter(torch.arange(6.0).view(3, 2), requires_grad=False)
    part = local_parameter(whole, ParamSharding((3, 2), 0, Split.even(3, 2)), TWO)
    assert part.tolist() == [[4.0, 5.0]] and not part.requires_grad
    whole.data.zero_()
    assert part.tolist() == [[4.0, 5.0]]
    meta = local_parameter(
        nn.Parameter(torch.empty(3, 2, device="meta")), ParamSharding((3, 2), 1, Split.even(2, 2)), TWO
    )
    assert meta.is_meta and meta.shape == (3, 1)


def _parallel() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    return scale_tp.parallelize(model, {"0": "colwise", "2": "rowwise"}, group_of())


@pytest.mark.ranks(2)
def test_ddp_over_the_ranks_of_a_layer_is_refused() -> None:
    layers = nn.ModuleDict({"up": scale_tp.ColumnParallelLinear(4, 6, process_group=group_of())})
    for model, name in ((_parallel(), "0.weight"), (layers, "up.weight")):
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(ValueError, match=rf"'{name}' is a shard \[3, 4\] .*\[6, 4\].*\[0, 1\].*data axis"):
            DistributedDataParallel(model)
        assert all(torch.equal(param, held) for param, held in zip(model.parameters(), before, strict=True))
    # What is the same on both ranks is averaged as ever.
    plain = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 2), scale_tp.ParallelLayerNorm(2, process_group=group_of()))
    )
    plain(torch.ones(1, 4)).sum().backward()


@pytest.mark.fault(72)
@pytest.mark.ranks(2)
def test_torch_s_own_clipping_measures_the_parts_of_all_ranks() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    model, x = _parallel().double(), torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).double()
    for each in (plain, model):
        each(x).square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (plain, model)]
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-10, atol=0)
    bias = model.get_parameter("2.bias").grad  # All ranks have it.
    torch.testing.assert_close(bias, plain.get_parameter("2.bias").grad, rtol=1e-10, atol=0)
