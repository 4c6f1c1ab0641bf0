"""What only a GPU can show: shards on the host, and copies that end late, on streams beside the computation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scale_fsdp.offload.backward
from scale_core.flat import storage
from scale_core.hooks.gradients import register_reduced_grad_hook
from scale_fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadOptimizer,
    ShardedEMA,
    ShardOptions,
    fully_shard,
)
from scale_fsdp.runtime.unit import units_in

pytestmark = pytest.mark.gpu

_WIDTH = 1024
_HALF_A_SECOND = 1_000_000_000  # In cycles of the device.


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(count)))


def by_fairscales_names(module: nn.Module, **kwargs: Any) -> nn.Module:
    FullyShardedDataParallel(module, **kwargs)
    return module


def sharded(plain: nn.Module, shard: Any = fully_shard, **kwargs: Any) -> nn.Module:
    model = copy.deepcopy(plain)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            shard(layer, **kwargs)
    return shard(model, **kwargs)


def on_the_host(plain: nn.Module, **kwargs: Any) -> nn.Module:
    return sharded(plain, offload_policy=CPUOffloadPolicy(), options=ShardOptions(compute_device="cuda"), **kwargs)


def data(step: int = 0, size: int = 8, width: int = _WIDTH) -> Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(step)).cuda()


def delay(what: str) -> None:
    """Has the copies of one kind wait half a second."""
    device = torch.device("cuda", torch.cuda.current_device())
    with storage.copy_stream(device, what).run(after_caller=False):
        torch.cuda._sleep(_HALF_A_SECOND)


def zeros_are_loaded(model: nn.Module) -> None:
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})


def averages_are_swapped_back(model: nn.Module) -> None:
    with ShardedEMA(model).swapped():
        pass
    zeros_are_loaded(model)


def they_are_filled(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.zero_()


WRITES: dict[str, tuple[bool, Callable[[nn.Module], None]]] = {
    "after an evaluation, filled by hand": (False, they_are_filled),
    "after an evaluation, loaded": (False, zeros_are_loaded),
    "after a forward with gradients, loaded": (True, zeros_are_loaded),
    "after a forward with gradients, swapped": (True, averages_are_swapped_back),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("write", WRITES)
def test_a_shard_is_overwritten_only_when_it_has_arrived(write: str, dtype: torch.dtype | None) -> None:
    plain, (with_gradients, change) = layers(), WRITES[write]
    model = on_the_host(plain, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    with torch.no_grad():
        expected = model(data()).clone()
    torch.cuda.synchronize()
    delay("shards")
    with torch.set_grad_enabled(with_gradients):
        output = model(data())
    change(model)
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
    assert all(param.abs().sum() == 0 for param in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_forward_does_not_wait_for_the_shards_of_its_units(dtype: torch.dtype) -> None:
    model = on_the_host(layers(), mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    x = data()
    expected = model(x)
    expected.sum().backward()
    torch.cuda.synchronize()
    delay("shards")
    output = model(x)
    done = torch.cuda.current_stream().record_event()
    assert not done.query(), "the host has issued all of the forward before the first shard was on the device"
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


def test_gradients_go_to_the_host_beside_the_computation() -> None:
    plain = layers().cuda()
    model, device = (
        sharded(plain, by_fairscales_names, move_grads_to_cpu=True),
        torch.device("cuda", torch.cuda.current_device()),
    )
    done: list[tuple[bool, bool]] = []

    def look(_: Tensor) -> None:
        torch.cuda.current_stream().synchronize()
        copies: Any = storage.copy_stream(device, "gradients").record()
        done.append((torch.cuda.current_stream().query(), copies.query()))

    for step in range(2):  # The first takes memory, for which the device is waited for.
        model.zero_grad()
        x = data().requires_grad_()
        x.register_hook(look)
        torch.cuda.synchronize()
        if step:
            delay("gradients")
        model(x).sum().backward()
    assert done[1] == (True, False), "the last gradient is computed, and the first is not on the host yet"
    plain(data()).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and mine.grad.is_cuda
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("overlap_step", [False, True])
def test_gradients_of_shards_are_copied_during_the_pass(overlap_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = layers(6).cuda()
    model, twin = sharded(plain), sharded(plain)
    monkeypatch.setattr(scale_fsdp.offload.backward, "CHUNK_ELEMENTS", 1)
    settings: dict[str, Any] = {"lr": 1e-3, "fused": True}
    optimizer = OffloadOptimizer(
        torch.optim.AdamW, model.parameters(), host_fraction=0.5, overlap_step=overlap_step, **settings
    )
    other = torch.optim.AdamW(twin.parameters(), **settings)
    told: list[int] = []
    handle = register_reduced_grad_hook(lambda params, grads: told.append(len(params)))
    for step in range(3):
        for each, its in ((model, optimizer), (twin, other)):
            told.clear()
            each(data(step)).square().mean().backward()
            if each is model and not overlap_step:
                assert optimizer._prefetch is not None and len(told) == 6
                copies = optimizer._prefetch._copies.items()
                assert copies and all(copied.is_copy_of(part.grad) for part, copied in copies)
            its.step()
            its.zero_grad()
    handle.remove()
    if optimizer._prefetch is not None:
        assert optimizer._prefetch._useful, "no copy that was made during the pass had to be made again"
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def narrow_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(data(step, 32, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("grads", [True, False])
def test_with_shards_on_the_host_it_trains_as_the_plain_model(grads: bool) -> None:
    plain = narrow_layers()
    model = sharded(plain, by_fairscales_names, move_params_to_cpu=True, move_grads_to_cpu=grads, compute_device="cuda")
    for unit in units_in(model):
        for buffer in unit.buffers:
            assert buffer.shard.device.type == "cpu" and buffer.shard.is_pinned()
            assert buffer.full.device.type == "cuda" and buffer.full.untyped_storage().nbytes() == 0
    plain.cuda()
    ours = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    theirs = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    # The optimizer runs on another processor: a unit in the last place each step.
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert all(param.grad is None and param.device.type == "cpu" for param in model.parameters())


def test_gradients_on_the_host_come_back_after_the_backward() -> None:
    plain = narrow_layers().cuda()
    model = sharded(plain, by_fairscales_names, move_grads_to_cpu=True)
    ours = train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert ours == train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))


def test_in_bf16_from_the_host_the_device_holds_few_units() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(
        narrow_layers(),
        offload_policy=CPUOffloadPolicy(),
        options=ShardOptions(compute_device="cuda"),
        mp_policy=policy,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    train(model, optimizer, 2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(model, optimizer, 1)
    unit = 256 * 257
    activations = 9 * 32 * 256 * 4
    assert torch.cuda.max_memory_allocated() - before < 3 * unit * 2 + 3 * unit * 4 + 2 * activations + 2**20
