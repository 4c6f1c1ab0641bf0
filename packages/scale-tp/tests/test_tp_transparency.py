"""The promise: five steps of training, divided between ranks, are those of the plain model.

Twice: against a plain model of torch's layers, but for what another order of sums can do, which scale-check measures;
and against one process that adds in the stated order, to the bit. Sizes are prime, so that nothing divides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import emulated_ranks as emulated
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from with_options import with_options

import scale_tp
from scale_check import parity
from scale_core.comm.group import Group, group_of
from scale_core.optim.clip_grad import clip_grad_norm_
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp import LayerOptions, megatron
from scale_tp.split import Split

WORDS, DIM, HIDDEN, LENGTH = 11, 5, 13, 7
# A power of two: then a product and a sum that are rounded together are those that are rounded apart, so that no
# kernel treats the last elements of a tensor otherwise than those before.
RATE, MOMENTUM = 0.125, 0.5


@dataclass(frozen=True)
class Case:
    """One way to train."""

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    bias: bool = True
    clip: float | None = None


CASES = [
    Case(),
    Case(sequence_parallel=True),
    Case(dtype=torch.bfloat16),
    Case(dtype=torch.bfloat16, sequence_parallel=True, bias=False),
    Case(clip=0.25),
    Case(sequence_parallel=True, clip=0.25),
]


class Plain(nn.Module):
    """A small language model of torch's own layers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(1)
        kwargs: Any = {"dtype": case.dtype}
        self.embed = nn.Embedding(WORDS, DIM, padding_idx=3, **kwargs)
        self.norm = nn.LayerNorm(DIM, **kwargs)
        self.up = nn.Linear(DIM, HIDDEN, bias=case.bias, **kwargs)
        self.down = nn.Linear(HIDDEN, DIM, bias=case.bias, **kwargs)
        self.head = nn.Linear(DIM, WORDS, bias=False, **kwargs)
        with torch.no_grad():
            for param in self.parameters():
                param.uniform_(-0.7, 0.7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


class Emulated(Plain):
    """The same parameters, computed in the order of sums of so many ranks, by one process."""

    def __init__(self, case: Case, num_ranks: int) -> None:
        super().__init__(case)
        self.case, self.num_ranks = case, num_ranks
        self.length = Split.even(LENGTH, num_ranks)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, words = Split.even(HIDDEN, self.num_ranks), Split.even(WORDS, self.num_ranks)
        x = self.embed(ids)  # Of each word one rank has a row, and all others zeros.
        if not self.case.sequence_parallel:
            parts = emulated.column(self.norm(x), self.up.weight, self.up.bias, hidden)
            x = x + emulated.row([F.gelu(part) for part in parts], self.down.weight, self.down.bias, hidden)
        else:
            params = [self.norm.weight, self.norm.bias]
            normed = [F.layer_norm(part, (DIM,), *own) for part, *own in emulated.on_parts(x, 1, self.length, *params)]
            parts = emulated.column(emulated.together(normed, 1), self.up.weight, self.up.bias, hidden)
            total = emulated.row([F.gelu(part) for part in parts], self.down.weight, None, hidden)
            biases = [] if self.down.bias is None else [self.down.bias]
            summands = emulated.on_parts(total, 1, self.length, *biases)
            total = emulated.together([part + own[0] if own else part for part, *own in summands], 1)
            x = x + total
        return words.join(emulated.column(x, self.head.weight, None, words), -1)


class Divided(nn.Module):
    """The same model of the layers of scale-tp; the names are the same."""

    def __init__(self, case: Case, group: Group) -> None:
        super().__init__()
        both: Any = {"process_group": group, "dtype": case.dtype}
        kwargs: Any = {**both, "sequence_parallel": case.sequence_parallel}
        self.embed = scale_tp.VocabParallelEmbedding(WORDS, DIM, **with_options(LayerOptions, padding_idx=3, **kwargs))
        norm: Any = scale_tp.ParallelLayerNorm if case.sequence_parallel else nn.LayerNorm
        self.norm = norm(DIM, dtype=case.dtype, **({"process_group": group} if case.sequence_parallel else {}))
        self.up = scale_tp.ColumnParallelLinear(
            DIM, HIDDEN, case.bias, **with_options(LayerOptions, gather_output=False, **kwargs)
        )
        self.down = scale_tp.RowParallelLinear(
            HIDDEN, DIM, case.bias, **with_options(LayerOptions, input_is_parallel=True, **kwargs)
        )
        self.head = scale_tp.ColumnParallelLinear(DIM, WORDS, False, **with_options(LayerOptions, **kwargs))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shape = (2, LENGTH)
    return [
        (torch.randint(WORDS, shape, generator=generator), torch.randint(WORDS, shape, generator=generator))
        for _ in range(5)
    ]


def train(model: nn.Module, case: Case, clip: Any) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
    """Losses, norms, and the gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    losses, norms, grads = [], [], []
    for ids, target in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        loss.backward()
        grads.append({name: local_tensor(param.grad).clone() for name, param in model.named_parameters()})
        if case.clip is not None:
            norms.append(clip(model.parameters(), case.clip))
        optimizer.step()
        losses.append(loss.detach())
    return losses, norms, grads


def part_of(model: Divided, name: str, whole: Tensor) -> Tensor:
    module_name, _, param_name = name.rpartition(".")
    module = model.get_submodule(module_name)
    return module.shardings[param_name].local_part(whole, module.group.rank) if hasattr(module, "shardings") else whole


@pytest.mark.ranks(2, 3, 4)
def test_five_steps_are_those_of_one_process_in_rank_order() -> None:
    """To the bit; with clipping, the norm is added in another order."""
    group = group_of()
    for case in CASES:
        if case.clip is None:
            ours, emulated_ranks = Divided(case, group), Emulated(case, group.size)
            ours.load_state_dict(emulated_ranks.state_dict())
            losses, _, grads = train(ours, case, None)
            expected_losses, _, expected_grads = train(emulated_ranks, case, None)
            assert all(map(torch.equal, losses, expected_losses)), case
            for step, (own, expected) in enumerate(zip(grads, expected_grads, strict=True)):
                for name, grad in own.items():
                    assert torch.equal(grad, part_of(ours, name, expected[name])), (case, step, name)
            for name, param in ours.named_parameters():
                expected = part_of(ours, name, emulated_ranks.get_parameter(name))
                assert torch.equal(local_tensor(param), expected), (case, name)


def divided(plain: nn.Module, case: Case) -> nn.Module:
    model = Divided(case, group_of())
    model.load_state_dict(plain.state_dict())
    return model


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], clip: float | None
) -> Tensor:
    ids, target = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
    loss.backward()
    if clip is not None:
        clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    "num_ranks, sequence_parallel, clip",
    [(2, False, None), (3, True, None), (4, True, None), (2, True, 0.25), (3, False, 0.25), (4, True, 0.25)],
)
def test_five_steps_are_those_of_torchs_own_layers(num_ranks: int, sequence_parallel: bool, clip: float | None) -> None:
    case = Case(torch.float64, sequence_parallel, clip=clip)
    report = parity(
        partial(Plain, case),
        partial(step, clip=clip),
        partial(divided, case=case),
        num_ranks,
        batches=batches(),
        optimizer=partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM),
        data="all",
    )
    assert report.num_compared > 5 * 20  # Outputs, gradients, weights and momenta of five steps.


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process_trains_the_plain_model_to_the_bit(case: Case) -> None:
    ours, plain = Divided(case, Group()), Plain(case)
    ours.load_state_dict(plain.state_dict())
    found, expected = train(ours, case, nn.utils.clip_grad_norm_), train(plain, case, nn.utils.clip_grad_norm_)
    for one, other in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        assert torch.equal(one, other)
    for name, param in ours.named_parameters():
        assert torch.equal(param, plain.get_parameter(name))


@pytest.mark.ranks(2)
def test_gradients_of_several_batches_add_up() -> None:
    """Gradients of several batches add up: those of replicated parameters are summed once for each."""
    group = group_of()
    case = Case(sequence_parallel=True, dtype=torch.float64)
    ours, plain = Divided(case, group), Plain(case)
    ours.load_state_dict(plain.state_dict())
    for model in (ours, plain):
        for ids, target in batches()[:3]:
            F.cross_entropy(model(ids).flatten(0, 1), target.flatten()).backward()
    for name, param in ours.named_parameters():
        torch.testing.assert_close(local_tensor(param.grad), part_of(ours, name, plain.get_parameter(name).grad))


class Layers(nn.Module):
    """Layers of one width, each of which is computed again in the backward pass."""

    def __init__(self, num_layers: int, **options: Any) -> None:
        super().__init__()
        column, row = (scale_tp.ColumnParallelLinear, scale_tp.RowParallelLinear) if options else (nn.Linear, nn.Linear)
        inner: Any = with_options(LayerOptions, gather_output=False, **options) if options else {}
        outer: Any = with_options(LayerOptions, input_is_parallel=True, **options) if options else {}
        self.layers = nn.ModuleList(
            nn.Sequential(column(3, 5, **inner), nn.Tanh(), row(5, 3, **outer)).double() for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.ranks(2)
def test_gradients_of_sequences_of_two_lengths_add_up() -> None:
    """As where two answers are compared, one backward goes through sequences of two lengths, the first one's last.

    Rank 0 has 2 positions of both, and rank 1 has 1 and 2: what either knows of the first, after all that was divided
    since, the other has to know as well.
    """
    group = group_of()
    plain, ours = Layers(16), Layers(16, process_group=group, sequence_parallel=True)
    ours.load_state_dict(plain.state_dict())
    found, expected = torch.zeros(()).double(), torch.zeros(()).double()
    for length in (3, 4):
        x = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(length)).double()
        expected = expected + plain(x).square().sum()
        part = megatron.scatter_to_sequence_parallel_region(x, group)
        outputs = megatron.gather_from_sequence_parallel_region(ours(part), group, to_model_parallel=False)
        found = found + outputs.square().sum()
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for path, module in ours.named_modules():
        for name, placement in getattr(module, "shardings", {}).items():
            whole = plain.get_submodule(path).get_parameter(name).grad
            grad = local_tensor(module.get_parameter(name).grad)
            torch.testing.assert_close(grad, placement.local_part(whole, group.rank))
