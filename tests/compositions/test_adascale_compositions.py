"""scale-adascale over models that are sharded, divided or recomputed: the gain is that of one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint
from trainings import assert_same_gains, drawn, gains_of, gains_of_one_process

import scale_tp
from scale_adascale import AdaScale, AdaScaleOptions
from scale_adascale.gain import bounded, gain, moments
from scale_checkpoint import apply_checkpointing, checkpoint_wrapper
from scale_core import ShardedGradScaler
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardOptions, fully_shard
from scale_oss import OSS, OSSOptions, ShardedDataParallel
from scale_snapshot import load_snapshot, save_snapshot
from scale_tp import context_parallel, megatron, split_sequence

GAIN = 1e-6  # relative
STEPS, LR = 3, 0.02


def net() -> nn.Sequential:
    """Prime sizes, so that shards end inside of tensors."""
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Tanh(), nn.Linear(13, 7, bias=False))
    return nn.Sequential(nn.Linear(5, 13), inner, nn.Linear(7, 3)).double()


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x, target = drawn(seed, (4, 5), (4, 3))
    dtype = next(model.parameters()).dtype
    loss: Tensor = (model(x.to(dtype)) - target.to(dtype) - 1.5).square().mean()
    return loss


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    first = [name for name in params if name.rpartition("module.")[2].startswith("0.")]
    return [{"params": [params[name] for name in first]}, {"params": [p for n, p in params.items() if n not in first]}]


@dataclass(frozen=True)
class Way:
    """How a model is spread, `num` micro-batches of each rank for a step, and what else the loop does."""

    kind: str
    num: int = 2
    adam: bool = False
    no_sync: bool = True
    scaled: bool = False
    ranks: int = 2


WAYS: dict[str, Way] = {
    "fsdp, a micro-batch": Way("fsdp", 1),
    "fsdp, micro-batches": Way("fsdp", 3),
    "fsdp, micro-batches that are reduced": Way("fsdp", 3, no_sync=False),
    "fsdp of Adam": Way("fsdp", adam=True),
    "sharded ddp, a micro-batch": Way("sharded ddp", 1),
    "sharded ddp, micro-batches": Way("sharded ddp", 3),
    "sharded ddp of Adam": Way("sharded ddp", adam=True),
    "oss": Way("oss", adam=True),
    "class": Way("class"),
    "flat": Way("flat"),
    "oss over fsdp": Way("oss over fsdp", adam=True),
    "checkpointed fsdp": Way("checkpointed fsdp"),
    "scaled fsdp": Way("fsdp", scaled=True),
    "scaled sharded ddp": Way("sharded ddp", scaled=True),
    "oss in adascale": Way("oss in adascale", adam=True),
    "hybrid": Way("hybrid", ranks=4),
    "hybrid of Adam": Way("hybrid", adam=True, ranks=4),
    "divided ddp": Way("divided ddp", ranks=4),
    "divided ddp of Adam": Way("divided ddp", adam=True, ranks=4),
    "divided fsdp": Way("divided fsdp", ranks=4),
    "divided fsdp of Adam": Way("divided fsdp", adam=True, ranks=4),
}


def divided() -> nn.Sequential:
    """The net with its hidden units divided between ranks; the last layer is on all of them, and nobody says so."""
    model = net()
    weights = model.state_dict()
    model[0] = scale_tp.ColumnParallelLinear(5, 13, gather_output=False)
    model[1][1] = scale_tp.RowParallelLinear(13, 7, bias=False, input_is_parallel=True)
    model.double().load_state_dict(weights)
    return model


def sharded(way: Way, data: dist.ProcessGroup | None = None) -> tuple[nn.Module, Any]:
    """A model that is spread over ranks, and its optimizer; of `data`, those with other data."""
    kind, inner = way.kind, Adam if way.adam else SGD
    model = divided() if kind.startswith("divided") else net()
    if kind == "oss in adascale":
        return model, OSS(groups_of(model), inner, lr=LR, options=OSSOptions(bucket_numel=40))
    if kind == "oss":
        return DistributedDataParallel(model), OSS(groups_of(model), inner, lr=LR, options=OSSOptions(bucket_numel=40))
    if kind == "sharded ddp":
        optimizer = OSS(groups_of(model), inner, lr=LR, options=OSSOptions(bucket_numel=40))
        return ShardedDataParallel(model, optimizer), optimizer
    if kind == "divided ddp":
        return DistributedDataParallel(model, process_group=data), inner(groups_of(model), lr=LR)
    if kind == "class":
        wrapped = FullyShardedDataParallel(model, reshard_after_forward=False)
        return wrapped, inner(groups_of(wrapped), lr=LR)
    mesh: Any = data
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if kind == "checkpointed fsdp":
        model[1] = checkpoint_wrapper(model[1])
    for unit in (model[1], model):
        fully_shard(unit, mesh, options=ShardOptions(flatten_parameters=kind == "flat"))
    groups = [{"params": list(model.parameters())}] if kind == "flat" else groups_of(model)
    return model, (OSS(groups, inner, lr=LR) if kind == "oss over fsdp" else inner(groups, lr=LR))


def backward(
    model: nn.Module, step: int, num: int, *, no_sync: bool = True, scaler: Any = None, group: Any = None
) -> None:
    """This rank's micro-batches of a step."""
    for index in range(num):
        seed = num * (dist.get_world_size(group) * step + dist.get_rank(group)) + index
        waits = no_sync and index < num - 1
        context: AbstractContextManager[object] = model.no_sync() if waits else nullcontext()  # type: ignore[operator]
        with context:
            loss = loss_of(model, seed) / num
            (scaler.scale(loss) if scaler else loss).backward()


