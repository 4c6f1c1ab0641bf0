import errno
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from lm_trainings import changed, options_for, start, train_to

import scale_snapshot.snapshot
from scale_core.comm.group import Group
from scale_core.testing import run_ranks
from scale_snapshot import NewerSnapshotError
from scale_train.errors import InputError
from scale_train.options import Options, RunOptions
from scale_train.training import checkpoint
from scale_train.training.checkpoint import (
    CHECKPOINTS,
    METRICS,
    RunPaths,
    check_same_model,
    checkpoint_metadata,
    load,
    resolve_paths,
    save,
    torchrun_run,
)
from scale_train.training.state import TrainState
from scale_train.training.trainer import evaluate, train, train_step


def alone(options: Options) -> TrainState:
    return start(options, Group())


def save_half_way(options: Options, folder: Path) -> dict[int, float]:
    training = start(options)
    train_to(training, 3)
    save(training, folder)
    return train_to(training).loss_by_step()


def go_on(options: Options, point: Path) -> dict[int, float]:
    training = start(options)
    load(training, point)
    return train_to(training).loss_by_step()


def go_on_in_several_ways(several: list[Options], point: Path) -> list[dict[int, float]]:
    return [go_on(options, point) for options in several]


def save_in_several_ways(several: list[Options], folder: Path) -> list[dict[int, float]]:
    return [save_half_way(options, folder / options.parallel.parallel) for options in several]


@pytest.fixture
def point(text: Path, tmp_path: Path) -> Path:
    save_half_way(options_for(text), tmp_path / "run" / CHECKPOINTS)
    return tmp_path / "run" / CHECKPOINTS / "step-00000003"


def save_at(training: TrainState, step: int, folder: Path) -> Path:
    training.step = step
    return save(training, folder)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.fault(63)
def test_a_resumed_training_has_the_losses_of_an_unbroken_one(text, tmp_path):
    options = options_for(text, "fsdp", dropout=0.2)
    uninterrupted = run_ranks(save_half_way, 2, options, tmp_path)[0]
    assert run_ranks(go_on, 2, options, tmp_path / "step-00000003")[0] == uninterrupted


@pytest.mark.fault(16)
def test_another_number_of_ranks_goes_on_to_the_same_curve(text, tmp_path):
    uninterrupted = run_ranks(save_half_way, 2, options_for(text, "fsdp"), tmp_path)[0]
    point = tmp_path / "step-00000003"
    by_three = run_ranks(go_on, 3, options_for(text, "fsdp"), point)[0]
    by_one = go_on(options_for(text, "none"), point)
    assert list(by_three) == list(by_one) == [4, 5, 6]
    for step in by_one:
        assert by_one[step] == pytest.approx(uninterrupted[step], rel=1e-4)
        assert by_three[step] == pytest.approx(uninterrupted[step], rel=1e-4)


def evaluated(training: TrainState) -> tuple[dict[int, float], float]:
    return train_to(training).loss_by_step(), evaluate(training)


def divide_and_go_on(text: Path, folder: Path) -> list[tuple[dict[int, float], float]]:
    """Three steps on two ranks that divide sequences, and the rest on as many and on ranks that do not."""
    save_half_way(options_for(text, "fsdp", context_parallel=2), folder)
    found = []
    for context in (2, 1):
        training = start(options_for(text, "fsdp", context_parallel=context))
        load(training, folder / "step-00000003")
        found.append(evaluated(training))
    return found


def test_divided_sequences_go_on_with_another_number_of_ranks(text, tmp_path):
    plain, bits = evaluated(alone(options_for(text)))
    for losses, held_out in run_ranks(divide_and_go_on, 2, text, tmp_path)[0]:
        assert losses == pytest.approx({step: plain[step] for step in (4, 5, 6)}, rel=1e-5)
        assert held_out == pytest.approx(bits, rel=1e-5)


def test_each_way_to_spread_goes_on_from_every_other(text, tmp_path):
    # A fused kernel, and a norm of parts, may differ from those of full tensors in the last place.
    exact = {"clip": 0.0, "optimizer_kernel": "plain", "dropout": 0.2}
    ways = [options_for(text, parallel, **exact) for parallel in ("oss", "sharded-ddp", "ddp")]
    uninterrupted = run_ranks(save_in_several_ways, 2, ways, tmp_path)[0]
    assert uninterrupted == [uninterrupted[0]] * 3
    resumed = run_ranks(go_on_in_several_ways, 2, ways, tmp_path / "sharded-ddp" / "step-00000003")[0]
    assert resumed == [{step: loss for step, loss in uninterrupted[0].items() if step > 3}] * 3

    by_one = go_on(options_for(text, "none"), tmp_path / "oss" / "step-00000003")
    others = [options_for(text, parallel) for parallel in ("oss", "sharded-ddp", "fsdp")]
    for losses in run_ranks(go_on_in_several_ways, 3, others, tmp_path / "oss" / "step-00000003")[0]:
        assert losses == pytest.approx(by_one, rel=1e-4)


