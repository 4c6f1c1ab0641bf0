"""sharded_ddp.py: what each rank keeps, when parameters are waited for, and what is refused."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from with_options import with_options

from scale_check.exact import gather_values
from scale_core.comm.group import group_of
from scale_core.hooks.gradients import register_local_grad_hook
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.replicated_parameter import unreduced_grad
from scale_core.sharded_tensor.tensor import local_tensor, set_shard
from scale_core.uneven_inputs import current_share, join
from scale_oss import OSS, OSSOptions, ShardedDataParallel


def layers() -> nn.Sequential:
    torch.manual_seed(group_of().rank)  # Rank 0's are taken over.
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def sharded(model: nn.Module, **kwargs: bool) -> tuple[ShardedDataParallel, OSS]:
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1, options=OSSOptions(bucket_numel=60))
    return ShardedDataParallel(model, optimizer, **kwargs), optimizer


def data(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.ranks(2)
def test_what_is_loaded_by_assignment_is_trained() -> None:
    """`load_state_dict(assign=True)` at any level trains what it has loaded, as a plain model does."""
    messages = []
    torch.manual_seed(7)
    start = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    for level in ("wrapper", "module", "layers"):
        model, optimizer = sharded(layers())
        plain = layers()
        state = {name: value.clone() for name, value in start.state_dict().items()}
        plain.load_state_dict(state, assign=True)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        params, own = list(model.parameters()), {name: value.clone() for name, value in state.items()}
        if level == "wrapper":
            model.load_state_dict({f"module.{name}": value for name, value in own.items()}, assign=True)
        elif level == "module":
            model.module.load_state_dict(own, assign=True)
        else:
            for number, layer in enumerate(model.module):  # type: ignore[arg-type]
                layer.load_state_dict({name[2:]: x for name, x in own.items() if name[0] == str(number)}, assign=True)
        assert all(param is before for param, before in zip(model.parameters(), params, strict=True))
        for step in range(2):
            model.eval()
            model(data(group_of().rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            (sum(plain(data(rank, step)).square().mean() for rank in range(2)) / 2).backward()
            reference.step()
            reference.zero_grad()
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-6, atol=1e-7)
        half = {name: value.bfloat16() for name, value in state.items()}
        with pytest.raises(ValueError) as caught:  # noqa: PT011  # the test looks at all of it
            model.module.load_state_dict({**own, "2.bias": half["2.bias"]}, assign=True)
        messages.append(str(caught.value))
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-6, atol=1e-7)
        copied = copy.deepcopy(model.module)
        copied.load_state_dict(half, assign=True)
        assert all(param.dtype == torch.bfloat16 for param in copied.parameters())
    assert all(
        "'2.bias' is torch.bfloat16 in the state and torch.float32 in the model" in message
        and "Load without assign" in message
        for message in messages
    )


@pytest.mark.ranks(2)
def test_a_weight_that_is_read_past_its_module_is_waited_for() -> None:
    """A model that reads a layer's weight without calling it trains as under DDP."""

    class Reader(nn.Module):
        """Calls its layer, or reads its weight past it."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.reads = nn.Linear(6, 2, bias=False), False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x @ self.layer.weight.T if self.reads else self.layer(x)
            return y

    reader, plain = Reader(), Reader()
    plain.load_state_dict({name: torch.ones_like(value) for name, value in plain.state_dict().items()})
    reader.load_state_dict(plain.state_dict())
    model, optimizer = sharded(reader)
    ddp, reference = DistributedDataParallel(plain), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        for net, module, each in ((model, reader, optimizer), (ddp, plain, reference)):
            module.reads = step > 0
            net(data(group_of().rank, step)).square().mean().backward()
            each.step()
            each.zero_grad()
    assert torch.equal(reader.layer.weight, plain.layer.weight)


@pytest.mark.ranks(2)
def test_several_optimizers_of_mixed_parameters_are_as_ddp() -> None:
    """Equal to DDP with plain optimizers; the first optimizer gets another group on the way."""

    class Mixed(nn.Module):
        """Sparse gradients, two dtypes, and a layer that begins to train later."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(9, 6, sparse=True)
            self.first, self.coarse, self.late = nn.Linear(6, 6), nn.Linear(6, 5).bfloat16(), nn.Linear(6, 6)
            self.late.requires_grad_(False)

        def forward(self, indices: Tensor) -> Tensor:
            y: Tensor = self.coarse(self.late(self.first(self.table(indices))).bfloat16())
            return y

    model, plain = Mixed(), Mixed()
    plain.table.sparse = False  # DistributedDataParallel over gloo adds up sparse ones otherwise.
    ours, theirs = (
        [of(net.table.parameters(), lr=0.1), of([*net.first.parameters(), *net.coarse.parameters()], lr=0.01)]
        for of, net in ((_adam, model), (torch.optim.Adam, plain))
    )
    wrapped = ShardedDataParallel(model, ours)
    for step in range(4):
        if step == 2:
            for net, optimizers in ((model, ours), (plain, theirs)):
                net.late.requires_grad_(True)
                optimizers[0].add_param_group({"params": list(net.late.parameters()), "lr": 0.02})
        if step in (0, 2):
            replica = DistributedDataParallel(plain)
        indices = torch.tensor([step, 2 + group_of().rank, 2 + group_of().rank])
        for net, optimizers in ((wrapped, ours), (replica, theirs)):
            net(indices).float().square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    buckets = [bucket for optimizer in ours for bucket in optimizer.buckets]
    assert all(bucket.is_gathering for bucket in buckets)
    with torch.no_grad():
        wrapped(indices)
    assert not any(bucket.is_gathering for bucket in buckets)  # Those that were added later are waited for, too.
    for mine, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert mine.dtype == other.dtype and torch.equal(mine, other)


