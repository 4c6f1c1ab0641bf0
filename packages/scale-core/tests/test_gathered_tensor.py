"""Gathered tensors: what functions of torch write to them reaches the shards, and to torch they are plain tensors."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scale_core import compat
from scale_core.state.gathered_tensor import Gather, GatheredTensor, converted, plain_tensor


class Half(nn.Module):
    """The first half of a tensor of 8 elements, as a rank has it."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = torch.arange(4.0)
        self.num_loads = 0


class HalfGather(Gather[Half]):
    def version(self, owner: Half) -> int:
        return owner.shard._version

    def local_part(self, owner: Half, number: int, full: Tensor) -> tuple[Tensor, Tensor]:
        return full.reshape(-1)[:4], owner.shard

    def load(self, owner: Half, number: int, full: Tensor) -> None:
        owner.num_loads += 1
        super().load(owner, number, full)


def gathered(owner: Half) -> GatheredTensor:
    return GatheredTensor.of(torch.arange(8.0).view(4, 2), HalfGather(owner), 0, "weight")


def assign(tensor: Tensor) -> None:
    tensor[0, 1] = 9.0


def iadd(tensor: Tensor) -> None:
    tensor += 1


def imul_of_a_row(tensor: Tensor) -> None:
    tensor[1] *= 2


ONES = torch.ones(4, 2)
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda v: v.mul_(2).add_(1),
    "+=": iadd,
    "[0, 1] =": assign,
    "[1] *=": imul_of_a_row,
    "copy_": lambda v: v.copy_(ONES),
    "out=": lambda v: torch.add(ONES, 1, out=v),
    "out= of a list": lambda v: torch.frexp(ONES, out=(v, torch.empty(4, 2, dtype=torch.int32))),
    "foreach": lambda v: torch._foreach_lerp_([v], [ONES], 0.5),
    "fused": lambda v: torch._fused_sgd_(
        [v],
        [ONES],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    ),
    "data": lambda v: v.data.fill_(3),
    "detach": lambda v: v.detach().zero_(),
    "float": lambda v: v.float().zero_(),
    "view": lambda v: v.view(-1)[2:3].fill_(7),
    "transpose": lambda v: v.T.copy_(ONES.T),
    "split": lambda v: [part.neg_() for part in v.split(2)],
    "unbind": lambda v: v.unbind()[0].add_(5),
    "index": lambda v: v.index_fill_(0, torch.tensor([0]), 4.0),
    "mask": lambda v: v.__setitem__(v > 2, 0.0),
    "init": lambda v: nn.init.constant_(v, 2.5),
    "functional": lambda v: nn.functional.threshold(v, 2.0, -1.0, inplace=True),
    "operator": lambda v: torch.ops.aten.add_.Scalar(v, 1),
    "copy_ of itself": lambda v: v.copy_(v * 2),
    "inference": lambda v: torch.inference_mode()(lambda: v[1:].mul_(3))(),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_reach_the_shard_as_in_plain_pytorch(write):
    owner, plain = Half(), torch.arange(8.0).view(4, 2)
    WRITES[write](plain)
    tensor = gathered(owner)
    with torch.no_grad():
        WRITES[write](tensor)
    assert owner.num_loads > 0
    assert torch.equal(owner.shard, plain.view(-1)[:4])
    assert torch.equal(tensor, plain)


def test_reads_write_nothing_and_give_plain_tensors():
    owner = Half()
    tensor = gathered(owner)
    results = [tensor + 1, tensor.clone(), tensor.double(), tensor.sum(), torch.stack([tensor]), tensor[tensor > 1]]
    torch.empty(4, 2).copy_(tensor)
    nn.Linear(2, 4).load_state_dict({"weight": tensor, "bias": torch.zeros(4)})
    assert owner.num_loads == 0
    assert {type(result) for result in results} == {Tensor}
    assert (tensor.shape, tensor.tolist()[0], str(tensor)) == ((4, 2), [0.0, 1.0], str(plain_tensor(tensor)))


def test_a_plain_tensor_over_its_memory_does_not_write():
    owner = Half()
    plain_tensor(gathered(owner)).zero_()
    assert torch.equal(owner.shard, torch.arange(4.0))


def test_after_a_change_of_the_shard_a_write_raises():
    owner = Half()
    tensor = gathered(owner)
    tensor.add_(1)
    owner.shard.mul_(2)
    with pytest.raises(
        RuntimeError, match=r"'weight' of a state dict .* other values now .* call state_dict\(\) again"
    ):
        tensor[0].zero_()
    assert torch.equal(owner.shard, (torch.arange(4.0) + 1) * 2)


def test_a_write_is_seen_by_a_state_that_has_the_same_values():
    owner = Half()
    first, second = gathered(owner), gathered(owner)
    owner.shard.mul_(1)  # As a step of an optimizer without a gradient
    first.add_(1).sub_(1)
    second[1].zero_()
    assert torch.equal(owner.shard, torch.tensor([0.0, 1.0, 0.0, 0.0]))
    with pytest.raises(RuntimeError, match="other values now"):
        torch.nn.functional.relu(first, inplace=True)


