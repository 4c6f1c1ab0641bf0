"""Scripts as people write them for DDP end with the same numbers when only the lines that wrap the model change.

A script gets `wrap`, which makes the model and its optimizer, and returns the numbers that it ends with.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel

STEPS = 4
Result = dict[str, Tensor]


class Clip(nn.Module):
    """Two towers and a temperature; two ranks divide none of the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.image = nn.Linear(9, 3)
        self.logit_scale = nn.Parameter(torch.tensor([4.5]))

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        features = self.text(text) @ self.image(image).T
        output: Tensor = features * self.logit_scale.exp()
        return output


class Wrap(Protocol):
    """Makes the model that is called and its optimizer."""

    def __call__(self, net: nn.Module, optim: type[Optimizer], **options: Any) -> tuple[nn.Module, Optimizer]: ...


def in_ddp(net: nn.Module, optim: type[Optimizer], **options: Any) -> tuple[nn.Module, Optimizer]:
    model = DistributedDataParallel(net)
    return model, optim(model.parameters(), **options)


def in_fully_shard(net: nn.Module, optim: type[Optimizer], **options: Any) -> tuple[nn.Module, Optimizer]:
    fully_shard(net)
    return net, optim(net.parameters(), **options)


def in_sharded_ddp(net: nn.Module, optim: type[Optimizer], **options: Any) -> tuple[nn.Module, Optimizer]:
    optimizer = OSS(net.parameters(), optim, **options)
    return ShardedDataParallel(net, optimizer), optimizer


WRAPS: dict[str, Wrap] = {"ddp": in_ddp, "fully_shard": in_fully_shard, "sharded_ddp": in_sharded_ddp}


def network() -> Clip:
    torch.manual_seed(0)
    return Clip().double()


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    text, image = (torch.randn(4, size, generator=generator, dtype=torch.float64) for size in (5, 9))
    logits = model(text, image)
    return nn.functional.cross_entropy(logits / 100, torch.arange(4)) + logits.square().mean() / 1e4


def weights(model: nn.Module, net: nn.Module) -> Result:
    model.state_dict()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def steps(model: nn.Module, optimizer: Optimizer) -> Iterator[int]:
    """Trains, and yields the number of each step that has been taken."""
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


# Averages.


def average_by_hand(wrap: Wrap) -> Result:
    net = network()
    model, optimizer = wrap(net, AdamW, lr=0.1)
    averages = [param.detach().clone() for param in model.parameters()]
    for _ in steps(model, optimizer):
        with torch.no_grad():
            for average, param in zip(averages, model.parameters(), strict=True):
                average.mul_(0.9).add_(param, alpha=0.1)
    with torch.no_grad():
        for average, param in zip(averages, model.parameters(), strict=True):
            param.copy_(average)
    return weights(model, net)


def average_in_a_dict(wrap: Wrap) -> Result:
    net = network()
    model, optimizer = wrap(net, AdamW, lr=0.1)
    shadow = {name: param.data.clone() for name, param in net.named_parameters() if param.requires_grad}
    for _ in steps(model, optimizer):
        for name, param in net.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * param.data
    backup = {}
    for name, param in net.named_parameters():
        backup[name] = param.data
        param.data = shadow[name]
    averaged = weights(model, net)
    for name, param in net.named_parameters():
        param.data = backup[name]
    return averaged


def average_of_a_copy_by_state_dict(wrap: Wrap) -> Result:
    net = network()
    average = copy.deepcopy(net)
    model, optimizer = wrap(net, AdamW, lr=0.1)
    for _ in steps(model, optimizer):
        state = weights(model, net)
        for name, value in average.state_dict().items():
            value.mul_(0.9).add_(state[name], alpha=0.1)
    return weights(average, average)


def averaged_model(wrap: Wrap) -> Result:
    net = network()
    model, optimizer = wrap(net, SGD, lr=0.1)
    average = [param.detach().clone() for param in net.parameters()]
    for step in steps(model, optimizer):
        torch._foreach_lerp_(average, [param.detach() for param in net.parameters()], 1 / (step + 2))
    with torch.no_grad():
        torch._foreach_copy_([*net.parameters()], average)
    return weights(model, net)


def average_swapped_by_data(wrap: Wrap) -> Result:
    """A class of averages, as many programs copy it: the weights go and come back by `param.data`."""
    net = network()
    model, optimizer = wrap(net, AdamW, lr=0.1)
    shadow = {name: param.data.clone() for name, param in net.named_parameters()}
    for step in steps(model, optimizer):
        backup = {}
        for name, param in net.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * param.data
            backup[name] = param.data
            param.data = shadow[name]
        with torch.no_grad():
            loss_of(model, step)
        for name, param in net.named_parameters():
            param.data = backup[name]
    return weights(model, net)


# Losses of weights, and hooks.


