"""Optimizers of other packages, three steps over shards beside one process with the batch of all ranks, in float64.

An optimizer gives the weights of one process, or all ranks have an error before a weight changes.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel

STEPS = 3


class Net(nn.Module):
    """Vectors, matrices and a tensor of three dimensions; two ranks do not divide their sizes."""

    def __init__(self, conv: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 9, 3, padding=1) if conv else None
        self.hidden = nn.Linear(9 if conv else 6, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.embed(tokens)
        if self.conv is not None:
            features = self.conv(features.transpose(1, 2)).transpose(1, 2)
        output: Tensor = self.head(torch.tanh(self.hidden(features))).mean(1)
        return output


@dataclass(frozen=True)
class Client:
    """One optimizer.

    Attributes:
        optim: Its class.
        options: For its constructor.
        matrices: Whether it takes parameters of two dimensions only.
        named: Whether it takes names with the parameters.
        group: Options of its group that it has no defaults for.
        modes: Whether it has `train()` and `eval()`, which a program calls around its steps.
    """

    optim: Any
    options: dict[str, Any] = field(default_factory=dict)
    matrices: bool = False
    named: bool = False
    group: dict[str, Any] = field(default_factory=dict)
    modes: bool = False

    def model(self) -> Net:
        torch.manual_seed(0)
        model = Net(conv=not self.matrices).double()
        for param in model.parameters():
            param.requires_grad_(param.dim() == 2 or not self.matrices)
        return model

    def params(self, model: nn.Module) -> Any:
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        params: Any = named if self.named else [param for _, param in named]
        return [{"params": params, **self.group}] if self.group else params


def of_timm() -> dict[str, Client]:
    """All that timm lists, without those of bitsandbytes and apex, and without its models, which need torchvision."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None and spec.submodule_search_locations is not None
    package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
    package.__path__ = [*spec.submodule_search_locations]
    models.group_parameters = None  # type: ignore[attr-defined]
    sys.modules.update({"timm": package, "timm.models": models})
    optim = importlib.import_module("timm.optim")
    clients = {}
    for name in optim.list_optimizers(exclude_filters=["bnb*", "fused*"]):
        info = optim.get_optimizer_info(name)
        options = {"lr": 0.01, **({"momentum": 0.9} if info.has_momentum else {}), **(info.defaults or {})}
        clients[f"timm {name}"] = Client(info.opt_class, options)
    return clients


def of_schedulefree() -> dict[str, Client]:
    import schedulefree

    names = ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree", "AdamWScheduleFreeReference")
    return {f"schedulefree {name}": Client(getattr(schedulefree, name), {"lr": 0.01}, modes=True) for name in names}


def of_small_packages() -> dict[str, Client]:
    import adam_mini
    import prodigyopt

    return {
        "prodigyopt Prodigy": Client(prodigyopt.Prodigy),
        "adam-mini Adam_mini": Client(
            adam_mini.Adam_mini, {"lr": 0.01, "dim": 6, "n_heads": 2, "verbose": False}, named=True
        ),
    }


def of_heavyball() -> dict[str, Client]:
    import heavyball

    heavyball.utils.compile_mode = None
    names = (
        "AdamW",
        "ADOPT",
        "AdEMAMix",
        "LaProp",
        "Muon",
        "NAdam",
        "PSGDKron",
        "RMSprop",
        "SOAP",
        "SFAdamW",
        "SignLaProp",
    )
    options = {
        "SOAP": {"storage_dtype": "float64", "max_precond_dim": 6},
        "PSGDKron": {"storage_dtype": "float64", "q_dtype": "float64"},
    }
    return {
        f"heavyball {name}": Client(
            getattr(heavyball, name), {"lr": 0.01, **options.get(name, {})}, modes=name == "SFAdamW"
        )
        for name in names
    }


class Dion(Optimizer):
    """Orthonormal updates of low rank by one power iteration with error feedback (arXiv 2504.05295)."""

    def __init__(self, params: Any, lr: float = 0.01, momentum: float = 0.95, rank: int = 2) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "rank": rank})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["buffer"] = torch.zeros_like(param)
                    state["basis"] = torch.eye(param.shape[1], group["rank"], dtype=param.dtype)
                buffer = state["buffer"].add_(param.grad)
                left, _ = torch.linalg.qr(buffer @ state["basis"])
                right = buffer.T @ left
                buffer.sub_(left @ right.T, alpha=1 - group["momentum"])
                state["basis"] = right / (right.norm(dim=0, keepdim=True) + 1e-8)
                param.sub_(left @ state["basis"].T, alpha=group["lr"])


