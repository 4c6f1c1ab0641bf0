"""AdaScale over experts that its ranks divide: the gain is that of one process with the batches of all ranks.

The reference is AdaScale around the undivided model, to which each micro-batch of each rank is a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.mixtral.modeling_mixtral  # noqa: F401  # For the server that ranks are forked from
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from trainings import ExpertBlock, Net, drawn
from transformers import AutoConfig, AutoModelForCausalLM

from scale_adascale import AdaScale, AdaScaleOptions
from scale_checkpoint import checkpoint_wrapper
from scale_core import ShardedGradScaler
from scale_core.comm.group import Group
from scale_core.hooks.source_grads import has_source_grad_hooks
from scale_fsdp import fully_shard
from scale_moe import average_replicated_gradients, parallelize_experts
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe

DIM, STEPS = 6, 3
LR, EPS = 0.1, 1e-2


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.moe = block.moe

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def net(**options: Any) -> Net:
    """Two layers of experts between layers that all ranks have."""
    return Net(2, inputs=DIM, outputs=3, block=lambda: ExpertBlock(DIM, 8, 3, 2, **options))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """Batches of other sizes for each seed."""
    (x,) = drawn(seed, (3 + seed % 3, DIM))
    return (model(x) - 1.5).square().mean()


def transformer(name: str) -> Any:
    """Mixtral has no biases, GPT-OSS has."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 5}
    more: dict[str, Any] = {"head_dim": 4, "layer_types": ["full_attention"] * 2} if name == "gpt_oss" else {}
    config = AutoConfig.for_model(name, **sizes, **heads, max_position_embeddings=32, eos_token_id=None, **more)
    model = AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.4, 0.4)
    return model


def token_loss(model: nn.Module, seed: int) -> Tensor:
    ids = torch.randint(32, (2, 4), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def compare(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    plain: nn.Module,
    loss: Callable[[nn.Module, int], Tensor] = loss_of,
    passes: int = 1,
    scaler: Any = None,
) -> None:
    """Gain, variance and squared gradient of some steps."""
    world, rank = dist.get_world_size(), dist.get_rank()
    make = adam if isinstance(getattr(inner, "optim", inner), torch.optim.Adam) else sgd
    expected = AdaScale(make(plain), num_gradients_to_accumulate=world * passes, process_group=Group())
    optimizer = AdaScale(inner, num_gradients_to_accumulate=passes, options=AdaScaleOptions(grad_scaler=scaler))
    gains = []
    for step in range(STEPS):
        seeds = [100 * step + number for number in range(world * passes)]
        for seed in seeds:
            (loss(plain, seed) / len(seeds)).backward()
        expected.step()
        for number, seed in enumerate(seeds[rank * passes : (rank + 1) * passes]):
            waits = number < passes - 1 and hasattr(model, "no_sync") and step % 2
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                value = loss(model, seed) / passes
                (value if scaler is None else scaler.scale(value)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        moments, known = (list(each._state.estimates.total()) for each in (optimizer, expected))
        assert optimizer.gain() == pytest.approx(expected.gain(), rel=1e-6), f"step {step}"
        assert moments == pytest.approx(known, rel=1e-5), f"step {step}"
        gains.append(optimizer.gain())
        optimizer.zero_grad()
        expected.zero_grad()
    assert len(set(gains)) == STEPS and max(gains) > 1.01  # It is no bound that they have in common.
    optimizer.unhook()
    expected.unhook()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR, eps=EPS)


def checkpointed(model: nn.Module) -> nn.Module:
    """Recomputed by torch's checkpoint in the first block, and by scale-checkpoint in the second."""
    model.blocks[0], model.blocks[1] = Checkpointed(model.blocks[0]), checkpoint_wrapper(model.blocks[1])
    return model


def mesh_of(replicas: int) -> DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "expert"))


def net_on(mesh: DeviceMesh) -> Net:
    return net(process_group=mesh["expert"], batch_process_group=dist.group.WORLD)


def plain_net() -> Net:
    return net(process_group=Group(), batch_process_group=Group())


@pytest.mark.composition("scale-adascale", "scale-moe")
@pytest.mark.parametrize("ranks, build, passes", [(2, sgd, 1), (2, adam, 3), (4, adam, 2)])
@pytest.mark.ranks("ranks", in_turn=True)
def test_the_gain_over_one_axis_is_that_of_one_process(
    ranks: int, build: Callable[[nn.Module], torch.optim.Optimizer], passes: int
) -> None:
    """No replicas: each rank has experts of its own. Three of them do not divide, and one of four ranks has none."""
    model = net_on(mesh_of(1))
    average_replicated_gradients(model)
    compare(model, build(model), plain_net(), passes=passes)


