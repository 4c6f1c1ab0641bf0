import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from lm_trainings import changed

from scale_train.configuration.resolve import (
    MAX_RANKS_PER_CORE,
    check_options,
    model_config,
    num_local_ranks,
    options_without_effect,
    resolve_device,
)
from scale_train.errors import InputError
from scale_train.options import DataOptions, ModelOptions, Options, ParallelOptions

CPU = Options(parallel=ParallelOptions(device="cpu"))
PIPED: dict[str, Any] = {"parallel": "pipe", "layers": 4, "width": 16, "heads": 2, "chunks": 3}


WRONG: list[tuple[int, dict[str, Any], str]] = [
    # one process
    (1, {"size": "huge"}, "--size huge: no such size; there are tiny, small, gpt3-125m"),
    (1, {"heads": 3}, "width is 128 and heads is 3"),
    (1, {"sequence": 0}, "--sequence 0"),
    (1, {"steps": 0}, "--steps 0"),
    (1, {"lr": float("nan")}, "--lr nan"),
    (1, {"clip": -1.0}, "--clip -1.0"),
    (1, {"warmup": -1}, "--warmup -1"),
    (1, {"accumulate": 0}, "--accumulate 0"),
    (1, {"save_every": -2}, "--save-every -2"),
    (1, {"log_every": 0}, "--log-every 0"),
    (1, {"dropout": 2.0}, "--dropout 2.0: a number from 0 to below 1"),
    (1, {"loss_chunk": -5}, "--loss-chunk -5: 0 or more"),
    (1, {"adascale": True, "adascale_scale": 0.5}, "--adascale-scale 0.5: at least 1 is needed"),
    (1, {"adascale_scale": 4.0}, "--adascale-scale 4 has no effect without --adascale"),
    # the batch and the ranks
    (2, {"batch": 7}, "--batch 7 does not divide into 2 ranks x 1 micro-batches; take 6 or 8"),
    (2, {"accumulate": 3}, "--batch 32 does not divide into 2 ranks x 3 micro-batches; take 30 or 36"),
    (4, {"batch": 3}, "--batch 3 does not divide into 4 ranks x 1 micro-batches; take 4"),
    (2, {"parallel": "none"}, "--parallel none is one process, but there are 2 ranks"),
    # divided layers
    (2, {"tensor_parallel": 2, "overlap_pieces": 0}, "--overlap-pieces 0: at least 1 is needed"),
    (4, {"tensor_parallel": 3}, "--tensor-parallel 3 does not divide 4 ranks; take 1 or 2 or 4"),
    (2, {"tensor_parallel": 0}, "--tensor-parallel 0: at least 1 is needed"),
    (8, {"tensor_parallel": 8}, "--tensor-parallel 8: the model has 4 heads to divide; take at most 4"),
    (4, {"tensor_parallel": 2, "parallel": "none"}, "--parallel none is one process, but there are 4 ranks"),
    (
        4,
        {"tensor_parallel": 2, "parallel": "ddp", "checkpoint_activations": "budget:1GiB"},
        "a plan is measured on whole layers, and --tensor-parallel 2 divides them",
    ),
    (4, {"tensor_parallel": 2, "accumulate": 32}, "--batch 32 does not divide into 2 ranks x 32 micro-batches"),
    # divided sequences
    (4, {"context_parallel": 3}, "--context-parallel 3 does not divide 4 ranks; take 1 or 2 or 4"),
    (
        4,
        {"context_parallel": 4, "tensor_parallel": 2},
        "--context-parallel 4 does not divide 2 ranks (of 2 that divide layers each); take 1 or 2",
    ),
    (4, {"context_parallel": 0}, "--context-parallel 0: at least 1 is needed"),
    (4, {"context_parallel": 2, "parallel": "pipe"}, "the stages of a pipeline see full sequences; take --parallel"),
    (4, {"context_parallel": 4, "parallel": "none"}, "one plain process sees full sequences; take --parallel fsdp"),
    (
        4,
        {"context_parallel": 2, "parallel": "ddp", "checkpoint_activations": "budget:1GiB"},
        "a plan is measured on full sequences, and --context-parallel 2 divides them",
    ),
    (4, {"context_parallel": 2, "accumulate": 32}, "--batch 32 does not divide into 2 ranks x 32 micro-batches"),
    (2, {"context_parallel": 2, "sequence": 7}, "--sequence 7: --context-parallel 2 needs a multiple of 2"),
    (2, {"context_parallel": 2, "sequence": 7}, "--sequence 6"),
    (2, {"context_parallel": 2, "sequence": 2}, "take --sequence 4"),
    (2, {"context_parallel": 2, "adascale": True}, "--adascale compares gradients of full sequences"),
    # experts
    (4, {"experts": -1}, "--experts -1: 0 or more is needed"),
    (4, {"experts": 10**9}, "--experts 1000000000: more than can be meant; at most 100000"),
    (4, {"experts": 8, "top_k": 9}, "--top-k 9: a token goes to at most all 8 of --experts 8"),
    (4, {"experts": 8, "top_k": 0}, "--top-k 0: at least 1 is needed"),
    (4, {"experts": 8, "capacity_factor": float("nan")}, "--capacity-factor nan: 0 or more is needed"),
    (4, {"experts": 8, "aux_loss_coef": -1.0}, "--aux-loss-coef -1.0: 0 or more is needed"),
    (4, {"top_k": 3, "expert_parallel": 2}, "--top-k and --expert-parallel: for a model with experts; say how many"),
    (4, {"experts": 2, "expert_parallel": 4}, "--expert-parallel 4: a rank would have none of the 2 of --experts 2"),
    (4, {"experts": 8, "expert_parallel": 3}, "--expert-parallel 3 does not divide 4 ranks; take 1 or 2 or 4"),
    (
        4,
        {"experts": 8, "parallel": "pipe", "stages": 2, "expert_parallel": 4},
        "--expert-parallel 4: ranks with the same stage divide its experts, and there are 2 pipelines; take 1 or 2",
    ),
    (
        4,
        {"experts": 8, "parallel": "pipe", "stages": 2, "expert_parallel": 2, "data_parallel": "ddp", "adascale": True},
        "--expert-parallel 2: --adascale measures gradients that are averaged in the backward pass",
    ),
    (
        4,
        {"experts": 8, "tensor_parallel": 2, "sequence_parallel": True},
        "--sequence-parallel: ranks that divide layers route the same tokens to --experts 8",
    ),
    # pipelines
    (
        2,
        {**PIPED, "stages": 3},
        "--stages 3 does not divide among 2 ranks; take 2 or a multiple of it, or, for several",
    ),
    (2, {**PIPED, "stages": 1}, "--stages 1 does not divide among 2 ranks"),
    (2, {**PIPED, "schedule": "zb"}, "--schedule zb, --stages None: there is no schedule 'zb'"),
    (2, {**PIPED, "schedule": "1f1b", "stages": 4}, "--schedule 1f1b, --stages 4: "),
    (2, {**PIPED, "schedule": "1f1b", "stages": 4}, "1 stage on each rank"),
    (2, {**PIPED, "schedule": "gpipe", "stages": 6}, "has 6 stages, but the model has 4 blocks; take fewer --ranks"),
    (
        2,
        {**PIPED, "accumulate": 2},
        "--accumulate 2: with --parallel pipe it is --chunks that cuts the batch; take --chunks 6",
    ),
    (2, {**PIPED, "chunks": 0}, "--chunks 0: at least 1 is needed"),
    (2, {**PIPED, "tensor_parallel": 3}, "--tensor-parallel 3 does not divide 2 ranks"),
    (2, {**PIPED, "checkpoint_activations": "budget:1GiB"}, "which pipe has on no rank"),
    (4, {**PIPED, "stages": 2, "batch": 7}, "--batch 7 does not divide among 2 pipelines"),
    (4, {**PIPED, "stages": 2, "batch": 7}, "4 ranks, 2 stages"),
    (4, {**PIPED, "stages": 2, "batch": 7}, "multiple of 2"),
    # activations
    (1, {"checkpoint_activations": "some"}, "take all, selective, or a budget, as budget:2GiB"),
    (1, {"checkpoint_activations": "budget:2GiB"}, "take all or selective, or --parallel sharded-ddp"),
    (
        1,
        {"parallel": "none", "checkpoint_activations": "budget:2GiB", "offload_activations": True},
        "says what is offloaded",
    ),
    (1, {"parallel": "oss", "cpu_offload": True}, "--cpu-offload: --parallel oss keeps its state on the device; take"),
]


