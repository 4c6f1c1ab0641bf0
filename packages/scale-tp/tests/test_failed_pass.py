from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_core import compat
from scale_core.comm.group import Group, group_of
from scale_core.errors import TransferError
from scale_core.testing.async_gloo import BACKEND
from scale_tp import failed_pass, parallelize
from scale_tp.conversion import model_hooks

LIMIT_SECONDS = 3600  # Longer than a test may last: who waits for it fails the test.


def build(group: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3)]
    return cast(
        nn.Sequential, parallelize(nn.Sequential(*blocks), {"*.0": "colwise", "*.2": "rowwise"}, group or group_of())
    )


def raise_before(block: nn.Module, *ranks: int) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        if dist.get_rank() in ranks:
            raise ValueError(f"no such token\n(seen by rank {dist.get_rank()})")

    return block.register_forward_pre_hook(hook)


class FailsInBackward(torch.autograd.Function):
    """The identity; its backward fails on these ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: tuple[int, ...]) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if dist.get_rank() in ctx.ranks:
            raise ValueError("no such gradient")
        return grad, None


def fail_in_backward(block: nn.Module, *ranks: int) -> Any:
    return block.register_forward_hook(lambda module, args, output: FailsInBackward.apply(output, ranks))


@pytest.mark.gloo("a rank that fails ends the connections that its data takes")
@pytest.mark.fault(11)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("num_block", [1, pytest.param(0, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "let_fail, own_error, told",
    [
        (raise_before, "no such token", "raised ValueError: no such token"),
        (fail_in_backward, "no such gradient", "its backward pass failed, with an"),
    ],
)
def test_others_hear_at_once_of_a_rank_that_fails_in_a_pass(
    let_fail: Callable[..., Any], own_error: str, told: str, num_block: int
) -> None:
    rank = dist.get_rank()
    model = build(dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS)))
    x = torch.ones(2, 4)
    model(x).sum().backward()
    hook = let_fail(model[num_block], 1)
    error, text = (ValueError, own_error) if rank == 1 else (TransferError, rf"\n  rank 1: {told}")
    with pytest.raises(error, match=text) as caught:
        for _ in range(2):  # The others may be in a backward pass, and then in the next forward.
            model(x).sum().backward()
    notes = " ".join(getattr(caught.value, "__notes__", []))
    hook.remove()
    if rank != 1:
        assert "in a sum of [2, 4]" in notes
        return
    if let_fail is raise_before:
        assert "are in the middle of this pass" in notes and "start from the last checkpoint" in notes
    with pytest.raises(TransferError, match="closed its connections"):  # And sends nothing that they could take.
        model(x)


@pytest.mark.ranks(3, backend=BACKEND)
@pytest.mark.parametrize("let_fail", [raise_before, fail_in_backward])
def test_a_failing_rank_aborts_a_communicator_ordered_by_calls(let_fail: Callable[..., Any]) -> None:
    """As on NCCL, where nobody sees that a rank is gone, and its next message is taken for another one."""
    rank = dist.get_rank()
    model = build(dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS)))
    x = torch.ones(2, 4)
    model(x).sum().backward()
    let_fail(model[1], 1)
    with pytest.raises(ValueError if rank == 1 else TransferError) as caught:
        for _ in range(2):
            model(x).sum().backward()
    told = "raised ValueError: no such token" if let_fail is raise_before else "its backward pass failed"
    assert rank == 1 or f"rank 1: {told}" in str(caught.value)
    assert "no answer within" not in str(caught.value)
    with pytest.raises(TransferError, match="the communicator was aborted"):
        model(x)


class Store:
    """A store in which nothing is set."""

    def check(self, keys: list[str]) -> bool:
        return False


@pytest.mark.parametrize("gone", ["process group", "store"])
def test_the_watch_for_an_abort_ends_with_what_it_watches(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [Store()]
    monkeypatch.setattr(failed_pass, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(failed_pass, "next_unique_id", lambda *_: 0)
    monkeypatch.setattr(compat, "default_store", lambda: stores[0] if stores else None)
    before = set(threading.enumerate())
    group = Group(0, 2, cast(Any, Store()), "nccl", (0, 1))
    failed_pass.CommunicatorAbort(group)
    (watch,) = set(threading.enumerate()) - before
    if gone == "store":
        stores.clear()
    else:
        del group
    watch.join(30)
    assert not watch.is_alive()


class Backend:
    """One of a process group's: it counts how often it is aborted."""

    def __init__(self, name: str) -> None:
        self.name = lambda: name
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1


def test_of_a_groups_backends_gloo_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = Backend("gloo"), Backend("nccl")
    monkeypatch.setattr(compat, "_backends", lambda group: [gloo, nccl])
    compat.abort_communicators(cast(Any, None))
    assert (gloo.aborts, nccl.aborts) == (0, 1)


@pytest.mark.ranks(2)
def test_where_all_of_them_fail_they_go_on() -> None:
    model = build()
    found = [model(torch.ones(2, 4))]
    for _ in range(2):
        hook = raise_before(model[1], 0, 1)
        with pytest.raises(ValueError, match="no such token") as raised:
            model(torch.ones(2, 4))
        assert not getattr(raised.value, "__notes__", [])
        hook.remove()
        hook = fail_in_backward(model[1], 0, 1)
        with pytest.raises(ValueError, match="no such gradient"):
            model(torch.ones(2, 4)).sum().backward()
        hook.remove()
        found.append(model(torch.ones(2, 4)))
        found[-1].sum().backward()
    first, *later = found
    for found in later:
        assert torch.equal(first, found)


class Nothing(nn.Module):
    def forward(self) -> None:
        return None


@pytest.mark.ranks(2)
def test_what_is_no_failure_of_the_pass_asks_nobody() -> None:
    """How often the other ranks are asked whether they have failed: never here."""
    asked: list[object] = []
    model_hooks.exchange = lambda *args, **options: asked.append(args)  # type: ignore[assignment,misc]
    model = build()
    for use_reentrant in (False, True):
        checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    nothing = Nothing()
    nothing.register_forward_hook(model_hooks.FailedPass(group_of()), always_call=True)
    try:
        raise KeyError
    except KeyError:
        assert sys.exception() is not None
        nothing()
    assert len(asked) == 0
