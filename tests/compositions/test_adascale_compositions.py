"""scale-adascale over models that are sharded: the gain is that of one process that computes every local gradient."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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

import scale_tp
from scale_adascale import AdaScale
from scale_adascale.estimates import Average
from scale_adascale.gain import bounded, gain, moments
from scale_checkpoint import apply_checkpointing, checkpoint_wrapper
from scale_core import ShardedGradScaler
from scale_core.snapshot import load_snapshot, save_snapshot
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from scale_oss import OSS, ShardedDataParallel

GAIN = 1e-6  # relative
STEPS = 3


def net() -> nn.Sequential:
    """Prime sizes, so that shards end inside of tensors."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 13), nn.Sequential(nn.Tanh(), nn.Linear(13, 7, bias=False)), nn.Linear(7, 3))


def data_of(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs [4, 5] and targets [4, 3]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    inputs, targets = data_of(seed)
    loss: Tensor = (model(inputs) - targets - 1.5).square().mean()
    return loss


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    first = [name for name in params if name.rpartition("module.")[2].startswith("0.")]
    return [{"params": [params[name] for name in first]}, {"params": [p for n, p in params.items() if n not in first]}]


class Plain:
    """One process, which computes the gradient of each micro-batch alone."""

    def __init__(self, adam: bool, scale: int, lr: float, *, one_group: bool) -> None:
        self.model, self.scale, self.lr, self.adam = net(), scale, lr, adam
        groups = [{"params": list(self.model.parameters())}] if one_group else groups_of(self.model)
        self.optimizer = (Adam if adam else SGD)(groups, lr=lr)
        self.averages = [Average() for _ in groups]

    def step(self, seeds: Sequence[int]) -> list[float]:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        rows = [torch.autograd.grad(loss_of(self.model, seed), params) for seed in seeds]
        grads = {param: torch.stack([row[i].double() for row in rows]) for i, param in enumerate(params)}
        if self.adam and len(self.optimizer.state) and not hasattr(self, "preconditioned"):
            self.averages, self.preconditioned = [Average() for _ in self.averages], True
        gains = []
        for number, group in enumerate(self.optimizer.param_groups):
            local, total = 0.0, 0.0
            for param in group["params"]:
                factor = self._divisor(param) ** -2
                local += factor * grads[param].square().sum().item()
                total += factor * grads[param].mean(0).square().sum().item()
                param.grad = grads[param].mean(0).float()
            new = bounded(moments(local, total, len(seeds), self.scale))
            self.averages[number] = self.averages[number].updated(new, 1 - self.scale / 1000, debias=True)
            gains.append(gain(self.averages[number].moments, self.scale))
            group["lr"] = self.lr * gains[-1] ** (0.5 if self.adam else 1.0)
        self.optimizer.step()
        return gains

    def _divisor(self, param: Tensor) -> float:
        if not self.adam or param not in self.optimizer.state:
            return 1.0
        state = self.optimizer.state[param]
        return float((state["exp_avg_sq"].double().mean() / (1 - 0.999 ** state["step"].double())).sqrt() + 1e-8)


def sharded(kind: str, adam: bool, lr: float) -> tuple[nn.Module, Any]:
    """A model that is sharded in one of the ways, and its optimizer."""
    model, inner = net(), Adam if adam else SGD
    if kind == "oss in adascale":
        return model, OSS(groups_of(model), inner, lr=lr, bucket_numel=40)
    if kind == "oss":
        return DistributedDataParallel(model), OSS(groups_of(model), inner, lr=lr, bucket_numel=40)
    if kind == "sharded ddp":
        optimizer = OSS(groups_of(model), inner, lr=lr, bucket_numel=40)
        return ShardedDataParallel(model, optimizer), optimizer
    if kind == "class":
        wrapped = FullyShardedDataParallel(model, reshard_after_forward=False)
        return wrapped, inner(groups_of(wrapped), lr=lr)
    mesh = None
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    if kind == "checkpointed fsdp":
        model[1] = checkpoint_wrapper(model[1])
    options: dict[str, Any] = {"flatten_parameters": True} if kind == "flat" else {}
    fully_shard(model[1], mesh, **options)
    fully_shard(model, mesh, **options)
    groups = [{"params": list(model.parameters())}] if kind == "flat" else groups_of(model)
    return model, (OSS(groups, inner, lr=lr) if kind == "oss over fsdp" else inner(groups, lr=lr))


def waits(model: nn.Module, last: bool, no_sync: bool) -> AbstractContextManager[object]:
    return nullcontext() if last or not no_sync else model.no_sync()  # type: ignore[operator]


def backward(model: nn.Module, step: int, num: int, no_sync: bool = True, scaler: Any = None) -> list[int]:
    """This rank's micro-batches of a step; returns the seeds of all ranks'."""
    seeds = [100 * step + number for number in range(num * dist.get_world_size())]
    mine = seeds[dist.get_rank() * num : (dist.get_rank() + 1) * num]
    for index, seed in enumerate(mine):
        with waits(model, index == num - 1, no_sync):
            loss = loss_of(model, seed) / num
            (scaler.scale(loss) if scaler else loss).backward()
    return seeds


def errors(kind: str, num: int, adam: bool = False, no_sync: bool = True, scaled: bool = False) -> list[float]:
    """How far the gains of some steps are from plain's, relatively."""
    lr = 0.02
    plain = Plain(adam, num * dist.get_world_size(), lr, one_group=kind == "flat")
    model, inner = sharded(kind, adam, lr)
    scaler = ShardedGradScaler(init_scale=256.0) if scaled else None
    optimizer = AdaScale(inner, num_gradients_to_accumulate=num, grad_scaler=scaler)
    if kind == "oss in adascale":  # As FairScale's own loops build it.
        model = ShardedDataParallel(model, optimizer)
    found = []
    for step in range(STEPS):
        seeds = backward(model, step, num, no_sync, scaler)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        gains = plain.step(seeds)
        assert 1.01 < gains[0] < plain.scale
        found += [abs(optimizer.gain(number) / expected - 1) for number, expected in enumerate(gains)]
        optimizer.zero_grad()
        assert all(group["lr"] == lr for group in optimizer.param_groups)
    return found


def all_ways() -> dict[str, list[float]]:
    found = {
        f"{kind}, {num} of {'Adam' if adam else 'SGD'}, {no_sync=}": errors(kind, num, adam, no_sync)
        for kind in ("fsdp", "sharded ddp")
        for num, adam, no_sync in ((1, False, True), (3, False, True), (3, False, False), (2, True, True))
        if no_sync or kind == "fsdp"
    }
    for kind in ("oss", "class", "flat", "oss over fsdp", "checkpointed fsdp"):
        found[kind] = errors(kind, 2, kind in ("oss", "oss over fsdp"))
    found["scaled fsdp"] = errors("fsdp", 2, scaled=True)
    found["oss in adascale"] = errors("oss in adascale", 2, True)
    found["scaled sharded ddp"] = errors("sharded ddp", 2, scaled=True)
    return found


def hybrid_meshes() -> dict[str, list[float]]:
    return {"hybrid": errors("hybrid", 2), "hybrid of Adam": errors("hybrid", 2, True)}


@pytest.mark.composition("scale-adascale", "scale-fsdp")
@pytest.mark.composition("scale-adascale", "OSS")
@pytest.mark.composition("scale-adascale", "ShardedDataParallel")
@pytest.mark.composition("scale-adascale", "scale-checkpoint", "scale-fsdp")
def test_the_gain_is_that_of_one_process_however_the_model_is_sharded():
    for found in run_ranks(all_ways, 2):
        assert {case: worst for case, each in found.items() if (worst := max(each)) > GAIN} == {}


def adam_on_flat_parameters() -> float:
    """A gradient measured as Adam uses it is divided tensor by tensor, and a flat parameter is no such tensor."""
    model, inner = sharded("flat", True, 0.02)
    words = r"flat_param_0.*holds 4, as '0.weight'.*flatten_parameters=False.*preconditioned=False"
    with pytest.raises(ValueError, match=words):
        AdaScale(inner)
    plain = Plain(False, 2, 0.02, one_group=True)  # Raw gradients are those of SGD's.
    optimizer = AdaScale(inner, preconditioned=False)
    expected = plain.step(backward(model, 0, 1))[0]
    optimizer.step()
    return abs(optimizer.gain() / expected - 1)


def test_adam_on_flat_parameters_is_refused_unless_gradients_are_measured_as_they_are():
    assert max(run_ranks(adam_on_flat_parameters, 2)) < GAIN


@pytest.mark.composition("scale-adascale", "scale-tp", "scale-fsdp")
def test_the_gain_is_that_of_one_process_on_hybrid_meshes_and_beside_tensor_parallelism():
    for found in run_ranks(all_of_tensor_parallel, 4):
        assert {case: worst for case, each in found.items() if (worst := max(each)) > GAIN} == {}


def divided() -> nn.Sequential:
    """The net with its hidden units divided between ranks; the last layer is on all of them, and nobody says so."""
    model = net()
    weights = model.state_dict()
    model[0] = scale_tp.ColumnParallelLinear(5, 13, gather_output=False)
    model[1][1] = scale_tp.RowParallelLinear(13, 7, bias=False, input_is_parallel=True)
    model.load_state_dict(weights)
    return model


def tensor_parallel_errors(kind: str, adam: bool) -> list[float]:
    """As `errors`, where two ranks divide layers, and two such pairs have other data."""
    data, lr, num = scale_tp.get_data_parallel_group(), 0.02, 2
    plain, model = Plain(adam, num * dist.get_world_size(data), lr, one_group=False), divided()
    if kind == "fsdp":
        for unit in (model[1], model):
            fully_shard(unit, mesh=data)
    groups = groups_of(model)
    called = DistributedDataParallel(model, process_group=data) if kind == "ddp" else model
    optimizer = AdaScale((Adam if adam else SGD)(groups, lr=lr), num_gradients_to_accumulate=num, process_group=data)
    found = []
    for step in range(STEPS):
        seeds = [100 * step + number for number in range(num * dist.get_world_size(data))]
        mine = seeds[dist.get_rank(data) * num : (dist.get_rank(data) + 1) * num]
        for index, seed in enumerate(mine):
            with waits(called, index == num - 1, no_sync=True):
                (loss_of(called, seed) / num).backward()
        optimizer.step()
        found += [abs(optimizer.gain(number) / gain - 1) for number, gain in enumerate(plain.step(seeds))]
        optimizer.zero_grad()
    return found


def all_of_tensor_parallel() -> dict[str, list[float]]:
    scale_tp.initialize_model_parallel(2)
    ways = [(kind, adam) for kind in ("ddp", "fsdp") for adam in (False, True)]
    found = {f"{kind}, {'Adam' if adam else 'SGD'}": tensor_parallel_errors(kind, adam) for kind, adam in ways}
    return found | hybrid_meshes()


def half_by_hand(num: int) -> float:
    """The gain of one step of all ranks in bf16, of gradients that one process computes; added up in fp32."""
    model, rows = net().bfloat16(), []
    for seed in range(num * dist.get_world_size()):
        inputs, targets = data_of(seed)
        loss = (model(inputs.bfloat16()) - targets - 1.5).square().mean() / num
        rows.append([grad.double() for grad in torch.autograd.grad(loss, list(model.parameters()))])
    local = sum(float(grad.square().sum()) for row in rows for grad in row) * num**2
    means = [torch.stack(grads).sum(0) / dist.get_world_size() for grads in zip(*rows, strict=True)]
    total = sum(float(mean.square().sum()) for mean in means)
    return gain(bounded(moments(local, total, len(rows), len(rows))), len(rows))


def clipped_and_half() -> list[float]:
    """Clipping between backward and step does not change the gain; bf16 gradients are measured as they are."""
    gains = [half_by_hand(2)]
    for clip in (False, True):
        model = net()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        optimizer = AdaScale(SGD(model.parameters(), lr=0.0), num_gradients_to_accumulate=2)
        backward(model, 0, 2)
        if clip:
            assert model.clip_grad_norm_(1e-3) > 1e-3
        gains.append(optimizer.gain())
    return gains


def saved(folder: str) -> list[Any]:
    """Through torch's checkpoint functions, its own file and a snapshot: training goes on with the same gain."""
    model, inner = sharded("fsdp", True, 0.02)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=2)

    def train(model: nn.Module, optimizer: AdaScale, steps: range) -> list[float]:
        gains = []
        for step in steps:
            backward(model, step, 2)
            optimizer.step()
            optimizer.zero_grad()
            gains += [optimizer.gain(), optimizer.progress]
        return gains

    train(model, optimizer, range(2))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    by_torch = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    save_snapshot(folder, 2, sharded_state_dict(model, optimizer))
    expected = train(model, optimizer, range(2, 4))
    found = []
    for way in ("file", "torch", "snapshot"):
        other, inner = sharded("fsdp", True, 0.02)
        loaded = AdaScale(inner, num_gradients_to_accumulate=2)
        other.load_state_dict(weights)
        if way == "file":
            file.seek(0)
            loaded.load_state_dict(torch.load(file, weights_only=True))
        elif way == "torch":
            set_optimizer_state_dict(other, loaded, by_torch)
        else:
            snapshot = load_snapshot(folder, lambda found, m=other, o=loaded: target_state_dict(m, o, found))
            load_sharded_state_dict(snapshot.state, other, loaded, copy=False)
        found.append(train(other, loaded, range(2, 4)) == expected)
    return found


