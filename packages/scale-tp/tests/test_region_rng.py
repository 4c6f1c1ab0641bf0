"""random.py: what ranks compute alike is dropped alike, whatever they draw where they are divided."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from parallelize_cases import gpt2, loss_of, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group, group_of
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import GPT2_PLAN
from scale_tp.layers.base import ParallelModule
from scale_tp.random import RegionRNG, has_dropout


def _randomness(rank: int, size: int = 2) -> RegionRNG:
    return RegionRNG(Group(rank, size, None, "fake", tuple(range(size))))


def test_inside_ranks_draw_differently_and_outside_alike() -> None:
    inside, outside = [], []
    for rank in range(3):
        torch.manual_seed(4)
        divided = _randomness(rank, 3)
        for _ in range(2):
            divided.enter()
            inside.append(tuple(torch.rand(2 + rank)[:2].tolist()))
            divided.exit()
            outside.append(torch.rand(()).item())
    assert len(set(inside)) == 6
    assert outside[:2] == outside[2:4] == outside[4:] and outside[0] != outside[1]


def test_the_same_random_state_draws_the_same_again() -> None:
    divided, found = _randomness(1), []
    for _ in range(2):
        torch.manual_seed(9)
        divided.enter()
        found.append(torch.rand(3).tolist())
        divided.exit()
    assert found[0] == found[1]


def test_without_dropout_the_random_state_is_not_touched() -> None:
    module, divided = nn.Module(), _randomness(0)
    module.attention_dropout, module.drop = 0.0, nn.Dropout(0.0)
    assert not has_dropout(module)
    before = torch.get_rng_state()
    divided.pre_forward(module, ())
    divided.enter_if_needed()
    assert torch.equal(torch.get_rng_state(), before)
    module.attention_dropout = 0.1
    assert has_dropout(module) and not has_dropout(module.eval())
    module.train().attention_dropout = 0.0
    module.drop.p = 0.5
    divided.pre_forward(module, ())
    divided.enter_if_needed()
    assert not torch.equal(torch.get_rng_state(), before)
    within = torch.get_rng_state()
    divided.enter_if_needed()  # It is entered already.
    assert torch.equal(torch.get_rng_state(), within)


def test_an_error_inside_leaves_the_numbers_of_all_ranks() -> None:
    divided, states = _randomness(0), []
    for fails in (False, True):
        torch.manual_seed(1)
        divided.enter()
        if not fails:
            divided.exit()
        divided.post_forward(nn.Identity(), (), None)
        states.append(torch.rand(()).item())
    assert states[0] == states[1]


def test_dropout_at_any_depth_is_seen_unless_it_is_switched_off() -> None:
    module = nn.Module()
    module.act = nn.Sequential(nn.GELU(), nn.Sequential(nn.Dropout(0.5)))
    assert has_dropout(module)
    module.act[1].eval()
    assert not has_dropout(module)
    module.act[0].attention_dropout = 0.1
    assert has_dropout(module)


def test_copies_have_not_entered() -> None:
    divided = _randomness(0)
    divided.enter()
    for other in (copy.deepcopy(divided), pickle.loads(pickle.dumps(RegionRNG(Group())))):
        before = torch.get_rng_state()
        other.exit()
        assert torch.equal(torch.get_rng_state(), before)
    divided.exit()


class _Recomputed:
    def __init__(self, forward: object) -> None:
        self.forward = forward

    def __call__(self, *args: object, **kwargs: object) -> object:
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


@pytest.mark.ranks(2)
def test_replicated_parameters_stay_equal_under_dropout() -> None:
    """Three heads on two ranks draw different numbers of elements; what is not divided has to stay equal."""
    for sequence_parallel, recompute in ((False, False), (False, True), (True, True)):
        torch.manual_seed(7)
        model = gpt2(n_embd=18, n_head=3, attn_pdrop=0.3, resid_pdrop=0.2, embd_pdrop=0.1)
        parallelize(model, GPT2_PLAN, group_of(), sequence_parallel=sequence_parallel)
        if recompute:
            for block in model.transformer.h:
                block.forward = _Recomputed(block.forward)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        numbers = []
        for step in range(2):
            data = tokens(step)
            optimizer.zero_grad()
            loss = loss_of(model(input_ids=data).logits, data)
            loss.backward()
            optimizer.step()
            numbers.append(int(loss.double().view(torch.int64)))
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                if not (isinstance(module, ParallelModule) and module.shardings[name].split is not None):
                    numbers.append(param.detach().view(torch.int32).sum().item())
        rows = exchange(numbers, group_of())
        assert rows[0] == rows[1], (sequence_parallel, recompute)


def test_a_module_without_dropout_is_told_by_its_attributes() -> None:
    module = nn.Module()
    module.drop_path, module.dropped = 0.2, "no number"
    assert has_dropout(module)
    with pytest.raises(AttributeError):
        module.dropout  # noqa: B018
