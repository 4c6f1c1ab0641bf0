"""Offloading, shards, loss scales, synchronized batch norms, SlowMo and the memory tracker, against plain PyTorch."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fairscale.experimental.nn import OffloadModel, SyncBatchNorm
from fairscale.experimental.nn.auto_shard import shard_model
from fairscale.experimental.nn.data_parallel import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel
from fairscale.experimental.optim import DynamicLossScaler
from fairscale.experimental.tooling.layer_memory_tracker import (
    LayerwiseMemoryTracker,
    ProcessGroupTracker,
    ProcessGroupTrackingEvent,
    compare_memory_traces_in_plot,
    suggest_checkpoint_location,
)
from fairscale.nn import FullyShardedDataParallel, checkpoint_wrapper


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))


class Branching(nn.Module):
    """Where two values are needed later it cannot be cut; its middle chooses by a value, and cannot be traced."""

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.high(x) if x.sum() > 0 else self.low(x)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.middle = nn.ModuleList(self.Chooses() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, *args: Tensor) -> Tensor:
        x, mask = args
        kept = torch.relu(self.first(x))
        x = self.second(kept) + kept * mask[: x.size(0)]
        for middle in self.middle:
            x = middle(x)
        return self.last(x * self.scale) + x


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


def test_a_traced_model_is_cut_where_one_value_is_needed_later() -> None:
    x, mask = torch.randn(3, 4), torch.rand(5, 4)
    shards = shard_model(Branching(), shard_count=5)
    # The first two layers are kept together by `kept`, the last and the scale by `x`.
    assert [sum(param.numel() for param in shard.parameters()) for shard in shards] == [40, 40, 40, 24]
    value = shards[0](x, mask)
    for shard in shards[1:]:
        assert isinstance(value, Tensor)
        value = shard(value)
    assert torch.equal(value, Branching()(x, mask))
    model = OffloadModel(model=shards, device=torch.device("cpu"))
    torch.testing.assert_close(model(x, mask), value)
    alone = nn.Sequential(Branching.Chooses())
    assert len(shard_model(alone)) == 1


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


def test_memory_is_traced_and_checkpoints_are_suggested(tmp_path: Path) -> None:
    kib = 1024
    torch.manual_seed(1)
    views = nn.Sequential(nn.Unflatten(1, (8, 8)), nn.Flatten())
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), views, nn.Linear(64, 64), nn.ReLU(inplace=True))
    tracker = LayerwiseMemoryTracker()
    tracker.monitor(model)
    with pytest.raises(RuntimeError, match=r"call tracker\.stop\(\) first"):
        tracker.monitor(model)
    model(torch.randn(64, 16)).sum().backward()
    names = ["0", "1", "2.0", "2.1", "3", "4"]
    assert [trace.module_name for trace in tracker.memory_traces] == names + names[::-1]
    # 64 x 64 numbers of 4 bytes each; a view, and what is changed in place, are no new memory.
    made = [kib * size for size in (16, 16, 0, 0, 16, 0)]
    assert [trace.event for trace in tracker.forward_traces] == [(size, size) for size in made]
    params = [4 * kib + 256, 0, 0, 0, 16 * kib + 256, 0]
    assert [trace.module_params for trace in tracker.memory_traces] == params + params[::-1]
    # The input, made after `monitor`, is counted as well; ReLU keeps its output, so that its input is released.
    allocated = [kib * size for size in (20, 36, 20, 20, 36, 36)]
    assert [trace.allocated for trace in tracker.forward_traces] == allocated
    summary = tracker.summary
    assert summary.total_activation_allocations == summary.total_forward_allocations == 48 * kib
    assert summary.max_memory_allocated == max(trace.allocated for trace in tracker.memory_traces)
    assert [trace.module_name for trace in summary.top_forward_activation_producers[:3]] == ["0", "1", "3"]
    tracker.stop()
    found = list(tracker.memory_traces)
    model(torch.randn(64, 16)).sum().backward()
    assert tracker.memory_traces == found
    tracker.save_traces(tmp_path / "traces.json")
    assert LayerwiseMemoryTracker.load(tmp_path / "traces.json").memory_traces == found
    suggested = suggest_checkpoint_location(found, num_checkpoints=1)
    assert (suggested.max_memory, suggested.split_modules, suggested.all_modules) == (32 * kib, ["3"], names)
    tracker.clear_traces()
    assert tracker.memory_traces == [] and tracker.max_memory_allocated == 0


@pytest.mark.soak  # It needs matplotlib.
def test_traces_with_and_without_checkpoints_are_drawn_together() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    jobs = {}
    for name in ("no checkpoint", "checkpoint"):
        tracker = LayerwiseMemoryTracker()
        tracker.monitor(model)
        model(torch.randn(64, 16)).sum().backward()
        tracker.stop()
        jobs[name] = tracker.memory_traces
        for block in model:
            checkpoint_wrapper(block)
    forward = [[trace.module_name for trace in traces if trace.is_forward] for traces in jobs.values()]
    assert forward[1][:6] == forward[0] and len(forward[1]) > 6  # Blocks run again in the backward.
    picture = compare_memory_traces_in_plot(jobs, figsize=(6, 5), capture=True)
    assert (picture.size, picture.mode) == ((600, 500), "RGB")
    assert len(picture.getcolors(maxcolors=1 << 20)) > 10
    assert tracker.show_plots(capture=True).size == (1600, 2000)


def test_a_sparse_gradient_is_no_new_memory() -> None:
    table = nn.Embedding(8, 4, sparse=True)
    tracker = LayerwiseMemoryTracker()
    tracker.monitor(table)
    table(torch.arange(3)).sum().backward()
    tracker.stop()
    forward, backward = tracker.memory_traces
    assert (forward.event.memory_activations, backward.event.memory_activations) == (3 * 4 * 4, 0)


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


@pytest.mark.ranks(2)
def test_synchronized_batch_norms_are_those_of_all_samples() -> None:
    """Statistics and gradients are those of a plain batch norm on all samples, 3 of this rank and 5 of that."""
    rank = dist.get_rank()
    mine = slice(0, 3) if rank == 0 else slice(3, 8)
    for dims, momentum, wrap in ((0, 0.1, nn.Identity()), (1, None, nn.Identity()), (3, 0.1, None)):
        torch.manual_seed(dims)
        plain = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[dims](3, momentum=momentum)
        model: nn.Module = nn.Sequential(*(2 * [SyncBatchNorm(3, momentum=momentum)]))
        if wrap is None:
            checkpoint_wrapper(model)  # Which runs it again, with its collectives, in the backward.
        model = DistributedDataParallel(model)
        for _ in range(2):
            whole = torch.randn(8, 3, *(dims * [2]), requires_grad=True)
            expected, wanted = plain(plain(whole)), torch.randn(8, 3, *(dims * [2]))
            (expected * wanted).sum().backward()
            own = whole.detach()[mine].requires_grad_()
            found = model(own)
            (found * wanted[mine]).sum().backward()
            assert whole.grad is not None
            torch.testing.assert_close(found, expected[mine])
            torch.testing.assert_close(own.grad, whole.grad[mine], rtol=1e-4, atol=1e-6)
        norm = model.module[0]
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(norm.state_dict()[name], value)
        for one, other in zip(norm.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(2 * one.grad, other.grad, rtol=1e-4, atol=1e-5)
        model.eval(), plain.eval()
        torch.testing.assert_close(model(whole[mine]), plain(plain(whole))[mine])
    converted = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert type(converted[1]) is SyncBatchNorm and converted(torch.randn(2, 2)).shape == (2, 2)


@pytest.mark.ranks(2)
def test_wrappers_are_gathered_for_each_pass() -> None:
    """Buffers of 512 bytes, padding included, are gathered again in the backward but for the outermost wrapper's."""
    torch.manual_seed(0)
    group = ProcessGroupTracker(None)
    inner = [FullyShardedDataParallel(nn.Linear(10, 10), process_group=group) for _ in range(2)]
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), inner[0], nn.ReLU(), inner[1])
    model = FullyShardedDataParallel(model, process_group=group)
    for _ in range(2):  # In the second step gathers begin early.
        tracker = LayerwiseMemoryTracker()
        tracker.monitor(model)
        model(torch.randn(16, 10)).sum().backward()
        tracker.stop()
        found = [(trace.is_forward, trace.all_gathered, trace.cumul_all_gathered) for trace in tracker.memory_traces]
        forward = [(True, 512, 512), (True, 0, 512), (True, 512, 1024), (True, 0, 512), (True, 512, 1024)]
        backward = [(False, 512, 0), (False, 0, 0), (False, 512, 0), (False, 0, 0), (False, 0, 0)]
        assert found == forward + backward