@pytest.mark.composition("ShardedDataParallel", "torch.utils.checkpoint")
@pytest.mark.ranks(2)
def test_recomputed_activations_train_as_under_ddp() -> None:
    class Recomputed(nn.Module):
        """Layers that are recomputed in the backward pass, which runs a backward of its own where it is reentrant."""

        def __init__(self, reentrant: bool | None) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.reentrant = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), reentrant

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                # The first one's input takes no gradient, without which a reentrant one computes none.
                again = number and self.reentrant is not None
                x = checkpoint(layer, x, use_reentrant=self.reentrant).relu() if again else layer(x).relu()
            return x

    for reentrant in (True, False):
        model, plain = Recomputed(reentrant), Recomputed(None)
        optimizer, reference = _adam(model.parameters(), 0.1), torch.optim.Adam(plain.parameters(), lr=0.1)
        wrapped, replica = ShardedDataParallel(model, optimizer), DistributedDataParallel(plain)
        for step in range(3):
            for net, each in ((wrapped, optimizer), (replica, reference)):
                net.train(step < 2)
                net(data(group_of().rank, step)).square().mean().backward()
                each.step()
                each.zero_grad()
        for mine, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, other), reentrant
        assert wrapped._contract.step == 3  # Each backward was one pass, whatever ran inside of it.


@pytest.mark.ranks(2)
def test_freezing_between_backward_and_step_is_that_of_ddp() -> None:
    """The plain optimizer steps with the gradients that are there. What was frozen before is not sent at all."""
    for wrap in (ShardedDataParallel, None):
        model, plain = layers(), layers()
        optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1, options=OSSOptions(bucket_numel=60))
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        replica = DistributedDataParallel(plain)
        wrapped = wrap(model, optimizer) if wrap is not None else DistributedDataParallel(model)
        for net, each in ((wrapped, optimizer), (replica, reference)):
            net(data(group_of().rank)).square().mean().backward()
            net.requires_grad_(False)
            each.step()
            each.zero_grad()
        optimizer.wait()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        if wrap is None:
            continue
        model[2].requires_grad_(True)
        wrapped(data(group_of().rank)).square().mean().backward()
        optimizer.step()
        assert [bucket.is_gathering for bucket in optimizer.buckets] == [False, True]


