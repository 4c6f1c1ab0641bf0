"""Checkpoints of other libraries, written as these write them, for the tests of what reads them."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool, torch.complex64),
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A tensor of any bits that the dtype can have, NaNs with payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.empty(shape, dtype=dtype).nbytes
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def weights_of_all_dtypes() -> dict[str, Tensor]:
    weights = {f"layer.{dtype}".replace("torch.", ""): random_bits((3, 5), dtype) for dtype in DTYPES}
    return {**weights, "scalar": torch.tensor(3), "empty": torch.empty(0, 4), "transposed": torch.rand(4, 3).T}


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes_of(found[name]) == bytes_of(tensor), name


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def loaded(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The lazy tensors of a state as tensors, those whose names begin with a prefix, without it."""
    return {key.removeprefix(prefix): value.load() for key, value in tensors.items() if key.startswith(prefix)}


def fairscale_files(
    folder: Path, weights: Mapping[str, Tensor], num_ranks: int, units: Mapping[str, list[str]], **more: Any
) -> list[Path]:
    """What each rank of FairScale's FSDP saves: `local_state_dict()`, and beside it `local_metadata_dict()`.

    A flat parameter is cut by torch.chunk into equal pieces, and the last ones are padded with zeros.
    """
    states: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]
    metadata: list[dict[str, Any]] = [
        {"param_metadata": [], "buffer_names": ["running_mean"]} for _ in range(num_ranks)
    ]
    for path, names in units.items():
        full = [f"{path}.{name}" if path else name for name in names]
        flat = torch.cat([weights[name].reshape(-1) for name in full])
        size = -(-flat.numel() // num_ranks)
        for rank in range(num_ranks):
            piece = flat[rank * size : (rank + 1) * size]
            padding = size - piece.numel()
            states[rank][f"{path}.flat_param_0" if path else "flat_param_0"] = torch.cat(
                [piece, piece.new_zeros(padding)]
            )
            described = {
                "names": tuple(names),
                "shapes": tuple(weights[name].shape for name in full),
                "numels": tuple(weights[name].numel() for name in full),
                "padding": padding,
            }
            unit = {"fsdp_path": path, "params": {"flat_param_0": described}}
            metadata[rank]["param_metadata"].append(
                {**unit, "no_broadcast_optim_state": False, "shared_param_info": []}
            )
    files = []
    for rank in range(num_ranks):
        states[rank]["running_mean"] = torch.full((2,), float(rank))
        files.append(folder / f"checkpoint_1_10-shard{rank}.pt")
        torch.save({"model": states[rank], "shard_metadata": metadata[rank], **more}, files[-1])
    return files


def save_dcp(state: dict[str, Any], folder: Path) -> Path:
    """`dcp.save` in one process, without its warning that there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder
