"""An optimizer with state in 8 bits, block by block, over shards: a stand-in for those of bitsandbytes, by their keys.

The libraries themselves have tests of their own, which run where they are installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import client_low_bit as low_bit
import pytest
import torch
from torch import Tensor, nn

import scale_snapshot
from scale_core.shard import as_local
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard


class Momentum8bit(torch.optim.Optimizer):
    """SGD whose momentum is kept in 8 bits: a code for each element, a scale for each block of 256, a code book."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with as_local():  # As kernels of bitsandbytes, which compute with the elements in memory.
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param -= group["lr"] * self._momentum(param)

    def _momentum(self, param: nn.Parameter) -> Tensor:
        """The new one, in the precision in which it is kept."""
        state, numel = self.state[param], param.numel()
        blocks = -(-numel // low_bit.BLOCK)
        if not state:
            state["qmap1"] = torch.linspace(-1, 1, 256)
            state["state1"] = torch.full_like(param, 128, dtype=torch.uint8)
            state["absmax1"] = torch.zeros(blocks)
        book, scales = state["qmap1"], state["absmax1"].repeat_interleave(low_bit.BLOCK)[:numel].view_as(param)
        exact = 0.9 * book[state["state1"].int()] * scales + param.grad
        padded = nn.functional.pad(exact.flatten(), (0, blocks * low_bit.BLOCK - numel)).view(blocks, low_bit.BLOCK)
        if numel:
            state["absmax1"].copy_(padded.abs().amax(1))
        scales = state["absmax1"].clamp(min=1e-12).repeat_interleave(low_bit.BLOCK)[:numel].view_as(param)
        state["state1"].copy_(((exact / scales + 1) * 127.5).round())
        return book[state["state1"].int()] * scales


@pytest.mark.parametrize("check", [low_bit.trains_on_blocks, low_bit.trains_under_oss])
def test_state_in_blocks_is_cut_between_them(check: Callable[[type[torch.optim.Optimizer]], None]) -> None:
    run_ranks(check, 2, Momentum8bit)


def save_and_read_in_rows(folder: str) -> None:
    """Cut between rows of 160 elements, the state can't be read."""
    low_bit.is_saved_and_goes_on(Momentum8bit, folder)
    model = fully_shard(low_bit.network())
    with pytest.raises(scale_snapshot.SnapshotError, match=r"atom=BlockAtom\(256\)"):
        scale_snapshot.load(folder, {"model": model, "optimizer": Momentum8bit(model.parameters())})


def test_state_in_blocks_is_read_at_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save_and_read_in_rows, 2, str(tmp_path))
    goes_on = functools.partial(low_bit.goes_on_from, Momentum8bit)
    (expected,) = run_ranks(goes_on, 1, str(tmp_path))
    for found in run_ranks(goes_on, 4, str(tmp_path)):
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
