"""The promise: a sharded model trains to the very numbers of plain PyTorch."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from fsdp_cases import (
    OPTIMIZERS,
    PRECISIONS,
    Case,
    Net,
    assert_cases_train_as_plain,
    batch,
    clip_both,
    loss_of,
    pairwise,
    shard,
)
from fsdp_parity import assert_same_grads
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_fsdp import fully_shard

WORLDS = [1, 2, 3, 4]

COVER = pairwise(
    model=["gpt", "mlp"],
    optimizer=list(OPTIMIZERS),
    wrapping=["root", "blocks", "deep", "leaves"],
    reshard=[True, False],
    precision=list(PRECISIONS),
    batches=[(1, False), (2, False), (3, True)],
    clip=[False, True],
    flatten=[False, True],
    wrapper=[False, True],
)

CHECKPOINTING = pairwise(
    model=["gpt", "mlp"],
    how=[f"{where}{how}" for where in ("inside", "around", "several") for how in ("", " reentrant")],
    wrapping=["root", "blocks", "deep"],
    reshard=[True, False],
    precision=["fp32", "bf16"],
    batches=[(1, False), (2, True)],
)


def case_of(choice: dict[str, Any]) -> Case:
    choice = dict(choice)
    accumulate, no_sync = choice.pop("batches")
    how = choice.pop("how", "")
    return Case(accumulate=accumulate, no_sync=no_sync, checkpointing=how, **choice)


@pytest.mark.gloo("sums in rank order, and fp16 in the wider dtype")
@pytest.mark.ranks(*WORLDS)
def test_training_is_bitwise_that_of_the_reference():
    world = group_of().size
    cases = [case_of(choice) for number, choice in enumerate(COVER) if number % 4 == world % 4]
    assert_cases_train_as_plain(cases)


@pytest.mark.composition("scale-fsdp", "torch.utils.checkpoint")
@pytest.mark.ranks(2, 3)
def test_checkpointed_activations_change_nothing():
    world = group_of().size
    cases = [case_of(choice) for number, choice in enumerate(CHECKPOINTING) if number % 2 == world % 2]
    assert_cases_train_as_plain(cases)


@pytest.mark.ranks(2)
def test_a_unit_recomputed_several_times_adds_up_its_means() -> None:
    """Each arrival of the block's gradient is averaged by itself; the means add up, in the order of their coming."""

    class Again(nn.Module):
        """One block that runs three times in a pass, twice of them under a reentrant checkpoint."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.block, torch.tanh(self.first(x)), use_reentrant=True)
            return self.block(checkpoint(self.block, torch.tanh(x), use_reentrant=True))

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    plain, arrivals = Again(), {}

    def arrived(name: str, param: nn.Parameter) -> None:
        arrivals.setdefault(name, []).append(param.grad)
        param.grad = None

    model = copy.deepcopy(plain)
    fully_shard(model.block)
    fully_shard(model)
    handles = [p.register_post_accumulate_grad_hook(functools.partial(arrived, n)) for n, p in plain.named_parameters()]
    for step in range(3):
        for each in range(world):
            plain(batch("mlp", step, each)[..., :1] * torch.ones(4)).square().mean().backward()
        for name, param in plain.named_parameters():
            came = arrivals.pop(name)
            number = len(came) // world
            assert number == (3 if name.startswith("block") else 1)
            means = [sum(came[arrival::number]) / world for arrival in range(number)]
            param.grad = functools.reduce(torch.add, means)
        model(batch("mlp", step, rank)[..., :1] * torch.ones(4)).square().mean().backward()
        assert_same_grads(model, plain)
        model.zero_grad()
        plain.zero_grad()
    for handle in handles:
        handle.remove()


@pytest.mark.ranks(2)
def test_two_ranks_are_bitwise_equal_to_ddp():
    rank = torch.distributed.get_rank()
    for optimizer, no_sync, reshard in itertools.product(OPTIMIZERS, (False, True), (True, False)):
        case = Case("gpt", optimizer, reshard=reshard)
        plain = case.build()
        model = shard(copy.deepcopy(plain), case)
        replicas = DistributedDataParallel(plain)
        cls, kwargs = OPTIMIZERS[optimizer]
        optimizers = [cls(each.parameters(), **kwargs) for each in (model, replicas)]
        for step in range(case.steps):
            losses = []
            for each in (model, replicas):
                if no_sync:
                    with each.no_sync():
                        loss_of(each(batch("gpt", step, rank, 1))).backward()
                loss = loss_of(each(batch("gpt", step, rank, 0)))
                loss.backward()
                losses.append(loss.item())
            assert losses[0] == losses[1], f"step {step}: loss {losses[0]} instead of {losses[1]}"
            assert_same_grads(model, plain)
            clip_both(model, plain, 1.0)
            for each in optimizers:
                each.step()
                each.zero_grad()
        assert_equal(model, plain)


@pytest.mark.ranks(2, 3)
def test_it_equals_one_process_with_the_whole_batch():
    """All micro-batches of a step as one batch, which no rank order or division touches."""
    rank, world = group_of().rank, group_of().size
    worst = 0.0
    for number, optimizer in enumerate(OPTIMIZERS):
        model_kind = ("gpt", "mlp")[(number + world) % 2]
        case = Case(model_kind, optimizer)
        plain = case.build().double()
        model = shard(copy.deepcopy(plain), case)
        cls, kwargs = OPTIMIZERS[optimizer]
        if optimizer != "sgd":
            # Adam divides a gradient by its own size: one that is zero but for rounding must not become a full step.
            kwargs = {**kwargs, "eps": 1e-3}
        optimizers = [cls(each.parameters(), **kwargs) for each in (model, plain)]
        for step in range(5):
            whole = torch.cat([batch(model_kind, step, each) for each in range(world)])
            for each, data in ((model, batch(model_kind, step, rank)), (plain, whole)):
                each(data.double() if data.is_floating_point() else data).square().mean().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        ours, theirs = model.state_dict(), plain.state_dict()
        worst = max(worst, *(float((ours[name] - theirs[name]).abs().max()) for name in theirs))
    assert worst <= 1e-10, f"weights off by {worst}"


@pytest.mark.fault(72)
@pytest.mark.ranks(1, 2, 4)
def test_gradients_are_clipped_by_any_norm():
    plain = Net("mlp").double()
    model = shard(copy.deepcopy(plain), Case("mlp", wrapping="deep"))
    for each in (model, plain):
        each(batch("mlp", 1).double()).square().mean().backward()
    for norm_type in (1.0, 1.5, 2.0, 3.0, float("inf")):
        expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
        norm = model.clip_grad_norm_(1e9, norm_type)
        assert torch.allclose(norm, expected, rtol=1e-10, atol=0.0)
    before = [param.grad.clone() for param in model.parameters()]
    norm = model.clip_grad_norm_(0.01)
    factor = 0.01 / (norm + 1e-6)  # As torch has it.
    assert_equal([param.grad for param in model.parameters()], [grad * factor for grad in before])


@pytest.mark.soak
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("wrapping", ["root", "blocks", "deep", "leaves"])
@pytest.mark.ranks(*WORLDS, limit_seconds=3600)
def test_every_combination_is_bitwise_that_of_the_reference(precision, wrapping):
    cases = [
        Case("gpt", optimizer, wrapping, reshard, precision, *batches, how, clip=True, flatten=flatten, steps=5)
        for optimizer, reshard, batches, how, flatten in itertools.product(
            OPTIMIZERS,
            [True, False],
            [(1, False), (2, False), (3, True)],
            ["", "inside", "around", "around reentrant", "several"],
            [False, True],
        )
    ]
    assert_cases_train_as_plain(cases)
