"""fsdp_module.py: gather, release, fetch ahead and leave unreduced by hand, as FSDP2's users do."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from shard_arguments import shard_arguments
from torch import Tensor, nn

from scale_check.exact import gather_values
from scale_core.comm.group import group_of
from scale_core.comm.subgroups import subgroup_of
from scale_core.errors import StepError
from scale_core.flat.buffer import FlatBuffer, State
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import ShardOptions, fully_shard
from scale_fsdp.runtime.unit import unit_of, units_in


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))


def sharded(plain: nn.Sequential, **kwargs: Any) -> nn.Sequential:
    model = copy.deepcopy(plain)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **shard_arguments(**kwargs))
    return fully_shard(model, **shard_arguments(**kwargs))


def data(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def plain_grads(plain: nn.Module, steps: list[int], size: int) -> list[Tensor]:
    """Each rank's gradients of the micro-batches summed, then averaged in rank order."""
    totals = []
    for rank in range(size):
        plain.zero_grad()
        for step in steps:
            plain(data(step, rank)).square().mean().backward()
        totals.append([param.grad.clone() for param in plain.parameters() if param.grad is not None])
    return [sum(grads[1:], grads[0]) / size for grads in zip(*totals, strict=True)]


def my_part(model: nn.Module, wholes: list[Tensor]) -> list[Tensor]:
    spans = [span for unit in units_in(model) for buffer in unit.buffers for span in buffer.spans]
    return [
        whole.reshape(-1)[span.start : span.stop].view(span.shape) for whole, span in zip(wholes, spans, strict=True)
    ]


