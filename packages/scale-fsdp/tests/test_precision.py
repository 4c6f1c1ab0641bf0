"""Which dtypes a unit computes and reduces in; that the numbers are right is `test_transparency.py`'s."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from fsdp_parity import adam, noise, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from scale_core import compat
from scale_core.hooks.gradients import register_local_grad_hook
from scale_fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardOptions,
    fully_shard,
    fully_shard_modules,
    name_policy,
)
from scale_fsdp.api import UnitPrecision
from scale_fsdp.runtime.unit import unit_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def precision_of(**arguments):
    return unit_of(FullyShardedDataParallel(nn.Linear(2, 2), **arguments).module).precision


def test_true_is_half_precision_except_for_buffers():
    assert precision_of(mixed_precision=True) == UnitPrecision(FP16, FP16, cast_forward_inputs="root")
    assert precision_of(mixed_precision=False) == UnitPrecision(cast_forward_inputs="root")


def test_fairscales_arguments_mean_what_they_meant():
    means = functools.partial(UnitPrecision, cast_forward_inputs="root")
    assert precision_of(mixed_precision=True, fp32_reduce_scatter=True) == means(FP16, FP32)
    assert precision_of(mixed_precision=True, compute_dtype=BF16) == means(BF16, BF16)
    assert precision_of(mixed_precision=True, buffer_dtype=FP32) == means(FP16, FP16, buffer_dtype=FP32)
    assert precision_of(compute_dtype=BF16) == means(BF16, BF16)
    assert precision_of(mixed_precision=True, fp32_reduce_scatter=False) == precision_of(mixed_precision=True)


@pytest.mark.parametrize("argument", ["compute_dtype", "fp32_reduce_scatter"])
def test_fairscales_arguments_beside_a_policy_are_an_error(argument):
    value = True if argument == "fp32_reduce_scatter" else FP16
    with pytest.raises(ValueError, match=argument):
        precision_of(mixed_precision=MixedPrecisionPolicy(BF16), **{argument: value})


def test_fp32_reduction_without_mixed_precision_is_an_error():
    with pytest.raises(ValueError, match="mixed_precision=True"):
        precision_of(fp32_reduce_scatter=True)


def test_a_policy_has_floating_point_dtypes_only():
    with pytest.raises(ValueError, match=r"param_dtype.*int32"):
        fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.int32))
    with pytest.raises(ValueError, match=r"reduce_dtype.*'bf16'"):
        fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(reduce_dtype="bf16"))
    with pytest.raises(ValueError, match=r"buffer_dtype.*int8"):
        fully_shard(nn.Linear(2, 2), options=ShardOptions(buffer_dtype=torch.int8))
    with pytest.raises(TypeError, match=r"mp_policy: expected a .*MixedPrecisionPolicy, got 'bf16'"):
        fully_shard(nn.Linear(2, 2), mp_policy="bf16")


@pytest.mark.parametrize("in_param_dtype", [False, True])
def test_gradients_are_reduced_as_fsdp2_of_this_torch_does(monkeypatch, in_param_dtype):
    monkeypatch.setattr(compat, "reduces_in_param_dtype", lambda: in_param_dtype)
    model = fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(BF16))
    assert [buffer.reduce_dtype for buffer in unit_of(model).buffers] == [FP32 if in_param_dtype else BF16]
    model = fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(BF16, BF16))
    assert [buffer.reduce_dtype for buffer in unit_of(model).buffers] == [BF16]
    model = fully_shard(nn.Linear(2, 2).bfloat16()).float()
    assert [buffer.reduce_dtype for buffer in unit_of(model).buffers] == [FP32]


@dataclass(frozen=True)
class PolicyWithOverride(MixedPrecisionPolicy):
    """The policy of torch 2.15, for older versions."""

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)


def norms_in_fp32(param):
    return FP32 if param.ndim == 1 else None


def test_a_policy_may_keep_single_parameters_in_their_dtype():
    class Scaled(nn.Linear):
        def forward(self, x):
            seen.append((self.weight.dtype, self.bias.dtype))
            return x @ self.weight.T + self.bias.to(x.dtype)

    seen = []
    plain = Scaled(4, 4)
    model = fully_shard(
        copy.deepcopy(plain), mp_policy=PolicyWithOverride(BF16, FP32, param_dtype_override_fn=norms_in_fp32)
    )
    x = torch.randn(3, 4)
    model(x).float().square().sum().backward()
    assert seen == [(BF16, FP32)]
    weight = plain.weight.detach().to(BF16).requires_grad_()
    (x.to(BF16) @ weight.T + plain.bias.to(BF16)).float().square().sum().backward()
    assert torch.equal(model.weight.grad, weight.grad.float())
    assert torch.equal(model.bias.grad, plain.bias.grad)
    with pytest.raises(
        ValueError, match=r"weight: expected param_dtype_override_fn to return None, .*got torch.float16"
    ):
        fully_shard(nn.Linear(2, 2), mp_policy=PolicyWithOverride(BF16, param_dtype_override_fn=lambda param: FP16))


def test_an_override_without_a_dtype_of_the_unit_changes_nothing():
    model = fully_shard(nn.Linear(2, 2), mp_policy=PolicyWithOverride(param_dtype_override_fn=norms_in_fp32))
    assert [buffer.names for buffer in unit_of(model).buffers] == [["weight", "bias"]]
    assert [buffer.compute_dtype for buffer in unit_of(model.bfloat16()).buffers] == [BF16]


@pytest.mark.ranks(2)
def test_an_override_knows_a_dtensor_by_its_identity():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    layer = parallelize_module(nn.Linear(2, 2), mesh["tp"], ColwiseParallel())
    in_fp32 = {id(layer.bias)}
    policy = PolicyWithOverride(BF16, param_dtype_override_fn=lambda param: FP32 if id(param) in in_fp32 else None)
    buffers = unit_of(fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)).buffers
    assert {name: buffer.compute_dtype for buffer in buffers for name in buffer.names} == {"weight": BF16, "bias": FP32}


MASTER = {"shard": FP32, "gradient": FP32, "state": FP32, "saved": FP32}
SENT = FP32 if compat.reduces_in_param_dtype() else BF16  # with a param_dtype alone
INTEGERS = {"tokens": torch.int64, "int output": torch.int64, "int buffer": torch.int64}


@pytest.mark.parametrize(
    "policy, expected",
    [
        (MixedPrecisionPolicy(), {"weight": FP32, "input": FP32, "output": FP32, "sent": FP32, "buffer": FP32}),
        (MixedPrecisionPolicy(BF16), {"weight": BF16, "input": BF16, "output": BF16, "sent": SENT, "buffer": FP32}),
        (
            MixedPrecisionPolicy(BF16, FP32),
            {"weight": BF16, "input": BF16, "output": BF16, "sent": FP32, "buffer": FP32},
        ),
        (
            MixedPrecisionPolicy(FP16, FP16, FP32),
            {"weight": FP16, "input": FP16, "output": FP32, "sent": FP16, "buffer": FP32},
        ),
        (
            (MixedPrecisionPolicy(BF16), FP16),
            {"weight": BF16, "input": BF16, "output": BF16, "sent": SENT, "buffer": FP16},
        ),
        (
            MixedPrecisionPolicy(reduce_dtype=BF16),
            {"weight": FP32, "input": FP32, "output": FP32, "sent": BF16, "buffer": FP32},
        ),
    ],
)
@pytest.mark.ranks(2, in_turn=True)
def test_each_dtype_of_the_policy_is_where_it_belongs(policy, expected):
    class Watcher(nn.Module):
        """Notes the dtypes that it computes with."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
            self.register_buffer("frequencies", torch.ones(3))
            self.register_buffer("counts", torch.ones(3, dtype=torch.int64))
            self.seen: dict[str, torch.dtype] = {}

        def forward(self, x, tokens):
            self.seen = {"input": x.dtype, "tokens": tokens.dtype, "weight": self.linear.weight.dtype}
            return {"logits": self.linear(x), "tokens": tokens}

    policy, buffer_dtype = policy if isinstance(policy, tuple) else (policy, None)
    model = sharded(Watcher(), [""], mp_policy=policy, buffer_dtype=buffer_dtype)
    optimizer = adam(model.parameters())
    local: list[torch.dtype] = []
    handle = register_local_grad_hook(lambda params, grads: local.extend(grad.dtype for grad in grads))
    out = model(noise(4, 3), torch.ones(4, dtype=torch.int64))
    out["logits"].float().sum().backward()
    optimizer.step()
    handle.remove()
    weight = model.linear.weight
    seen = {
        **model.seen,
        "output": out["logits"].dtype,
        "int output": out["tokens"].dtype,
        "shard": weight.dtype,
        "gradient": weight.grad.dtype,
        "state": optimizer.state[weight]["exp_avg"].dtype,
        "sent": local[0],
        "buffer": model.frequencies.dtype,
        "running": model.norm.running_mean.dtype,
        "int buffer": model.counts.dtype,
        "saved": model.state_dict()["linear.weight"].dtype,
    }
    assert seen == {**expected, "running": expected["buffer"], **MASTER, **INTEGERS}


