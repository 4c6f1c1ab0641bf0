"""loading.py and saving.py: folders as the safetensors library writes and reads them, for models of any form."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat_by_hand import SHAPES, make, whole_params
from safetensors.torch import load_file, save_file
from sharded_by_hand import Model, cut
from torch import Tensor, nn

from scale_core.comm.group import Group, group_of
from scale_core.shard import Axis, Placement, Shard, on_local_tensors, shard_of
from scale_core.sharded_tensor.tensor import set_shard
from scale_core.state.param_ownership import register_flat_param
from scale_core.testing import run_ranks
from scale_snapshot import ForeignCheckpointError, SnapshotError, load_pretrained, save_pretrained
from scale_snapshot.pretrained import saving

pytestmark = pytest.mark.local_tensors


def write_folder(folder: Path, tensors: dict[str, Tensor], per_file: int = 3) -> Path:
    """As `save_pretrained` of Hugging Face writes it, by the library of the format."""
    folder.mkdir(exist_ok=True)
    names, index = list(tensors), {}
    for number, first in enumerate(range(0, len(names), per_file)):
        file = f"model-{number + 1:05d}-of-00099.safetensors"
        part = {name: tensors[name].contiguous() for name in names[first : first + per_file]}
        save_file(part, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def read_folder(folder: Path) -> dict[str, Tensor]:
    files = {*json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()}
    return {name: tensor for file in sorted(files) for name, tensor in load_file(folder / file).items()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A tied weight once, as the format has it."""
    return {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}


def trained() -> Model:
    model = Model()
    with torch.no_grad():
        for number, tensor in enumerate((*model.parameters(), *model.buffers())):
            tensor.add_(number)
    return model


def own_part(model: nn.Module) -> nn.Module:
    return cut(model, dist.get_rank(), dist.get_world_size(), leave_whole=("frozen", "inner.0.bias"))


def emptied() -> Model:
    model = Model()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    return model


@on_local_tensors
def loads_and_saves(folder: str, copy: str) -> list[str]:
    model, expected, calls = own_part(emptied()), own_part(trained()), []
    load_pretrained(model, folder, progress=lambda done, total: calls.append((done, total)))
    wanted = dict(expected.named_parameters()) | dict(expected.named_buffers())
    mine = dict(model.named_parameters()) | dict(model.named_buffers())
    wrong = [name for name in wanted if name != "scratch" and not torch.equal(mine[name], wanted[name])]
    wrong += [f"progress: {calls}"] * (calls[-1][0] != calls[-1][1])
    save_pretrained(model, copy, max_shard_size=80)
    return wrong


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_reads_its_own_parts_and_writes_them_back(tmp_path: Path, world: int) -> None:
    folder = write_folder(tmp_path / "hub", weights(trained()))
    assert not any(run_ranks(loads_and_saves, world, str(folder), str(tmp_path / "copy")))
    read, wanted = read_folder(tmp_path / "copy"), weights(trained())
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[name], wanted[name]) and read[name].dtype == wanted[name].dtype for name in wanted)
    assert sum(path.stat().st_size for path in (tmp_path / "copy").glob("*.safetensors")) > 80
    assert [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name] == []


@on_local_tensors
def load_flat(folder: str, copy: str) -> list[str]:
    group = group_of()
    buffer = make(group, flatten=True)
    register_flat_param(buffer)
    holder = nn.Module()
    holder.flat = buffer.sharded_params[0]
    with torch.no_grad():
        holder.flat.zero_()
    load_pretrained(holder, folder)
    held = make(group, flatten=True).sharded_params[0]
    save_pretrained(holder, copy, max_shard_size="1KB")
    return [] if torch.equal(holder.flat, held) else ["the flat parameter differs"]


