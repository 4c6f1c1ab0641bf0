"""The averaged gradient of `ShardedDataParallel` as `param.grad`: the optimizer uses what a program makes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.comm.group import group_of
from scale_core.sharded_tensor.replicated_parameter import ReplicatedParameter
from scale_core.sharded_tensor.tensor import ShardedTensor
from scale_oss import OSS, OSSOptions, ShardedDataParallel


def net() -> nn.Sequential:
    """Parameters of which a rank has rows, elements, or nothing; with small integers, so that sums are exact."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1, bias=False), nn.Linear(1, 2)).double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape))
    return model


def data(rank: int, step: int) -> Tensor:
    return torch.randint(-2, 3, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank)).double()


def scale(params: Sequence[nn.Parameter], step: int) -> None:
    for param in params:
        if param.grad is not None:
            param.grad.mul_(0.5)


def scale_data(params: Sequence[nn.Parameter], step: int) -> None:
    for param in params:
        if param.grad is not None:
            param.grad.data = param.grad.data * 0.5


def assign(params: Sequence[nn.Parameter], step: int) -> None:
    for param in params:
        assert param.grad is not None
        param.grad = param.grad * 2 + param.grad.abs()


def drop_some(params: Sequence[nn.Parameter], step: int) -> None:
    params[step].grad = None


def noise(params: Sequence[nn.Parameter], step: int) -> None:
    for param in params:
        assert param.grad is not None
        param.grad += torch.arange(param.numel()).view(param.shape).double()


def random_noise(params: Sequence[nn.Parameter], step: int) -> None:
    torch.manual_seed(step)  # The same on all ranks.
    for param in params:
        assert param.grad is not None
        param.grad.add_(torch.randn_like(param.grad))


def mask(params: Sequence[nn.Parameter], step: int) -> None:
    for param in params:
        assert param.grad is not None
        param.grad[param.grad > 0] = 0.0


def masked_fill(params: Sequence[nn.Parameter], step: int) -> None:
    for param in params:
        assert param.grad is not None
        param.grad = torch.where(param.grad > 0, torch.zeros_like(param.grad), param.grad)


@torch.no_grad()
def decay(params: Sequence[nn.Parameter], step: int) -> None:
    for param in params:
        assert param.grad is not None
        param.grad.add_(param, alpha=0.25)


def clamp(params: Sequence[nn.Parameter], step: int) -> None:
    torch._foreach_clamp_min_([param.grad for param in params if param.grad is not None], -1.0)


def by_norm(params: Sequence[nn.Parameter], step: int) -> None:
    for param in params:
        assert param.grad is not None
        param.grad.div_(2.0 if param.grad.square().sum() > 100 else 1.0)


def full(params: Sequence[nn.Parameter], step: int) -> None:
    """A function that needs all of a gradient: of the full tensor, which is averaged again."""
    for param in params:
        assert param.grad is not None
        grad = param.grad.full_tensor() if isinstance(param.grad, ShardedTensor) else param.grad
        param.grad = grad.flip(0)


def surgery(params: Sequence[nn.Parameter], step: int) -> None:
    """The projection of one gradient on another."""
    grads = [param.grad for param in params]
    for grad in grads[1:]:
        assert grad is not None and grads[0] is not None
        if (grads[0].sum() * grad.sum()).item() < 0:
            grad.sub_(grad.sum())


EDITS: list[Callable[[Sequence[nn.Parameter], int], None]] = [
    *(scale, scale_data, assign, drop_some, noise, random_noise, mask),
    *(masked_fill, decay, clamp, by_norm, full, surgery),
]


@pytest.mark.ranks(2, 3)
def test_gradients_that_a_program_edits_are_those_of_ddp() -> None:
    for elementwise in (True, False):
        for edit in EDITS:
            plain = net()
            model = copy.deepcopy(plain)
            optimizer = OSS(
                model.parameters(),
                torch.optim.SGD,
                lr=2**-6,
                momentum=0.5,
                options=OSSOptions(elementwise=elementwise, bucket_numel=12),
            )
            wrapped, replica = ShardedDataParallel(model, optimizer), DistributedDataParallel(plain)
            reference = torch.optim.SGD(plain.parameters(), lr=2**-6, momentum=0.5)
            for step in range(3):
                for outer, module, each in ((wrapped, model, optimizer), (replica, plain, reference)):
                    outer(data(group_of().rank, step)).sum().backward()
                    edit(list(module.parameters()), step)
                    if edit is full and outer is wrapped:
                        wrapped.reduce()
                    each.step()
                    module.zero_grad() if step else each.zero_grad()
                    assert all(param.grad is None for param in module.parameters())
            torch.testing.assert_close(
                list(model.parameters()),
                list(plain.parameters()),
                rtol=1e-10,
                atol=1e-10,
                msg=f"{edit.__name__}, {elementwise}",
            )