@pytest.mark.fault(82)
@pytest.mark.ranks(2)
def test_odd_parameters_train_as_under_ddp() -> None:
    def as_real_numbers(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and takes no words for them.
        """What DDP does itself, but complex numbers travel as pairs of real ones."""
        mean = bucket.buffer().div_(dist.get_world_size())
        wire = torch.view_as_real(mean) if mean.is_complex() else mean
        return dist.all_reduce(wire, async_op=True).get_future().then(lambda _: mean)

    class Odd(nn.Module):
        """Tied, complex, packed and empty parameters, a number, and batch statistics."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head, self.norm = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False), nn.BatchNorm1d(3)
            self.head.weight = self.table.weight
            self.wave, self.scale = nn.Parameter(torch.randn(3, dtype=torch.complex64)), nn.Parameter(torch.tensor(2.0))
            self.packed = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
            self.nothing = nn.Parameter(torch.empty(0, 3))

        def forward(self, indices: Tensor) -> Tensor:
            x = self.norm(self.table(indices)) * self.wave.abs() * self.scale + self.nothing.sum()
            y: Tensor = self.head(x) * self.packed.sum()
            return y

    model, plain = Odd(), Odd()
    optimizer, reference = _adam(model.parameters(), 0.01), torch.optim.Adam(plain.parameters(), lr=0.01)
    # Both have the same values already, and torch 2.8 can't send complex ones to other ranks over gloo.
    wrapped, replica = ShardedDataParallel(model, optimizer), DistributedDataParallel(plain, init_sync=False)
    replica.register_comm_hook(None, as_real_numbers)
    assert wrapped.to("cpu") is wrapped
    for step in range(3):
        indices = torch.tensor([step, 2 + group_of().rank, 5, 6])
        for net, each in ((wrapped, optimizer), (replica, reference)):
            net(indices).square().mean().backward()
            net.eval()
            net(indices)  # Nobody asks for its gradients.
            net.train()
            each.step()
            each.zero_grad()
    wrapped.sync_buffers()
    for mine, other in zip(wrapped.state_dict().values(), plain.state_dict().values(), strict=True):
        assert mine.dtype == other.dtype and torch.equal(mine, other)


@pytest.mark.ranks(2)
def test_all_ranks_take_the_buffers_of_the_first() -> None:
    model = nn.BatchNorm1d(6)
    wrapped, _ = sharded(model, broadcast_buffers=False)
    model(data(group_of().rank))
    mean, number = gather_values((model.running_mean, model.num_batches_tracked))[0]
    assert group_of().rank == 0 or not torch.equal(model.running_mean, mean)
    model.num_batches_tracked += group_of().rank
    wrapped.sync_buffers()
    assert torch.equal(model.running_mean, mean) and torch.equal(model.num_batches_tracked, number)


@pytest.mark.ranks(2)
def test_a_rank_without_gradients_counts_as_zeros_in_reduce() -> None:
    """A rank without any gradient counts as zeros in `reduce()`, too."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    plain = copy.deepcopy(model)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer)
    with wrapped.no_sync():
        if group_of().rank == 0:
            wrapped(data(0)).square().mean().backward()
    wrapped.reduce()
    optimizer.step()
    optimizer.wait()
    (plain(data(0)).square().mean() / group_of().size).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_the_last_gradient_may_call_reduce() -> None:
    """`reduce()` from a hook, while the backward pass of the last micro-batch still runs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer)
    arrived: list[nn.Parameter] = []

    def reduce(param: nn.Parameter) -> None:
        arrived.append(param)
        if len(arrived) == 4:
            wrapped.reduce()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(reduce)
    with wrapped.no_sync():
        wrapped(data(0)).square().mean().backward()
    optimizer.step()
    optimizer.wait()
    plain(data(0)).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def _adam(params: Iterable[nn.Parameter], lr: float) -> OSS:
    return OSS(params, torch.optim.Adam, lr=lr, options=OSSOptions(bucket_numel=45))


@pytest.mark.ranks(2)
def test_a_scaler_steps_where_a_rank_has_no_gradients_of_its_own() -> None:
    """An optimizer that gets full tensors leaves the second rank without any."""
    torch.manual_seed(0)
    start, scaler, found = nn.Linear(6, 2, bias=False), ShardedGradScaler(init_scale=1024.0), []
    for scales in (True, False):
        model = copy.deepcopy(start)
        optimizer = OSS(model.parameters(), torch.optim.Adafactor, lr=0.1)
        wrapped = ShardedDataParallel(model, optimizer)
        assert len(optimizer.buckets[0].optimizer_params) == (1 if group_of().rank == 0 else 0)
        for step in range(2):
            loss = wrapped(data(group_of().rank, step)).square().mean()
            (scaler.scale(loss) if scales else loss).backward()
            if scales:
                scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1e6)
            scaler.step(optimizer) if scales else optimizer.step()
            scaler.update() if scales else None
            optimizer.zero_grad()
        found.append(wrapped.state_dict()["module.weight"])
    assert torch.equal(*found)


@pytest.mark.fault(70)
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.ranks(2, in_turn=True)
def test_a_scaler_skips_a_step_on_all_ranks_together(overflows: bool) -> None:
    """A power of two changes no digit, so scaled training equals unscaled; where one rank overflows, all skip."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    models = [sharded(copy.deepcopy(start)) for _ in range(2)]
    scaler = ShardedGradScaler(init_scale=1024.0)
    for step in range(3):
        for scaled, (model, optimizer) in zip((True, False), models, strict=True):
            batch = data(group_of().rank, step)
            if scaled and overflows and step == 1 and group_of().rank == 1:
                batch = batch * torch.inf
            if overflows and step == 1 and not scaled:
                continue
            loss = model(batch).square().mean()
            (scaler.scale(loss) if scaled else loss).backward()
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
    assert scaler.get_scale() == (512.0 if overflows else 1024.0)
    for mine, theirs in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.ranks(2)
def test_a_rank_keeps_its_part_of_the_gradients_and_no_more() -> None:
    model, optimizer = sharded(layers())
    model(data(group_of().rank)).square().mean().backward()
    assert all(unreduced_grad(param) is None for param in model.parameters())
    gc.collect()
    mine = {id(bucket.gradient.flat) for bucket in optimizer.buckets if bucket.gradient.flat is not None}
    assert not mine
    kept = [
        sum(each)
        for each in gather_values(
            [sum(piece.grad.numel() for piece in optimizer.local_params if piece.grad is not None)]
        )
    ]
    assert sum(kept) == 6 * 8 + 8 + 8 * 2 + 2 and max(kept) - min(kept) <= 8


@pytest.mark.ranks(2)
def test_updated_parameters_are_awaited_at_their_first_use() -> None:
    """The gathers of a step are still under way when it returns; each way to the parameters waits for them."""
    ways = {
        "forward": lambda model: model(data(0)),
        "module's forward": lambda model: model.module(data(0)),
        "copy": lambda model: copy.deepcopy(model.module),
        "state_dict": lambda model: model.state_dict(),
        "module's state_dict": lambda model: model.module.state_dict(),
        "load_state_dict": lambda model: model.load_state_dict({f"module.{name}": x for name, x in ones.items()}),
        "layers' load_state_dict": lambda model: [
            layer.load_state_dict({name[2:]: x for name, x in ones.items() if name[0] == str(number)})
            for number, layer in enumerate(model.module)
        ],
    }
    ones = {name: torch.ones_like(param) for name, param in layers().named_parameters()}
    model, optimizer = sharded(layers())
    for name, way in ways.items():
        model(data(group_of().rank)).square().mean().backward()
        optimizer.step()
        assert all(bucket.is_gathering for bucket in optimizer.buckets)
        with torch.no_grad():
            way(model)
        assert all(not bucket.is_gathering for bucket in optimizer.buckets)
        assert all(bool((param == 1).all()) for param in model.parameters()) == ("load" in name)
    replica = copy.deepcopy(model.module)
    replica.load_state_dict({name: torch.zeros_like(value) for name, value in ones.items()})
    assert not replica(data(0)).any() and all(bool(param.all()) for param in model.parameters())
    model, optimizer = sharded(layers(), overlap_gather=False)
    model(data(group_of().rank)).square().mean().backward()
    optimizer.step()
    assert all(not bucket.is_gathering for bucket in optimizer.buckets)
    # Were one on its way when a profiler ends, the process would die.
    model, optimizer = sharded(layers())
    model(data(group_of().rank)).square().mean().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        optimizer.step()
        assert all(not bucket.is_gathering for bucket in optimizer.buckets)


@pytest.mark.fault(29)
@pytest.mark.ranks(2)
def test_parameters_unused_on_a_rank_count_as_zeros() -> None:
    """Zeros count where a rank has not used a parameter; what nobody used has no gradient."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(6, 2, bias=False) for _ in range(3))

        def forward(self, x: Tensor, branch: int) -> Tensor:
            y: Tensor = self.branches[branch](x)
            return y

    model, optimizer = sharded(Branches().double())
    grads: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        model(data(group_of().rank, step).double(), group_of().rank % 2).sum().backward()
        pieces = {bucket.names[i]: piece for bucket in optimizer.buckets for i, piece in enumerate(bucket.pieces)}
        assert all(piece.grad is None for name, piece in pieces.items() if name == "parameter 2 of group 0")
        for branch in (0, 1):
            whole = torch.zeros(2, 6, dtype=torch.float64)
            for rank in range(group_of().size):
                if rank % 2 == branch:
                    whole += data(rank, step).double().sum(0).expand(2, 6)
            for bucket in optimizer.buckets:
                for name, piece, span in zip(bucket.names, bucket.pieces, bucket.spans, strict=True):
                    if name == f"parameter {branch} of group 0" and piece.numel():
                        mine = (whole / group_of().size).reshape(-1)[span.start : span.stop].view(span.shape)
                        assert piece.grad is not None and torch.allclose(piece.grad, mine, rtol=1e-10)
                        grads.append(piece.grad)


@pytest.mark.ranks(2)
def test_a_training_in_a_reference_cycle_ends_without_a_word() -> None:
    """What is under way after the last step ends with them; a gather that nobody waits for would warn."""
    for hold in ("model", "wrapper", "optimizer"):
        model, optimizer = sharded(layers())
        model(data(group_of().rank)).square().mean().backward()
        optimizer.step()
        assert optimizer.buckets[0].is_gathering
        model.module.held = [{"model": model.module, "wrapper": model, "optimizer": optimizer}[hold]]  # type: ignore[assignment]
        optimizer.held = model.module  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            bucket = weakref.ref(optimizer.buckets[0])
            gc.disable()
            del model, optimizer
            assert bucket() is not None
            gc.enable()
            gc.collect()
            assert bucket() is None


@pytest.mark.ranks(1)
def test_parameters_that_took_the_place_of_others_are_named() -> None:
    model, _ = sharded(layers())
    model.module[0].weight = nn.Parameter(torch.ones(8, 6))  # type: ignore[index, union-attr]
    model.eval()
    with torch.no_grad():
        model(data(0))
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the test looks at all of it
        model(data(0))
    (message,) = gather_values(str(caught.value))
    assert message.startswith("'0.weight' trains, but no optimizer holds it") and "load without assign" in message


@pytest.mark.gloo("half precision is added in the wider dtype")
@pytest.mark.ranks(2)
def test_gradients_can_travel_in_half_precision() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer, reduce_fp16=True)
    wrapped(data(group_of().rank)).sum().backward()
    summands = [data(rank).sum(0).expand(4, 6).half().float() for rank in range(group_of().size)]
    mean = (sum(summands[1:], summands[0]) / group_of().size).reshape(-1)
    (bucket,) = optimizer.buckets
    span, piece = bucket.spans[0], bucket.pieces[0]
    assert piece.grad is not None and piece.grad.dtype == torch.float32
    assert torch.equal(piece.grad.reshape(-1), mean[span.start : span.stop])


@pytest.mark.fault(20)
@pytest.mark.ranks(2)
def test_a_rank_that_runs_out_of_data_counts_nothing() -> None:
    """Two batches here, one there: the second step is that of the rank that has one."""
    model, optimizer = sharded(layers().double())
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    plain.load_state_dict({name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()})
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    rank = group_of().rank
    for batch in join([data(rank, step).double() for step in range(2 if rank else 1)]):
        refused = pytest.raises(RuntimeError, match=r"join\(\) counts whole steps")
        with nullcontext() if current_share() is None else refused, model.no_sync():  # as long as all ranks count alike
            pass
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for step, ranks in enumerate(([0, 1], [1])):
        reference.zero_grad()
        for each in ranks:
            (plain(data(each, step).double()).square().mean() / len(ranks)).backward()
        reference.step()
    assert (
        max(
            max(each)
            for each in gather_values(
                [
                    float((a - b).detach().abs().max())
                    for a, b in zip(model.parameters(), plain.parameters(), strict=True)
                ]
            )
        )
        < 1e-12
    )


@pytest.mark.ranks(2)
def test_others_can_see_each_ranks_own_gradients() -> None:
    heard: list[Tensor] = []
    handle = register_local_grad_hook(lambda params, grads: heard.extend(grad.clone() for grad in grads))
    model, _ = sharded(nn.Sequential(nn.Linear(6, 2, bias=False)).double())
    x = data(group_of().rank).double()
    model(x).sum().backward()
    handle.remove()
    (grad,) = heard
    assert torch.allclose(grad, x.sum(0).expand(2, 6), rtol=1e-10)


@pytest.mark.ranks(2)
def test_a_look_at_the_norm_after_a_step_changes_nothing() -> None:
    """The norm can be measured after a step, as for a log, and the next pass begins as it would without."""
    weights = []
    for looks in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(6, 2)
        optimizer = OSS(net.parameters(), torch.optim.SGD, lr=0.1)
        model = ShardedDataParallel(net, optimizer)
        for step in range(3):
            model(data(group_of().rank, step)).square().mean().backward()
            optimizer.step()
            if looks:
                before = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
                assert before > 0 and before == torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
        optimizer.wait()
        weights.append([param.detach().clone() for param in net.parameters()])
    assert all(map(torch.equal, *weights))


class Around(torch.optim.Optimizer):
    """A wrapper of an optimizer, which tells what it is around."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)


@pytest.mark.ranks(2)
def test_steps_without_a_pass_are_those_of_ddp() -> None:
    """Steps before and after `zero_grad`, and two in a row, are those of DDP; another optimizer is refused."""
    messages = []
    for cls, kwargs in ((torch.optim.AdamW, {"lr": 0.01}), (torch.optim.Adafactor, {"lr": 0.01})):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        model = copy.deepcopy(plain)
        ddp, theirs = DistributedDataParallel(plain), cls(plain.parameters(), **kwargs)
        early = cls(model.parameters(), **kwargs)
        ours = OSS(model.parameters(), cls, **with_options(OSSOptions, bucket_numel=60, **kwargs))
        wrapped = ShardedDataParallel(model, ours)
        for step in range(3):
            for net, optimizer in ((ddp, theirs), (wrapped, ours)):
                optimizer.step()
                net(data(group_of().rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.step()
                with torch.no_grad():
                    net(data(0))  # A pass that is no training leaves the gradients.
                optimizer.step()
                optimizer.zero_grad(set_to_none=step != 1)
                optimizer.step()
                optimizer.zero_grad()
            same = zip(plain.parameters(), wrapped.parameters(), strict=True)
            assert all(torch.equal(theirs, mine) for theirs, mine in same)
        Around(Around(ours)).step()
        with pytest.raises(RuntimeError) as caught:
            early.step()
        messages.append(str(caught.value))
        del wrapped, net
        gc.collect()
        early.step()  # There is nobody any more who would keep gradients from it.
    words = "ShardedDataParallel hands the averaged gradient of 'parameter 0 of group 0' to its OSS"
    assert [message.split(".step(): ")[0] for message in messages] == ["AdamW", "Adafactor"]
    assert all(words in message and "call step() and zero_grad() of the OSS" in message for message in messages)


@pytest.mark.ranks(2)
def test_a_step_leaves_alone_what_it_does_not_change() -> None:
    """A step leaves alone what has no gradient, so that another graph through it may still run backward."""

    class Chosen(nn.Module):
        """One of several models."""

        def __init__(self, models: nn.ModuleList) -> None:
            super().__init__()
            self.models = models

        def forward(self, x: Tensor, which: int) -> Tensor:
            y: Tensor = self.models[which](x)
            return y

    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2))
    whole, reduced = copy.deepcopy(plain), copy.deepcopy(plain)
    ours = OSS(whole.parameters(), torch.optim.SGD, lr=0.1)
    both = OSS(reduced.parameters(), torch.optim.SGD, lr=0.1)
    sides: list[tuple[Callable[[Tensor, int], Tensor], nn.Module, torch.optim.Optimizer]] = [
        (Chosen(plain), plain, torch.optim.SGD(plain.parameters(), lr=0.1)),
        (Chosen(whole), whole, ours),
        (ShardedDataParallel(Chosen(reduced), both, overlap_gather=False), reduced, both),
    ]
    for step in range(2):
        for net, module, optimizer in sides:
            losses = [net(data(0, step), which).square().mean() for which in (0, 1)]
            with torch.no_grad():
                module[1][2].bias.add_(1)
            for loss in losses:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for mine in (whole, reduced):
            assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))
    net, _, optimizer = sides[-1]  # Of what a step has changed autograd still says so.
    first, again = net(data(0), 0).sum(), net(data(0), 0).sum()
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        again.backward()


