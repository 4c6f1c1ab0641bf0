"""torch_patches.py: torch's own functions do right by shards, and by all else what they always did."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_by_hand import Model, adam, train
from sharded_by_hand import cut as cut_model
from test_clip_grad import cut, piece_of, whole_grads, with_grad
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# Imported by name, and before any tensor is marked.
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    parameters_to_vector,
    vector_to_parameters,
)

from scale_core.comm.group import Group, group_of
from scale_core.optim.clip_grad import grad_norm
from scale_core.shard import (
    RECORD,
    Axis,
    Placement,
    Shard,
    elements_of,
    on_local_tensors,
    register_stages,
    shard_of,
)
from scale_core.sharded_tensor.replicated_parameter import set_reduced_gradient
from scale_core.sharded_tensor.tensor import local_tensor, mark_sharded, set_shard

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", ["at once", "in two", "by value"])
def test_clipping_shards_equals_clipping_the_whole(way: str, num_ranks: int) -> None:
    group = group_of()
    for norm_type in NORM_TYPES:
        grads = whole_grads(torch.float64)
        plain = [with_grad(grad.clone()) for grad in grads.values() if grad.numel()]
        # An odd one that all ranks have whole, and one without a gradient on the others than the first.
        shards = [cut(name, grad, group) for name, grad in grads.items()]
        twos, threes = torch.full((3,), 2.0).double(), torch.full((2 * group.size,), 3.0).double()
        shards += [with_grad(twos), cut("on one", threes, group)]
        plain += [with_grad(twos.clone()), with_grad(threes[:2].clone())]
        if group.rank:
            shards[-1].grad = None
        if way == "by value":
            clip_grad_value_(shards, 0.7)
            clip_grad_value_(plain, 0.7)
        else:
            expected = clip_grad_norm_(plain, 0.5, norm_type)
            if way == "at once":
                norm = clip_grad_norm_((param for param in shards), 0.5, norm_type, foreach=group.rank == 0)
            else:
                # The parameters without a gradient here are those of a class that others have, too.
                norm = get_total_norm([p.grad for p in shards if p.grad is not None], norm_type)
                clip_grads_with_norm_(shards, 0.5, norm)
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for name, shard, whole in zip(grads, shards, [*plain[:3], None, plain[3]], strict=False):
            if whole is not None:
                assert shard.grad is not None and whole.grad is not None
                torch.testing.assert_close(shard.grad, cut(name, whole.grad, group).grad, rtol=1e-12, atol=0)


def test_what_is_no_shard_is_clipped_as_ever() -> None:
    """In a process with shards, what is no shard is clipped to the bit as torch does it."""
    set_shard(with_grad(torch.ones(2)), Shard("there is one", (2,), 0, 2))
    own = clip_grad_norm_.__closure__[0].cell_contents.args[0]
    for norm_type in (*NORM_TYPES, 0.5):
        one, other = ([with_grad(grad.clone()) for grad in whole_grads().values() if grad.numel()] for _ in range(2))
        with torch.no_grad():
            expected = own(other, 0.5, norm_type)
        assert torch.equal(clip_grad_norm_(one, 0.5, norm_type), expected)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(one, other, strict=True))
        assert torch.equal(
            get_total_norm([p.grad for p in one], norm_type), get_total_norm((p.grad for p in other), norm_type)
        )
    assert clip_grad_norm_([], 1.0).item() == 0 == get_total_norm([]).item()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip_grad_norm_(iter(()), 1.0)
        clip_grad_norm_((param for param in ()), 1.0)
    assert len(caught) == 1 and "empty generator" in str(caught[0].message)


@pytest.mark.ranks(3)
def test_bounds_are_checked_and_infinities_refused_on_all_ranks() -> None:
    group = group_of()
    param = cut("weight", torch.ones(2 * group.size), group)
    assert clip_grad_norm_(param, math.inf).item() == pytest.approx(math.sqrt(2 * group.size))
    assert param.grad is not None and local_tensor(param.grad).tolist() == [1, 1]
    with pytest.raises(ValueError, match="max_norm of at least 0"):
        clip_grad_norm_(param, -1.0)
    clip_grad_norm_(param, 0)
    assert local_tensor(param.grad).tolist() == [0, 0]
    param.grad.fill_(math.nan if group.rank == 1 else 1.0)
    with pytest.raises(RuntimeError, match="can't be clipped: skip the step, or pass error_if_nonfinite=False"):
        clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match="can't be clipped"):
        get_total_norm([param.grad], error_if_nonfinite=True)
    assert clip_grad_norm_([param], 1.0).isnan()
    # Weights have a norm, too.
    weights = piece_of("", torch.full((4 * group.size,), 2.0), 4 * group.rank, 4 * group.rank + 4)
    set_shard(weights, Shard("weight", (4 * group.size,), 0, 4, (Axis(group, Placement.SHARD),)))
    weights.data.fill_(2.0)
    assert get_total_norm([weights]).item() == pytest.approx(2 * math.sqrt(12))


class Stages(nn.Module):
    """This rank's shard of a model with a stage on each rank; the first and the last share one parameter."""

    def __init__(self, group: Group, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.group = group
        self.shared = nn.Parameter(torch.zeros(2, dtype=dtype)) if group.rank != 1 else None
        self.own = nn.Parameter(torch.zeros(width, dtype=dtype)) if width else None
        for param in self.parameters():
            param.grad = torch.full_like(param, 1.0 + group.rank)
        if self.shared is not None:
            self.shared.grad = torch.ones_like(self.shared)

    def counted_elsewhere(self) -> Collection[Tensor]:
        return {self.shared} if self.shared is not None and self.group.rank else set()


@pytest.mark.ranks(3)
def test_stages_have_one_norm_with_ranks_without_parameters() -> None:
    """Rank 1 has no parameter at all, and still takes part."""
    group = group_of()
    model = Stages(group, 0 if group.rank == 1 else 3)
    register_stages(model)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norms = [clip_grad_norm_(model.parameters(), math.inf), get_total_norm(grads), get_total_norm(grads, math.inf)]
    # A group of parameters that the stages of some ranks have none of, as a loop over an optimizer's groups clips it.
    for owner in (0, 2):
        mine = list(model.parameters())[1:] if group.rank == owner else []
        assert clip_grad_norm_(mine, 0.5 * 10**owner).item() == pytest.approx((1 + owner) * 3**0.5)
        norms += [get_total_norm([param.grad for param in mine if param.grad is not None])]
        for param in mine:
            if param.grad is not None:
                param.grad.fill_(1.0 + owner)
    # Nothing on all ranks; and what has been used up gets the word that torch has for it.
    assert clip_grad_norm_([], 1.0).item() == 0 == grad_norm([]).item()
    for clip_nothing in (lambda: clip_grad_norm_((param for param in ()), 1.0), lambda: grad_norm(iter(()))):
        # Of a rank on which nothing trains it is all that there is.
        with nullcontext() if group.rank == 1 else pytest.warns(UserWarning, match="the iterator that was given had"):
            clip_nothing()
    other = Stages(group, 3)  # Another one over the same ranks is met with this one at once.
    register_stages(other)
    both = [] if group.rank == 1 else [*model.parameters(), *other.parameters()]
    assert get_total_norm([param.grad for param in both]).item() == pytest.approx((2 * norms[0].item() ** 2) ** 0.5)
    other.group = group_of(dist.new_group())
    if group.rank != 1:  # Of which it is the one pipeline that has nothing there.
        with pytest.raises(ValueError, match=r"no parameters, and there are pipelines over several groups of ranks"):
            clip_grad_norm_([], 1.0)
    del other
    if group.rank == 1:  # What is no stage's is nobody else's.
        assert clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0).item() == 0
    clip_grad_value_(model.parameters(), 0.5)
    assert all(param.grad is not None and param.grad.eq(0.5).all() for param in model.parameters())
    expected = math.sqrt(2 * 1 + 3 * 1 + 3 * 9)
    assert [norm.item() for norm in norms] == pytest.approx([expected, expected, 3.0, 0.5, 3 * 3**0.5])


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("narrow", "dtype"), [(None, torch.float64), (2, torch.float32)])
def test_the_norm_of_stages_has_one_dtype_on_all_ranks(narrow: int | None, dtype: torch.dtype) -> None:
    """The norms of stages in fp64, but for that of one rank: rank 1 has no parameter, and rank 2 has frozen its own."""
    group = group_of()
    model = Stages(group, 0 if group.rank == 1 else 3, torch.float32 if group.rank == narrow else torch.float64)
    register_stages(model)
    if group.rank == 2 and narrow != 2:
        model.requires_grad_(False)
        model.zero_grad()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norms = [clip_grad_norm_(model.parameters(), math.inf), get_total_norm(grads)]
    by_rank: list[Any] = [None] * group.size
    dist.all_gather_object(by_rank, [norm.item() for norm in norms])
    assert by_rank == [by_rank[0]] * group.size and {norm.dtype for norm in norms} == {dtype}