@pytest.mark.ranks(3)
def test_each_rank_sees_its_part_of_the_averaged_gradient() -> None:
    """Each rank sees its part, alike in name and shape on all ranks, from the pass on until gradients are cleared."""
    plain = net()
    model = copy.deepcopy(plain)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.0)
    wrapped, replica = ShardedDataParallel(model, optimizer), DistributedDataParallel(plain)
    for outer in (wrapped, replica):
        outer(data(group_of().rank, 0)).sum().backward()
    for when in ("after the pass", "after the step"):
        for param, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(param, ReplicatedParameter) and isinstance(param.grad, ShardedTensor), when
            assert theirs.grad is not None and param.grad.shape == theirs.grad.shape == param.shape
            assert torch.equal(param.grad.full_tensor(), theirs.grad)
        optimizer.step()
    with wrapped.no_sync():
        wrapped(data(group_of().rank, 1)).sum().backward()
    assert all(type(param.grad) is Tensor for param in model.parameters())  # This rank's own, not averaged yet.
    wrapped.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    copied = copy.deepcopy(model)
    assert all(type(param) is nn.Parameter for param in copied.parameters())
    copied(data(0, 0)).sum().backward()
    assert all(type(param.grad) is Tensor for param in copied.parameters())


@pytest.mark.ranks(2)
def test_a_gradient_that_is_not_its_part_is_an_error() -> None:
    """Full tensors are this rank's own until they are averaged, and parts of other parameters don't fit."""
    model = net()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer)
    wrapped(data(group_of().rank, 0)).sum().backward()
    messages = []
    before = [param.detach().clone() for param in model.parameters()]
    params = list(model.parameters())
    other: Any = params[0].grad
    with pytest.raises(ValueError, match="divided in other places") as wrong:
        params[1].grad = other
    messages.append(str(wrong.value))
    params[0].grad = torch.zeros_like(params[0])
    with pytest.raises(RuntimeError) as unreduced:
        optimizer.step()
    messages.append(str(unreduced.value))
    optimizer.wait()
    assert all(map(torch.equal, model.parameters(), before))
    wrapped.reduce()
    optimizer.step()
    assert torch.equal(params[0], before[0]) and not torch.equal(params[1], before[1])
    wrong, unreduced = messages
    assert "parameter 1 of group 0" in wrong and "Assign what was computed from its own param.grad" in wrong
    assert "assigned as a full tensor. Call model.reduce()" in unreduced


@pytest.mark.ranks(1)
def test_on_a_single_rank_a_gradient_is_a_plain_tensor() -> None:
    """On a single rank gradients are full tensors, and what is assigned is stepped with."""
    model, plain = net(), net()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.25)
    wrapped, reference = ShardedDataParallel(model, optimizer), torch.optim.SGD(plain.parameters(), lr=0.25)
    for outer, module, each in ((wrapped, model, optimizer), (plain, plain, reference)):
        outer(data(0, 0)).sum().backward()
        for param in module.parameters():
            assert type(param.grad) is Tensor
            param.grad = param.grad * 0.5 + 1
        each.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.ranks(2)
def test_passes_add_to_an_edited_gradient() -> None:
    """Passes add to a gradient that was edited, and to one that was assigned; steps use up what was reduced."""
    plain = net()
    model = copy.deepcopy(plain)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=2**-6)
    wrapped, replica = ShardedDataParallel(model, optimizer), DistributedDataParallel(plain)
    reference = torch.optim.SGD(plain.parameters(), lr=2**-6)
    for step in range(2):
        for outer, module, each in ((wrapped, model, optimizer), (replica, plain, reference)):
            outer(data(group_of().rank, 4 * step)).sum().backward()
            scale(list(module.parameters()), step)
            outer(data(group_of().rank, 4 * step + 1)).sum().backward()
            assign(list(module.parameters()), step)
            with outer.no_sync():
                outer(data(group_of().rank, 4 * step + 2)).sum().backward()
            outer(data(group_of().rank, 4 * step + 3)).sum().backward()
            each.step()
            each.zero_grad(set_to_none=step == 0)
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-10, atol=1e-10)