def norms_at_zero(wrap: Wrap) -> Result:
    """A norm has no derivative at 0, where torch gives 0."""
    net = network()
    nn.init.zeros_(net.image.bias)
    nn.init.ones_(net.text[0].bias)
    model, optimizer = wrap(net, SGD, lr=0.1)
    for step in range(STEPS):
        spread = net.text[0].bias.std() if step == 0 else 0.0
        (loss_of(model, step) + 0.01 * sum(param.norm() for param in net.parameters()) + 0.01 * spread).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model, net)


def elastic_weights(wrap: Wrap) -> Result:
    """EWC: squares of gradients weigh how far parameters go (arXiv 1612.00796)."""
    net = network()
    model, optimizer = wrap(net, SGD, lr=0.1)
    loss_of(model, 0).backward()
    fisher = [100 * param.grad.detach() ** 2 for param in model.parameters() if param.grad is not None]
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    for step in range(1, STEPS):
        rows = zip(fisher, model.parameters(), before, strict=True)
        (loss_of(model, step) + sum((weight * (param - old) ** 2).sum() for weight, param, old in rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model, net)


def learned_decay(wrap: Wrap) -> Result:
    """A factor outside of the model trains with it; its gradient comes from the full parameters."""
    net = network()
    factor = torch.full((), 0.1, dtype=torch.float64, requires_grad=True)
    model, optimizer = wrap(net, SGD, lr=0.1)
    for step in range(STEPS):
        (loss_of(model, step) + sum((factor * param**2).sum() for param in net.parameters())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert factor.grad is not None
    return {**weights(model, net), "factor": factor.grad}


def clipped_in_a_hook(wrap: Wrap) -> Result:
    """A hook of the step clips, and another one logs."""
    net = network()
    model, optimizer = wrap(net, AdamW, lr=0.1)
    log = []

    def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = [*net.parameters()]
        norm = torch.stack([param.grad.norm() for param in params if param.grad is not None]).norm()
        for param in params:
            if param.grad is not None:
                param.grad.mul_(0.01 / norm)
        log.append(norm)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda *_: log.append(sum(param.detach().norm() for param in net.parameters())))
    for _ in steps(model, optimizer):
        pass
    return {**weights(model, net), "log": torch.stack(log)}


# Two passes for one step.


def sharpness_aware(wrap: Wrap) -> Result:
    """SAM: the gradient at the worst point near the weights (arXiv 2010.01412)."""
    net = network()
    model, optimizer = wrap(net, SGD, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss_of(model, step).backward()
        with torch.no_grad():
            norms = [param.grad.norm(2) for param in model.parameters() if param.grad is not None]
            scale = 0.05 / (torch.stack(norms).norm(2) + 1e-12)
            moves = []
            for param in model.parameters():
                move = param.grad * scale
                param.add_(move)
                moves.append(move)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            for param, move in zip(model.parameters(), moves, strict=True):
                param.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model, net)


def projected_gradients(wrap: Wrap) -> Result:
    """PCGrad: of two tasks' gradients that conflict each loses its part along the other (arXiv 2001.06782)."""
    net = network()
    model, optimizer = wrap(net, SGD, lr=0.1)
    for step in range(STEPS):
        tasks = []
        for task in (0, 1):
            optimizer.zero_grad()
            ((-1) ** task * loss_of(model, step + 10 * task)).backward()
            tasks.append([param.grad.clone() for param in model.parameters()])
        product = sum((one * two).sum() for one, two in zip(*tasks, strict=True))
        merged = [one + two for one, two in zip(*tasks, strict=True)]
        if product < 0:
            lengths = [sum(grad.square().sum() for grad in grads) for grads in tasks]
            merged = [
                one - product / lengths[1] * two + two - product / lengths[0] * one
                for one, two in zip(*tasks, strict=True)
            ]
        for param, grad in zip(model.parameters(), merged, strict=True):
            param.grad = grad
        optimizer.step()
    return weights(model, net)


# Optimizers of one's own.


class Lamb(Optimizer):
    """LAMB as in its paper (arXiv 1904.00962), without correction of the bias."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                mean = state["exp_avg"].mul_(0.9).add_(param.grad, alpha=0.1)
                square = state["exp_avg_sq"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
                update = mean / (square.sqrt() + 1e-6)
                if param.ndim > 1:
                    update = update + group["weight_decay"] * param
                weight_norm, update_norm = param.norm(), update.norm()
                ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
                param.sub_(group["lr"] * ratio * update)


def lamb_by_hand(wrap: Wrap) -> Result:
    net = network()
    model, optimizer = wrap(net, Lamb)
    for _ in steps(model, optimizer):
        pass
    return weights(model, net)


# Gradients between the backward pass and the step.


def edited(edit: Callable[[nn.Module, int], None], optim: type[Optimizer] = SGD) -> Callable[[Wrap], Result]:
    def script(wrap: Wrap) -> Result:
        net = network()
        model, optimizer = wrap(net, optim, lr=0.1)
        for step in range(STEPS):
            loss_of(model, step).backward()
            with torch.no_grad():
                edit(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model, net)

    return script


def add_noise(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.add_(torch.randn_like(param.grad) * 0.1 / (1 + step) ** 0.55)


def scale_by_tokens(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(1 / (step + 2))


def clip_each(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            limit = 0.01 * param.norm().clamp(min=1e-3)
            param.grad.mul_((limit / (param.grad.norm() + 1e-6)).clamp(max=1.0))


def clip_all(model: nn.Module, step: int) -> None:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    total = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    for grad in grads:
        grad.mul_(torch.clamp(0.05 / (total + 1e-6), max=1.0))


def centralize(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None and param.grad.dim() > 1:
            param.grad.sub_(param.grad.mean(dim=tuple(range(1, param.grad.dim())), keepdim=True))


def drop_infinities(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.masked_fill_(param.grad.abs() < 1e-3, 0.0)


# Parameters between the step and the next forward pass.


def clamped(change: Callable[[Clip], None]) -> Callable[[Wrap], Result]:
    def script(wrap: Wrap) -> Result:
        net = network()
        model, optimizer = wrap(net, SGD, lr=5.0)
        for step in range(STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                change(net)
        return weights(model, net)

    return script


def clamp_logit_scale(net: Clip) -> None:
    net.logit_scale.clamp_(0, math.log(80))


def clamp_data(net: Clip) -> None:
    net.logit_scale.data = torch.clamp(net.logit_scale.data, 0, math.log(80))


def clamp_weights(net: Clip) -> None:
    for param in net.parameters():
        param.clamp_(-0.3, 0.3)


def normalize_rows(net: Clip) -> None:
    net.image.weight.div_(net.image.weight.norm(dim=1, keepdim=True))


# Groups, counts and records.


def decay_of_matrices(wrap: Wrap) -> Result:
    net = network()
    if wrap is in_fully_shard:
        fully_shard(net)
    groups = [
        {"params": [param for param in net.parameters() if param.ndim >= 2], "weight_decay": 0.5},
        {"params": [param for param in net.parameters() if param.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer: Optimizer = OSS(groups, AdamW, lr=0.1) if wrap is in_sharded_ddp else AdamW(groups, lr=0.1)
    models = {in_ddp: DistributedDataParallel, in_sharded_ddp: lambda net: ShardedDataParallel(net, optimizer)}
    model = models[wrap](net) if wrap in models else net  # type: ignore[index]
    for _ in steps(model, optimizer):
        pass
    return weights(model, net)


def numbers_for_a_log(wrap: Wrap) -> Result:
    net = network()
    model, optimizer = wrap(net, SGD, lr=0.1)
    log = []
    for step in range(STEPS):
        loss_of(model, step).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        log.append(float(torch.stack([grad.norm() for grad in grads]).norm()))
        optimizer.step()
        optimizer.zero_grad()
        params = [*model.parameters()]
        log.append(float(torch.stack([param.detach().norm() for param in params]).norm()))
        log.append(max(param.detach().abs().max().item() for param in params))
        log.append(sum(param.detach().sum().item() for param in params))
        log.append(float(sum(param.numel() for param in params)))
        log.append(float(sum(math.prod(param.shape) for param in params)))
        log.append(float(params[1].detach().mean()))
        log.append(float(params[1].detach().std()))
    return {"log": torch.tensor(log, dtype=torch.float64)}


SCRIPTS: dict[str, Callable[[Wrap], Result]] = {
    **{
        script.__name__: script
        for script in (
            *(average_by_hand, average_in_a_dict, average_of_a_copy_by_state_dict, averaged_model),
            *(sharpness_aware, projected_gradients, lamb_by_hand, decay_of_matrices, numbers_for_a_log),
            *(average_swapped_by_data, norms_at_zero, elastic_weights, learned_decay, clipped_in_a_hook),
        )
    },
    **{
        edit.__name__: edited(edit)
        for edit in (add_noise, scale_by_tokens, clip_each, clip_all, centralize, drop_infinities)
    },
    **{change.__name__: clamped(change) for change in (clamp_logit_scale, clamp_data, clamp_weights, normalize_rows)},
}


@pytest.mark.parametrize("wrap", ["fully_shard", "sharded_ddp"])
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.ranks(2, in_turn=True)
def test_a_script_for_ddp_ends_with_the_same_numbers(name: str, wrap: str) -> None:
    expected, result = SCRIPTS[name](WRAPS["ddp"]), SCRIPTS[name](WRAPS[wrap])
    expected = {key.removeprefix("module."): value for key, value in expected.items()}
    assert set(result) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value, rtol=0, atol=1e-12)
