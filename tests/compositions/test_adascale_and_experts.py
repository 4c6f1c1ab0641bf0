"""AdaScale over experts that its ranks divide: the gain is that of one process with the batches of all ranks.

The reference is the undivided model, which computes the gradient of each micro-batch of each rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
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
from trainings import assert_same_gains, drawn, gains_of_one_process, outcomes
from transformers import AutoConfig, AutoModelForCausalLM

from scale_adascale import AdaScale
from scale_checkpoint import checkpoint_wrapper
from scale_core import ShardedGradScaler
from scale_core.comm.group import Group
from scale_core.hooks.source_grads import has_source_grad_hooks
from scale_fsdp import fully_shard
from scale_moe import MoE, average_replicated_gradients, parallelize_experts
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe

DIM, STEPS = 6, 5
LR, EPS = 0.1, 1e-2


class Block(nn.Module):
    def __init__(self, num_experts: int, routing: Any, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoE(DIM, 8, num_experts, routing, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.moe = block.moe

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Net(nn.Module):
    """Two layers of experts between layers that all ranks have."""

    def __init__(
        self,
        num_experts: int = 3,
        routing: Any = 2,
        **options: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(num_experts, routing, **options) for _ in range(2))
        self.head = nn.Linear(DIM, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


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
    return model.double()


def token_loss(model: nn.Module, seed: int) -> Tensor:
    ids = torch.randint(32, (2, 4), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def measured(optimizer: AdaScale) -> list[float]:
    """The gain, and the moving averages of the variance and of the squared gradient."""
    return [optimizer.gain(), *optimizer._state.estimates.total()]


def compare(
    model: nn.Module,
    build: Callable[[nn.Module], torch.optim.Optimizer] | torch.optim.Optimizer,
    plain: nn.Module,
    loss_of: Callable[[nn.Module, int], Tensor] = loss_of,
    passes: int = 1,
    scaler: Any = None,
) -> None:
    """Compares five steps with those of the undivided model on one process."""
    num_samples, rank = dist.get_world_size() * passes, dist.get_rank()
    inner = build if isinstance(build, torch.optim.Optimizer) else build(model)
    is_adam = isinstance(getattr(inner, "optim", inner), torch.optim.Adam)
    expected = gains_of_one_process(
        plain, adam(plain) if is_adam else sgd(plain), loss_of, num_samples, STEPS, measure=measured
    )
    optimizer = AdaScale(inner, num_gradients_to_accumulate=passes, grad_scaler=scaler)
    gains = []
    for step in range(STEPS):
        for number in range(passes):
            waits = number < passes - 1 and hasattr(model, "no_sync") and step % 2
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                loss = loss_of(model, num_samples * step + rank * passes + number) / passes
                (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        gains.append(measured(optimizer))
        optimizer.zero_grad()
    optimizer.unhook()
    assert len({gain for gain, *_ in gains}) == STEPS, gains  # It is no bound that they have in common.
    assert_same_gains(expected, gains)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=LR)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR, eps=EPS)


def recomputed(model: nn.Module) -> nn.Module:
    """By torch's checkpoint in the first block, and by scale-checkpoint in the second."""
    model.blocks[0], model.blocks[1] = Checkpointed(model.blocks[0]), checkpoint_wrapper(model.blocks[1])
    return model


def mesh_of(replicas: int) -> DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "expert"))


def divided_net(mesh: DeviceMesh, averages: bool = True) -> Net:
    model = Net(process_group=mesh["expert"], batch_process_group=dist.group.WORLD)
    if averages:
        average_replicated_gradients(model, mesh["expert"])
    return model


def plain_net() -> Net:
    return Net(process_group=Group(), batch_process_group=Group())


def one_axis(build: Callable[[nn.Module], torch.optim.Optimizer], passes: int, recompute: bool = False) -> None:
    """No replicas: each rank has experts of its own. Three of them do not divide, and one of four ranks has none."""
    model = divided_net(mesh_of(1))
    compare(recomputed(model) if recompute else model, build, plain_net(), passes=passes)


def all_tokens_to_one_expert() -> None:
    """Experts 1 and 2 get none, on all ranks but the first there is nothing to do."""
    model, plain = divided_net(mesh_of(1)), plain_net()
    for block in (*model.blocks, *plain.blocks):
        block.moe.route = partial(to_first, block.moe.route)  # type: ignore[method-assign]
    compare(model, sgd, plain)


def to_first(route: Callable[[Tensor], Any], scores: Tensor) -> Any:
    routing = route(scores)
    return routing._replace(expert_index=torch.where(routing.expert_index == routing.expert_index[:, :1], 0, -1))


