"""lazy_input.py: what the first layer brings into the region beside its product, and what others see of it."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from parallelize_cases import gpt2, llama, loss_of, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_tp import mappings as regions
from scale_tp.async_tp import all_reduce_matmul as overlap_sums
from scale_tp.async_tp import collective_matmul as overlap
from scale_tp.async_tp.lazy_input import DeferredInput, DeferredInputTensor
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import GPT2_PLAN, Plan
from scale_tp.mappings import scatter_to_sequence_parallel_region

BUILDERS = {"llama": (llama, None), "gpt2": (gpt2, GPT2_PLAN)}


def _trained(kind: str, sequence_parallel: bool, overlap_pieces: int | None) -> list[Tensor]:
    """Logits and gradients of a model in fp64."""
    build, plan = BUILDERS[kind]
    model = build(**({"attention_bias": True, "mlp_bias": True} if kind == "llama" else {})).double()
    options: Any = {"sequence_parallel": sequence_parallel, "overlap_pieces": overlap_pieces}
    parallelize(model, plan, group_of(), **options)
    data = tokens(1)
    logits = model(input_ids=data).logits
    loss_of(logits, data).backward()
    with torch.no_grad():
        again = model(input_ids=data).logits
    return [logits, again, *(param.grad for param in model.parameters() if param.grad is not None)]


def _models() -> None:
    for kind, pieces in (("llama", 3), ("gpt2", 1)):
        for sequence_parallel in (True, False):
            expected = _trained(kind, sequence_parallel, None)
            with Counting() as counts:
                found = _trained(kind, sequence_parallel, pieces)
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
            _as_often_as_without(counts, pieces, sequence_parallel)


class Counting:
    """Counts what overlaps, and what does not, forward and backward."""

    PLACES = (
        (regions, "all_reduce_sum"),
        (regions, "all_gather_along"),
        (regions, "reduce_scatter_along"),
        (overlap, "all_gather_chunks"),
        (overlap, "reduce_scatter_chunks"),
        (overlap, "start_all_gather"),
        (overlap, "start_reduce_scatter"),
        (overlap_sums, "start_all_reduce"),
    )

    def __enter__(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        self.before = [(place, name, getattr(place, name)) for place, name in self.PLACES]

        def counting(name: str, act: Any) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                counts[name] += 1
                return act(*args, **kwargs)

            return counted

        for place, name, act in self.before:
            setattr(place, name, counting(name, act))
        return counts

    def __exit__(self, *_: object) -> None:
        for place, name, act in self.before:
            setattr(place, name, act)


def _as_often_as_without(counts: Counter[str], pieces: int, sequence_parallel: bool) -> None:
    """Of two blocks of two perceptrons each, two forwards and one backward."""
    if sequence_parallel:
        assert counts["all_gather_chunks"] == 2 * 4 + 4, "into the columns, and into the rows' backward"
        assert counts["reduce_scatter_chunks"] == 2 * 4 and counts["start_reduce_scatter"] == 4
        # What has no product beside it: behind the last block, before the loss, the norms and biases of a part.
        assert (
            counts["start_all_gather"] == 0 and counts["all_gather_along"] == 5 and counts["reduce_scatter_along"] == 0
        )
    else:
        # The head's gradient is the fifth; what is left are the words.
        assert counts["start_all_reduce"] == 2 * 4 * pieces + 5 and counts["all_reduce_sum"] == 2


class _Own(torch.autograd.Function):
    """A function that somebody has written, who knows of no arrivals."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def _read_by_others() -> None:
    group = group_of()
    whole = torch.arange(14, dtype=torch.float64).view(1, 7, 2)
    part = scatter_to_sequence_parallel_region(whole, group).requires_grad_()

    def arriving() -> DeferredInputTensor:
        return DeferredInputTensor(DeferredInput(part, group, 1, 2))

    told = arriving()
    assert isinstance(told, Tensor) and told.shape == (1, 7, 2) and told.size(1) == 7 and told.dim() == 3
    assert told.dtype == torch.float64 and told.device == part.device and len(told) == 1 and told.requires_grad
    assert not told.deferred.is_available
    # Whoever computes with it gets the whole, and its gradient goes to everybody's part.
    doubled = told * 2
    assert type(doubled) is Tensor and torch.equal(doubled, whole * 2) and told.deferred.is_available
    (found,) = torch.autograd.grad(doubled.sum(), part)
    assert torch.equal(found, torch.full_like(part, 2.0 * group.size))
    # So it is where it is read without gradients first, as by a statistic.
    told = arriving()
    with torch.no_grad():
        assert told.mean() == whole.mean()
    assert torch.equal(torch.cat([told, told]).sum(), 2 * whole.sum()) and told.deferred.gather().requires_grad
    # What would lose the gradient is refused, in the backward pass at the latest.
    with pytest.raises(RuntimeError, match=r"a torch.autograd.Function was given the sequence before it was gathered"):
        _Own.apply(arriving()).sum().backward()
    told, message = arriving(), r"that is no function of torch, .* or pass overlap_pieces=None"
    with pytest.raises(RuntimeError, match=message), torch._C.DisableTorchFunctionSubclass():
        told * 2
    watched = nn.Linear(2, 3).double()
    watched.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"to a module with a hook of register_full_backward_hook: multiply it by 1"):
        watched(arriving()).sum().backward()
    layer = nn.Linear(2, 3).double()
    told = arriving()
    assert torch.equal(layer(told), layer(whole))


