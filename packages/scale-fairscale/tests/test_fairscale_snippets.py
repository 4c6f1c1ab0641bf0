"""What FairScale's README and documentation show runs as it is, and trains as plain PyTorch does."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fairscale
from fairscale.nn import checkpoint_wrapper
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP  # noqa: N817
from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from fairscale.nn.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap, wrap
from fairscale.optim import AdaScale
from fairscale.optim.grad_scaler import ShardedGradScaler
from fairscale.optim.oss import OSS

STEPS = 3


def plain_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def reference(num_ranks: int, make_optimizer: Any, max_norm: float | None = None) -> dict[str, Tensor]:
    """The plain model on one process: gradients of the ranks' batches, averaged."""
    model = plain_model()
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            (model(inputs_of(rank, step)).square().mean() / num_ranks).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return dict(model.state_dict())


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Any, scaler: Any = None, max_norm: float | None = None) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(inputs_of(dist.get_rank(), step)).square().mean()
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        if isinstance(optimizer, OSS) and max_norm is not None:
            optimizer.clip_grad_norm(max_norm)
        elif isinstance(model, FSDP) and max_norm is not None:
            model.clip_grad_norm_(max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def assert_as_plain(weights: dict[str, Tensor]) -> None:
    torch.testing.assert_close(weights, reference(2, sgd, max_norm=0.5), rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(2)
def test_documented_oss_with_sharded_ddp_equals_plain_pytorch() -> None:
    model = plain_model()
    base_optimizer_arguments = {"lr": 0.1, "momentum": 0.9}
    base_optimizer = torch.optim.SGD
    optimizer = OSS(params=model.parameters(), optim=base_optimizer, **base_optimizer_arguments)
    model = ShardedDDP(model, optimizer)
    train(model, optimizer, max_norm=0.5)
    optimizer.consolidate_state_dict(recipient_rank=0)
    if dist.get_rank() == 0:
        state = optimizer.state_dict()
        torch.optim.SGD(plain_model().parameters(), **base_optimizer_arguments).load_state_dict(state)
    assert_as_plain(dict(model.module.state_dict()))


@pytest.mark.ranks(2)
def test_documented_fsdp_equals_plain_pytorch() -> None:
    my_auto_wrap_policy = functools.partial(default_auto_wrap_policy, min_num_params=20)
    fsdp_params = {"wrapper_cls": FSDP, "mixed_precision": False, "flatten_parameters": True}
    with enable_wrap(auto_wrap_policy=my_auto_wrap_policy, **fsdp_params):
        module = auto_wrap(plain_model())
        model = module if isinstance(module, FSDP) else wrap(module)
    assert any("flat_param_0" in name for name, _ in model.named_parameters())
    optimizer = sgd(model.parameters())
    train(model, optimizer, max_norm=0.5)
    assert_as_plain(dict(model.state_dict()))
    module = plain_model()
    module[2] = FSDP(checkpoint_wrapper(module[2]), flatten_parameters=False)
    module[0] = checkpoint_wrapper(module[0], offload_to_cpu=True)
    model = FSDP(module, move_params_to_cpu=True)
    optimizer = sgd(model.parameters())
    train(model, optimizer, scaler=ShardedGradScaler(init_scale=16.0), max_norm=0.5)
    assert_as_plain(dict(model.state_dict()))


@pytest.mark.ranks(2)
def test_documented_adascale_counts_more_steps_than_it_takes() -> None:
    model = nn.parallel.DistributedDataParallel(plain_model())
    optim = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    steps = 0.0
    for step in range(STEPS):
        optim.zero_grad()
        model(inputs_of(dist.get_rank(), step)).square().mean().backward()
        steps += optim.gain()
        optim.step()
    assert STEPS <= steps <= 2 * STEPS


def test_the_tutorial_of_pipe_equals_plain_pytorch() -> None:
    model, plain = (nn.Sequential(*list(plain_model())[:3]) for _ in range(2))
    model = fairscale.nn.Pipe(model, balance=[2, 1], chunks=4)
    device = model.devices[0]
    for each in (model, plain):
        optimizer = sgd(each.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            outputs = each(inputs_of(0, step).to(device))
            loss = nn.functional.mse_loss(outputs.to(device), torch.ones(6, 8, device=device))
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))


def test_the_version_is_read_as_programs_read_it() -> None:
    assert fairscale.__version_tuple__ >= (0, 4, 6)
    assert copy.copy(fairscale.__version__).startswith("0.4.")
