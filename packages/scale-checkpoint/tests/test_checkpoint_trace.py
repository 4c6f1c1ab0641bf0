"""Live bytes, and whose they are: by figures that are worked out by hand."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_checkpoint.live_memory import LiveMemory, not_counted, storage_bytes
from scale_checkpoint.planner.trace import OUTSIDE_BLOCKS, StepTrace, trace_step

CPU = torch.device("cpu")
KIB = 1024


def kib(num: int) -> Tensor:
    return torch.ones(num * KIB // 4)


def test_storages_count_once_from_their_birth_to_their_end() -> None:
    before = kib(4)
    with LiveMemory(CPU) as live:
        first = kib(8)
        views = [first[1:], first.view(2, -1), before[2:]]  # No new memory, and none that stood before.
        assert live.current_bytes == 8 * KIB
        second = first + 1
        assert live.current_bytes == 16 * KIB
        second.untyped_storage().resize_(4 * KIB)
        second.set_(second.untyped_storage(), 0, (KIB,))
        assert live.current_bytes == 12 * KIB
        del first
        assert live.current_bytes == 12 * KIB
        del views, second
    assert (live.current_bytes, live.peak_bytes) == (0, 16 * KIB)


def test_what_is_made_elsewhere_is_not_counted() -> None:
    with LiveMemory(CPU) as live:
        with not_counted():
            host = kib(8)
        here = host.clone()
    assert live.peak_bytes == storage_bytes([here]) == 8 * KIB
    assert storage_bytes([here, here[1:], host]) == 16 * KIB


class Wide(nn.Module):
    """Keeps 32 KiB from 8 KiB, and returns 8 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x[None] * self.weight[:, None]).sin().sum(0)


def follow(recomputed: bool) -> StepTrace:
    blocks = nn.ModuleList([Wide(), Wide()])
    if recomputed:
        for block in blocks:
            plain = block.forward
            object.__setattr__(block, "forward", lambda x, f=plain: checkpoint(f, x, use_reentrant=False))
    trace = StepTrace(CPU)
    x = kib(8)
    with trace_step(trace, {"first": blocks[0], "second": blocks[1]}):
        blocks[1](blocks[0](x)).sum().backward()
    return trace


def test_a_step_is_a_row_of_visits_with_what_lies_between() -> None:
    trace = follow(recomputed=False)
    assert [visit.name for visit in trace.visits] == [OUTSIDE_BLOCKS, "first", OUTSIDE_BLOCKS, "second", OUTSIDE_BLOCKS]
    first, second = trace.visits[1], trace.visits[3]
    assert second.forward.start_bytes - first.forward.start_bytes == 40 * KIB  # sin keeps 32, and 8 are returned.
    assert first.forward.peak_bytes == 72 * KIB  # 32 to sin, 32 from it, 8 returned.
    assert first.input_requires_grad == [False] and second.input_requires_grad == [True]
    assert first.outputs == second.inputs and second.output_requires_grad


def test_the_backward_visits_recomputed_modules_in_reverse() -> None:
    for recomputed in (False, True):
        trace = follow(recomputed)
        backward = [trace.visits[index].name for index, is_backward in trace.order if is_backward]
        assert [name for name in backward if name] == ["second", "first"]
        assert [name for index, name in enumerate(v.name for v in trace.visits)] == [
            OUTSIDE_BLOCKS,
            "first",
            OUTSIDE_BLOCKS,
            "second",
            OUTSIDE_BLOCKS,
        ]
        second = trace.visits[3].backward
        assert second is not None
        recomputation = 64 * KIB if recomputed else 0
        assert second.peak_bytes - second.start_bytes >= recomputation
