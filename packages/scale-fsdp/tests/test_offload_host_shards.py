"""Shards on the host whose copies to the device end late: nobody writes to them before that.

On a CPU every copy has ended when the call returns. Here a stream says of each that it is under way until its mark is
waited for, and tells of what was written to in between. "cpu:0" is the host under another name, so that shards move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shard_arguments import shard_arguments
from torch import Tensor, nn

import scale_core.flat.host_staged
from scale_core.device.streams import Stream
from scale_core.flat import storage
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardedEMA, fully_shard
from scale_fsdp.runtime.unit import units_in


class Late(Stream):
    """A stream whose copies are under way until its mark is waited for.

    Attributes:
        under_way: What is read by each copy, and what it held when it was begun.
        overwritten: How many copies would have read something else.
    """

    def __init__(self) -> None:
        self.under_way: list[tuple[Tensor, Tensor]] = []
        self.overwritten = 0

    def begin(self, target: Tensor, source: Tensor) -> None:
        self.under_way.append((source, source.clone()))
        target.copy_(source)

    def record(self) -> Any:
        return self

    def synchronize(self) -> None:
        self.overwritten += sum(not torch.equal(source, before) for source, before in self.under_way)
        self.under_way.clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    stream = Late()
    monkeypatch.setattr(storage, "copy_stream", lambda device, what: stream)
    monkeypatch.setattr(scale_core.flat.host_staged, "copy_into", stream.begin)
    yield stream
    stream.synchronize()
    assert stream.overwritten == 0


def sharded(dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    settings: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(), "compute_device": "cpu:0", "mp_policy": policy}
    for layer in (model[0], model[2]):
        fully_shard(layer, **shard_arguments(**settings))
    return fully_shard(model, **shard_arguments(**settings))


def run(model: nn.Module) -> Tensor:
    result: Tensor = model(torch.ones(3, 4))
    return result


def fill(model: Any) -> None:
    for param in model.parameters():
        param.data.fill_(7.0)


def zeros_like(state: Any) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in state.items()}


def loads_sharded(model: Any) -> None:
    other = sharded()
    fill(other)
    load_sharded_state_dict(sharded_state_dict(other), model)


def reads_into_the_shards(model: Any) -> None:
    """As torch.distributed.checkpoint does."""
    for value in sharded_state_dict(model).values():
        getattr(value, "tensor", value).zero_()


def swaps(model: Any) -> None:
    ema = ShardedEMA(model)
    run(model)
    for average in (ema.averages[param] for param in model.parameters()):
        average.zero_()
    with ema.swapped():
        assert run(model).abs().sum() == 0  # With gradients, so that the end of the pass waits for nothing.


def summons(model: Any) -> None:
    with model.summon_full_params():
        fill(model)


WRITERS: dict[str, Callable[[Any], object]] = {
    "loads a full state": lambda model: model.load_state_dict(zeros_like(model.state_dict())),
    "loads a local state": lambda model: model.load_local_state_dict(zeros_like(model.local_state_dict())),
    "loads a sharded state": loads_sharded,
    "reads into the shards": reads_into_the_shards,
    "swaps": swaps,
    "summons": summons,
    "initializes": lambda model: model.apply(
        lambda module: [nn.init.zeros_(param) for param in module.parameters(recurse=False)]
    ),
}


@pytest.mark.parametrize("write", WRITERS)
def test_writes_to_shards_wait_for_copies_of_a_pass(write: str, late: Late) -> None:
    model = sharded()
    run(model)  # With gradients, so that no end of a pass has waited.
    assert late.under_way, "the copies are under way"
    WRITERS[write](model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_after_an_evaluation_anybody_may_write_to_the_shards(dtype: torch.dtype | None, late: Late) -> None:
    model = sharded(dtype)
    if dtype is not None:  # A cast reads what is on the device already; before that, the copy reads the shard.
        assert units_in(model)[1].buffers[0].compute_dtype == dtype
    with torch.no_grad():
        run(model)
    assert not late.under_way
    fill(model)


def test_after_a_step_too_also_where_nothing_trains(late: Late) -> None:
    model = sharded()
    for param in model.parameters():
        param.requires_grad_(False)
    model(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert not late.under_way
    fill(model)


def test_after_a_pass_that_failed_too(late: Late) -> None:
    model = sharded()
    handle = model[2].register_forward_pre_hook(lambda module, args: 1 // 0)  # type: ignore[operator, index]
    with pytest.raises(ZeroDivisionError):
        run(model)
    handle.remove()
    assert not late.under_way
    fill(model)


def test_the_numbers_are_those_of_shards_that_stay(late: Late) -> None:
    plain, model = sharded(), sharded()
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, bare)]
    for _ in range(3):
        for each, optimizer in zip((model, bare), optimizers, strict=True):
            run(each).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(run(model), run(bare)) and not torch.equal(run(model), run(plain))
