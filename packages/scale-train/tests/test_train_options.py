import os
import re
from dataclasses import replace

import pytest
import torch

from scale_train.errors import InputError
from scale_train.options import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions, RunOptions
from scale_train.resolve import MAX_RANKS_PER_CORE, check_options, model_config, num_local_ranks, options_without_effect

CPU = Options(parallel=ParallelOptions(device="cpu"))


def test_the_defaults_make_a_training():
    check_options(CPU, 1)
    check_options(CPU, 2)


def test_a_size_by_name_can_be_changed_number_by_number():
    config = model_config(Options(model=ModelOptions(size="gpt3-125m", layers=3, untied_embeddings=True)))
    assert (config.layers, config.width, config.heads, config.tied) == (3, 768, 12, False)


def test_an_unknown_size_lists_those_that_exist():
    with pytest.raises(InputError, match="--size huge: no such size; there are tiny, small, gpt3-125m"):
        check_options(Options(model=ModelOptions(size="huge")), 1)


def test_heads_that_do_not_divide_the_width_are_named():
    with pytest.raises(InputError, match="width is 128 and heads is 3"):
        check_options(Options(model=ModelOptions(heads=3)), 1)


@pytest.mark.parametrize(
    ("batch", "ranks", "accumulate", "nearest"), [(7, 2, 1, "6 or 8"), (32, 2, 3, "30 or 36"), (3, 4, 1, "4")]
)
def test_a_batch_that_does_not_divide_says_which_would(batch, ranks, accumulate, nearest):
    options = Options(data=DataOptions(batch=batch), parallel=ParallelOptions(accumulate=accumulate))
    with pytest.raises(
        InputError, match=f"--batch {batch} does not divide into {ranks} ranks x {accumulate}.*take {nearest}$"
    ):
        check_options(options, ranks)


def test_one_plain_process_has_one_rank():
    options = Options(parallel=ParallelOptions(parallel="none", device="cpu"))
    check_options(options, 1)
    assert num_local_ranks(options) == 1
    with pytest.raises(InputError, match="--parallel none is one process, but there are 2 ranks"):
        check_options(options, 2)


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


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (Options(data=DataOptions(sequence=0)), "--sequence 0"),
        (Options(optimizer=OptimizerOptions(steps=0)), "--steps 0"),
        (Options(optimizer=OptimizerOptions(lr=float("nan"))), "--lr nan"),
        (Options(optimizer=OptimizerOptions(clip=-1.0)), "--clip -1.0"),
        (Options(optimizer=OptimizerOptions(warmup=-1)), "--warmup -1"),
        (Options(parallel=ParallelOptions(accumulate=0)), "--accumulate 0"),
        (Options(run=RunOptions(save_every=-2)), "--save-every -2"),
        (Options(run=RunOptions(log_every=0)), "--log-every 0"),
        (Options(model=ModelOptions(dropout=2.0)), r"^--dropout 2.0: a number from 0 to below 1"),
        (Options(model=ModelOptions(loss_chunk=-5)), r"^--loss-chunk -5: 0 or more"),
    ],
)
def test_numbers_out_of_range_are_named_with_their_flag(options, flag):
    with pytest.raises(InputError, match=flag):
        check_options(options, 1)


@pytest.mark.parametrize(
    ("parallel", "ranks", "message"),
    [
        ({"tensor_parallel": 2, "overlap_pieces": 0}, 2, "--overlap-pieces 0: at least 1 is needed"),
        ({"tensor_parallel": 3}, 4, "--tensor-parallel 3 does not divide 4 ranks; take 1 or 2 or 4"),
        ({"tensor_parallel": 0}, 2, "--tensor-parallel 0: at least 1 is needed"),
        ({"tensor_parallel": 8}, 8, "--tensor-parallel 8: the model has 4 heads to divide; take at most 4"),
        ({"tensor_parallel": 2, "parallel": "none"}, 4, "--parallel none is one process, but there are 4 ranks"),
        (
            {"tensor_parallel": 2, "parallel": "ddp", "checkpoint_activations": "budget:1GiB"},
            4,
            "a plan is measured on whole layers, and --tensor-parallel 2 divides them",
        ),
        ({"tensor_parallel": 2, "accumulate": 32}, 4, "--batch 32 does not divide into 2 ranks x 32 micro-batches"),
    ],
)
def test_layers_that_can_not_be_divided_so_are_refused(parallel, ranks, message):
    with pytest.raises(InputError, match=re.escape(message)):
        check_options(Options(parallel=ParallelOptions(**parallel)), ranks)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"context_parallel": 3}, "--context-parallel 3 does not divide 4 ranks; take 1 or 2 or 4"),
        (
            {"context_parallel": 4, "tensor_parallel": 2},
            "--context-parallel 4 does not divide 2 ranks (of 2 that divide layers each); take 1 or 2",
        ),
        ({"context_parallel": 0}, "--context-parallel 0: at least 1 is needed"),
        ({"context_parallel": 2, "parallel": "pipe"}, "the stages of a pipeline see full sequences; take --parallel"),
        ({"context_parallel": 4, "parallel": "none"}, "one plain process sees full sequences; take --parallel fsdp"),
        (
            {"context_parallel": 2, "parallel": "ddp", "checkpoint_activations": "budget:1GiB"},
            "a plan is measured on full sequences, and --context-parallel 2 divides them",
        ),
        ({"context_parallel": 2, "accumulate": 32}, "--batch 32 does not divide into 2 ranks x 32 micro-batches"),
    ],
)
def test_sequences_that_can_not_be_divided_so_are_refused(parallel, message):
    with pytest.raises(InputError, match=re.escape(message)):
        check_options(Options(parallel=ParallelOptions(**parallel)), 4)


def test_divided_sequences_have_a_length_that_divides():
    two = ParallelOptions(context_parallel=2)
    with pytest.raises(InputError, match=r"--sequence 7: --context-parallel 2 needs a multiple of 2.*--sequence 6$"):
        check_options(Options(data=DataOptions(sequence=7), parallel=two), 2)
    with pytest.raises(InputError, match=r"take --sequence 4$"):
        check_options(Options(data=DataOptions(sequence=2), parallel=two), 2)
    with pytest.raises(InputError, match="--adascale compares gradients of full sequences"):
        check_options(Options(parallel=two, optimizer=OptimizerOptions(adascale=True)), 2)


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