@pytest.mark.ranks(2, in_turn=True)
def test_experts_without_tokens_count_as_zeros() -> None:
    """Experts 1 and 2 get none, on all ranks but the first there is nothing to do."""
    models = [net_on(mesh_of(1)), plain_net()]
    for model in models:
        for block in model.blocks:
            block.moe.route = partial(to_first, block.moe.route)  # type: ignore[method-assign]
    average_replicated_gradients(models[0])
    compare(models[0], sgd(models[0]), models[1])


def to_first(route: Callable[[Tensor], Any], scores: Tensor) -> Any:
    routing = route(scores)
    return routing._replace(expert_index=torch.where(routing.expert_index == routing.expert_index[:, :1], 0, -1))


@pytest.mark.composition("scale-adascale", "scale-checkpoint", "scale-moe")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.ranks(2, in_turn=True)
def test_recomputed_experts_are_measured_once(passes: int) -> None:
    model = checkpointed(net_on(mesh_of(1)))
    average_replicated_gradients(model)
    compare(model, sgd(model), plain_net(), passes=passes)


@pytest.mark.composition("scale-adascale", "scale-moe", "DistributedDataParallel")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.ranks(4, in_turn=True)
def test_the_gain_beside_ddp_is_that_of_one_process(passes: int) -> None:
    mesh = mesh_of(2)
    model = net_on(mesh)
    average_replicated_gradients(model, mesh["expert"])
    wrapped = DistributedDataParallel(model, process_group=mesh["replica"].get_group())
    compare(wrapped, adam(model), plain_net(), passes=passes)


@pytest.mark.composition("scale-adascale", "scale-moe", "ShardedDataParallel")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.ranks(4, in_turn=True)
def test_the_gain_beside_oss_is_that_of_one_process(passes: int) -> None:
    mesh = mesh_of(2)
    model = net_on(mesh)
    average_replicated_gradients(model, mesh["expert"])
    replicas = mesh["replica"].get_group()
    optimizer = OSS(model.parameters(), torch.optim.Adam, lr=LR, eps=EPS, process_group=replicas)
    wrapped = ShardedDataParallel(model, optimizer, process_group=replicas)
    compare(wrapped, optimizer, plain_net(), passes=passes)


@pytest.mark.composition("scale-adascale", "scale-moe", "scale-fsdp")
@pytest.mark.parametrize(
    "ranks, passes, how", [(2, 2, ""), (4, 1, ""), (4, 2, ""), (4, 2, "recomputed"), (4, 1, "scaled")]
)
@pytest.mark.ranks("ranks", in_turn=True)
def test_the_gain_under_fully_shard_is_that_of_one_process(ranks: int, passes: int, how: str) -> None:
    mesh = mesh_of(ranks // 2)
    model = net_on(mesh)
    if how == "recomputed":
        checkpointed(model)
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh["replica"])
        fully_shard(block)
    fully_shard(model)
    scaler = ShardedGradScaler(init_scale=256.0) if how == "scaled" else None
    compare(model, adam(model), plain_net(), passes=passes, scaler=scaler)


@pytest.mark.composition("scale-adascale", "scale-moe")
@pytest.mark.parametrize(
    "ranks, name, passes, shard",
    [(2, "mixtral", 1, False), (2, "gpt_oss", 2, False), (4, "gpt_oss", 1, False), (4, "gpt_oss", 2, True)],
)
@pytest.mark.ranks("ranks", in_turn=True)
def test_the_gain_of_a_transformer_is_that_of_one_process(ranks: int, name: str, passes: int, shard: bool) -> None:
    mesh, model = mesh_of(ranks // 2), transformer(name)
    parallelize_experts(model, mesh["expert"])
    if shard:
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, mesh["replica"])
        fully_shard(model)
        wrapped = model
    else:
        average_replicated_gradients(model, mesh["expert"])
        replica = mesh["replica"].get_group()
        wrapped = model if ranks == 2 else DistributedDataParallel(model, process_group=replica)
    compare(wrapped, sgd(model), transformer(name), token_loss, passes)


@pytest.mark.ranks(2, in_turn=True)
def test_wrong_use_of_divided_experts_is_refused() -> None:
    model = net_on(mesh_of(1))
    average_replicated_gradients(model)
    value = loss_of(model, 0)
    optimizer = AdaScale(sgd(model))
    with pytest.raises(
        RuntimeError, match=r"one gradient for the samples of several ranks, and .* The forward ran before"
    ):
        value.backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"two gradients of the samples of one rank in one backward pass"):
        (loss_of(model, 0) + loss_of(model, 1)).backward()
    optimizer.zero_grad()
    handle = model.blocks[0].moe.experts.down_proj.register_hook(doubled)
    with pytest.raises(RuntimeError, match=r"has a hook, and its gradient is measured before hooks are called"):
        loss_of(model, 0).backward()
    handle.remove()
    optimizer.zero_grad()
    optimizer.unhook()
    assert not has_source_grad_hooks()


