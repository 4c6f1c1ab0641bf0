"""Snapshots between meshes: what was saved on one is loaded on any other, and in one plain process, to the bit.

Meshes have a tensor axis, a data axis (one of several wrappers) and a pipeline axis, in every order, on one, two or
four ranks, and some on eight. Each trains a few steps of its own and is saved. One plain process reads that; it must
equal what each rank of the mesh has, and so must what every other mesh reads. What eight ranks have trained equals what
one plain process trains.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_values import by_rank
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from trainings import Net

import scale_snapshot
from scale_adascale import AdaScale
from scale_core.comm.group import Group, group_of
from scale_core.shard import elements_of
from scale_core.state.dcp import dcp_target
from scale_core.state.local_shard import LocalShard
from scale_core.state.state_dict import load_sharded_state_dict, saved_groups, sharded_state_dict, target_state_dict
from scale_core.testing import run_ranks
from scale_fsdp import ShardOptions, fully_shard
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe, split
from scale_snapshot import load_snapshot, save_snapshot
from scale_tp import parallelize

RANKS, STEPS, CHUNKS, WORDS, WIDTH = 4, 2, 4, 7, 6
WRAPPERS = ("ddp", "fsdp", "fsdp of blocks", "flat", "oss", "sharded ddp")


@dataclass(frozen=True)
class Mesh:
    """Ranks in axes, the outermost one first, and what is done along each; on the first ranks of the world."""

    sizes: tuple[tuple[str, int], ...] = ()
    wrapper: str = ""
    stages_each: int = 1

    def size(self, axis: str) -> int:
        return dict(self.sizes).get(axis, 1)

    @property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.sizes)

    def lines(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """The groups of ranks that differ in these axes alone."""
        numbers = torch.arange(self.num_ranks).view([size for _, size in self.sizes] or [1])
        names = [name for name, _ in self.sizes] or [""]
        inner = [dim for dim, name in enumerate(names) if name in axes]
        outer = [dim for dim, name in enumerate(names) if name not in axes]
        count = math.prod(numbers.shape[dim] for dim in inner)
        return [tuple(row) for row in numbers.permute(*outer, *inner).reshape(-1, count).tolist()]


@dataclass(frozen=True)
class Case:
    """What is trained: the same for all meshes between which snapshots go."""

    optimizer: str = "adamw"
    tied: bool = False
    adascale: bool = False
    grouped: bool = True


CASES = (
    Case("adamw", tied=True, adascale=True),
    Case("momentum"),
    Case("momentum", tied=True),
    Case("adamw", adascale=True),
    Case("adamw", grouped=False),
)


def meshes(case: Case) -> Iterator[Mesh]:
    """All meshes that can be built."""
    yield Mesh()
    for num_ranks in (2, 4):
        for sizes in itertools.product((1, 2, 4), repeat=3):
            if math.prod(sizes) != num_ranks:
                continue
            axes = [(name, size) for name, size in zip(("tensor", "data", "pipe"), sizes, strict=True) if size > 1]
            for order in itertools.permutations(axes):
                for wrapper in WRAPPERS if sizes[1] > 1 else [""]:
                    for stages_each in (1, 2) if sizes[2] == 2 else (1,):
                        mesh = Mesh(order, wrapper, stages_each)
                        if can_be_built(mesh, case):
                            yield mesh


def can_be_built(mesh: Mesh, case: Case) -> bool:
    if mesh.wrapper == "flat":  # One flat parameter has one set of options, and no layer or other stage shares it.
        return mesh.size("tensor") == 1 and not case.grouped
    if mesh.stages_each > 1:  # Two stages of a rank share a weight where one wrapper reduces it, and no AdaScale two.
        apart = mesh.wrapper in ("fsdp", "fsdp of blocks", "sharded ddp")
        return not (apart and (case.tied or case.adascale))
    return True


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.register_buffer("factor", torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.factor * self.down(torch.tanh(self.up(self.norm(x))))
        return y


def net(tied: bool, seed: int = 0) -> Net:
    return Net(4, words=WORDS, tied=tied, block=Block, width=WIDTH, seed=seed)


Batch = tuple[Tensor, Tensor]


def batch_of(step: int, replica: int) -> Batch:
    words = torch.randint(WORDS, (2 * CHUNKS, 2), generator=torch.Generator().manual_seed(10 * step + replica))
    return words[:, 0], words[:, 1]


def grouped(named: Iterable[tuple[str, nn.Parameter]], case: Case) -> list[dict[str, Any]]:
    """Groups by name: some of them are empty on some ranks."""
    if not case.grouped:
        return [{"params": [param for _, param in named]}]
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": 0.02},
        {"params": [], "lr": 0.01, "weight_decay": 0.1},
        {"params": [], "lr": 0.03, "weight_decay": 0.0},
    ]
    for name, param in named:
        is_words = "embed" in name or (case.tied and "head" in name)
        groups[0 if is_words else 1 if "up." in name or "down." in name or "head" in name else 2]["params"].append(
            param
        )
    return groups


Groups = Mapping[tuple[int, ...], Any]
"""A process group for each set of ranks, and each rank by itself."""


class Training:
    """A model on a mesh, as a program builds, trains and saves it."""

    def __init__(self, mesh: Mesh, case: Case, groups: Groups, seed: int = 0) -> None:
        self.mesh, self.case, self.groups = mesh, case, groups
        tensor, pipe = self.line("tensor"), self.line("pipe")
        model = net(case.tied, seed)
        self.model: nn.Module = model
        self.optimizers: list[Optimizer] = []
        if pipe.size > 1:
            num_stages = pipe.size * mesh.stages_each
            cuts = [f"blocks.{stage * 4 // num_stages}" for stage in range(1, num_stages)]
            schedule = "1f1b" if mesh.stages_each == 1 else "zb_v"
            self.model = DistributedPipe(split(model, cuts), schedule, chunks=CHUNKS, process_group=pipe)
        stages: Any = self.model.stages if isinstance(self.model, DistributedPipe) else {0: model}
        for index, stage in list(stages.items()):
            if tensor.size > 1:
                held = [number for number, block in enumerate(stage.blocks) if any(True for _ in block.parameters())]
                styles = (("norm", "replicate"), ("up", "colwise"), ("down", "rowwise"))
                parallelize(stage, {f"blocks.{each}.{name}": style for each in held for name, style in styles}, tensor)
            stages[index] = self._wrapped(stage)
        self.called: nn.Module = stages[min(stages)]
        if not self.optimizers:
            self.optimizers = [self._optimizer(self.model)]
        if case.adascale:
            others = self.line("tensor", "pipe")
            self.optimizers = [
                AdaScale(
                    optimizer,
                    num_gradients_to_accumulate=CHUNKS,
                    process_group=self.line("data"),
                    model_parallel_group=others if others.size > 1 else None,
                )
                for optimizer in self.optimizers
            ]

    def line(self, *axes: str) -> Group:
        """The ranks that differ from this one in these axes alone; without any, those of all."""
        if self.mesh.num_ranks == 1:
            return group_of(self.groups[dist.get_rank(),])
        lines = self.mesh.lines(axes) if axes else [tuple(range(self.mesh.num_ranks))]
        return group_of(self.groups[next(line for line in lines if dist.get_rank() in line)])

    def _wrapped(self, stage: nn.Module) -> nn.Module:
        group, wrapper = self.line("data").process_group, self.mesh.wrapper
        if wrapper in ("ddp", "oss"):
            return DistributedDataParallel(stage, process_group=group)
        if wrapper == "fsdp of blocks":
            for block in stage.blocks:
                if any(True for _ in block.parameters()):  # Else it stands in another stage.
                    fully_shard(block, group)
        if wrapper == "hybrid":
            return fully_shard(stage, self._copies_of_shards())
        if wrapper in ("fsdp", "fsdp of blocks", "flat"):
            return fully_shard(stage, group, options=ShardOptions(flatten_parameters=wrapper == "flat"))
        if wrapper == "sharded ddp":
            optimizer = self._optimizer(stage)
            self.optimizers.append(optimizer)
            return ShardedDataParallel(stage, optimizer, group)
        return stage

    def _copies_of_shards(self) -> DeviceMesh:
        """The data axis as two copies of the model, each sharded over half of its ranks."""
        ranks = torch.tensor(self.line("data").ranks).view(2, -1)
        mine = (ranks == dist.get_rank()).nonzero()[0]
        found = [self.groups[tuple(line.tolist())] for line in (ranks[:, mine[1]], ranks[mine[0]])]
        return DeviceMesh.from_group(found, "cpu", mesh=ranks, mesh_dim_names=("replicate", "shard"))

    def _optimizer(self, module: nn.Module) -> Optimizer:
        groups = grouped(module.named_parameters(), self.case)
        make: Any = AdamW if self.case.optimizer == "adamw" else SGD
        options: dict[str, Any] = {"lr": 0.01} if make is AdamW else {"lr": 0.01, "momentum": 0.9}
        if self.mesh.wrapper in ("oss", "sharded ddp"):
            return OSS(groups, make, self.line("data"), **options)
        return make(groups, **options)

    def train(self) -> None:
        for step in range(STEPS):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            words, target = batch_of(step, self.line("data").rank)
            if isinstance(self.model, DistributedPipe):
                self.model.step(words, target=target, loss_fn=nn.functional.cross_entropy)
            else:
                for part, to in zip(words.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
                    (nn.functional.cross_entropy(self.called(part), to) / CHUNKS).backward()
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5  # As a scheduler does: other options than those it was built with.

    def state(self) -> dict[str, Any]:
        return sharded_state_dict(self.model, self.optimizers)

    @property
    def objects(self) -> dict[str, Any]:
        """As a program gives them, in their wrappers."""
        return {
            "model": self.model if isinstance(self.model, DistributedPipe) else self.called,
            "optim": self.optimizers,
        }

    def save(self, folder: str) -> None:
        scale_snapshot.save(folder, STEPS, self.objects, process_group=self.line())
        if self.mesh.num_ranks == dist.get_world_size():
            dcp.save(self.state(), checkpoint_id=f"{folder}/dcp")

    def load(self, folder: str) -> None:
        scale_snapshot.load(folder, self.objects, process_group=self.line())

    def load_from_dcp(self, folder: str) -> None:
        target = dcp_target(f"{folder}/dcp", self.model, self.optimizers)
        dcp.load(target, checkpoint_id=f"{folder}/dcp", process_group=self.line().process_group)
        load_sharded_state_dict(target, self.model, self.optimizers, copy=False)

    def leave(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, AdaScale):
                optimizer.unhook()


def whole(folder: str, case: Case) -> dict[str, Any]:
    """What one plain process reads, with a plain optimizer."""
    alone = {(dist.get_rank(),): Group()}
    training = Training(Mesh(), replace(case, adascale=False), alone, seed=1)
    training.load(folder)
    return training.state()


def assert_holds(training: Training, expected: Mapping[str, Any], where: str) -> None:
    """Compares the entries of this rank with the full state, to the bit."""
    state, saved = training.state(), saved_groups(expected)
    for key, value in state.items():
        if isinstance(value, Tensor):
            full, ours = expected.get(key), value.detach()
            if isinstance(value, LocalShard) and isinstance(full, Tensor):
                ours = value.tensor.reshape(-1)
                full = elements_of(full, value.start, value.stop, value.ranges)
            assert full is not None and torch.equal(ours, full), f"{where}: {key}"
    options = {name: group.options for group in saved for name in group.names}
    for group in saved_groups(state):
        wanted = [options[name] for name in group.names] or [saved[group.number].options]
        assert all(each == group.options for each in wanted), f"{where}: options of group {group.number}"


def groups_of(meshes: Iterable[Mesh]) -> Groups:
    """A group for every set of ranks that one of the meshes needs; all ranks call it together."""
    needed = {(rank,) for rank in range(dist.get_world_size())}
    for mesh in meshes:
        axes = [name for name, _ in mesh.sizes]
        for size in range(len(axes) + 1):
            for chosen in itertools.combinations(axes, size):
                needed.update(mesh.lines(chosen))
        for line in mesh.lines(["data"]) if mesh.wrapper == "hybrid" else ():
            half = len(line) // 2
            needed |= {line[:half], line[half:], *zip(line[:half], line[half:], strict=True)}
    return {ranks: dist.new_group(list(ranks)) for ranks in sorted(needed)}


def save_and_load(folder: Path, case: Case, chosen: Sequence[Mesh]) -> None:
    """Trains and saves on each mesh, and loads that on each."""
    groups = groups_of(chosen)
    places = {mesh: f"{folder}/{number}" for number, mesh in enumerate(chosen)}
    for mesh, place in places.items():
        if dist.get_rank() < mesh.num_ranks:
            training = Training(mesh, case, groups)
            training.train()
            training.save(place)
            training.leave()
            assert_holds(training, whole(place, case), f"{mesh} as saved")
        dist.barrier()
    for first, place in places.items():
        expected = whole(place, case)
        for second in chosen:
            if dist.get_rank() < second.num_ranks:
                for load in [Training.load, Training.load_from_dcp][: 1 + (first.num_ranks == dist.get_world_size())]:
                    training = Training(second, case, groups, seed=2)
                    load(training, place)
                    assert_holds(training, expected, f"{first} to {second}")
                    training.leave()
            dist.barrier()


def in_parts(folder: Path, possible: Sequence[Mesh], size: int) -> Iterator[tuple[Path, Sequence[Mesh]]]:
    """Some meshes at a time, each with a folder of its own."""
    for number in range(0, len(possible), size):
        part = folder / str(number)
        part.mkdir()
        yield part, possible[number : number + size]


each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.fault(16, 60, 61, techniques=("fsdp", "oss", "tp", "pipe"))
@each_case
@pytest.mark.ranks(RANKS, in_turn=True)
def test_what_any_mesh_has_saved_any_other_loads_to_the_bit(case: Case, tmp_path: Path) -> None:
    chosen = random.Random(CASES.index(case)).sample(list(meshes(case)), 3)
    save_and_load(tmp_path, case, chosen)


@pytest.mark.soak
@each_case
def test_so_it_is_between_all_meshes(case: Case, tmp_path: Path) -> None:
    everything = list(meshes(case))
    random.Random(0).shuffle(everything)
    for folder, chosen in in_parts(tmp_path, everything, 8):
        run_ranks(save_and_load, RANKS, folder, case, chosen)


EIGHT = (
    Mesh((("tensor", 2), ("data", 2), ("pipe", 2)), "fsdp"),
    Mesh((("pipe", 2), ("data", 2), ("tensor", 2)), "fsdp of blocks"),
    Mesh((("pipe", 4), ("data", 2)), "fsdp"),
    Mesh((("data", 4), ("pipe", 2)), "hybrid"),
    Mesh((("data", 8),), "hybrid"),
    Mesh((("data", 2), ("tensor", 4)), "oss"),
    Mesh((("data", 2), ("pipe", 2), ("tensor", 2)), "sharded ddp"),
    Mesh((("pipe", 2), ("data", 4)), "fsdp of blocks", stages_each=2),
    Mesh((("data", 8),), "fsdp"),
)


def trained_alone(mesh: Mesh, case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """What one plain process trains on the data of all replicas of the mesh."""
    model = net(case.tied)
    groups = grouped(model.named_parameters(), case)
    optimizer = AdamW(groups, lr=0.01) if case.optimizer == "adamw" else SGD(groups, lr=0.01, momentum=0.9)
    replicas = mesh.size("data")
    for step in range(STEPS):
        optimizer.zero_grad()
        for words, target in (batch_of(step, replica) for replica in range(replicas)):
            (nn.functional.cross_entropy(model(words), target) / replicas).backward()
        optimizer.step()
    return model, sharded_state_dict(model, optimizer)


@pytest.mark.soak
@pytest.mark.parametrize(
    "mesh, case",
    [(mesh, case) for case in CASES for mesh in EIGHT if not case.adascale and can_be_built(mesh, case)],
    ids=str,
)
@pytest.mark.ranks(8, limit_seconds=900)
def test_eight_ranks_train_what_one_process_trains(mesh: Mesh, case: Case, tmp_path: Path) -> None:
    """Compares in fp64, where another order of sums leaves 1e-13; Adam divides by small gradients."""
    folder = str(tmp_path)
    training = Training(mesh, case, groups_of([mesh]))
    training.train()
    training.save(folder)
    model, expected = trained_alone(mesh, case)
    moved = [(a - b).abs().max() for a, b in zip(model.parameters(), net(case.tied).parameters(), strict=True)]
    read = whole(folder, case)
    assert max(moved) > 1e-3 and read.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(
                read[key], value, rtol=1e-8, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.mark.soak
@each_case
def test_what_eight_ranks_have_saved_any_mesh_loads(case: Case, tmp_path: Path) -> None:
    everything = [*EIGHT, Mesh(), Mesh((("pipe", 2), ("data", 2)), "fsdp"), Mesh((("data", 4),), "oss")]
    possible = [mesh for mesh in everything if can_be_built(mesh, case)]
    random.Random(CASES.index(case)).shuffle(possible)
    for folder, chosen in in_parts(tmp_path, possible, 4):
        run_ranks(save_and_load, 8, folder, case, chosen, limit_seconds=900)


class Uneven(nn.Module):
    """Words of a width that two ranks don't share evenly, a strided weight that both hold, and running statistics."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.norm, self.head = nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5)
        self.strided = nn.Parameter(torch.randn(2, 3).t())

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.words(words)) @ (self.strided @ self.strided.t()))
        return y


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.ranks(RANKS)
def test_uneven_parts_strides_and_rank_0s_buffers_are_saved(tmp_path: Path) -> None:
    """Trains and saves under two wrappers; returns the buffers of this rank."""
    folder = str(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    group, buffers = mesh["data"].get_group(), {}
    for wrapper in ("sharded ddp", "fsdp"):
        model = Uneven(0)
        parallelize(model, {"words": "embedding_colwise"}, mesh["tensor"])
        optimizer: Optimizer
        if wrapper == "fsdp":
            called: nn.Module = fully_shard(model, group)
            optimizer = AdamW(model.parameters(), lr=0.1)
        else:
            optimizer = OSS(model.parameters(), AdamW, group, lr=0.1)
            called = ShardedDataParallel(model, optimizer, group, broadcast_buffers=False)
        for step in range(STEPS):
            optimizer.zero_grad()
            called(batch_of(step, mesh["data"].get_local_rank())[0] % 5).square().sum().backward()
            optimizer.step()
        save_snapshot(f"{folder}/{wrapper}", STEPS, sharded_state_dict(model, optimizer))
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        dcp.save(sharded_state_dict(model, optimizer), checkpoint_id=f"{folder}/{wrapper}/dcp", planner=planner)
        buffers[wrapper] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers = by_rank(buffers)
    states = []
    for wrapper in ("sharded ddp", "fsdp"):
        assert not torch.equal(buffers[0][wrapper]["norm.running_mean"], buffers[2][wrapper]["norm.running_mean"])
        model = Uneven(1)
        optimizer = AdamW(model.parameters(), lr=0.7)
        read = load_snapshot(tmp_path / wrapper, lambda saved: target_state_dict(model, optimizer, saved), Group())  # noqa: B023
        load_sharded_state_dict(read.state, model, optimizer, copy=False)
        assert all(torch.equal(buffer, buffers[0][wrapper][name]) for name, buffer in model.named_buffers())
        assert model.strided.stride() == (1, 3) and optimizer.param_groups[0]["lr"] == 0.1
        states.append(sharded_state_dict(model, optimizer))
        tensors = {key: value.clone() for key, value in states[-1].items() if isinstance(value, Tensor)}
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
        target = dcp_target(tmp_path / wrapper / "dcp", model, optimizer)
        dcp.load(target, checkpoint_id=tmp_path / wrapper / "dcp", no_dist=True)
        assert all(torch.equal(target[key], value) for key, value in tensors.items())
    for key, value in states[0].items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, states[1][key], msg=key)