SLOWMO: dict[str, dict[str, Any]] = {
    "slow steps": {"momentum": 0.5, "slow_every": 4, "average_every": 2},
    "averages alone": {"momentum": 0.0, "slow_every": 4, "average_every": 2},
    "slow steps between averages": {"momentum": 0.5, "slow_every": 4, "average_every": 3},
    "slow steps without momentum": {"momentum": 0.0, "slow_lr": 0.5, "slow_every": 2, "average_every": 100},
}


def slow_model(
    *, momentum: float, slow_every: int, average_every: int, slow_lr: float = 1.0, **options: Any
) -> SlowMoDistributedDataParallel:
    return SlowMoDistributedDataParallel(
        layers(),
        nprocs_per_node=1,
        slowmo_momentum=momentum,
        slowmo_lr=slow_lr,
        slowmo_frequency=slow_every,
        localsgd_frequency=average_every,
        **options,
    )


@pytest.mark.ranks(2)
def test_a_tracked_group_tells_of_its_collectives() -> None:
    events: list[tuple[Any, ...]] = []
    tracker = ProcessGroupTracker(None, lambda *event: events.append(event))
    sharded = FullyShardedDataParallel(layers(), process_group=tracker)
    assert sharded(torch.ones(1, 4)).shape == (1, 4) and sharded.world_size == 2
    outputs = [torch.zeros(3), torch.zeros(3)]
    inputs = [torch.full((3,), float(dist.get_rank()))]
    tracker.allgather([outputs], inputs).wait()
    ((event, told_outputs, told_inputs),) = events
    assert event is ProcessGroupTrackingEvent.allgather and tracker.size() == 2
    assert told_outputs[0] is outputs and told_inputs is inputs
    assert [each[0].item() for each in outputs] == [0.0, 1.0]


