"""What one of 8 ranks holds and sends in a step of a large GPT: the real code on fake tensors."""

from __future__ import annotations

import pytest
import torch
from gpt_at_scale import GIB, LAYERS, TOKENS, VOCABULARY, WIDTH, Books, adamw, sharded_gpt, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_check.simulate import simulate
from scale_fsdp import fully_shard

pytestmark = pytest.mark.simulation

WORLD = 8


@pytest.fixture(scope="module", params=[4, pytest.param(LAYERS, marks=pytest.mark.soak)])
def num_layers(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def steps(num_layers: int) -> dict[int, Books]:
    """By batch, the books of rank 0; only from the second step on does Adam's state stand there from the beginning."""
    with simulate(rank=0, world_size=WORLD) as simulation:
        model = sharded_gpt(num_layers)
        optimizer = adamw(model)
        train(model, optimizer, simulation, batch=1, chunks=8)
        return {batch: train(model, optimizer, simulation, batch, chunks) for batch, chunks in ((1, 8), (8, 16))}


PEAK_GIB = {4: {1: 5.12, 8: 7.74}, LAYERS: {1: 26.2, 8: 29.3}}  # by layers and batch


@pytest.mark.parametrize("batch", [1, 8])
def test_a_large_gpt_trains_on_8_ranks_within_its_peak(num_layers: int, steps: dict[int, Books], batch: int) -> None:
    assert steps[batch].peak_bytes <= PEAK_GIB[num_layers][batch] * GIB, steps[batch].told


@pytest.mark.parametrize("batch", [1, 8])
def test_parameters_are_sent_twice_and_gradients_once(num_layers: int, steps: dict[int, Books], batch: int) -> None:
    rows = {"embed": 7, "block": 19, "head": 5}  # of padding, so that no row is cut between two ranks: 0.04 %
    embed = (VOCABULARY + TOKENS + rows["embed"]) * WIDTH
    block = 12 * WIDTH**2 + (13 + rows["block"]) * WIDTH
    head = (VOCABULARY + 2 + rows["head"]) * WIDTH
    bytes_per_number = 2
    sent = (embed + num_layers * block + head) * bytes_per_number // WORLD * (WORLD - 1)
    assert steps[batch].bytes_sent == {"all_gather": 2 * sent, "reduce_scatter": sent}


@pytest.mark.parametrize("batch", [1, 8])
def test_blocks_are_gathered_after_the_next_is_reduced(num_layers: int, steps: dict[int, Books], batch: int) -> None:
    ops = [collective.op for collective in steps[batch].collectives if collective.phase == "backward"]
    gather, reduce = "all_gather", "reduce_scatter"
    # The head checkpoints inside, so the last block is fetched at once; each other one after a recomputation.
    assert ops == [gather, gather, *[reduce, gather] * num_layers, reduce, reduce]


def test_the_last_unit_of_a_recomputation_stays_gathered() -> None:
    """Its backward comes at once. Other units of the block are released, and gathered a third time."""

    class Halves(nn.Module):
        """A checkpointed block of two units."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention, self.feed = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.feed(self.attention(self.norm(x)).relu()), x, use_reentrant=False)

    with simulate(rank=0, world_size=WORLD) as simulation:
        model = nn.Sequential(*(Halves() for _ in range(3)))
        for block in model:
            for unit in (block.attention, block.feed, block):
                fully_shard(unit)
        fully_shard(model)
        gathered = []
        for _ in range(3):
            simulation.restart()
            model(torch.zeros(2, 64)).sum().backward()
            gathered.append(simulation.bytes_sent["all_gather"])
    half, norm = (64 * 64 + 64) * 4, 2 * 64 * 4
    assert gathered == [3 * ((3 + 2) * half + 2 * norm) * (WORLD - 1) // WORLD] * 3