def test_a_checkpoint_says_what_it_is_in_plain_json(text):
    training = alone(options_for(text))
    document = json.loads(json.dumps(checkpoint_metadata(training)))
    assert document["data"]["drawn"] == 0 and document["model"]["width"] == 16
    assert document["parameters"]["embedding.weight"] == [256, 16]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"width": 32}, r"embedding.weight is \[256, 16\] there, \[256, 32\] here"),
        ({"layers": 2}, r"it has no blocks.1.attention_norm.weight, which is \[16\] here"),
        ({"heads": 4}, "heads is 2 there, 4 here"),
        ({"untied_embeddings": True}, r"it has no head.weight, which is \[256, 16\] here"),
    ],
)
def test_a_checkpoint_of_another_model_names_what_differs(text, point, changes, message):
    with pytest.raises(InputError, match=f"a checkpoint of another model: {message}"):
        load(alone(options_for(text, **changes)), point)


def test_what_does_not_make_another_model_may_differ(text, point):
    training = alone(options_for(text, dropout=0.1, loss_chunk=7))
    load(training, point)
    assert training.step == 3


def test_a_path_that_is_too_long_is_one_line():
    with pytest.raises(InputError, match=r"--resume x+: cannot be read \(File name too long\)"):
        resolve_paths(RunOptions(resume=Path("x" * 300)))


def test_a_parameter_that_only_the_checkpoint_has_is_named_too():
    with pytest.raises(InputError, match=r"it has b \[2\], which is not here"):
        check_same_model({"a": [1], "b": [2]}, {"a": [1]}, Path("step-1"))