class SGDOfItsOwn(torch.optim.Optimizer):
    """Leaves out what is empty on this rank, or writes to `param.data`, which counts no versions."""

    def __init__(self, params: Iterable[Tensor], *, by_data: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.by_data = by_data

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None and param.numel():
                (param.data if self.by_data else param).add_(param.grad, alpha=-0.1)


def with_a_layer_of_one_element() -> tuple[nn.Sequential, nn.Sequential]:
    """A model as it is, and sharded: rank 0 alone has the last layer's one element."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 1, bias=False))
    return plain, sharded(plain, limit_seconds=10.0)


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.ranks(2, in_turn=True)
def test_units_are_gathered_again_after_steps_in_hooks(by_data: bool) -> None:
    """A kept full parameter is gathered anew after optimizers have stepped in hooks on shards."""
    plain, model = with_a_layer_of_one_element()
    model.set_reshard_after_backward(False)
    for each in (plain, model):
        optimizers = {param: SGDOfItsOwn([param], by_data=by_data) for param in each.parameters()}

        def step(param: Tensor, optimizers: dict[Tensor, SGDOfItsOwn] = optimizers) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in each.parameters():
            param.register_post_accumulate_grad_hook(step)
    x = torch.ones(2, 4)
    for _ in range(3):
        for each in (plain, model):
            each(x).square().mean().backward()
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))


@pytest.mark.ranks(3)
def test_steps_on_a_model_of_some_ranks_leave_others_gathered() -> None:
    """Ranks 0 and 1 train another model beside one of all ranks that is kept unsharded."""
    size = 2
    torch.manual_seed(0)
    everyone = group_of()
    actor = fully_shard(nn.Linear(4, 4, bias=False), options=ShardOptions(limit_seconds=10.0))
    few = subgroup_of(everyone, range(size))
    x = torch.ones(2, 4)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        actor.unshard()
        if everyone.rank < size:
            critic = fully_shard(nn.Linear(4, 2), few, options=ShardOptions(limit_seconds=10.0))
            critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
            critic(x).square().mean().backward()
            critic_optimizer.step()
        loss = actor(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    first, *others = gather_values(found)
    assert first[0] > first[1]
    assert all(other == first for other in others)


def states(model: nn.Sequential) -> list[bool]:
    return [unit_of(model[number]).gathered for number in (0, 2, 4)]


@pytest.mark.ranks(1, 2, 3)
def test_an_unsharded_unit_stays_until_it_is_released() -> None:
    plain = layers()
    model = sharded(plain)
    first = model[0]
    first.unshard()
    assert torch.equal(first.weight, plain[0].weight)
    x = torch.ones(2, 3)
    assert torch.equal(first.forward(x), plain[0](x))  # Past the unit's call, which is allowed now.
    assert torch.equal(first.weight, plain[0].weight)  # Still whole.
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert any(first.weight is param for param in units_in(first)[0].buffers[0].sharded_params)  # The pass released it.
    first.unshard()
    handle = model[2].unshard(async_op=True)
    assert handle is not None
    handle.wait()
    assert torch.equal(model[2].weight, plain[2].weight)
    too_early = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data(0, group_of().rank)).square().mean().backward()
    match = r"parameters were unsharded, by unshard\(\) or summon_full_params\(\): its '0.weight' is a copy"
    with pytest.raises(RuntimeError, match=match):
        too_early.step()
    expected = plain_grads(plain, [0], group_of().size)
    for unit in units_in(model):
        assert all(buffer.state is State.SHARDED for buffer in unit.buffers) or group_of().size == 1
    for param, grad in zip(model.parameters(), my_part(model, expected), strict=True):
        assert param.grad is not None and torch.equal(local_tensor(param.grad), grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first.unshard()
    optimizer.step()
    for param, grad in zip(plain.parameters(), expected, strict=True):
        param.grad = grad
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))  # What was whole before the step was gathered anew.
    first.reshard()
    assert first.weight.numel() <= 15
    first.set_reshard_after_backward(False)
    model(data(1, group_of().rank)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    first.unshard()  # It is gathered still, from before the step.
    with torch.no_grad():
        shown = first.weight.clone()
    first.reshard()
    assert torch.equal(shown, model.state_dict()["0.weight"])


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.ranks(2, in_turn=True)
def test_all_ranks_gather_again_after_a_step(by_data: bool, keeps: bool) -> None:
    """The layer of one element is unsharded, or kept so, while an optimizer steps."""
    plain, model = with_a_layer_of_one_element()
    model[1].set_reshard_after_backward(not keeps)
    optimizers = [SGDOfItsOwn(each.parameters(), by_data=by_data) for each in (plain, model)]
    x = torch.ones(2, 4)
    for _ in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            if each is model and not keeps:
                model[1].unshard()
            optimizer.step()
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
    assert local_tensor(model[1].weight).numel() == (group_of().rank == 0) or keeps


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.ranks(2, in_turn=True)
def test_a_rank_without_memory_to_unshard_raises_on_all_ranks(inside: bool) -> None:
    """Rank 1 has no memory for the second of a layer's two buffers."""
    plain, limit = layers(), 120.0
    plain[0].bias.data = plain[0].bias.data.half()
    plain[0].forward = lambda x: x @ plain[0].weight.t()  # type: ignore[method-assign]
    model = copy.deepcopy(plain)
    model[0].forward = lambda x: x @ model[0].weight.t()  # type: ignore[method-assign]
    for layer in model[::2]:
        fully_shard(layer, options=ShardOptions(limit_seconds=limit))
    fully_shard(model, options=ShardOptions(limit_seconds=limit))
    first, x = model[0], torch.ones(2, 3)
    model(x)
    unit, begun, own = unit_of(first), time.monotonic(), FlatBuffer.allocate

    def allocate(buffer: FlatBuffer) -> None:
        if buffer is unit.buffers[1] and group_of().rank == 1:
            raise torch.OutOfMemoryError("no memory to unshard")
        own(buffer)

    def unshard(*_: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FlatBuffer, "allocate", allocate)
            first.unshard(async_op=True)

    hook = model.register_forward_pre_hook(unshard)
    with pytest.raises((torch.OutOfMemoryError, StepError)) as raised:
        model.eval()(x) if inside else unshard()
    assert time.monotonic() - begun < limit / 2
    assert not unit.kept_unsharded and not any(buffer.full.untyped_storage().nbytes() for buffer in unit.buffers)
    hook.remove()
    first.unshard()
    assert torch.equal(first.weight, plain[0].weight) and torch.equal(model(x), plain(x))
    first, second = gather_values(f"{type(raised.value).__name__}: {raised.value}")
    assert first.startswith("StepError: ") and "because rank 1 failed" in first and "no memory to unshard" in first
    assert second.startswith("OutOfMemoryError: no memory to unshard")


@pytest.mark.ranks(2)
def test_gradients_of_a_unit_can_be_left_unreduced() -> None:
    """Switched off for one unit and two micro-batches, its gradients wait; the others are reduced each time."""
    plain, size, rank = layers(), group_of().size, group_of().rank
    model = sharded(plain)
    model[2].set_requires_gradient_sync(False)
    model(data(0, rank)).square().mean().backward()
    assert model[2].weight.grad is None and model[0].weight.grad is not None
    with pytest.raises(RuntimeError, match="have not been reduced"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model[2].set_requires_gradient_sync(True)
    model(data(1, rank)).square().mean().backward()
    together, apart = plain_grads(plain, [0, 1], size), [plain_grads(plain, [step], size) for step in (0, 1)]
    for index, (param, grad) in enumerate(zip(model.parameters(), my_part(model, together), strict=True)):
        if index not in (2, 3):
            grad = my_part(model, [one + two for one, two in zip(*apart, strict=True)])[index]
        assert param.grad is not None and torch.equal(local_tensor(param.grad), grad), index
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(data(0, rank)).square().mean().backward()
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_gradient_sync(True)
    model(data(1, rank)).square().mean().backward()
    for param, grad in zip(model.parameters(), my_part(model, together), strict=True):
        assert param.grad is not None and torch.equal(local_tensor(param.grad), grad)


@pytest.mark.ranks(2)
def test_resharding_can_be_switched_between_passes() -> None:
    model = sharded(layers())
    x = data(0, group_of().rank)
    for _ in range(2):
        loss = model(x).sum()
        assert states(model) == [False] * 3
        loss.backward()
    model.set_reshard_after_forward(False)
    loss = model(x).sum()
    assert states(model) == [True] * 3
    loss.backward()
    assert states(model) == [False] * 3
    model[2].set_reshard_after_backward(False)
    model(x).sum().backward()
    assert states(model) == [False, True, False]
    model.set_reshard_after_forward(True).set_reshard_after_backward(True)
    model(x).sum().backward()
    assert states(model) == [False] * 3


@pytest.mark.ranks(2)
def test_modules_named_by_hand_are_fetched_ahead() -> None:
    """The last layer is on its way as soon as the first one runs, in the very first pass."""
    model = sharded(layers())
    model[0].set_modules_to_forward_prefetch([model[4]])
    model[4].set_modules_to_backward_prefetch([model[0]])
    seen: dict[str, list[bool]] = {}
    model[0].register_forward_hook(lambda *_: seen.setdefault("forward", states(model)) and None)
    output = model(data(0, group_of().rank))
    model[2].register_full_backward_hook(lambda *_: seen.setdefault("backward", states(model)) and None)
    output.sum().backward()
    assert seen["forward"][2] and not seen["forward"][1]


@pytest.mark.ranks(1, 2)
def test_a_unit_that_runs_by_itself_fetches_nothing_of_the_rest() -> None:
    model, x = sharded(layers()), torch.ones(2, 3)
    for _ in range(2):
        model[0].set_modules_to_forward_prefetch([model[2]])
        model[0].set_modules_to_backward_prefetch([model[2]])
        model[0](x).sum().backward()  # Before the model, and after a change from which it has not run yet.
        copy.deepcopy(model[0])(x).sum().backward()
        model(x).sum().backward()
        model.double()
        x = x.double()


def test_a_unit_of_another_model_is_not_fetched() -> None:
    model, other = sharded(layers()), sharded(layers())
    model[0].set_modules_to_forward_prefetch([other[2]])
    with pytest.raises(ValueError, match=r"unit '0' was told to prefetch a Linear that is not in this model"):
        model(data(0, 0))


def test_a_module_that_is_no_unit_is_refused() -> None:
    model = sharded(layers())
    with pytest.raises(ValueError, match="set_modules_to_forward_prefetch: this Tanh is not an FSDP unit"):
        model[0].set_modules_to_forward_prefetch([model[1]])