def by_name() -> dict[str, Client]:
    """Those that people ask for by name."""
    import pytorch_optimizer

    named = pytorch_optimizer.load_optimizer
    return {
        "SOAP": Client(named("soap"), {"max_precondition_dim": 6}),  # Larger statistics have no full rank here.
        "Shampoo": Client(named("shampoo")),
        "ScalableShampoo": Client(
            named("scalableshampoo"), {"start_preconditioning_step": 1, "preconditioning_compute_steps": 1}
        ),
        "Muon": Client(torch.optim.Muon, matrices=True),
        "NorMuon": Client(named("normuon"), matrices=True, group={"use_muon": True}),
        "Dion": Client(Dion, matrices=True),
    }


CLIENTS: dict[str, Callable[[], dict[str, Client]]] = {
    make.__name__.removeprefix("of_"): make
    for make in (of_timm, of_schedulefree, of_small_packages, of_heavyball, by_name)
}


# One client on the ranks.


def loss_of(model: nn.Module, number: int, *, split: bool, order: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 11, (8, 4), generator=generator)
    target = torch.randn(8, 7, generator=generator, dtype=torch.float64)
    tokens, target = tokens[[*order]], target[[*order]]
    if split:
        rank, size = dist.get_rank(), dist.get_world_size()
        tokens, target = tokens.chunk(size)[rank], target.chunk(size)[rank]
    loss: Tensor = (model(tokens) - target).square().mean()
    return loss


IN_ORDER = tuple(range(8))


def train(
    client: Client, model: nn.Module, optimizer: Any, *, split: bool, order: tuple[int, ...] = IN_ORDER, seed: int = 100
) -> Iterator[int]:
    if client.modes:
        optimizer.train()
    for number in range(STEPS):
        torch.manual_seed(seed + number)
        random.seed(seed + number)
        loss_of(model, number, split=split, order=order).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield number
    if client.modes:
        optimizer.eval()


def plain_weights(client: Client, order: tuple[int, ...] = IN_ORDER, seed: int = 100) -> dict[str, Tensor]:
    model = client.model()
    optimizer = client.optim(client.params(model), **client.options)
    for _ in train(client, model, optimizer, split=False, order=order, seed=seed):
        pass
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max((weights[name] - value).abs().max().item() for name, value in expected.items())


def on_fully_shard(client: Client, model: nn.Module) -> tuple[nn.Module, Any]:
    fully_shard(model)
    return model, client.optim(client.params(model), **client.options)


def on_sharded_ddp(client: Client, model: nn.Module) -> tuple[nn.Module, Any]:
    optimizer = OSS(client.params(model), client.optim, **client.options)
    return ShardedDataParallel(model, optimizer), optimizer


PLACES = {"fully_shard": on_fully_shard, "sharded_ddp": on_sharded_ddp}


def verdict_of(client: Client, place: str) -> str:
    """`equal`, `equal but for its draws`, `refused: ...`, `not judged: ...`, or what is wrong."""
    try:
        expected = plain_weights(client)
        noise = difference(plain_weights(client, (3, 1, 4, 0, 5, 2, 7, 6)), expected)
    except Exception as error:
        return f"not judged: in one process {type(error).__name__}: {error}"
    if not noise < 1e-7:
        return f"not judged: samples in another order change the weights by {noise:.0e}"
    model, changed = client.model(), False
    try:
        wrapped, optimizer = PLACES[place](client, model)
        for _ in train(client, wrapped, optimizer, split=True):
            changed = True
        wrapped.state_dict()
        off = difference(model.state_dict(), expected)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return f"error after a step: {text}" if changed else f"refused: {text}"
    if off <= 1e-9 + 1e3 * noise:
        return "equal"
    # Each rank draws for its own parameters, where one process draws for all.
    spread = max(difference(plain_weights(client, seed=seed), expected) for seed in (200, 300))
    return "equal but for its draws" if spread > 1e-9 and off <= 3 * spread else f"wrong by {off:.1e}"


def verdicts(package: str, place: str) -> dict[str, str]:
    """What came of each optimizer of a package; runs on every rank."""
    warnings.simplefilter("ignore")
    torch._dynamo.config.disable = True  # Some compile parts of their steps, which takes minutes.
    return {name: verdict_of(client, place) for name, client in CLIENTS[package]().items()}
