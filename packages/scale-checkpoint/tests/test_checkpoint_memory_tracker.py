"""The tracker: memory by module."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_models import Transformer, build
from torch import nn

from scale_checkpoint import LayerMemoryTracker, suggest_checkpoint_location
from scale_checkpoint.memory_tracker import find_best_reset_points

KIB = 1024


def tracked() -> LayerMemoryTracker:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    with LayerMemoryTracker(model) as tracker:
        model(torch.randn(32, 64)).sum().backward()
    return tracker


def test_forwards_leave_activations_and_backwards_gradients() -> None:
    tracker = tracked()
    left = {trace.module_name: trace.memory_diff for trace in tracker.forward_traces if trace.module_name}
    assert left == {"0": 32 * KIB, "1": 32 * KIB, "2": 8 * KIB}
    gradients = {trace.module_name: trace.memory_diff for trace in tracker.backward_traces if trace.module_name}
    # The last layer's gradients come, and that of its input takes the place of the output's; GELU lets go of its input.
    assert gradients["2"] == (256 * 64 + 64) * 4 + 32 * 256 * 4 - 32 * KIB
    assert gradients["1"] == -32 * KIB
    assert [trace.module_name for trace in tracker.top_forward_activation_producers(2)] == ["0", "1"]


def test_steps_follow_one_another() -> None:
    model, batch = build("transformer")
    tracker = LayerMemoryTracker()
    tracker.monitor(model)
    with pytest.raises(RuntimeError, match=r"call tracker\.stop\(\) first"):
        tracker.monitor(model)
    for _ in range(2):
        model(batch).backward()
    so_far = tracker.memory_traces  # Of a tracker that is not stopped yet.
    tracker.stop()
    assert so_far == tracker.memory_traces
    tracker.stop()
    names = [trace.module_name for trace in tracker.memory_traces if trace.module_name]
    assert names[: len(names) // 2] == names[len(names) // 2 :]
    tracker.monitor(model)  # Again: what was found before stays.
    model(batch)
    tracker.stop()
    assert tracker.memory_traces[: len(so_far)] == so_far and len(tracker.memory_traces) > len(so_far)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_traces_of_a_first_step_are_cleared_during_and_after() -> None:
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)
    with LayerMemoryTracker(model) as tracker:
        model(batch).sum().backward()
        first = [(trace.module_name, trace.is_forward) for trace in tracker.memory_traces if trace.module_name in "01"]
        tracker.clear_traces()
        assert tracker.memory_traces == [] and tracker.max_memory == 0
        model(batch).sum().backward()
        second = tracker.memory_traces
        found = [(trace.module_name, trace.is_forward) for trace in second if trace.module_name in "01"]
        assert found == first and len(found) >= 4
        stood = 64 * 64 * 4 + 64 * 4  # The gradients of the step that is forgotten.
        assert next(trace for trace in second if trace.module_name == "0").start_bytes == stood
    assert tracker.memory_traces[: len(second)] == second
    tracker.clear_traces()
    assert tracker.memory_traces == []


def test_a_lone_forward_is_followed_in_inference_mode_too() -> None:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 3:
                raise KeyError("three")
            return x.exp()

    model = nn.Sequential(nn.Linear(64, 64), Picky(), nn.Linear(64, 64)).eval()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), LayerMemoryTracker(model) as tracker:
            with pytest.raises(KeyError):
                model(torch.randn(3, 64))
            model(torch.randn(2, 64))
        names = [trace.module_name for trace in tracker.memory_traces if trace.module_name in "012" and trace.kind]
        assert names == ["0", "0", "1", "2"] and all(trace.is_forward for trace in tracker.memory_traces)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_hook_that_fails_before_a_module_affects_no_other() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def fail(*_: object) -> None:
        raise KeyError("hook")

    with LayerMemoryTracker(model) as tracker:
        for module in (model[1], model[0], model):
            handle = module.register_forward_pre_hook(fail, prepend=True)
            with pytest.raises(KeyError):
                model(torch.randn(2, 64))
            handle.remove()
        model(torch.randn(2, 64))
    assert [trace.module_name for trace in tracker.forward_traces if trace.kind == "Tanh"] == ["1"]


def test_it_is_printed_saved_and_drawn(tmp_path: Path) -> None:
    tracker = tracked()
    assert "GELU" in str(tracker) and "most is kept by 0 (32.00 KiB)" in str(tracker)
    tracker.save_traces(tmp_path / "traces.json")
    assert LayerMemoryTracker.load(tmp_path / "traces.json").memory_traces == tracker.memory_traces
    pytest.importorskip("matplotlib")
    tracker.plot(tmp_path / "traces.svg")
    assert "<svg" in (tmp_path / "traces.svg").read_text()


def test_the_suggested_splits_lie_between_equal_blocks() -> None:
    model = Transformer(num_blocks=4)
    with LayerMemoryTracker(model) as tracker:
        model(torch.randint(0, 128, (2, 32))).backward()
    suggested = suggest_checkpoint_location(tracker.memory_traces, num_checkpoints=3)
    assert len(suggested.split_modules) == 3
    assert {name.split(".")[1] for name in suggested.split_modules if name.startswith("blocks")} == {"1", "2", "3"}
    with pytest.raises(ValueError, match="run a forward inside"):
        suggest_checkpoint_location([], 1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.data())
def test_no_cut_has_a_smaller_largest_part(sizes: list[int], data: st.DataObject) -> None:
    num_cuts = data.draw(st.integers(0, len(sizes) - 1))

    def largest(cuts: tuple[int, ...] | list[int]) -> int:
        ends = [0, *cuts, len(sizes)]
        return max(sum(sizes[start:end]) for start, end in itertools.pairwise(ends))

    found, cuts = find_best_reset_points(sizes, num_cuts)
    assert len(cuts) == num_cuts
    assert largest(cuts) == found
    assert found == min(largest(each) for each in itertools.combinations(range(1, len(sizes)), num_cuts))