@pytest.mark.parametrize("ranks, changes, message", WRONG)
def test_options_that_cannot_be_meant_are_refused(ranks: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        check_options(changed(CPU, **changes), ranks)


def test_the_defaults_make_a_training():
    check_options(CPU, 1)
    check_options(CPU, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": 8, "tensor_parallel": 2},
        {"experts": 8, "parallel": "pipe", "stages": 2, "expert_parallel": 2, "data_parallel": "ddp"},
    ],
)
def test_experts_without_adascale_may_be_divided(changes: dict[str, Any]) -> None:
    check_options(changed(CPU, **changes), 4)


def test_a_size_by_name_can_be_changed_number_by_number():
    config = model_config(Options(model=ModelOptions(size="gpt3-125m", layers=3, untied_embeddings=True)))
    assert (config.layers, config.width, config.heads, config.tied) == (3, 768, 12, False)


def test_one_plain_process_has_one_rank():
    options = Options(parallel=ParallelOptions(parallel="none", device="cpu"))
    check_options(options, 1)
    assert num_local_ranks(options) == 1


def test_all_that_does_not_go_with_the_ranks_is_told_at_once():
    parallel = ParallelOptions(
        tensor_parallel=2, context_parallel=2, checkpoint_activations="budget:2GiB", parallel="ddp"
    )
    options = Options(DataOptions(batch=7, sequence=7), ModelOptions(heads=2), parallel)
    with pytest.raises(InputError) as told:
        check_options(options, 8)
    words = ("--checkpoint-activations budget:2GiB: a plan is measured on whole layers", "--sequence 7: ", "--batch 7 ")
    assert all(word in str(told.value) for word in words)


