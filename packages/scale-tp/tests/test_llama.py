"""llama.py: files of ranks, merged by what their tensors are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scale_tp.llama import LLAMA_DIMS, iterate_consolidated, read_consolidated

WIDTH, WORDS, HEAD_SIZE, KEY_VALUE_HEADS = 6, 11, 3, 2


def _whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "tok_embeddings.weight": (WORDS, WIDTH),
        "norm.weight": (WIDTH,),
        "output.weight": (WORDS, WIDTH),
        "rope.freqs": (2,),
    }
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.attention.wq.weight": (12, WIDTH),
            f"layers.{layer}.attention.wk.weight": (KEY_VALUE_HEADS * HEAD_SIZE, WIDTH),
            f"layers.{layer}.attention.wv.weight": (KEY_VALUE_HEADS * HEAD_SIZE, WIDTH),
            f"layers.{layer}.attention.wo.weight": (WIDTH, 12),
            f"layers.{layer}.feed_forward.w1.weight": (17, WIDTH),
            f"layers.{layer}.feed_forward.w2.weight": (WIDTH, 17),
            f"layers.{layer}.feed_forward.w3.weight": (17, WIDTH),
            f"layers.{layer}.attention_norm.weight": (WIDTH,),
            f"layers.{layer}.ffn_norm.weight": (WIDTH,),
        }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


ROWS = ("output", "wq", "wk", "wv", "w1", "w3")
COLUMNS = ("wo", "w2")


def _write(folder: Path, whole: dict[str, Tensor], num_files: int, *, embedding_dim: int, copies: int = 1) -> None:
    """Writes what each of the reference code's ranks would hold; sizes that do not divide are cut unevenly."""
    for rank in range(num_files):
        part = {}
        for name, tensor in whole.items():
            kind = name.split(".")[-2]
            dim = 0 if kind in ROWS else 1 if kind in COLUMNS else embedding_dim if kind == "tok_embeddings" else None
            if dim is None:
                part[name] = tensor
            elif kind in ("wk", "wv"):
                part[name] = tensor.tensor_split(num_files // copies, dim)[rank // copies].clone()
            else:
                part[name] = tensor.tensor_split(num_files, dim)[rank].clone()
        torch.save(part, folder / f"consolidated.{rank:02d}.pth")


@pytest.mark.parametrize("embedding_dim", [0, 1])
@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_merged_files_are_the_whole_model(tmp_path: Path, num_files: int, embedding_dim: int) -> None:
    whole = _whole()
    _write(tmp_path, whole, num_files, embedding_dim=embedding_dim)
    merged = read_consolidated(tmp_path)
    assert list(merged) == list(whole)
    assert all(torch.equal(merged[name], tensor) for name, tensor in whole.items())


def test_copies_of_key_value_heads_are_merged_once(tmp_path: Path) -> None:
    whole = _whole()
    _write(tmp_path, whole, 4, embedding_dim=0, copies=2)
    (tmp_path / "params.json").write_text(json.dumps({"dim": WIDTH, "n_heads": 4, "n_kv_heads": KEY_VALUE_HEADS}))
    merged = read_consolidated(tmp_path, dtype=torch.float32)
    assert all(torch.equal(merged[name], tensor.float()) for name, tensor in whole.items())


def test_tensors_outlive_their_files(tmp_path: Path) -> None:
    whole = _whole()
    _write(tmp_path, whole, 1, embedding_dim=0)
    merged = read_consolidated(tmp_path)
    (tmp_path / "consolidated.00.pth").write_bytes(b"\0" * (tmp_path / "consolidated.00.pth").stat().st_size)
    assert all(torch.equal(merged[name], tensor) for name, tensor in whole.items())


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"norm.weight": print}, tmp_path / "consolidated.00.pth")
    with pytest.raises(Exception, match="Weights only load failed"):
        read_consolidated(tmp_path)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    whole = _whole()
    with pytest.raises(FileNotFoundError, match=r"expected consolidated.00.pth in .*, found none"):
        read_consolidated(tmp_path)
    _write(tmp_path, whole, 3, embedding_dim=0)

    def refused(message: str, rank: int, **changed: Tensor | None) -> None:
        path = tmp_path / f"consolidated.{rank:02d}.pth"
        before = path.read_bytes()
        part = torch.load(path)
        for name, tensor in changed.items():
            part.pop(name, None)
            if tensor is not None:
                part[name] = tensor
        torch.save(part, path)
        with pytest.raises(ValueError, match=message):
            next(iterate_consolidated(tmp_path))
        path.write_bytes(before)

    wo = "layers.0.attention.wo.weight"
    refused(r"norm.weight is only in one of consolidated.00.pth and consolidated.01.pth", 1, **{"norm.weight": None})
    refused(rf"{wo}: expected parts of equal shape but for dimension 1, got", 1, **{wo: torch.zeros(5, 4).bfloat16()})
    refused(rf"{wo}: expected one dtype, got", 2, **{wo: torch.zeros(WIDTH, 4)})
    differing = torch.full((WIDTH,), 2.0).bfloat16()
    path = tmp_path / "consolidated.02.pth"
    torch.save(torch.load(path) | {"norm.weight": differing}, path)
    with pytest.raises(
        ValueError, match=r"norm.weight: expected the same values in consolidated.00.pth and consolid.*02"
    ):
        read_consolidated(tmp_path)
    (tmp_path / "consolidated.01.pth").unlink()
    with pytest.raises(FileNotFoundError, match=r"of ranks 0 to 2 in .*, but consolidated.01.pth is missing"):
        read_consolidated(tmp_path)


def test_an_unknown_name_is_refused_with_how_to_read_it(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"lora.weight": torch.full((2, 3), float(rank))}, tmp_path / f"consolidated.{rank:02d}.pth")
    with pytest.raises(ValueError, match=r"lora.weight: no pattern says .*dims=\{\*\*LLAMA_DIMS, .*: 0\}"):
        read_consolidated(tmp_path)
    merged = read_consolidated(tmp_path, dims={**LLAMA_DIMS, r"lora\.weight": 1})
    assert merged["lora.weight"].tolist() == [[0, 0, 0, 1, 1, 1]] * 2


def test_an_embedding_alone_does_not_tell_how_it_is_divided(tmp_path: Path) -> None:
    torch.save({"tok_embeddings.weight": torch.zeros(4, 4)}, tmp_path / "consolidated.00.pth")
    with pytest.raises(
        ValueError, match=r"expected norm.weight or params.json to tell the model's width, found neither"
    ):
        read_consolidated(tmp_path)