def test_after_its_model_is_gone_it_is_a_plain_tensor():
    tensor = gathered(Half())
    assert torch.equal(tensor.mul_(2), torch.arange(8.0).view(4, 2) * 2)


def test_with_other_memory_it_no_longer_writes():
    owner = Half()
    tensor = gathered(owner)
    tensor.data = torch.zeros(4, 2)
    tensor.add_(1)
    assert owner.num_loads == 0


def copies_of(tensor: Tensor) -> list[Tensor]:
    file = io.BytesIO()
    torch.save({"weight": tensor}, file)
    assert b"scale_core" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    return [copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), loaded, copy.deepcopy([tensor])[0]]


def test_copies_and_files_are_plain_and_load_without_us(tmp_path: Path):
    owner = Half()
    tensor = gathered(owner)
    save_file({"weight": tensor}, tmp_path / "weights.safetensors")
    for loaded in [*copies_of(tensor), load_file(tmp_path / "weights.safetensors")["weight"]]:
        assert type(loaded) is Tensor
        assert torch.equal(loaded, torch.arange(8.0).view(4, 2))
        loaded.zero_()
    assert owner.num_loads == 0


def test_numpy_reads_it_and_can_not_write_to_it():
    tensor = gathered(Half())
    for array in (tensor.numpy(), np.asarray(tensor)):
        assert array.sum() == 28
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    tensor.numpy().copy()[0] = 1


def test_a_parameter_made_of_it_trains_by_itself():
    owner = Half()
    layer = nn.Linear(2, 4, bias=False, device="meta")
    layer.load_state_dict({"weight": gathered(owner)}, assign=True)
    assert type(layer.weight) is nn.Parameter
    layer(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert type(copy.deepcopy(layer).weight) is nn.Parameter
    assert owner.num_loads == 0
    param = nn.Parameter(gathered(owner))
    assert isinstance(copy.deepcopy(param), nn.Parameter)
    assert isinstance(pickle.loads(pickle.dumps(nn.Parameter(gathered(owner)))), nn.Parameter)


def test_functions_of_a_model_take_it():
    layer, owner = nn.Linear(2, 4, bias=False), Half()
    state = {"weight": gathered(owner).requires_grad_()}
    torch.func.functional_call(layer, state, torch.ones(1, 2)).sum().backward()
    assert torch.equal(state["weight"].grad, ONES)
    gradient = torch.func.grad(lambda weights: torch.func.functional_call(layer, weights, ONES).sum())(
        {"weight": gathered(owner)}
    )
    assert torch.equal(gradient["weight"], ONES * 4)
    assert owner.num_loads == 0


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "gather of it": lambda v: dist.gather(v, [torch.empty(4, 2)] * 2 if dist.get_rank() == 0 else None),
}

if compat.torch_version() >= (2, 13):  # An older torch.distributed.broadcast asks no subclass of tensors.
    COLLECTIVES |= {
        "broadcast": lambda v: dist.broadcast(v, src=1),
        "broadcast later": lambda v: dist.broadcast(v, src=1, async_op=True).wait(),
    }


@pytest.mark.ranks(2)
def test_collectives_write_through():
    wrong, group_rank = [], dist.get_rank()
    for name, collective in COLLECTIVES.items():
        owner, plain = Half(), torch.arange(8.0).view(4, 2) + group_rank
        collective(plain)
        tensor = gathered(owner)
        tensor.add_(group_rank)
        collective(tensor)
        if not (torch.equal(owner.shard, plain.view(-1)[:4]) and torch.equal(tensor, plain)):
            wrong.append(f"{name}: {owner.shard}, expected {plain}")
    assert not wrong


class Logged(Tensor):
    """A tensor with a `__torch_function__` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(type(arg) is GatheredTensor for arg in args)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_other_types_of_tensors_keep_their_say():
    owner = Half()
    tensor, logged = gathered(owner), ONES.as_subclass(Logged)
    tensor.add_(logged)
    assert isinstance(tensor + logged, Logged)
    assert torch.equal(owner.shard, torch.arange(4.0) + 1)


def test_what_is_gathered_in_inference_mode_writes_too():
    owner = Half()
    with torch.inference_mode():
        tensor = gathered(owner)
        tensor.add_(1)
        tensor[0].mul_(2)
    tensor[1] = 0
    assert torch.equal(owner.shard, torch.tensor([2.0, 4.0, 0.0, 0.0]))


def test_a_converted_tensor_writes_to_its_original():
    original = torch.arange(4.0)
    assert converted(original, "mean", dtype=torch.float32) is original
    converted(original, "mean", dtype=torch.float64).add_(1)
    assert torch.equal(original, torch.arange(4.0) + 1)
    stale = converted(original, "mean", dtype=torch.float64)
    original.zero_()
    with pytest.raises(RuntimeError, match="'mean' of a state dict"):
        stale.add_(1)


def average(weights: list[Tensor], others: list[Tensor]) -> None:
    for weight, other in zip(weights, others, strict=True):
        weight.mul_(0.5).add_(other, alpha=0.5)


def test_a_compiled_average_writes_through():
    owner = Half()
    torch.compile(average, backend="eager")([gathered(owner)], [torch.zeros(4, 2)])
    assert torch.equal(owner.shard, torch.arange(4.0) / 2)