def frozen_experts() -> None:
    model, plain = divided_net(mesh_of(1)), plain_net()
    for block in (*model.blocks, *plain.blocks):
        block.moe.experts.down_proj.requires_grad_(False)
    compare(model, sgd, plain, passes=2)


def beside_ddp(passes: int) -> None:
    mesh = mesh_of(2)
    wrapped = DistributedDataParallel(divided_net(mesh), process_group=mesh["replica"].get_group())
    compare(wrapped, adam, plain_net(), passes=passes)


def beside_oss(passes: int) -> None:
    mesh = mesh_of(2)
    model, replicas = divided_net(mesh), mesh["replica"].get_group()
    optimizer = OSS(model.parameters(), torch.optim.Adam, lr=LR, eps=EPS, process_group=replicas)
    compare(ShardedDataParallel(model, optimizer, process_group=replicas), optimizer, plain_net(), passes=passes)


def under_fully_shard(replicas: int, passes: int, scaled: bool = False, recompute: bool = False) -> None:
    mesh = mesh_of(replicas)
    model = divided_net(mesh, averages=False)
    if recompute:
        recomputed(model)
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh["replica"])
        fully_shard(block)
    fully_shard(model)
    scaler = ShardedGradScaler(init_scale=256.0) if scaled else None
    compare(model, adam, plain_net(), passes=passes, scaler=scaler)


def of_transformers(name: str, passes: int, replicas: int = 1, shard: bool = False) -> None:
    mesh, model = mesh_of(replicas), transformer(name)
    parallelize_experts(model, mesh["expert"])
    wrapped = model
    if shard:
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, mesh["replica"])
        fully_shard(model)
    else:
        average_replicated_gradients(model, mesh["expert"])
        if replicas > 1:
            wrapped = DistributedDataParallel(model, process_group=mesh["replica"].get_group())
    compare(wrapped, sgd, transformer(name), token_loss, passes)


def wrong_use_of_divided_experts() -> None:
    model = divided_net(mesh_of(1))
    loss = loss_of(model, 0)
    optimizer = AdaScale(sgd(model))
    with pytest.raises(RuntimeError, match=r"of several ranks, and not of each by itself, as where the forward"):
        loss.backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"two gradients of the samples of one rank in one backward pass"):
        (loss_of(model, 0) + loss_of(model, 1)).backward()
    optimizer.zero_grad()
    handle = model.blocks[0].moe.experts.down_proj.register_hook(lambda grad: 2 * grad)
    with pytest.raises(RuntimeError, match=r"has a hook, and its gradient is measured before hooks are called"):
        loss_of(model, 0).backward()
    handle.remove()
    optimizer.zero_grad()
    optimizer.unhook()
    assert not has_source_grad_hooks()


def passes_that_are_not_of_the_step() -> None:
    """Evaluation, `torch.autograd.grad`, and experts to an AdaScale of others; averages begin after both were built."""
    model, plain = divided_net(mesh_of(1), averages=False), plain_net()
    others = AdaScale(torch.optim.SGD([*model.up.parameters(), *model.head.parameters()], lr=LR))
    optimizer = AdaScale(sgd(model))
    average_replicated_gradients(model)
    with torch.no_grad():
        loss_of(model, 5)
    torch.autograd.grad(loss_of(model, 5), list(model.parameters()))
    loss_of(model, dist.get_rank()).backward()
    ((expected, _),) = gains_of_one_process(plain, sgd(plain), loss_of, 2, 1)
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)
    assert 1 < others.gain() != optimizer.gain()
    optimizer.unhook()
    others.unhook()


def groups_that_do_not_fit() -> None:
    mesh = mesh_of(2)
    model = divided_net(mesh)
    with pytest.raises(
        ValueError, match=r"of the samples of the ranks \[.*\], which divide experts and have other data"
    ):
        AdaScale(sgd(model), process_group=mesh["replica"])
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "tensor"))
    model = Net(process_group=both, batch_process_group=dist.group.WORLD)
    for group in (None, both["expert"]):
        with pytest.raises(ValueError, match=r"hidden features are divided between ranks as well.*mesh\[.expert.\]"):
            AdaScale(sgd(model), process_group=group)


def stages(group: Any) -> nn.Sequential:
    """Experts in the first stage of two, and in the middle ones of four."""
    torch.manual_seed(0)
    options = {"process_group": group, "batch_process_group": group}
    layers = [Block(3, 2, **options), nn.Linear(DIM, DIM), nn.Tanh(), Block(3, 2, **options)]
    return nn.Sequential(*layers, nn.Linear(DIM, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3)).double()


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x, target = drawn(10 * step + rank, (8, DIM), (8, 3))
    return x, target - 1.5