@pytest.mark.ranks(1)
def test_an_optimizer_may_come_within_what_is_around_it() -> None:
    model = layers()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, [Around(Around(optimizer))])
    plain = torch.optim.SGD(layers().parameters(), lr=0.1)
    with pytest.raises(TypeError) as caught:
        ShardedDataParallel(model, Around(plain))
    ((is_taken, message),) = gather_values(
        (wrapped.sharded_optimizers == [optimizer] and optimizer.gets_reduced_gradients, str(caught.value))
    )
    assert is_taken and "expected sharded_optimizer to be an OSS, got Around" in message


@pytest.mark.ranks(2)
def test_what_would_go_wrong_without_a_word_is_refused() -> None:
    messages = []
    model, optimizer = sharded(layers())
    with model.no_sync():
        model(data(0)).sum().backward()
    for call in (optimizer.step, lambda: model.to(torch.float64)):
        with pytest.raises(RuntimeError) as caught:
            call()
        messages.append(str(caught.value))
    model.reduce()
    with pytest.raises(RuntimeError) as caught:
        model.reduce()
    messages.append(str(caught.value))
    half = layers()
    first = OSS(half[0].parameters(), torch.optim.SGD, lr=0.1)
    whole = layers()
    both = [OSS(whole.parameters(), torch.optim.SGD, lr=0.1), OSS(whole[2].parameters(), torch.optim.SGD, lr=0.1)]
    shard = nn.Module()
    shard.weight = nn.Parameter(torch.zeros(2))
    set_shard(shard.weight, Shard("weight", (4,), 0, 2, (Axis(group_of(), Placement.SHARD),)))
    for module, optimizers in (
        (half, first),
        (whole, both),
        (whole, []),
        (model, optimizer),
        (shard, first),
        (DistributedDataParallel(half), first),
    ):
        with pytest.raises(ValueError, match=r"optimizer|OSS|model") as wrong:
            ShardedDataParallel(module, optimizers)
        messages.append(str(wrong.value))
    plain = torch.optim.SGD(half.parameters(), lr=0.1)
    with pytest.raises(TypeError) as kind:
        ShardedDataParallel(half, plain)
    messages.append(str(kind.value))
    patterns = [
        "has not been reduced: it was accumulated under no_sync(), or assigned as a full tensor.",
        "Convert or move the model first",
        "no gradient waits for it",
        "'2.weight' trains, but no optimizer holds it",
        "is in two of the optimizers",
        "expected an OSS or several, got none",
        "another wrapper reduces the gradients of this optimizer already",
        "'weight' is a shard, and a sharded model averages its gradients by itself",
        "the model is under DistributedDataParallel, which would average the same gradients",
        "expected sharded_optimizer to be an OSS, got SGD",
    ]
    for message, pattern in zip(messages, patterns, strict=True):
        assert pattern in message


