"""fake_device.py: an accelerator that is not there, with errors and attention as on a real one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import DefaultDeviceType, checkpoint

from scale_check.simulate import fake_device as stand_in
from scale_check.simulate import simulate
from scale_core import compat

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]


class Mishap(Exception):
    """What goes wrong in a backward pass below."""


def fail(*_: Any) -> Any:
    raise Mishap


def in_a_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(fail)
    return y


def in_a_function(x: Tensor) -> Tensor:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        backward = staticmethod(fail)

    result: Tensor = Function.apply(x)
    return result


def where_a_saved_tensor_is_unpacked(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fail):
        return x.exp()


def in_a_recomputation(x: Tensor) -> Tensor:
    calls: list[None] = []

    def compute(x: Tensor) -> Tensor:
        calls.append(None)
        return fail() if len(calls) > 1 else x.exp()

    result: Tensor = checkpoint(compute, x, use_reentrant=False)
    return result


def in_a_backward_inside_of_a_hook(x: Tensor) -> Tensor:
    def inner(_: Tensor) -> None:
        with torch.enable_grad():
            in_a_hook(torch.ones(2, device=compat.STAND_IN, requires_grad=True)).sum().backward()

    y = x.exp()
    y.register_hook(inner)
    return y


@pytest.mark.parametrize(
    "compute",
    [
        in_a_hook,
        in_a_function,
        where_a_saved_tensor_is_unpacked,
        in_a_recomputation,
        in_a_backward_inside_of_a_hook,
    ],
)
def test_an_error_in_a_backward_comes_out_as_it_was_raised(compute: Callable[[Tensor], Tensor]) -> None:
    with simulate(device=compat.STAND_IN) as simulation:
        x = torch.ones(3, device=simulation.device, requires_grad=True)
        loss = compute(x).sum()
        with pytest.raises(Mishap) as caught:
            loss.backward()
        assert "fail" in [entry.name for entry in caught.traceback]
        (x * 2).sum().backward()
        assert x.grad is not None


def test_an_error_of_torch_itself_in_a_backward_comes_out_too() -> None:
    with simulate(device=compat.STAND_IN) as simulation:
        x = torch.ones(3, device=simulation.device, requires_grad=True)
        loss = x.exp().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_an_error_that_a_backward_has_caught_stays_caught() -> None:
    def try_it(_: Tensor) -> None:
        with pytest.raises(Mishap):
            fail()

    with simulate(device=compat.STAND_IN) as simulation:
        x = torch.ones(3, device=simulation.device, requires_grad=True)
        x.register_hook(try_it)
        (x * 2).sum().backward()
        (grad,) = torch.autograd.grad((x * 2).sum(), x)
    assert grad.shape == (3,)


BATCH, HEADS, LENGTH, HEAD_WIDTH = 2, 4, 512, 8


def heads(dtype: torch.dtype, num: int = HEADS) -> Tensor:
    return torch.zeros(BATCH, num, LENGTH, HEAD_WIDTH, dtype=dtype, device=compat.STAND_IN, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("few", [False, True], ids=["own keys", "shared keys"])
def test_attention_makes_no_matrix_of_all_pairs(dtype: torch.dtype, few: bool) -> None:
    with simulate(device=compat.STAND_IN) as simulation:
        query, key, value = heads(dtype), *(heads(dtype, 2 if few else HEADS) for _ in range(2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=few)
        attended.sum().backward()
        assert attended.shape == query.shape
        assert key.grad is not None
        assert key.grad.shape == key.shape
        pairs = BATCH * HEADS * LENGTH**2 * dtype.itemsize
        assert all(item.num_bytes < pairs / 10 for item in simulation.largest_at_peak)


def test_attention_makes_none_where_no_gradient_is_wanted_either() -> None:
    pairs = BATCH * HEADS * LENGTH**2 * 4
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with simulate(device=compat.STAND_IN) as simulation, without_gradients():
            F.scaled_dot_product_attention(*(heads(torch.float32) for _ in range(3)))
            assert simulation.peak_bytes < pairs / 10


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_attention_takes_a_mask_that_all_heads_share(mask_dtype: torch.dtype) -> None:
    with simulate(device=compat.STAND_IN):
        query, key, value = (heads(torch.float32) for _ in range(3))
        mask = torch.ones(LENGTH, LENGTH, dtype=mask_dtype, device=compat.STAND_IN)
        F.scaled_dot_product_attention(query, key, value, mask).sum().backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape


def test_the_accelerator_is_there_in_a_simulation_only() -> None:
    before = DefaultDeviceType._default_device_type
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with simulate(device=compat.STAND_IN) as simulation:
        assert torch.accelerator.is_available()
        assert compat.accelerator() == simulation.device == torch.device("sim", 0)
        # Which device a checkpoint without tensors would take, torch decides once and keeps.
        checkpoint(nn.Identity(), None, use_reentrant=False)
    assert not torch.accelerator.is_available()
    assert compat.accelerator() is None
    assert DefaultDeviceType._default_device_type == before
    assert torch.autograd._engine_run_backward is run_backward  # type: ignore[attr-defined]


def test_training_on_the_host_goes_on_as_before_it() -> None:
    with simulate(device=compat.STAND_IN):
        pass
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    checkpoint(torch.square, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 4.0]
    q = torch.ones(1, 1, 2, 2)
    assert F.scaled_dot_product_attention(q, q, q).tolist() == q.tolist()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
@pytest.mark.ranks(1, backend=None)
def test_a_process_that_began_with_a_simulation_can_be_forked() -> None:
    def train(device: torch.device) -> None:
        torch.ones(2, device=device, requires_grad=True).exp().sum().backward()

    with simulate(device=compat.STAND_IN) as simulation:
        train(simulation.device)
    if not (child := os.fork()):
        train(torch.device("cpu"))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_submodule_may_have_the_name_of_the_device() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sim = nn.Linear(2, 2)

    with simulate(device=compat.STAND_IN):
        assert isinstance(Model().sim, nn.Linear)


def test_the_random_state_can_be_set_and_kept_with_the_stand_in() -> None:
    with simulate(device=compat.STAND_IN):
        torch.manual_seed(3)
        with torch.random.fork_rng(device_type=compat.STAND_IN):
            torch.zeros(3, device=compat.STAND_IN).normal_()


def test_its_streams_have_the_verbs_of_others() -> None:
    with simulate(device=compat.STAND_IN):
        module: Any = torch.get_device_module(compat.STAND_IN)
        stream, event = module.Stream(priority=-1), module.Event()
        with module.stream(stream):
            stream.wait_stream(module.current_stream())
            event.record(stream)
            stream.wait_event(stream.record_event(event))
            event.wait()
        event.synchronize()
        module.synchronize()
        assert event.query()


def test_it_does_not_take_the_place_of_a_real_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES= in its environment"):
        stand_in._register.__wrapped__()


def test_it_does_not_take_the_place_of_another_vendors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    with pytest.raises(RuntimeError, match="has given it to 'npu'"):
        stand_in._register.__wrapped__()


def test_another_torch_is_refused_before_taking_the_device_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.raises(RuntimeError, match=r"torch 2\.11 to 2\.15, but this is torch 2\.10\.0"), stand_in.available():
        pass


def test_tensors_of_given_numbers_are_made_on_the_device() -> None:
    with simulate(device="sim") as simulation:
        numbers = [torch.tensor(0, device="sim"), torch.as_tensor([1.0, 2.0], device="sim")]
        assert [each.device for each in numbers] == [simulation.device] * 2
        with torch.device("sim"):
            model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4))
            model(torch.randn(3, 2, 8)).sum().backward()
        assert simulation.on("cpu").current_bytes == 0
        assert all(param.grad is not None for param in model.parameters())
