import errno
import json
import os

import pytest

from scale_train.training.reports.plot import draw, plot_loss

PNG = b"\x89PNG\r\n\x1a\n"


def test_the_plot_is_a_png_of_training_and_held_out_loss(tmp_path):
    entries = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}, {"step": 2, "held_out_bits_per_byte": 6.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


def test_a_disk_that_is_full_leaves_the_picture_that_was_there(tmp_path, monkeypatch):
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "loss.png").write_bytes(b"before")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        plot_loss(tmp_path / "nothing", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["loss.png"]


def test_a_training_without_a_single_record_still_has_a_picture(tmp_path):
    plot_loss(tmp_path / "nothing", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


def test_the_gain_has_an_axis_of_its_own():
    entries = [{"step": step, "loss": 5.0 - step, "gain": 1.0 + step} for step in range(3)]
    _, gain = draw(entries).axes
    assert gain.get_ylabel() == "gain" and gain.lines[0].get_ydata().tolist() == [1.0, 2.0, 3.0]
    (loss,) = draw([{**entry, "gain": None} for entry in entries]).axes
    assert loss.get_ylabel() == "bits per byte"


def test_the_noise_scale_stands_below_with_its_interval():
    noise: list[dict[str, object]] = [
        {"noise_scale": None, "noise_scale_low": None, "noise_scale_high": None, "suggested_batch": None},
        {"noise_scale": 90.0, "noise_scale_low": 20.0, "noise_scale_high": None, "suggested_batch": None},
        {"noise_scale": 80.0, "noise_scale_low": 50.0, "noise_scale_high": 110.0, "suggested_batch": 64},
        {"noise_scale": 85.0, "noise_scale_low": 60.0, "noise_scale_high": 100.0, "suggested_batch": 128},
    ]
    figure = draw([{"step": step, "loss": 5.0, "gain": 2.0, **entry} for step, entry in enumerate(noise)])
    below = next(axes for axes in figure.axes if axes.get_ylabel() == "sequences")
    lines = {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in below.lines}
    assert lines["noise scale, the critical batch"] == ([1, 2, 3], [90.0, 80.0, 85.0])
    assert lines["suggested batch"] == ([2, 3], [64, 128])
    (band,) = below.collections
    corners = band.get_paths()[0].vertices
    assert (corners[:, 0].min(), corners[:, 0].max()) == (2, 3)
    assert (corners[:, 1].min(), corners[:, 1].max()) == (50.0, 110.0)
    assert below.get_xlabel() == "step"
