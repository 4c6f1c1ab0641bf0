"""One block by itself: what it keeps and needs in each strategy, against what can be counted by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scale_checkpoint.planner.block_benchmark import BlockCall, measure_memory, measure_seconds
from scale_checkpoint.planner.blocks import applied
from scale_checkpoint.planner.step import measure_step

CPU = torch.device("cpu")
ROWS, WIDTH = 1024, 16  # 64 KiB: just enough to be offloaded
X = ROWS * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def test_kept_bytes_between_the_passes_are_those_counted() -> None:
    block, call = Block(), BlockCall((torch.randn(ROWS, WIDTH),), {}, [True])
    found = {}
    for how in ("keep", "recompute", "offload", ("mm",)):
        with applied(block, how):
            trial = measure_memory(block, call, CPU)
        found[str(how)] = trial.kept_bytes, trial.held_inputs, trial.held_outputs
    assert found == {
        "keep": (4 * X, (True,), (False,)),  # tanh saves its result, and so does the second product: one tensor.
        "recompute": (0, (True,), (False,)),
        "offload": (0, (False,), (False,)),
        "('mm',)": (4 * X, (True,), (True,)),  # The first product's result; that of the second is the output.
    }
    assert block.up.weight.grad is None


def test_its_time_is_taken_and_leaves_no_gradient() -> None:
    block = Block()
    assert measure_seconds(block, BlockCall((torch.randn(ROWS, WIDTH),), {}, [False]), CPU) > 0
    assert block.up.weight.grad is None


def test_a_peak_has_parameters_batch_and_gradients() -> None:
    model, batch = nn.Linear(256, 256, bias=False), torch.randn(1, 256)
    weight = 256 * 256 * 4
    found = measure_step(model, batch, repeats=1)
    assert 2 * weight + batch.nbytes <= found.peak_bytes <= 2 * weight + 5 * batch.nbytes and found.seconds > 0
    assert measure_step(model, batch, repeats=0).seconds == 0.0 and model.weight.grad is None
