"""Gathering and loading full state dicts at world 2: scale-fsdp beside torch.distributed.checkpoint over FSDP2.

    python benchmarks/state_dicts.py                         # 200M parameters, 5 turns; some 16 GB of memory
    python benchmarks/state_dicts.py --rows 20m --turns 2    # a quick look
    python benchmarks/state_dicts.py --smoke                 # seconds: what does not depend on time
    python benchmarks/state_dicts.py --date 2026-11-21       # also writes results/2026-11-21-state_dicts.*

A GPT in fp32, one unit per block, with fused Adam that has stepped once. "gather" brings the full state to the host of
rank 0, and to no other rank; "load" takes full tensors that every rank has, as from a file that all of them map.
FSDP2's are `get_model_state_dict` and `get_optimizer_state_dict` with `full_state_dict=True, cpu_offload=True`, and
`set_model_state_dict` and `set_optimizer_state_dict` with `full_state_dict=True`. scale-fsdp's are `full_state_dict`,
`full_optim_state_dict`, `model.load_state_dict` and `shard_optim_state_dict` with the optimizer's own
`load_state_dict`; "by torch's functions" is the same model under the functions of the line above.

Time is taken with all engines' ranks alive at once, one thread each, by turns; a ratio is the median over the turns of
an engine's time in a turn over that of FSDP2 in the same turn. CPU time is that of both ranks, wall time that of the
slower one. Peaks are those of rank 0 over what it held before, the result included, in a second pass with processes
whose allocator returns freed tensors to the system at once.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from engines import GPT
from measure import MB, peak_bytes, reset_peak, resident_bytes, spending
from report import Table, save
from team import ALLOCATOR_FOR_MEMORY, ALLOCATOR_FOR_TIME, Handlers, Nursery, Team, TeamError, raise_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

import scale_fsdp

LENGTH = 16
REFERENCE = "fsdp2"
GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
GIVEN = StateDictOptions(full_state_dict=True)
OPERATIONS = ("gather model", "load model", "gather optimizer", "load optimizer")


@dataclass(frozen=True)
class Row:
    """One size of the model.

    Attributes:
        title: In words.
        layers: Number of blocks.
        width: Features.
    """

    title: str
    layers: int
    width: int


ROWS = {
    "200m": Row("GPT 16x1024, 202M parameters", 16, 1024),
    "60m": Row("GPT 12x640, 59M parameters", 12, 640),
    "20m": Row("GPT 6x512, 19M parameters", 6, 512),
    "tiny": Row("GPT 2x64, 0.1M parameters", 2, 64),
}


class Fsdp2:
    """FSDP2 under torch's own functions."""

    title = "FSDP2"

    def __init__(self, row: Row) -> None:
        torch.manual_seed(0)
        self.model = self.shard(GPT(row.layers, row.width, 8, LENGTH))
        self.optimizer: Optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
        self.model(tokens, tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def shard(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:  # type: ignore[union-attr]  # a module's attribute, to the type checker
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def gather_model(self) -> Mapping[str, Any]:
        return get_model_state_dict(self.model, options=GATHERED)

    def load_model(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state, options=GIVEN)

    def gather_optimizer(self) -> Mapping[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=GATHERED)

    def load_optimizer(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=GIVEN)


class ScaleByTorch(Fsdp2):
    """scale-fsdp under torch's functions."""

    title = "scale-fsdp, by torch's functions"

    def shard(self, model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]  # a module's attribute, to the type checker
            scale_fsdp.fully_shard(block)
        return scale_fsdp.fully_shard(model)


class Scale(ScaleByTorch):
    """scale-fsdp under its own."""

    title = "scale-fsdp"

    def gather_model(self) -> Mapping[str, Any]:
        return scale_fsdp.full_state_dict(self.model, rank_0_only=True, device="cpu")

    def load_model(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)

    def gather_optimizer(self) -> Mapping[str, Any]:
        return scale_fsdp.full_optim_state_dict(self.model, self.optimizer) or {}

    def load_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(scale_fsdp.shard_optim_state_dict(state, self.model, self.optimizer))


ENGINES: dict[str, type[Fsdp2]] = {"fsdp2": Fsdp2, "scale": Scale, "scale-by-torch": ScaleByTorch}


class Rank:
    """A rank's side: one engine, and what is loaded into it. It answers with what an operation has cost."""

    def __init__(self, row: Row, engine: str) -> None:
        self.engine = ENGINES[engine](row)

    def run(self, operation: str) -> dict[str, Any]:
        """What the operation costs, and what the state was, in a digest; a loaded state is random."""
        work, given = self._work(operation)
        expected = digest(given)  # FSDP2 changes what it is given.
        gc.collect()
        dist.barrier()
        base = resident_bytes()
        reset_peak()
        with spending() as spent:
            result = work()
        answer = {**asdict(spent), "peak": peak_bytes() - base, "digest": expected if given else digest(result)}
        if given:  # What was loaded must be what is gathered afterwards.
            del result
            gathered = getattr(self.engine, operation.replace("load ", "gather_"))()
            answer["kept"] = dist.get_rank() != 0 or digest(gathered) == answer["digest"]
            del gathered
        del work, given
        give_back()
        return answer

    def _work(self, operation: str) -> tuple[Callable[[], Any], dict[str, Any]]:
        verb, _, what = operation.partition(" ")
        method = getattr(self.engine, f"{verb}_{what}")
        if verb == "gather":
            return method, {}
        state = [dict(getattr(self.engine, f"gather_{what}")())]
        shapes = [describe(state[0])]
        dist.broadcast_object_list(shapes, 0)  # Rank 0 alone has gathered it.
        generator = torch.Generator().manual_seed(1)
        given = rebuilt(shapes[0], generator)
        return lambda: method(given), given


def give_back() -> None:
    """Returns what was freed to the system: the ranks of all engines are alive at once, and share its memory."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def describe(state: Any) -> Any:
    """A state with the shape and dtype of each tensor in its place."""
    if isinstance(state, Tensor):
        return (tuple(state.shape), state.dtype, state.item() if state.ndim == 0 else None)
    if isinstance(state, dict):
        return {key: describe(value) for key, value in state.items()}
    return [describe(value) for value in state] if isinstance(state, list) else ("=", state)


def rebuilt(shapes: Any, generator: torch.Generator) -> Any:
    """A state of random tensors of these shapes; scalars are as they were."""
    if isinstance(shapes, dict):
        return {key: rebuilt(value, generator) for key, value in shapes.items()}
    if isinstance(shapes, list):
        return [rebuilt(value, generator) for value in shapes]
    if shapes[0] == "=":
        return shapes[1]
    shape, dtype, value = shapes
    return torch.tensor(value, dtype=dtype) if value is not None else torch.rand(shape, generator=generator).to(dtype)


def digest(state: Any) -> str:
    """A number for all tensors of a state, by their names."""
    summed = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(_tensors(state, "")):
        summed.update(name.encode())
        summed.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return summed.hexdigest()


def _tensors(state: Any, name: str) -> list[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        return [(name, state)]
    children = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list) else ()
    return [found for key, value in children for found in _tensors(value, f"{name}/{key}")]


def start_rank(order: dict[str, Any]) -> Handlers:
    rank = Rank(ROWS[order["row"]], order["engine"])
    return {"run": rank.run}


@dataclass
class Result:
    """One engine and one operation.

    Attributes:
        cpu_seconds: Per turn, of both ranks.
        wall_seconds: Per turn, of the slower rank.
        cpu_ratio: Over the reference in the same turn, median.
        wall_ratio: The same of wall time.
        sent_mb: Of the rank that sends more.
        peak_mb: Rank 0's, over what it held before.
        parity: Whether the state equals the reference's to the bit, and what was loaded is there.
        error: Why it does not run.
    """

    row: str
    engine: str
    operation: str
    cpu_seconds: list[float] = field(default_factory=list)
    wall_seconds: list[float] = field(default_factory=list)
    cpu_ratio: float | None = None
    wall_ratio: float | None = None
    sent_mb: float | None = None
    peak_mb: float | None = None
    parity: bool | None = None
    error: str | None = None


Results = dict[tuple[str, str], Result]


def measure_time(nursery: Nursery, row: str, results: Results, engines: Sequence[str], turns: int) -> None:
    """All engines by turns, one operation after the other; fills all but the peaks."""
    teams = {name: Team(nursery, {"row": row, "engine": name}) for name in engines}
    digests: dict[tuple[str, str], str] = {}
    try:
        for operation in OPERATIONS:
            for turn in range(-1, turns):  # The first one warms up.
                tell(f"{row}: {operation}, {f'turn {turn + 1} of {turns}' if turn >= 0 else 'warming up'}")
                shift = turn % len(engines)
                for name in (*engines[shift:], *engines[:shift]):  # Nobody always runs after the same neighbor.
                    result = results[name, operation]
                    if result.error is not None:
                        continue
                    try:
                        answers = teams[name].ask("run", operation=operation)
                    except TeamError as error:
                        result.error = str(error).splitlines()[0]
                        tell(f"{row}: {operation}, {ENGINES[name].title}: {error}")
                        continue
                    digests[name, operation] = answers[0]["digest"]
                    result.parity = all(answer.get("kept", True) for answer in answers)
                    result.sent_mb = max(answer["bytes_sent"] for answer in answers) / MB
                    if turn >= 0:
                        result.cpu_seconds.append(sum(answer["cpu_seconds"] for answer in answers))
                        result.wall_seconds.append(max(answer["wall_seconds"] for answer in answers))
    finally:
        for team in teams.values():
            team.close()
    for (name, operation), result in results.items():
        reference = results.get((REFERENCE, operation))
        if result.error is None and reference is not None and reference.error is None:
            result.parity = bool(result.parity) and digests[name, operation] == digests[REFERENCE, operation]
            result.cpu_ratio = _ratio(result.cpu_seconds, reference.cpu_seconds)
            result.wall_ratio = _ratio(result.wall_seconds, reference.wall_seconds)


def measure_memory(nursery: Nursery, row: str, results: Results, engines: Sequence[str]) -> None:
    """One engine after the other; fills the peaks."""
    for name in engines:
        tell(f"{row}: memory of {ENGINES[name].title}")
        with Team(nursery, {"row": row, "engine": name}) as team:
            for operation in OPERATIONS:
                if results[name, operation].error is None:
                    team.ask("run", operation=operation)  # Code that is loaded at the first use is no part of it.
                    results[name, operation].peak_mb = team.ask("run", operation=operation)[0]["peak"] / MB


def tell(line: str) -> None:
    """How far it is: a row is printed when it is whole, which on a loaded machine takes many minutes."""
    print(line, file=sys.stderr, flush=True)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def table_of(row: str, results: Sequence[Result]) -> Table:
    heads = ["", "", "wall", "CPU", "CPU s", "wall s", "peak MB", "sent MB", "state"]
    lines = []
    for result in results:
        title = ENGINES[result.engine].title
        if result.error is not None:
            lines.append([result.operation, title, f"does not run: {result.error}", *[""] * (len(heads) - 3)])
            continue
        parity = {True: "to the bit", False: "differs", None: ""}[result.parity]
        numbers = [
            (result.wall_ratio, ".2f"),
            (result.cpu_ratio, ".2f"),
            (median(result.cpu_seconds), ".3f"),
            (median(result.wall_seconds), ".3f"),
            (result.peak_mb, ".0f"),
            (result.sent_mb, ".1f"),
        ]
        cells = ["" if value is None else format(value, form) for value, form in numbers]
        lines.append([result.operation, title, *cells, parity])
    return Table(ROWS[row].title, heads, lines)


def check(row: str, results: Sequence[Result]) -> list[str]:
    """Returns what is wrong with figures that do not depend on time."""
    return [
        f"{row}, {result.engine}, {result.operation}: {result.error or 'the state differs'}"
        for result in results
        if result.error is not None or result.parity is False
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="200m", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--only", default=",".join(ENGINES), help=f"engines, of {', '.join(ENGINES)}")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true", help="leave the memory pass out")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one turn, no memory pass; checked")
    parser.add_argument("--date", help="writes results/DATE-state_dicts.json and .md")
    parser.add_argument("--nursery", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rows, options.turns, options.no_memory = "tiny", 1, True
    return options


def measure(options: argparse.Namespace) -> dict[str, list[Result]]:
    """Returns the results by row, and prints each row's table when it is there."""
    found, engines = {}, options.only.split(",")
    with Nursery(__file__, ALLOCATOR_FOR_TIME) as fast, Nursery(__file__, ALLOCATOR_FOR_MEMORY) as exact:
        for row in options.rows.split(","):
            results = {(name, what): Result(row, name, what) for what in OPERATIONS for name in engines}
            measure_time(fast, row, results, engines, options.turns)
            if not options.no_memory:
                measure_memory(exact, row, results, engines)
            found[row] = list(results.values())
            print(table_of(row, found[row]).markdown(), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.nursery is not None:
        return raise_ranks(options.nursery, start_rank)
    found = measure(options)
    if options.date:
        tables = [table_of(row, results) for row, results in found.items()]
        figures = [asdict(result) for results in found.values() for result in results]
        save("state_dicts", options.date, __doc__ or "", tables, figures)
    problems = [problem for row, results in found.items() for problem in check(row, results)]
    if options.smoke and problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
