"""One call that is computed again: that it leaves no trace where it fails, and says where."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import apply_checkpointing, checkpoint_wrapper, is_checkpointing, is_recomputing
from scale_checkpoint_cases import differing


class Fails(nn.Module):
    """Draws numbers, changes a buffer, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.norm(self.layer(x)), 0.4)
        if self.fails_in == ("backward" if is_recomputing() else "forward"):
            raise MemoryError("no room")
        return y.tanh().exp()


def test_the_forward_has_the_name_of_the_plain_one() -> None:
    module = checkpoint_wrapper(Fails())
    forward: Any = module.forward
    assert (forward.__name__, forward.__qualname__) == ("forward", "Fails.forward")
    assert list(inspect.signature(forward).parameters) == ["x"]


@pytest.mark.parametrize("preserves", [False, True])
def test_random_numbers_are_redrawn_only_if_not_preserved(preserves: bool) -> None:
    module = checkpoint_wrapper(nn.Sequential(nn.Linear(8, 8), nn.Dropout()), preserve_random_state=preserves)
    loss = module(torch.ones(2, 8)).square().sum()
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before) is preserves


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@pytest.mark.parametrize("how", ["recompute", "offload", "selective", ["addmm", "tanh"]])
def test_a_failed_step_leaves_nothing_and_can_be_repeated(how: Any, fails_in: str) -> None:
    if (how, fails_in) == ("offload", "backward"):
        return  # It runs nothing in the backward.
    torch.manual_seed(0)
    plain = Fails()
    ours = apply_checkpointing(copy.deepcopy(plain), how, offload_inputs=True, min_bytes=0)
    x = torch.randn(4, 8)
    ours.fails_in = fails_in
    generator, statistics = torch.get_rng_state(), ours.norm.running_mean.clone()
    with pytest.raises(MemoryError, match="no room") as raised:
        loss = ours(x).sum()
        generator, statistics = torch.get_rng_state(), ours.norm.running_mean.clone()
        loss.backward()
    if fails_in == "backward":
        assert torch.equal(torch.get_rng_state(), generator) and torch.equal(ours.norm.running_mean, statistics)
        assert raised.value.__notes__ == ["This happened while the forward of a Fails was computed again."]
    assert not is_checkpointing() and not is_recomputing() and torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    ours.fails_in = ""
    ours.load_state_dict(plain.state_dict())
    found = []
    for module in (plain, ours):
        torch.manual_seed(1)
        loss = module(x).sum()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in module.parameters()), *module.buffers(), torch.rand(2)])
    assert differing(found[1], found[0]) == []


def test_a_failed_backward_can_run_again_over_its_graph() -> None:
    module = checkpoint_wrapper(Fails(), keep=["addmm", "tanh"])
    torch.manual_seed(1)
    loss = module(torch.ones(4, 8)).sum()
    module.fails_in = "backward"
    with pytest.raises(MemoryError):
        loss.backward(retain_graph=True)
    assert not module.forward._stats.unused, "what a failing recomputation has not come to is not unused"
    module.fails_in = ""
    loss.backward()
    apply_checkpointing(module, "keep")
    again = copy.deepcopy(module)
    again.zero_grad()
    torch.manual_seed(1)
    again(torch.ones(4, 8)).sum().backward()
    assert differing([p.grad for p in module.parameters()], [p.grad for p in again.parameters()]) == []


def test_a_changed_parameter_leaves_the_random_state_alone() -> None:
    module = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    loss = module(torch.randn(2, 4)).sum()
    with torch.no_grad():
        module[0].weight.mul_(2)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="changed in place") as raised:
        loss.backward()
    # As long as the error lives, too, and with it the frames that it came from.
    assert torch.equal(torch.get_rng_state(), state) and raised.tb is not None


class Cache:
    """A class that nobody can take apart, as a model's cache of keys and values may be."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.seen.append(self.layer(x))
        return x * torch.cat(cache.seen).softmax(0)[: len(x)].exp()


def test_an_error_says_what_was_not_given_as_it_was() -> None:
    module = checkpoint_wrapper(Attends())
    loss = module(torch.randn(2, 4), Cache()).sum()
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    (note,) = raised.value.__notes__
    assert note.startswith("This happened while the forward of a Attends was computed again. It was given a Cache,")
    assert "model.config.use_cache = False" in note
