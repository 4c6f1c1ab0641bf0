"""Saved tensors that leave: which do, and that a step with them is that of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from scale_checkpoint import checkpoint_wrapper, offload_activations
from scale_checkpoint.live_memory import LiveMemory
from scale_checkpoint.offload.offload import Sender
from scale_checkpoint_cases import differing


def test_what_stays_where_it_is() -> None:
    layer = nn.Linear(64, 64)
    send = Sender([layer], "host", 1000).send
    large = torch.randn(64, 64)
    stays = {
        "a parameter": layer.weight,
        "a view of a parameter": layer.weight.t(),
        "small": torch.randn(8),
        "a piece of something large": large[0],
        "sparse": large.to_sparse(),
        "meta": torch.empty(64, 64, device="meta"),
        "conjugated": torch.randn(64, 64, dtype=torch.complex64).conj(),
    }
    assert {name for name, tensor in stays.items() if send(tensor) is not None} == set()
    assert send(large) is not None


class Counted(nn.Linear):
    """Counts the calls of `parameters`."""

    num_calls = 0

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        self.num_calls += 1
        return super().parameters(recurse)


def test_parameters_are_looked_up_once_for_all_saved_tensors() -> None:
    layer = Counted(64, 64)
    sender = Sender([layer], "host", 1000)
    for tensor in (torch.randn(64, 64), layer.weight, torch.randn(64, 64)):
        assert (sender.send(tensor) is None) == (tensor is layer.weight)
    assert layer.num_calls == 1


def test_the_context_frees_the_device_and_changes_nothing() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Softmax(-1))
    ours = copy.deepcopy(plain)
    x = torch.randn(128, 64)
    kept = {}
    for name, model in {"plain": plain, "ours": ours}.items():
        with LiveMemory(torch.device("cpu")) as live:
            if name == "ours":
                with offload_activations(model, min_bytes=1):
                    loss = model(x).square().sum()
            else:
                loss = model(x).square().sum()
            kept[name] = live.current_bytes
        live.close()
        loss.backward()
    assert differing([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()]) == []
    assert kept["ours"] < 100 < 100_000 < kept["plain"]


def test_boundary_inputs_of_checkpointed_modules_leave_too() -> None:
    x = torch.randn(128, 64, requires_grad=True)
    kept = []
    for offload in (False, True):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        for block in model:
            checkpoint_wrapper(block, offload_to_cpu=offload, min_bytes=1)
        with LiveMemory(torch.device("cpu")) as live:
            loss = model(x * 1).sum()
            kept.append(live.current_bytes)
        live.close()
        loss.backward()
    assert kept[0] >= 4 * x.nbytes and kept[1] < x.nbytes


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r'offload_to: expected "host" or a folder, got \'disk\''):
        offload_activations(to="disk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_bytes: expected 0 or more, got -1"):
        offload_activations(min_bytes=-1)
