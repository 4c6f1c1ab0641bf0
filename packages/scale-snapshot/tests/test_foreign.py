import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from foreign_by_hand import fairscale_files, save_dcp
from torch import nn

from scale_snapshot import save_snapshot
from scale_snapshot.foreign import Format, index_of, recognize

MODEL = nn.Linear(2, 3)


class Touches:
    """An object that would leave a file behind if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def write_safetensors(path: Path) -> None:
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


@pytest.mark.fault(67)
def test_every_format_is_recognized(tmp_path):
    def at(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    expected = {
        "model.pt": Format.TORCH_FILE,
        "old.pt": Format.TORCH_FILE,
        "model.safetensors": Format.SAFETENSORS,
        "optimizer.pt": Format.OPTIMIZER_FILE,
        "script.pt": Format.TORCHSCRIPT,
        "plain.pkl": Format.PICKLE,
        "dcp": Format.DCP,
        "hf": Format.SAFETENSORS_FOLDER,
        "bin": Format.TORCH_FOLDER,
        "fairscale": Format.TORCH_SHARDS,
        "deepspeed": Format.DEEPSPEED,
        "megatron": Format.MEGATRON,
        "runs": Format.SNAPSHOT_FOLDER,
        "runs/step-00000001": Format.SNAPSHOT,
        "text": None,
        "nothing": None,
    }
    torch.save(MODEL.state_dict(), at("model.pt"))
    torch.save(MODEL.state_dict(), at("old.pt"), _use_new_zipfile_serialization=False)
    write_safetensors(at("model.safetensors"))
    optimizer = torch.optim.Adam(MODEL.parameters())
    MODEL(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), at("optimizer.pt"))
    at("plain.pkl").write_bytes(pickle.dumps({"a": 1}))
    write_script(at("script.pt"))
    save_dcp({"model": MODEL.state_dict()}, at("dcp"))
    write_safetensors(at("hf/model.safetensors"))
    torch.save(MODEL.state_dict(), at("bin/pytorch_model.bin"))
    at("fairscale").mkdir()
    fairscale_files(at("fairscale"), {"w": torch.ones(3)}, 2, {"": ["w"]})
    at("deepspeed/global_step10/mp_rank_00_model_states.pt").touch()
    at("megatron/latest_checkpointed_iteration.txt").write_text("5")
    save_snapshot(at("runs"), 1, {"w": torch.ones(2)})
    at("text").write_text("PK is no zip file")
    at("nothing").mkdir()
    assert {name: getattr(recognize(tmp_path / name), "format", None) for name in expected} == expected


def write_script(path: Path) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(MODEL, torch.ones(2)), path)


def test_recognizing_runs_no_code(tmp_path):
    torch.save({"w": Touches(tmp_path / "ran")}, tmp_path / "a.pt")
    torch.save({"w": Touches(tmp_path / "ran")}, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "c.pkl").write_bytes(pickle.dumps(Touches(tmp_path / "ran")))
    for name in ("a.pt", "b.pt", "c.pkl"):
        assert recognize(tmp_path / name) is not None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PK\x03\x04" + bytes(100), b"\xff" * 8 + b"{", bytes(30)])
def test_a_damaged_or_short_file_is_not_taken_for_a_checkpoint(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert recognize(tmp_path / "file") is None


@pytest.mark.fault(67)
def test_the_advice_is_the_line_that_converts(tmp_path):
    torch.save(MODEL.state_dict(), tmp_path / "model.pt")
    found = recognize(tmp_path / "model.pt")
    assert found is not None
    assert f"{tmp_path}/model.pt is a file of torch.save, and no snapshot of scale." in found.advice()
    assert f"scale-train snapshot convert {tmp_path}/model.pt {tmp_path}/model.pt-snapshot" in found.advice()


def test_what_can_not_be_converted_says_what_to_do_in_its_place(tmp_path):
    (tmp_path / "zero_to_fp32.py").touch()
    found = recognize(tmp_path)
    assert found is not None and not found.is_convertible
    assert "zero_to_fp32.py" in found.advice() and "snapshot convert" not in found.advice()


def test_an_index_can_not_leave_its_folder(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../other.safetensors"}}))
    with pytest.raises(ValueError, match=r"'\.\./other\.safetensors', expected a file of this folder"):
        index_of(tmp_path)


def test_a_pickle_that_announces_too_much_takes_no_memory(tmp_path):
    torch.save(MODEL.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with (tmp_path / "old.pt").open("rb") as file:
        for _ in range(3):
            pickle.load(file)
        before = file.tell()
    with (tmp_path / "old.pt").open("r+b") as file:
        file.truncate(before)
        file.seek(before)
        file.write(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc")
    assert recognize(tmp_path / "old.pt").format is Format.TORCH_FILE
