"""What the promise of transparency is tested with: a small transformer, and ways to shard and to train it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fsdp_parity import assert_same_grads, put_mean_grads
from shard_arguments import shard_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

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
    steps: int = 3

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
        FullyShardedDataParallel(module, **kwargs)
        return module
    names = {"mixed_precision": "mp_policy", "process_group": "mesh"}
    return fully_shard(module, **shard_arguments(**{names.get(name, name): value for name, value in kwargs.items()}))


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


def assert_cases_train_as_plain(cases: Sequence[Case]) -> None:
    """Trains every case in turn, sharded and plain, and compares the losses, gradients and weights of each step."""
    for case in cases:
        try:
            _assert_trains_as_plain(case)
        except BaseException as error:
            error.add_note(f"in {case}")
            raise


def _assert_trains_as_plain(case: Case) -> None:
    group, plain = group_of(), case.build()
    model = copy.deepcopy(plain)
    for module in (model, *model.blocks):
        module.checkpointing = case.checkpointing
    model = shard(model, case)
    cls, kwargs = OPTIMIZERS[case.optimizer]
    optimizers = [cls(each.parameters(), **kwargs) for each in (model, plain)]

    def losses_of(replica: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
        for micro_batch in range(case.accumulate):
            yield loss_of(replica(batch(case.model, step, rank, micro_batch)))

    for step in range(case.steps):
        expected = put_mean_grads(
            plain, losses_of, step, group.size, PRECISIONS[case.precision], replicas=case.replicas, no_sync=case.no_sync
        )
        data = [batch(case.model, step, group.rank, micro_batch) for micro_batch in range(case.accumulate)]
        assert accumulate(model, data, case.no_sync) == expected[group.rank], f"losses of step {step}"
        assert_same_grads(model, plain, f"step {step}")
        if case.clip:
            clip_both(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(model, plain)


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


def clip_both(model: nn.Module, plain: nn.Module, max_norm: float = 0.3) -> None:
    """Clips; norms may differ by rounding, so the plain gradients are scaled by the sharded model's norm.

    Of a long gradient, 256 squares at a time are added in fp32: in any order, their sum is off by 2e-5 at most.
    """
    grads = [param.grad for param in plain.parameters() if param.grad is not None]
    norm = model.clip_grad_norm_(max_norm)
    expected = torch.nn.utils.get_total_norm([grad.double() for grad in grads])
    torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0.0)
    torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


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
