import weakref
from pathlib import Path

import pytest
import torch
from foreign_by_hand import assert_same_bits, fairscale_files, loaded, save_dcp, weights_of_all_dtypes
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.state.dcp import dcp_target
from scale_snapshot import SnapshotError, load, load_snapshot, save, save_snapshot
from scale_snapshot.convert import convert_checkpoint, open_checkpoint
from scale_snapshot.convert.lazy_tensor import LazyTensor
from scale_snapshot.convert.naming import Renaming
from scale_snapshot.foreign import Format

WEIGHTS = {name: tensor.contiguous() for name, tensor in weights_of_all_dtypes().items()}


def write_torch(path: Path) -> Path:
    torch.save(WEIGHTS, path)
    return path


def write_safetensors(path: Path) -> Path:
    save_file(WEIGHTS, path)
    return path


def write_dcp(path: Path) -> Path:
    return save_dcp({"model": WEIGHTS}, path)


def write_snapshot(path: Path) -> Path:
    save_snapshot(path, 0, {f"model.{name}": tensor for name, tensor in WEIGHTS.items()})
    return path


@pytest.mark.parametrize("write", [write_torch, write_safetensors, write_dcp, write_snapshot])
@pytest.mark.parametrize("to", ["snapshot", "safetensors", "dcp"])
def test_each_format_becomes_each_other_equal_to_the_bit(tmp_path, write, to):
    report = convert_checkpoint(write(tmp_path / "in"), tmp_path / "out", to=to)
    assert report.num_tensors == len(WEIGHTS)
    assert report.num_bytes == sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert_same_bits(loaded(open_checkpoint(report.path).tensors, "model."), WEIGHTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.inner, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.head.weight = self.embed.weight


def trained() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.5)
    for _ in range(2):
        model.head(model.norm(model.inner(model.embed(torch.arange(5))))).sum().backward()
        optimizer.step()
    return model, optimizer


