"""What 128 optimizers of other people do on shards: the weights of one process, an error, or something else.

    python benchmarks/optimizers.py                                # all of them in all places: half an hour
    python benchmarks/optimizers.py --only lamb,soap --places oss  # some, in some places
    python benchmarks/optimizers.py --smoke                        # one of each kind
    python benchmarks/optimizers.py --date 2026-11-29              # also writes results/2026-11-29-optimizers.*

The optimizers are those of `pytorch_optimizer` 4.1. Each takes three steps in float64 on two ranks over gloo, on a
model with an embedding, a convolution, a layer norm, two linear layers and a parameter of one element, with sizes that
two ranks do not divide evenly. Each rank also trains the plain model on the full batch, and compares. Seeds are the
same, so that drawn numbers are; in float64 rounding decides nothing. An optimizer that fails in one process, or gives
other weights there if the samples are in another order, is *unstable* and is not judged.

- *equal*: within 1e-9 of the largest weight and 1e-6 of the largest change;
- *with together=True*: `OSS` refuses it, and gives equal weights if one rank steps all parameters, as the error says;
- *other draws*: it draws numbers, and the weights are as near to those of one process as with other seeds there;
- *refused*: an error of all ranks before any weight has changed;
- *error later*: an error after that, or on some ranks only;
- *wrong*: other weights without an error;
- *hang*: a rank had not returned at the limit; the processes of each run are its own and are ended.

Places: `fully_shard` of scale-fsdp, `OSS` with `ShardedDataParallel`, `OSS` over `fully_shard`, tensor parallel layers,
and torch's FSDP2 as the peer.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from report import Table, save
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.testing import run_ranks
from scale_core.testing.ranks import preload

STEPS = 3
LIMIT_SECONDS = 60.0
VERDICTS = ("equal", "with together=True", "other draws", "refused", "error later", "wrong", "hang", "unstable")


class Net(nn.Module):
    """Parameters of one, two and three dimensions, whose sizes two ranks do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 9, 3, padding=1)
        self.norm = nn.LayerNorm(9)
        self.hidden = nn.Linear(9, 4)
        self.head = nn.Linear(4, 7)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        output: Tensor = self.head(torch.tanh(self.hidden(self.norm(features)))).mean(1) * self.scale
        return output


MATRICES = ("hidden.weight", "head.weight")


# How each optimizer is built and stepped.

Loss = Callable[[], Tensor]


def step(optimizer: Optimizer, loss: Loss) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def step_with_graph(optimizer: Optimizer, loss: Loss) -> None:
    """The optimizer differentiates the gradients again."""
    optimizer.zero_grad()
    loss().backward(create_graph=True)
    optimizer.step()


def step_in_backward(optimizer: Optimizer, loss: Loss) -> None:
    optimizer.fused_backward(loss(), 1e-3)  # type: ignore[attr-defined]


def step_with_closure(optimizer: Optimizer, loss: Loss) -> None:
    def closure() -> Tensor:
        with torch.enable_grad():
            optimizer.zero_grad()
            value = loss()
            value.backward()
        return value

    closure()
    optimizer.step(closure)  # type: ignore[arg-type]


def step_with_number(optimizer: Optimizer, loss: Loss) -> None:
    """The closure returns the loss as a number."""

    def closure() -> float:
        with torch.enable_grad():
            optimizer.zero_grad()
            value = loss()
            value.backward()
        return mean_over_ranks(value.detach()).item()

    optimizer.step(closure)


def mean_over_ranks(value: Tensor) -> Tensor:
    """The loss of the full batch, as a program for several ranks computes it; equal losses have themselves as mean."""
    values = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return torch.stack(values).mean()


