"""What the promise of transparency is tested with: small models, ways to shard them, and the stated reference.

The reference is a plain model on one process. The gradient of each rank's micro-batch is computed alone, in the dtypes
of the policy; then they are summed in rank order, divided by the number of ranks, and a plain optimizer steps.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from scale_core.comm.group import group_of
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from scale_fsdp.fully_sharded_data_parallel import shard_for_wrapper
from scale_fsdp.runtime.unit import units_in

DIM, TOKENS, VOCABULARY = 6, 5, 11


class Block(nn.Module):
    """Attention and a perceptron, pre-norm; prime sizes, so that no shard ends where a tensor does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.up = nn.Linear(DIM, 13)
        self.down = nn.Linear(13, DIM, bias=False)
        self.checkpointing = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing.startswith("inside"):
            return _checkpointed(self.body, x, self.checkpointing)
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """A small transformer over tokens ("gpt"; its head is its embedding) or over vectors ("mlp")."""

    def __init__(self, kind: str = "gpt", checkpointing: str = "", blocks: int = 3) -> None:
        super().__init__()
        self.kind, self.checkpointing = kind, checkpointing
        self.embed: nn.Module = nn.Embedding(VOCABULARY, DIM) if kind == "gpt" else nn.Linear(3, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(DIM, VOCABULARY, bias=kind != "gpt")
        if kind == "gpt":
            self.head.weight = self.embed.weight
        for block in self.blocks:
            block.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.checkpointing.startswith("several"):
            x = _checkpointed(lambda y: self.blocks[1](self.blocks[0](y)), x, self.checkpointing)
            for block in self.blocks[2:]:
                x = block(x)
        else:
            for block in self.blocks:
                x = _checkpointed(block, x, self.checkpointing) if "around" in self.checkpointing else block(x)
        return self.head(x)


def _checkpointed(function: Any, x: Tensor, how: str) -> Tensor:
    output: Tensor = checkpoint(function, x, use_reentrant=how.endswith("reentrant"))
    return output


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}

PRECISIONS: dict[str, MixedPrecisionPolicy] = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, fp32 reduction": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32),
}


@dataclass(frozen=True)
class Case:
    """One way to train; its defaults are the plainest.

    Attributes:
        wrapping: "root", "blocks", "deep" (linears inside blocks inside the root) or "leaves".
        accumulate: Micro-batches per step; `no_sync` around all but the last.
        checkpointing: "", or "inside", "around" or "several" units, with " reentrant".
        placement: Arguments of `FullyShardedDataParallel` that say what lives on the host.
        replicas: Copies of the model, each sharded over its part of the ranks.
    """

    model: str = "gpt"
    optimizer: str = "adam"
    wrapping: str = "blocks"
    reshard: bool | int = True
    precision: str = "fp32"
    accumulate: int = 1
    no_sync: bool = False
    checkpointing: str = ""
    clip: bool = False
    flatten: bool = False
    wrapper: bool = False
    placement: tuple[tuple[str, bool], ...] = ()
    replicas: int = 1
    steps: int = 5

    def build(self) -> Net:
        torch.manual_seed(7)
        return Net(self.model)


