from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from scale_oss import OSS, OSSOptions, OuterStep, ShardedDataParallel, split_by


def test_a_wrong_argument_is_named_before_anything_is_built() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = OSS(model.parameters(), SGD, lr=0.1)
    plain = SGD(model.parameters(), lr=0.1)
    wrong: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (
            OSS,
            (model.parameters(), SGD),
            {"bucket_numel": 3, "lr": 0.1},
            r"OSS.*: there is no argument bucket_numel=; write options=OSSOptions\(bucket_numel=...\)",
        ),
        (OSSOptions, (), {"bucket_numel": "3"}, "OSSOptions: expected bucket_numel to be an integer"),
        (OSS, (model.parameters(), plain), {}, "expected optim to be a class of optimizers"),
        (OSS, (None,), {}, "OSS: expected params to be a collection, got None"),
        (ShardedDataParallel, (None, optimizer), {}, "ShardedDataParallel: expected module to be a Module, got None"),
        (ShardedDataParallel, (model, optimizer), {"reduce_fp16": "no"}, "; write reduce_fp16=False"),
        # In earlier versions the number of elements of a bucket was the sixth.
        (ShardedDataParallel, (model, optimizer, None, True, True, 1), {}, "positional arguments but 7 were given"),
        (ShardedDataParallel, (model, optimizer), {"reduce_fp16": 2**23}, "expected reduce_fp16 to be a bool"),
        (OSS, (model.parameters(), SGD, None, 1), {"lr": 0.1}, "positional arguments but 5 were given"),
        (OSS, (model.parameters(), SGD), {"lr": 0.1, "broadcast_fp16": -1}, "expected broadcast_fp16 to be a bool"),
        (split_by, (model, (SGD, {}), (SGD, {})), {"other_names": "layers"}, r"; write \['layers'\]"),
        (OuterStep, (), {"nesterov": "no"}, "; write nesterov=False"),
    ]
    for call, args, kwargs, text in wrong:
        with pytest.raises(TypeError, match=text):
            call(*args, **kwargs)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert ShardedDataParallel(model, [optimizer], broadcast_buffers=1) is not None  # type: ignore[arg-type]


def test_building_under_inference_mode_is_refused() -> None:
    model = nn.Linear(2, 2)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"OSS was called under.*Call it before"):
        OSS(model.parameters(), SGD, lr=0.1)
    optimizer = OSS(model.parameters(), SGD, lr=0.1)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"ShardedDataParallel was called under"):
        ShardedDataParallel(model, optimizer)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_script_modules_need_a_gather_in_the_step() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    optimizer = OSS(model.parameters(), SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"ScriptModule in the module takes no hooks.*Write overlap_gather=False"):
        ShardedDataParallel(model, optimizer)
    ShardedDataParallel(model, optimizer, overlap_gather=False)(torch.ones(1, 2)).sum().backward()