def _computed_again() -> None:
    """A checkpoint within a module is given what arrives: computing again has to go the same way."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    expected, plan = _gradients(gpt2().double(), GPT2_PLAN, None), GPT2_PLAN
    for options in ({}, {"context_fn": contexts}):
        model = gpt2().double()
        for block in model.transformer.h:
            block.mlp.forward = functools.partial(checkpoint, block.mlp.forward, use_reentrant=False, **options)
        for one, other in zip(_gradients(model, plan, 2), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def _gradients(model: nn.Module, plan: Plan, overlap_pieces: int | None) -> list[Tensor]:
    parallelize(model, plan, group_of(), sequence_parallel=True, overlap_pieces=overlap_pieces)
    data = tokens(1)
    loss_of(model(input_ids=data).logits, data).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


class Readers(nn.Module):
    """Two layers that read one input, each in a way of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.out, self.way = nn.Linear(6, 4, bias=False), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "looked at, and computed again":
            return x.sum() * 0 + checkpoint(self._read, x, use_reentrant=False)
        return self._read(x)

    def _read(self, x: Tensor) -> Tensor:
        again = {"first computed again": [self.first], "second computed again": [self.second]}.get(self.way, [])
        if self.way == "each computed again":
            again = [self.first, self.second]
        with torch.set_grad_enabled(self.way != "first without a graph"):
            first = self._product(self.first, x, self.first in again)
        return self.out(first * self._product(self.second, x, self.second in again))

    def _product(self, layer: nn.Module, x: Tensor, again: bool) -> Tensor:
        def product(x: Tensor) -> Tensor:
            return layer(x).tanh()

        return checkpoint(product, x, use_reentrant=False) if again else product(x)


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm, self.readers = nn.LayerNorm(4), Readers(way)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.readers(self.norm(x))


class Blocks(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(way), Block(way)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


WAYS = (
    "first without a graph",
    "first computed again",
    "second computed again",
    "each computed again",
    "looked at, and computed again",
)
READERS_PLAN = {f"blocks.*.readers.{name}": "colwise" for name in ("first", "second")} | {
    "blocks.*.readers.out": "rowwise"
}


def _of_readers(way: str, divide: Any) -> list[Tensor | None]:
    torch.manual_seed(0)
    model = divide(Blocks(way).double())
    x = torch.randn(2, 5, 4, dtype=torch.float64).requires_grad_()
    model(x).square().sum().backward()
    return [x.grad, *(block.norm.weight.grad for block in model.blocks)]


def _readers() -> None:
    """Whoever reads first, with a graph or without, and whatever is computed again by itself, changes no gradient."""
    for way in WAYS:
        expected = _of_readers(way, lambda model: model)
        for sequence_parallel in (True, False):
            options: Any = {"sequence_parallel": sequence_parallel, "overlap_pieces": 2}
            found = _of_readers(
                way, functools.partial(parallelize, plan=READERS_PLAN, process_group=group_of(), **options)
            )
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def _two() -> None:
    _models()
    _computed_again()
    _read_by_others()
    _readers()


def test_models_whose_communication_overlaps_are_those_without() -> None:
    run_ranks(_two, 2)
