"""norm.py: norms on a part of a sequence, whose parameters get the gradient of the whole."""

from __future__ import annotations

import copy
import io
from typing import Any
from unittest import mock

import emulated_ranks as emulated
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from scale_core.comm.group import Group, group_of
from scale_core.shard import Placement, shard_of
from scale_tp import ParallelLayerNorm, ParallelRMSNorm, RowParallelLinear, comm
from scale_tp.layers.norm import register_grad_all_reduce
from scale_tp.megatron import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from scale_tp.split import Split

LENGTH = 5
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "layer norm": (nn.LayerNorm, ParallelLayerNorm, {}),
    "layer norm without bias": (nn.LayerNorm, ParallelLayerNorm, {"bias": False, "eps": 1e-3}),
    "layer norm without parameters": (nn.LayerNorm, ParallelLayerNorm, {"elementwise_affine": False}),
    "rms norm": (nn.RMSNorm, ParallelRMSNorm, {}),
    "rms norm of half precision": (nn.RMSNorm, ParallelRMSNorm, {"dtype": torch.bfloat16}),
}


class OwnNorm(nn.Module):
    """One that a model brings along, which knows nothing of ranks; it uses its parameter twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.weight + self.frozen


def input_of(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, LENGTH, 3, generator=generator).to(dtype).requires_grad_()


def weigh(output: Tensor) -> Tensor:
    return (output * torch.linspace(-2, 1, output.numel()).view(output.shape).to(output.dtype)).sum()


def values(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.linspace(0.5, 1.5, param.numel()))


def compare(plain: nn.Module, ours: nn.Module, group: Group) -> None:
    values(plain)
    ours.load_state_dict(plain.state_dict())
    dtype = next((param.dtype for param in plain.parameters()), torch.float32)
    split = Split.even(LENGTH, group.size)
    x, y = input_of(dtype), input_of(dtype)
    params = dict(plain.named_parameters())
    parts = emulated.on_parts(x, 1, split, *params.values())
    outputs = [torch.func.functional_call(plain, dict(zip(params, own, strict=True)), (part,)) for part, *own in parts]
    expected = torch.cat(outputs, 1)
    part = scatter_to_sequence_parallel_region(y, group)
    found = gather_from_sequence_parallel_region(ours(part), group, to_model_parallel=False)
    assert torch.equal(found, expected)
    torch.testing.assert_close(found, plain(x))
    weigh(expected).backward()
    weigh(found).backward()
    assert torch.equal(y.grad, x.grad)
    for name, param in ours.named_parameters():
        assert (param.grad is None) is (params[name].grad is None)
        if param.grad is not None:
            assert torch.equal(param.grad, params[name].grad), name


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.ranks(2, 3)
def test_each_rank_gets_the_gradient_of_the_whole_sequence() -> None:
    group = group_of()
    for plain_kind, kind, options in KINDS.values():
        ours = kind(3, process_group=group, **options)
        assert isinstance(ours, plain_kind)
        compare(plain_kind(3, **options), ours, group)
        for param in ours.parameters():
            shard = shard_of(param)
            assert [axis.placement for axis in shard.axes] == [Placement.REPLICATE]
            assert (shard.start, shard.stop, shard.shape) == (0, 3, (3,))


@pytest.mark.ranks(2, 3)
def test_a_norm_of_ones_own_is_registered_in_place() -> None:
    group, own = group_of(), OwnNorm()
    weight = own.weight
    assert register_grad_all_reduce(own, group) is own
    assert isinstance(own, OwnNorm) and type(own).__name__ == "OwnNorm"
    assert own.weight is weight
    compare(OwnNorm(), own, group)
    assert own.weight is weight
    assert f"gradients summed over {group.size} ranks" in repr(own)
    buffer = io.BytesIO()
    torch.save(own, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(own), torch.load(buffer, weights_only=False), copy.deepcopy(own).double().float()):
        other.zero_grad()
        assert shard_of(other.weight) == shard_of(weight)
        compare(OwnNorm(), other, group)
    with pytest.raises(RuntimeError, match="must match"):
        own(torch.ones(2, 7))
    assert isinstance(own.weight, nn.Parameter)  # After an error, too.


@pytest.mark.ranks(2)
def test_gradients_are_summed_once_and_in_one_message() -> None:
    group, own = group_of(), register_grad_all_reduce(OwnNorm(), group_of())
    with pytest.raises(ValueError, match="OwnNorm are summed already: once is enough"):
        register_grad_all_reduce(own, group)
    with pytest.raises(
        ValueError, match="got a RowParallelLinear that is divided between them, and sums what has to be"
    ):
        register_grad_all_reduce(RowParallelLinear(3, 3, process_group=group), group)
    norm, sum_over = ParallelLayerNorm(3, process_group=group), comm.all_reduce_sum
    with mock.patch.object(comm, "all_reduce_sum", wraps=sum_over) as sums:
        norm(torch.randn(2, 3)).sum().backward()
    assert [call.args[0].numel() for call in sums.call_args_list] == [6]


@pytest.mark.ranks(2)
def test_a_norm_that_is_parametrized_later_is_refused() -> None:
    norm = ParallelLayerNorm(3, process_group=group_of())
    register_parametrization(norm, "weight", Double())
    with pytest.raises(ValueError, match=r"weight has been taken away, as by a parametrization: parametrize no module"):
        norm(torch.ones(2, 3))


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a module, such as a norm, got Parameter"):
        register_grad_all_reduce(nn.Parameter(torch.ones(2)))  # type: ignore[arg-type]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(3)


def test_parameters_that_are_not_the_modules_own_are_refused() -> None:
    message = (
        r"got a Around that has them in 'inner': pass these, as in register_grad_all_reduce\(module.get_submodule\('inn"
    )
    with pytest.raises(ValueError, match=message):
        register_grad_all_reduce(Around())
    norm = nn.LayerNorm(3)
    register_parametrization(norm, "weight", Double())
    with pytest.raises(ValueError, match=r"got a .* whose weight is parametrized: call .*remove_parametrizations"):
        register_grad_all_reduce(norm)
    assert isinstance(register_grad_all_reduce(nn.Identity()), nn.Identity)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_has_torchs_norm_without_initialization(kind: str) -> None:
    plain_kind, our_kind, options = KINDS[kind]
    ours = our_kind(3, **options)
    compare(plain_kind(3, **options), ours, Group())
    assert type(ours) is our_kind
    assert all(shard_of(param) is None for param in ours.parameters())
