import errno
import json
import os

import pytest

from scale_train.plot import plot_loss

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
