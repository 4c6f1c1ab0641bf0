"""A rank that is killed in the middle of a step: the others say so at once, by name, and have not stepped.

At once: the limit of their waits is longer than the test may last, and their error is that of a closed connection.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_parity import noise
from torch import nn

import scale_core.testing.ranks
from scale_core.errors import ScaleDistributedError, set_last_snapshot
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import RankError, run_ranks
from scale_fsdp import fully_shard

MOMENTS = ("forward", "backward", "between backward and step")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def one_of_each_pair_is_killed(folder: str) -> None:
    """Pairs train apart; in each, one rank dies at another moment of the fourth step. The others leave a file."""
    rank = dist.get_rank()
    limit = timedelta(hours=1)
    pairs = [dist.new_group([2 * number, 2 * number + 1], limit) for number in range(len(MOMENTS))]
    group, moment, dies = pairs[rank // 2], MOMENTS[rank // 2], rank % 2 == 1
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer, group)
    fully_shard(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    set_last_snapshot("snapshots/step-00000002")
    for step in range(5):
        if step == 3:
            dist.barrier()  # So that all die together.
            before = [param.detach().clone() for param in model.parameters()]
            if dies and moment == "forward":
                model[1].register_forward_pre_hook(die, prepend=True)  # Before its gather, for which the other waits.
            elif dies and moment == "backward":
                model[2].register_full_backward_hook(die)
        try:
            model(noise(2, 4, seed=rank)).square().mean().backward()
        except ScaleDistributedError as error:
            unchanged = all(
                torch.equal(local_tensor(old), local_tensor(new))
                for old, new in zip(before, model.parameters(), strict=True)
            )
            told = str(error), unchanged, all(p.grad is None for p in model.parameters())
            part = Path(folder) / f"{rank}.part"
            part.write_bytes(pickle.dumps(told))
            part.rename(Path(folder) / moment)
            while not all((Path(folder) / name).exists() for name in MOMENTS):  # None ends while another may wait.
                time.sleep(0.02)
            raise
        if dies and step == 3:
            die()
        if moment != MOMENTS[2] or step < 3:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.fault(1, 2, 3, place="step 4 of 5")
def test_the_others_say_at_once_which_rank_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_core.testing.ranks, "_GRACE_SECONDS", 600.0)
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        run_ranks(one_of_each_pair_is_killed, 2 * len(MOMENTS), str(tmp_path))
    for moment in MOMENTS:
        message, unchanged, no_gradients = pickle.loads((tmp_path / moment).read_bytes())
        assert re.search(r"^step \d: .* of (the root )?unit.*: .* with rank 1 failed: .* closed the", message), message
        assert "rank 1: no flight record: it has exited" in message, message
        assert message.endswith("start from the last checkpoint, snapshots/step-00000002")
        assert unchanged and no_gradients, (moment, unchanged, no_gradients)
