"""offload/optimizer.py: a fraction of the state on the host, and the optimizer's own numbers."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import offload_cases as cases
import pytest
import torch
from through_a_file import through_a_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from scale_check.exact import assert_equal
from scale_check.simulate import simulate
from scale_core import compat
from scale_core.optim.clip_grad import clip_grad_norm_
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_fsdp import OffloadOptimizer
from scale_fsdp.offload.transfer import HostTransfer

FUSED_ADAM: dict[str, Any] = {"lr": 0.01, "fused": True}

# Where the parameters are: on the host, or away, where every value is copied; and whether copies are made early.
PLACES = {"here": (False, True), "away": (True, True), "away, copied in the step": (True, False)}


@pytest.fixture(params=PLACES)
def overlap_copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    away, early = PLACES[request.param]
    cases.small_pieces(monkeypatch, 1024)
    if away:
        cases.let_parameters_be_away(monkeypatch)
    return early


def offloaded(model: nn.Module, fraction: float = 0.6, **kwargs: Any) -> OffloadOptimizer:
    settings = kwargs or FUSED_ADAM
    return OffloadOptimizer(torch.optim.Adam, model.parameters(), host_fraction=fraction, **settings)


def plain_adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), **FUSED_ADAM)


@pytest.mark.parametrize("name", cases.ELEMENTWISE)
def test_elementwise_optimizers_train_as_without_offload(name: str, overlap_copies: bool) -> None:
    kind, settings = cases.ELEMENTWISE[name]
    for fraction in (0.0, 0.37, 1.0):
        cases.assert_trains_alike(
            lambda model, f=fraction: OffloadOptimizer(  # type: ignore[misc]
                kind, model.parameters(), host_fraction=f, overlap_copies=overlap_copies, **settings
            ),
            lambda model: kind(model.parameters(), **settings),
            lambda model, optimizer, number: cases.train(model, optimizer, [number]),
            steps=3,
        )


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.25, 0.5, 0.9, 1.0])
def test_the_fraction_is_met_by_cutting_one_parameter(fraction: float) -> None:
    for settings, within in ((FUSED_ADAM, 32), ({"fused": False}, 0)):
        optimizer = offloaded(cases.network(), fraction, **settings)
        wanted, placed = round(fraction * 13_763), optimizer.placement()
        assert placed.host_elements + placed.device_elements == 13_763
        assert abs(placed.host_elements - wanted) <= within
        cut = [p for p in optimizer.state.parts() if not p.is_whole and p.on_host]
        assert len(cut) <= 1
        assert all(part.stop % 64 == 0 for part in cut) or not within


def test_the_state_is_placed_and_takes_what_it_should() -> None:
    model = cases.network()
    optimizer = offloaded(model, 0.5, fused=False)
    assert optimizer.placement() == (6882, 6881, 0, 0)
    cases.train(model, optimizer)
    host, device, host_bytes, device_bytes = optimizer.placement()
    # Two numbers per element, and a count for each part.
    assert host_bytes == 8 * host + 4 * 5 and device_bytes == 8 * device + 4 * 1


def assert_trains_as_adam(overlap_copies: bool, step: cases.Step, steps: int = 4) -> None:
    cases.assert_trains_alike(
        lambda model: offloaded(model, overlap_copies=overlap_copies, **FUSED_ADAM), plain_adam, step, steps
    )


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "clipped": lambda params: torch.nn.utils.clip_grad_norm_(params, 0.1),
    "scaled, without a version": lambda params: [param.grad.data.mul_(0.5) for param in params],
    "negated, without a version": lambda params: [param.grad.data.neg_() for param in params],
    "replaced": lambda params: [setattr(param, "grad", param.grad * 0.25) for param in params],
    "some dropped": lambda params: [setattr(param, "grad", None) for param in params[::2]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_change_after_the_backward_are_seen(change: str, overlap_copies: bool) -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        cases.loss_of(model, number).backward()
        if number != 1:  # Now and then there is nothing to change.
            CHANGES[change](list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)

    assert_trains_as_adam(overlap_copies, step, 5)


def test_clipping_by_the_optimizer_is_that_of_scale_core(overlap_copies: bool) -> None:
    for max_norm in (0.05, 1e6):
        mine, theirs = cases.twins()
        ours, other = offloaded(mine, overlap_copies=overlap_copies, **FUSED_ADAM), plain_adam(theirs)
        for number in range(4):
            for model, optimizer in ((mine, ours), (theirs, other)):
                cases.loss_of(model, number).backward()
                if isinstance(optimizer, OffloadOptimizer):
                    norm = optimizer.clip_grad_norm_(max_norm)
                else:
                    assert torch.equal(norm, clip_grad_norm_(model.parameters(), max_norm))
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(mine, theirs)
        assert_equal(ours, other)


def test_clipping_twice_clips_what_was_clipped() -> None:
    model, twin = cases.twins()
    for each in (model, twin):
        cases.loss_of(each, 0).backward()
    optimizer = offloaded(model)
    first, second = optimizer.clip_grad_norm_(1.0), optimizer.clip_grad_norm_(0.5)
    assert second.item() == pytest.approx(1.0) and first.item() > 1
    optimizer.step()
    clip_grad_norm_(twin.parameters(), 0.5)
    plain_adam(twin).step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-6, atol=1e-7)


def test_gradients_that_change_after_clipping_are_an_error() -> None:
    model = cases.network()
    optimizer = offloaded(model)
    before = [param.detach().clone() for param in model.parameters()]
    cases.loss_of(model, 0).backward()
    optimizer.clip_grad_norm_(1.0)
    cases.loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=r"have changed since .*clip_grad_norm_ has measured them: call it last"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    cases.train(model, optimizer, [2])  # Forgotten with the gradients.


def test_a_norm_that_is_no_number_does_what_torch_does() -> None:
    for value in (float("inf"), float("nan")):
        model, twin = cases.twins()
        for each in (model, twin):
            cases.loss_of(each, 0).backward()
            each[0].weight.grad[0, 0] = value  # type: ignore[index]
        optimizer = offloaded(model)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        clip_grad_norm_(twin.parameters(), 1.0)
        plain_adam(twin).step()
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=0, atol=0, equal_nan=True)


def test_a_gradient_scaler_may_unscale_skip_and_clip(overlap_copies: bool) -> None:
    scalers: dict[int, ShardedGradScaler] = {}

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        scaler = scalers.setdefault(id(model), ShardedGradScaler(init_scale=512.0, growth_interval=2))
        scaler.scale(cases.loss_of(model, number)).backward()
        if number == 2:
            bias = list(model.parameters())[1]
            assert bias.grad is not None
            bias.grad[5] = float("inf")
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    cases.assert_trains_alike(
        lambda model: offloaded(model, overlap_copies=overlap_copies, lr=0.01, fused=False),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=False),
        step,
        6,
    )
    assert len({scaler.get_scale() for scaler in scalers.values()}) == 1


def test_gradients_of_several_backward_passes_add_up(overlap_copies: bool) -> None:
    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        for micro_batch in range(3):
            cases.loss_of(model, 10 * number + micro_batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_trains_as_adam(overlap_copies, step)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [param for param in model.parameters() if param.ndim > 1]
    rest = [param for param in model.parameters() if param.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.05, "name": "rest"}]


def test_groups_and_schedulers_are_those_of_the_plain_optimizer(overlap_copies: bool) -> None:
    schedulers: dict[int, list[Any]] = {}

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        if number == 0:
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
            schedulers[id(optimizer)] = [cycle, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        cases.train(model, optimizer, [number])
        for scheduler in schedulers[id(optimizer)]:
            scheduler.step()

    cases.assert_trains_alike(
        lambda model: OffloadOptimizer(
            torch.optim.AdamW, groups_of(model), host_fraction=0.5, overlap_copies=overlap_copies, fused=True
        ),
        lambda model: torch.optim.AdamW(groups_of(model), fused=True),
        step,
    )


def test_options_are_visible_as_in_the_plain_optimizer() -> None:
    model = cases.network()
    ours = OffloadOptimizer(torch.optim.AdamW, groups_of(model), lr=0.2, betas=(0.8, 0.9))
    plain = torch.optim.AdamW(groups_of(model), lr=0.2, betas=(0.8, 0.9))
    assert ours.defaults == plain.defaults
    for mine, theirs in zip(ours.param_groups, plain.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    assert "OffloadOptimizer" in repr(ours) and "betas: (0.8, 0.9)" in repr(ours)


def test_a_group_may_come_later_and_keeps_the_fraction_of_all() -> None:
    def make(kind: Callable[..., Optimizer]) -> Callable[[nn.Module], Optimizer]:
        return lambda model: kind(list(model.parameters())[2:], lr=0.01, fused=False)

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        if number == 2:
            optimizer.add_param_group({"params": list(model.parameters())[:2], "lr": 0.5})
            if isinstance(optimizer, OffloadOptimizer):
                assert optimizer.placement().host_elements == round(0.3 * 13_763)
        cases.train(model, optimizer, [number])

    cases.assert_trains_alike(
        make(lambda params, **kwargs: OffloadOptimizer(torch.optim.Adam, params, host_fraction=0.3, **kwargs)),
        make(torch.optim.Adam),
        step,
    )


def test_named_parameters_keep_their_names() -> None:
    model = cases.network()
    optimizer = OffloadOptimizer(torch.optim.SGD, model.named_parameters(), lr=0.1, momentum=0.9)
    cases.train(model, optimizer, [0])
    names = [name for name, _ in model.named_parameters()]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names


@pytest.mark.parametrize("name", ["adam, fused", "sgd, plain", "sgd, fused", "adagrad", "nadam"])
def test_the_state_goes_into_the_plain_optimizer_and_back(name: str, overlap_copies: bool) -> None:
    kind, settings = cases.ELEMENTWISE[name]
    model, twin = cases.twins()

    def ours(of: nn.Module, fraction: float) -> OffloadOptimizer:
        return OffloadOptimizer(
            kind, of.parameters(), host_fraction=fraction, overlap_copies=overlap_copies, **settings
        )

    reference = kind(twin.parameters(), **settings)
    cases.train(twin, reference, range(6))
    optimizer: Optimizer = ours(model, 0.4)
    for number, make in enumerate(
        [
            lambda: kind(model.parameters(), **settings),
            lambda: ours(model, 0.7),
            lambda: ours(model, 1.0),
            lambda: kind(model.parameters(), **settings),
            lambda: ours(model, 0.1),
        ]
    ):
        cases.train(model, optimizer, [number])
        saved = through_a_file(optimizer.state_dict())
        optimizer = make()
        optimizer.load_state_dict(saved)
    cases.train(model, optimizer, [5])
    assert_equal(model, twin)
    assert_equal(optimizer, reference)


def test_a_state_of_a_related_class_is_read_as_plainly() -> None:
    model, twin = cases.twins()
    saved = {}
    for each in (model, twin):
        first = torch.optim.Adam(each.parameters(), lr=0.01, weight_decay=0.1, fused=True)
        cases.train(each, first, [0])
        saved = first.state_dict()
    optimizer: Optimizer = OffloadOptimizer(torch.optim.AdamW, model.parameters(), host_fraction=0.5)
    other: Optimizer = torch.optim.AdamW(twin.parameters())
    for each, its in ((model, optimizer), (twin, other)):
        its.load_state_dict(copy.deepcopy(saved))
        cases.train(each, its, [1])
    assert_equal(model, twin)
    assert_equal(optimizer, other)


def test_a_state_of_other_groups_is_refused() -> None:
    model = cases.network()
    optimizer = offloaded(model)
    cases.train(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    saved = OffloadOptimizer(torch.optim.Adam, groups_of(model)).state_dict()
    with pytest.raises(ValueError, match=r"groups of \[2, 3\] parameters, the optimizer groups of \[5\]"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(before)


def test_the_state_of_a_parameter_is_read_assigned_and_cleared() -> None:
    model, twin = cases.twins()
    optimizer, other = offloaded(model, 0.6), plain_adam(twin)
    weight = next(model.parameters())
    assert weight not in optimizer.state and len(optimizer.state) == 0 and not optimizer.state.get(weight)
    for each, its in ((model, optimizer), (twin, other)):
        cases.train(each, its)
    parts = optimizer.state.parts_of(weight)
    assert [part.on_host for part in parts] == [True, False]
    assert len(optimizer.state) == 5 and weight in optimizer.state
    state = optimizer.state[weight]
    assert torch.equal(state["exp_avg"], other.state[next(twin.parameters())]["exp_avg"])
    for values in (state, other.state[next(twin.parameters())]):
        values["exp_avg_sq"] = values["exp_avg_sq"] * 4
    optimizer.state[weight] = state
    for each, its in ((model, optimizer), (twin, other)):
        cases.train(each, its, [7])
    assert_equal(model, twin)
    del optimizer.state[weight]
    assert weight not in optimizer.state
    with pytest.raises(KeyError):
        del optimizer.state[weight]
    optimizer.state.clear()
    other.state.clear()
    for each, its in ((model, optimizer), (twin, other)):
        cases.train(each, its, [8])
    assert_equal(model, twin)
    assert_equal(optimizer, other)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_goes_on_by_itself(how: Callable[[Any], Any]) -> None:
    model = cases.network()
    optimizer = offloaded(model, 0.6)
    cases.train(model, optimizer)
    twin, other = how((model, optimizer))
    assert other.placement() == optimizer.placement()
    for each, its in ((model, optimizer), (twin, other)):
        cases.train(each, its, range(4, 7))
    assert_equal(model, twin)
    assert_equal(optimizer, other)


def test_new_values_are_cast_to_where_they_are_computed_with(overlap_copies: bool) -> None:
    model, twin = cases.twins()
    optimizer, other = offloaded(model, 0.6, overlap_copies=overlap_copies, **FUSED_ADAM), plain_adam(twin)
    targets = [torch.zeros_like(param, dtype=torch.bfloat16) for param in model.parameters()]
    for param, target in zip(model.parameters(), targets, strict=True):
        optimizer.cast_to(param, target)
    for number in range(3):
        for each, its in ((model, optimizer), (twin, other)):
            cases.loss_of(each, number).backward()
            if number and its is optimizer:
                optimizer.clip_grad_norm_(0.5)
            elif number:
                clip_grad_norm_(twin.parameters(), 0.5)
            its.step()
            its.zero_grad()
        for param, target in zip(twin.parameters(), targets, strict=True):
            assert torch.equal(target, param.detach().bfloat16())
    last = [target.clone() for target in targets]
    optimizer.cast_to(next(model.parameters()), None)
    cases.train(model, optimizer, [4])
    changed = [not torch.equal(*pair) for pair in zip(last, targets, strict=True)]
    assert changed == [False, True, True, True, True]


def test_a_target_that_does_not_fit_is_refused() -> None:
    model = cases.network()
    optimizer = offloaded(model)
    weight = next(model.parameters())
    with pytest.raises(ValueError, match=r"contiguous target of shape \(131, 100\), got \(100, 131\)"):
        optimizer.cast_to(weight, torch.zeros(100, 131))
    with pytest.raises(ValueError, match=r"is not the optimizer's"):
        optimizer.cast_to(torch.zeros(2), torch.zeros(2))


class Odd(nn.Module):
    """Parameters that are not one range of memory, scalar, empty, of one element, frozen and never used."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.turned = nn.Parameter(torch.randn(30, 7, generator=generator).t())
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(70), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(70))
        self.long = nn.Parameter(torch.randn(300, generator=generator))
        self.image = nn.Parameter(
            torch.randn(2, 3, 5, 5, generator=generator).contiguous(memory_format=torch.channels_last)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = (self.turned @ x).sin().sum() * self.scalar + self.empty.sum() + self.one.sum()
        return y + (self.long * self.long).sum() + (self.image * self.frozen.sum()).cos().sum()


@pytest.mark.parametrize("overlap_step", [False, True])
def test_parameters_of_all_kinds_are_stepped_on(overlap_step: bool, overlap_copies: bool) -> None:
    def odd_step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        if number == 2:
            model.get_parameter("frozen").requires_grad_(True)
        model(torch.linspace(0, number + 1, 30)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for fused in (True, False):
        for fraction in (0.3, 0.5, 1.0):
            model = Odd()
            twin = copy.deepcopy(model)
            optimizer = OffloadOptimizer(
                torch.optim.Adam,
                model.parameters(),
                host_fraction=fraction,
                overlap_step=overlap_step,
                overlap_copies=overlap_copies,
                fused=fused,
            )
            other = torch.optim.Adam(twin.parameters(), fused=fused)
            for number in range(4):
                odd_step(model, optimizer, number)
                odd_step(twin, other, number)
            assert_equal(model, twin)
            assert_equal(optimizer, other)


def test_parameters_with_gaps_and_strided_gradients_are_read(overlap_copies: bool) -> None:
    """torch's own fused kernels go through memory as if there were neither."""
    for kind in (torch.optim.Adam, torch.optim.SGD):
        params = []
        for fused in (None, False):
            generator = torch.Generator().manual_seed(0)
            gaps = nn.Parameter(torch.randn(8, 9, generator=generator)[:, ::2])
            turned = nn.Parameter(torch.randn(7, 6, generator=generator))
            gaps.grad = torch.randn(8, 5, generator=generator)
            turned.grad = torch.randn(6, 7, generator=generator).t()
            optimizer: Optimizer = (
                OffloadOptimizer(kind, [gaps, turned], overlap_copies=overlap_copies, lr=0.1, fused=fused)
                if fused is None
                else kind([gaps, turned], lr=0.1, fused=False)
            )
            for _ in range(3):
                optimizer.step()
            params.append((gaps.detach(), turned.detach()))
        torch.testing.assert_close(*params, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_every_dtype_keeps_its_numbers(dtype: torch.dtype, overlap_copies: bool) -> None:
    settings = {"lr": 0.01, "fused": not dtype.is_complex}
    model = cases.network().to(dtype) if not dtype.is_complex else nn.ParameterList([torch.randn(300).to(dtype)])
    twin = copy.deepcopy(model)
    optimizer = OffloadOptimizer(
        torch.optim.Adam, model.parameters(), host_fraction=0.5, overlap_copies=overlap_copies, **settings
    )
    other = torch.optim.Adam(twin.parameters(), **settings)
    for number in range(3):
        for each, its in ((model, optimizer), (twin, other)):
            for param in each.parameters():
                ramp = torch.arange(param.numel()).view(param.shape) / 100
                param.grad = (torch.full_like(param, 0.5 + number) + ramp).to(dtype)
            its.step()
    assert_equal(model, twin)
    assert_equal(optimizer, other)


def test_a_learning_rate_may_be_a_tensor() -> None:
    mine, theirs = cases.twins()
    rates = [torch.tensor(0.01), torch.tensor(0.01)]
    ours = OffloadOptimizer(torch.optim.Adam, mine.parameters(), host_fraction=0.5, lr=rates[0], fused=True)
    other = torch.optim.Adam(theirs.parameters(), lr=rates[1], fused=True)
    for number in range(3):
        for model, optimizer, rate in ((mine, ours, rates[0]), (theirs, other, rates[1])):
            cases.train(model, optimizer, [number])
            rate.mul_(0.5)
    assert_equal(mine, theirs)


def test_by_default_only_the_host_uses_the_fused_kernel() -> None:
    for fraction, fused in ((1.0, True), (0.0, None)):
        mine, theirs = cases.twins()
        ours, other = offloaded(mine, fraction, lr=0.01), torch.optim.Adam(theirs.parameters(), lr=0.01, fused=fused)
        cases.train(mine, ours)
        cases.train(theirs, other)
        assert_equal(mine, theirs)
        assert ours.param_groups[0]["fused"] is None


@pytest.mark.parametrize("name", [name for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)])
def test_an_optimizer_of_whole_parameters_divides_by_parameters(name: str, overlap_copies: bool) -> None:
    kind = getattr(torch.optim, name)

    def matrices(model: nn.Module) -> list[Tensor]:
        return [param for param in model.parameters() if param.ndim == 2]

    cases.assert_trains_alike(
        lambda model: OffloadOptimizer(
            kind, matrices(model), host_fraction=0.1, overlap_copies=overlap_copies, lr=0.01
        ),
        lambda model: kind(matrices(model), lr=0.01),
        lambda model, optimizer, number: cases.train(model, optimizer, [number]),
    )
    optimizer = OffloadOptimizer(kind, matrices(cases.network()), host_fraction=0.1)
    assert optimizer.placement()[:2] == (524, 13_100)


def test_a_closure_is_evaluated_once_with_gradients() -> None:
    for overlap_step in (False, True):
        model = nn.Linear(3, 1)
        optimizer = OffloadOptimizer(torch.optim.SGD, model.parameters(), overlap_step=overlap_step, lr=0.1)
        calls = []

        def closure(model: nn.Module = model, optimizer: Optimizer = optimizer, calls: list[int] = calls) -> float:
            calls.append(1)
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss.item()

        before = model.weight.detach().clone()
        with torch.no_grad():
            loss = optimizer.step(closure)
        assert calls == [1] and loss is not None and loss > 0 and not torch.equal(before, model.weight)


def test_hooks_on_the_step_are_called_once() -> None:
    model = cases.network()
    calls: list[str] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(type(optimizer).__name__))
    try:
        optimizer = offloaded(model, 0.5)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        cases.train(model, optimizer, range(2))
    finally:
        handle.remove()
    assert calls == ["before", "OffloadOptimizer"] * 2


def test_who_watches_versions_sees_every_step(overlap_copies: bool) -> None:
    model = cases.network()
    optimizer = offloaded(model, 1.0, overlap_copies=overlap_copies, **FUSED_ADAM)
    for number in range(2):
        before = [param._version for param in model.parameters()]
        cases.train(model, optimizer, [number])
        assert all(param._version > version for param, version in zip(model.parameters(), before, strict=True))


def test_an_optimizer_that_is_gone_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.let_parameters_be_away(monkeypatch)
    model, twin = cases.twins()
    weight = next(model.parameters())
    for overlap_step in (False, True):
        optimizer = offloaded(model, 1.0, overlap_step=overlap_step, lr=0.1)
        assert weight._post_accumulate_grad_hooks
        del optimizer
        gc.collect()
        assert not weight._post_accumulate_grad_hooks
    cases.loss_of(model, 0).backward()
    assert_equal(model, twin)


def test_copies_that_clipping_makes_useless_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.let_parameters_be_away(monkeypatch)
    copied: list[int] = []
    original = HostTransfer.copy_out

    def count(self: HostTransfer, copies: Any) -> Any:
        copied.append(len(copies))
        return original(self, copies)

    monkeypatch.setattr(HostTransfer, "copy_out", count)
    model = cases.network()
    optimizer = offloaded(model, 1.0)
    counts = []
    for number in range(4):
        cases.loss_of(model, number).backward()
        counts.append(len(copied))
        if number == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        copied.clear()
    assert counts == [5, 5, 0, 0]


def test_the_garden_of_things_that_can_not_be() -> None:
    params = list(cases.network().parameters())
    with pytest.raises(ValueError, match=r"host_fraction from 0 to 1, got 1\.5"):
        OffloadOptimizer(torch.optim.Adam, params, host_fraction=1.5)
    for fraction in ("half", None, True):
        with pytest.raises(TypeError, match=rf"host_fraction to be a number from 0 to 1, got {fraction!r}"):
            OffloadOptimizer(torch.optim.Adam, params, host_fraction=fraction)  # type: ignore[arg-type]
    for setting in ("overlap_step", "overlap_copies"):
        with pytest.raises(TypeError, match=rf"expected {setting} to be True or False, got 'no'"):
            OffloadOptimizer(torch.optim.Adam, params, **{setting: "no"})
    with pytest.raises(ValueError, match=r"max_norm of at least 0, got -1\.0"):
        OffloadOptimizer(torch.optim.Adam, params).clip_grad_norm_(-1.0)
    with pytest.raises(ValueError, match=r"capturable=True can't be kept"):
        OffloadOptimizer(torch.optim.Adam, params, capturable=True)
    with pytest.raises(ValueError, match=r"differentiable=True can't be kept"):
        OffloadOptimizer(torch.optim.SGD, [{"params": params, "differentiable": True}], lr=0.1)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        OffloadOptimizer(torch.optim.Adam, params, lr=-1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentum'"):
        OffloadOptimizer(torch.optim.Adam, params, momentum=0.9)
    with pytest.raises(ValueError, match="empty parameter list"):
        OffloadOptimizer(torch.optim.Adam, [])


@pytest.mark.simulation
def test_tensors_made_of_tensors_are_refused_and_change_nothing() -> None:
    with compat.fake_default_group(rank=0, world_size=1):
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        param = nn.Parameter(DTensor.from_local(torch.ones(4), mesh))
        optimizer = OffloadOptimizer(torch.optim.Adam, [nn.Parameter(torch.ones(3))])
        with pytest.raises(TypeError, match=r"of type \w+, whose elements .* scale_fsdp\.fully_shard"):
            optimizer.add_param_group({"params": [param]})
        assert len(optimizer.param_groups) == 1 and optimizer.placement().host_elements == 3


def test_sparse_gradients_are_refused_where_they_would_be_copied() -> None:
    for overlap_step in (False, True):
        table = nn.Embedding(10, 3, sparse=True)
        optimizer = OffloadOptimizer(torch.optim.SGD, table.parameters(), overlap_step=overlap_step, lr=0.1)
        with pytest.raises(RuntimeError, match=r"a parameter of shape \(10, 3\) is sparse.*sparse=False"):
            table(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
    table = nn.Embedding(10, 3, sparse=True)
    before = table.weight.detach().clone()
    optimizer = OffloadOptimizer(torch.optim.SGD, table.parameters(), host_fraction=0.0, lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(table.weight[1], before[1] - 0.1)


@pytest.mark.simulation
@pytest.mark.parametrize("overlap_step, overlap_copies", [(False, True), (False, False), (True, False)])
def test_a_simulation_shows_what_is_on_host_and_device(
    overlap_step: bool, overlap_copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, layers = 256, 8
    matrix = 4 * size * size
    cases.small_pieces(monkeypatch, size * size)
    with simulate(device="sim") as simulation:
        model = nn.Sequential(*(nn.Linear(size, size, bias=False, device="sim") for _ in range(layers)))
        optimizer = OffloadOptimizer(
            torch.optim.Adam,
            model.parameters(),
            host_fraction=0.5,
            overlap_step=overlap_step,
            overlap_copies=overlap_copies,
        )
        for _ in range(2):
            simulation.restart()
            model(torch.ones(1, size, device="sim")).sum().backward()
            if not overlap_step:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        device, host = simulation.peak_by_kind, simulation.on("cpu").peak_by_kind
    counts = 4 * layers
    assert device["parameters"] == layers * matrix
    assert device["optimizer state"] == layers * matrix
    assert host["optimizer state"] - layers * matrix <= counts
    assert device.get("gradients", 0) == (0 if overlap_step else layers * matrix)
    # Two or three slots of a parameter and its gradient, or the gradients of half the parameters and slots without.
    staged = host.get("temporaries", 0) - counts
    assert 4 * matrix <= staged <= (7 if overlap_copies else 6) * matrix
    if overlap_step:
        assert device["temporaries"] <= 4 * matrix  # One gradient, and what Adam needs for one parameter.


@pytest.mark.gpu
@pytest.mark.parametrize("overlap_step, overlap_copies", [(False, True), (False, False), (True, False)])
def test_on_cuda_the_host_s_part_is_computed_beside_the_device_s(
    overlap_step: bool, overlap_copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.small_pieces(monkeypatch, 1024)
    for fraction in (0.0, 0.4, 1.0):
        model, twin = (each.cuda() for each in cases.twins())
        optimizer = OffloadOptimizer(
            torch.optim.Adam,
            model.parameters(),
            host_fraction=fraction,
            overlap_step=overlap_step,
            overlap_copies=overlap_copies,
            lr=0.01,
        )
        other = torch.optim.Adam(twin.parameters(), lr=0.01)
        targets = [torch.zeros_like(param, dtype=torch.bfloat16) for param in model.parameters()]
        for param, target in zip(model.parameters(), targets, strict=True):
            optimizer.cast_to(param, target)
        for each, its in ((model, optimizer), (twin, other)):
            cases.train(each, its)
        for mine, theirs, target in zip(model.parameters(), twin.parameters(), targets, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            assert torch.equal(target, mine.detach().bfloat16())
        for part in optimizer.state.parts():
            assert part.state["exp_avg"].device.type == ("cpu" if part.on_host else "cuda")
