"""The promise: the same numbers as DistributedDataParallel with the plain optimizer, whatever is sharded."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from with_options import with_options

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_oss import OSS, OSSOptions, ShardedDataParallel

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01, "t0": 1.0, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {"weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = (torch.optim.Muon, {"lr": 0.02})
REFUSED = {"LBFGS", "SparseAdam"}


class Net(nn.Module):
    """Odd sizes, a scalar, batch statistics, and a branch that not every pass takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)
        self.branch, self.last = nn.Linear(7, 7), nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.frozen = nn.Parameter(torch.ones(2, 3), requires_grad=False)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        if branch:
            x = self.branch(x)
        return self.last(x) * self.scale


class Matrices(nn.Module):
    """What Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        accumulate: Micro-batches per step; `no_sync` around all but the last.
        manual: All of them under `no_sync`, then `reduce()`.
        forwards: Forward passes before the backward.
        freeze: Freezes a layer for the middle steps.
        skip_branch: No rank uses the branch in every other step.
        half: Gradients travel in fp16.
        scaled: The loss is scaled, and the gradients are divided again.
        zeros: Gradients are cleared to zeros, with which what is not used is stepped on, too.
    """

    optimizer: str = "adam"
    sharded: bool = True
    accumulate: int = 1
    manual: bool = False
    forwards: int = 1
    freeze: bool = False
    clip: float | None = None
    buffers: bool = True
    skip_branch: bool = False
    half: bool = False
    scaled: bool = False
    zeros: bool = False
    bucket_numel: int = 40
    overlap: bool = True
    groups: bool = False
    steps: int = 5
    dtype: torch.dtype = torch.float32


def data(step: int, rank: int, micro: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def param_groups(model: nn.Module, case: Case) -> Any:
    if not case.groups:
        return list(model.parameters())
    wide = [param for param in model.parameters() if param.ndim > 1]
    return [{"params": wide, "lr": 0.02}, {"params": [p for p in model.parameters() if p.ndim < 2]}]


class Replicas(DistributedDataParallel):
    """torch 2.8 counts taking rank 0's buffers as a change in place, and refuses a backward of two forwards for it."""

    def _sync_buffers(self) -> None:
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.module.buffers())):
            super()._sync_buffers()  # type: ignore[no-untyped-call]


# torch 2.13 renamed it, and deprecated the old name.
TAKES_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


@dataclass
class Side:
    """One of the two that are compared: the plain one, or ours."""

    model: nn.Module
    wrapped: Any
    optimizer: Any
    ours: bool
    scaler: GradScaler
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, case: Case, step: int, rank: int) -> None:
        freeze = case.freeze and step in (1, 2)
        self.model.first.requires_grad_(not freeze)
        for micro in range(case.accumulate):
            last = micro == case.accumulate - 1 and not (case.manual and self.ours and case.sharded)
            if last:
                self._pass(case, step, rank, micro)
            else:
                with self.wrapped.no_sync():
                    self._pass(case, step, rank, micro)
        if case.manual and self.ours and case.sharded:
            self.wrapped.reduce()
        if case.scaled and case.clip is not None:
            self.scaler.unscale_(self.optimizer)
        if case.clip is not None:
            clip = self.optimizer.clip_grad_norm_ if self.ours else self._clip
            self.norms.append(float(clip(case.clip)))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not case.zeros)

    def _pass(self, case: Case, step: int, rank: int, micro: int) -> None:
        branch = not (case.skip_branch and step % 2)
        batches = [data(step, rank, 10 * micro + number).to(case.dtype) for number in range(case.forwards)]
        loss = sum((self.wrapped(x, branch).square().mean() for x in batches), torch.zeros(()))
        self.losses.append(loss.item())
        self.scaler.scale(loss).backward()

    def _clip(self, max_norm: float) -> Tensor:
        """In fp64: torch adds fp32 up in fp32, in an order of the processor's own."""
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        norm = torch.nn.utils.get_total_norm([grad.double() for grad in grads]).to(grads[0].dtype)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return norm


