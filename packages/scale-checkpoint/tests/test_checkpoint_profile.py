"""Profiles of models that are not a plain row of blocks, beside what is measured."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned_models import ResNet, Transformer, build
from rank_values import by_rank
from torch import Tensor, nn
from torch.nn import functional

from scale_checkpoint import apply_plan, plan_memory
from scale_checkpoint.planner import block_benchmark
from scale_checkpoint.planner.plan import MemoryPlan
from scale_checkpoint.planner.profile import profile_memory
from scale_checkpoint.planner.step import measure_step
from scale_checkpoint.wrapper import is_checkpointed
from scale_core.comm.group import group_of

STRATEGIES = ("keep", "recompute", "offload")


class Twice(nn.Module):
    """Each block comes twice; takes a keyword, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transformer(num_blocks=2)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = self.inner.embedding(tokens) * scale
        for block in itertools.chain(self.inner.blocks, self.inner.blocks):
            x = block(x)
        return {"hidden": x, "logits": self.inner.head(x)}


def half_frozen() -> nn.Module:
    model = Transformer(num_blocks=4)
    for part in (model.embedding, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)
    return model


def agree(model: nn.Module, batch: Any, **settings: Any) -> None:
    """Whether what is predicted is what is measured, for each strategy alone and for a mixture."""
    profile = profile_memory(model, batch, strategies=STRATEGIES, repeats=1, **settings)
    mixture = dict(zip(profile.blocks, itertools.cycle(reversed(STRATEGIES)), strict=False))
    for strategies in (*(dict.fromkeys(profile.blocks, strategy) for strategy in STRATEGIES), mixture):
        plan = MemoryPlan(strategies, profile)
        found = measure_step(apply_plan(model, plan), batch, loss=settings.get("loss"), repeats=0)
        assert found.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005), strategies


def test_a_block_that_comes_again_is_treated_in_one_way() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 128, (4, 64))
    agree(
        Twice(),
        {"tokens": tokens, "scale": 2.0},
        loss=lambda output: functional.cross_entropy(output["logits"].flatten(0, 1), tokens.flatten()),
    )


def test_blocks_without_gradients_have_nothing_to_plan() -> None:
    torch.manual_seed(0)
    model, batch = half_frozen(), torch.randint(0, 128, (4, 64))
    profile = profile_memory(model, batch, strategies=STRATEGIES, repeats=1)
    assert [segment.name for segment in profile.segments if segment.is_block] == ["blocks.2", "blocks.3"]
    agree(model, batch)


def test_autocast_counts() -> None:
    model, batch = build("transformer")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agree(model, batch)


def test_blocks_may_be_named() -> None:
    torch.manual_seed(0)
    model, batch = ResNet(), torch.randn(4, 3, 32, 32)
    assert list(profile_memory(model, batch, blocks=["stage2.0", "stage1"], repeats=1).blocks) == ["stage1", "stage2.0"]
    agree(model, batch, blocks=["stage1", "stage2.0"])


def test_a_step_without_gradients_is_refused_changes_nothing() -> None:
    model, batch = build("transformer")
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no parameter of Transformer takes part in the loss"):
        profile_memory(model, batch)
    assert all("forward" not in vars(module) and not module._forward_pre_hooks for module in model.modules())


def test_times_are_taken_at_least_once() -> None:
    with pytest.raises(ValueError, match="repeats=0 was given"):
        profile_memory(*build("transformer"), repeats=0)


def test_equal_blocks_have_equal_times() -> None:
    model, batch = build("transformer")
    profile = profile_memory(model, batch, repeats=1)
    blocks = [segment for segment in profile.segments if segment.is_block]
    assert len({tuple(strategy.seconds for strategy in segment.costs.values()) for segment in blocks}) == 1


def test_only_the_first_of_equal_blocks_is_timed_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def recorded(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
        seen.append(repeats)
        return dict.fromkeys(runs, 1.0)

    monkeypatch.setattr(block_benchmark, "least_seconds", recorded)
    profile = profile_memory(*build("transformer"), repeats=3)
    assert seen == [3] + [1] * (len(profile.blocks) - 1) and len(seen) > 1


def test_live_bytes_are_what_the_allocator_gives_out() -> None:
    """A count of its own: torch's profiler is told of each allocation, where a transformer's kernels take no room."""
    model, batch = build("transformer")
    standing = sum(p.numel() * 4 for p in model.parameters()) + batch.numel() * 8
    activities = [torch.profiler.ProfilerActivity.CPU]
    model(batch).backward()
    model.zero_grad()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        model(batch).backward()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    allocated = max(itertools.accumulate(sizes))
    assert measure_step(model, batch, repeats=0).peak_bytes == pytest.approx(standing + allocated, rel=0.02)


@dataclass
class State:
    hidden: Tensor
    depth: int = 0


class OnStates(nn.Module):
    """Takes a dataclass, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def forward(self, state: State) -> State:
        return State(state.hidden + self.layers(state.hidden), state.depth + 1)


def test_blocks_and_models_may_use_dataclasses() -> None:
    model = nn.Sequential(*(OnStates() for _ in range(3)))
    batch = State(torch.randn(256, 32))
    assert all(len(segment.costs) > 1 for segment in profile_memory(model, batch, repeats=1).segments[1::2])
    agree(model, batch)


class Cache:
    """What a model hands from block to block, and no container that could be taken apart."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.seen.append(self.layer(x))
        return sum(cache.seen[:1], start=x).exp()


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembers() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x


def test_a_block_that_changes_what_it_is_given_is_named() -> None:
    model = Caching()
    with pytest.raises(RuntimeError) as raised:
        profile_memory(model, torch.randn(2, 4), repeats=1)
    assert any(
        "'blocks.0' was measured by itself" in note or "given a Cache" in note for note in raised.value.__notes__
    )
    assert not any(is_checkpointed(block) for block in model.blocks)


class Exchanging(nn.Module):
    """A block whose forward is one of all ranks: one that runs fewer steps than the others would hang them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        total = x.detach().sum().clone()
        dist.all_reduce(total)
        return x + self.down(torch.relu(self.up(x))) * total.tanh()


@pytest.mark.ranks(2)
def test_ranks_that_exchange_data_get_the_largest_ones_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Exchanging() for _ in range(3)))
    rows = 4 * (1 + dist.get_rank())  # Rank 1 has twice the batch.
    batch = torch.randn(rows, 8)
    ample = plan_memory(model, batch, 1 << 30, process_group=group_of())
    (first, untouched), (second, _) = by_rank((ample, [param.grad is None for param in model.parameters()]))
    assert first == second and all(untouched)
    activations = [segment.costs["keep"].kept_bytes for segment in first.profile.segments if segment.is_block]
    assert len(activations) == 3 and min(activations) >= 8 * 16 * 4  # Hidden features of the eight rows of rank 1.
