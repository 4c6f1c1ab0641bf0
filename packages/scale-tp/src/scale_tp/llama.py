"""Llama's reference checkpoints, `consolidated.00.pth` and so on, merged into full tensors.

Each file has the tensors of one rank of the reference code. Along which dimension a tensor was divided is not written
there; it follows from the tensor's name, and for the embedding, which releases divide differently, from its shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from scale_core.arguments import checked_arguments

LLAMA_DIMS: Mapping[str, int | None] = MappingProxyType(
    {
        r"tok_embeddings\.weight": -1,
        r"output\.weight": 0,
        r"layers\.\d+\.attention\.w[qkv]\.(weight|bias)": 0,
        r"layers\.\d+\.attention\.wo\.weight": 1,
        r"layers\.\d+\.feed_forward\.w[13]\.weight": 0,
        r"layers\.\d+\.feed_forward\.w2\.weight": 1,
        r"layers\.\d+\.(attention_norm|ffn_norm)\.weight": None,
        r"norm\.weight": None,
        r"rope\.freqs": None,
    }
)
"""For each pattern of names the dimension along which ranks divide the tensor, or None where each has all of it.

-1 stands for the embedding: the words (0) where each file has rows of the model's width, as from Llama 3 on, and
otherwise the width (1).
"""

_FILE = re.compile(r"consolidated\.(\d+)\.pth")
_KEY_VALUE = re.compile(r"layers\.\d+\.attention\.w[kv]\.(weight|bias)")


@checked_arguments
def iterate_consolidated(
    folder: str | PathLike[str], *, dims: Mapping[str, int | None] = LLAMA_DIMS, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor of a checkpoint, merged, under its name; one exists at a time.

    The files are mapped into memory and read tensor by tensor; no code in them is run (`weights_only`).

    Args:
        folder: The folder of consolidated.00.pth, consolidated.01.pth and so on, and params.json, if there is one.
        dims: As `LLAMA_DIMS`. To read more names, pass for example `{**LLAMA_DIMS, "lora": 0}`.
        dtype: The dtype to convert to; None keeps the dtype of the files.

    Raises:
        FileNotFoundError: The file does not exist, or one of a series is missing.
        ValueError: A name that no pattern knows, files with other names, or parts of other shapes; before anything is
            yielded. Or tensors that all files hold differ between them.

    Example:
        model = Transformer(arguments)  # with layers of scale_tp: each rank keeps its shard
        for name, tensor in iterate_consolidated("Llama-2-70b"):
            ...

    Examples:
        >>> import tempfile, torch
        >>> from scale_tp.llama import iterate_consolidated
        >>> folder = tempfile.mkdtemp()
        >>> for rank in range(2):
        ...     torch.save({"output.weight": torch.ones(3, 4)}, f"{folder}/consolidated.{rank:02}.pth")
        >>> [(name, tuple(tensor.shape)) for name, tensor in iterate_consolidated(folder)]
        [('output.weight', (6, 4))]

    See also: [the guide to migrating from Llama](../guides/migration-others.md#from-llamas-reference-code).
    """
    files = _open(Path(folder))
    rules = {name: _merge_rule(name, files, dims) for name in files.parts[0]}  # All are checked before the first.
    for name, (dim, copies) in rules.items():
        parts = [part[name] for part in files.parts]
        for number, part in enumerate(parts):
            first = number - number % copies
            if not torch.equal(part, parts[first]):
                raise ValueError(
                    f"{name}: expected the same values in {files.paths[first].name} and {files.paths[number].name}, "
                    "which both hold all of it, but they differ: take the files of one checkpoint"
                )
        merged = parts[0] if dim is None else torch.cat(parts[::copies], dim)
        # A copy, where nothing was joined: mapped memory would change with its file.
        yield name, merged.to(dtype or merged.dtype, copy=len(parts) == 1 or dim is None)