def assert_equal_training(
    found: tuple[nn.Module, torch.optim.Optimizer], expected: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    assert_same_bits(found[0].state_dict(), expected[0].state_dict())
    for one, other in zip(
        found[1].state_dict()["state"].values(), expected[1].state_dict()["state"].values(), strict=True
    ):
        assert_same_bits(one, other)
    assert found[1].param_groups[0]["lr"] == expected[1].param_groups[0]["lr"]


def test_a_training_state_of_torch_goes_on_from_a_snapshot(tmp_path):
    model, optimizer = trained()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    torch.save(content, tmp_path / "in.pt")
    report = convert_checkpoint(tmp_path / "in.pt", tmp_path / "out")
    assert report.path == tmp_path / "out" / "step-00000002"
    assert report.tied == {"model.head.weight": "model.embed.weight"}
    fresh = Net(1)
    its_optimizer = torch.optim.Adam(fresh.parameters())
    snapshot = load_snapshot(tmp_path / "out", lambda saved: target_state_dict(fresh, its_optimizer, saved))
    load_sharded_state_dict(snapshot.state, fresh, its_optimizer, copy=False)
    assert_equal_training((fresh, its_optimizer), (model, optimizer))
    assert snapshot.extra == {"step": 2}


def test_one_call_loads_a_conversion_as_model_and_optim(tmp_path):
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    convert_checkpoint(tmp_path / "in.pt", tmp_path / "out")
    fresh = Net(1)
    its_optimizer = torch.optim.Adam(fresh.parameters())
    load(tmp_path / "out", {"model": fresh, "optim": its_optimizer})
    assert_equal_training((fresh, its_optimizer), (model, optimizer))


def test_a_model_of_another_name_is_consolidated_by_it(tmp_path):
    model, _ = trained()
    save(tmp_path / "in", 1, {"net": model})
    convert_checkpoint(
        tmp_path / "in", tmp_path / "w.safetensors", to="safetensors", model_only=True, names=Renaming(model="net")
    )
    assert_same_bits(
        load_file(tmp_path / "w.safetensors"), {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    )
    with pytest.raises(ValueError, match=r"no weights under model\., but net"):
        convert_checkpoint(tmp_path / "in", tmp_path / "x", to="safetensors", model_only=True)
    with pytest.raises(ValueError, match="it has no object 'other'; it has net"):
        convert_checkpoint(tmp_path / "in", tmp_path / "x", to="dcp", names=Renaming(model="other"))


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_a_snapshot_goes_through_another_format_and_back(tmp_path, to):
    model, optimizer = trained()
    save_snapshot(tmp_path / "in", 7, sharded_state_dict(model, optimizer), extra={"data": [1, 2]})
    there = convert_checkpoint(tmp_path / "in", tmp_path / "there", to=to)
    back = convert_checkpoint(there.path, tmp_path / "back")
    assert back.path.name == "step-00000007"
    before, after = open_checkpoint(tmp_path / "in"), open_checkpoint(back.path)
    assert_same_bits(loaded(after.tensors), loaded(before.tensors))
    assert (after.values, after.extra, after.step) == (before.values, before.extra, before.step)


def test_a_dcp_folder_that_is_written_loads_by_dcp_itself(tmp_path):
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained()
    save_snapshot(tmp_path / "in", 7, sharded_state_dict(model, optimizer))
    convert_checkpoint(tmp_path / "in", tmp_path / "dcp", to="dcp")
    fresh = Net(1)
    its_optimizer = torch.optim.Adam(fresh.parameters())
    target = dcp_target(tmp_path / "dcp", fresh, its_optimizer)
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    load_sharded_state_dict(target, fresh, its_optimizer, copy=False)
    assert_equal_training((fresh, its_optimizer), (model, optimizer))


def test_consolidated_weights_have_plain_names_and_file_sizes(tmp_path):
    model, optimizer = trained()
    save_snapshot(tmp_path / "in", 7, sharded_state_dict(model, optimizer))
    convert_checkpoint(tmp_path / "in", tmp_path / "one.safetensors", to="safetensors", model_only=True)
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    assert_same_bits(load_file(tmp_path / "one.safetensors"), expected)
    convert_checkpoint(tmp_path / "in", tmp_path / "hf", to="safetensors", model_only=True, max_shard_bytes=60)
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert files[0] == "model-00001-of-00003.safetensors" and files[-1] == "model.safetensors.index.json"
    assert_same_bits(loaded(open_checkpoint(tmp_path / "hf").tensors, "model."), expected)


def test_no_two_tensors_are_in_memory_at_a_time(tmp_path, monkeypatch):
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    read = LazyTensor.load

    def load(self: LazyTensor) -> Tensor:
        nonlocal most
        tensor = read(self).clone()
        alive.append(weakref.ref(tensor))
        most = max(most, sum(each() is not None for each in alive))
        return tensor

    monkeypatch.setattr(LazyTensor, "load", load)
    weights = {f"w{number}": torch.rand(100) for number in range(5)}
    fairscale_files(tmp_path, weights, 2, {"": list(weights)})
    for to in ("snapshot", "safetensors", "dcp"):
        convert_checkpoint(tmp_path / "checkpoint_1_10-shard0.pt", tmp_path / to, to=to)
    assert len(alive) == 18 and most <= 2


def test_names_are_mapped_and_left_out(tmp_path):
    torch.save({"model": {"module.a": torch.ones(1), "module.b": torch.ones(2)}, "rng": torch.ones(3)}, tmp_path / "in")
    names = Renaming([("module.", "")], skip=["rng", "model.module.b"])
    convert_checkpoint(tmp_path / "in", tmp_path / "out", names=names)
    assert list(open_checkpoint(tmp_path / "out").tensors) == ["model.a"]


def test_progress_counts_each_byte_once(tmp_path):
    write_torch(tmp_path / "in")
    seen: list[tuple[int, int]] = []
    report = convert_checkpoint(tmp_path / "in", tmp_path / "out", progress=lambda *counts: seen.append(counts))
    assert sum(now for now, _ in seen) == report.num_bytes and {whole for _, whole in seen} == {report.num_bytes}


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"to": "zip"}, "expected to='snapshot', 'safetensors' or 'dcp'"),
        ({"model_only": True}, "model_only is for safetensors and DCP"),
        ({"max_shard_bytes": 0}, "max_shard_bytes of at least 1"),
        ({"to": "dcp"}, "exists already"),
    ],
)
def test_wrong_arguments_are_found_before_anything_is_read(tmp_path, arguments, words):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=words):
        convert_checkpoint(tmp_path / "nothing", tmp_path / "out", **arguments)


def test_what_is_not_there_not_known_or_not_convertible_says_so(tmp_path):
    with pytest.raises(ValueError, match="in is not there"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="not a checkpoint of a format that is known here"):
        convert_checkpoint(tmp_path / "text", tmp_path / "out")
    torch.save(torch.optim.SGD([torch.ones(1)], momentum=0.5).state_dict(), tmp_path / "opt")
    with pytest.raises(ValueError, match=r"an optimizer's state alone .* by number and not by name"):
        convert_checkpoint(tmp_path / "opt", tmp_path / "out")


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    write_torch(tmp_path / "in")

    def fail(self: LazyTensor) -> Tensor:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(LazyTensor, "load", fail)
    for to, kind in (("snapshot", SnapshotError), ("safetensors", OSError)):
        with pytest.raises(kind):
            convert_checkpoint(tmp_path / "in", tmp_path / to, to=to)
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "in"]


def test_a_dtype_that_safetensors_has_not_is_named(tmp_path):
    torch.save({"w": torch.ones(1, dtype=torch.complex128)}, tmp_path / "in")
    with pytest.raises(ValueError, match=r"model\.w is torch\.complex128, which safetensors has not"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out")
    assert convert_checkpoint(tmp_path / "in", tmp_path / "out", to="dcp").source is Format.TORCH_FILE
