import json

import pytest
import torch
from foreign_by_hand import assert_same_bits, loaded, weights_of_all_dtypes
from safetensors.torch import save_file

from scale_snapshot.convert.safetensors_files import read_safetensors_file, read_safetensors_folder


def test_a_file_is_read_equal_to_the_bit_in_all_dtypes(tmp_path):
    weights = {name: tensor.contiguous() for name, tensor in weights_of_all_dtypes().items()}
    save_file(weights, tmp_path / "w.safetensors")
    assert_same_bits(loaded(read_safetensors_file(tmp_path / "w.safetensors")), weights)


def test_a_file_is_read_into_memory_of_the_host_wherever_tensors_are_made(tmp_path):
    save_file({"a": torch.arange(3.0)}, tmp_path / "w.safetensors")
    with torch.device("meta"):
        state = loaded(read_safetensors_file(tmp_path / "w.safetensors"))
    assert_same_bits(state, {"a": torch.arange(3.0)})


def test_a_folder_with_an_index_is_one_state(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
    index = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert_same_bits(loaded(read_safetensors_folder(tmp_path)), {"a": torch.ones(1), "b": torch.zeros(1)})


@pytest.mark.parametrize(
    "index, words",
    [
        ({"a": "x.safetensors"}, r"x\.safetensors is missing, and the index"),
        ({"a": "one.safetensors", "c": "one.safetensors"}, "an index with c, which no file has"),
        ({"a": "two.safetensors", "b": "two.safetensors"}, "an index with a, which no file has"),
        ({"b": "one.safetensors"}, r"a is in one\.safetensors, and its index says None"),
        ([], "not an index of tensors"),
    ],
)
def test_an_index_that_does_not_fit_the_files_is_refused(tmp_path, index, words):
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match=words):
        read_safetensors_folder(tmp_path)


def test_one_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"a is in two\.safetensors and in another file"):
        read_safetensors_folder(tmp_path)


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    save_file({"a": torch.ones(100)}, tmp_path / "w.safetensors")
    content = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(content[:-4])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        read_safetensors_file(tmp_path / "w.safetensors")