def test_a_flat_parameter_is_filled_by_the_names_that_it_holds(tmp_path: Path) -> None:
    tensors = {name: param.detach() for name, param in zip(SHAPES, whole_params(), strict=True)}
    folder = write_folder(tmp_path / "hub", tensors)
    assert not any(run_ranks(load_flat, 2, str(folder), str(tmp_path / "copy")))
    read = load_file(tmp_path / "copy" / "model.safetensors")
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def columns(held: tuple[tuple[int, int], ...], value: Tensor) -> nn.Module:
    """A layer of which this process has some columns alone."""
    layer = nn.Linear(6, 4, bias=False)
    param = nn.Parameter(torch.cat([value[:, first:last] for first, last in held], 1).clone())
    shard = Shard.of_ranges("weight", (4, 6), (((0, 4),), held), (Axis(Group(rank=0, size=2), Placement.SHARD),))
    set_shard(param, shard)
    layer.weight = param
    return layer


def test_columns_are_written_between_those_of_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(24.0).view(4, 6)
    monkeypatch.setattr(saving, "_STAGED_BYTES", 16)  # So that what is not in order passes in several blocks.
    path = tmp_path / "file"
    path.write_bytes(bytes(96))
    descriptor = os.open(path, os.O_WRONLY)
    for held in (((0, 2), (5, 6)), ((2, 5),)):
        for first, last in held:
            part = saving.Chunk((0, first), (4, last - first))
            saving._write_part(descriptor, 0, saving.Chunk((0, 0), (4, 6)), part, whole[:, first:last])
    os.close(descriptor)
    assert torch.equal(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(4, 6), whole)
    layer = columns(((1, 2), (4, 6)), torch.zeros(4, 6))
    load_pretrained(layer, write_folder(tmp_path / "hub", {"weight": whole}))
    assert torch.equal(layer.weight, whole[:, [1, 4, 5]])


def cut_on_meta() -> Any:
    model = Model().to("meta")
    model.head.weight = model.embed.weight  # `to` unties.
    return cut(model, 0, 1)


def test_a_model_on_meta_gets_memory_ties_and_buffers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hub", weights(trained()))
    with pytest.raises(SnapshotError, match=r"no file has the buffer scratch, on the meta device: pass init="):
        load_pretrained(cut_on_meta(), folder)
    model = cut_on_meta()
    load_pretrained(model, folder, init=lambda module: module.scratch.fill_(7))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.scratch, torch.full((2,), 7.0))
    assert shard_of(model.inner[0].weight) is not None
    assert all(
        torch.equal(model.state_dict()[name].view(-1), tensor.view(-1)) for name, tensor in weights(trained()).items()
    )


def test_what_differs_is_told_at_once_with_near_names(tmp_path: Path) -> None:
    tensors = weights(trained())
    tensors["inner.0.weights"] = tensors.pop("inner.0.weight")
    tensors["head.bias"] = torch.zeros(3)
    model = emptied()
    with pytest.raises(SnapshotError) as caught:
        load_pretrained(model, write_folder(tmp_path / "hub", tensors))
    for text in (
        "1 missing in it: inner.0.weight;",
        "1 unexpected in it: inner.0.weights",
        "inner.0.weight may be the saved inner.0.weights",
        "head.bias: the saved shape is (3,), expected (7,)",
    ):
        assert text in str(caught.value)
    assert not any(param.any() for param in model.parameters())
    with pytest.warns(UserWarning, match="loaded in part"):
        load_pretrained(model, tmp_path / "hub", strict=False)
    assert torch.equal(model.embed.weight, trained().embed.weight) and not model.inner[0].weight.any()


def test_names_of_others_are_mapped_by_expressions(tmp_path: Path) -> None:
    tensors = {f"net.{name}": tensor for name, tensor in weights(trained()).items()}
    model = emptied()
    load_pretrained(model, write_folder(tmp_path / "hub", tensors), key_mapping={r"^net\.(.*)": r"\1"})
    assert torch.equal(model.embed.weight, trained().embed.weight)


