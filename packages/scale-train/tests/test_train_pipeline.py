"""A model in stages trains as one process that accumulates, and any number of stages goes on from its checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scale_core.comm.group import Group, group_of
from scale_core.testing import run_ranks
from scale_train.data import read_text
from scale_train.errors import InputError
from scale_train.model import generate
from scale_train.options import DataOptions, ModelOptions, OptimizerOptions, Options, ParallelOptions
from scale_train.resolve import check_options, options_without_effect, pipeline_shape
from scale_train.training.checkpoint import load, save
from scale_train.training.parallelize import stage_boundaries
from scale_train.training.reporters import Reporter, StepRecord
from scale_train.training.state import TrainState, build_state
from scale_train.training.trainer import evaluate, train_step

STEPS = 4


class Recorder(Reporter):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float | None] = []

    def step(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        self.norms.append(record.gradient_norm)


def options_for(text: Path, parallel: str = "pipe", *, clip: float = 0.5, **more) -> Options:
    options = Options(
        data=DataOptions(text=(text,), sequence=16, batch=12, held_out_tokens=80),
        model=ModelOptions(layers=4, width=16, heads=2),
        parallel=ParallelOptions(parallel=parallel, device="cpu", **{"chunks": 3, **more}),
        optimizer=OptimizerOptions(steps=STEPS, clip=clip, optimizer_kernel="plain", warmup=2),
    )
    return replace(options, run=replace(options.run, log_every=1, seed=1))


def train(training: TrainState, steps: int) -> Recorder:
    training.reporter = recorder = Recorder()
    while training.step < steps:
        train_step(training)
    return recorder


def begin(options: Options, group: Group) -> TrainState:
    return build_state(options, read_text(options.data.text), group)


def go_on(options: Options, point: Path, group: Group) -> list[float]:
    training = begin(options, group)
    load(training, point)
    return train(training, STEPS).losses


def trained(several: list[Options], folder: Path, resumed: list[Options]) -> list[tuple]:
    """Trains in each way; saves half-way, and goes on from there in other ways."""
    results, group = [], group_of()
    for number, options in enumerate(several):
        training = begin(options, group)
        first = train(training, STEPS // 2)
        point = save(training, folder / str(number))
        rest = train(training, STEPS)
        bits = evaluate(training)
        text = generate(training.engine.raw_model, torch.tensor([97]), 2, context=16, seed=0, temperature=0.5).tolist()
        others = [go_on(other, point, group) for other in resumed] if number == 0 else []
        results.append((first.losses + rest.losses, first.norms + rest.norms, bits, text, others, point))
    return results


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(torch.randint(97, 123, (5_000,), generator=torch.Generator().manual_seed(0)).tolist()))
    return path


def test_stages_train_judge_write_save_and_go_on_as_one_process(text, tmp_path):
    [(losses, norms, bits, sample, _, plain_point)] = trained(
        [options_for(text, "none", accumulate=3)], tmp_path / "plain", []
    )
    ways = [
        options_for(text, schedule="1f1b"),
        options_for(text, schedule="solve", checkpoint_activations="all"),
    ]
    resumed = [options_for(text, schedule="gpipe", stages=4), options_for(text, "fsdp")]
    by_rank = run_ranks(trained, 2, ways, tmp_path / "pipe", resumed)
    for own, own_norms, own_bits, own_sample, others, _ in by_rank[0]:
        assert own == pytest.approx(losses, rel=1e-5)
        assert own_norms == pytest.approx(norms, rel=1e-4)
        assert own_bits == pytest.approx(bits, rel=1e-5)
        assert own_sample == sample
        for other in others:
            assert other == pytest.approx(losses[STEPS // 2 :], rel=1e-4)
    assert [result[:4] for result in by_rank[1]] == [result[:4] for result in by_rank[0]]
    # One process goes on from stages, and stages from one process.
    plain = options_for(text, "none", accumulate=3)
    assert go_on(plain, by_rank[0][0][5], Group()) == pytest.approx(losses[STEPS // 2 :], rel=1e-5)
    assert go_on(options_for(text, schedule="gpipe"), plain_point, Group()) == pytest.approx(
        losses[STEPS // 2 :], rel=1e-5
    )


def replicated(options: Options, folder: Path) -> tuple:
    """A few steps of pipelines beside each other, saved half-way; and the values before the first step."""
    training = begin(options, group_of())
    pipeline = training.engine.pipeline
    first = {name: param.detach().clone() for name, param in pipeline.named_parameters()}
    recorder = train(training, STEPS // 2)
    point = save(training, folder)
    train(training, STEPS)
    bits = evaluate(training)
    where = (training.engine.axes.data_rank, training.engine.axes.stages.rank)
    params = {name: param.detach() for name, param in pipeline.named_parameters()}
    return where, first, (recorder.losses, recorder.norms), training.reporter.losses, bits, params, point


def test_pipelines_beside_each_other_train_as_one_and_each_rank_makes_its_stages_alone(text, tmp_path):
    options = options_for(text, stages=2)
    by_rank = run_ranks(replicated, 4, options, tmp_path / "pipe")
    plain = options_for(text, "none", accumulate=3)
    [(losses, norms, bits, *_)] = trained([plain], tmp_path / "plain", [])
    training = begin(plain, Group())
    values = {name: param.detach().clone() for name, param in training.engine.raw_model.named_parameters()}
    values["head.weight"] = values["embedding.weight"]
    stages = {}
    for where, first, (own, own_norms), rest, own_bits, params, _ in by_rank:
        assert own + rest == pytest.approx(losses, rel=1e-5)
        assert own_norms == pytest.approx(norms[: STEPS // 2], rel=1e-4)
        assert own_bits == pytest.approx(bits, rel=1e-5)
        assert all(torch.equal(tensor, values[name]) for name, tensor in first.items())
        # All pipelines have the same stages, which stay equal to the bit.
        others = stages.setdefault(where[1], params)
        assert others.keys() == params.keys() and all(torch.equal(others[name], params[name]) for name in params)
    assert [where for where, *_ in by_rank] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert set(stages[0]) | set(stages[1]) >= set(values) - {"head.weight"}
    assert go_on(plain, by_rank[0][-1], Group()) == pytest.approx(losses[STEPS // 2 :], rel=1e-5)


def check_as_one_process(text: Path, folder: Path, ranks: int, ways: list[Options], resumed: list[Options]) -> None:
    [(losses, norms, bits, sample, _, _)] = trained([options_for(text, "none", accumulate=3)], folder / "plain", [])
    by_rank = run_ranks(trained, ranks, ways, folder / "pipe", resumed)
    for rank, results in enumerate(by_rank):
        for options, (own, own_norms, own_bits, own_sample, others, _) in zip(ways, results, strict=True):
            assert own == pytest.approx(losses, rel=1e-5), (rank, options.parallel)
            assert own_norms == pytest.approx(norms, rel=1e-4), (rank, options.parallel)
            assert own_bits == pytest.approx(bits, rel=1e-5), (rank, options.parallel)
            assert own_sample == sample
            for other in others:
                assert other == pytest.approx(losses[STEPS // 2 :], rel=1e-4), (rank, options.parallel)
    for plain in (options_for(text, "none", accumulate=3), options_for(text, schedule="gpipe")):
        assert go_on(plain, by_rank[0][0][5], Group()) == pytest.approx(losses[STEPS // 2 :], rel=1e-4)


@pytest.mark.composition("scale-pipe", "scale-fsdp")
@pytest.mark.composition("scale-checkpoint", "scale-pipe", "scale-tp")
def test_layers_of_stages_are_divided_and_stages_sharded_and_all_train_as_one_process(text, tmp_path):
    divided = options_for(text, tensor_parallel=2, sequence_parallel=True, checkpoint_activations="all")
    sharded = options_for(text, stages=2, data_parallel="fsdp")
    resumed = [sharded, options_for(text, "fsdp", tensor_parallel=2)]
    check_as_one_process(text, tmp_path, 4, [divided, sharded], resumed)


@pytest.mark.composition("scale-pipe", "scale-tp", "scale-fsdp")
@pytest.mark.composition("scale-pipe", "scale-tp", "DistributedDataParallel")
@pytest.mark.soak
def test_three_axes_of_two_ranks_train_as_one_process(text, tmp_path):
    three = {"tensor_parallel": 2, "stages": 2}
    ways = [options_for(text, data_parallel=kind, **three) for kind in ("fsdp", "ddp")]
    ways += [options_for(text, tensor_parallel=2, stages=4, schedule="zb_v", checkpoint_activations="all")]
    check_as_one_process(text, tmp_path, 8, ways, [options_for(text, "fsdp", tensor_parallel=2)])


@pytest.mark.parametrize(
    ("num_ranks", "flags", "shape"),
    [
        (2, {}, (2, 1, 1)),
        (4, {"schedule": "zb_v"}, (4, 1, 2)),
        (4, {"stages": 4}, (4, 1, 1)),
        (4, {"stages": 4, "schedule": "zb_v"}, (2, 2, 2)),
        (4, {"stages": 2}, (2, 2, 1)),
        (4, {"tensor_parallel": 2}, (2, 1, 1)),
        (8, {"tensor_parallel": 2, "stages": 2}, (2, 2, 1)),
        (6, {"stages": 3}, (3, 2, 1)),
        (6, {"stages": 4, "schedule": "gpipe"}, (2, 3, 2)),
        (1, {"stages": 2, "schedule": "gpipe"}, (1, 1, 2)),
    ],
)
def test_ranks_make_one_pipeline_or_several_beside_each_other(text, num_ranks, flags, shape):
    assert pipeline_shape(options_for(text, **flags).parallel, num_ranks) == shape


def test_the_batch_divides_among_pipelines(text):
    options = options_for(text, stages=2)
    with pytest.raises(
        InputError, match=r"--batch 7 does not divide among 2 pipelines.*4 ranks, 2 stages.*multiple of 2"
    ):
        check_options(replace(options, data=replace(options.data, batch=7)), 4)


def test_blocks_are_divided_evenly():
    assert stage_boundaries(4, 2) == ["blocks.2"]
    assert stage_boundaries(10, 4) == ["blocks.2", "blocks.5", "blocks.7"]
    assert stage_boundaries(3, 1) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 3}, "--stages 3 does not divide among 2 ranks; take 2 or a multiple of it, or, for several"),
        ({"stages": 1}, "--stages 1 does not divide among 2 ranks"),
        ({"schedule": "zb"}, "--schedule zb, --stages None: there is no schedule 'zb'"),
        ({"schedule": "1f1b", "stages": 4}, "--schedule 1f1b, --stages 4: .*1 stage on each rank"),
        ({"schedule": "gpipe", "stages": 6}, "has 6 stages, but the model has 4 blocks; take fewer --ranks"),
        ({"accumulate": 2}, "--accumulate 2: with --parallel pipe it is --chunks that cuts the batch; take --chunks 6"),
        ({"chunks": 0}, "--chunks 0: at least 1 is needed"),
        ({"tensor_parallel": 3}, "--tensor-parallel 3 does not divide 2 ranks"),
        ({"checkpoint_activations": "budget:1GiB"}, "which pipe has on no rank"),
    ],
)
def test_what_makes_no_pipeline_is_said_before_anything_starts(text, changes, message):
    with pytest.raises(InputError, match=message):
        check_options(options_for(text, **changes), 2)


def test_a_weight_of_two_stages_on_one_rank_is_not_sharded(text):
    folded = options_for(text, stages=4, schedule="zb_v", data_parallel="fsdp")
    with pytest.raises(InputError, match=r"--schedule zb_v: the first and the last stage share .*--data-parallel ddp"):
        check_options(folded, 4)
    check_options(replace(folded, model=replace(folded.model, untied_embeddings=True)), 4)
    check_options(folded, 2)  # One pipeline: there is nothing to shard among.


def test_pipelines_that_solve_alone_do_not_communicate_in_each_micro_batch(text):
    """Each would run another schedule after two steps, and wait for the others for ever."""
    two = options_for(text, stages=2, schedule="solve")
    check_options(two, 4)  # The gradients of two replicas are averaged once, after the last micro-batch.
    experts = replace(two, model=replace(two.model, experts=4))
    check_options(experts, 2)
    for options, flag, instead in (
        (experts, "--experts 4", "as many --ranks as one pipeline has"),
        (options_for(text, stages=2, schedule="solve", data_parallel="fsdp"), "--data-parallel fsdp", "--data-para"),
        (options_for(text, schedule="solve", tensor_parallel=2), "--tensor-parallel 2", "--tensor-parallel 1"),
    ):
        usual = "zb_h1" if options.parallel.stages else "zb_v"
        with pytest.raises(InputError, match=f"--schedule solve: .*{flag} .*take --schedule {usual}, or {instead}"):
            check_options(options, 4)


def test_any_batch_will_do_and_what_has_no_effect_is_said(text):
    options = options_for(text)
    check_options(replace(options, data=replace(options.data, batch=7)), 2)
    assert options_without_effect(options) == []
    flags = options_for(text, "ddp", stages=2, schedule="zb_v", data_parallel="fsdp")
    assert options_without_effect(flags) == [
        f"{flag} has no effect with --parallel ddp"
        for flag in ("--stages", "--schedule", "--chunks", "--data-parallel")
    ]