def read_consolidated(
    folder: str | PathLike[str], *, dims: Mapping[str, int | None] = LLAMA_DIMS, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint, merged, by name; see `iterate_consolidated`.

    Examples:
        >>> import tempfile, torch
        >>> from scale_tp.llama import read_consolidated
        >>> folder = tempfile.mkdtemp()
        >>> for rank in range(2):
        ...     torch.save({"output.weight": torch.ones(3, 4)}, f"{folder}/consolidated.{rank:02}.pth")
        >>> read_consolidated(folder)["output.weight"].shape
        torch.Size([6, 4])

    See also: [the guide to migrating from Llama](../guides/migration-others.md#from-llamas-reference-code).
    """
    return dict(iterate_consolidated(folder, dims=dims, dtype=dtype))


class _Files(NamedTuple):
    """The files of a checkpoint."""

    paths: list[Path]  # by rank
    parts: list[dict[str, Tensor]]  # by file
    width: int | None  # the length of a token's vector; None where it is not known
    num_key_value_heads: int | None  # as params.json says; None where it does not


def _open(folder: Path) -> _Files:
    path_by_rank = {
        int(match[1]): path for path in folder.glob("consolidated.*.pth") if (match := _FILE.fullmatch(path.name))
    }
    if not path_by_rank:
        raise FileNotFoundError(f"expected consolidated.00.pth in {folder}, found none: pass the folder that holds it")
    missing = sorted(set(range(max(path_by_rank) + 1)) - set(path_by_rank))
    if missing:
        names = ", ".join(f"consolidated.{number:02d}.pth" for number in missing)
        raise FileNotFoundError(
            f"expected the files of ranks 0 to {max(path_by_rank)} in {folder}, but {names} is missing: fetch all of "
            "them"
        )
    paths = [path_by_rank[number] for number in sorted(path_by_rank)]
    parts = [torch.load(path, map_location="cpu", weights_only=True, mmap=True) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        differing = sorted(set(part) ^ set(parts[0]))
        if differing:
            raise ValueError(
                f"expected the same names in all files, but {differing[0]} is only in one of {paths[0].name} and "
                f"{path.name}: take the files of one checkpoint"
            )
    params = json.loads((folder / "params.json").read_text()) if (folder / "params.json").is_file() else {}
    norm = parts[0].get("norm.weight")
    width = params.get("dim", None if norm is None else norm.numel())
    return _Files(paths, parts, width, params.get("n_kv_heads"))


def _merge_rule(name: str, files: _Files, dims: Mapping[str, int | None]) -> tuple[int | None, int]:
    """Returns along which dimension a tensor's parts are joined, and how many ranks in a row hold the same part.

    None stands for no dimension, where all of them are the same.
    """
    matching = [dim for pattern, dim in dims.items() if re.fullmatch(pattern, name)]
    if not matching:
        raise ValueError(
            f"{name}: no pattern says along which dimension it is divided: pass "
            f"dims={{**LLAMA_DIMS, {re.escape(name)!r}: 0}}, or None in the place of 0 where each rank has all of it"
        )
    dim = matching[-1]  # The caller's own addition is last.
    shapes = [tuple(part[name].shape) for part in files.parts]
    if dim == -1:
        if files.width is None:
            raise ValueError(
                f"{name}: expected norm.weight or params.json to tell the model's width, found neither: pass "
                f"dims={{**LLAMA_DIMS, {re.escape(name)!r}: 0}} if words are divided between the files, or 1"
            )
        dim = 0 if shapes[0][1] == files.width else 1
    if any(part[name].dtype != files.parts[0][name].dtype for part in files.parts):
        raise ValueError(f"{name}: expected one dtype, got {[part[name].dtype for part in files.parts]}")
    others = {shape if dim is None else (*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(others) > 1 or (dim is not None and len(shapes[0]) <= dim):
        raise ValueError(
            f"{name}: expected parts of equal shape but for dimension {dim}, got {shapes} by file: take the files of "
            "one checkpoint"
        )
    if dim is None:
        return None, len(shapes)
    heads = files.num_key_value_heads
    if heads is not None and _KEY_VALUE.fullmatch(name) and len(shapes) > heads and len(shapes) % heads == 0:
        return dim, len(shapes) // heads
    return dim, 1
