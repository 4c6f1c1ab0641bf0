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
from scale_tp import comm
from scale_tp.async_tp import all_reduce_matmul as overlap_sums
from scale_tp.async_tp import collective_matmul as overlap
from scale_tp.async_tp.lazy_input import DeferredInput, DeferredInputTensor
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import GPT2_PLAN
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


class Counting:
    """Counts what overlaps, and what does not, forward and backward."""

    PLACES = (
        (comm, "all_reduce_sum"),
        (comm, "all_gather_along"),
        (comm, "reduce_scatter_along"),
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


class _Own(torch.autograd.Function):
    """A function that somebody has written, who knows of no arrivals."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def _sequence() -> Tensor:
    return torch.arange(14, dtype=torch.float64).view(1, 7, 2)


def _own_part() -> Tensor:
    return scatter_to_sequence_parallel_region(_sequence(), group_of()).requires_grad_()


def _arriving(part: Tensor) -> DeferredInputTensor:
    return DeferredInputTensor(DeferredInput(part, group_of(), 1, 2))


@pytest.mark.ranks(2)
def test_whoever_computes_with_it_gets_the_full_sequence() -> None:
    group, whole, part = group_of(), _sequence(), _own_part()
    told = _arriving(part)
    assert isinstance(told, Tensor) and told.shape == (1, 7, 2) and told.size(1) == 7 and told.dim() == 3
    assert told.dtype == torch.float64 and told.device == part.device and len(told) == 1 and told.requires_grad
    assert not told.deferred.is_available
    # Whoever computes with it gets the whole, and its gradient goes to everybody's part.
    doubled = told * 2
    assert type(doubled) is Tensor and torch.equal(doubled, whole * 2) and told.deferred.is_available
    (found,) = torch.autograd.grad(doubled.sum(), part)
    assert torch.equal(found, torch.full_like(part, 2.0 * group.size))


@pytest.mark.ranks(2)
def test_a_statistic_without_gradients_may_read_it_first() -> None:
    whole, told = _sequence(), _arriving(_own_part())
    with torch.no_grad():
        assert told.mean() == whole.mean()
    assert torch.equal(torch.cat([told, told]).sum(), 2 * whole.sum()) and told.deferred.gather().requires_grad


@pytest.mark.ranks(2)
def test_a_reader_that_would_lose_the_gradient_is_refused() -> None:
    """In the backward pass at the latest."""
    whole, part = _sequence(), _own_part()
    with pytest.raises(RuntimeError, match=r"a torch.autograd.Function was given the sequence before it was gathered"):
        _Own.apply(_arriving(part)).sum().backward()
    told, message = _arriving(part), r"that is not a function of torch, .* or pass overlap_pieces=None"
    with pytest.raises(RuntimeError, match=message), torch._C.DisableTorchFunctionSubclass():
        told * 2
    watched = nn.Linear(2, 3).double()
    watched.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"to a module with a hook of register_full_backward_hook: multiply it by 1"):
        watched(_arriving(part)).sum().backward()
    layer = nn.Linear(2, 3).double()
    told = _arriving(part)
    assert torch.equal(layer(told), layer(whole))


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("selective", [False, True])
def test_a_checkpoint_within_a_module_computes_the_same(selective: bool) -> None:
    """A checkpoint within a module is given what arrives: computing again has to go the same way."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    options = {"context_fn": contexts} if selective else {}
    expected, model = _gradients(gpt2().double(), None), gpt2().double()
    for block in model.transformer.h:
        block.mlp.forward = functools.partial(checkpoint, block.mlp.forward, use_reentrant=False, **options)
    torch.testing.assert_close(_gradients(model, 2), expected, rtol=0, atol=1e-10)


def _gradients(model: nn.Module, overlap_pieces: int | None) -> list[Tensor]:
    parallelize(model, GPT2_PLAN, group_of(), sequence_parallel=True, overlap_pieces=overlap_pieces)
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


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("way", WAYS)
def test_the_order_and_graph_of_readers_change_no_gradient(way: str) -> None:
    """Whoever reads first, with a graph or without, and whatever is computed again by itself, changes no gradient."""
    expected = _of_readers(way, lambda model: model)
    for sequence_parallel in (True, False):
        options: Any = {"sequence_parallel": sequence_parallel, "overlap_pieces": 2}
        divide = functools.partial(parallelize, plan=READERS_PLAN, process_group=group_of(), **options)
        torch.testing.assert_close(_of_readers(way, divide), expected, rtol=0, atol=1e-10)


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kind, pieces", [("llama", 3), ("gpt2", 1)])
def test_models_that_overlap_have_the_same_gradients(kind: str, pieces: int, sequence_parallel: bool) -> None:
    expected = _trained(kind, sequence_parallel, None)
    with Counting() as counts:
        torch.testing.assert_close(_trained(kind, sequence_parallel, pieces), expected, rtol=0, atol=1e-10)
    # Of two blocks of two perceptrons each, two forwards and one backward.
    if sequence_parallel:
        assert counts["all_gather_chunks"] == 2 * 4 + 4, "into the columns, and into the rows' backward"
        assert counts["reduce_scatter_chunks"] == 2 * 4 and counts["start_reduce_scatter"] == 4
        # What has no product beside it: behind the last block, before the loss, the norms and biases of a part.
        assert counts["start_all_gather"] == 0
        assert counts["all_gather_along"] == 5 and counts["reduce_scatter_along"] == 0
    else:
        # The head's gradient is the fifth; what is left are the words.
        assert counts["start_all_reduce"] == 2 * 4 * pieces + 5 and counts["all_reduce_sum"] == 2
