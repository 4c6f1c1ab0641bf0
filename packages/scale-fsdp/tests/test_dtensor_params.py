"""Parameters that torch's own `parallelize_module` has made DTensors, on another dimension of the mesh."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shard_arguments import shard_arguments
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import scale_snapshot
from scale_check.exact import assert_equal
from scale_core.errors import ShardedTensorError
from scale_fsdp import full_optim_state_dict, fully_shard, shard_optim_state_dict

VOCABULARY, WIDTH, HEADS, LENGTH = 16, 8, 2, 6


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 20, bias=False), nn.Linear(WIDTH, 20, bias=False)
        self.w2 = nn.Linear(20, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing:
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, checkpointing: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for layer in self.layers:
            layer.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def parallel(model: Llama, mesh: DeviceMesh, plan: str = "sequence") -> Llama:
    """torch's plan of tensor and sequence parallelism for such a model; or others, whose norms are no DTensors."""
    if plan != "sequence":
        layout = {"use_local_output": False, "output_layouts": Shard(-1)} if plan == "loss" else {}
        parallelize_module(model, mesh, {"output": ColwiseParallel(**(layout or {"output_layouts": Replicate()}))})
        names = {name: ColwiseParallel() for name in ("wq", "wk", "wv", "w1", "w3")}
        for layer in model.layers:
            for half in (layer.attention, layer.feed_forward):
                styles = {**names, "wo": RowwiseParallel(), "w2": RowwiseParallel()}
                parallelize_module(half, mesh, {name: styles[name] for name, _ in half.named_children()})
        return model
    outer = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    inner = {
        "attention_norm": SequenceParallel(),
        "attention": gather,
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": gather,
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, outer)
    for layer in model.layers:
        parallelize_module(layer, mesh, inner)
    return model


