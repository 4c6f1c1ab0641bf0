"""Batch norms under torch's own checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scale_checkpoint.recompute.batch_norm import patch_batchnorm


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_patched_batch_norms_work_under_torchs_checkpoint(use_reentrant: bool) -> None:
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
