"""What it takes to bring a folder of safetensors into a sharded model and back, beside plain reading and writing.

    python benchmarks/pretrained.py                      # 1 GB of weights in bf16, 2 ranks, 5 turns
    python benchmarks/pretrained.py --mb 100 --turns 3   # a quick look
    python benchmarks/pretrained.py --smoke              # seconds: what does not depend on time
    python benchmarks/pretrained.py --date 2026-11-23    # also writes results/2026-11-23-pretrained.*

A Llama of transformers, saved by its own `save_pretrained` in files of a tenth of it. All ways take turns; a turn is as
long as its slower rank, and ratios are medians of ratios within one turn. Loading:

- *plain read*: each rank reads its share of the bytes of all files into new memory, in pieces of 64 MiB.
- *load_pretrained*: into a model of `fully_shard_modules(..., options=ShardOptions(init=False))` on the meta device.
- *with memory*: the same two into memory that was written to before.
- *from_pretrained*: transformers reads the whole model on each rank, which is sharded afterwards.

The files are in the system's cache (*warm*), or were taken out of it before (*cold*). Saving waits for the disk:

- *plain write*: each rank writes its share of the bytes into a file of its own.
- *save_pretrained*: ours, of the sharded model; and *gathered*: the full state dict is gathered on rank 0, which
  calls `save_pretrained` of transformers, whose files are then brought to the disk.

Extra memory is the largest resident size during a call over that before it, less what stays, of the rank with most.
After each load, all weights are compared with those that were saved; each saved folder is read and compared, too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import MB, peak_bytes, reset_peak, resident_bytes
from report import Table, save
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import run_ranks
from scale_fsdp import ShardOptions, full_state_dict, fully_shard_modules, no_split_policy
from scale_snapshot import load_pretrained, save_pretrained
from scale_snapshot.format.safetensors_io import memory_of
from scale_snapshot.format.stored_file import opened

LOADING = {
    "plain read": "plain read",
    "load_pretrained": "plain read",
    "from_pretrained": "plain read",
    "plain read, with memory": "plain read, with memory",
    "load_pretrained, with memory": "plain read, with memory",
}
SAVING = {"plain write": "plain write", "save_pretrained": "plain write", "gathered": "plain write"}
PIECE = 64 << 20


def config_of(num_mb: float) -> LlamaConfig:
    """About so many MB in bf16: 8 layers, and embeddings of a tenth."""
    width = max(64, int((num_mb * MB / 2 / 8 / 12) ** 0.5) // 64 * 64)
    return LlamaConfig(
        vocab_size=8 * width,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 64 * 64,
        num_hidden_layers=8,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        dtype="bfloat16",
    )


def on_meta(config: LlamaConfig) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard_modules(model, no_split_policy(model), **options)


def share(num_bytes: int) -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return num_bytes * rank // size, num_bytes * (rank + 1) // size


def plain_read(files: list[Path], memory: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    held: list[torch.Tensor] = []
    for number, file in enumerate(files):
        begin, end = share(file.stat().st_size)
        held.append(memory[number] if memory else torch.empty(end - begin, dtype=torch.uint8))
        with opened(file) as stored:
            for at in range(0, end - begin, PIECE):
                stored.read_into([memory_of(held[-1][at : at + PIECE])], begin + at)
    return held


def plain_write(data: torch.Tensor, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / f"{dist.get_rank()}").open("wb", buffering=0) as file:
        view = memory_of(data)
        while view:
            view = view[file.write(view[:PIECE]) :]
        os.fsync(file.fileno())


def gathered(model: nn.Module, folder: Path, config: LlamaConfig, limit: int) -> None:
    state = full_state_dict(model, rank_0_only=True, device="cpu")
    if dist.get_rank() == 0:
        plain: Any = on_meta(config)
        plain.load_state_dict(state, assign=True)
        plain.save_pretrained(folder, max_shard_size=limit)
        for file in folder.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
    dist.barrier()


def digest(model: nn.Module) -> str:
    """Of this rank's parts."""
    hashed = hashlib.sha256()
    for param in model.parameters():
        hashed.update(memory_of(local_tensor(param).detach().contiguous()))
    return hashed.hexdigest()


