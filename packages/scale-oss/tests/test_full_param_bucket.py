"""full_param_bucket.py: optimizers that need full tensors, over shards: equal to one process, in two collectives per
bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oss_cases import ELEMENTWISE, MATRICES, WHOLE, Lamb, Shards, give_gradients, plain_params, shapes_for, train
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from with_options import with_options

from scale_check.exact import assert_equal, gather_values
from scale_core.comm.group import group_of
from scale_core.errors import ContractError, ScaleDistributedError
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_oss import OSS, OSSOptions
from scale_oss.buckets import full_param_bucket as whole

STEPS = 4


class CountedLamb(Lamb):
    """Counts its calls by itself, as optimizers of others do; nobody knows it by its name."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["count"] = self.calls
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)


CASES = {**WHOLE, "counted lamb": (CountedLamb, {})}


class Watch:
    """What happens in the steps of an OSS: collectives, and what has memory when its optimizer steps."""

    def __init__(self, optimizer: OSS) -> None:
        self.sent: list[int] = []
        self.in_memory: list[int] = []
        self.updates = 0
        self._original = whole.all_to_all
        whole.all_to_all = self._send
        self.optimizer = optimizer
        optimizer.optim.register_step_pre_hook(self._look)

    def _send(self, output: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.sent.append(source.numel())
        return self._original(output, source, *args, **kwargs)

    def _look(self, *_: Any) -> None:
        self.updates += 1
        self.in_memory.append(self.numel_in_memory())

    def numel_in_memory(self) -> int:
        wholes = [tensor for bucket in self.optimizer.full_param_buckets for tensor in bucket.optimizer_params]
        return sum(tensor.numel() for tensor in wholes if tensor.untyped_storage().nbytes())

    def stop(self) -> None:
        whole.all_to_all = self._original


def groups_of(params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, whose parameters stand in the same buckets, with rates of their own."""
    listed = list(params.values())
    return [{"params": listed[::2], "lr": 0.03}, {"params": listed[1::2]}]


def beside_plain(name: str, bucket_numel: int, dtype: torch.dtype = torch.float32) -> None:
    """Trains shards and plain parameters; one is without a gradient in some steps, and one frozen for a while."""
    cls, kwargs = CASES[name]
    theirs = plain_params(shapes_for(name), dtype)
    shards = Shards(theirs)
    plain = cls(groups_of(theirs), **kwargs)
    ours = OSS(groups_of(shards.params), cls, **with_options(OSSOptions, bucket_numel=bucket_numel, **kwargs))
    assert bool(ours.full_param_buckets) == (group_of().size > 1)
    schedules = [ExponentialLR(each, 0.8) for each in (plain, ours)]
    watch = Watch(ours)
    for step in range(STEPS):
        for params in (theirs, shards.params):
            list(params.values())[-1].requires_grad_(step != 2)
        watch.sent.clear()
        train(plain, theirs.values(), [step], without=[0] if step == 1 else [])
        train(ours, shards.params.values(), [step], without=[0] if step == 1 else [])
        for schedule in schedules:
            schedule.step()
        assert len(watch.sent) <= 2 * len(ours.full_param_buckets)
        assert watch.numel_in_memory() == 0
        assert_equal(shards.wholes(), {n: p.detach() for n, p in theirs.items()}, f"{name}, step {step}")
    watch.stop()
    assert_equal([g["lr"] for g in ours.param_groups], [g["lr"] for g in plain.param_groups], "rates")
    assert_equal(ours.param_groups[0].get("count"), plain.param_groups[0].get("count"), "count")
    largest = max(math.prod(shape) for shape in shapes_for(name).values())
    if watch.updates == STEPS:  # An optimizer that nobody knows takes one step, on all that this rank updates.
        largest = sum(tensor.numel() for bucket in ours.full_param_buckets for tensor in bucket.optimizer_params)
    assert max(watch.in_memory) <= max(bucket_numel, largest)


def all_beside_plain() -> None:
    for name in CASES:
        beside_plain(name, bucket_numel=30)
        beside_plain(name, bucket_numel=10_000, dtype=torch.bfloat16 if "lamb" not in name else torch.float64)


def test_in_a_world_of_one_every_tensor_is_whole_already() -> None:
    all_beside_plain()


@pytest.mark.ranks(2, 3)
def test_training_is_equal_to_one_process_to_the_bit() -> None:
    all_beside_plain()


# Who has what.


@pytest.mark.ranks(3)
def test_state_is_balanced_to_within_the_largest_tensor() -> None:
    """Elements of state that this rank keeps, of all, of the largest tensor; and how many buckets there are."""
    shapes = {f"matrix {number}": (3 + number % 5, 7) for number in range(23)}
    shards = Shards(plain_params(shapes))
    optimizer = OSS(shards.params.values(), Lamb, options=OSSOptions(bucket_numel=100))
    train(optimizer, shards.params.values(), range(1))
    kept = sum(moment.numel() for state in optimizer.optim.state.values() for moment in state["moments"])
    numels = [math.prod(shape) for shape in shapes.values()]
    for bucket in optimizer.full_param_buckets:
        by_owner = [
            [place.param for place in bucket.placements if place.owner == rank] for rank in range(group_of().size)
        ]
        assert sum(map(bool, by_owner)) > 1  # Nobody waits for one rank to step.
    by_rank = optimizer.partition_parameters()
    assert sorted(id(p) for groups in by_rank for p in groups[0]["params"]) == sorted(map(id, shards.params.values()))
    found = gather_values((kept // 2, sum(numels), max(numels), len(optimizer.full_param_buckets)))
    kept = [numel for numel, *_ in found]
    _, everything, largest, buckets = found[0]
    assert sum(kept) == everything and max(kept) - min(kept) <= largest
    assert buckets <= math.ceil(max(kept) / (100 - largest))


@pytest.mark.ranks(3)
def test_what_needs_no_journey_stays_where_it_is() -> None:
    """What is whole on one rank, and what an element-wise optimizer steps on, is sent nowhere."""
    theirs = plain_params(MATRICES)
    shards = Shards(theirs, atom="parameter")
    plain, ours = Lamb(theirs.values()), OSS(shards.params.values(), Lamb)
    assert not ours.full_param_buckets
    train(plain, theirs.values(), range(2))
    train(ours, shards.params.values(), range(2))
    assert_equal(shards.wholes(), {n: p.detach() for n, p in theirs.items()})
    for cls, kwargs in ELEMENTWISE.values():
        theirs = plain_params()
        shards = Shards(theirs)
        plain, ours = cls(theirs.values(), **kwargs), OSS(shards.params.values(), cls, **kwargs)
        assert not ours.full_param_buckets and not ours.buckets
        held = [p for p in shards.params.values() if p.to_local().numel() or not p.numel()]
        assert list(map(id, ours.optim.param_groups[0]["params"])) == list(map(id, held))
        train(plain, theirs.values(), range(2))
        train(ours, shards.params.values(), range(2))
        assert_equal(shards.wholes(), {n: p.detach() for n, p in theirs.items()})


@pytest.mark.ranks(3)
def test_what_was_gathered_before_a_step_is_gathered_again() -> None:
    """What was gathered is stale after a step, on all ranks alike: also where a rank has nothing of a unit."""
    for cls, shapes in ((torch.optim.Adam, {"wide": (4, 4), "only": (1,)}), (Lamb, MATRICES)):
        shards = Shards(plain_params(shapes))
        ours = OSS(shards.params.values(), cls)
        for unit in shards.units:
            unit.gather()
            unit.wait_gathered()
        train(ours, shards.params.values(), range(1))
        assert all(unit.is_stale() for unit in shards.units)
        for unit in shards.units:
            unit.release()


@pytest.mark.ranks(4)
def test_in_a_hybrid_mesh_each_copy_of_the_model_steps_by_itself() -> None:
    """Two copies of the model on two ranks each; each copy steps by itself, and they stay equal."""
    rank = dist.get_rank()
    shards_of, copies = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    groups = [[dist.new_group(ranks) for ranks in kind] for kind in (shards_of, copies)]
    sharding, replicas = group_of(groups[0][rank // 2]), group_of(groups[1][rank % 2])
    theirs = plain_params(shapes_for("adafactor"))
    shards = Shards(theirs, sharding, replicas=replicas)
    plain = torch.optim.Adafactor(theirs.values(), lr=0.01)
    for group in (None, dist.group.WORLD):
        ours = OSS(shards.params.values(), torch.optim.Adafactor, group, lr=0.01)
        assert ours.group.ranks == (sharding.ranks if group is None else (0, 1, 2, 3))
        if group is not None:
            ours.consolidate_state_dict(-1)
            ours.load_state_dict(plain.state_dict())
        steps = range(2) if group is None else range(2, 4)
        train(plain, theirs.values(), steps)
        train(ours, shards.params.values(), steps)
        assert_equal(shards.wholes(), {n: p.detach() for n, p in theirs.items()})
        assert_equal(ours.state_dict(all_ranks=True), plain.state_dict())
    ours.consolidate_state_dict(3)
    assert (rank == 3) == bool(ours._consolidated)
    if rank == 3:
        assert_equal(ours.state_dict(), plain.state_dict())
    with pytest.raises(ValueError, match=r"divided between ranks .* but its group is of ranks"):
        OSS(shards.params.values(), torch.optim.Adafactor, replicas)


@pytest.mark.ranks(2)
def test_shards_and_whole_parameters_may_stand_in_one_optimizer() -> None:
    """Some parameters in shards, some whole on every rank, in one OSS; clipped by one norm."""
    theirs = plain_params(shapes_for("lamb"), torch.float64)
    mine = {name: nn.Parameter(param.detach().clone()) for name, param in theirs.items()}
    names = list(mine)
    shards = Shards({name: mine[name] for name in names[::2]})
    mine.update(shards.params)
    plain, ours = Lamb(theirs.values()), OSS(mine.values(), Lamb, options=OSSOptions(bucket_numel=40))
    assert ours.buckets and ours.full_param_buckets
    for step in range(STEPS):
        for params in (theirs, mine):
            give_gradients(params.values(), step)
        norm = torch.nn.utils.get_total_norm([param.grad for param in theirs.values()])
        assert torch.allclose(ours.clip_grad_norm_(1e6), norm, rtol=1e-12)
        plain.step()
        ours.step()
    together = {**{n: p.detach() for n, p in mine.items()}, **shards.wholes()}
    assert_equal(together, {n: p.detach() for n, p in theirs.items()})


# What is refused.


@pytest.mark.ranks(2)
def test_what_can_not_be_put_together_is_refused_by_name() -> None:
    class Picky(Lamb):
        """Takes matrices only, as Muon does, and looks at what it is given on this rank."""

        def __init__(self, params: Any) -> None:
            super().__init__(params)
            for param in self.param_groups[0]["params"]:
                if param.ndim != 2:
                    raise ArithmeticError(f"no matrix: {tuple(param.shape)}")

    messages = []
    group = group_of()

    def refused(error: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> None:
        with pytest.raises(error) as caught:
            call()
        messages.append(str(caught.value))

    mixed = Shards(plain_params({"matrix": (4, 4), "vector": (9,)}))
    refused((ArithmeticError, ValueError), lambda: OSS(mixed.params.values(), Picky))
    flat = Shards(plain_params(), flatten=True)
    refused(ValueError, lambda: OSS(flat.params.values(), torch.optim.Adafactor))
    assert OSS(flat.params.values(), torch.optim.AdamW).in_place_buckets  # Its elements are updated one by one.

    torn = nn.Parameter(torch.zeros(2))
    set_shard(torn, Shard("torn", (5,), 0, 2, (Axis(group, Placement.SHARD),)))
    refused(ValueError, lambda: OSS([torn], Lamb))
    summand = nn.Parameter(torch.zeros(2))
    set_shard(summand, Shard("summand", (2,), 0, 2, (Axis(group, Placement.PARTIAL),)))
    refused(ValueError, lambda: OSS([summand], Lamb))
    twice = nn.Parameter(torch.zeros(2))
    set_shard(twice, Shard("twice", (4, 2), 0, 2, (Axis(group, Placement.SHARD), Axis(group, Placement.SHARD))))
    refused(ValueError, lambda: OSS([twice], Lamb))

    shards = Shards(plain_params(MATRICES))
    optimizer = OSS(shards.params.values(), Lamb)
    give_gradients(shards.params.values(), 0, without=[1] if group.rank else [])
    refused(ContractError, optimizer.step)
    give_gradients(shards.params.values(), 0)
    optimizer.step()  # Nothing has been sent before, so the group still works.
    shards.units[0].set_storage(shards.units[0].shard.double())
    give_gradients(shards.params.values(), 1)
    refused(RuntimeError, optimizer.step)
    by_rank = gather_values(messages)
    told, raised = sorted(messages[0] for messages in by_rank)
    assert raised == "no matrix: (9,)" and told.startswith(f"ArithmeticError: {raised} (on rank ")
    for messages in by_rank:
        _, flat, torn, summand, twice, other, moved = messages
        assert "Adafactor needs each full parameter, but 'flat_param' is one flat parameter that holds 3, " in flat
        assert "flatten_parameters=False" in flat
        assert "each of the 5 elements of 'torn' once, but they hold [[0, 2], [0, 2]]" in torn
        assert "'summand' is a partial sum on each rank" in summand
        assert "'twice' is divided along 2 axes of a mesh" in twice
        assert "rank 0: 'second' has a gradient; rank 1: 'second' has no gradient" in other
        assert "in torch.float32 on cpu when OSS was built" in moved and "then build OSS(" in moved


@pytest.mark.fault(101)
@pytest.mark.ranks(2)
def test_an_optimizer_that_fails_on_one_rank_is_named() -> None:
    class Failing(Lamb):
        """Fails where a tensor of this shape is stepped on."""

        shape: tuple[int, ...] = ()

        def _update(self, param: Tensor, group: dict[str, Any]) -> None:
            if tuple(param.shape) == self.shape:
                raise ArithmeticError("no such root")
            super()._update(param, group)

    shards = Shards(plain_params(MATRICES))
    optimizer = OSS(shards.params.values(), Failing, options=OSSOptions(limit_seconds=600.0))
    give_gradients(shards.params.values(), 0)
    Failing.shape = optimizer.full_param_buckets[0].placements[0].shape
    with pytest.raises((ArithmeticError, ScaleDistributedError)) as caught:
        optimizer.step()
    assert not any(
        tensor.untyped_storage().nbytes()
        for bucket in optimizer.full_param_buckets
        for tensor in bucket.optimizer_params
    )
    messages = gather_values(str(caught.value))
    assert "no such root" in messages
    (other,) = [message for message in messages if message != "no such root"]
    assert other.startswith("Failing.step() has raised on rank ") and "ArithmeticError: no such root" in other
    assert "updated in part: " in other