def micro_batch_loss(model: nn.Module, number: int) -> Tensor:
    """Of the eight micro-batches of a step, four of each rank."""
    step, rest = divmod(number, 8)
    x, target = (whole.chunk(4)[rest % 4] for whole in batch_of(step, rest // 4))
    return F.mse_loss(model(x), target)


def inside_a_pipeline(schedule: str, num_stages: int) -> None:
    """Each of four micro-batches of each of two ranks is a sample."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "expert"))
    balance = [8 // num_stages] * num_stages
    pipe = DistributedPipe(stages(mesh["expert"]), schedule, balance=balance, chunks=4, process_group=mesh["stage"])
    average_replicated_gradients(pipe, mesh["expert"])
    groups: Any = {"process_group": mesh["expert"], "model_parallel_group": mesh["stage"]}
    optimizer = AdaScale(sgd(pipe), num_gradients_to_accumulate=4, **groups)
    plain, gains = stages(Group()), []
    for step in range(3):
        x, target = batch_of(step, mesh["expert"].get_local_rank())
        pipe.step(x, target=target, loss_fn=F.mse_loss)
        optimizer.step()
        gains.append([optimizer.gain()])
        optimizer.zero_grad()
    optimizer.unhook()
    expected = gains_of_one_process(plain, sgd(plain), micro_batch_loss, 8, 3)
    assert_same_gains([row[:1] for row in expected], gains, rel=1e-9)


ON_TWO: dict[str, Callable[[], None]] = {
    "wrong use": wrong_use_of_divided_experts,
    "passes that are not of the step": passes_that_are_not_of_the_step,
    "frozen": frozen_experts,
    "a pass": partial(one_axis, sgd, 1),
    "passes of Adam": partial(one_axis, adam, 3),
    "all tokens to one": all_tokens_to_one_expert,
    "recomputed": partial(one_axis, sgd, 1, recompute=True),
    "recomputed passes": partial(one_axis, sgd, 2, recompute=True),
    "mixtral": partial(of_transformers, "mixtral", 1),
    "gpt_oss": partial(of_transformers, "gpt_oss", 2),
    "fully_shard": partial(under_fully_shard, 1, 2),
}
ON_FOUR: dict[str, Callable[[], None]] = {
    "groups that do not fit": groups_that_do_not_fit,
    "a rank without experts": partial(one_axis, adam, 2),
    **{f"ddp, {passes}": partial(beside_ddp, passes) for passes in (1, 2)},
    **{f"oss, {passes}": partial(beside_oss, passes) for passes in (1, 2)},
    **{f"fully_shard, {passes}": partial(under_fully_shard, 2, passes) for passes in (1, 2)},
    "fully_shard, recomputed": partial(under_fully_shard, 2, 2, recompute=True),
    "fully_shard, scaled": partial(under_fully_shard, 2, 1, scaled=True),
    "gpt_oss, ddp": partial(of_transformers, "gpt_oss", 1, replicas=2),
    "gpt_oss, fully_shard": partial(of_transformers, "gpt_oss", 2, replicas=2, shard=True),
    "1f1b": partial(inside_a_pipeline, "1f1b", 2),
    "zb_v": partial(inside_a_pipeline, "zb_v", 4),
}


def run_case(name: str, folder: Path) -> None:
    {2: ON_TWO, 4: ON_FOUR}[dist.get_world_size()][name]()


on_two_ranks, on_four_ranks = outcomes(run_case, ON_TWO, 2), outcomes(run_case, ON_FOUR, 4)
Results = Callable[[str], Sequence[None]]


@pytest.mark.composition("scale-adascale", "scale-moe")
@pytest.mark.composition("scale-adascale", "scale-checkpoint", "scale-moe")
@pytest.mark.parametrize("case", ON_TWO)
def test_experts_that_two_ranks_divide(case: str, on_two_ranks: Results) -> None:
    on_two_ranks(case)


@pytest.mark.composition("scale-adascale", "scale-moe", "DistributedDataParallel")
@pytest.mark.composition("scale-adascale", "scale-moe", "ShardedDataParallel")
@pytest.mark.composition("scale-adascale", "scale-moe", "scale-fsdp")
@pytest.mark.composition("scale-adascale", "scale-pipe", "scale-moe")
@pytest.mark.parametrize("case", ON_FOUR)
def test_experts_that_four_ranks_divide_or_replicate(case: str, on_four_ranks: Results) -> None:
    on_four_ranks(case)