@pytest.mark.ranks(2)
def test_slowmo_is_that_of_the_paper() -> None:
    def slowmo_reference(
        steps: int, *, momentum: float, slow_every: int, average_every: int, slow_lr: float = 1.0
    ) -> list[Tensor]:
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
            is_slow = (momentum != 0 or slow_lr != 1) and (step + 1) % slow_every == 0
            if is_slow or (step + 1) % average_every == 0:
                with torch.no_grad():
                    mean = sum(vector(node.parameters()) for node in nodes) / 2
                    if is_slow:
                        u = momentum * u + (outer - mean) / 0.1
                        outer = mean = outer - slow_lr * 0.1 * u
                    for node in nodes:
                        nn.utils.vector_to_parameters(mean.clone(), node.parameters())
            history.append(vector(nodes[0].parameters()).detach().clone())
        return history

    with pytest.raises(NotImplementedError, match=r"slowmo_memory_efficient=False with slowmo_frequency=47 and local"):
        slow_model(momentum=0.5, slow_every=47, average_every=3, slowmo_memory_efficient=False)
    histories = {
        "one node": train(SlowMoDistributedDataParallel(layers(), 2, slowmo_momentum=0.0), 2),
        **{name: train(slow_model(**settings), 8) for name, settings in SLOWMO.items()},
    }
    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, histories)
    first, second = by_rank
    for name, settings in SLOWMO.items():
        torch.testing.assert_close(first[name], slowmo_reference(8, **settings))
        assert not torch.equal(first[name][0], second[name][0])  # Between two averages.
    for name in ("slow steps", "averages alone", "slow steps without momentum", "one node"):
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
    with pytest.raises(TypeError, match="unexpected argument 'slow'"):
        SlowMoDistributedDataParallel(layers(), 1, slow=3)
    by_place = SlowMoDistributedDataParallel(layers(), 1, True, SlowMoBaseAlgorithm.LOCALSGD, 0.4, True, 24, 0.9, 32, 5)
    assert (by_place.slowmo_momentum, by_place.slowmo_frequency, by_place.slowmo_lr) == (0.4, 24, 0.9)
    assert by_place.localsgd_frequency == 5
    model = SlowMoDistributedDataParallel(layers(), 1)
    with pytest.raises(NotImplementedError, match="copies of the parameters"):
        model.perform_slowmo(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
