"""What differs between a forward and its recomputation, by the name of the module and the first tensor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import RecomputationError, check_recomputation, checkpoint_wrapper


class Differs(nn.Module):
    """Counts its calls, and lets the count decide what it computes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        again = self.calls > 1
        if self.how == "shape":
            return x.repeat(2 if again else 1, 1).sum(0)
        if self.how == "dtype":
            return x.mul(torch.ones(1, dtype=torch.float64 if again else torch.float32)).exp().float()
        if self.how == "value":
            return x.mul(2.0 if again else 1.0).exp()
        if self.how == "operator":
            return x.cos() if again else x.sin()
        if self.how == "last":  # Of which autograd saves the input: torch would end the recomputation before it runs.
            return x.sin() if again else x.exp()
        if self.how == "less":
            return x if again else x + 1
        if self.how == "more":
            return x.exp().exp() if again else x.exp()
        return x.exp()


def net(how: str, **kwargs: Any) -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4), Differs(how), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(inner, **kwargs), nn.Linear(4, 4))


class After(nn.Module):
    """Differs after the call of a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.differs = nn.Linear(4, 4), Differs("operator")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Differs.forward(self.differs, self.inside(x))
        return y


def test_a_difference_after_an_inner_module_names_the_outer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(nn.Sequential(After(), nn.Tanh())))
    with check_recomputation(model):
        output = model(torch.randn(3, 4))
        with pytest.raises(RecomputationError, match=r"aten.sin.default in '1\.0' in the forward, and is aten.cos"):
            output.sum().backward()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shape", r"'1': tensor 0 of operator \d+, aten.repeat.default in '1\.1', was \[3, 4\] float32 .* is \[6, 4\]"),
        ("dtype", r"aten\.(ones|mul)\S* in '1\.1', was .* float32 .*is .* float64"),
        ("value", r"aten.mul.Tensor in '1\.1', was \[3, 4\] float32 on cpu of other values in the forward"),
        (
            "operator",
            r"operator \d+ was aten.sin.default in '1\.1' in the forward, and is aten.cos.default in '1\.1' now",
        ),
        ("more", r"operator \d+ was aten.tanh.default in '1\.2' in the forward, and is aten.exp.default in '1\.1' now"),
    ],
)
@pytest.mark.parametrize("keep", [None, ["addmm"]])
def test_the_first_difference_is_named(how: str, said: str, keep: Any) -> None:
    model = net(how, keep=keep)
    with check_recomputation(model, values=True):
        output = model(torch.randn(3, 4))
        with pytest.raises(RecomputationError, match=said):
            output.sum().backward()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("last", r"'0': operator 0 was aten.exp.default in '0' in the forward, and is aten.sin.default in '0' now"),
        ("less", r"'0': operator 1, aten.add.Tensor in '0\.1', ran in the forward, and not now; what a "),
    ],
)
def test_a_difference_after_an_early_stop_is_found(how: str, said: str) -> None:
    inner = Differs(how) if how == "last" else nn.Sequential(nn.Tanh(), Differs(how))
    model = nn.Sequential(checkpoint_wrapper(inner))
    with check_recomputation(model):
        output = model(torch.ones(2, requires_grad=True))
        with pytest.raises(RecomputationError, match=said):
            output.sum().backward()


def test_torchs_own_error_is_told_with_what_finds_the_difference() -> None:
    model = net("dtype")
    with pytest.raises(RuntimeError, match="different metadata than during the forward") as told:
        model(torch.randn(3, 4)).sum().backward()
    (note,) = told.value.__notes__
    assert note.startswith(
        "This happened while the forward of a Sequential was computed again. `with scale_checkpoint."
    )
    assert "check_recomputation(model):` around forward and backward says in which module" in note


class Inward(nn.Module):
    """Goes backward inside of its own forward, through what it has saved last."""

    def forward(self, x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inner.exp().sum(), inner)
        return (x * slope).exp()


def test_a_backward_inside_of_a_forward_is_no_difference() -> None:
    given, plain = torch.randn(3, requires_grad=True), Inward()
    (expected,) = torch.autograd.grad(plain(given).sum(), given)
    model = nn.Sequential(checkpoint_wrapper(Inward()))
    with check_recomputation(model, values=True):
        model(given).sum().backward()
    assert given.grad is not None and torch.equal(given.grad, expected)


def test_values_are_compared_on_request() -> None:
    for how, values in (("value", False), ("same", True)):
        model = net(how)
        with check_recomputation(model, values=values), torch.autocast("cpu", dtype=torch.bfloat16, enabled=not values):
            model(torch.randn(3, 4)).sum().backward()


def test_replayed_noise_and_statistics_are_no_difference() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), checkpoint_wrapper(nn.Linear(4, 4)))
    model = nn.Sequential(checkpoint_wrapper(inner), nn.Tanh())
    with check_recomputation(model, values=True):
        for _ in range(2):
            model(torch.randn(6, 4)).sum().backward()
    careless = nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(nn.Dropout(0.5), preserve_random_state=False))
    with (
        check_recomputation(careless, values=True),
        pytest.raises(RecomputationError, match=r"'1': .* of other values"),
    ):
        careless(torch.ones(64, 4)).sum().backward()


def test_statistics_of_a_kept_norm_are_no_difference() -> None:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)  # It averages what the operator has updated.
    model = nn.Sequential(
        nn.Linear(5, 5), checkpoint_wrapper(nn.Sequential(norm, nn.GELU()), keep=["native_batch_norm"])
    )
    with check_recomputation(model, values=True):
        for _ in range(2):
            model(torch.randn(3, 4, 5)).sum().backward()


class Filled(nn.Module):
    """Views memory before it is written."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[..., :4], y[..., 4:] = x[..., 4:].sin(), x[..., :4].cos()
        return y


@pytest.mark.parametrize("keep", [None, "selective", lambda *args, **kwargs: True])
@pytest.mark.parametrize("offload", [False, True])
def test_kernels_scratch_and_inner_parts_are_no_difference(keep: Any, offload: bool) -> None:
    kwargs = {"keep": keep, "offload_to": "host" if offload else None, "min_bytes": 0}
    for inner in (
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()),
        nn.GRU(8, 8, 2, dropout=0.3, batch_first=True),
        nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True),
        nn.LSTMCell(8, 8),
        nn.RReLU(),
        Filled(),
    ):
        for inner_kwargs in ({}, kwargs):
            torch.manual_seed(0)
            part = checkpoint_wrapper(copy.deepcopy(inner), **inner_kwargs)
            model = nn.Sequential(nn.Linear(8, 8), part, First(), nn.Linear(8, 8))
            checkpoint_wrapper(model, **kwargs)
            with check_recomputation(model, values=True):
                for _ in range(2):
                    x = torch.randn(3, 8) if isinstance(inner, nn.LSTMCell) else torch.randn(3, 5, 8)
                    model(x).square().sum().backward()


class First(nn.Module):
    def forward(self, x: Any) -> Tensor:
        y: Tensor = x if isinstance(x, Tensor) else x[0]
        return y


def test_it_is_entered_once_and_ends_with_its_block() -> None:
    model = net("value")
    with check_recomputation(model), pytest.raises(RuntimeError, match="active already"), check_recomputation(model):
        pass
    model(torch.randn(3, 4)).sum().backward()