def sides(case: Case, group: Any = None) -> tuple[Side, Side]:
    torch.manual_seed(0)
    model = (Matrices() if case.optimizer == "muon" else Net()).to(case.dtype)
    cls, kwargs = OPTIMIZERS[case.optimizer]
    plain = copy.deepcopy(model)
    ddp_kwargs: dict[str, Any] = {"process_group": group, "find_unused_parameters": case.skip_branch or case.freeze}
    if not case.buffers:
        ddp_kwargs[TAKES_BUFFERS] = False
    ddp = Replicas(plain, **ddp_kwargs)
    if case.half:
        ddp.register_comm_hook(None, in_half)
    oss = OSS(
        param_groups(model, case), cls, group, **with_options(OSSOptions, bucket_numel=case.bucket_numel, **kwargs)
    )
    wrapped: nn.Module
    if case.sharded:
        wrapped = ShardedDataParallel(
            model, oss, group, broadcast_buffers=case.buffers, overlap_gather=case.overlap, reduce_fp16=case.half
        )
    else:
        wrapped = Replicas(model, **ddp_kwargs)
    scaling: dict[str, Any] = {"init_scale": 1024.0, "enabled": case.scaled}
    theirs = Side(plain, ddp, cls(param_groups(plain, case), **kwargs), False, GradScaler("cpu", **scaling))
    return theirs, Side(model, wrapped, oss, True, ShardedGradScaler(process_group=group, **scaling))


