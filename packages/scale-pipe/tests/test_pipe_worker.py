"""Each device has one worker, in whose thread holds what holds in the caller's."""

import copy
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from scale_checkpoint import disable_checkpointing, is_checkpointing, is_recomputing
from scale_checkpoint import state as phase
from scale_pipe.one_process import pipeline
from scale_pipe.one_process.pipeline import Workers
from scale_pipe.one_process.worker import CallerContext

CPU, META = torch.device("cpu"), torch.device("meta")


def in_a_thread(task: Any) -> Any:
    """What a task returns in a thread that has the surroundings of this one."""
    surroundings = CallerContext([CPU])
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(surroundings.call, CPU, task).result()


def test_the_worker_of_a_host_device_is_the_calling_thread() -> None:
    assert Workers([CPU, CPU]).run([(CPU, threading.get_ident)] * 2) == [threading.get_ident()] * 2


def modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_device(),
        (is_checkpointing(), is_recomputing(), phase.is_disabled()),
    )


def test_modes_of_the_calling_thread_hold_in_a_worker() -> None:
    assert in_a_thread(modes) == modes()
    with torch.no_grad():
        assert in_a_thread(modes) == modes()
    with torch.inference_mode():
        assert in_a_thread(modes) == modes()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.device("meta"):
        assert in_a_thread(modes) == modes()
        assert in_a_thread(lambda: torch.empty(1).device) == META
    with disable_checkpointing(), phase.recomputing():
        assert in_a_thread(modes) == modes()
    with phase.checkpointing():
        assert in_a_thread(modes) == modes()


def test_hooks_for_saved_tensors_hold_in_a_worker() -> None:
    seen: list[Tensor] = []
    x = torch.ones(1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        in_a_thread(lambda: x.square())
    assert len(seen) == 1


def test_random_numbers_come_from_the_same_generators() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(in_a_thread(lambda: torch.rand(4)), expected)


def fail_with_a_name() -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("threads", [False, True])
def test_an_error_has_its_own_traceback_when_nothing_runs(threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if threads:
        monkeypatch.setattr(pipeline, "worker_for", lambda device: ThreadPoolExecutor(1))
    pool, done = Workers([CPU, META]), threading.Event()
    other = threading.Event()

    def slow() -> None:
        other.wait(0.05)
        done.set()

    tasks: list[Any] = [(CPU, fail_with_a_name), (META, slow)]
    with pytest.raises(ValueError, match="on purpose") as caught:
        pool.run(tasks)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "fail_with_a_name"
    assert done.is_set() == threads  # Inline, what comes after a failure is not begun.
    assert pool.run([(CPU, lambda: 1), (META, lambda: 2)]) == [1, 2]


def test_workers_can_be_copied() -> None:
    pool = Workers([CPU])
    assert pool.run([(CPU, lambda: 1)]) == copy.deepcopy(pool).run([(CPU, lambda: 1)]) == [1]


class Seen(TorchFunctionMode):
    """A mode of somebody's."""


def test_a_mode_that_would_miss_what_a_worker_does_is_refused() -> None:
    with (
        FlopCounterMode(display=False),
        pytest.raises(RuntimeError, match=r"_FlopCounterMode is active.*outside of it"),
    ):
        CallerContext([CPU])
    with Seen(), pytest.raises(RuntimeError, match=r"Seen is active around the pipeline"):
        CallerContext([CPU])
    with torch.device("meta"):  # A worker takes this one over.
        assert CallerContext([CPU]).call(CPU, lambda: torch.ones(1)).is_meta
    with FlopCounterMode(display=False):  # Without a thread of its own there is nothing to miss.
        assert Workers([CPU]).run([(CPU, lambda: 1)]) == [1]
