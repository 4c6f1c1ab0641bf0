"""What programs written for FairScale do with its objects, each a pattern of theirs."""

import functools
import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fairscale.nn.model_parallel.initialize as fs_init
from fairscale import _warnings
from fairscale._warnings import FairScaleWarning
from fairscale.nn import FlattenParamsWrapper
from fairscale.nn import FullyShardedDataParallel as FSDP  # noqa: N817
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.nn.misc.flatten_params_wrapper import FlatParameter
from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear
from fairscale.optim import OSS
from fairscale.optim.grad_scaler import ShardedGradScaler
from fairscale.optim.utils import broadcast_object
from fairscale.utils.containers import (
    apply_to_tensors,
    pack_kwargs,
    split_non_tensors,
    unpack_kwargs,
    unpack_non_tensors,
)
from fairscale.utils.testing import set_random_seed


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for step in range(3):
        optimizer.zero_grad()
        net(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        optimizer.step()
    return [param.detach().clone() for param in net.parameters()]


# ClassyVision's `zero` and VISSL give OSS a function.


def from_a_function(params: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **kwargs})


BUILDERS: dict[str, Any] = {
    "a function": from_a_function,
    "a partial": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "a class": torch.optim.SGD,
}


@pytest.mark.ranks(2)
def test_oss_takes_what_builds_an_optimizer() -> None:
    def groups_of(net: nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": net[0].parameters(), "lr": 0.05}, {"params": list(net[2].parameters())}]

    for name, build in BUILDERS.items():
        default = {"lr": 0.1, "momentum": 0.9} if name == "a class" else {}
        mine, plain = model(), model()
        for groups in (lambda net: net.parameters(), groups_of):
            optimizer = OSS(groups(mine), build, **default)
            reference = torch.optim.SGD(groups(plain), lr=0.1, momentum=0.9)
            for ours, theirs in zip(train(mine, optimizer), train(plain, reference), strict=True):
                torch.testing.assert_close(ours, theirs, msg=name)
    with pytest.raises(TypeError, match="expected optim to build an optimizer, got None"):
        OSS(model().parameters(), lambda params: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="given 1 parameter groups and built an optimizer with 2"):
        OSS(model().parameters(), lambda groups: torch.optim.SGD([*groups, {"params": [nn.Parameter(torch.ones(1))]}]))


# fairseq's and metaseq's optimizers hand `OSS.group` to torch.distributed.


@pytest.mark.ranks(2)
def test_the_group_of_oss_is_torchs() -> None:
    warnings.simplefilter("ignore", FairScaleWarning)
    optimizer = OSS(model().parameters(), torch.optim.Adam, group=dist.new_group([0, 1]), lr=0.1)
    assert isinstance(optimizer.group, dist.ProcessGroup)
    sent = torch.full((1,), 1.0 + dist.get_rank(optimizer.group))
    dist.broadcast(sent, 0, group=optimizer.group)
    assert sent.item() == 1.0 and dist.get_world_size(optimizer.group) == 2
    assert OSS(model().parameters(), lr=0.1).group is dist.group.WORLD
    assert broadcast_object({"rank": dist.get_rank()}, 1, optimizer.group) == {"rank": 1}


def test_without_ranks_oss_has_no_group() -> None:
    assert OSS(model().parameters(), lr=0.1).group is None


# Lightning 1.9's strategy looks for flat parameters in its optimizer; stoke for the factors of a wrapper.


@pytest.mark.ranks(2)
def test_attributes_that_programs_read_of_fsdp() -> None:
    warnings.simplefilter("ignore", FairScaleWarning)
    flat, plain = FSDP(model(), flatten_parameters=True), FSDP(model(), flatten_parameters=False)
    assert all(isinstance(param, FlatParameter) for param in flat.parameters())
    assert not any(isinstance(param, FlatParameter) for param in plain.parameters())
    assert (flat.gradient_predivide_factor, flat.gradient_postdivide_factor) == (2.0, 1.0)
    assert flat.disable_reshard_on_root and not flat.verbose and not flat.clear_autocast_cache
    assert flat.numel_padded_per_param == [0] * len(flat.params)
    factors = FSDP(model(), gradient_predivide_factor=1.0)
    assert (factors.gradient_predivide_factor, factors.gradient_postdivide_factor) == (1.0, 2.0)
    grads = []
    for net in (flat, factors, plain):
        if net is plain:
            net.gradient_predivide_factor, net.gradient_postdivide_factor = 2.0, 2.0
        net(torch.ones(1, 4)).sum().backward()
        grads.append([param.grad for param in net.parameters() if param.grad is not None])
    assert sum(float(grad.sum()) for grad in grads[0]) == pytest.approx(2 * sum(float(g.sum()) for g in grads[2]))
    wrapped = FlattenParamsWrapper(nn.Linear(2, 2))
    assert all(isinstance(param, FlatParameter) for param in wrapped.parameters())
    assert not isinstance(nn.Linear(2, 2).weight, FlatParameter) and not isinstance(None, FlatParameter)


# LLaMA2-Accessory's adapters derive from divided layers and fill themselves.


def test_a_class_derived_from_a_divided_layer_may_fill_itself() -> None:
    class LoraColumn(ColumnParallelLinear):
        def __init__(self, size: int) -> None:
            nn.Module.__init__(self)
            self.output_size_per_partition = size
            self.weight = nn.Parameter(torch.ones(size, 3))

        def forward(self, input_: torch.Tensor) -> torch.Tensor:
            return input_ @ self.weight.T

    class LoraRow(RowParallelLinear):
        def __init__(self, size: int) -> None:
            nn.Module.__init__(self)
            self.input_size_per_partition = size
            self.weight = nn.Parameter(torch.ones(3, size))

        def forward(self, input_: torch.Tensor) -> torch.Tensor:
            return input_ @ self.weight.T

    column, row = LoraColumn(4), LoraRow(4)
    row(column(torch.ones(2, 3))).sum().backward()
    assert (column.output_size_per_partition, row.input_size_per_partition) == (4, 4)
    for layer in (column, row):
        assert list(layer.state_dict()) == ["weight"] and layer.weight.grad is not None
        layer.load_state_dict({"weight": torch.zeros_like(layer.weight)})
        assert layer.weight.sum() == 0 and "Lora" in repr(layer)
    whole = ColumnParallelLinear(4, 6)
    assert whole.output_size_per_partition == 6 and "4" in repr(whole)


# LLaMA2-Accessory's `MetaModel.from_pretrained` assigns the group that it has made.


@pytest.mark.ranks(2)
def test_a_group_that_is_assigned_divides_layers() -> None:
    assert fs_init._MODEL_PARALLEL_GROUP is None
    group = dist.new_group([0, 1])
    fs_init._MODEL_PARALLEL_GROUP = group
    assert fs_init._MODEL_PARALLEL_GROUP is group and fs_init.get_model_parallel_world_size() == 2
    torch.manual_seed(0)
    layer = ColumnParallelLinear(4, 6, bias=False, gather_output=True)
    assert layer.output_size_per_partition == 3 and layer(torch.ones(1, 4)).shape == (1, 6)
    fs_init._MODEL_PARALLEL_GROUP = None
    assert not fs_init.model_parallel_is_initialized() and fs_init._MODEL_PARALLEL_GROUP is None


# VISSL's own tracker of communication is given to wrappers in place of a group.


@pytest.mark.ranks(2)
def test_an_object_that_imitates_a_group_is_taken_for_it() -> None:
    class Tracker:
        def __init__(self, group: Any) -> None:
            self.group = group

        def __getattr__(self, name: str) -> Any:
            if name == "group":
                raise AttributeError(name)
            return getattr(self.group, name)

    _warnings.warn_once.cache_clear()
    tracker = Tracker(dist.new_group([0, 1]))
    with pytest.warns(
        FairScaleWarning, match=r"process_group=Tracker\(\.\.\.\): collectives go over the process group"
    ):
        sharded = FSDP(model(), process_group=tracker)
    warnings.simplefilter("ignore", FairScaleWarning)
    replicated = model()
    optimizer = OSS(replicated.parameters(), torch.optim.SGD, group=tracker, lr=0.1)
    wrapped = ShardedDataParallel(replicated, optimizer, process_group=tracker)
    scaler = ShardedGradScaler(process_group=tracker, enabled=False)
    assert optimizer.group is tracker.group and sharded.world_size == 2 and not scaler.is_enabled()
    for net, stepped in ((sharded, torch.optim.SGD(sharded.parameters(), lr=0.1)), (wrapped, optimizer)):
        train(net, stepped)
    plain = model()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for trained in (sharded.state_dict(), replicated.state_dict()):
        torch.testing.assert_close(list(trained.values()), list(plain.state_dict().values()))


def test_a_packed_sequence_may_be_changed_in_place() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(5, 1, 5), torch.tensor([4]))

    def fill(tensor: torch.Tensor) -> None:
        tensor.fill_(0)

    halved = apply_to_tensors(torch.Tensor.half, packed)
    assert halved.data.dtype == torch.half and halved.batch_sizes is packed.batch_sizes
    assert apply_to_tensors(fill, packed) is packed and packed.data.sum() == 0


def test_containers_have_their_older_path() -> None:
    names, flat = pack_kwargs(1, b=torch.ones(2))
    tensors, rest = split_non_tensors(flat)
    assert unpack_kwargs(names, unpack_non_tensors(tensors, rest)) == ((1,), {"b": flat[1]})


def test_a_seed_is_that_of_all_generators() -> None:
    drawn = []
    for _ in range(2):
        set_random_seed(3)
        drawn.append((random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
