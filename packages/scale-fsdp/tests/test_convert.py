"""A sharded model changes its dtype and its device as a plain one does, and an optimizer goes on with it."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from fsdp_parity import noise, sharded
from shard_arguments import shard_arguments
from torch import nn

from scale_check.exact import assert_equal
from scale_check.simulate import simulate
from scale_core.comm.group import group_of
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from scale_fsdp.runtime.unit import units_in


class Model(nn.Module):
    """A unit with parameters of its own, a frozen one, buffers of two kinds, and a nested unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.last = nn.Linear(5, 2)
        self.last.weight.requires_grad_(False)

    def forward(self, x):
        return self.last(self.head(self.norm(x * self.scale)))


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "double": nn.Module.double,
    "to": lambda model: model.to(torch.float64),
    "there and back": lambda model: model.half().float(),
    "cpu": lambda model: model.cpu().to("cpu"),
}
LAYOUTS = {"plain": {}, "flat": {"flatten_parameters": True}, "part": {"reshard_after_forward": 1}}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 2) -> None:
    dtype = next(param.dtype for param in model.parameters() if param.numel())
    for step in range(steps):
        model(noise(4, 3, seed=10 * step + rank).to(dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_on_one_rank_a_conversion_is_that_of_a_plain_model(name: str, layout: str, wrapped: bool) -> None:
    convert, kwargs = CONVERSIONS[name], LAYOUTS[layout]
    plain, model = Model(), sharded(Model(), ["head"], **kwargs)
    model = FullyShardedDataParallel(model, **kwargs) if wrapped else fully_shard(model, **shard_arguments(**kwargs))
    optimizers = adam(plain), adam(model)
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, 0)
        each(noise(4, 3)).sum().backward()  # Gradients are converted, too.
    params = list(model.parameters())
    assert convert(model) is model and convert(plain) is plain
    assert_equal(model, plain)
    assert [id(param) for param in model.parameters()] == [id(param) for param in params]
    dtypes = {param.dtype for param in plain.parameters()}
    assert {param.dtype for param in params} == dtypes
    assert all(param.grad is None or param.grad.dtype in dtypes for param in params)
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        optimizer.step()  # With the optimizer of before, on the gradients of before.
        optimizer.zero_grad()
        each.eval()
        train(each, optimizer, 0)
    assert_equal(model, plain, "later")


@pytest.mark.ranks(2, 3)
def test_a_model_converted_later_trains_as_one_converted_before():
    """Converted and trained: as if the model had been converted before it was sharded."""
    rank = group_of().rank
    for number, (name, layout) in enumerate(itertools.product(CONVERSIONS, LAYOUTS)):
        if number % 2 != group_of().size % 2:
            continue
        convert, kwargs = CONVERSIONS[name], LAYOUTS[layout]
        expected = sharded(convert(Model()), ["head", ""], **kwargs)
        model = sharded(Model(), ["head", ""], **kwargs)
        optimizer = adam(model)
        model.eval()
        model(noise(4, 3))  # So that there is something to be stale.
        convert(model)
        expected.eval()
        train(expected, adam(expected), rank)
        train(model, optimizer, rank)
        assert_equal(model, expected, f"{name}, {layout}")
        shards = [shard_of(param) for param in model.parameters()]
        assert None not in shards and shards == [shard_of(param) for param in expected.parameters()]
    model = sharded(Model(), ["head", ""])
    with model.no_sync():
        model(noise(4, 3, seed=rank)).sum().backward()
    model.double()  # Gradients that wait for their reduction go along.
    model(noise(4, 3, seed=rank).double()).sum().backward()
    grad, piece = model.head.bias.grad, shard_of(model.head.bias)
    half = copy.deepcopy(model)
    half(noise(4, 3, seed=rank).double()).sum().backward()
    assert torch.allclose(grad, 2 * half.head.bias.grad, rtol=1e-5)
    assert local_tensor(grad).shape[0] == piece.stop - piece.start


def test_modules_that_list_their_weights_twice_are_converted():
    torch.manual_seed(2)
    plain = nn.LSTM(3, 4)
    model = fully_shard(copy.deepcopy(plain))
    for each in (plain, model):
        each.double()
    x = noise(5, 2, 3).double()
    assert torch.equal(model(x)[0], plain(x)[0])
    assert model.weight_hh_l0 is model._flat_weights[1]


def test_a_policy_and_a_conversion_go_together():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(nn.Linear(3, 3), mp_policy=policy)
    model.double()
    assert model.weight.dtype == torch.float64
    assert model(noise(4, 3)).dtype == torch.float32
    assert units_in(model)[0].buffers[0].compute_dtype == torch.bfloat16


def test_to_another_device_the_parameters_go_as_shards():
    model, plain = fully_shard(Model()), Model()
    optimizer = adam(model)
    model.to("meta")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert not any(param is optimizer.param_groups[0]["params"][0] for param in model.parameters())  # As torch does it.
    model.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert torch.equal(model(noise(4, 3)), plain(noise(4, 3)))


@pytest.mark.simulation
def test_a_model_goes_to_the_device_and_computes_there():
    with simulate(rank=0, world_size=2, device="sim") as simulation:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        for module in (model[0], model):
            fully_shard(module)
        model(torch.ones(3, 4)).sum().backward()
        model.to(simulation.device)
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"sim"}
        assert {param.grad.device.type for param in model.parameters()} == {"sim"}
        assert model(torch.ones(3, 4, device=simulation.device)).device.type == "sim"
        offloaded = fully_shard(nn.Linear(4, 8), offload_policy=CPUOffloadPolicy())
        message = r"kept on the host by offload_policy=CPUOffloadPolicy\(\), and can't go to sim"
        with pytest.raises(RuntimeError, match=message):
            offloaded.to(simulation.device)
        offloaded.half().cpu()
        assert offloaded.weight.device.type == "cpu"
        assert offloaded.weight.dtype == torch.float16
        assert offloaded(torch.ones(3, 4, device=simulation.device, dtype=torch.float16)).device.type == "sim"


@pytest.mark.parametrize("around", ["itself", "wrapper", "parent"])
def test_a_conversion_in_use_is_refused_and_changes_nothing(around):
    model = fully_shard(Model())
    outer = {"itself": model, "wrapper": FullyShardedDataParallel(Model()), "parent": nn.Sequential(model)}[around]
    model = outer.module if around == "wrapper" else model
    before = [param.detach().clone() for param in outer.parameters()]

    def convert(*_: object) -> None:
        with pytest.raises(RuntimeError, match=r"to\(\), half\(\) and the like: .* in use, by a forward"):
            outer.half()

    handle = model.norm.register_forward_pre_hook(convert)
    outer(noise(4, 3)).sum()
    handle.remove()
    with model.no_sync(), pytest.raises(RuntimeError, match=r"between a forward and its backward, or inside no_sync"):
        outer.half()
    assert_equal([*outer.parameters()], before)
    loss = outer(noise(4, 3)).sum()
    outer.double()
    with pytest.raises(RuntimeError, match=r"changed between its forward and its backward, .* a conversion"):
        loss.backward()


def test_a_module_converted_past_its_unit_is_named():
    model = fully_shard(Model())
    model.head.half()
    with pytest.raises(
        RuntimeError, match=r"'head.weight' of the root unit has different memory than when it was sharded"
    ):
        model(noise(4, 3))
