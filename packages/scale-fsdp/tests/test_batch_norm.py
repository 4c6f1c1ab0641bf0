"""Batch norms in units of their own: in their dtype, gathered until their backward, equal to the plain model."""

import pytest
import torch
from fsdp_parity import noise
from torch import nn

from scale_check.exact import assert_equal
from scale_fsdp import MixedPrecisionPolicy, fully_shard
from scale_fsdp.runtime.unit import unit_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def convolutions() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(5, 4, 1), nn.BatchNorm2d(4, affine=False)),
        nn.SyncBatchNorm(4),
        nn.Flatten(),
        nn.Linear(64, 2),
    ).train()


def with_sync_in_evaluation(model: nn.Sequential) -> nn.Sequential:
    """nn.SyncBatchNorm trains on a GPU only; with its running statistics it computes anywhere."""
    model[4].eval()
    return model


def with_units_of_norms(model: nn.Sequential) -> nn.Sequential:
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            fully_shard(part, reshard_after_forward=False)
    return model


def batch(rank: int) -> torch.Tensor:
    return noise(4, 3, 6, 6, seed=rank)


@pytest.mark.ranks(2)
def test_batch_norms_train_as_in_the_plain_model():
    plain, model = (with_sync_in_evaluation(convolutions()) for _ in range(2))
    fully_shard(with_units_of_norms(model))
    rank = torch.distributed.get_rank()
    outputs = []
    for each in (model, plain):
        outputs.append(each(batch(rank)))
        outputs[-1].square().mean().backward()
    assert torch.equal(*outputs), "other outputs"
    assert_equal(dict(model.named_buffers()), dict(plain.named_buffers()))
    mean = plain[1].weight.grad.clone()
    torch.distributed.all_reduce(mean)
    unit = unit_of(model[1])
    span = unit.buffers[0].spans[0]
    assert torch.equal(model[1].weight.grad.to_local(), mean[span.start : span.stop] / 2)


@pytest.mark.ranks(2)
def test_batch_norms_keep_fp32_in_a_bf16_model_and_hand_bf16_on():
    """What each module takes and returns while the model computes in bf16."""
    model = with_sync_in_evaluation(convolutions())
    fully_shard(with_units_of_norms(model), mp_policy=BF16)
    seen = []
    for part in (model[1], model[3][1], model[4]):
        part.register_forward_hook(
            lambda module, args, output: seen.append(
                ([param.dtype for param in module.parameters()], module.running_mean.dtype, args[0].dtype, output.dtype)
            )
        )
    model(batch(0)).float().sum().backward()
    half, full = torch.bfloat16, torch.float32
    expected = [([full, full], full, half, half), ([], full, half, half), ([full, full], full, half, half)]
    assert seen == expected, str(seen)
    assert not [f"{name} has no fp32 gradient" for name, p in model.named_parameters() if p.grad.dtype != full]