class Wrapper(nn.Module):
    """Averages gradients into pieces of parameters."""


class PieceOf:
    """Says that the averaged gradient of a parameter is that of a piece, while the wrapper is alive."""

    name, optimizer = "weight", None

    def __init__(self, piece: nn.Parameter, wrapper: nn.Module) -> None:
        self.piece, self.of = piece, weakref.ref(wrapper)

    @property
    def wrapper(self) -> nn.Module | None:
        return self.of()

    def holder(self) -> Tensor:
        return self.piece

    def read(self) -> Tensor | None:
        assert self.piece.grad is not None
        return mark_sharded(self.piece.grad.detach(), vars(self.piece)[RECORD])

    def write(self, grad: Tensor | None) -> Tensor | None:
        raise AssertionError("nobody assigns a gradient")

    def wait(self) -> None:
        raise AssertionError("nothing is under way")


@pytest.mark.ranks(2)
def test_gradients_that_stand_elsewhere_are_clipped_there() -> None:
    group, grads = group_of(), whole_grads(torch.float64)
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads.values()]
    pieces, wrapper = [cut(name, grad, group) for name, grad in grads.items()], Wrapper()
    for param, piece in zip(params, pieces, strict=True):
        set_reduced_gradient(param, PieceOf(piece, wrapper))
    plain = [with_grad(grad.clone()) for grad in grads.values() if grad.numel()]
    for expected, found in (
        (clip_grad_norm_(plain, 0.5), clip_grad_norm_(params, 0.5)),
        (clip_grads_with_norm_(plain, 0.1, torch.tensor(0.5)), clip_grads_with_norm_(params, 0.1, torch.tensor(0.5))),
        (clip_grad_value_(plain, 0.001), clip_grad_value_(params, 0.001)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        wholes = iter(plain)
        for name, grad, piece in zip(grads, grads.values(), pieces, strict=True):
            if grad.numel():
                torch.testing.assert_close(piece.grad, cut(name, next(wholes).grad, group).grad, rtol=1e-12, atol=0)
    assert clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0).item() == 0  # Of another model, without gradients.
    norm = get_total_norm([grad for param in params if (grad := param.grad) is not None])
    torch.testing.assert_close(norm, get_total_norm([param.grad for param in plain]), rtol=3e-7, atol=0)
    model = nn.ParameterList(params)
    with pytest.raises(ValueError, match="'0' and others are under ShardedDataParallel"):
        DistributedDataParallel(model)
    del wrapper
    assert clip_grad_norm_(params, 1.0).item() == 0  # Nobody keeps them any more.


@pytest.mark.ranks(2)
@on_local_tensors
def test_ddp_is_refused_around_shards_and_stages() -> None:
    """Whatever is refused has its values still; what is whole on all ranks is wrapped."""
    group = group_of()
    shard = Axis(group, Placement.SHARD)
    found = []
    for mark_it in (True, False):
        model = nn.ModuleDict({"inner": nn.Linear(2, 2)})
        weight: Any = model["inner"].weight
        weight.data.fill_(group.rank)
        if mark_it:
            set_shard(weight, Shard("inner.weight", (2 * group.size, 2), 4 * group.rank, 4 * group.rank + 4, (shard,)))
        else:
            model.group, model.counted_elsewhere = group, set
            register_stages(model)  # type: ignore[arg-type]
        for wrapped in (model, nn.Sequential(nn.Linear(1, 1), model)):
            with pytest.raises(ValueError, match="DistributedDataParallel") as error:
                DistributedDataParallel(wrapped)
            found.append(str(error.value))
        assert weight.eq(group.rank).all()
        model._ddp_params_and_buffers_to_ignore = ["inner.weight"]
        if mark_it:
            DistributedDataParallel(model)  # torch leaves it alone, too.
            assert weight.eq(group.rank).all()
    plain = nn.Linear(2, 2)
    plain.weight.data.fill_(group.rank)
    assert DistributedDataParallel(plain).module.weight.eq(0).all()
    shard, deeper, stage, _ = found
    assert "'inner.weight' is a shard [2, 2] of a parameter [4, 2]" in shard
    assert "train it without DistributedDataParallel" in shard
    assert "'1.inner.weight' is a shard" in deeper
    assert "'inner.weight' is a parameter of a pipeline's stage" in stage
    assert 'mesh["data"].get_group()' in stage


@on_local_tensors
def test_a_fresh_optimizer_takes_its_part_of_a_plain_state() -> None:
    plain = Model()
    reference = adam(plain)
    train(plain, reference, 2)
    model = cut_model(copy.deepcopy(plain), 1, 3)
    optimizer = adam(model)
    assert len(optimizer.state_dict()["shards"]["held"]) == len(
        optimizer.param_groups[0]["params"] + optimizer.param_groups[1]["params"]
    )
    optimizer.load_state_dict(reference.state_dict())
    wholes, parts = (
        [param for group in each.param_groups for param in group["params"]] for each in (reference, optimizer)
    )
    for param, part in zip(wholes, parts, strict=True):
        shard = shard_of(part)
        assert shard is not None
        for key, value in reference.state[param].items():
            mine = value if key == "step" else elements_of(value, shard.start, shard.stop).view(part.shape)
            assert torch.equal(optimizer.state[part][key], mine)
    train(model, optimizer, 1, first=2)


def test_a_full_vector_is_cut_into_shards_and_none_is_made() -> None:
    model = cut_model(nn.Sequential(nn.Linear(4, 4)), 0, 2)
    with pytest.raises(RuntimeError, match=r"cat of '0.weight' \[16\].*full_tensor\(\)"):
        parameters_to_vector(model.parameters())
    vector_to_parameters(torch.arange(20.0), model.parameters())
    weight, bias = (local_tensor(param).reshape(-1).tolist() for param in model.parameters())
    assert weight == list(range(8)) and bias == [16.0, 17.0]


def test_full_parameters_and_a_world_of_one_make_vectors() -> None:
    for model in (nn.Linear(2, 2), cut_model(nn.Sequential(nn.Linear(2, 2)), 0, 1)):
        vector = parameters_to_vector(model.parameters())
        assert vector.shape == (6,)
        vector_to_parameters(torch.zeros(6), model.parameters())
        assert not any(param.any() for param in model.parameters())
