"""Random programs of training: a model, how it is wrapped, and what is done with it, all drawn from one integer.

A `Program` prints as the code that makes it, so that one which has failed can be pasted, changed and run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from scale_check.fuzz.models import NESTED, ModelSpec, build, random_model
from scale_check.fuzz.programs import OPTIMIZERS, with_one_less

NOT_YET: frozenset[str] = frozenset()
"""What is not drawn, since it is known to be wrong. Take a line away once it is right."""

SCHEDULES = {
    1: ("gpipe", "1f1b", "zb_h1"),
    2: ("interleaved_1f1b", "looped_breadth_first", "zb_v", "v_half", "v_min", "dual_pipe_v"),
}
"""By the number of stages on each rank."""


@dataclass(frozen=True)
class Pipeline:
    """How a model is cut: `cuts` are the modules that begin a stage."""

    schedule: str
    cuts: tuple[str, ...]
    stages_per_rank: int
    chunks: int
    checkpoint: str = "never"


@dataclass(frozen=True)
class Wrapping:
    """How a model is wrapped.

    Attributes:
        kind: What stands along the data axis: "fully_shard", "FullyShardedDataParallel", "ddp", "oss" (beside DDP),
            "sharded_ddp"; or "pipe", the pipeline in one process.
        mesh: The sizes of the axes: pipeline, data, tensor.
        copies: Along the data axis, how many copies hybrid sharding keeps; 0 for a mesh of one dimension.
        units: The modules that are units, beside the model itself, and whether each reshards after its forward.
        options: Arguments of the wrapper, or of OSS.
        plan: Of `parallelize`.
        checkpointed: What is done with the activations of which module.
        checkpoints_first: Whether before the model is wrapped.
        pipeline: None where the model is not cut.
    """

    kind: str
    mesh: tuple[int, int, int]
    copies: int = 0
    units: tuple[tuple[str, bool | int], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, str] = field(default_factory=dict)
    checkpointed: dict[str, Any] = field(default_factory=dict)
    checkpoints_first: bool = True
    pipeline: Pipeline | None = None


@dataclass(frozen=True)
class Train:
    """One step of the optimizer.

    Attributes:
        passes: Forward and backward passes before it.
        no_sync: Whether all but the last are inside `no_sync`.
        evaluating: Whether the model is in eval mode.
        clip: The largest norm; None does not clip.
        norm_type: Of the norm by which is clipped.
        clip_by: "own" or "torch".
        set_to_none: Of `zero_grad` after it.
        zero_by_model: Whether it is the model's.
        schedule: Whether the learning rates change after it.
    """

    passes: int = 1
    no_sync: bool = False
    evaluating: bool = False
    clip: float | None = None
    norm_type: float = 2.0
    clip_by: str = "own"
    set_to_none: bool = True
    zero_by_model: bool = False
    schedule: bool = False


@dataclass(frozen=True)
class Evaluate:
    """A pass without gradients; `mode` is "no_grad" or "inference"."""

    mode: str = "no_grad"
    evaluating: bool = True


@dataclass(frozen=True)
class Freeze:
    """Freezes the parameters whose names begin so, or thaws them."""

    prefix: str
    trains: bool


@dataclass(frozen=True)
class Fail:
    """A training forward that raises on all ranks before this block, and is caught."""

    block: int


@dataclass(frozen=True)
class Reload:
    """A snapshot, which another model under this wrapping loads and goes on with."""

    wrapping: Wrapping
    seed: int


Step = Train | Evaluate | Freeze | Fail | Reload


@dataclass(frozen=True)
class Program:
    """A whole training.

    Attributes:
        seed: Of the parameters and of the data.
        world: The number of ranks.
        model: What is trained.
        wrapping: How it is wrapped at first.
        optimizer: The name of its class in torch.optim.
        options: Of the optimizer.
        groups: Whether biases and norms are a parameter group of their own.
        lr_schedule: None, "exponential" or "one_cycle".
        adascale: Whether AdaScale stands around the optimizer.
        samples: Of a batch of one rank and pass.
        steps: What is done.
    """

    seed: int
    world: int
    model: ModelSpec
    wrapping: Wrapping
    optimizer: str
    options: dict[str, Any]
    groups: bool
    lr_schedule: str | None
    adascale: bool
    samples: int
    steps: tuple[Step, ...]

    @property
    def wrappings(self) -> list[Wrapping]:
        """All that the model is wrapped in, one after the other."""
        return [self.wrapping, *(step.wrapping for step in self.steps if isinstance(step, Reload))]


HOWS: tuple[Any, ...] = ("recompute", "selective", "offload", ["addmm", "mm"])


def program_of(seed: int, world: int | None = None) -> Program:
    """The program of a seed; of a seed and a world, if one is given."""
    random = Random(f"scale {seed}")
    world = random.choice([1, 2, 2, 3, 4, 4]) if world is None else world
    mesh = random.choice(_meshes(world))
    pipelined, tensor = mesh[0] > 1 or (world == 1 and random.random() < 0.25), mesh[2] > 1
    adascale = random.random() < 0.15
    avoid = {"branches", "second"}
    if pipelined:
        avoid |= {"dropout", "sometimes", "tied" if random.random() < 0.6 else ""}
    if tensor:
        avoid |= {"dropout", "sometimes", "tied"}
    if adascale:
        avoid |= {"sometimes"}
    stages_per_rank = random.choice([1, 1, 2]) if pipelined else 1
    model = random_model(
        random, avoid=avoid, num_blocks=max(random.randint(1, 5), mesh[0] * stages_per_rank if pipelined else 0)
    )
    draw = _Drawing(random, model, world, adascale=adascale, tied="tied" not in avoid)
    wrapping = draw.wrapping(mesh, stages_per_rank if pipelined else 0)
    optimizer, options = random.choice([each for each in OPTIMIZERS if not adascale or each[0] in {"SGD", "AdamW"}])
    if adascale and optimizer == "AdamW":  # A flat parameter has one mean second moment, and so another gain.
        wrapping.options.pop("flatten_parameters", None)
    if random.random() < 0.2:
        options = {**options, "foreach": random.random() < 0.5}
    flat = any(each.options.get("flatten_parameters") for each in [wrapping])
    program = Program(
        seed=seed,
        world=world,
        model=model,
        wrapping=wrapping,
        optimizer=optimizer,
        options=options,
        groups=not flat and random.random() < 0.4,
        lr_schedule=random.choice([None, None, "exponential", "one_cycle"]) if optimizer == "SGD" else None,
        adascale=adascale,
        samples=random.choice([2, 4]),
        steps=(),
    )
    return replace(program, steps=tuple(draw.steps(program)))


def _meshes(world: int) -> list[tuple[int, int, int]]:
    """The axes that so many ranks can have; the data axis alone more often than others."""
    found = [
        (pipe, data, world // pipe // data)
        for pipe in range(1, world + 1)
        for data in range(1, world + 1)
        if world % (pipe * data) == 0
    ]
    return found + [(1, world, 1)] * len(found)


class _Drawing:
    """Draws what belongs to one model."""

    def __init__(self, random: Random, model: ModelSpec, world: int, *, adascale: bool, tied: bool) -> None:
        self.random = random
        self.model = model
        self.world = world
        self.adascale = adascale
        self.tied = tied
        net = build(model, 0)
        self.called = [name for name, module in net.named_modules() if name and name != "blocks"]
        # Plain torch has no largest element of an empty gradient.
        self.infinity = [] if "odd" in {block[0] for block in flat_list(model.blocks)} else [float("inf")]
        # A flat parameter has a gradient as a whole: zeros for what no pass has used.
        self.kinds = {block[0] for block in flat_list(model.blocks)}
        alone = {"batchnorm", "counting", "dropout", "sometimes"}
        self.fits_one_process = world == 1 and not adascale and not alone & self.kinds
        self.can_be_flat = not {"unused", "sometimes"} & self.kinds
        self.top = ["entry", *(f"blocks.{i}" for i in range(len(net.blocks))), "exit"]
        self.trained = {name for name, param in net.named_parameters() if param.requires_grad}
        kinds = [block[0] for block in model.blocks]
        self.whole = [
            name for name in self.called if not self._inside(name, {"sometimes", "gru", "pairattention"}, net)
        ]
        self.mlps = [
            name for name, module in net.named_modules() if type(module).__name__ == "Mlp" and "again" not in kinds
        ]
        self.linears = [
            f"{name}.layer" for name, module in net.named_modules() if type(module).__name__ in {"InPlace", "Pack"}
        ]
        self.cuts = [f"blocks.{i}" for i in range(1, len(kinds))] + ["exit"]

    def _inside(self, name: str, kinds: set[str], net: torch.nn.Module) -> bool:
        """Whether a module is below one that calls it on some ranks alone, or reads its parameters itself."""
        parents = [name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1)]
        return any(type(net.get_submodule(each)).__name__.lower() in kinds for each in parents)

    def wrapping(self, mesh: tuple[int, int, int], stages_per_rank: int) -> Wrapping:
        """Draws how the model is wrapped on these axes."""
        random = self.random
        pipe, data, tensor = mesh
        sharded = ["fully_shard", "FullyShardedDataParallel"]
        kind = random.choice([*sharded, "fully_shard", "ddp", "oss", "sharded_ddp", "sharded_ddp"])
        if stages_per_rank and kind in {"FullyShardedDataParallel", "oss"}:
            kind = "fully_shard"
        # Each stage has an OSS of its own; two stages of a rank that share a weight would reduce it twice.
        if stages_per_rank > 1 and ((kind == "sharded_ddp" and self.adascale) or self.tied):
            kind = "ddp"
        if self.fits_one_process and mesh == (1, 1, 1) and not stages_per_rank and random.random() < 0.4:
            return self._one_process()
        pipeline = self._pipeline(pipe, stages_per_rank) if stages_per_rank else None
        copies = 2 if kind in sharded and data == 4 and random.random() < 0.4 else 0
        options = self._options(kind, is_cut=pipeline is not None, is_divided=tensor > 1)
        units: tuple[tuple[str, bool | int], ...] = ()
        if kind in sharded:
            names = [name for name in self.whole if random.random() < 0.35]
            names = [name for name in names if self._can_be_unit(name, pipeline)]
            units = tuple((name, random.choice([True, True, False])) for name in names)
        plan: dict[str, str] = {}
        if tensor > 1:
            for name in self.mlps:
                if random.random() < 0.8:
                    plan |= {f"{name}.up": "colwise", f"{name}.down": "rowwise"}
            for name in self.linears:
                if random.random() < 0.4:
                    plan[name] = random.choice(["colwise_gather_output", "rowwise_split_input"])
            if self.model.words and not self.model.tied and random.random() < 0.5:
                plan["entry.layer"] = random.choice(["embedding_rowwise", "embedding_colwise"])
            if not plan:
                plan["exit.head"] = "colwise_gather_output"
        checkpointed = {}
        if random.random() < 0.35:
            checkpointed = {name: random.choice(HOWS) for name in self.top if random.random() < 0.4}
        return Wrapping(
            kind=kind,
            mesh=mesh,
            copies=copies,
            units=units,
            options=options,
            plan=plan,
            checkpointed=checkpointed,
            checkpoints_first=stages_per_rank > 0 or kind not in sharded or random.random() < 0.5,
            pipeline=pipeline,
        )

    def _one_process(self) -> Wrapping:
        """A `Pipe`, which has no ranks; whose micro-batches no layer may see."""
        random, rest = self.random, len(self.top)
        balance = []
        while rest:
            balance.append(random.randint(1, rest))
            rest -= balance[-1]
        options = {"balance": balance, "chunks": random.choice([1, 2, 3])}
        options["checkpoint"] = random.choice(["never", "always", "except_last"])
        return Wrapping("pipe", (1, 1, 1), options=options)

    def _can_be_unit(self, name: str, pipeline: Pipeline | None) -> bool:
        return pipeline is None or not any(cut.startswith(f"{name}.") for cut in pipeline.cuts)

    def _options(self, kind: str, *, is_cut: bool, is_divided: bool) -> dict[str, Any]:
        random = self.random
        if kind in {"fully_shard", "FullyShardedDataParallel"}:
            options: dict[str, Any] = {}
            if self.can_be_flat and not is_divided and not (is_cut and self.tied) and random.random() < 0.2:
                options["flatten_parameters"] = True
            if random.random() < 0.3:
                options["atom"] = random.choice(["element", "row", "parameter"])
            if random.random() < 0.3:
                options["reshard_after_forward"] = False
            if random.random() < 0.15:
                options["move_params_to_cpu"] = True
            return options
        if kind == "sharded_ddp":
            return {
                "broadcast_buffers": not is_cut and random.random() < 0.5,
                "overlap_gather": random.random() < 0.7,
                "bucket_numel": random.choice([7, 40, 200, 2**20]),
            }
        if kind == "oss":
            return {"broadcast_buffers": random.random() < 0.5, "bucket_numel": random.choice([7, 40, 2**20])}
        return {"broadcast_buffers": not is_cut and random.random() < 0.5}

    def _pipeline(self, num_ranks: int, stages_per_rank: int) -> Pipeline:
        random = self.random
        num_stages = num_ranks * stages_per_rank
        chosen = sorted(random.sample(range(len(self.cuts)), num_stages - 1))
        return Pipeline(
            schedule=random.choice(SCHEDULES[stages_per_rank]),
            cuts=tuple(self.cuts[i] for i in chosen),
            stages_per_rank=stages_per_rank,
            chunks=random.choice([1, 2, 4]),
            checkpoint=random.choice(["never", "never", "always", "except_last"]),
        )

    def steps(self, program: Program) -> Iterator[Step]:
        """Draws what is done; what comes later fits the wrapping that the model has then."""
        random = self.random
        wrapping = program.wrapping
        passes = random.choice([1, 2, 3])
        frozen: list[str] = []
        for _ in range(random.randint(2, 6)):
            what = random.random()
            if what < 0.15:
                yield Evaluate(random.choice(["no_grad", "no_grad", "inference"]), random.random() < 0.8)
            elif what < 0.25 and self._can_freeze(wrapping):
                if frozen:
                    yield Freeze(frozen.pop(), True)
                else:
                    frozen.append(random.choice(self.top[1:]))
                    yield Freeze(frozen[-1], False)
            elif what < 0.32 and wrapping.pipeline is None and wrapping.kind not in {"ddp", "oss", "pipe"}:
                yield Fail(random.randrange(len(self.model.blocks)))
            elif what < 0.42 and not frozen:
                per_rank = wrapping.pipeline.stages_per_rank if wrapping.pipeline else 0
                before, wrapping = wrapping, self.wrapping(self._another_mesh(wrapping.mesh), per_rank)
                if program.adascale and before.pipeline and wrapping.pipeline:
                    # It loads how many gradients a step has.
                    pipeline = replace(wrapping.pipeline, chunks=before.pipeline.chunks)
                    wrapping = replace(wrapping, pipeline=pipeline)
                if program.groups or (program.adascale and program.optimizer == "AdamW"):
                    wrapping.options.pop("flatten_parameters", None)
                yield Reload(wrapping, random.randrange(1000))
            yield self._train(program, wrapping, passes if program.adascale else random.choice([1, 1, 2, 3]))

    def _can_freeze(self, wrapping: Wrapping) -> bool:
        if wrapping.pipeline is not None and self.tied:  # Refused: the part of one stage's gradient would be lost.
            return False
        return not wrapping.options.get("flatten_parameters") and wrapping.kind not in {"ddp", "oss"}

    def _another_mesh(self, mesh: tuple[int, int, int]) -> tuple[int, int, int]:
        """Another one that the model can be on: a pipeline has as many ranks as before."""
        if mesh[0] > 1 or mesh[2] > 1:
            return mesh
        return (1, self.world, 1)

    def _train(self, program: Program, wrapping: Wrapping, passes: int) -> Train:
        random = self.random
        clips = random.random() < 0.3
        by_torch = clips and random.random() < 0.5
        return Train(
            passes=passes,
            no_sync=passes > 1 and wrapping.pipeline is None and random.random() < 0.5,
            evaluating=random.random() < 0.1,
            clip=random.choice([0.01, 0.1, 1e6]) if clips else None,
            norm_type=random.choice([2.0, 2.0, 1.0, 3.0, *self.infinity]),
            clip_by="torch" if by_torch else "own",
            set_to_none=random.random() < 0.8,
            zero_by_model=random.random() < 0.2 and wrapping.pipeline is None,
            schedule=program.lr_schedule is not None and random.random() < 0.7,
        )


def flat_list(blocks: tuple[Any, ...]) -> Iterator[Any]:
    """The blocks, and those inside them."""
    for block in blocks:
        yield block
        if block[0] in NESTED:
            yield from flat_list(block[1])
        if block[0] == "frozen":
            yield block[1]


def code_of(program: Program) -> str:
    """The code that makes a program."""
    return repr(program).replace("norm_type=inf", "norm_type=float('inf')")


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest parts first."""
    for number in range(len(program.steps)):
        yield replace(program, steps=program.steps[:number] + program.steps[number + 1 :])
    for blocks in with_one_less(program.model.blocks):
        yield replace(program, model=replace(program.model, blocks=blocks))
    for name in ("adascale", "groups"):
        if getattr(program, name):
            yield replace(program, **{name: False})
    if program.lr_schedule:
        yield replace(program, lr_schedule=None)
    if program.options.keys() != {"lr"}:
        yield replace(program, optimizer="SGD", options={"lr": 0.1})
    for number, step in enumerate(program.steps):
        if isinstance(step, Train):
            for change in ({"passes": 1, "no_sync": False}, {"clip": None}, {"set_to_none": True}):
                changed = replace(step, **change)
                if changed != step:
                    yield replace(program, steps=(*program.steps[:number], changed, *program.steps[number + 1 :]))
    for wrapping in _simpler(program.wrapping):
        yield replace(program, wrapping=wrapping)
    for change in ({"output": "tensor"}, {"tied": False}, {"words": 0, "tied": False}):
        model = replace(program.model, **change)
        if model != program.model:
            yield replace(program, model=model)


def _simpler(wrapping: Wrapping) -> Iterator[Wrapping]:
    for number in range(len(wrapping.units)):
        yield replace(wrapping, units=wrapping.units[:number] + wrapping.units[number + 1 :])
    for name in ("options", "checkpointed"):
        for key in getattr(wrapping, name):
            yield replace(wrapping, **{name: {k: v for k, v in getattr(wrapping, name).items() if k != key}})
    if wrapping.copies:
        yield replace(wrapping, copies=0)
