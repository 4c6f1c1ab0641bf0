"""Batch norms in units of their own: in their dtype, gathered until their backward, equal to the plain model."""

import pytest
import torch
from fsdp_beside import noise
from torch import nn

from scale_core.testing import run_ranks
from scale_fsdp import (
    FSDPConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    auto_wrap,
    auto_wrap_bn,
    config_auto_wrap_policy,
    enable_wrap,
    fully_shard,
)
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


def batch(rank: int) -> torch.Tensor:
    return noise(4, 3, 6, 6, seed=rank)


def units_of_norms() -> list[str]:
    wrong = []
    plain, model = (with_sync_in_evaluation(convolutions()) for _ in range(2))
    if auto_wrap_bn(model) is not model:
        wrong.append("not the module itself")
    fully_shard(model)
    rank = torch.distributed.get_rank()
    outputs = []
    for each in (model, plain):
        outputs.append(each(batch(rank)))
        outputs[-1].square().mean().backward()
    if not torch.equal(*outputs):
        wrong.append("other outputs")
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        if not torch.equal(ours, theirs):
            wrong.append(f"{name} differs")
    mean = plain[1].weight.grad.clone()
    torch.distributed.all_reduce(mean)
    unit = unit_of(model[1])
    span = unit.buffers[0].spans[0]
    if not torch.equal(model[1].weight.grad, mean[span.start : span.stop] / 2):
        wrong.append("the gradient is not the mean of all ranks'")
    return wrong


def in_bf16() -> list[str]:
    """What each module takes and returns while the model computes in bf16."""
    model = with_sync_in_evaluation(convolutions())
    fully_shard(auto_wrap_bn(model), mp_policy=BF16)
    seen = []
    for part in (model[1], model[3][1], model[4]):
        part.register_forward_hook(
            lambda module, args, output: seen.append(
                (
                    [param.dtype for param in module.parameters()],
                    module.running_mean.dtype,
                    args[0].dtype,
                    output.dtype,
                )
            )
        )
    model(batch(0)).float().sum().backward()
    half, full = torch.bfloat16, torch.float32
    expected = [([full, full], full, half, half), ([], full, half, half), ([full, full], full, half, half)]
    wrong = [] if seen == expected else [str(seen)]
    return wrong + [f"{name} has no fp32 gradient" for name, p in model.named_parameters() if p.grad.dtype != full]


def test_batch_norms_train_as_in_the_plain_model():
    assert not any(run_ranks(units_of_norms, 2))


def test_batch_norms_keep_fp32_in_a_bf16_model_and_hand_bf16_on():
    assert not any(run_ranks(in_bf16, 2))


def test_every_batch_norm_is_a_unit_that_stays_gathered_for_its_backward():
    model = auto_wrap_bn(convolutions())
    units = {name: unit_of(part) for name, part in model.named_modules() if unit_of(part)}
    assert list(units) == ["1", "3.1", "4"]
    assert not any(unit.reshard_after_forward for unit in units.values())
    assert isinstance(model[1], nn.BatchNorm2d) and isinstance(model[4], nn.SyncBatchNorm)
    assert auto_wrap_bn(model) is model, "what is sharded already is left alone"


def test_a_batch_norm_by_itself_is_wrapped():
    norm = nn.BatchNorm1d(3)
    assert auto_wrap_bn(norm) is norm and unit_of(norm) is not None


@pytest.mark.parametrize("config", [{"reshard_after_forward": True}, FSDPConfig(mixed_precision=True)])
def test_other_arguments_take_the_place_of_the_default_ones(config):
    model = auto_wrap_bn(convolutions(), fsdp_config=config)
    assert unit_of(model[1]).reshard_after_forward is True
    expected = torch.float16 if isinstance(config, FSDPConfig) else torch.float32
    assert unit_of(model[1]).buffers[0].compute_dtype is expected


def test_arguments_can_be_left_for_auto_wrap():
    model = auto_wrap_bn(convolutions(), wrap_it=False)
    assert unit_of(model[1]) is None and model[1].wrapper_config == {"reshard_after_forward": False}
    with enable_wrap(config_auto_wrap_policy):
        model = auto_wrap(model)
    assert [type(part) for part in (model[1], model[4])] == [FullyShardedDataParallel] * 2
    assert unit_of(model[1].module).reshard_after_forward is False


def test_what_would_be_lost_or_wrong_is_refused_and_nothing_is_changed():
    with pytest.raises(ValueError, match=r"single_rank_pg=True\) would never average the gradients"):
        auto_wrap_bn(convolutions(), single_rank_pg=True)
    model = convolutions()
    model[4].wrapper_config = {"atom": "row"}
    with pytest.raises(ValueError, match=r"'4', a SyncBatchNorm, has a wrapper_config already, \{'atom': 'row'\}"):
        auto_wrap_bn(model)
    assert unit_of(model[1]) is None
    assert unit_of(auto_wrap_bn(model, assert_on_collision=False)[4]) is not None
    with pytest.raises(ValueError, match=r"'1', a BatchNorm2d, belongs to a unit.*as '1.weight': call auto_wrap_bn"):
        auto_wrap_bn(fully_shard(convolutions()))