@pytest.mark.composition("scale-adascale", "scale-fsdp")
@pytest.mark.composition("scale-adascale", "OSS")
@pytest.mark.composition("scale-adascale", "ShardedDataParallel")
@pytest.mark.composition("scale-adascale", "scale-checkpoint", "scale-fsdp")
@pytest.mark.composition("scale-adascale", "scale-tp")
@pytest.mark.composition("scale-adascale", "scale-tp", "scale-fsdp")
@pytest.mark.parametrize("ranks, name", [(way.ranks, name) for name, way in WAYS.items()])
@pytest.mark.ranks("ranks", in_turn=True)
def test_the_gain_is_that_of_one_process(ranks: int, name: str) -> None:
    way, data = WAYS[name], None
    if way.kind.startswith("divided"):
        scale_tp.initialize_model_parallel(2)
        data = megatron.get_data_parallel_group()
    plain = net()
    groups = [{"params": list(plain.parameters())}] if way.kind == "flat" else groups_of(plain)
    num_samples = way.num * dist.get_world_size(data)
    expected = gains_of_one_process(plain, (Adam if way.adam else SGD)(groups, lr=LR), loss_of, num_samples, STEPS)

    model, inner = sharded(way, data)
    scaler = ShardedGradScaler(init_scale=256.0) if way.scaled else None
    optimizer = AdaScale(
        inner, num_gradients_to_accumulate=way.num, options=AdaScaleOptions(grad_scaler=scaler), process_group=data
    )
    if way.kind == "oss in adascale":  # As FairScale's own loops build it.
        model = ShardedDataParallel(model, optimizer)
    gains = []
    for step in range(STEPS):
        backward(model, step, way.num, no_sync=way.no_sync, scaler=scaler, group=data)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        gains.append(gains_of(optimizer))
        optimizer.zero_grad()
        assert all(group["lr"] == LR for group in optimizer.param_groups)
    optimizer.unhook()
    scale_tp.destroy_model_parallel()
    assert_same_gains(expected, gains)


@pytest.mark.ranks(2)
def test_adam_on_flat_parameters_measures_raw_gradients_alone() -> None:
    """A gradient measured as Adam uses it is divided tensor by tensor, and a flat parameter is not one tensor."""
    model, inner = sharded(Way("flat", adam=True))
    words = r"flat_param_0.*holds 4, for example '0.weight'.*flatten_parameters=False.*preconditioned=False"
    with pytest.raises(ValueError, match=words):
        AdaScale(inner)
    plain = net()  # Raw gradients are those of SGD's.
    expected = gains_of_one_process(plain, SGD(plain.parameters(), lr=LR), loss_of, 2, 1)
    optimizer = AdaScale(inner, options=AdaScaleOptions(preconditioned=False))
    backward(model, 0, 1)
    optimizer.step()
    assert_same_gains(expected, [gains_of(optimizer)])


def half_by_hand(num: int) -> float:
    """The gain of one step of all ranks in bf16, of gradients that one process computes; added up in fp32."""
    model, losses = net().float().bfloat16(), []
    for seed in range(num * dist.get_world_size()):
        x, target = (each.float() for each in drawn(seed, (4, 5), (4, 3)))
        losses.append((model(x.bfloat16()) - target - 1.5).square().mean() / num)
    rows = [[grad.double() for grad in torch.autograd.grad(loss, [*model.parameters()])] for loss in losses]
    local = sum(float(grad.square().sum()) for row in rows for grad in row) * num**2
    means = [torch.stack(grads).sum(0) / dist.get_world_size() for grads in zip(*rows, strict=True)]
    total = sum(float(mean.square().sum()) for mean in means)
    return gain(bounded(moments(local, total, len(rows), len(rows))), len(rows))


@pytest.mark.ranks(2)
def test_clipping_and_half_precision_leave_the_gain() -> None:
    """Clipping between backward and step does not change the gain; bf16 gradients are measured as they are."""
    gains = []
    for clip in (False, True):
        model = net().float()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        optimizer = AdaScale(SGD(model.parameters(), lr=0.0), num_gradients_to_accumulate=2)
        backward(model, 0, 2)
        assert not clip or model.clip_grad_norm_(1e-3) > 1e-3
        gains.append(optimizer.gain())
    assert gains[0] == gains[1] > 1.01
    assert gains[0] == pytest.approx(half_by_hand(2), rel=GAIN)