def hidden_matrices(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of Muon and its relatives: weights of layers, and the others."""
    names = (*MATRICES, "conv.weight")
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, param in model.named_parameters():
        groups[name in names].append(param)
    return [{"params": groups[True], "use_muon": True}, {"params": groups[False], "use_muon": False}]


def low_rank_matrices(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of GaLore and its relatives: matrices that are projected to rank 2, and the others."""
    params = [*model.parameters()]
    options = {"rank": 2, "update_proj_gap": 1, "scale": 1.0, "projection_type": "std"}
    return [
        {"params": [param for param in params if param.dim() == 2], **options},
        {"params": [param for param in params if param.dim() != 2]},
    ]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


@dataclass(frozen=True)
class Recipe:
    """What an optimizer needs beside its name.

    Attributes:
        options: For its constructor.
        params: What it is built from.
        step: How it is stepped.
        takes_model: Whether it is built from the model itself.
        trains: The names of the parameters that train; empty is all.
        frozen: The names of those that do not.
        tolerance: Larger where the optimizer computes in float32 whatever it is given.
    """

    options: dict[str, Any] = field(default_factory=dict)
    params: Callable[[nn.Module], Any] = trained
    step: Callable[[Optimizer, Loss], None] = step
    takes_model: bool = False
    trains: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    tolerance: float = 1e-9


_CONV = ("conv.weight", "conv.bias")  # Of three dimensions, which some do not take.
_MUON = Recipe(params=hidden_matrices)
_LOW_RANK = Recipe(params=low_rank_matrices)
RECIPES: dict[str, Recipe] = {
    **dict.fromkeys(("adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon"), _MUON),
    **dict.fromkeys(("apollo", "conda", "fira", "galore"), _LOW_RANK),
    **dict.fromkeys(("adahessian", "sophiah"), Recipe(step=step_with_graph)),
    "adalomo": Recipe(step=step_in_backward, takes_model=True, frozen=_CONV),
    "adammini": Recipe({"num_embeds": 6, "num_heads": 2}, takes_model=True, tolerance=1e-5),
    "adashift": Recipe({"keep_num": 2}),
    "alig": Recipe(step=step_with_number),
    "bsam": Recipe({"num_data": 8}, step=step_with_closure),
    "demo": Recipe(frozen=_CONV),
    "fadam": Recipe({"momentum_dtype": torch.float64, "fim_dtype": torch.float64}),
    "lbfgs": Recipe({"lr": 0.1}, step=step_with_closure),
    "lomo": Recipe(step=step_in_backward, takes_model=True),
    "lorarite": Recipe(trains=MATRICES),
    "ranger": Recipe({"k": 2}),
    "ranger21": Recipe({"num_iterations": 10}),
    "scalableshampoo": Recipe({"start_preconditioning_step": 1, "preconditioning_compute_steps": 1}),
    "soap": Recipe({"max_precondition_dim": 6}),  # Larger statistics have no full rank here, and rounding decides.
    "spectralsphere": Recipe(trains=MATRICES),
}


def recipe_of(name: str) -> Recipe:
    return RECIPES.get(name, Recipe())


def class_of(name: str) -> Any:
    import pytorch_optimizer

    return pytorch_optimizer.load_optimizer(name)


# Places.


@dataclass
class Setup:
    """A model that trains.

    Attributes:
        model: Whose weights are compared.
        forward: What is called.
        optimizer: Its optimizer.
        split_batch: Whether each rank has its part of the batch.
    """

    model: nn.Module
    forward: nn.Module
    optimizer: Optimizer
    split_batch: bool = True


def build_optimizer(name: str, model: nn.Module) -> Optimizer:
    recipe = recipe_of(name)
    source = model if recipe.takes_model else recipe.params(model)
    optimizer: Optimizer = class_of(name)(source, **recipe.options)
    return optimizer


def build_oss(name: str, model: nn.Module, together: bool) -> Optimizer:
    from scale_oss import OSS, OSSOptions

    recipe = recipe_of(name)
    return OSS(recipe.params(model), class_of(name), options=OSSOptions(together=together), **recipe.options)


def in_one_process(name: str, model: nn.Module, together: bool) -> Setup:
    return Setup(model, model, build_optimizer(name, model), split_batch=False)


def on_fully_shard(name: str, model: nn.Module, together: bool) -> Setup:
    from scale_fsdp import fully_shard

    for child in (model.hidden, model.conv):
        fully_shard(child)
    fully_shard(model)
    return Setup(model, model, build_optimizer(name, model))


def on_sharded_ddp(name: str, model: nn.Module, together: bool) -> Setup:
    from scale_oss import ShardedDataParallel

    optimizer = build_oss(name, model, together)
    return Setup(model, ShardedDataParallel(model, optimizer), optimizer)


def on_oss_over_fully_shard(name: str, model: nn.Module, together: bool) -> Setup:
    from scale_fsdp import fully_shard

    for child in (model.hidden, model.conv):
        fully_shard(child)
    fully_shard(model)
    return Setup(model, model, build_oss(name, model, together))


def _parallelize(model: nn.Module) -> None:
    import scale_tp

    scale_tp.initialize_model_parallel(dist.get_world_size())
    scale_tp.parallelize(model, {"": "replicate", "hidden": "colwise", "head": "rowwise"})


def on_tensor_parallel(name: str, model: nn.Module, together: bool) -> Setup:
    _parallelize(model)
    return Setup(model, model, build_optimizer(name, model), split_batch=False)


def on_fsdp2(name: str, model: nn.Module, together: bool) -> Setup:
    from torch.distributed.fsdp import fully_shard

    for child in (model.hidden, model.conv):
        fully_shard(child)
    fully_shard(model)
    return Setup(model, model, build_optimizer(name, model))


Place = Callable[[str, nn.Module, bool], Setup]
PLACES: dict[str, tuple[str, Place]] = {
    "fsdp": ("fully_shard", on_fully_shard),
    "sdp": ("OSS + ShardedDataParallel", on_sharded_ddp),
    "oss": ("OSS over fully_shard", on_oss_over_fully_shard),
    "tp": ("tensor parallel layers", on_tensor_parallel),
    "fsdp2": ("FSDP2", on_fsdp2),
}


# One optimizer in one place, on one rank.


@dataclass
class Verdict:
    """What came of one optimizer in one place."""

    optimizer: str
    place: str
    verdict: str
    text: str = ""
    off: float = 0.0  # The largest difference of a weight, relative to the largest weight
    checksum: float = 0.0  # Of the weights, which all ranks have


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model, recipe = Net().double(), recipe_of(name)
    for key, param in model.named_parameters():
        param.requires_grad_(key in recipe.trains if recipe.trains else key not in recipe.frozen)
    return model


def make_batch(order: Sequence[int] = range(8)) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens, target = torch.randint(0, 11, (8, 4)), torch.randn(8, 7, dtype=torch.float64)
    return tokens[[*order]], target[[*order]]


def train(setup: Setup, name: str, order: Sequence[int] = range(8), first_seed: int = 100) -> Iterator[int]:
    """Takes the steps, and yields after each."""
    tokens, target = make_batch(order)
    if setup.split_batch:
        rank, size = dist.get_rank(), dist.get_world_size()
        tokens, target = tokens.chunk(size)[rank], target.chunk(size)[rank]
    for number in range(STEPS):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(first_seed + number)
        recipe_of(name).step(setup.optimizer, lambda: (setup.forward(tokens) - target).square().mean())
        yield number


def weights_of(setup: Setup) -> dict[str, Tensor]:
    """The full weights; all ranks call it."""
    setup.forward.state_dict()  # Waits for a gather that is under way.
    weights = {}
    for key, value in setup.model.state_dict().items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        weights[key.removeprefix("module.")] = full.detach().clone()
    return weights


def plain_weights(name: str, order: Sequence[int] = range(8), first_seed: int = 100) -> dict[str, Tensor]:
    setup = in_one_process(name, make_model(name), False)
    for _ in train(setup, name, order, first_seed):
        pass
    return weights_of(setup)


def difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest weight of each parameter, at least 1."""
    if set(weights) != set(expected):
        return float("inf")
    largest = 0.0
    for key, value in expected.items():
        if weights[key].shape != value.shape or not weights[key].isfinite().all():
            return float("inf")
        largest = max(largest, (weights[key] - value).abs().max().item() / max(1.0, value.abs().max().item()))
    return largest


def local_values(model: nn.Module) -> list[Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return [param.detach().clone() for param in model.parameters()]


def judge(name: str, place: str, together: bool) -> Verdict:
    """Trains and compares; runs on every rank."""
    warnings.simplefilter("ignore")
    title, build = PLACES[place]
    try:
        first, expected = make_model(name).state_dict(), plain_weights(name)
        noise = max(
            difference(plain_weights(name, order), expected)
            for order in ((7, 6, 5, 4, 3, 2, 1, 0), (3, 1, 4, 0, 5, 2, 7, 6))
        )
        if noise > 1e-10 or not all(weight.isfinite().all() for weight in expected.values()):
            return Verdict(
                name, title, "unstable", f"samples in another order change the weights by {noise:.1e}", noise
            )
    except Exception as error:
        return Verdict(name, title, "unstable", f"in one process: {type(error).__name__}: {error}")
    changed, model = False, make_model(name)
    before = local_values(model)
    try:
        setup = build(name, model, together)
        before = local_values(setup.model)
        for _ in train(setup, name):
            changed = True
        weights = weights_of(setup)
        off = difference(weights, expected)
    except Exception as error:
        with torch._C.DisableTorchFunctionSubclass():
            after = local_values(model)
            changed = changed or any(
                not torch.equal(a, b) for a, b in zip(after, before, strict=False) if a.shape == b.shape
            )
        frame = traceback.extract_tb(error.__traceback__)[-1]
        path = frame.filename.rpartition("site-packages/")[2].rpartition("/src/")[2]
        text = f"{type(error).__name__}: {error} ({path}:{frame.lineno})"
        return Verdict(name, title, "error later" if changed else "refused", " ".join(text.split())[:600])
    change = max((expected[key] - value).abs().max().item() for key, value in first.items())
    checksum = sum(value.double().sum().item() for value in weights.values())
    tolerance = recipe_of(name).tolerance
    if off <= tolerance and off <= 1e3 * tolerance * max(change, 1e-9):
        return Verdict(name, title, "equal", "", off, checksum)
    spread = max(difference(plain_weights(name, first_seed=seed), expected) for seed in (200, 300))
    word = "other draws" if spread > tolerance and off <= 3 * spread else "wrong"
    text = f"off by {off:.1e}, changed by {change:.1e}, other seeds by {spread:.1e}"
    return Verdict(name, title, word, text, off, checksum)


def verdict_of(name: str, place: str, limit: float, together: bool = False) -> Verdict:
    """Runs one optimizer in one place in processes of its own."""
    title = PLACES[place][0]
    try:
        by_rank = run_ranks(judge, 2, name, place, together, limit_seconds=limit)
    except TimeoutError as error:
        text = re.sub(r'File "[^"]*/', 'File "', str(error))  # The names of files, without the folders of a machine.
        return Verdict(name, title, "hang", " ".join(text.split())[:600])
    except Exception as error:
        return Verdict(name, title, "error later", f"a rank ended: {type(error).__name__}: {error}"[:600])
    words = {verdict.verdict for verdict in by_rank}
    if len(words) == 1:
        if len({verdict.checksum for verdict in by_rank}) > 1:
            return Verdict(name, title, "wrong", "ranks end with different weights", by_rank[0].off)
        return max(by_rank, key=lambda verdict: verdict.off)
    if words == {"refused", "error later"}:  # Some ranks had changed their part already.
        return next(verdict for verdict in by_rank if verdict.verdict == "error later")
    order = ("wrong", "error later", "refused", "other draws", "unstable", "equal")
    worst = min(by_rank, key=lambda verdict: order.index(verdict.verdict))
    word = "wrong" if worst.verdict == "wrong" else "error later"
    return Verdict(
        name, title, word, f"ranks differ ({', '.join(v.verdict for v in by_rank)}): {worst.text}", worst.off
    )


def best_verdict(name: str, place: str, limit: float) -> Verdict:
    """With `OSS` as it is by default, and where that is another result with one rank for all."""
    verdict = verdict_of(name, place, limit)
    if (
        place in ("sdp", "oss")
        and verdict.verdict in ("wrong", "refused", "error later")
        and not recipe_of(name).takes_model
    ):
        again = verdict_of(name, place, limit, together=True)
        if again.verdict == "equal" and verdict.verdict == "refused":
            return Verdict(name, verdict.place, "with together=True", verdict.text, again.off)
        verdict.text += f" [together=True: {again.verdict}]"
    return verdict


# Tables.

SMOKE = ("adamw", "lamb", "adafactor", "muon")


def names_of_all() -> list[str]:
    import pytorch_optimizer

    return sorted(pytorch_optimizer.get_supported_optimizers())


def tables_of(verdicts: Sequence[Verdict]) -> list[Table]:
    places = [*dict.fromkeys(verdict.place for verdict in verdicts)]
    counts, names = [], []
    for place in places:
        there = {word: [v.optimizer for v in verdicts if v.place == place and v.verdict == word] for word in VERDICTS}
        counts.append([place, *(str(len(there[word])) for word in VERDICTS)])
        names += [[place, word, ", ".join(there[word])] for word in VERDICTS if there[word] and word != "equal"]
    return [
        Table("Optimizers by what came of them", ["place", *VERDICTS], counts),
        Table("Those that are not equal", ["place", "verdict", "optimizers"], names),
    ]


def main() -> int:
    """Reads the command line; returns 1 where an optimizer is wrong or hangs, but for the peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of optimizers, with commas")
    parser.add_argument("--places", help=f"some of {', '.join(PLACES)}, with commas")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds after which processes are ended")
    parser.add_argument("--smoke", action="store_true", help=f"{', '.join(SMOKE)} alone")
    parser.add_argument("--date", help="writes results/DATE-optimizers.json and .md")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [*SMOKE] if options.smoke else names_of_all()
    places = options.places.split(",") if options.places else [*PLACES]
    preload(
        "pytorch_optimizer", "scale_fsdp", "scale_oss", "scale_tp", "torch.distributed.fsdp", "torch.distributed.tensor"
    )
    verdicts = []
    for place in places:
        for name in names:
            verdict = best_verdict(name, place, options.limit)
            verdicts.append(verdict)
            print(
                f"{verdict.place:26} {name:20} {verdict.verdict:12} {verdict.text[:300]}", file=sys.stderr, flush=True
            )
    tables = tables_of(verdicts)
    print(*(table.markdown() for table in tables), sep="\n")
    if options.date:
        save("optimizers", options.date, __doc__ or "", tables, [asdict(verdict) for verdict in verdicts])
    ours = [verdict for verdict in verdicts if verdict.place != PLACES["fsdp2"][0]]
    return int(any(verdict.verdict in ("wrong", "hang") for verdict in ours))


if __name__ == "__main__":
    sys.exit(main())
