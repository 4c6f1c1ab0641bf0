"""Parameters that an all-gather writes to: what reads or writes them between `step()` and a forward waits."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scale_core import check_replicas
from scale_core.comm.collectives import all_gather
from scale_core.comm.group import group_of
from scale_core.errors import TransferError
from scale_core.shard import as_local
from scale_core.sharded_tensor.replicated_parameter import AwaitedParameter, ReplicatedParameter
from scale_oss import OSS, OSSOptions, ShardedDataParallel
from scale_oss.buckets import bucket


class LateGather:
    """An all-gather that sends nothing before it is waited for: until then the others' parts are not numbers."""

    def __init__(self, target: Tensor, part: Tensor, *args: Any, **kwargs: Any) -> None:
        self.arguments = (target, part.clone(), *args), kwargs
        with torch.no_grad():
            target.fill_(torch.nan)

    def wait(self, limit_seconds: float | None = None) -> None:
        args, kwargs = self.arguments
        all_gather(*args, **kwargs).wait(limit_seconds)

    def cancel(self) -> None:
        """Nothing is under way."""


class Clip(nn.Module):
    """Two towers and a scale, as of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 5), nn.Linear(4, 5)
        self.logit_scale = nn.Parameter(torch.tensor(4.0))

    def forward(self, batch: Tensor) -> Tensor:
        scores: Tensor = self.logit_scale * (self.image(batch[:, :6]) * self.text(batch[:, 6:])).sum(-1)
        return scores


def data(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(-3, 4, (4, 10), generator=generator).double()


@torch.no_grad()
def clamp_one(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    model.logit_scale.clamp_(0, 4.25)


@torch.no_grad()
def clamp_a_saved_list(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    for param in saved[0]:
        param.clamp_(-0.5, 0.5)


@torch.no_grad()
def clamp_saved_aliases(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    for alias in saved[1]:
        alias.clamp_(-0.5, 0.5)


def set_data(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    model.image.weight.data = model.image.weight.data.clamp(-0.5, 0.5)


def data_in_place(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    for param in model.parameters():
        param.data.mul_(0.5)


@torch.no_grad()
def lists_of_tensors(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.5)


@torch.no_grad()
def set_items(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    model.image.weight[0] = 1.0


def read_sums(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    seen.append(torch.stack([param.detach().sum() for param in model.parameters()]))


def read_arrays(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    seen += [torch.from_numpy(param.detach().numpy().copy()) for param in model.parameters()]


def read_lists(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    seen += [torch.tensor(param.tolist()) for param in model.parameters()]
    assert "nan" not in repr(list(model.parameters()))


def read_states(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    seen += [value.clone() for value in model.state_dict().values()]


def read_functions(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    seen.append(nn.functional.linear(data(0, 0)[:, :6], model.image.weight, model.image.bias).detach())


def read_copies(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    seen += [param.detach().clone() for param in copy.deepcopy(model).parameters()]


def read_pickles(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    file = io.BytesIO()
    torch.save(list(model.parameters()), file)
    file.seek(0)
    loaded = [*torch.load(file, weights_only=True), *pickle.loads(pickle.dumps(model)).parameters()]
    assert all(type(param) is nn.Parameter for param in loaded)
    seen += [param.detach() for param in loaded]


def read_vectors(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    seen.append(nn.utils.parameters_to_vector(model.parameters()).detach())


def average(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    saved[2].update_parameters(model)
    seen += [param.detach().clone() for param in saved[2].parameters()]


@torch.no_grad()
def average_by_hand(model: Clip, seen: list[Tensor], saved: list[Any]) -> None:
    for old, new in zip(saved[2].module.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 0.5)
    seen += [param.detach().clone() for param in saved[2].parameters()]


WAYS: list[Callable[[Clip, list[Tensor], list[Any]], None]] = [
    *(clamp_one, clamp_a_saved_list, clamp_saved_aliases, set_data, data_in_place, lists_of_tensors, set_items),
    *(read_sums, read_arrays, read_lists, read_states, read_functions, read_copies, read_pickles, read_vectors),
    *(average, average_by_hand),
]


@pytest.mark.ranks(2)
def test_what_a_program_does_after_a_step_is_right() -> None:
    def train(
        model: nn.Module, inner: Clip, optimizer: Any, ranks: list[int], way: Callable[..., None]
    ) -> list[Tensor]:
        """Three steps, after each of which the program does something with the parameters; returns what it has seen."""
        seen: list[Tensor] = []
        aliases = [param.data for param in inner.parameters()] if way is clamp_saved_aliases else []
        saved = [list(inner.parameters()), aliases, AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.5))]
        for step in range(3):
            losses = [model(data(rank, step)).square().mean() for rank in ranks]
            (torch.stack(losses).mean() / 8).backward()
            optimizer.step()
            way(inner, seen, saved)
            optimizer.zero_grad()
        return [*seen, *(value.clone() for value in inner.state_dict().values())]

    bucket.all_gather = LateGather  # type: ignore[attr-defined, assignment, misc]
    for overlap in (True, False):
        for way in WAYS:
            torch.manual_seed(0)
            plain = Clip().double()
            model = copy.deepcopy(plain)
            optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.25, options=OSSOptions(bucket_numel=20))
            wrapped = ShardedDataParallel(model, optimizer, overlap_gather=overlap)
            rank = group_of().rank
            seen = train(wrapped, model, optimizer, [rank], way)
            expected = train(plain, plain, torch.optim.SGD(plain.parameters(), lr=0.25), [0, 1], way)
            for ours, theirs in zip(seen, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=f"{way.__name__}, {overlap}")


def one_step() -> tuple[Clip, ShardedDataParallel, OSS]:
    bucket.all_gather = LateGather  # type: ignore[attr-defined, assignment, misc]
    torch.manual_seed(0)
    model = Clip().double()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.25, options=OSSOptions(bucket_numel=20))
    wrapped = ShardedDataParallel(model, optimizer)
    wrapped(data(group_of().rank, 0)).square().mean().backward()
    optimizer.step()
    return model, wrapped, optimizer


@pytest.mark.ranks(2)
def test_attributes_that_need_no_values_do_not_wait() -> None:
    """What says nothing of the values leaves the all-gather alone, and each bucket is waited for by itself."""
    model, wrapped, optimizer = one_step()
    for param in model.parameters():
        assert type(param) is AwaitedParameter and isinstance(param, nn.Parameter) and param.is_leaf
        assert (
            param.requires_grad
            and param.dtype == torch.float64
            and param.device.type == "cpu"
            and param.grad_fn is None
        )
        assert param.size() == param.shape and param.numel() == param.shape.numel() and param.dim() == param.ndim
        assert param in {param: 0} and param.grad is not None and hash(param) == hash(param)
    assert len(list(wrapped.parameters())) == len(list(wrapped.named_parameters())) == 5
    assert all(bucket.is_gathering for bucket in optimizer.buckets)
    assert model.logit_scale.isfinite()
    gathering = [bucket.is_gathering for bucket in optimizer.buckets]
    assert any(gathering) and not all(gathering)
    optimizer.wait()
    assert {type(param) for param in model.parameters()} == {ReplicatedParameter}


@pytest.mark.ranks(2)
def test_an_alias_of_a_parameter_is_waited_for_in_the_step() -> None:
    """A bucket of which somebody has an alias is waited for in the step, while that is alive."""
    model, wrapped, optimizer = one_step()
    alias = model.logit_scale.detach().view(1)
    for is_alive in (True, False):
        wrapped(data(group_of().rank, 0)).square().mean().backward()
        optimizer.step()
        gathering = [bucket.is_gathering for bucket in optimizer.buckets]
        assert any(gathering) and all(gathering) != is_alive
        assert alias.isfinite()
        alias = torch.zeros(1)
    optimizer.wait()


@pytest.mark.ranks(2)
def test_an_update_that_failed_is_an_error_at_each_use() -> None:
    """An update that never came is an error at each use, and names what was waited for."""

    class FailedGather(LateGather):
        def wait(self, limit_seconds: float | None = None) -> None:
            raise TransferError("all_gather", 1, "it is gone")

    model, wrapped, optimizer = one_step()
    optimizer.wait()
    bucket.all_gather = FailedGather  # type: ignore[attr-defined, assignment, misc]
    wrapped(data(group_of().rank, 0)).square().mean().backward()
    optimizer.step()
    messages = []
    for read in (lambda: model.logit_scale.item(), lambda: model.logit_scale + 1, optimizer.wait):
        with pytest.raises(RuntimeError) as caught:
            read()
        messages.append(str(caught.value))
    assert len(messages) == 3
    assert all("parameters" in message and "of optimizer 0" in message for message in messages)


@pytest.mark.ranks(2)
def test_an_update_whose_optimizer_is_gone_is_an_error() -> None:
    """The values of a parameter whose optimizer has gone before its update came are not known."""
    model, wrapped, optimizer = one_step()
    params = list(model.parameters())
    del model, wrapped, optimizer
    gc.collect()
    with pytest.raises(RuntimeError) as caught:
        params[0].sum()
    message = str(caught.value)
    assert "was read after its optimizer was deleted" in message and "optimizer.wait()" in message


@pytest.mark.ranks(2)
def test_a_graph_from_before_the_step_is_an_error_of_torch() -> None:
    """A backward pass through what the step has changed is torch's own error, even while the update is under way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.25)
    wrapped = ShardedDataParallel(model, optimizer)
    first, second = (wrapped(torch.ones(1, 3).double()).sum() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    optimizer.wait()


@pytest.mark.ranks(2)
def test_a_compiled_function_waits_for_parameters() -> None:
    """A compiled function of parameters waits as any other."""
    model, _, optimizer = one_step()

    @torch.compile(backend="eager")
    def total(params: list[Tensor]) -> Tensor:
        return torch.stack([param.detach().sum() for param in params]).sum()

    assert total(list(model.parameters())).isfinite()
    optimizer.wait()
    assert total(list(model.parameters())).isfinite()


@pytest.mark.ranks(2)
def test_a_comparison_of_replicas_waits_for_parameters() -> None:
    """Replicas are compared once their parameters have arrived."""
    model, _, optimizer = one_step()
    assert all(bucket.is_gathering for bucket in optimizer.buckets)
    check_replicas(model)
    assert not any(bucket.is_gathering for bucket in optimizer.buckets)
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.ranks(2)
def test_a_module_compiled_with_gradients_trains_as_plain() -> None:
    def train_compiled(model: Clip, call: Callable[[Tensor], Tensor], optimizer: Any, ranks: list[int]) -> list[Tensor]:
        """Two steps of two micro-batches each: the second is traced while parameters have gradients."""
        for step in range(2):
            for micro_batch in range(2):
                losses = [call(data(rank, 2 * step + micro_batch)).square().mean() for rank in ranks]
                (torch.stack(losses).mean() / 16).backward()
                torch._dynamo.reset()
            optimizer.step()
            optimizer.zero_grad()
        return [value.clone() for value in model.state_dict().values()]

    bucket.all_gather = LateGather  # type: ignore[attr-defined, assignment, misc]
    torch.manual_seed(0)
    plain = Clip().double()
    model = copy.deepcopy(plain)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.25, options=OSSOptions(bucket_numel=20))
    model.compile(backend="eager")
    wrapped = ShardedDataParallel(model, optimizer)
    values = train_compiled(model, wrapped, optimizer, [group_of().rank])
    expected = train_compiled(plain, plain, torch.optim.SGD(plain.parameters(), lr=0.25), [0, 1])
    for ours, theirs in zip(values, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2)
def test_no_forward_overwrites_a_sharded_buffer() -> None:
    """A buffer that holds an average of sharded gradients is this rank's own part, and no forward overwrites it."""
    rank = group_of().rank
    model = nn.Linear(6, 2).double()
    wrapped = ShardedDataParallel(model, OSS(model.parameters(), torch.optim.SGD, lr=0.25))
    wrapped(data(rank, 0)[:, :6]).square().mean().backward()
    assert model.weight.grad is not None
    model.register_buffer("average", model.weight.grad.clone())
    model.register_buffer("count", torch.tensor(rank))
    with as_local():
        before = model.average.clone()
    wrapped(data(rank, 1)[:, :6])
    with as_local():
        assert 0 < before.numel() < 12 and torch.equal(model.average, before)
    assert model.count == 0  # Rank 0's, as of every other buffer.
