"""traits.py: what is known of torch.optim's classes."""

from __future__ import annotations

import random
import secrets
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from scale_core.errors import ContractError
from scale_core.optim.joint_update import has_joint_update
from scale_core.optim.traits import KINDS, check_kind, is_elementwise
from scale_oss import OSS, OSSOptions, OuterStep, ShardedDataParallel, split_by


def test_every_class_of_torch_is_known_or_refused() -> None:
    whole = {"Adafactor", "Muon"}
    for name, kind in vars(torch.optim).items():
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
            continue
        if name in ("LBFGS", "SparseAdam"):
            with pytest.raises(ValueError, match=f"OSS can't shard {name}: it "):
                is_elementwise(kind)
        else:
            assert is_elementwise(kind) == (name not in whole), name


def test_a_joint_optimizer_needs_together() -> None:
    known = type("Prodigy", (torch.optim.Adam,), {})
    derived = type("Mine", (known,), {})
    for each in (known, derived):
        for elementwise in (None, False, True):
            with pytest.raises(ValueError, match=r"from all tensors together.*OSS\(\.\.\., \w+, .*together=True\)"):
                check_kind(each, elementwise=elementwise, together=False)
        check_kind(each, elementwise=None, together=True)
    with pytest.raises(ValueError, match=r"pass OSSOptions\(elementwise=True\) or OSSOptions\(together=True\)"):
        check_kind(torch.optim.Adam, elementwise=True, together=True)
    check_kind(torch.optim.Adam, elementwise=None, together=True)


def test_what_measures_gradients_goes_around_oss_and_not_into_it() -> None:
    listening = type("AdaScaleWrapper", (torch.optim.SGD,), {"listens_to_gradients": True})
    with pytest.raises(ValueError, match=r"OSS can't shard AdaScaleWrapper: .*put AdaScale around, AdaScale\(OSS\("):
        is_elementwise(listening)


def test_of_any_other_class_nothing_is_assumed() -> None:
    class Mine(torch.optim.Adam):
        """May compute anything."""

    assert not is_elementwise(Mine)


def test_what_is_no_class_of_optimizers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected optim to be a class of optimizers, such as torch.optim.AdamW"):
        is_elementwise(torch.nn.Linear)  # type: ignore[arg-type]  # what a user may write


def test_the_defaults_of_a_built_optimizer_are_arguments() -> None:
    for cls in KINDS:
        if KINDS[cls].scope == "all" or KINDS[cls].sparse:
            continue
        built = cls([nn.Parameter(torch.ones(2, 2))], lr=0.25)
        ours = OSS(built.param_groups, cls, **built.defaults)
        plain = [{key: value for key, value in group.items() if key != "params"} for group in built.param_groups]
        assert [{key: value for key, value in group.items() if key != "params"} for group in ours.param_groups] == plain
    with pytest.raises(TypeError, match="unexpected keyword argument 'betta'"):
        OSS([nn.Parameter(torch.ones(2, 2))], torch.optim.Adam, betta=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'decoupled_weight_decay'"):
        OSS([nn.Parameter(torch.ones(2, 2))], torch.optim.AdamW, decoupled_weight_decay=False)


def test_a_wrong_argument_is_named_before_anything_is_built() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = OSS(model.parameters(), SGD, lr=0.1)
    plain = SGD(model.parameters(), lr=0.1)
    wrong: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (
            OSS,
            (model.parameters(), SGD),
            {"bucket_numel": 3, "lr": 0.1},
            r"OSS.*: there is no argument bucket_numel=; write options=OSSOptions\(bucket_numel=...\)",
        ),
        (OSSOptions, (), {"bucket_numel": "3"}, "OSSOptions: expected bucket_numel to be an integer"),
        (OSS, (model.parameters(), plain), {}, "expected optim to be a class of optimizers"),
        (OSS, (None,), {}, "OSS: expected params to be a collection, got None"),
        (ShardedDataParallel, (None, optimizer), {}, "ShardedDataParallel: expected module to be a Module, got None"),
        (ShardedDataParallel, (model, optimizer), {"reduce_fp16": "no"}, "; write reduce_fp16=False"),
        # In earlier versions the number of elements of a bucket was the sixth.
        (ShardedDataParallel, (model, optimizer, None, True, True, 1), {}, "positional arguments but 7 were given"),
        (ShardedDataParallel, (model, optimizer), {"reduce_fp16": 2**23}, "expected reduce_fp16 to be a bool"),
        (OSS, (model.parameters(), SGD, None, 1), {"lr": 0.1}, "positional arguments but 5 were given"),
        (OSS, (model.parameters(), SGD), {"lr": 0.1, "broadcast_fp16": -1}, "expected broadcast_fp16 to be a bool"),
        (split_by, (model, (SGD, {}), (SGD, {})), {"other_names": "layers"}, r"; write \['layers'\]"),
        (OuterStep, (), {"nesterov": "no"}, "; write nesterov=False"),
    ]
    for call, args, kwargs, text in wrong:
        with pytest.raises(TypeError, match=text):
            call(*args, **kwargs)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert ShardedDataParallel(model, [optimizer], broadcast_buffers=1) is not None  # type: ignore[arg-type]


