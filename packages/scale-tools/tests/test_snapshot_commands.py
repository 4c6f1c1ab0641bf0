import json
from pathlib import Path

import pytest
import torch

from scale_snapshot import load_snapshot, save_snapshot
from scale_train.cli import main


def state(value: float) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.full((4, 4), float(value)),
        "model.b": torch.arange(5),
        "optim.a.exp_avg": torch.zeros(4, 4),
    }


@pytest.fixture
def run(tmp_path) -> Path:
    for step in (1, 2, 3):
        save_snapshot(tmp_path / "run" / "checkpoints", step, {**state(step), "note": step}, extra={"step": step})
    return tmp_path / "run"


def flip_a_bit(snapshot: Path) -> None:
    (path,) = snapshot.glob("rank-*.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def run_json(capsys, *arguments: object, code: int = 0) -> dict:
    assert main(["snapshot", *map(str, arguments), "--json"]) == code
    found: dict = json.loads(capsys.readouterr().out)
    return found


def the_only_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, (out, err)
    return str(err)


def test_ls_shows_steps_sizes_ranks_and_states(run, capsys):
    folder = run / "checkpoints"
    (folder / "step-00000001" / "manifest.json").unlink()
    (folder / "step-00000009.tmp-host-1-ab").mkdir()
    rows = run_json(capsys, "ls", run)["snapshots"]
    assert [(row["step"], row["state"]) for row in rows] == [
        (1, "damaged"),
        (2, "complete"),
        (3, "complete"),
        (9, "unfinished"),
    ]
    assert rows[1]["num_ranks"] == 1 and rows[1]["num_tensors"] == 3 and rows[1]["num_bytes"] > 168
    assert main(["snapshot", "ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[2].endswith("complete") and "has no manifest.json" in lines[1]


def test_a_newer_snapshot_is_not_called_damaged(run, capsys):
    from scale_snapshot.format.checksums import checksum

    path = run / "checkpoints" / "step-00000003" / "manifest.json"
    _, _, rest = path.read_bytes().partition(b"\n")
    line = '{"format": "scale-snapshot", "version": 99, "checksum": "%s",\n'
    path.write_bytes((line % checksum((line % "").encode(), rest)).encode() + rest)
    assert [row["state"] for row in run_json(capsys, "ls", run)["snapshots"]] == ["complete", "complete", "newer"]
    assert run_json(capsys, "verify", run, code=2)["snapshots"][2]["state"] == "newer"


def test_verify_reads_every_byte_and_names_what_is_damaged(run, capsys):
    assert main(["snapshot", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("verified") == 3
    flip_a_bit(run / "checkpoints" / "step-00000002")
    found = run_json(capsys, "verify", run, code=1)["snapshots"]
    assert [row["state"] for row in found] == ["complete", "damaged", "complete"]
    assert "step-00000002 is damaged: the checksum of rank-00000.safetensors differs" in found[1]["reason"]


def test_diff_finds_keys_shapes_dtypes_and_values(tmp_path, capsys):
    save_snapshot(tmp_path / "a", 1, {**state(1), "n": 1})
    other = {**state(1), "model.c": torch.ones(2), "model.b": torch.arange(5).int(), "n": 2}
    other["model.a"][0, 0] += 0.5
    del other["optim.a.exp_avg"]
    save_snapshot(tmp_path / "b", 1, other)
    found = {
        each["key"]: each for each in run_json(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)["differences"]
    }
    whats = {key: each["what"] for key, each in found.items()}
    assert whats == {
        "model.a": "values",
        "model.b": "dtype",
        "model.c": "only in B",
        "optim.a.exp_avg": "only in A",
        "n": "value",
    }
    assert (found["model.a"]["max_abs_diff"], found["model.a"]["num_different"]) == (0.5, 1)
    folders, skipped = f"{tmp_path}/a {tmp_path}/b", "model.b model.c optim n"
    assert main(["snapshot", *f"diff {folders} --skip {skipped} --atol 0.5".split()]) == 0
    assert "1 tensors, all equal" in capsys.readouterr().out


def test_diff_compares_formats_and_damage_is_code_1(tmp_path, run, capsys):
    torch.save({"a": state(3)["model.a"], "b": state(3)["model.b"]}, tmp_path / "w.pt")
    assert main(["snapshot", "diff", str(tmp_path / "w.pt"), str(run), "--skip", "optim", "note"]) == 0
    flip_a_bit(run / "checkpoints" / "step-00000003")
    capsys.readouterr()
    assert main(["snapshot", "diff", str(tmp_path / "w.pt"), str(run)]) == 1
    assert "step-00000003 is damaged: the checksum" in capsys.readouterr().err


def test_consolidate_writes_weights_by_their_plain_names(run, tmp_path, capsys):
    from safetensors.torch import load_file

    assert main(["snapshot", "consolidate", str(run), str(tmp_path / "w.safetensors")]) == 0
    assert sorted(load_file(tmp_path / "w.safetensors")) == ["a", "b"]
    assert "2 tensors, 104 B, step 3" in capsys.readouterr().out
    assert main(["snapshot", "consolidate", str(run), str(tmp_path / "hf"), "--max-file-size", "64B"]) == 0
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()


def test_convert_goes_there_and_back_and_the_run_goes_on(run, tmp_path, capsys):
    assert main(["snapshot", "convert", str(run), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    report = run_json(capsys_after(capsys), "convert", tmp_path / "dcp", tmp_path / "back")
    assert report["path"].endswith("back/step-00000003") and report["num_tensors"] == 3
    target = {**state(0), "note": 0}
    assert load_snapshot(tmp_path / "back", target).extra == {"step": 3}
    assert torch.equal(target["model.a"], state(3)["model.a"])


def capsys_after(capsys):
    capsys.readouterr()
    return capsys


def test_convert_maps_and_skips_names(tmp_path, capsys):
    torch.save(
        {"model": {"module.a": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": []}}, tmp_path / "w.pt"
    )
    arguments = ["--map", "module.=", "--skip", "optimizer", "--step", "5"]
    assert main(["snapshot", "convert", str(tmp_path / "w.pt"), str(tmp_path / "out"), *arguments]) == 0
    target = {"model.a": torch.zeros(2)}
    assert load_snapshot(tmp_path / "out", target).step == 5 and target["model.a"].sum() == 2


def test_prune_keeps_the_newest_and_leaves_what_is_not_whole(run, capsys):
    folder = run / "checkpoints"
    (folder / "step-00000003" / "manifest.json").unlink()
    found = run_json(capsys, "prune", run, "--keep", 1, "--dry-run")
    assert [row["step"] for row in found["removed"]] == [1] and len(list(folder.iterdir())) == 3
    assert main(["snapshot", "prune", str(run), "--keep", "1"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
    assert "left alone: step-00000003, damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("ls nowhere", "nowhere: no such file or folder"),
        ("ls weights.pt", "weights.pt is a file of torch.save, and no snapshot of scale. Convert it"),
        ("verify empty", "empty: there are no snapshots in it"),
        ("prune empty --keep 0", "--keep 0: at least 1 stays"),
        ("prune runs/step-00000001 --keep 1", "this is one snapshot; give the folder"),
        ("convert nowhere out", "nowhere: no such file or folder"),
        ("convert weights.pt out --map a", "--map a: write OLD=NEW"),
        ("convert weights.pt out --step -1", "--step -1: a number of at least 0"),
        ("convert weights.pt out --model-only", "model_only is for safetensors and DCP"),
        ("convert weights.pt empty --to dcp", "empty exists already"),
        ("convert runs runs", "is saved already"),
        ("convert text out", "not a checkpoint of a format that is known here"),
        ("consolidate weights.pt out", "weights.pt is a file of torch.save"),
        ("consolidate runs out --max-file-size 5", "--max-file-size 5: a size is needed, as 5GB"),
        ("diff runs weights.pt --atol nan", "--atol nan: a number of at least 0"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text").write_text("hello")
    torch.save({"a": torch.ones(1)}, "weights.pt")
    save_snapshot("runs", 1, {"model.a": torch.ones(1)})
    assert main(["snapshot", *arguments.split()]) == 2
    assert words in the_only_line(capsys)
    assert not Path("out").exists()


def test_help_loads_no_torch():
    import subprocess
    import sys

    program = "import sys; from scale_train.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    for arguments in (["--help"], ["snapshot", "--help"], ["snapshot", "convert", "--help"], ["lm", "--help"]):
        ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0 and "usage: scale-train" in ended.stdout, ended.stderr