def sharded(mesh: DeviceMesh, plan: str = "sequence", **kwargs: Any) -> Llama:
    model = parallel(Llama(**kwargs), mesh["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard([model.norm, model.output], mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def loss_of(model: nn.Module, step: int, mesh: DeviceMesh | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)
    if mesh is not None:
        tokens = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, steps: range) -> list[float]:
    norms = []
    for step in steps:
        loss_of(model, step, mesh).backward()
        clip = getattr(model, "clip_grad_norm_", None) if step % 2 else None
        params = list(model.parameters())
        norms.append(float(clip(0.5) if clip else torch.nn.utils.clip_grad_norm_(params, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def differences(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 2e-6) -> None:
    assert list(found) == list(expected), f"names {list(found)}"
    assert not [name for name in expected if not torch.allclose(found[name], expected[name], atol=atol)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.ranks(4, in_turn=True)
def test_a_llama_under_torch_s_plan_trains_as_one_process(checkpointing: bool, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = Llama(), sharded(mesh, checkpointing=checkpointing)
    differences(model.state_dict(), plain.state_dict(), atol=0)
    assert not any(isinstance(param, DTensor) for param in model.parameters()), "parameters() yields a DTensor"
    kinds: set[type] = set()
    model.layers[0].attention.wq.register_forward_hook(lambda module, *_: kinds.add(type(module.weight)))
    optimizers = adamw(plain), adamw(model)
    expected = train(plain, optimizers[0], None, range(3))
    norms = train(model, optimizers[1], mesh, range(3))
    assert norms == pytest.approx(expected, rel=1e-5), f"norms {norms} for {expected}"
    assert kinds == {DTensor}, f"computed with {kinds}"
    differences(model.state_dict(), plain.state_dict())
    if checkpointing:
        return
    with model.summon_full_params(), torch.no_grad():
        weight = model.layers[0].attention.wq.weight
        assert isinstance(weight, DTensor) and tuple(weight.shape) == (WIDTH, WIDTH), "summoned in another form"
        weight.mul_(2)
    plain.layers[0].attention.wq.weight.data.mul_(2)
    differences(model.state_dict(), plain.state_dict())
    # Out and in: a snapshot, and full tensors.
    scale_snapshot.save(tmp_path, 1, {"model": model, "optimizer": optimizers[1]})
    other = sharded(mesh, seed=5)
    other_optimizer = adamw(other)
    scale_snapshot.load(tmp_path, {"model": other, "optimizer": other_optimizer})
    differences(other.state_dict(), model.state_dict(), atol=0)
    train(plain, optimizers[0], None, range(3, 5))
    train(other, other_optimizer, mesh, range(3, 5))
    differences(other.state_dict(), plain.state_dict(), atol=5e-6)
    other.load_state_dict(Llama().state_dict())
    differences(other.state_dict(), Llama().state_dict(), atol=0)


@pytest.mark.ranks(4)
def test_other_plans_train_and_resume_as_one_process() -> None:
    """Plans that leave norms and embeddings plain; one whose loss takes logits that are divided by the vocabulary."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for plan in ("plain norms", "loss"):
        plain, model = Llama(), sharded(mesh, plan)
        optimizers = adamw(plain), adamw(model)
        expected = train(plain, optimizers[0], None, range(3))
        with loss_parallel() if plan == "loss" else nullcontext():
            norms = train(model, optimizers[1], mesh, range(3))
        assert norms == pytest.approx(expected, rel=1e-5), f"{plan}: norms {norms} for {expected}"
        differences(model.state_dict(), plain.state_dict())
        # Full states of the optimizer: gathered over both axes, and cut along them.
        full = full_optim_state_dict(model, optimizers[1], recipient_rank=None)
        of_plain = full_optim_state_dict(plain, optimizers[0])
        for key in ("exp_avg", "exp_avg_sq"):
            found, whole = ({name: slots[key] for name, slots in each["state"].items()} for each in (full, of_plain))
            differences(found, whole)
        for cpu_offload in (False, True):  # By torch's function, on all ranks or on rank 0 alone.
            asked = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
            given = get_optimizer_state_dict(model, optimizers[1], options=asked)
            if not cpu_offload or dist.get_rank() == 0:
                assert_equal(given["state"], full["state"], plan)
            else:
                assert not given, f"{plan}: rank {dist.get_rank()} got {list(given)}"
        other = sharded(mesh, plan, seed=5)
        other.load_state_dict(plain.state_dict())
        fresh = adamw(other)
        fresh.load_state_dict(shard_optim_state_dict(of_plain, other, fresh))
        train(plain, optimizers[0], None, range(3, 4))
        with loss_parallel() if plan == "loss" else nullcontext():
            train(other, fresh, mesh, range(3, 4))
        differences(other.state_dict(), plain.state_dict())


@pytest.mark.ranks(2)
def test_one_norm_is_of_shards_and_dtensors_together() -> None:
    """Shards, DTensors beside them whose gradient is a partial sum, and plain parameters, in one call."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.ParameterList([torch.randn(4, 3), torch.randn(6), torch.randn(2)])
    for param in plain:
        param.grad = torch.randn_like(param)
    layer = nn.Linear(3, 4, bias=False)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    mine = next(layer.parameters())
    rank = dist.get_rank()
    mine.grad = plain[0].grad.clone()
    beside = nn.Parameter(distribute_tensor(plain[1].detach(), mesh["tp"], [Replicate()]))
    from torch.distributed.tensor import Partial

    summand = plain[1].grad / 4 * (1 if rank == 0 else 3)
    beside.grad = DTensor.from_local(summand, mesh["tp"], [Partial()], run_check=False)
    split = nn.Parameter(distribute_tensor(plain[2].detach(), mesh["tp"], [Shard(0)]))
    split.grad = distribute_tensor(plain[2].grad, mesh["tp"], [Shard(0)])
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    norm = torch.nn.utils.clip_grad_norm_([mine, beside, split], 0.5)
    assert torch.allclose(norm, expected), f"norm {norm} for {expected}"
    assert torch.allclose(mine.grad, plain[0].grad), "the shard's gradient"
    for param, whole in ((beside, plain[1]), (split, plain[2])):
        assert torch.allclose(param.grad.full_tensor(), whole.grad), f"the gradient in {param.grad.placements}"


@pytest.mark.ranks(4)
def test_device_mesh_and_placements_are_the_user_s() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(layers, mesh["dp"])
    expected = [(Shard(0), Shard(0)), (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(0), Replicate())]
    assert [param.placements for param in layers.parameters()] == expected
    assert all(param.device_mesh == mesh for param in layers.parameters())
    again = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))  # an equal mesh made twice
    for part in (init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp")), again):
        layer = nn.Linear(4, 8)
        parallelize_module(layer, again["tp"], ColwiseParallel())
        fully_shard(layer, part["dp"])
        assert layer.weight.device_mesh == again["dp", "tp"]
    layer = fully_shard(nn.Linear(4, 4), mesh["dp"])
    assert (layer.weight.device_mesh, layer.weight.placements) == (mesh["dp"], (Shard(0),))

    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layer = fully_shard(nn.Linear(4, 4), hybrid)
    layer(torch.ones(1, 4)).sum().backward()
    for tensor in (layer.weight, layer.weight.grad):
        assert (tensor.device_mesh, tensor.placements) == (hybrid, (Replicate(), Shard(0)))

    other_order = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    for tp, dp in ((mesh["tp"], mesh["dp"].get_group()), (other_order["tp"], other_order["dp"])):
        column = nn.Linear(4, 8, bias=False)
        parallelize_module(column, tp, ColwiseParallel())
        fully_shard(column, dp)
        with pytest.raises(ShardedTensorError, match="not dimensions of one DeviceMesh in its order"):
            _ = column.weight.device_mesh


@pytest.mark.ranks(2)
def test_what_can_t_be_sharded_further_is_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    axis = mesh["dp"]

    def refused(layer: nn.Module, mesh: DeviceMesh, *texts: str, **options: Any) -> None:
        with pytest.raises((TypeError, ValueError)) as caught:
            fully_shard(layer, **shard_arguments(mesh=mesh, **options))
        assert all(text in str(caught.value) for text in texts), caught.value

    def linear(*placements: Any) -> nn.Module:
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, placements))
        return layer

    several = ("'weight' is a DTensor with the placements", "Shard along one of them")
    refused(linear(Shard(0), Shard(1)), axis, *several)
    by_layer = "'weight' is divided between ranks by its layer"
    refused(linear(Replicate(), Shard(0)), axis, by_layer, flatten_parameters=True)
    layer, on_meta = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, device="meta")
    for each in (layer, on_meta):
        parallelize_module(each, mesh["tp"], ColwiseParallel())
    refused(layer, mesh["tp"], "fully_shard: 'weight' is a shard [2, 4] of a parameter [4, 4]")
    refused(on_meta, axis, "is a DTensor on the meta device", "init=False")
