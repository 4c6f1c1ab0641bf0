"""What a recomputation is given again: nested inputs, random numbers, buffers; and which phase it says it is in."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_checkpoint import disable_checkpointing, is_checkpointing, is_recomputing, patch_batchnorm
from scale_checkpoint import state as phase
from scale_checkpoint.recompute import rng as randomness
from scale_checkpoint.tree import put_tensors, take_tensors


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Box:
    tensor: Tensor
    rest: Any


def test_tensors_are_taken_out_of_anything_and_put_back() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    tree = ((a, [b, {"k": a}]), {"p": Pair(a, None), "o": OrderedDict(x=b), "box": Box(b, [1, a, "t"]), "s": {1, 2}})
    tensors, rest = take_tensors(tree)
    assert [id(tensor) for tensor in tensors] == [id(a), id(b)]
    back = put_tensors(rest, [a, b])
    assert back[0] == (a, [b, {"k": a}]) or back[0][1][1]["k"] is a
    assert type(back[1]["p"]) is Pair and back[1]["p"].a is a and type(back[1]["o"]) is OrderedDict
    assert back[1]["box"].tensor is b and back[1]["box"].rest[1] is a and back[1]["s"] == {1, 2}
    other = put_tensors(rest, [b, a])
    assert other[0][0] is b and tree[1]["box"].tensor is b, "what was taken apart is not touched"
    assert take_tensors((Box, 3, None)) == ([], (Box, 3, None))


def test_only_generators_that_were_drawn_from_are_replayed() -> None:
    before = randomness.states()
    assert randomness.drawn_since(before) == []
    first = torch.rand(3)
    drawn = randomness.drawn_since(before)
    assert [one.generator for one in drawn] == [torch.default_generator]
    following = torch.default_generator.get_state()
    with randomness.replaying(drawn):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.default_generator.get_state(), following)
    with pytest.raises(KeyError), randomness.replaying(drawn):
        raise KeyError
    assert torch.equal(torch.default_generator.get_state(), following)


def test_an_accelerator_that_is_initialised_on_the_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = randomness.states()
    generators = [torch.default_generator, torch.Generator()]
    monkeypatch.setattr(randomness, "_generators", lambda: generators)
    with pytest.raises(RuntimeError, match=r"call torch.cuda.init\(\)"):
        randomness.drawn_since(before)
    # And those of several devices are told apart.
    before = randomness.states()
    torch.rand(1, generator=generators[1])
    assert [one.generator for one in randomness.drawn_since(before)] == [generators[1]]


def test_phases_nest_and_belong_to_their_thread() -> None:
    assert not is_checkpointing() and not is_recomputing()
    with phase.checkpointing():
        assert is_checkpointing() and not is_recomputing()
        with phase.recomputing():
            assert is_recomputing() and not is_checkpointing()
            with phase.checkpointing():
                assert is_recomputing() and is_checkpointing()
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(is_checkpointing()))
        thread.start()
        thread.join()
        assert seen == [False] and is_checkpointing()
    with pytest.raises(KeyError), disable_checkpointing():
        assert phase.is_disabled()
        raise KeyError
    assert not phase.is_disabled() and not is_checkpointing()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_patched_batch_norms_keep_their_statistics_under_torchs_own_checkpointing(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    plain, ours = nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4), nn.Tanh())
    handles = patch_batchnorm(ours)
    x = torch.randn(6, 4, requires_grad=True)
    for _ in range(2):
        plain(x)
        checkpoint(ours, x, use_reentrant=use_reentrant).sum().backward()
    assert all(map(torch.equal, ours[0].buffers(), plain.buffers()))
    for handle in handles:
        handle.remove()
    checkpoint(ours, x, use_reentrant=use_reentrant).sum().backward()
    assert int(ours[0].num_batches_tracked) == 4, "without it they are counted twice"
    with torch.no_grad():
        patch_batchnorm(ours)
        ours(x)
    assert int(ours[0].num_batches_tracked) == 5