def test_more_ranks_than_devices_are_refused():
    most = (os.cpu_count() or 1) * MAX_RANKS_PER_CORE
    with pytest.raises(InputError, match=f"--ranks {most + 1}: more ranks than this machine's devices"):
        num_local_ranks(replace(CPU, parallel=ParallelOptions(device="cpu", ranks=most + 1)))
    with pytest.raises(InputError, match="--ranks 0: at least 1"):
        num_local_ranks(replace(CPU, parallel=ParallelOptions(device="cpu", ranks=0)))


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert num_local_ranks(Options()) == 2
    with pytest.raises(InputError, match=r"--ranks 3: more ranks than this machine's devices \(2 GPUs\)"):
        num_local_ranks(Options(parallel=ParallelOptions(ranks=3)))


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--device cuda"):
        num_local_ranks(Options(parallel=ParallelOptions(device="cuda")))


def test_ranks_that_divide_layers_share_a_part_of_the_batch():
    check_options(Options(data=DataOptions(batch=3), parallel=ParallelOptions(tensor_parallel=4, parallel="none")), 4)


@pytest.mark.parametrize(
    ("parallel", "lines"),
    [
        (ParallelOptions(sync_each_micro_batch=False, accumulate=2, reshard_after_forward=False), []),
        (ParallelOptions(parallel="sharded-ddp", sync_each_micro_batch=False, accumulate=2), []),
        (
            ParallelOptions(parallel="oss", reshard_after_forward=False),
            ["--reshard-after-forward has no effect with --parallel oss"],
        ),
        (
            ParallelOptions(sync_each_micro_batch=False),
            ["--sync-each-micro-batch has no effect without --accumulate 2 or more"],
        ),
        (ParallelOptions(sequence_parallel=True, tensor_parallel=2), []),
        (
            ParallelOptions(sequence_parallel=True),
            ["--sequence-parallel has no effect without --tensor-parallel 2 or more"],
        ),
        (ParallelOptions(context_attention="ulysses", context_parallel=2), []),
        (
            ParallelOptions(context_attention="ulysses"),
            ["--context-attention has no effect without --context-parallel 2 or more"],
        ),
        (ParallelOptions(overlap_pieces=2, tensor_parallel=2), []),
        (
            ParallelOptions(overlap_pieces=2),
            ["--overlap-pieces has no effect without --tensor-parallel 2 or more"],
        ),
        (
            ParallelOptions(parallel="ddp", sync_each_micro_batch=False, accumulate=2, reshard_after_forward=False),
            [
                "--sync-each-micro-batch has no effect with --parallel ddp",
                "--reshard-after-forward has no effect with --parallel ddp",
            ],
        ),
    ],
)
def test_what_has_no_effect_is_said(parallel, lines):
    assert options_without_effect(Options(parallel=parallel)) == lines


def test_stages_that_are_sharded_may_keep_what_they_gathered():
    parallel = ParallelOptions(parallel="pipe", data_parallel="fsdp", reshard_after_forward=False)
    assert options_without_effect(Options(parallel=parallel)) == []
    (line,) = options_without_effect(Options(parallel=replace(parallel, data_parallel="ddp")))
    assert line == "--reshard-after-forward has no effect with --parallel pipe and --data-parallel ddp"


def test_an_accelerator_without_tests_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on the CPU in silence would be no less surprising."""
    assert resolve_device("auto") == "cpu"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    with pytest.raises(InputError, match="an accelerator of type xpu, on which scale-train was not tested"):
        resolve_device("auto")
    assert resolve_device("cpu") == "cpu"