def test_a_checkpoint_of_another_text_is_refused(text, point, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(text.read_bytes()[::-1])
    with pytest.raises(InputError, match="it was trained on another text"):
        load(alone(options_for(other)), point)


@pytest.mark.fault(113)
@pytest.mark.parametrize("where", ["weight", "moment"])
def test_a_checkpoint_with_a_nan_is_refused(text, tmp_path, where):
    training = alone(options_for(text))
    folder = tmp_path / "run" / CHECKPOINTS
    for training.step in (1, 2, 3):
        if training.step == 3:
            weight = training.engine.raw_model.norm.weight
            train_step(training)
            training.step = 3
            spoiled = weight.data if where == "weight" else training.optimizer.state[weight]["exp_avg"]
            spoiled[1] = float("nan")
        save(training, folder)
    name = {"weight": "weight norm.weight", "moment": "exp_avg of norm.weight in the optimizer"}[where]
    point = folder / "step-00000003"
    message = (
        rf"--resume {point}: {name} is not finite; the last one that has finite numbers alone is step-00000002: "
        rf"--resume {folder}/step-00000002 --out a new folder"
    )
    with pytest.raises(InputError, match=message):
        load(alone(options_for(text)), point)
    later = alone(options_for(text))
    load(later, folder / "step-00000002")
    assert later.step == 2


def test_the_command_line_decides_about_the_optimizer(text, point):
    training = alone(options_for(text, weight_decay=0.5))
    load(training, point)
    assert training.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert training.step == training.saved_step == 3


def test_a_damaged_checkpoint_is_refused_in_one_line(text, point):
    (point / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"--resume .*step-00000003") as caught:
        load(alone(options_for(text)), point)
    assert "\n" not in str(caught.value)


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_names_an_older_whole_one(text, point):
    save_at(alone(options_for(text)), 5, point.parent)
    flip_last_bit(point.parent / "step-00000005" / "rank-00000.safetensors")
    with pytest.raises(InputError, match=r"the checksum of .* differs .*complete snapshot is .*step-00000003"):
        load(alone(options_for(text)), point.parent / "step-00000005")


def test_a_run_is_resumed_from_its_last_whole_checkpoint(text, point):
    save_at(alone(options_for(text)), 5, point.parent)
    flip_last_bit(point.parent / "step-00000005" / "rank-00000.safetensors")
    run = point.parent.parent
    for named in (run, point):
        with pytest.warns(UserWarning, match="passing over an incomplete snapshot"):
            assert resolve_paths(RunOptions(resume=named)) == RunPaths(run, point)


def test_a_run_of_a_newer_version_is_refused_in_one_line(text, point, monkeypatch):
    def refuse(*args, **options):
        raise NewerSnapshotError("it was written by a newer scale-core")

    monkeypatch.setattr(checkpoint, "latest_snapshot", refuse)
    for named in (point, point.parent.parent):
        with pytest.raises(InputError, match=r"--resume .*: it was written by a newer scale-core"):
            resolve_paths(RunOptions(resume=named))


def test_a_full_disk_names_the_checkpoint_that_stays(text, tmp_path, monkeypatch):
    training = alone(options_for(text))
    first = save(training, tmp_path)
    train_step(training)
    monkeypatch.setattr(scale_snapshot.snapshot, "at_stage", full_disk)
    told = r"cannot save step 1 in .*: the disk is full; the last complete .*step-00000000"
    with pytest.raises(InputError, match=told):
        save(training, tmp_path)
    assert training.checkpoint == first and training.saved_step == 0


def test_what_is_saved_in_the_background_is_the_same(text, tmp_path):
    for name, in_background in (("waited", False), ("background", True)):
        training = alone(options_for(text, async_save=in_background, save_every=2, evaluate_every=0))
        train(training, lambda state, name=name: save(state, tmp_path / name))
        assert training.checkpoint == tmp_path / name / "step-00000006" and training.saving is None
        assert sorted(path.name[-1] for path in (tmp_path / name).iterdir()) == ["2", "4", "6"]
    for step in (2, 4, 6):
        files = [(tmp_path / name / f"step-{step:08d}" / "rank-00000.safetensors") for name in ("waited", "background")]
        one, other = (safetensors.torch.load_file(file) for file in files)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_save_in_the_background_that_fails_ends_the_training(text, tmp_path, monkeypatch):
    training = alone(options_for(text, async_save=True, save_every=1, evaluate_every=0))
    train_step(training)
    save(training, tmp_path)
    training.finish_save()
    monkeypatch.setattr(scale_snapshot.snapshot, "at_stage", full_disk)
    told = r"cannot save step 2 in .*: the disk is full; the last complete .*step-00000001"
    with pytest.raises(InputError, match=told), checkpoint.refusing_lost_saves(training, tmp_path):
        train(training, lambda state: save(state, tmp_path))


def test_a_new_run_gets_a_new_folder_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = [resolve_paths(RunOptions()) for _ in range(2)]
    assert places == [RunPaths(Path("scale-runs/lm-1"), None), RunPaths(Path("scale-runs/lm-2"), None)]
    assert resolve_paths(RunOptions(out=Path("mine"))).folder.is_dir()


def test_a_run_never_writes_into_a_folder_that_holds_something(tmp_path, point):
    with pytest.raises(InputError, match="exists; name a new folder, or continue it with --resume"):
        resolve_paths(RunOptions(out=tmp_path))
    with pytest.raises(InputError, match="exists; name a new folder, or leave --out away"):
        resolve_paths(RunOptions(out=tmp_path, resume=tmp_path / "run"))


def test_resuming_goes_on_in_the_same_run(tmp_path, point):
    run = tmp_path / "run"
    assert resolve_paths(RunOptions(resume=run)) == RunPaths(run, point)
    assert resolve_paths(RunOptions(resume=point)) == RunPaths(run, point)
    assert resolve_paths(RunOptions(resume=run, out=run)) == RunPaths(run, point)


def test_resuming_into_another_folder_takes_the_curve_along(tmp_path, point):
    (tmp_path / "run" / METRICS).write_text('{"step": 1}\n')
    place = resolve_paths(RunOptions(resume=point, out=tmp_path / "copy"))
    assert place == RunPaths(tmp_path / "copy", point)
    assert (tmp_path / "copy" / METRICS).read_text() == '{"step": 1}\n'


def test_an_older_checkpoint_needs_a_folder_of_its_own(text, tmp_path, point):
    save_at(alone(options_for(text)), 5, point.parent)
    with pytest.raises(InputError, match="step-00000005 is newer and stays; name a new folder with --out"):
        resolve_paths(RunOptions(resume=point))
    assert resolve_paths(RunOptions(resume=point, out=tmp_path / "new")).resume_from == point


def test_what_cannot_be_resumed_is_said(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        resolve_paths(RunOptions(resume=tmp_path / "nowhere"))
    with pytest.raises(InputError, match="neither a run"):
        resolve_paths(RunOptions(resume=tmp_path))
    (tmp_path / CHECKPOINTS).mkdir()
    with pytest.raises(InputError, match="there is no complete checkpoint in it"):
        resolve_paths(RunOptions(resume=tmp_path))
    with pytest.raises(InputError, match="cannot be written"):
        (tmp_path / "file").write_text("")
        resolve_paths(RunOptions(out=tmp_path / "file" / "folder"))


@pytest.mark.fault(16)
def test_ranks_that_torchrun_restarts_go_on_in_their_folder(text, tmp_path, point, monkeypatch):
    new = tmp_path / "new"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    options = options_for(text, out=new, resume=point)
    ours = torchrun_run(options)
    for _ in range(2):  # The second time no checkpoint is in it yet.
        assert resolve_paths(options.run, ours) == RunPaths(new, point)
    newest = save_at(alone(options_for(text)), 5, new / CHECKPOINTS)
    assert resolve_paths(options.run, ours) == RunPaths(new, newest)
    other = torchrun_run(changed(options, steps=7))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-8")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # Ranks that have ended by this error are started again.
    for whose in ("", torchrun_run(options), other):
        with pytest.raises(InputError, match="exists; name a new folder"):
            resolve_paths(options.run, whose)


def test_a_restart_does_not_go_back_to_what_was_resumed(text, point, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # What torchrun says where it was given none.
    options = options_for(text, resume=point)
    assert resolve_paths(options.run, torchrun_run(options)) == RunPaths(point.parent.parent, point)
    newest = save_at(alone(options_for(text)), 5, point.parent)
    assert resolve_paths(options.run, torchrun_run(options)) == RunPaths(point.parent.parent, newest)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(InputError, match="is newer and stays"):
        resolve_paths(options.run, torchrun_run(options))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert torchrun_run(options) == ""