def test_inputs_follow_a_unit_of_another_dtype_inside():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    fully_shard(model[1], mp_policy=MixedPrecisionPolicy(output_dtype=BF16))
    fully_shard(model[2], mp_policy=MixedPrecisionPolicy(BF16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16))
    assert model(noise(2, 3)).dtype == BF16


@pytest.mark.ranks(1, 2)
def test_a_unit_in_full_precision_may_stand_between_others():
    """An fp32 unit among bf16 units, inside of a bf16 root and inside of a plain module."""
    for around in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        for number, dtype in enumerate((BF16, FP32, BF16)):
            fully_shard(model[number], mp_policy=MixedPrecisionPolicy(dtype))
        if around:
            fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16))
        seen = []
        model[1].register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))  # noqa: B023  # runs here
        for _ in range(2):
            model(noise(2, 3)).sum().backward()
        assert seen == [FP32, FP32] and not any(
            param.grad is None or param.grad.dtype != FP32 for param in model.parameters()
        ), f"around={around}: the middle computed in {seen}"


def test_the_output_dtype_of_a_model_is_not_that_of_its_blocks():
    block = nn.Sequential(nn.Linear(3, 3), nn.GELU())
    model = nn.Sequential(nn.Embedding(5, 3), block, nn.LayerNorm(3), nn.Linear(3, 2))
    policy = MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32)
    fully_shard_modules(model, name_policy("1"), mp_policy=policy)
    handed_on = []
    block.register_forward_hook(lambda *call: handed_on.append(call[-1].dtype))
    out = model(torch.tensor([[0, 4]]))
    out.sum().backward()
    assert (out.dtype, handed_on) == (FP32, [BF16])
    assert {param.grad.dtype for param in model.parameters()} == {FP32}