def in_half(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and takes no words for them.
    """What travels is rounded to fp16; the sum is not."""
    rounded = bucket.buffer().half().float().div_(dist.get_world_size())
    return dist.all_reduce(rounded, async_op=True).get_future().then(lambda done: done.value()[0])


def assert_equal_to_ddp(cases: Sequence[Case], group: Any = None) -> None:
    """Trains both sides of each case: equal to the bit, but for norms, which may differ by 2 ulp."""
    for case in cases:
        plain, ours = sides(case, group)
        # DDP can not be told to reduce by hand: its last micro-batch is outside of no_sync(), and takes buffers twice.
        buffers_differ = case.manual and case.buffers and case.forwards > 1
        names = dict(plain.model.named_parameters()) if buffers_differ else plain.model.state_dict()
        for step in range(case.steps):
            for side in (plain, ours):
                side.step(case, step, group_of(group).rank)
            ours.optimizer.wait()
            states = [{name: side.model.state_dict()[name] for name in names} for side in (ours, plain)]
            assert_equal(*states, f"step {step}, {case}")
            assert ours.losses == plain.losses, (step, case)
            ulp = torch.finfo(torch.float32).eps
            assert ours.norms == pytest.approx(plain.norms, rel=2 * ulp, abs=0.0), (step, case)


# Every value of every setting beside every optimizer once, and those pairs that touch the same code.
CASES = [
    *(Case(optimizer=name, sharded=way, steps=3) for name, way in itertools.product(OPTIMIZERS, (True, False))),
    Case(accumulate=3),
    Case(accumulate=2, sharded=False, optimizer="adamw"),
    Case(accumulate=2, manual=True),
    Case(accumulate=1, manual=True, optimizer="sgd", freeze=True),
    Case(forwards=2),
    Case(forwards=2, accumulate=2, overlap=False),
    Case(freeze=True),
    Case(freeze=True, sharded=False, optimizer="adafactor"),
    Case(buffers=False, groups=True),
    Case(skip_branch=True, optimizer="adamw"),
    Case(skip_branch=True, accumulate=2, optimizer="sgd"),
    Case(skip_branch=True, optimizer="adamw", zeros=True),
    Case(skip_branch=True, freeze=True, optimizer="adafactor", zeros=True),
    Case(skip_branch=True, optimizer="sgd", sharded=False, zeros=True),
    Case(groups=True, sharded=False, bucket_numel=1),
    Case(bucket_numel=10_000, groups=True, optimizer="sgd"),
]
# Clipping by a norm that differs in the last place would differ in the weights: a norm below the limit changes nothing.
CLIPPED = [Case(clip=1e6), Case(clip=1e6, sharded=False, groups=True), Case(clip=1e6, accumulate=2, skip_branch=True)]


# FairScale's matrix: each of these two ways.
MATRIX: dict[str, tuple[Any, Any]] = {
    "buffers": (True, False),
    "accumulate": (1, 2),
    "freeze": (False, True),
    "half": (False, True),
    "clip": (None, 1e6),
    "scaled": (False, True),
    "manual": (False, True),
    "forwards": (1, 2),
}


def matrix(places: Iterable[Sequence[int]]) -> list[Case]:
    return [
        Case(steps=4, groups=True, **{name: ways[at] for (name, ways), at in zip(MATRIX.items(), place, strict=True)})
        for place in places
    ]


# Any two settings in all four ways: 8 columns that differ from each other, in the shape of a Hadamard matrix.
PAIRS = [[(row & column).bit_count() % 2 for column in range(1, 9)] for row in range(16)]


@pytest.mark.composition("OSS", "DistributedDataParallel")
@pytest.mark.composition("OSS", "torch.optim")
@pytest.mark.composition("ShardedDataParallel", "torch.optim")
@pytest.mark.ranks(2)
def test_at_two_ranks_all_is_equal_to_ddp_to_the_bit() -> None:
    assert_equal_to_ddp(CASES)


@pytest.mark.ranks(2)
def test_norms_are_those_of_the_whole_gradients() -> None:
    assert_equal_to_ddp(CLIPPED)


@pytest.mark.gloo("half precision is added in the wider dtype")
@pytest.mark.ranks(2)
def test_any_two_settings_together_are_equal_to_ddp_to_the_bit() -> None:
    for (_, first), (_, second) in itertools.combinations(enumerate(zip(*PAIRS, strict=True)), 2):
        assert set(zip(first, second, strict=True)) == set(itertools.product((0, 1), repeat=2))
    assert_equal_to_ddp(matrix(PAIRS))


@pytest.mark.soak
@pytest.mark.ranks(2, limit_seconds=1200.0)
def test_all_settings_together_are_equal_to_ddp_to_the_bit() -> None:
    everything = matrix(itertools.product((0, 1), repeat=len(MATRIX)))
    assert_equal_to_ddp(everything)


@pytest.mark.ranks(3)
def test_two_runs_at_three_ranks_are_equal_to_the_bit() -> None:
    """Ours after the last step of each, trained twice; and the plain one's."""
    cases = [
        Case(optimizer="sgd", accumulate=2, forwards=2, dtype=torch.float64),
        Case(optimizer="sgd", manual=True, clip=0.05, dtype=torch.float64),
    ]
    found: list[list[Tensor]] = []
    for case in cases:
        for _ in range(2):
            plain, ours = sides(case)
            for step, side in itertools.product(range(case.steps), (plain, ours)):
                side.step(case, step, group_of().rank)
            found.append(list(ours.wrapped.state_dict().values()))
        found.append(list(plain.model.state_dict().values()))
    for first, second, plain in zip(found[::3], found[1::3], found[2::3], strict=True):
        for one, other, theirs in zip(first, second, plain, strict=True):
            assert torch.equal(one, other)
            assert torch.allclose(one, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.ranks(2, in_turn=True)
def test_clipped_gradients_give_the_plain_weights(sharded: bool) -> None:
    """Clips in earnest."""
    case = Case(clip=0.05, sharded=sharded, optimizer="sgd", dtype=torch.float64)
    plain, ours = sides(case)
    for step in range(3):
        for side in (plain, ours):
            side.step(case, step, group_of().rank)
    ours.optimizer.wait()
    assert max(plain.norms) > 0.05
    torch.testing.assert_close(list(ours.model.parameters()), list(plain.model.parameters()), rtol=0.0, atol=1e-12)


@pytest.mark.ranks(4)
def test_each_subgroup_trains_by_itself() -> None:
    cases = [Case(), Case(optimizer="adafactor", sharded=False, clip=1e6), Case(accumulate=2, manual=True, clip=1e6)]
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    assert_equal_to_ddp(cases, groups[dist.get_rank() // 2])


@pytest.mark.ranks(1)
def test_a_world_of_one_is_plain_pytorch() -> None:
    cases = [Case(), Case(skip_branch=True, freeze=True), *(Case(name, sharded=False, steps=2) for name in OPTIMIZERS)]
    assert_equal_to_ddp(cases)


def test_the_table_has_every_class_of_torch_that_can_be_sharded() -> None:
    known = {name for name, each in vars(torch.optim).items() if isinstance(each, type) and issubclass(each, Optimizer)}
    assert {cls.__name__ for cls, _ in OPTIMIZERS.values()} == known - REFUSED - {"Optimizer"}