def test_building_under_inference_mode_is_refused() -> None:
    model = nn.Linear(2, 2)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"OSS was called under.*Call it before"):
        OSS(model.parameters(), SGD, lr=0.1)
    optimizer = OSS(model.parameters(), SGD, lr=0.1)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"ShardedDataParallel was called under"):
        ShardedDataParallel(model, optimizer)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_script_modules_need_a_gather_in_the_step() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    optimizer = OSS(model.parameters(), SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"ScriptModule in the module takes no hooks.*Write overlap_gather=False"):
        ShardedDataParallel(model, optimizer)
    ShardedDataParallel(model, optimizer, overlap_gather=False)(torch.ones(1, 2)).sum().backward()


class _LARS(Optimizer):
    """Norms of single tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for param, norm in zip(params, self.grad_norms(params), strict=True):
            param.add_(param.grad, alpha=-self.param_groups[0]["lr"] / norm)

    def grad_norms(self, params: list[nn.Parameter]) -> list[float]:
        return [float(param.grad.norm()) for param in params if param.grad is not None]


class _NormalizedSGD(_LARS):
    """One norm of all gradients, read as a number."""

    def grad_norms(self, params: list[nn.Parameter]) -> list[float]:
        norms = super().grad_norms(params)
        return [sum(norm**2 for norm in norms) ** 0.5] * len(params)


class _Noisy(_LARS):
    """Random numbers that no seed of torch or Python repeats."""

    def grad_norms(self, params: list[nn.Parameter]) -> list[float]:
        return [1.0 + secrets.randbelow(1000) for _ in params]


class _WarmedUp(_LARS):
    """Its class counts the steps, and the first six are smaller."""

    num_steps = 0

    def grad_norms(self, params: list[nn.Parameter]) -> list[float]:
        _WarmedUp.num_steps += 1
        return [10.0 if self.num_steps <= 6 else 1.0 for _ in params]


def test_a_norm_over_all_tensors_needs_together() -> None:
    params = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=r"_NormalizedSGD updates each tensor by numbers from all.*together=True\)"):
        OSS(params, _NormalizedSGD, lr=0.5)
    plain = [nn.Parameter(param.detach().clone()) for param in params]
    optimizers = [OSS(params, _NormalizedSGD, options=OSSOptions(together=True)), _NormalizedSGD(plain)]
    for optimizer in optimizers:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(params, plain, strict=True))


@pytest.mark.parametrize("optim_class", [_LARS, _Noisy, _WarmedUp, torch.optim.Adam])
def test_other_optimizers_need_no_together(optim_class: type[Optimizer]) -> None:
    assert not has_joint_update(optim_class, {"lr": 0.5})


def test_a_trial_that_fails_decides_nothing_and_draws_nothing() -> None:
    before = torch.get_rng_state(), random.getstate()
    assert not has_joint_update(_NormalizedSGD, {"unknown": 1})
    assert has_joint_update(_NormalizedSGD, {})
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_a_trial_seeds_no_device_and_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Prints(_NormalizedSGD):
        def grad_norms(self, params: list[nn.Parameter]) -> list[float]:
            print("a step")
            return super().grad_norms(params)

    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    assert has_joint_update(Prints, {})
    assert seeds == [] and capsys.readouterr().out == ""


def test_a_trial_needs_no_real_default_device() -> None:
    with torch.device("meta"):
        assert has_joint_update(_NormalizedSGD, {}) and not has_joint_update(_LARS, {})
    with FakeTensorMode():  # As in a simulation: there are no values to compare.
        assert not has_joint_update(_NormalizedSGD, {})


class _NormalizedOverRanks(_LARS):
    """One norm of the gradients of all ranks, which it sums itself."""

    def grad_norms(self, params: list[nn.Parameter]) -> list[float]:
        total = torch.tensor(sum(norm**2 for norm in super().grad_norms(params)))
        dist.all_reduce(total)
        return [float(total) ** 0.5] * len(params)


@pytest.mark.ranks(2)
def test_ranks_are_compared_before_the_trial() -> None:
    optim_class = (_NormalizedSGD, _LARS)[dist.get_rank()]
    with pytest.raises(ContractError, match="the parameters given to OSS"):
        OSS([nn.Parameter(torch.zeros(8))], optim_class)


@pytest.mark.ranks(2)
def test_an_optimizer_that_sums_over_ranks_is_right() -> None:
    params = [nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))]
    optimizer = OSS(params, _NormalizedOverRanks, lr=1.0)
    for param in params:
        param.grad = torch.ones(8)
    optimizer.step()
    assert all(torch.equal(param, torch.full((8,), -0.25)) for param in params)


def test_a_trial_calls_no_hooks_of_the_program() -> None:
    seen: list[Optimizer] = []
    handles = (
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer)),
    )
    try:
        assert has_joint_update(_NormalizedSGD, {}) and seen == []
        param = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param], lr=0.1)
        optimizer.step()
        assert seen == [optimizer, optimizer]
    finally:
        for handle in handles:
            handle.remove()
