"""A random training, drawn from one integer: a model, an optimizer, and what is done in each step.

A `Program` prints as the code that makes it, so one that differs can be pasted, changed and given to `parity`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from scale_check.fuzz.engines import FuzzEngine, engine_class
from scale_check.fuzz.models import (
    NESTED,
    OF_EACH_RANK,
    Block,
    ModelSpec,
    batch_of,
    build,
    loss_of,
    random_model,
)

OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("SGD", {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.02, "eps": 1e-2}),
    ("Adam", {"lr": 0.02, "eps": 1e-2, "amsgrad": True, "weight_decay": 0.01}),
    ("AdamW", {"lr": 0.02, "eps": 1e-2, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "eps": 1e-2, "momentum": 0.5, "centered": False}),
    ("Adagrad", {"lr": 0.02, "eps": 1e-2}),
)
"""A large eps, so that a difference in the last place of a gradient stays one of the weights."""


@dataclass(frozen=True)
class Train:
    """One step of the optimizer.

    Attributes:
        passes: Forward and backward passes before it.
        no_sync: Whether all but the last are without communication, where the library can do that.
        clip: The largest norm of the gradients; None does not clip.
        frozen: Parameters whose names begin so do not train from this step on; "" for none. "-" ends that.
        schedule: Whether the learning rates change after it.
    """

    passes: int = 1
    no_sync: bool = False
    clip: float | None = None
    frozen: str = ""
    schedule: bool = False


@dataclass(frozen=True)
class Program:
    """A whole training.

    Attributes:
        engine: The library, as `engine_class` knows it.
        seed: Of the parameters and of the data.
        model: What is trained.
        units: Modules that are sharded by themselves, beside the model, where the library shards modules.
        optimizer: The name of its class in torch.optim.
        options: Of the optimizer.
        groups: Whether biases and norms are a parameter group of their own, with half the learning rate.
        samples: Of a batch of one rank and pass.
        steps: What is done.
    """

    engine: str
    seed: int
    model: ModelSpec
    units: tuple[str, ...]
    optimizer: str
    options: dict[str, Any]
    groups: bool
    samples: int
    steps: tuple[Train, ...]


class Run:
    """A program in one process, with what `parity` needs; of the plain model until `wrap` is called."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._engine = FuzzEngine()
        self._scheduler: Any = None

    def build(self) -> nn.Module:
        """Returns the plain model, and starts over."""
        self._engine, self._scheduler = FuzzEngine(), None
        return build(self.program.model, self.program.seed)

    def wrap(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        """Wraps the model as the library does, and builds the optimizer."""
        self._engine = engine_class(self.program.engine)()
        kind = getattr(torch.optim, self.program.optimizer)
        return self._engine.wrap(model, self.program.units, self._make_optimizer, kind)

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Builds the optimizer of plain parameters."""
        return self._make_optimizer(getattr(torch.optim, self.program.optimizer), params)

    def _make_optimizer(self, kind: Any, params: Iterable[nn.Parameter], **options: Any) -> Optimizer:
        options = {**self.program.options, **options}
        listed: list[Any] = list(params)
        if self.program.groups:
            # Shards of fewer dimensions would be in another group: full shapes decide.
            vectors = [param for param in listed if param.ndim < 2]
            others = [param for param in listed if param.ndim >= 2]
            listed = [{"params": others}, {"params": vectors, "lr": options["lr"] / 2}]
        optimizer: Optimizer = kind(listed, **options)
        return optimizer

    def batches(self, ranks: int) -> list[Any]:
        """The batches of all ranks together, a dict for each step."""
        program = self.program
        return [
            {
                "number": number,
                "parts": [
                    batch_of(program.model, program.samples * ranks, program.seed, number, turn)
                    for turn in range(step.passes)
                ],
            }
            for number, step in enumerate(program.steps)
        ]

    def step(self, model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
        """One step of training; returns the mean of its losses."""
        step, engine = self.program.steps[batch["number"]], self._engine
        if step.frozen:
            for name, param in model.named_parameters():
                param.requires_grad_(step.frozen == "-" or f"{step.frozen}." not in f".{name}")
        if self._scheduler is None:
            self._scheduler = engine.scheduler(ExponentialLR, optimizer, gamma=0.5)
        losses = []
        for turn, part in enumerate(batch["parts"]):
            no_sync = (step.no_sync or engine.accumulates_without_sync) and turn < step.passes - 1
            with engine.no_sync(model) if no_sync else nullcontext():
                loss = loss_of(model(part)) / step.passes
                engine.backward(model, loss)
            losses.append(loss.detach())
        if step.clip is not None:
            engine.clip(model, optimizer, step.clip)
        engine.step(model, optimizer)
        if step.schedule:
            self._scheduler.step()
        engine.zero_grad(model, optimizer)
        return torch.stack(losses).sum()


def program_of(engine: str, seed: int) -> Program:
    """The program of a library and a seed."""
    random = Random(f"fuzz {seed}")
    can = engine_class(engine).can
    avoid = (
        OF_EACH_RANK
        | (set() if "float64" in can else {"other"})
        | (set() if "unused" in can else {"unused", "second"})
        | (set() if "tied" in can else {"tied"})
    )
    model = random_model(
        random,
        avoid=avoid,
        num_blocks=random.randint(1, 5),
        dtypes=("float64", "float64", "float32") if "float64" in can else ("float32",),
    )
    net = build(model, 0)
    names = [name for name, module in net.named_modules() if name and name != "blocks" and _can_be_unit(net, name)]
    units = tuple(name for name in names if random.random() < 0.4) if "units" in can else ()
    optimizer, options = random.choice(OPTIMIZERS)
    top = [f"blocks.{number}" for number in range(len(net.blocks))]
    return Program(
        engine=engine,
        seed=seed,
        model=model,
        units=units,
        optimizer=optimizer,
        options=options,
        groups=random.random() < 0.3,
        samples=random.choice([1, 2, 4]),
        steps=tuple(_steps(random, can, top)),
    )


def _can_be_unit(net: nn.Module, name: str) -> bool:
    """Whether a module is called as a module: torch's attention and recurrent layers read their parameters instead."""
    parents = [name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1)]
    return not any(isinstance(net.get_submodule(parent), nn.MultiheadAttention | nn.GRU) for parent in parents)


