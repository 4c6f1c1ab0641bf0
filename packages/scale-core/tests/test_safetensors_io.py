from pathlib import Path

import pytest
import torch
from torch import Tensor

from scale_core.snapshot.safetensors_io import DTYPES, TensorEntry, read_rows, write_tensors


def write(path: Path, tensors: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    entries = [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return write_tensors(path, entries, list(tensors.values()).__getitem__)


def random_of(dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 2, (3, 5), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_written_and_read_alike(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_of(dtype)
    (begin, end) = write(tmp_path / "file", {"a": tensor})["a"]
    read = read_rows(tmp_path / "file", begin, TensorEntry("a", dtype, (3, 5)), 1, 2)
    assert end - begin == tensor.nbytes
    assert torch.equal(read.view(torch.uint8), tensor[1:3].contiguous().view(torch.uint8))


def test_the_safetensors_library_reads_what_was_written(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    tensors = {
        "weight[0:3, 0:5]": random_of(torch.bfloat16),
        "step[]": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "transposed": random_of(torch.float64).t(),
        "flags": torch.tensor([True, False, True]),
    }
    write(tmp_path / "file.safetensors", tensors)
    with safetensors.safe_open(tmp_path / "file.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert file.get_tensor(name).dtype == tensor.dtype


def test_a_tensor_is_produced_only_when_its_turn_comes(tmp_path: Path) -> None:
    held: list[int] = []

    def produce(index: int) -> Tensor:
        held.append(index)
        return torch.full((1 << 20,), float(index))

    entries = [TensorEntry(f"t{index}", torch.float32, (1 << 20,)) for index in range(3)]
    write_tensors(tmp_path / "file", entries, produce)
    assert held == [0, 1, 2]


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "file", {"a": torch.ones(2)})
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", {"a": torch.zeros(2)})


def test_a_file_that_ends_early_names_the_tensor_and_both_lengths(tmp_path: Path) -> None:
    begin, end = write(tmp_path / "file", {"layers.3.weight": torch.ones(4, 4)})["layers.3.weight"]
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[: end - 8])
    entry = TensorEntry("layers.3.weight", torch.float32, (4, 4))
    with pytest.raises(EOFError, match=r"file ends inside layers.3.weight: 32 bytes expected, 24 found"):
        read_rows(tmp_path / "file", begin, entry, 2, 2)


def test_a_dtype_that_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"spectrum: torch.complex128 can't be written"):
        write(tmp_path / "file", {"spectrum": torch.zeros(1, dtype=torch.complex128)})