def shard(model: nn.Module, case: Case, process_group: Any = None) -> nn.Module:
    """Shards the model in place, in the way that the case says."""
    kwargs: dict[str, Any] = {
        "reshard_after_forward": case.reshard,
        "mixed_precision": PRECISIONS[case.precision],
        "flatten_parameters": case.flatten,
        "process_group": process_group,
        **dict(case.placement),
    }
    if case.replicas > 1:
        shape = (case.replicas, group_of().size // case.replicas)
        kwargs["process_group"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shard"))
    inner: list[nn.Module] = []
    if case.wrapping == "leaves":
        inner = [m for m in model.modules() if not list(m.children())]
    elif case.wrapping == "deep":
        inner = [m for block in model.blocks for m in (block.qkv, block.up, block)]
    elif case.wrapping == "blocks":
        inner = list(model.blocks)
    inside = dataclasses.replace(PRECISIONS[case.precision], output_dtype=None)
    for module in inner:
        _shard(module, {**kwargs, "mixed_precision": inside})
    return FullyShardedDataParallel(model, **kwargs) if case.wrapper else _shard(model, kwargs)


def _shard(module: nn.Module, kwargs: dict[str, Any]) -> nn.Module:
    """By torch's names, or FairScale's where only those can say it."""
    if "move_params_to_cpu" in kwargs:
        return shard_for_wrapper(module, **kwargs)
    names = {"mixed_precision": "mp_policy", "process_group": "mesh"}
    return fully_shard(module, **{names.get(name, name): value for name, value in kwargs.items()})


def batch(model: str, *seed: int, size: int = 2) -> Tensor:
    """The same batch on every rank for the same seed: int64 [size, TOKENS] or fp32 [size, TOKENS, 3]."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    if model == "gpt":
        return torch.randint(VOCABULARY, (size, TOKENS), generator=generator)
    return torch.randn(size, TOKENS, 3, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    """Any loss will do that every output element has its own part in."""
    weights = torch.arange(1, output.numel() + 1, dtype=torch.float32).view(output.shape) / output.numel()
    return (output.float() - weights).square().mean()


@dataclass
class Reference:
    """The plain model that all ranks together must equal.

    Attributes:
        world: The number of ranks it stands for.
        replicas: Copies of the model among them; averages are taken in each, then of those.
    """

    model: nn.Module
    world: int
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    replicas: int = 1

    def gradients(self, batches: Sequence[Sequence[Tensor]], no_sync: bool = False) -> list[list[float]]:
        """Puts the gradients of one step into the model; returns the losses, by rank and micro-batch."""
        results = [[self._alone(data) for data in micro_batches] for micro_batches in batches]
        params = dict(self.model.named_parameters())
        for name, param in params.items():
            param.grad = None
            per_rank = [[grads.get(name) for _, grads in result] for result in results]
            if no_sync:
                self._reduce(param, [_sum([g.to(param.dtype) for g in grads if g is not None]) for grads in per_rank])
            else:
                for grads in zip(*per_rank, strict=True):
                    self._reduce(param, list(grads))
        return [[loss for loss, _ in result] for result in results]

    def _alone(self, data: Tensor) -> tuple[float, dict[str, Tensor]]:
        """One rank's loss and gradients, computed in the policy's dtypes."""
        replica, dtype = copy.deepcopy(self.model), self.precision.param_dtype
        if dtype is not None:
            for param in replica.parameters():
                param.data = param.data.to(dtype)
            data = data.to(dtype) if data.is_floating_point() else data
        replica.zero_grad()
        output = replica(data)
        if self.precision.output_dtype is not None:
            output = output.to(self.precision.output_dtype)
        loss = loss_of(output)
        loss.backward()
        return loss.item(), {name: p.grad for name, p in replica.named_parameters() if p.grad is not None}

    def _reduce(self, param: nn.Parameter, grads: Sequence[Tensor | None]) -> None:
        if all(grad is None for grad in grads):
            return
        wire = self.precision.reduce_dtype or self.precision.param_dtype or param.dtype
        summands = [torch.zeros_like(param) if g is None else g.to(wire).to(param.dtype) for g in grads]
        size = self.world // self.replicas
        mean = _mean([_mean(summands[first : first + size]) for first in range(0, self.world, size)])
        param.grad = mean if param.grad is None else param.grad + mean


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return _sum(tensors) / len(tensors) if len(tensors) > 1 else tensors[0]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def local_grads(model: nn.Module) -> Iterator[tuple[str, int, int, Tensor | None]]:
    """Yields each parameter's name, its range on this rank and the gradient [stop - start] of that range."""
    for name, param in model.named_parameters():
        if not name.rpartition(".")[2].startswith("flat_param_"):
            shard = shard_of(param)
            assert shard is not None
            yield name, shard.start, shard.stop, None if param.grad is None else local_tensor(param.grad).reshape(-1)
    for buffer in (buffer for unit in units_in(model) for buffer in unit.buffers if buffer.flatten):
        grad = buffer.sharded_params[0].grad
        for name, span in zip(buffer.names, buffer.spans, strict=True):
            mine = None if grad is None else local_tensor(grad).narrow(0, span.shard_offset, span.numel)
            yield name, span.start, span.stop, mine


def differing_grads(model: nn.Module, plain: nn.Module) -> list[str]:
    """Names the parameters whose local gradient is not bitwise that part of the plain model's."""
    wanted = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
    wrong = []
    for name, start, stop, grad in local_grads(model):
        whole = wanted[name]
        if whole is None or grad is None:
            if (whole is None) != (grad is None):
                wrong.append(f"gradient of {name}: {'None' if grad is None else 'there'}, plain the other way round")
        elif not torch.equal(grad, whole.reshape(-1)[start:stop]):
            wrong.append(f"gradient of {name}: {_distance(grad, whole.reshape(-1)[start:stop])}")
    return wrong


def differing_weights(model: nn.Module, plain: nn.Module | Mapping[str, Tensor]) -> list[str]:
    """Names the entries of the two state dicts that are not bitwise equal; all ranks call it together."""
    ours, theirs = model.state_dict(), plain.state_dict() if isinstance(plain, nn.Module) else plain
    wrong = [f"only one has {name}" for name in set(ours) ^ set(theirs)]
    return wrong + [
        f"{name}: {_distance(ours[name], theirs[name])}"
        for name in ours
        if name in theirs and not (ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]))
    ]


