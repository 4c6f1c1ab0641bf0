"""Losses of parameters, logging and optimizers of a user's own, where a rank has no elements of a parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_check.exact import assert_equal
from scale_core.errors import ShardedTensorError
from scale_fsdp import fully_shard


def net() -> nn.Sequential:
    """The second layer's bias of two elements is on one rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).double()


@pytest.mark.ranks(2)
def test_losses_and_logs_of_parameters_are_those_of_one_process() -> None:
    def logged(model: nn.Module) -> list[float]:
        """Outside of no_grad, as people log."""
        numbers: list[Tensor] = []
        for param in model.parameters():
            numbers += [param.abs().max(), param.norm(float("inf")), param.norm(), param.std()]
            numbers.append(param.softmax(-1).square().sum())
        return [number.item() for number in numbers]

    plain, model = net(), fully_shard(net())
    gradients = []
    for each in (plain, model):
        (each[1].bias.pow(2).sum() + each[0].weight.norm()).backward()
        params = (each[1].bias, each[0].weight)
        gradients.append([getattr(param.grad, "full_tensor", lambda param=param: param.grad)() for param in params])
    with pytest.raises(ShardedTensorError, match=r"amax of 'weight'|max of .*weight'.* has no gradient"):
        model[0].weight.abs().max().backward()
    with pytest.raises(ShardedTensorError, match=r"new_tensor of .*full_tensor\(\)"):
        model[0].weight.new_tensor(model[0].weight)
    assert logged(model) == pytest.approx(logged(plain), rel=1e-12)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.ranks(2)
def test_a_trial_step_leaves_the_optimizer_as_it_was() -> None:
    class WithMask(torch.optim.Optimizer):
        """Takes the elements of a mask, where there are some, as optimizers against spikes do."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    mask = param.grad.abs() > 2 * param.grad.abs().mean()
                    if mask.sum() > 0:
                        param.grad[mask] = param.grad[mask] / 2
                    param.sub_(0.1 * param.grad)

    class Warmup:
        """Counts its calls."""

        def __init__(self) -> None:
            self.calls = 0

        def rate(self) -> float:
            self.calls += 1
            return 0.01 * self.calls

    class WithHelpers(torch.optim.Optimizer):
        """Nothing is known of its step, which has a counter and random numbers of its own."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {})
            self.warmup, self.generator = Warmup(), torch.Generator().manual_seed(3)

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> None:
            rate = self.warmup.rate() * torch.rand((), generator=self.generator).item()
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None and param.grad.norm() > 0:
                        param.sub_(rate * param.grad)

    plain, model = net(), fully_shard(net())
    for each in (plain, model):
        optimizer = WithHelpers(each.parameters())
        for step in range(3):
            each(torch.full((2, 4), 1.0 + step, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    refused = fully_shard(net())
    refused(torch.ones(2, 4, dtype=torch.float64)).square().mean().backward()
    before = {name: value.clone() for name, value in refused.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"WithMask.step\(\): getitem of .*OSS\(model.parameters\(\)"):
        WithMask(refused.parameters()).step()
    assert_equal(refused, before)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.ranks(2)
def test_a_buffer_that_shards_were_added_to_is_saved_in_full() -> None:
    class WithBuffer(nn.Module):
        """A buffer to which a program adds what it makes of gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5, dtype=torch.float64)
            self.register_buffer("fisher", torch.zeros(5, 4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x)
            return output

    torch.manual_seed(0)
    plain = WithBuffer()
    model = fully_shard(copy.deepcopy(plain))
    for each in (plain, model):
        each(torch.ones(2, 4, dtype=torch.float64)).square().mean().backward()
        with torch.no_grad():
            each.fisher += each.layer.weight.grad**2
    torch.testing.assert_close(model.state_dict()["fisher"], plain.state_dict()["fisher"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("units", ["layers", "root"])
@pytest.mark.ranks(2, in_turn=True)
def test_the_fast_path_of_an_encoder_is_that_of_the_plain_one(units: str) -> None:
    """The largest differences of outputs in eval mode, where the encoder takes its fast path, and in training."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2)
    model = copy.deepcopy(plain)
    for each in model.layers if units == "layers" else ():
        fully_shard(each)
    fully_shard(model)
    batch, padding = torch.randn(4, 3, 8), torch.tensor([[False, False, True]] * 4)
    found = []
    for each in (plain.eval(), model.eval()):
        with torch.no_grad():
            found.append(each(batch, src_key_padding_mask=padding))
    trained = [each.train()(batch, src_key_padding_mask=padding) for each in (plain, model)]
    differences = [(ours - theirs).abs().max().item() for theirs, ours in (found, trained)]
    assert max(differences) < 1e-5
