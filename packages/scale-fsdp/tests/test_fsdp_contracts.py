"""Ranks that do different things get an error that says who did what, before an optimizer can step."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fsdp_parity import noise, sharded
from shard_arguments import shard_arguments
from torch import Tensor, nn

from scale_check.exact import gather_values
from scale_core.consistency import flight_recorder as last_words
from scale_core.errors import ContractError, ScaleDistributedError
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import run_ranks, scaled_by_load
from scale_fsdp import MixedPrecisionPolicy, ShardOptions, fully_shard


def impatient(ranks: list[int] | None = None, seconds: float = 3.0) -> dist.ProcessGroup:
    """Ranks that find each other in peace and then wait no longer than this, well within the test's own limit."""
    group = dist.new_group(ranks, use_local_synchronization=ranks is not None)
    dist.barrier(group)
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=scaled_by_load(seconds)))
    return group


class Choice(nn.Module):
    """Two branches, each a unit; `order` says which of them run, and in which order."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = (nn.Sequential(nn.Linear(4, size), nn.Linear(size, 4)) for size in sizes)

    def forward(self, x: Tensor, order: str) -> Tensor:
        for name in order:
            x = getattr(self, name)(x)
        return x


@dataclass(frozen=True)
class Difference:
    """Ranks that run the units in different orders, after some steps in the same one.

    Attributes:
        orders: By rank.
        sizes: Elements of the two units: a message of the one may fit into the other, or not.
    """

    orders: tuple[str, ...]
    sizes: tuple[int, int] = (3, 3)
    training: bool = True
    steps_before: int = 0


def run_in_orders(case: Difference, group: dist.ProcessGroup) -> tuple[str, str, bool]:
    """Takes `steps_before` steps in one order, then each rank its own; returns the error and whether weights moved."""
    model = sharded(Choice(case.sizes), ["a", "b", ""], group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def take(order: str) -> None:
        if not case.training:
            with torch.no_grad():
                model(noise(2, 4), order)
            return
        model(noise(2, 4), order).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(case.steps_before):
        take("ab")
    before = [param.detach().clone() for param in model.parameters()]
    try:
        take(case.orders[group.rank()])
    except ScaleDistributedError as error:
        moved = not all(
            torch.equal(local_tensor(old), local_tensor(new))
            for old, new in zip(before, model.parameters(), strict=True)
        )
        return type(error).__name__, str(error), moved
    return "", "no error", True


SKIPPED = Difference(("ab", "a"))
IN_PAIRS = [
    SKIPPED,
    *(
        Difference(orders, sizes, training)
        for orders in (("ab", "ba"), ("a", "b"))
        for sizes in ((3, 3), (3, 5))
        for training in (True, False)
    ),
]


def run_in_pairs(steps_before: tuple[int, ...]) -> list[tuple[Difference, str, str, bool]]:
    """Two ranks for each difference, which are a world of their own: all wait for their limits at once."""
    pair = dist.get_rank() // 2
    results = []
    for number in steps_before:
        case = replace(IN_PAIRS[pair], steps_before=number)
        # One that has failed can't be used again. All pairs compute at once, so each is slower than two ranks alone.
        group = impatient([2 * pair, 2 * pair + 1], seconds=5.0)
        results.append((case, *run_in_orders(case, group)))
    return results


@pytest.mark.fault(22, 23)
def test_other_units_or_another_order_raise_before_the_step():
    results = [result for of_rank in run_ranks(run_in_pairs, 2 * len(IN_PAIRS), (0, 4)) for result in of_rank]
    assert len({case for case, *_ in results}) == 2 * len(IN_PAIRS)
    for case, name, message, moved in results:
        assert name in ("ContractError", "ScaleDistributedError"), (case, message)
        assert not moved, case
        words = [f"step {case.steps_before + 1}", "unit 'b'", "rank 0", "rank 1"]
        words += ["fully_shard"] if case.orders == SKIPPED.orders else ["unit 'a'"]
        assert [word for word in words if word not in message] == [], (case, message)


@pytest.mark.ranks(3)
def test_the_one_rank_of_three_that_differs_is_named():
    message = run_in_orders(Difference(("ab", "ba", "ab"), steps_before=1), impatient())[1]
    assert "ranks 0, 2: forward of unit 'a'" in message
    assert "rank 1: forward of unit 'b'" in message


@pytest.mark.fault(25, 27)
@pytest.mark.ranks(2)
def test_modules_that_differ_between_ranks_are_refused():
    mine = dist.get_rank() == 1
    messages = []
    for module in (
        nn.Linear(4, 3 + mine),
        nn.Linear(4, 3).to(torch.float64 if mine else torch.float32),
        nn.Linear(4, 3).requires_grad_(mine),
        nn.Sequential(nn.Linear(4, 3)) if mine else nn.Linear(4, 3),
    ):
        with pytest.raises(ContractError) as caught:
            fully_shard(module)
        messages.append(str(caught.value))
    first, second = gather_values(messages)
    assert first == second
    assert len(first) == 4
    for message in first:
        assert "rank 0" in message and "rank 1" in message


@pytest.mark.fault(24)
@pytest.mark.ranks(2)
def test_another_wrapping_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(model[dist.get_rank()])
    with pytest.raises(ScaleDistributedError, match=r"(?s)(?=.*rank 0).*rank 1"):
        fully_shard(model)
        model(noise(2, 3))


SETTINGS = {
    "compute": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, {}, "computes in torch.bfloat16"),
    "reduction": (
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
        "reduces in torch.float32",
    ),
    "atom": ({"atom": "row"}, {"atom": "element"}, "cut at"),
    "flatten": ({"flatten_parameters": True}, {}, "flatten=True"),
    "reshard": ({"reshard_after_forward": False}, {}, "reshard_after_forward=False"),
}


@pytest.mark.ranks(2)
def test_units_with_different_options_are_refused():
    messages = {}
    for kind, kwargs in SETTINGS.items():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
        fully_shard(model[0], **shard_arguments(**kwargs[dist.get_rank()]))
        fully_shard(model)
        errors = []
        for _ in range(2):  # What was refused once is not let through the second time.
            with pytest.raises(ContractError) as caught:
                model(noise(2, 3))
            errors.append(str(caught.value))
        assert errors[0] == errors[1]
        messages[kind] = errors[0]
    first, second = gather_values(messages)
    assert first == second
    for kind, (_, _, word) in SETTINGS.items():
        assert word in first[kind], first[kind]
        assert "rank 0: 0: " in first[kind] and "rank 1: 0: " in first[kind]


@pytest.mark.fault(21)
@pytest.mark.ranks(2)
def test_a_collective_call_on_one_rank_ends_in_an_error():
    """What takes all ranks, on rank 0 only; the other one is alive, and never comes."""
    last_words._GRACE_SECONDS = 0.1  # The other rank leaves none.
    everyone = dist.new_group()
    messages = []
    for alone in (
        lambda model: model.clip_grad_norm_(1.0),
        lambda model: model.state_dict(),
        lambda model: model.summon_full_params().__enter__(),
    ):
        group = dist.new_group()  # One that has failed can't be used again.
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        fully_shard(model[0], group, options=ShardOptions(limit_seconds=0.5))
        fully_shard(model, group, options=ShardOptions(limit_seconds=0.5))
        model(noise(2, 3)).sum().backward()
        if dist.get_rank() == 0:
            with pytest.raises(ScaleDistributedError) as caught:
                alone(model)
            messages.append(str(caught.value))
        dist.barrier(everyone)
    (clip, state, summon), _ = gather_values(messages)
    assert "gradient norm" in clip
    assert "full parameters" in state and "full parameters" in summon


@pytest.mark.ranks(2)
def test_no_false_alarm_where_all_ranks_change_the_order():
    """What a user may do on all ranks alike: other orders, evaluations, repeated and skipped units."""
    model = sharded(Choice((3, 5)), ["a", "b", ""])
    for step, order in enumerate(["ab", "ab", "ba", "a", "b", "aab", "ab", "abab", "ba", "ab"]):
        model(noise(2, 4), order).sum().backward()
        if step % 3 == 0:
            with torch.no_grad():
                model(noise(2, 4), order[::-1])
        if step % 4 == 0:
            with model.no_sync():
                model(noise(2, 4), order).sum().backward()
    assert step == 9


@pytest.mark.fault(33)
@pytest.mark.ranks(2)
def test_after_a_broken_contract_the_model_says_so():
    model = sharded(Choice((3, 3)), ["a", "b", ""])
    with pytest.raises(ContractError):
        model(noise(2, 4), ("ab", "ba")[dist.get_rank()])
    with pytest.raises(ScaleDistributedError, match=r"(?s)(?=.*broken).*start from the last checkpoint"):
        model(noise(2, 4), "ab")


@pytest.mark.ranks(2)
def test_what_one_rank_raised_stands_in_the_error_of_the_others():
    model = sharded(Choice((3, 3)), ["a", "b", ""], impatient())
    model(noise(2, 4), "ab").sum().backward()
    if dist.get_rank() == 1:
        model.b.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(noise(2, 4), "ab")
    else:
        with pytest.raises(ScaleDistributedError, match="ZeroDivisionError"):
            model(noise(2, 4), "ab").sum().backward()
    dist.barrier()  # The other one is alive as long as this one waits.


@pytest.mark.parametrize("kinds", ["equal", "other shapes", "in a model"])
@pytest.mark.ranks(2, in_turn=True)
def test_ranks_that_enter_different_units_are_refused(kinds):
    """Two units without a module around them, of one shape or not, or with one: each rank enters another one first."""
    found = []
    for steps_before in (0, 3):
        torch.manual_seed(3)
        first, second = nn.Linear(4, 4), nn.Linear(4, 4 if kinds != "other shapes" else 5)
        group = impatient(seconds=10.0)
        for unit in (first, second):
            fully_shard(unit, group)
        if kinds == "in a model":
            fully_shard(nn.Sequential(first, second), group)
        for step in range(steps_before + 1):
            units = (second, first) if step == steps_before and dist.get_rank() else (first, second)
            with pytest.raises(ContractError) if step == steps_before else nullcontext() as caught:
                for unit in units:
                    with torch.set_grad_enabled(step % 2 == 1):
                        output = unit(noise(2, 4))
                    if step % 2:
                        output.sum().backward()
        found.append(str(caught.value))
    first, later = found
    units = ("unit '0'", "unit '1'") if kinds == "in a model" else ("the root unit", "the root unit")
    for rank, unit in enumerate(units):
        for message in (first, later):
            assert f"rank {rank}: {unit} (Linear, number " in message
    for message in (first, later):
        fact, mend = message.split(". ")
        assert "the ranks are about to run different units: rank 0: " in fact
        assert mend.startswith("All ranks must run the same units in the same order")