def test_clipping_and_half_precision_leave_the_gain():
    for expected, first, second in run_ranks(clipped_and_half, 2):
        assert first == second > 1.01
        assert first == pytest.approx(expected, rel=GAIN)


def test_what_is_saved_of_a_sharded_training_goes_on_with_the_same_gain(tmp_path):
    for found in run_ranks(saved, 2, str(tmp_path)):
        assert found == [True, True, True]


def reentrant() -> str:
    """Every layer in a reentrant checkpoint, whose backward passes end before gradients are averaged."""
    model = fully_shard(fully_shard_layers(net()))
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1))
    model.register_forward_pre_hook(lambda module, args: args[0].requires_grad_())
    with pytest.raises(RuntimeError, match="comes from inside of a reentrant checkpoint") as error:
        loss_of(model, dist.get_rank()).backward()
    optimizer.unhook()
    return str(error.value)


def fully_shard_layers(model: nn.Sequential) -> nn.Sequential:
    layers = [fully_shard(layer) for layer in model]
    return nn.Sequential(*(Reentrant(layer) for layer in layers))


class Reentrant(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layer, x, use_reentrant=True)
        return found


def test_reentrant_checkpoints_of_all_layers_are_refused_where_they_would_be_measured_wrong():
    for said in run_ranks(reentrant, 2):
        assert "use_reentrant=False" in said


def by_layer(model: nn.Sequential) -> nn.Sequential:
    for layer in model[0]:
        checkpoint_wrapper(layer)
    return model


@pytest.mark.composition("scale-adascale", "scale-checkpoint")
def test_a_recomputed_model_has_the_same_gain_to_the_bit():
    """As a whole, layer by layer, and but for its linear layers; a backward pass then runs the forward again."""
    found: list[list[Any]] = []
    for treat in (nn.Sequential, checkpoint_wrapper, by_layer, lambda model: apply_checkpointing(model, "selective")):
        model = treat(nn.Sequential(net(), nn.Dropout(0.5)))
        optimizer = AdaScale(Adam(model.parameters(), lr=0.02), num_gradients_to_accumulate=2)
        found.append([])
        for step in range(STEPS):
            for seed in (2 * step, 2 * step + 1):
                (loss_of(model, seed) / 2).backward()
            optimizer.step()
            found[-1] += [optimizer.gain(), *(param.detach().clone() for param in model.parameters())]
            optimizer.zero_grad()
    plain, *others = found
    assert plain[0] > 1.01
    for other in others:
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain, other, strict=True))
