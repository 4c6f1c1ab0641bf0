"""scale-checkpoint beside torch's own checkpointing: CPU time over none, memory kept after the forward, parity.

    python benchmarks/checkpointing.py                                  # both models, all ways, 5 turns
    python benchmarks/checkpointing.py --rows gpt --only none,torch,all # a quick look
    python benchmarks/checkpointing.py --smoke                          # seconds: what does not depend on time
    python benchmarks/checkpointing.py --date 2026-11-21                # also writes results/2026-11-21-checkpointing.*

All ways live in one process with one thread and do a few training steps by turns; a ratio is the median over the turns
of a way's CPU time in a turn over that of plain training in the same turn. Memory is counted, not sampled: the bytes of
all storages that the forward has made and that still live when it returns, the loss's graph being all that holds them;
what was offloaded counts as the host's or the disk's. The share of the saving is what a way saves of that, over what
recomputing every block saves. On a CPU "the host" is the same memory: those rows show what the copies cost; a disk is
another place, whose pages the system may write out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

# Freed memory stays with the process: no page is faulted in twice. Read once by the C library, at the start.
_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647", "OMP_NUM_THREADS": "1"}
if __name__ == "__main__" and any(os.environ.get(key) != value for key, value in _ALLOCATOR.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_ALLOCATOR})

import torch  # noqa: E402
from engines import GPT, VOCABULARY  # noqa: E402
from measure import MB, spending  # noqa: E402
from report import Table, save  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # noqa: E402

from scale_checkpoint import apply_checkpointing, checkpoint_wrapper  # noqa: E402
from scale_checkpoint.live_memory import LiveMemory  # noqa: E402

LEARNING_RATE = 1e-3
_FOLDER = TemporaryDirectory(prefix="checkpointing-")  # removed when the program ends


class WrittenOut(nn.Module):
    """The attention of a block, written out: scores and weights [B, H, T, T] are kept for the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        block = self.block
        batch, length, width = x.shape
        size = width // block.heads
        qkv = block.qkv(block.attention_norm(x)).view(batch, length, 3, block.heads, size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        scores = query @ key.transpose(-2, -1) / size**0.5
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ value
        x = x + block.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + block.feed(block.feed_norm(x))
        return y


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        title: In words.
        shape: Layers, width, heads, length.
        batch: Sequences.
        written_out: Its attention is made of plain operators.
    """

    title: str
    shape: tuple[int, int, int, int]
    batch: int
    written_out: bool = False

    def build(self, layers: int | None = None) -> GPT:
        torch.manual_seed(0)
        model = GPT(layers or self.shape[0], *self.shape[1:])
        if self.written_out:
            model.blocks = nn.ModuleList(WrittenOut(block) for block in model.blocks)
        return model

    def data(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCABULARY, (self.batch, self.shape[3] + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


ROWS = {
    "gpt": Row("GPT 6x512, batch 2x128, fused attention", (6, 512, 8, 128), 2),
    "long": Row("GPT 4x256, batch 2x512, attention written out", (4, 256, 8, 512), 2, written_out=True),
    "tiny": Row("GPT 2x64, batch 2x32", (2, 64, 2, 32), 2),
}


class _ByTorch(nn.Module):
    def __init__(self, block: nn.Module, reentrant: bool, context: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.block, self.kwargs = block, {} if context is None else {"context_fn": context}
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant, **self.kwargs)
        return y


def _torch(reentrant: bool) -> Callable[[GPT], None]:
    def apply(model: GPT) -> None:
        model.blocks = nn.ModuleList(_ByTorch(block, reentrant) for block in model.blocks)

    return apply


def _each(**kwargs: object) -> Callable[[GPT], None]:
    def apply(model: GPT) -> None:
        for block in model.blocks:
            checkpoint_wrapper(block, **kwargs)  # type: ignore[arg-type]

    return apply


def _offloaded(model: GPT) -> None:
    for block in model.blocks:
        apply_checkpointing(block, "offload")


def _save_on_cpu(model: GPT) -> None:
    class Saved(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                y: Tensor = self.block(x)
            return y

    model.blocks = nn.ModuleList(Saved(block) for block in model.blocks)


def _widest(context: object, operator: object, *args: Tensor, **kwargs: object) -> bool:
    """Keeps the widest layer of each block alone: of all linear layers it takes longest, and its result is largest."""
    return operator is torch.ops.aten.addmm.default and args[2].shape[1] > 3 * args[1].shape[1]


def _narrow(context: object, operator: object, *args: Tensor, **kwargs: object) -> bool:
    """Keeps projections up to three times as wide as what they project, and fused attention: not the feed-forward."""
    name = str(operator)
    if name == "aten.addmm.default":
        return args[2].shape[1] <= 3 * args[1].shape[1]
    return name.startswith("aten._scaled_dot_product")


def _torch_selective(model: GPT) -> None:
    aten = torch.ops.aten
    kept = [aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
    model.blocks = nn.ModuleList(
        _ByTorch(block, False, partial(create_selective_checkpoint_contexts, kept)) for block in model.blocks
    )


def _in_folder(**kwargs: object) -> Callable[[GPT], None]:
    def apply(model: GPT) -> None:
        for block in model.blocks:
            apply_checkpointing(block, offload_to=Path(_FOLDER.name), **kwargs)  # type: ignore[arg-type]

    return apply


@dataclass(frozen=True)
class Way:
    """One way to train."""

    title: str
    apply: Callable[[GPT], None]
    by_default: bool = True


def _nothing(model: GPT) -> None:
    pass


WAYS = {
    "none": Way("none", _nothing),
    "torch": Way("torch, non-reentrant", _torch(False)),
    "torch-reentrant": Way("torch, reentrant", _torch(True)),
    "all": Way("scale-checkpoint, every block", _each()),
    "torch-selective": Way("torch, selective, keep linear layers and attention", _torch_selective),
    "selective": Way("scale-checkpoint, selective", _each(keep="selective")),
    "linear": Way(
        "scale-checkpoint, keep linear layers", _each(keep=["addmm", "_scaled_dot_product.*"]), by_default=False
    ),
    "narrow": Way("scale-checkpoint, keep all linear but the widest", _each(keep=_narrow), by_default=False),
    "widest": Way("scale-checkpoint, keep the widest layer alone", _each(keep=_widest)),
    "selective-host": Way(
        "scale-checkpoint, selective, all of it to the host", _each(keep="selective", offload_to_cpu=True)
    ),
    "selective-folder": Way(
        "scale-checkpoint, selective, the large half of it to a disk",
        _in_folder(how="selective", offload_inputs=True, min_bytes=2 << 20),
    ),
    "all-offload": Way("scale-checkpoint, every block, inputs to the host", _each(offload_to_cpu=True)),
    "offload": Way("scale-checkpoint, all to the host", _offloaded),
    "folder": Way("scale-checkpoint, all to a disk", _in_folder(how="offload")),
    "save-on-cpu": Way("torch save_on_cpu", _save_on_cpu),
}
REFERENCE, WHOLE = "none", "all"


class Training:
    """One way on one model, advanced by steps."""

    def __init__(self, row: Row, way: str, layers: int | None = None) -> None:
        self.row, self.model = row, row.build(layers)
        WAYS[way].apply(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.generator = torch.Generator().manual_seed(1)
        self.losses: list[float] = []

    def step(self) -> None:
        loss = self.model(*self.row.data(self.generator))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def kept_bytes(self) -> int:
        """Returns what lives after the forward, beside parameters and batch."""
        inputs, targets = self.row.data(self.generator)
        with LiveMemory(torch.device("cpu")) as live:
            loss = self.model(inputs, targets)
            kept = live.current_bytes
        live.close()
        loss.backward()
        self.optimizer.zero_grad()
        return kept


@dataclass
class Result:
    """One way on one model.

    Attributes:
        cpu_seconds: Per step, by turn.
        cpu_ratio: Over none in the same turn, median.
        kept_mb: After the forward.
        share: Of what recomputing every block saves.
        kept_by_depth: MB, by the number of blocks.
        parity: Whether all losses equal those of plain training to the bit.
    """

    row: str
    way: str
    cpu_seconds: list[float] = field(default_factory=list)
    cpu_ratio: float | None = None
    kept_mb: float | None = None
    share: float | None = None
    kept_by_depth: dict[int, float] = field(default_factory=dict)
    parity: bool | None = None


def measure(row: str, ways: Sequence[str], turns: int, steps: int, depths: Sequence[int]) -> list[Result]:
    trainings = {way: Training(ROWS[row], way) for way in ways}
    results = {way: Result(row, way) for way in ways}
    for training in trainings.values():
        training.step()
    for turn in range(turns):
        shift = turn % len(ways)
        for way in [*ways[shift:], *ways[:shift]]:  # Nobody always runs after the same neighbor.
            with spending() as spent:
                for _ in range(steps):
                    trainings[way].step()
            results[way].cpu_seconds.append(spent.cpu_seconds / steps)
    plain = results[REFERENCE]
    for way, result in results.items():
        pairs = zip(result.cpu_seconds, plain.cpu_seconds, strict=True)
        result.cpu_ratio = median(mine / theirs for mine, theirs in pairs)
        result.parity = trainings[way].losses == trainings[REFERENCE].losses
        result.kept_mb = trainings[way].kept_bytes() / MB
        result.kept_by_depth = {depth: Training(ROWS[row], way, depth).kept_bytes() / MB for depth in depths}
    if WHOLE in results:
        most = plain.kept_mb - results[WHOLE].kept_mb
        for result in results.values():
            result.share = (plain.kept_mb - result.kept_mb) / most
    return list(results.values())


def tables_of(row: str, results: Sequence[Result]) -> list[Table]:
    heads = ["", "CPU over none", "kept MB", "share of the saving", "losses as none"]
    lines = [
        [
            WAYS[result.way].title,
            f"{result.cpu_ratio:.3f}",
            f"{result.kept_mb:.1f}",
            "" if result.share is None else f"{result.share:.0%}",
            "to the bit" if result.parity else "no",
        ]
        for result in results
    ]
    tables = [Table(ROWS[row].title, heads, lines)]
    depths = list(results[0].kept_by_depth)
    if depths:
        heads = ["kept MB, by blocks", *map(str, depths)]
        lines = [[WAYS[r.way].title, *(f"{r.kept_by_depth[depth]:.1f}" for depth in depths)] for r in results]
        tables.append(Table(f"{ROWS[row].title}: memory kept by depth", heads, lines))
    return tables


def check(results: Sequence[Result]) -> list[str]:
    """Returns what is wrong with figures that do not depend on time."""
    problems = [f"{r.row}, {r.way}: losses differ from plain training" for r in results if not r.parity]
    kept = {result.way: result.kept_mb or 0.0 for result in results}
    if "all" in kept and "torch" in kept and kept["all"] > 1.01 * kept["torch"]:
        problems.append(f"keeps {kept['all']:.2f} MB where torch's own keeps {kept['torch']:.2f}")
    return problems


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="gpt,long", help=f"of {', '.join(ROWS)}")
    default = [name for name, way in WAYS.items() if way.by_default]
    parser.add_argument("--only", default=",".join(default), help=f"ways, of {', '.join(WAYS)}; none comes always")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="per way and turn")
    parser.add_argument("--depths", default="2,6,12", help="numbers of blocks to count memory for")
    parser.add_argument("--check", action="store_true", help="fail where memory or losses are not as they must be")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one turn, checked")
    parser.add_argument("--date", help="writes results/DATE-checkpointing.json and .md")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rows, options.turns, options.steps, options.depths, options.check = "tiny", 1, 1, "1,2", True
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    ways = list(dict.fromkeys([REFERENCE, *options.only.split(",")]))
    depths = [int(depth) for depth in options.depths.split(",") if depth]
    found = []
    tables = []
    for row in options.rows.split(","):
        results = measure(row, ways, options.turns, options.steps, depths)
        found += results
        for table in tables_of(row, results):
            print(table.markdown(), flush=True)
            tables.append(table)
    if options.date:
        save("checkpointing", options.date, __doc__ or "", tables, [asdict(result) for result in found])
    problems = check(found)
    if options.check and problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