def is_norm_of(norm: Tensor, grads: Sequence[Tensor]) -> bool:
    """Whether a norm is the 2-norm of fp32 gradients.

    Of a long gradient, 256 squares at a time are added in fp32: in any order, their sum is off by 2e-5 at most.
    """
    expected = torch.nn.utils.get_total_norm([grad.double() for grad in grads])
    return torch.allclose(norm.double(), expected, rtol=1e-5, atol=0.0)


def _distance(ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
    return f"off by up to {(ours.double() - theirs.double()).abs().max().item():.3g} ({ours.dtype}, {theirs.dtype})"


def train_beside_reference(case: Case, process_group: Any = None) -> list[str]:
    """Trains sharded and plain side by side; returns whatever is not bitwise equal on this rank."""
    group = group_of(process_group)
    plain = case.build()
    model = copy.deepcopy(plain)
    model.checkpointing = case.checkpointing
    for block in model.blocks:
        block.checkpointing = case.checkpointing
    model = shard(model, case, process_group)
    cls, kwargs = OPTIMIZERS[case.optimizer]
    optimizer, plain_optimizer = cls(model.parameters(), **kwargs), cls(plain.parameters(), **kwargs)
    reference = Reference(plain, group.size, PRECISIONS[case.precision], case.replicas)
    wrong: list[str] = []
    for step in range(case.steps):
        data = [[batch(case.model, step, rank, m) for m in range(case.accumulate)] for rank in range(group.size)]
        expected = reference.gradients(data, case.no_sync)[group.rank]
        losses = accumulate(model, data[group.rank], case.no_sync)
        if losses != expected:
            wrong.append(f"losses {losses} instead of {expected}")
        wrong += differing_grads(model, plain)
        if case.clip:
            wrong += clip_both(model, plain)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
        if wrong:
            return [f"rank {group.rank} of {group.size}, step {step}, {case}: {line}" for line in wrong]
    return [f"rank {group.rank} of {group.size}, {case}: {line}" for line in differing_weights(model, plain)]


def accumulate(model: nn.Module, micro_batches: Sequence[Tensor], no_sync: bool) -> list[float]:
    """One step's backward passes; returns the losses."""
    losses = []
    for number, data in enumerate(micro_batches):
        if no_sync and number < len(micro_batches) - 1:
            with model.no_sync():
                loss = loss_of(model(data))
                loss.backward()
        else:
            loss = loss_of(model(data))
            loss.backward()
        losses.append(loss.item())
    return losses


def clip_both(model: nn.Module, plain: nn.Module) -> list[str]:
    """Clips; norms may differ by rounding, so the plain gradients are scaled by the sharded model's norm."""
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    norm = model.clip_grad_norm_(0.3)
    wrong = [] if is_norm_of(norm, grads) else [f"norm {norm.item()!r} instead of the plain model's"]
    torch._foreach_mul_(grads, torch.clamp(0.3 / (norm + 1e-6), max=1.0))
    return wrong


def run_cases(cases: Sequence[Case]) -> list[str]:
    """Trains every case in turn, for `run_ranks`; returns what was wrong in the first that differs."""
    for case in cases:
        try:
            wrong = train_beside_reference(case)
        except BaseException as error:
            error.add_note(f"in {case}")
            raise
        if wrong:
            return wrong
    return []


def pairwise(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns few combinations in which every two values of every two settings meet (greedy, deterministic)."""
    names = list(choices)
    everything = [dict(zip(names, values, strict=True)) for values in itertools.product(*choices.values())]
    pairs_of = [set(itertools.combinations(sorted((k, repr(v)) for k, v in one.items()), 2)) for one in everything]
    missing = set().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(everything)), key=lambda i: len(pairs_of[i] & missing))
        chosen.append(everything[best])
        missing -= pairs_of[best]
    return chosen
