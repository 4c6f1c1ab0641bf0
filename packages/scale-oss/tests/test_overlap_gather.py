"""The overlap of the all-gather: whatever a module computes with, reads or loads has arrived before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event
from scale_oss.sharded_ddp import RootGatherWait, register_gather_waits


class OnItsWay:
    """A bucket of one parameter, which is not a number until it was waited for."""

    def __init__(self, param: nn.Parameter) -> None:
        self.params, self.value = [param], param.detach().clone()
        self.gather_event, self.is_gathering = Event("parameters", "bucket"), False

    def send(self) -> None:
        self.is_gathering = True
        self.params[0].data.fill_(torch.nan)

    def wait(self, limit_seconds: float | None = None) -> None:
        if self.is_gathering:
            self.is_gathering = False
            self.params[0].data.copy_(self.value)


class Reader(nn.Module):
    """Reads a layer's weight past it, on demand, and has parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scales = nn.Linear(4, 4), nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.reads = True

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.layer.weight, self.layer.bias) if self.reads else self.layer(x)
        return y * self.scales[0]


def followed(model: nn.Module) -> list[OnItsWay]:
    buckets: list[Any] = [OnItsWay(param) for param in model.parameters()]
    waits = register_gather_waits(model, buckets, Contract(Group()))
    model.register_forward_pre_hook(RootGatherWait(waits))
    return buckets


def hooked() -> nn.Module:
    """A hook that was there before ours computes with its module's parameters, as weight norm does."""
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0] * layer.weight.sum(),))
    return nn.Sequential(layer, nn.Linear(4, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4))),
    "what reads past its layers": Reader,
    "torch's transformer": lambda: nn.Sequential(
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        nn.LSTM(4, 4, batch_first=True),
    ),
    "parametrized": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
    "with hooks": hooked,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_with_what_has_arrived(name: str) -> None:
    model = MODELS[name]()
    buckets = followed(model)
    x = torch.ones(1, 3, 4)
    for training in (True, True, False):  # Without gradients, torch's transformer takes another way.
        model.train(training)
        with torch.set_grad_enabled(training):
            expected = model(x)
            for bucket in buckets:
                bucket.send()
            found = model(x)
        for one, other in zip(tensors(found), tensors(expected), strict=True):
            assert torch.equal(one, other)
        assert not any(bucket.is_gathering for bucket in buckets)


def tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [each for part in output for each in tensors(part)]


def test_what_runs_by_itself_is_waited_for_there_and_not_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    buckets = followed(model)
    seen: list[list[bool]] = []
    model[0].register_forward_hook(lambda *_: seen.append([bucket.is_gathering for bucket in buckets]))
    for _ in range(2):
        for bucket in buckets:
            bucket.send()
        model(torch.ones(1, 4))
    assert seen == [[False] * 4, [False, False, True, True]]  # In the first pass nobody had seen them run.


def test_a_copy_waits_for_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    buckets = followed(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        buckets[0].send()
        assert copied(torch.ones(1, 4)).isfinite().all() and copied.state_dict() and buckets[0].is_gathering
        buckets[0].wait()
