"""Modules chosen by name, checkpointed and sharded: the same units whatever the order, under the names they had."""

import copy
import inspect
import itertools
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import scale_train
from scale_core.testing import run_ranks
from scale_fsdp import FSDPConfig, MixedPrecisionPolicy, describe, fully_shard
from scale_fsdp.runtime.unit import unit_of, units_in
from scale_train import with_wrapped_modules

BLOCKS = r"layers\.\d+"


class Block(nn.Module):
    """Two linears and dropout, whose random numbers a recomputation must repeat; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 7), nn.Linear(7, 4), nn.Dropout(0.5)
        self.runs = 0

    def forward(self, x: Tensor, *, scale: float = 1.0, function: object = None) -> Tensor:
        self.runs += 1
        return x + scale * self.down(self.drop(torch.relu(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, scale=0.5 + number)
        return self.head(x)


def inputs() -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


def units_of(patterns: list[str]) -> list[str]:
    model = with_wrapped_modules(Model(), dict.fromkeys(patterns), FSDPConfig())
    return [unit.name for unit in units_in(fully_shard(model))]


@pytest.mark.parametrize("patterns", list(itertools.permutations([r"layers\.0", r"layers\.0\.(up|down)", "head"])))
def test_children_come_before_parents_in_any_order_of_the_patterns(patterns):
    assert units_of(list(patterns)) == ["", "layers.0", "layers.0.up", "layers.0.down", "head"]


def test_patterns_are_for_whole_names_and_the_model_itself_has_none():
    assert units_of(["layers"] * 0 + [r"layers\.1"]) == ["", "layers.1"]
    model = with_wrapped_modules(Model(), {".*"}, FSDPConfig())
    assert unit_of(model) is None and unit_of(model.layers) is None
    assert all(unit_of(part) for part in (model.embed, model.layers[2], model.layers[2].drop, model.head))


def test_a_module_that_stands_at_two_places_is_wrapped_once_before_what_holds_it():
    shared = nn.Linear(2, 2)
    first, second = nn.Sequential(shared), nn.Sequential(shared)
    with_wrapped_modules(nn.Sequential(first, second), {"0", r"1\.0", "1"}, FSDPConfig())
    assert [unit_of(part) is not None for part in (shared, first, second)] == [True] * 3
    assert not unit_of(first).buffers and not unit_of(first).shared_owners


def test_it_shards_as_the_configuration_says():
    config = FSDPConfig(reshard_after_forward=False, mixed_precision=MixedPrecisionPolicy(torch.bfloat16))
    model = config.shard(with_wrapped_modules(Model(), {BLOCKS}, config))
    units = describe(model).units
    assert [unit.name for unit in units] == ["", "layers.0", "layers.1", "layers.2"]
    assert all(unit.buffers[0].compute_dtype is torch.bfloat16 and not unit.reshard_after_forward for unit in units)


def test_without_a_configuration_it_only_checkpoints():
    model = with_wrapped_modules(Model(), {BLOCKS}, activation_checkpointing=True)
    assert not units_in(model)
    model(inputs()).sum().backward()
    assert [layer.runs for layer in model.layers] == [2, 2, 2]


def test_checkpointing_keeps_names_classes_results_and_evaluation():
    plain, model = Model(), with_wrapped_modules(Model(), {BLOCKS}, activation_checkpointing=True)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert isinstance(model.layers[0], Block) and repr(model) == repr(plain)
    for each in (plain, model):
        torch.manual_seed(0)
        each(inputs()).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    with torch.no_grad():
        model(inputs())
    assert model.layers[0].runs == 3, "nothing is recomputed without gradients"


def test_a_checkpointed_model_is_copied_and_pickled_with_its_checkpoints():
    model = with_wrapped_modules(Model(), {BLOCKS}, activation_checkpointing=True).eval()
    sharded = fully_shard(with_wrapped_modules(Model(), {BLOCKS}, FSDPConfig(), True)).eval()
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in (*others, copy.deepcopy(sharded), pickle.loads(pickle.dumps(sharded))):
        with torch.no_grad():
            other.embed.weight.zero_()
        other(inputs()).sum().backward()
        assert other.layers[0].runs == 2 and model.layers[0].runs == 0
        assert isinstance(other.layers[0], Block) and other.layers[0].up.weight.grad is not None
        assert not torch.equal(other(inputs()), model(inputs()))
        model.layers[0].runs = 0


def test_a_checkpointed_forward_has_the_signature_of_the_plain_one():
    model = with_wrapped_modules(Model(), {BLOCKS}, activation_checkpointing=True)
    assert inspect.signature(model.layers[0].forward) == inspect.signature(Model().layers[0].forward)


def train(activation_checkpointing: bool) -> tuple[list[Tensor], int]:
    """The weights after three steps, and how often a block ran in one of them; dropout takes part."""
    config = FSDPConfig()
    model = with_wrapped_modules(Model(), {BLOCKS}, config, activation_checkpointing)
    model = config.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(3):
        model(inputs()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.state_dict().values()), model.layers[0].runs


def test_checkpoints_inside_of_units_change_nothing_but_the_memory():
    for world in (2, 3):
        for (theirs, plain_runs), (ours, runs) in run_ranks(train_both, world):
            assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
            assert (runs, plain_runs) == (6, 3)


def train_both() -> list[tuple[list[Tensor], int]]:
    return [train(False), train(True)]


def test_a_recomputation_inside_of_a_unit_gathers_nothing():
    counts = run_ranks(count_gathers, 2)
    assert counts == [counts[0]] * 2
    assert counts[0][False] == counts[0][True] > 0


def count_gathers() -> dict[bool, int]:
    counts = {}
    for checkpointing in (False, True):
        model = fully_shard(with_wrapped_modules(Model(), {BLOCKS}, FSDPConfig(), checkpointing))
        model(inputs()).sum().backward()
        order = describe(model).gather_order
        counts[checkpointing] = sum(len(names) for names in order.values())
    return counts


WRONG = {
    "nothing": ({r"layer\.\d+"}, {}, "matches the name of no module; near names in the model: 'layers.0'"),
    "far": ({"zzzz"}, {}, "'zzzz' matches the name of no module; the model has: 'embed', 'layers'"),
    "list": ({"layers"}, {}, r"matches only 'layers', a ModuleList, which is never called: match what it holds, "),
    "expression": ({"layers["}, {}, "'layers\\[' is no regular expression"),
    "twice": ({BLOCKS}, {"first": FSDPConfig()}, "a Block that matches is sharded already"),
}


@pytest.mark.parametrize("how", WRONG)
def test_patterns_that_mean_nothing_are_refused_and_nothing_is_changed(how):
    patterns, more, expected = WRONG[how]
    model = Model()
    if "first" in more:
        with_wrapped_modules(model, {r"layers\.2"}, more["first"])
    with pytest.raises(ValueError, match=expected):
        with_wrapped_modules(model, {"embed", *patterns}, FSDPConfig())
    assert unit_of(model.embed) is None


def test_what_is_asked_for_twice_or_not_at_all_is_refused():
    with pytest.raises(
        TypeError, match=r"modules_to_wrap to be a collection of str, got 'embed' \(str\); write \['embed'\]"
    ):
        with_wrapped_modules(Model(), "embed", FSDPConfig())
    with pytest.raises(ValueError, match="neither fsdp_config nor activation_checkpointing is given"):
        with_wrapped_modules(Model(), {"embed"})
    model = with_wrapped_modules(Model(), {"embed"}, activation_checkpointing=True)
    with pytest.raises(ValueError, match="a Linear that matches is checkpointed already"):
        with_wrapped_modules(model, {"embed"}, activation_checkpointing=True)


def test_importing_the_package_stays_light():
    run = "import sys, scale_train; assert 'torch' not in sys.modules; scale_train.with_wrapped_modules; import torch"
    subprocess.run([sys.executable, "-c", run], check=True, timeout=600)
    assert "with_wrapped_modules" in dir(scale_train)
    with pytest.raises(AttributeError, match="module 'scale_train' has no attribute 'with_wrapped'"):
        _ = scale_train.with_wrapped