@pytest.mark.ranks(2)
def test_a_saved_sharded_training_goes_on_with_the_same_gain(tmp_path: Path) -> None:
    """Through torch's checkpoint functions, its own file and a snapshot: training goes on with the same gain."""
    folder = str(tmp_path)

    def built() -> tuple[nn.Module, AdaScale]:
        model, inner = sharded(Way("fsdp", adam=True))
        return model, AdaScale(inner, num_gradients_to_accumulate=2)

    def train(model: nn.Module, optimizer: AdaScale, steps: range) -> list[float]:
        gains = []
        for step in steps:
            backward(model, step, 2)
            optimizer.step()
            optimizer.zero_grad()
            gains += [optimizer.gain(), optimizer.progress]
        return gains

    model, optimizer = built()
    train(model, optimizer, range(2))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    by_torch = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    save_snapshot(folder, 2, sharded_state_dict(model, optimizer))
    expected = train(model, optimizer, range(2, 4))
    for way in ("file", "torch", "snapshot"):
        other, loaded = built()
        other.load_state_dict(weights)
        if way == "file":
            file.seek(0)
            loaded.load_state_dict(torch.load(file, weights_only=True))
        elif way == "torch":
            set_optimizer_state_dict(other, loaded, by_torch)
        else:
            snapshot = load_snapshot(folder, lambda saved, m=other, o=loaded: target_state_dict(m, o, saved))
            load_sharded_state_dict(snapshot.state, other, loaded, copy=False)
        assert train(other, loaded, range(2, 4)) == expected, way


class Reentrant(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.layer, x, use_reentrant=True)
        return output


@pytest.mark.ranks(2)
def test_reentrant_checkpoints_of_all_layers_are_refused() -> None:
    """Every layer in a reentrant checkpoint, whose backward passes end before gradients are averaged."""
    model = fully_shard(nn.Sequential(*(Reentrant(fully_shard(layer)) for layer in net())))
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1))
    model.register_forward_pre_hook(lambda module, args: args[0].requires_grad_())
    with pytest.raises(RuntimeError, match="comes from inside of a reentrant checkpoint") as caught:
        loss_of(model, dist.get_rank()).backward()
    optimizer.unhook()
    assert "use_reentrant=False" in str(caught.value)


def by_layer(model: nn.Sequential) -> nn.Sequential:
    for layer in model[0]:
        checkpoint_wrapper(layer)
    return model


def gains_and_weights(treat: Callable[[nn.Sequential], nn.Module]) -> list[Tensor]:
    model = treat(nn.Sequential(net(), nn.Dropout(0.5)))
    optimizer = AdaScale(Adam(model.parameters(), lr=LR), num_gradients_to_accumulate=2)
    found = []
    for step in range(STEPS):
        for seed in (2 * step, 2 * step + 1):
            (loss_of(model, seed) / 2).backward()
        optimizer.step()
        found += [torch.tensor(optimizer.gain()), *(param.detach().clone() for param in model.parameters())]
        optimizer.zero_grad()
    return found


@pytest.mark.composition("scale-adascale", "scale-checkpoint")
@pytest.mark.parametrize(
    "treat", [checkpoint_wrapper, by_layer, lambda model: apply_checkpointing(model, "selective")], ids=range(3)
)
def test_a_recomputed_model_has_the_same_gain_to_the_bit(treat: Callable[[nn.Sequential], nn.Module]) -> None:
    """As a whole, layer by layer, and but for its linear layers; a backward pass then runs the forward again."""
    torch.manual_seed(0)
    expected = gains_and_weights(nn.Sequential)
    torch.manual_seed(0)
    assert expected[0] > 1.01 and all(map(torch.equal, gains_and_weights(treat), expected))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, dim=-1))
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.composition("scale-adascale", "context parallel", refused=True)
@pytest.mark.ranks(2)
def test_gradients_of_parts_of_sequences_are_refused() -> None:
    torch.manual_seed(0)
    model = Attention()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.3))
    called = DistributedDataParallel(model)
    part, refusal = split_sequence(torch.randn(2, 8, 4), dist.group.WORLD), r"ranks \[0, 1\] have parts of the same seq"
    with context_parallel(dist.group.WORLD), pytest.raises(RuntimeError, match=refusal):
        called(part).square().mean().backward()
    optimizer.zero_grad()
    with context_parallel(dist.group.WORLD):
        loss = called(part).square().mean()
    with pytest.raises(RuntimeError, match=refusal):
        loss.backward()
    optimizer.zero_grad()
    called(torch.randn(2, 8, 4)).square().mean().backward()  # Whole sequences are measured.
    optimizer.step()