def test_importing_the_package_starts_nothing() -> None:
    code = (
        "import scale_oss, threading, multiprocessing as m; print(threading.active_count(), len(m.active_children()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert run.stdout.split() == ["1", "0"]


@pytest.mark.fault(72)
@pytest.mark.ranks(1, 3)
def test_torch_s_own_clipping_finds_the_averaged_gradients() -> None:
    """The pieces are clipped, in a norm that is that of the whole; a rank without pieces takes part."""
    group = group_of()
    for way in ("norm", "value", "scaled"):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        mine = copy.deepcopy(plain)
        optimizer = OSS(mine.parameters(), torch.optim.SGD, lr=0.1)
        model, theirs = ShardedDataParallel(mine, optimizer), torch.optim.SGD(plain.parameters(), lr=0.1)
        (sum(plain(data(rank).double()).square().mean() for rank in range(group.size)) / group.size).backward()
        scaler = ShardedGradScaler(init_scale=4.0, enabled=way == "scaled", process_group=group, device="cpu")
        scaler.scale(model(data(group.rank).double()).square().mean()).backward()
        scaler.unscale_(optimizer)
        if way == "value":
            for params in (plain.parameters(), model.parameters()):
                nn.utils.clip_grad_value_(params, 0.01)
        else:
            expected, norm = (nn.utils.clip_grad_norm_(each.parameters(), 0.1).item() for each in (plain, model))
            assert norm == pytest.approx(expected, rel=1e-10)
        norms = [
            nn.utils.get_total_norm([grad for param in params if (grad := param.grad) is not None]).item()
            for params in (plain.parameters(), model.parameters())
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        scaler.step(optimizer)
        theirs.step()
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-10, atol=1e-10)
        with model.no_sync():
            model(data(group.rank).double()).sum().backward()
        with pytest.raises(RuntimeError, match="accumulated under no_sync"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def test_attributes_of_the_module_are_found_through_the_wrapper() -> None:
    model, _ = sharded(layers())
    model.module.width = 8  # type: ignore[assignment]
    assert model.width == 8
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'missing'"):
        _ = model.missing


@pytest.mark.ranks(2)
def test_a_converted_model_keeps_the_averages_of_its_step() -> None:
    model, optimizer = sharded(layers())
    expected, expected_optimizer = sharded(copy.deepcopy(model.module))
    expected.load_state_dict(model.state_dict())
    for net in (model, expected):
        net(data(group_of().rank)).square().mean().backward()
    assert model.cpu() is model and model.module.to("cpu") is model.module
    model.module.double()  # The module's own method, which the wrapper does not see.
    assert all(param.dtype == torch.float64 for param in model.parameters())
    with pytest.raises(RuntimeError, match=r"was torch\.float32 on cpu when OSS was built, and is torch\.float64"):
        optimizer.step()
    model.module.float()
    for param, reference in zip(model.parameters(), expected.parameters(), strict=True):
        assert param.grad is not None and reference.grad is not None
        assert torch.equal(local_tensor(param.grad), local_tensor(reference.grad))
    for step in (1, 2, 3):  # The gradients of a step that is made stay used: the next pass does not add to them.
        optimizer.step()
        expected_optimizer.step()
        model.module.double()
        model.module.float()
        for net in (model, expected):
            net(data(group_of().rank, step)).square().mean().backward()
        for param, reference in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(param, reference)


def test_a_filter_that_returns_nothing_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="filter_params_fn returned none of the optimizer's parameters"):
        optimizer.clip_grad_norm_(1.0, filter_params_fn=lambda params: [p for p in params if p.ndim > 2])