def test_units_that_return_another_dtype_may_follow_each_other():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    policy = MixedPrecisionPolicy(BF16, output_dtype=FP32)
    for layer in (*model, model):
        fully_shard(layer, mp_policy=policy)
    out = model(noise(2, 3))
    out.sum().backward()
    assert out.dtype == FP32
    assert model[0].weight.grad.dtype == FP32


def test_fairscales_arguments_cast_at_the_root_only():
    class HandsOnFp32(nn.Module):
        """Hands fp32 to a nested module, as the position embeddings of many models."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            self.seen = x.dtype
            return self.inner(x.float())

    for arguments, casts in (
        ({"compute_dtype": BF16}, False),
        ({"mixed_precision": MixedPrecisionPolicy(BF16)}, True),
        ({"mixed_precision": MixedPrecisionPolicy(BF16, cast_forward_inputs=False)}, False),
    ):
        model = HandsOnFp32()
        model.inner = FullyShardedDataParallel(model.inner, **arguments)
        model = FullyShardedDataParallel(model, **arguments)
        with nullcontext() if casts else pytest.raises(RuntimeError, match="same dtype"):
            assert model(noise(2, 3)).dtype == BF16
        assert model.seen == (FP32 if arguments.get("mixed_precision") and not casts else BF16)


def test_a_state_dict_has_buffers_in_their_plain_dtypes():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.tensor([0.1, 0.2, 0.3]))
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x):
            self.steps += 1
            self.scale.mul_(0.5)
            return x * self.weight * self.scale

    model = nn.Sequential(nn.Linear(3, 3), Scaled())
    for module in (model[1], model):
        fully_shard(module, options=ShardOptions(buffer_dtype=torch.float16))
    model(torch.ones(2, 3))
    assert model[1].scale.dtype == torch.float16
    state = model.state_dict()
    assert {name: state[name].dtype for name in ("1.scale", "1.steps")} == {"1.scale": FP32, "1.steps": torch.int64}
    assert torch.equal(state["1.scale"], model[1].scale.float())
    again = copy.deepcopy(model)
    again.load_state_dict(state)
    assert torch.equal(again[1].scale, model[1].scale)
    assert again.state_dict()["1.scale"].dtype == torch.float32
    assert again.double().state_dict()["1.scale"].dtype == torch.float64
