from pathlib import Path

import pytest
import torch
from foreign_by_hand import assert_same_bits, loaded, weights_of_all_dtypes
from torch import nn

from scale_snapshot.convert.torch_files import read_torch_file, read_torch_folder


class Settings:
    """A class that a program pickles beside its weights."""


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_state_dict_is_read_equal_to_the_bit_in_all_dtypes(tmp_path, is_zip):
    weights = weights_of_all_dtypes()
    if not is_zip:
        for name in ("uint16", "float8_e4m3fn", "float8_e5m2"):  # Came after that format: torch can't read them in it.
            weights.pop(f"layer.{name}")
    torch.save(weights, tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
    assert_same_bits(loaded(read_torch_file(tmp_path / "w.pt")), weights)


def test_objects_of_other_classes_are_refused_unless_trusted(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "args": Settings()}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"holds objects of .*Settings.*: --trust"):
        read_torch_file(tmp_path / "w.pt")
    assert torch.equal(read_torch_file(tmp_path / "w.pt", trust=True)["model"]["w"].load(), torch.ones(2))


def test_a_whole_module_is_refused(tmp_path):
    torch.save(nn.Linear(1, 1), tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"torch\.nn\.modules\.linear\.Linear"):
        read_torch_file(tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"holds a Linear, expected a state dict: save model\.state_dict\(\)"):
        read_torch_file(tmp_path / "w.pt", trust=True)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_that_is_cut_off_is_refused(tmp_path, is_zip):
    torch.save({"w": torch.rand(1000)}, tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
    content = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"w\.pt can't be read"):
        read_torch_file(tmp_path / "w.pt")


def test_a_flipped_bit_of_a_zip_file_is_found_where_it_matters(tmp_path):
    file, weights = tmp_path / "w.pt", {"a.weight": torch.rand(5, 4), "b": torch.arange(3)}
    torch.save(weights, file)
    content = file.read_bytes()
    data = [content.index(tensor.numpy().tobytes()) for tensor in weights.values()]
    for at in [*data, *range(0, len(content), 61)]:
        file.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        try:
            found = loaded(read_torch_file(file))
        except ValueError:
            continue
        assert at not in data
        assert_same_bits(found, weights)
    file.write_bytes(content[: data[0]] + b"\xff" + content[data[0] + 1 :])
    with pytest.raises(ValueError, match=r"w\.pt is damaged: the checksum \(CRC32\) of its record w/data/0 differs"):
        read_torch_file(file)


def test_a_file_that_was_saved_without_checksums_is_read(tmp_path):
    weights = {"w": torch.rand(5)}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(weights, tmp_path / "w.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same_bits(loaded(read_torch_file(tmp_path / "w.pt")), weights)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_sparse_tensors_are_refused(tmp_path):
    torch.save({"w": torch.eye(2).to_sparse()}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="expected dense tensors"):
        read_torch_file(tmp_path / "w.pt")


def test_a_folder_of_several_files_is_one_state(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(1)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    assert sorted(read_torch_folder(tmp_path)) == ["a", "b"]
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(ValueError, match=r"a is in .* and in another file"):
        read_torch_folder(tmp_path)


def test_a_folder_that_lacks_what_its_index_names_is_refused(tmp_path: Path):
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "x.bin", "b": "x.bin"}}')
    torch.save({"a": torch.ones(1)}, tmp_path / "x.bin")
    with pytest.raises(ValueError, match="an index with b, which no file has"):
        read_torch_folder(tmp_path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_flipped_bit_in_an_older_file_is_refused_by_name(tmp_path):
    torch.save({"weight": torch.ones(2), "b": torch.ones(3)}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "w.pt").read_bytes()
    refused = 0
    for place in range(len(whole)):
        (tmp_path / "w.pt").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            read_torch_file(tmp_path / "w.pt")
        except ValueError:  # And no other.
            refused += 1
    assert refused > len(whole) / 2