def doubled(grad: Tensor) -> Tensor:
    return 2 * grad


@pytest.mark.ranks(2, in_turn=True)
def test_passes_that_are_not_of_the_step_count_as_nothing() -> None:
    """Evaluation, `torch.autograd.grad`, and experts to an AdaScale of others; averages begin after both were built."""
    model, plain = net_on(mesh_of(1)), plain_net()
    others = AdaScale(torch.optim.SGD([*model.embed.parameters(), *model.head.parameters()], lr=LR))
    optimizer = AdaScale(sgd(model))
    average_replicated_gradients(model)
    with torch.no_grad():
        loss_of(model, 5)
    torch.autograd.grad(loss_of(model, 5), list(model.parameters()))
    loss_of(model, dist.get_rank()).backward()
    expected = AdaScale(sgd(plain), num_gradients_to_accumulate=2, process_group=Group())
    for seed in range(2):
        (loss_of(plain, seed) / 2).backward()
    assert optimizer.gain() == pytest.approx(expected.gain(), rel=1e-6)
    assert 1 < others.gain() != optimizer.gain()
    for each in (optimizer, others, expected):
        each.unhook()


@pytest.mark.ranks(2, in_turn=True)
def test_frozen_experts_are_not_measured() -> None:
    models = [net_on(mesh_of(1)), plain_net()]
    for model in models:
        for block in model.blocks:
            block.moe.experts.down_proj.requires_grad_(False)
    average_replicated_gradients(models[0])
    compare(models[0], sgd(models[0]), models[1], passes=2)


@pytest.mark.ranks(4, in_turn=True)
def test_groups_that_do_not_fit_are_refused() -> None:
    mesh = mesh_of(2)
    model = net_on(mesh)
    average_replicated_gradients(model, mesh["expert"])
    with pytest.raises(
        ValueError, match=r"of the samples of the ranks \[.*\], which divide experts and have other data"
    ):
        AdaScale(sgd(model), process_group=mesh["replica"])
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "tensor"))
    model = net(process_group=both, batch_process_group=dist.group.WORLD)
    for group in (None, both["expert"]):
        with pytest.raises(ValueError, match=r"hidden features are divided between ranks as well.*mesh\[.expert.\]"):
            AdaScale(sgd(model), process_group=group)


def stages(group: Any) -> nn.Sequential:
    """Experts in the first stage of two, and in the middle ones of four; fp64."""
    torch.manual_seed(0)
    options = {"process_group": group, "batch_process_group": group}
    first, second = (ExpertBlock(DIM, 8, 3, 2, **options) for _ in range(2))
    layers = [first, nn.Linear(DIM, DIM), nn.Tanh(), second]
    return nn.Sequential(*layers, nn.Linear(DIM, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3)).double()


def chunks_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, target = (torch.randn(8, width, generator=generator, dtype=torch.float64) for width in (DIM, 3))
    return x, target - 1.5


@pytest.mark.composition("scale-adascale", "scale-pipe", "scale-moe")
@pytest.mark.parametrize("schedule, num_stages", [("1f1b", 2), ("zb_v", 4)])
@pytest.mark.ranks(4, in_turn=True)
def test_the_gain_inside_a_pipeline_is_that_of_one_process(schedule: str, num_stages: int) -> None:
    """Each of four micro-batches of each of two ranks is a sample."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "expert"))
    balance = [8 // num_stages] * num_stages
    pipe = DistributedPipe(stages(mesh["expert"]), schedule, balance=balance, chunks=4, process_group=mesh["stage"])
    average_replicated_gradients(pipe, mesh["expert"])
    groups: Any = {"process_group": mesh["expert"], "model_parallel_group": mesh["stage"]}
    optimizer = AdaScale(torch.optim.SGD(pipe.parameters(), lr=LR), num_gradients_to_accumulate=4, **groups)
    plain = stages(Group())
    alone: Any = {"num_gradients_to_accumulate": 8, "process_group": Group()}
    expected = AdaScale(torch.optim.SGD(plain.parameters(), lr=LR), **alone)
    for step in range(3):
        for rank in range(2):
            for x, target in zip(*(each.chunk(4) for each in chunks_of(step, rank)), strict=True):
                (F.mse_loss(plain(x), target) / 8).backward()
        x, target = chunks_of(step, mesh["expert"].get_local_rank())
        pipe.step(x, target=target, loss_fn=F.mse_loss)
        assert optimizer.gain() == pytest.approx(expected.gain(), rel=1e-9), f"{schedule}, step {step}"
        assert optimizer.gain() > 1.01
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    optimizer.unhook()
    expected.unhook()