def _steps(random: Random, can: frozenset[str], top: list[str]) -> Iterator[Train]:
    frozen = False
    for _ in range(random.randint(2, 4)):
        freezes = "freeze" in can and random.random() < 0.2
        passes = random.choice([1, 1, 2, 3])
        yield Train(
            passes=passes,
            no_sync=passes > 1 and random.random() < 0.5,
            clip=random.choice([0.01, 0.1, 1e6]) if random.random() < 0.3 and "clip" in can else None,
            frozen="" if not freezes else "-" if frozen else random.choice(top),
            schedule=random.random() < 0.3,
        )
        frozen = frozen ^ freezes


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest parts first."""
    if len(program.steps) > 1:
        for number in range(len(program.steps)):
            yield replace(program, steps=program.steps[:number] + program.steps[number + 1 :])
    for blocks in with_one_less(program.model.blocks):
        yield replace(program, model=replace(program.model, blocks=blocks), units=())
        yield replace(program, model=replace(program.model, blocks=blocks))
    changes: tuple[dict[str, Any], ...] = (
        {"units": ()},
        *({"units": tuple(unit for unit in program.units if unit != left)} for left in program.units),
        {"groups": False},
        {"optimizer": "SGD", "options": {"lr": 0.1}},
        {"samples": 1},
    )
    yield from (changed for change in changes if (changed := replace(program, **change)) != program)
    for number, step in enumerate(program.steps):
        for part in (
            {"passes": 1, "no_sync": False},
            {"no_sync": False},
            {"clip": None},
            {"schedule": False},
            {"frozen": ""},
        ):
            changed_step = replace(step, **part)
            if changed_step != step:
                yield replace(program, steps=(*program.steps[:number], changed_step, *program.steps[number + 1 :]))
    for part in ({"output": "tensor"}, {"tied": False}, {"words": 0, "tied": False}, {"dtype": "float64"}):
        model = replace(program.model, **part)
        if model != program.model:
            yield replace(program, model=model)


def with_one_less(blocks: tuple[Block, ...]) -> Iterator[tuple[Block, ...]]:
    """The blocks of a model with one block less, or with the blocks that were inside another in its place."""
    for number, block in enumerate(blocks):
        before, after = blocks[:number], blocks[number + 1 :]
        if block[0] == "pack":
            yield before + after[1:]
        elif block[0] != "unpack":
            yield before + after
        if block[0] in NESTED:
            yield before + block[1] + after
            for inner in with_one_less(block[1]):
                if inner:
                    yield (*before, (block[0], inner), *after)