def test_other_dtypes_are_an_error_unless_they_are_to_be_cast(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hub", {name: tensor.float() for name, tensor in weights(trained()).items()})
    model = emptied().to(torch.bfloat16)
    with pytest.raises(SnapshotError, match=r"the saved dtype is torch.float32, expected torch.bfloat16.*cast=True"):
        load_pretrained(model, folder)
    load_pretrained(model, folder, cast=True)
    assert torch.equal(model.embed.weight, trained().embed.weight.to(torch.bfloat16))


def test_a_tied_weight_may_be_saved_twice_if_both_are_equal(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in trained().state_dict().items()}
    model = emptied()
    load_pretrained(model, write_folder(tmp_path / "hub", tensors))
    assert torch.equal(model.embed.weight, tensors["head.weight"])
    tensors["head.weight"][-1, -1] += 1
    with pytest.raises(SnapshotError, match=r"embed.weight and head.weight are one tensor.*differ"):
        load_pretrained(model, write_folder(tmp_path / "other", tensors))
    only_last = {name: tensor for name, tensor in tensors.items() if name != "embed.weight"}
    load_pretrained(model, write_folder(tmp_path / "last", only_last))
    assert torch.equal(model.embed.weight, tensors["head.weight"])


def test_a_folder_of_pickles_is_refused_with_a_fix(tmp_path: Path) -> None:
    from scale_snapshot.convert import convert_checkpoint

    folder = tmp_path / "old"
    folder.mkdir()
    torch.save(trained().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ForeignCheckpointError) as caught:
        load_pretrained(emptied(), folder)
    line = f"scale-train snapshot convert {folder} {folder}-safetensors --to safetensors --model-only"
    assert line in str(caught.value)
    convert_checkpoint(str(folder), f"{folder}-safetensors", to="safetensors", model_only=True)
    model = emptied()
    load_pretrained(model, f"{folder}-safetensors")
    assert torch.equal(model.embed.weight, trained().embed.weight)


def damage(folder: Path, how: str) -> None:
    first = next(iter(sorted(folder.glob("*.safetensors"))))
    index = folder / "model.safetensors.index.json"
    content: dict[str, Any] = json.loads(index.read_text())
    if how == "cut":
        first.write_bytes(first.read_bytes()[:-4])
    elif how == "missing":
        first.unlink()
    elif how == "none":
        first.unlink()
        index.unlink()
    elif how == "more in the index":
        content["weight_map"]["more"] = first.name
        index.write_text(json.dumps(content))
    else:
        content["weight_map"][next(iter(load_file(first)))] = "other.safetensors"
        index.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("cut", r"00001-of-00099.safetensors is damaged: it is cut: .* ends at byte \d+, and the file has \d+"),
        ("missing", "00001-of-00099.safetensors is missing, which model.safetensors.index.json names"),
        ("none", "has neither model.safetensors.index.json nor model.safetensors, but model-00002"),
        ("more in the index", "has more, which no file has"),
        (
            "another file in the index",
            r"is in .*00001-of-00099.safetensors, and model.safetensors.index.json says other.safetensors",
        ),
    ],
)
def test_a_folder_that_is_incomplete_changes_nothing(tmp_path: Path, how: str, expected: str) -> None:
    folder = write_folder(tmp_path / "hub", weights(trained()))
    damage(folder, how)
    model = emptied()
    with pytest.raises(SnapshotError, match=expected):
        load_pretrained(model, folder)
    assert not any(param.any() for param in model.parameters())


def test_links_of_a_download_cache_and_single_files_are_read(tmp_path: Path) -> None:
    save_file(weights(trained()), tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    for source in (tmp_path, tmp_path / "model.safetensors"):
        model = emptied()
        load_pretrained(model, source)
        assert torch.equal(model.inner[0].weight, trained().inner[0].weight)


def test_saving_leaves_nothing_unless_all_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(saving, "_write_bytes", fail)
        with pytest.raises(SnapshotError, match="No space left"):
            save_pretrained(trained(), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "new").mkdir()
    assert save_pretrained(trained(), tmp_path / "new") == tmp_path / "new"
    with pytest.raises(SnapshotError, match="is there, and not empty"):
        save_pretrained(trained(), tmp_path / "new")
    with pytest.raises(ValueError, match="max_shard_size as a number of bytes"):
        save_pretrained(trained(), tmp_path / "other", max_shard_size="5 parsecs")


def test_mixed_dtypes_are_laid_out_as_other_readers_want_them(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("halves", torch.ones(3, dtype=torch.bfloat16))
    model.register_buffer("count", torch.tensor(5))
    save_pretrained(model, tmp_path / "new")
    read = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(read[name], buffer) for name, buffer in model.named_buffers())
