import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_by_hand import assert_same_bits, loaded, save_dcp, weights_of_all_dtypes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from scale_core.testing import run_ranks
from scale_snapshot.convert import open_checkpoint
from scale_snapshot.convert.dcp_files import read_dcp_folder
from scale_snapshot.convert.lazy_tensor import LazyTensor


class Touches:
    """An object that would leave a file behind if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_folder_is_read_equal_to_the_bit_in_all_dtypes(tmp_path):
    weights = weights_of_all_dtypes()
    tree = read_dcp_folder(save_dcp({"model": weights, "step": 3, "list": [1, torch.ones(2)]}, tmp_path / "c"))
    assert_same_bits(loaded(tree["model"]), weights)
    assert tree["step"] == 3 and tree["list"][0] == 1 and isinstance(tree["list"][1], LazyTensor)


def train_and_save(folder: Path) -> tuple[dict, dict]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer, "step": 4}, checkpoint_id=folder)
    moments = {name: slots["exp_avg"].full_tensor() for name, slots in of_optimizer["state"].items()}
    return {name: tensor.full_tensor() for name, tensor in of_model.items()}, moments


def test_fsdp2_files_are_full_with_optimizer_state_by_name(tmp_path):
    weights, moments = run_ranks(train_and_save, 2, tmp_path / "c")[0]
    state = open_checkpoint(tmp_path / "c")
    assert_same_bits(loaded(state.tensors, "model."), weights)
    assert state.step == 4
    for name, moment in moments.items():
        assert torch.equal(state.tensors[f"optim.{name}.exp_avg"].load(), moment)
    (group,) = [value for key, value in state.values.items() if key.startswith("optim.groups[0]")]
    assert group["lr"] == 0.1 and group["params"] == list(weights)


def test_metadata_of_other_classes_is_refused_and_not_run(tmp_path):
    save_dcp({"w": torch.ones(1)}, tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Touches(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"a pickle that names \S+, which DCP does not put there.*--trust"):
        read_dcp_folder(tmp_path / "c")
    assert not (tmp_path / "ran").exists()


def test_values_of_other_classes_are_refused_and_not_run(tmp_path):
    save_dcp({"w": Touches(tmp_path / "ran")}, tmp_path / "c")
    with pytest.raises(ValueError, match=r"from byte \d+ on holds objects of [\w.]+, and building .* --trust"):
        read_dcp_folder(tmp_path / "c")
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_missing_or_cut_off_is_refused_by_name(tmp_path):
    (path,) = save_dcp({"w": torch.ones(1000)}, tmp_path / "c").glob("*.distcp")
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    with pytest.raises(ValueError, match=r"\.distcp has \d+ bytes, and \d+ are needed: it is cut off"):
        read_dcp_folder(tmp_path / "c")
    path.unlink()
    with pytest.raises(ValueError, match=r"\.distcp is missing"):
        read_dcp_folder(tmp_path / "c")


def larger_than_its_bytes(metadata):
    entry = metadata.state_dict_metadata["w"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 50])


def without_a_chunk(metadata):
    metadata.state_dict_metadata["w"].size = torch.Size([9])


def outside_of_the_folder(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../other.distcp"


@pytest.mark.parametrize(
    "change, words",
    [
        (larger_than_its_bytes, r"w of shape \(\d+,\) torch\.float32 is said to be in \d+ bytes"),
        (without_a_chunk, "w: 8 elements in the chunks of a tensor of 9"),
        (outside_of_the_folder, r"names the file '\.\./other\.distcp', expected one of that folder"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_before_reading(tmp_path, change, words):
    folder = save_dcp({"w": torch.ones(8)}, tmp_path / "c")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=words):
        read_dcp_folder(folder)


def test_a_flipped_bit_of_a_tensor_is_found_by_its_checksum(tmp_path):
    weight = torch.rand(50)
    folder = save_dcp({"w": weight}, tmp_path / "c")
    (file,) = folder.glob("*.distcp")
    content = file.read_bytes()
    at = content.index(weight.numpy().tobytes()) + 7
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(ValueError, match=r"distcp from byte 0 on is damaged: the checksum \(CRC32\)"):
        read_dcp_folder(folder)["w"].load()


def test_an_unfinished_folder_says_so(tmp_path):
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(ValueError, match=r"no \.metadata: it was never finished"):
        read_dcp_folder(tmp_path)


def test_states_of_objects_are_read_as_their_state_dicts(tmp_path):
    class Counter(Stateful):
        def state_dict(self):
            return {"count": 3}

        def load_state_dict(self, state):
            raise AssertionError

    state = open_checkpoint(save_dcp({"model": {"w": torch.ones(1)}, "loader": Counter()}, tmp_path / "c"))
    assert state.extra == {"loader": {"count": 3}}
