"""`OffloadModel`, `shard_model`, `DynamicLossScaler`, SlowMo and the memory tracker, against plain PyTorch."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fairscale.experimental.nn import BaselineSoftmaxNllLoss, OffloadModel
from fairscale.experimental.nn.auto_shard import shard_model
from fairscale.experimental.nn.data_parallel import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel
from fairscale.experimental.optim import DynamicLossScaler
from fairscale.experimental.tooling.layer_memory_tracker import (
    LayerwiseMemoryTracker,
    ProcessGroupTracker,
    ProcessGroupTrackingEvent,
    suggest_checkpoint_location,
)
from fairscale.nn import FullyShardedDataParallel
from scale_core.testing import run_ranks


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.relu(self.first(x))
        return self.third(self.second(kept) + kept) + x


@pytest.mark.parametrize("options", [{}, {"checkpoint_activation": True, "num_microbatches": 2}])
def test_an_offloaded_model_trains_as_the_plain_one(options: dict[str, Any]) -> None:
    plain, inputs = layers(), torch.randn(4, 4)
    model = OffloadModel(model=layers(), device=torch.device("cpu"), num_slices=3, **options)
    assert len(model.model_slices) == 3
    assert [param.shape for param in model.parameters()] == [param.shape for param in plain.parameters()]
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            each(inputs).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(model(inputs), plain(inputs))


def test_an_offloaded_model_says_what_it_cannot_be() -> None:
    device = torch.device("cpu")
    with pytest.raises(TypeError, match="`model` argument to `OffloadModel` cannot be None"):
        OffloadModel(model=None, device=device)
    with pytest.raises(TypeError, match="`device` argument to `OffloadModel` cannot be None"):
        OffloadModel(model=layers(), device=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be of type `nn\.Sequential`"):
        OffloadModel(model=nn.Linear(2, 2), device=device)
    with pytest.raises(RuntimeError, match="We currently only support microbatches with activation checkpointing"):
        OffloadModel(model=layers(), device=device, num_microbatches=2)


def test_an_offloaded_model_drops_no_input() -> None:
    model = OffloadModel(layers(), torch.device("cpu"), checkpoint_activation=True, num_microbatches=3)
    for inputs in ((torch.ones(6, 4), torch.ones(2, 4)), (torch.ones(6, 4), torch.ones(())), (torch.ones(()),), (1,)):
        with pytest.raises(ValueError, match=r"num_microbatches=3: expected tensors of one length along dim 0, got"):
            model(*inputs)
    with pytest.raises(TypeError, match="mask"):
        model(torch.ones(6, 4), mask=torch.ones(6, 4))


def test_a_traced_model_is_cut_where_values_are_needed_later() -> None:
    inputs = torch.randn(3, 4)
    shards = shard_model(Branching(), shard_count=3)
    assert len(shards) == 3
    values: Any = (inputs,)
    for shard in shards:
        values = shard(*values) if isinstance(values, tuple) else shard(values)
    assert torch.equal(values, Branching()(inputs))
    model = OffloadModel(model=shards, device=torch.device("cpu"))
    torch.testing.assert_close(model(inputs), values)


def test_a_dynamic_loss_scale_grows_and_shrinks() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = DynamicLossScaler(init_scale=4.0, scale_window=2, min_loss_scale=0.5)
    for expected_scale, factor in ((4.0, 1.0), (8.0, 1.0), (4.0, torch.inf), (2.0, torch.inf)):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before - 1 if factor == 1 else before)
        assert scaler.loss_scale == expected_scale
    scaler.load_state_dict({"loss_scale": 1.0})
    (weight * torch.inf).sum().backward()
    scaler.step(optimizer)
    with pytest.raises(FloatingPointError, match="Minimum loss scale reached"):
        scaler.update()
    scaler.update()  # the overflow is past
    assert scaler.loss_scale == 1.0
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: None)


def test_a_dynamic_loss_scale_is_of_several_optimizers() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    first, second = (torch.optim.SGD([weight], lr=1.0) for weight in weights)
    scaler = DynamicLossScaler(init_scale=4.0, scale_window=100)
    for factor, scale, expected in ((1.0, 4.0, [0.0, 0.0]), (torch.inf, 2.0, [0.0, -1.0]), (1.0, 2.0, [-1.0, -2.0])):
        for optimizer in (first, second):
            optimizer.zero_grad()
        scaler.scale((weights[0] * factor).sum() + weights[1].sum()).backward()
        scaler.step(first)
        scaler.unscale_(second)
        scaler.step(second)
        scaler.update()
        assert [weight[0].item() for weight in weights] == expected
        assert scaler.loss_scale == scale


def test_the_baseline_of_mevo_is_the_cross_entropy() -> None:
    weight, tokens, target = nn.Parameter(torch.randn(7, 4)), torch.randn(2, 3, 4), torch.randint(7, (2, 3))
    expected = nn.functional.cross_entropy(tokens.view(6, 4) @ weight.T, target.view(6), reduction="sum")
    for log_softmax in (True, False):
        loss = BaselineSoftmaxNllLoss(weight, log_softmax=log_softmax)(tokens, target)
        torch.testing.assert_close(loss, expected)


def test_memory_is_traced_and_checkpoints_are_suggested(tmp_path: Path) -> None:
    model = layers()
    tracker = LayerwiseMemoryTracker()
    tracker.monitor(model)
    model(torch.randn(64, 4)).sum().backward()
    tracker.stop()
    summary = tracker.summary
    assert summary.max_memory_allocated > 0 and summary.total_forward_allocations == 5 * 64 * 4 * 4
    assert [trace.module_name for trace in tracker.forward_traces if trace.module_name] == ["0", "1", "2", "3", "4"]
    first = next(trace for trace in tracker.forward_traces if trace.module_name)
    assert (first.module_params, first.event.memory_activations) == (80, 64 * 4 * 4)
    tracker.save_traces(tmp_path / "traces.json")
    assert LayerwiseMemoryTracker.load(tmp_path / "traces.json").memory_traces == tracker.memory_traces
    assert suggest_checkpoint_location(tracker.memory_traces, num_checkpoints=1).split_modules == ("3",)


def train(model: SlowMoDistributedDataParallel, steps: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        model(inputs).square().mean().backward()
        optimizer.step()
        model.perform_slowmo(optimizer)
        history.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return history


def on_two_nodes() -> dict[str, Any]:
    events: list[tuple[Any, int]] = []
    tracker = ProcessGroupTracker(None, lambda event, size, *_: events.append((event, size)))
    sharded = FullyShardedDataParallel(layers(), process_group=tracker)
    assert sharded(torch.ones(1, 4)).shape == (1, 4) and sharded.world_size == 2
    outputs = [torch.zeros(3), torch.zeros(3)]
    tracker.allgather([outputs], [torch.full((3,), float(dist.get_rank()))]).wait()
    assert events == [(ProcessGroupTrackingEvent.allgather, 24)] and tracker.size() == 2
    assert [each[0].item() for each in outputs] == [0.0, 1.0]
    slow = {"slowmo_momentum": 0.5, "slowmo_frequency": 4, "localsgd_frequency": 2}
    return {
        "slowmo": train(SlowMoDistributedDataParallel(layers(), nprocs_per_node=1, **slow), 8),
        "local": train(SlowMoDistributedDataParallel(layers(), 1, slowmo_momentum=0.0, localsgd_frequency=2), 4),
        "one node": train(SlowMoDistributedDataParallel(layers(), 2, slowmo_momentum=0.0), 2),
    }


def slowmo_reference(steps: int, momentum: float, slow_every: int, average_every: int) -> list[Tensor]:
    """Algorithm 1 of arXiv 1910.00643 over two nodes, on one process."""
    nodes = [layers(), layers()]
    vector = nn.utils.parameters_to_vector
    outer, u = vector(nodes[0].parameters()).detach().clone(), torch.zeros(100)
    history = []
    for step in range(steps):
        for rank, node in enumerate(nodes):
            node.zero_grad()
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + rank))
            node(inputs).square().mean().backward()
            with torch.no_grad():
                for param in node.parameters():
                    param.sub_(0.1 * param.grad)
        with torch.no_grad():
            mean = sum(vector(node.parameters()) for node in nodes) / 2
            if momentum and (step + 1) % slow_every == 0:
                u = momentum * u + (outer - mean) / 0.1
                outer = mean = outer - 0.1 * u
            if (step + 1) % average_every == 0:
                for node in nodes:
                    nn.utils.vector_to_parameters(mean.clone(), node.parameters())
        history.append(vector(nodes[0].parameters()).detach().clone())
    return history


def test_slowmo_is_that_of_the_paper() -> None:
    first, second = run_ranks(on_two_nodes, 2)
    torch.testing.assert_close(first["slowmo"], slowmo_reference(8, 0.5, 4, 2))
    torch.testing.assert_close(first["local"], slowmo_reference(4, 0.0, 4, 2))
    assert not torch.equal(first["slowmo"][0], second["slowmo"][0])  # between two averages
    for name in ("slowmo", "local", "one node"):
        assert torch.equal(first[name][-1], second[name][-1])


def test_slowmo_leaves_no_hook_behind() -> None:
    before = set(_global_optimizer_pre_hooks)
    model = SlowMoDistributedDataParallel(layers(), 1)
    held = weakref.ref(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    assert model._local_sgd is not None  # so the hook has run
    assert len(set(_global_optimizer_pre_hooks) - before) == 1
    del model
    gc.collect()
    assert held() is None
    assert set(_global_optimizer_pre_hooks) == before
    optimizer.step()


def test_gossip_and_copies_of_parameters_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="SGP is not offered"):
        SlowMoDistributedDataParallel(layers(), 1, slowmo_base_algorithm=SlowMoBaseAlgorithm["SGP"])
    with pytest.raises(NotImplementedError, match="slowmo_frequency=45"):
        SlowMoDistributedDataParallel(layers(), 1, slowmo_frequency=47, localsgd_frequency=3)
    with pytest.raises(TypeError, match="unexpected argument 'slow'"):
        SlowMoDistributedDataParallel(layers(), 1, slow=3)
    model = SlowMoDistributedDataParallel(layers(), 1)
    with pytest.raises(NotImplementedError, match="copies of the parameters"):
        model.perform_slowmo(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
