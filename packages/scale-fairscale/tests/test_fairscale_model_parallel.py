"""Programs written for `fairscale.nn.model_parallel`: in the style of Llama's reference code, on one and two ranks."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference_llama import Sizes, build, write_consolidated
from torch import Tensor, nn

import fairscale.nn.model_parallel as model_parallel
import fairscale.nn.model_parallel.initialize as fs_init
import scale_snapshot
from fairscale import _warnings
from fairscale.nn.model_parallel import cross_entropy, layers, mappings, random, utils
from scale_core.testing import run_ranks
from scale_tp import megatron

SIZES = [Sizes(), Sizes(words_divided=True)]


def tokens() -> Tensor:
    return torch.arange(3 * 7).reshape(3, 7).remainder(32)


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(tokens()).flatten(0, 1), tokens().roll(-1, 1).flatten())


@pytest.mark.parametrize("sizes", SIZES)
def test_the_reference_runs_on_one_uninitialized_process(sizes: Sizes, tmp_path: Path) -> None:
    plain = write_consolidated(tmp_path / "7B", sizes, 1)
    model, _ = build(tmp_path / "7B", sizes, 1)
    assert not fs_init.model_parallel_is_initialized() and fs_init.get_model_parallel_rank() == 0
    assert torch.equal(model(tokens()), plain(tokens()))
    for each in (model, plain):
        loss_of(each).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def on_two_ranks(folder: str) -> list[tuple[Tensor, bool, bool]]:
    results = []
    for number, sizes in enumerate(SIZES):
        model, held = build(Path(folder, str(number)), sizes, 2)
        state = model.state_dict()  # Each rank's own part: no rank waits for the other one.
        same = state.keys() == held.keys() and all(torch.equal(state[name], held[name]) for name in held)
        logits = model(tokens()).detach()
        loss_of(model).backward()
        saved = Path(folder, f"snapshots {number}")
        scale_snapshot.save(saved, 1, {"model": model})
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        scale_snapshot.load(saved, {"model": model})
        again = torch.equal(model(tokens()), logits)
        results.append((logits, same, again))
    return results


def test_two_ranks_load_compute_and_write_what_one_process_does(tmp_path: Path) -> None:
    """And a snapshot has full tensors, which the plain model reads."""
    plain = [write_consolidated(tmp_path / str(number), sizes, 2) for number, sizes in enumerate(SIZES)]
    for results in run_ranks(on_two_ranks, 2, str(tmp_path)):
        for (logits, same, again), model in zip(results, plain, strict=True):
            assert torch.allclose(logits, model(tokens()), rtol=1e-5, atol=1e-6)
            assert same and again
    state = {name: value.clone() for name, value in plain[0].state_dict().items()}
    for param in plain[0].parameters():
        param.data.zero_()
    scale_snapshot.load(tmp_path / "snapshots 0", {"model": plain[0]})
    assert all(torch.equal(plain[0].state_dict()[name], value) for name, value in state.items())


def test_names_stand_where_programs_import_them() -> None:
    for module, names in [
        (layers, "ColumnParallelLinear RowParallelLinear ParallelEmbedding VocabParallelEmbedding"),
        (layers, "copy_to_model_parallel_region reduce_from_model_parallel_region get_model_parallel_rank"),
        (mappings, "copy_to_model_parallel_region reduce_from_model_parallel_region"),
        (mappings, "scatter_to_model_parallel_region gather_from_model_parallel_region"),
        (random, "checkpoint get_cuda_rng_tracker model_parallel_cuda_manual_seed CudaRNGStatesTracker"),
        (utils, "VocabUtility divide_and_check_no_remainder ensure_divisibility split_tensor_along_last_dim"),
        (cross_entropy, "vocab_parallel_cross_entropy"),
        (fs_init, "get_model_parallel_world_size get_model_parallel_src_rank get_data_parallel_ranks"),
        (fs_init, "get_context_parallel_rank get_pipeline_parallel_ranks destroy_model_parallel"),
        (model_parallel, "initialize_model_parallel ColumnParallelLinear vocab_parallel_cross_entropy"),
    ]:
        assert [name for name in names.split() if not hasattr(module, name)] == []


def test_more_ranks_than_there_are_and_a_timeout_are_translated() -> None:
    _warnings.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fs_init.initialize_model_parallel(8, timeout=timedelta(minutes=2))
    try:
        assert fs_init.get_model_parallel_world_size() == 1 and megatron.model_parallel_is_initialized()
        assert [str(warning.message) for warning in caught] == [
            "initialize_model_parallel(8): there are 1 ranks, so each layer is divided between 1: "
            "scale_tp.initialize_model_parallel(1)",
            "initialize_model_parallel(timeout=): is written limit_seconds: "
            "scale_tp.initialize_model_parallel(1, limit_seconds=120)",
        ]
        assert {warning.filename for warning in caught} == {__file__}
    finally:
        fs_init.destroy_model_parallel()


def test_a_part_of_a_weight_is_filled_as_the_whole_would_be() -> None:
    part, whole = torch.empty(6, 4), torch.empty(6, 4)
    torch.manual_seed(1)
    kept = layers._initialize_affine_weight(part, 6, 4, 6, 0, nn.init.normal_, return_master_weight=True)
    torch.manual_seed(1)
    assert kept is not None and torch.equal(kept, nn.init.normal_(whole)) and torch.equal(part, whole)