def forget(files: list[Path]) -> None:
    """Takes files out of the system's cache."""
    for file in files:
        with file.open("rb") as stored:
            os.fsync(stored.fileno())
            os.posix_fadvise(stored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(act: Callable[[], object]) -> tuple[dict[str, float], object]:
    """Calls on all ranks at once; what it took, and what it returned."""
    dist.barrier()
    reset_peak()
    before, began = resident_bytes(), time.perf_counter()
    result = act()
    seconds = time.perf_counter() - began
    extra = peak_bytes() - max(before, resident_bytes())
    dist.barrier()
    return {"seconds": seconds, "extra_mb": max(extra, 0) / MB}, result


def run(folder: str, options: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    source, torch_threads = Path(folder) / "source", torch.get_num_threads()
    torch.set_num_threads(1)
    config = config_of(options["mb"])
    files = sorted(source.glob("*.safetensors"))
    limit = int(options["mb"] * MB / 10)
    found: dict[str, list[dict[str, float]]] = {}

    def load(way: str, *, cold: bool) -> tuple[dict[str, float], object]:
        model = sharded(on_meta(config), options=ShardOptions(init=False)) if way.startswith("load") else None
        memory = plain_read(files) if way == "plain read, with memory" else None
        if model is not None and "with memory" in way:
            load_pretrained(model, source)
        dist.barrier()
        if cold:
            forget(files)
        if model is not None:
            return timed(lambda: load_pretrained(model, source))[0], model
        if way == "from_pretrained":
            return timed(lambda: sharded(AutoModelForCausalLM.from_pretrained(source)))
        return timed(lambda: plain_read(files, memory))

    expected = digest(sharded(AutoModelForCausalLM.from_pretrained(source)))
    for turn in range(-1, options["turns"]):
        for kind in ("warm", "cold"):
            for way in LOADING:
                spent, loaded = load(way, cold=kind == "cold")
                assert not isinstance(loaded, nn.Module) or digest(loaded) == expected, way
                del loaded
                if turn >= 0:
                    found.setdefault(f"{kind}: {way}", []).append(spent)
    model = sharded(on_meta(config), options=ShardOptions(init=False))
    load_pretrained(model, source)
    data = torch.ones(sum(file.stat().st_size for file in files) // dist.get_world_size(), dtype=torch.uint8)
    place = Path(folder) / "saved"
    for turn in range(-1, options["turns"]):
        for way in SAVING:
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(place, ignore_errors=True)
            dist.barrier()
            if way == "plain write":
                spent, _ = timed(lambda: plain_write(data, place))
            elif way == "save_pretrained":
                spent, _ = timed(lambda: save_pretrained(model, place, max_shard_size=limit))
            else:
                spent, _ = timed(lambda: gathered(model, place, config, limit))
            if way != "plain write":
                assert digest(sharded(AutoModelForCausalLM.from_pretrained(place))) == expected, way
            if turn >= 0:
                found.setdefault(way, []).append(spent)
    torch.set_num_threads(torch_threads)
    return found


def table_of(
    title: str, ways: dict[str, str], before: str, ranks: list[dict[str, list[dict[str, float]]]], mb: float
) -> Table:
    def seconds(way: str) -> list[float]:
        turns = zip(*(rank[before + way] for rank in ranks), strict=True)
        return [max(each["seconds"] for each in turn) for turn in turns]

    rows = []
    for way, plain in ways.items():
        ratio = median(one / other for one, other in zip(seconds(way), seconds(plain), strict=True))
        extra = max(median(each["extra_mb"] for each in rank[before + way]) for rank in ranks)
        took = median(seconds(way))
        rows.append([way, f"{ratio:.2f}", f"{took:.3f}", f"{mb / 1000 / took:.2f}", f"{extra:.0f}"])
    return Table(title, ["", "over plain", "s", "GB/s", "extra MB"], rows)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mb", type=float, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", help="where to write; a temporary directory if left out")
    parser.add_argument("--smoke", action="store_true", help="2 MB, one turn; checked")
    parser.add_argument("--date", help="writes results/DATE-pretrained.json and .md")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.mb, options.turns = 2, 1
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="pretrained-") as folder:
        model: Any = AutoModelForCausalLM.from_config(config_of(options.mb), dtype=torch.bfloat16)
        mb = sum(param.nbytes for param in model.parameters()) / MB
        model.save_pretrained(f"{folder}/source", max_shard_size=int(options.mb * MB / 10))
        del model
        ranks = run_ranks(run, options.ranks, folder, {"mb": options.mb, "turns": options.turns}, limit_seconds=3600)
    title = f"{mb:.0f} MB in bf16, {options.ranks} ranks"
    tables = [table_of(f"{kind} files, {title}", LOADING, f"{kind}: ", ranks, mb) for kind in ("warm", "cold")]
    tables.append(table_of(f"saving, {title}", SAVING, "", ranks, mb))
    for table in tables:
        print(table.markdown(), flush=True)
    if options.date:
        save("pretrained", options.date, __doc__ or "", tables, ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
