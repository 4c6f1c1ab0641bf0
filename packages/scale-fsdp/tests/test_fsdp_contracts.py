"""Ranks that do different things get an error that says who did what, before an optimizer can step."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fsdp_beside import noise, sharded
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from scale_core import last_words
from scale_core.contract import ContractError, ScaleDistributedError
from scale_core.testing import run_ranks
from scale_fsdp import MixedPrecision, fully_shard


def impatient() -> dist.ProcessGroup:
    """All ranks, which find each other in peace and then wait no longer than this, well within the test's own limit."""
    group = dist.new_group()
    _set_pg_timeout(timedelta(seconds=3), group)
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


def run_in_orders(
    orders: tuple[str, ...], sizes: tuple[int, int], training: bool, steps_before: int
) -> tuple[str, str, bool]:
    """Takes `steps_before` steps in one order, then each rank its own; returns the error and whether weights moved."""
    model = sharded(Choice(sizes), ["a", "b", ""], impatient())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def take(order: str) -> None:
        if not training:
            with torch.no_grad():
                model(noise(2, 4), order)
            return
        model(noise(2, 4), order).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps_before):
        take("ab")
    before = [param.detach().clone() for param in model.parameters()]
    try:
        take(orders[dist.get_rank()])
    except ScaleDistributedError as error:
        moved = not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        return type(error).__name__, str(error), moved
    return "", "no error", True


@pytest.mark.parametrize("steps_before", [0, 4])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sizes", [(3, 3), (3, 5)])
@pytest.mark.parametrize("orders", [("ab", "ba"), ("a", "b")])
def test_other_units_or_another_order_raise_on_every_rank_before_the_optimizer_steps(
    orders, sizes, training, steps_before
):
    results = run_ranks(run_in_orders, 2, orders, sizes, training, steps_before)
    for name, message, moved in results:
        assert name in ("ContractError", "ScaleDistributedError"), message
        assert not moved
        assert f"step {steps_before + 1}" in message
        assert "unit 'a'" in message and "unit 'b'" in message
        assert "rank 0" in message and "rank 1" in message


def test_the_one_rank_of_three_that_differs_is_named():
    results = run_ranks(run_in_orders, 3, ("ab", "ba", "ab"), (3, 3), True, 1)
    for _, message, _ in results:
        assert "ranks 0, 2: forward of unit 'a'" in message
        assert "rank 1: forward of unit 'b'" in message


def skip_a_unit_late() -> str:
    """In the fifth step rank 1 skips the last unit."""
    model = sharded(Choice((3, 3)), ["a", "b", ""], impatient())
    try:
        for step in range(5):
            order = "a" if step == 4 and dist.get_rank() == 1 else "ab"
            model(noise(2, 4), order).sum().backward()
    except ScaleDistributedError as error:
        return str(error)
    return "no error"


def test_a_unit_that_one_rank_skips_is_named():
    for message in run_ranks(skip_a_unit_late, 2):
        assert "step 5" in message
        assert "unit 'b'" in message
        assert "fully_shard" in message


def shard_different_modules(kind: str) -> str:
    mine = dist.get_rank() == 1
    module = {
        "shape": lambda: nn.Linear(4, 3 + mine),
        "dtype": lambda: nn.Linear(4, 3).to(torch.float64 if mine else torch.float32),
        "trains": lambda: nn.Linear(4, 3).requires_grad_(mine),
        "name": lambda: nn.Sequential(nn.Linear(4, 3)) if mine else nn.Linear(4, 3),
    }[kind]()
    with pytest.raises(ContractError) as caught:
        fully_shard(module)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["shape", "dtype", "trains", "name"])
def test_different_modules_are_refused_when_they_are_sharded(kind):
    first, second = run_ranks(shard_different_modules, 2, kind)
    assert first == second
    assert "rank 0" in first and "rank 1" in first


def wrap_differently() -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(model[dist.get_rank()])
    with pytest.raises(ScaleDistributedError) as caught:
        fully_shard(model)
        model(noise(2, 3))
    return str(caught.value)


def test_another_wrapping_is_refused():
    for message in run_ranks(wrap_differently, 2):
        assert "rank 0" in message and "rank 1" in message


SETTINGS = {
    "compute": ({"mixed_precision": MixedPrecision(torch.bfloat16)}, {}, "computes in torch.bfloat16"),
    "reduction": (
        {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
        {"mixed_precision": MixedPrecision(torch.bfloat16)},
        "reduces in torch.float32",
    ),
    "atom": ({"atom": "row"}, {"atom": "element"}, "cut at"),
    "flatten": ({"flatten_parameters": True}, {}, "flatten=True"),
    "reshard": ({"reshard_after_forward": False}, {}, "reshard_after_forward=False"),
}


def set_up_differently() -> dict[str, str]:
    messages = {}
    for kind, kwargs in SETTINGS.items():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
        fully_shard(model[0], **kwargs[dist.get_rank()])
        fully_shard(model)
        errors = []
        for _ in range(2):  # What was refused once is not let through the second time.
            with pytest.raises(ContractError) as caught:
                model(noise(2, 3))
            errors.append(str(caught.value))
        assert errors[0] == errors[1]
        messages[kind] = errors[0]
    return messages


def test_units_that_are_set_up_differently_are_refused_at_every_forward():
    first, second = run_ranks(set_up_differently, 2)
    assert first == second
    for kind, (_, _, word) in SETTINGS.items():
        assert word in first[kind], first[kind]
        assert "rank 0: 0: " in first[kind] and "rank 1: 0: " in first[kind]


def do_something_alone() -> list[str]:
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
        fully_shard(model[0], group, limit_seconds=0.5)
        fully_shard(model, group, limit_seconds=0.5)
        model(noise(2, 3)).sum().backward()
        if dist.get_rank() == 0:
            with pytest.raises(ScaleDistributedError) as caught:
                alone(model)
            messages.append(str(caught.value))
        dist.barrier(everyone)
    return messages


def test_what_takes_all_ranks_ends_in_an_error_where_one_does_it_alone():
    (clip, state, summon), _ = run_ranks(do_something_alone, 2)
    assert "gradient norm" in clip
    assert "whole parameters" in state and "whole parameters" in summon


def train_in_and_out_of_order() -> int:
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
    return step


def test_no_false_alarm_where_all_ranks_change_the_order():
    assert run_ranks(train_in_and_out_of_order, 2) == [9, 9]


def train_after_an_error() -> str:
    model = sharded(Choice((3, 3)), ["a", "b", ""])
    with pytest.raises(ContractError):
        model(noise(2, 4), ("ab", "ba")[dist.get_rank()])
    with pytest.raises(ScaleDistributedError, match="start from the last checkpoint") as caught:
        model(noise(2, 4), "ab")
    return str(caught.value)


def test_after_a_broken_contract_the_model_says_so_instead_of_going_on():
    for message in run_ranks(train_after_an_error, 2):
        assert "broken" in message


def fail_on_one_rank() -> str:
    model = sharded(Choice((3, 3)), ["a", "b", ""], impatient())
    model(noise(2, 4), "ab").sum().backward()
    if dist.get_rank() == 1:
        model.b.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(noise(2, 4), "ab")
        return "division"
    with pytest.raises(ScaleDistributedError) as caught:
        model(noise(2, 4), "ab").sum().backward()
    return str(caught.value)


def test_what_one_rank_raised_stands_in_the_error_of_the_others():
    message, own = run_ranks(fail_on_one_rank, 2)
    assert own == "division"
    assert "ZeroDivisionError" in message
