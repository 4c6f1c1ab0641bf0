"""What is read of a text, how it is split, and which windows of it a step draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scale_train.data.text import SEPARATOR, Sampler, check_length, read_text, slice_of_rank, windows_at
from scale_train.errors import InputError


def folder_with(root: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def test_the_default_text_is_the_standard_library():
    text = read_text()
    assert text.num_documents > 100 and len(text.train) > 1_000_000
    assert "standard library" in text.describe() and "held out" in text.describe()


def test_one_file_is_split_near_its_end(tmp_path):
    content = bytes(range(1, 101))
    text = read_text([folder_with(tmp_path, a=content) / "a"])
    assert bytes(text.train.tolist() + text.held_out.tolist()) == SEPARATOR + content
    assert len(text.held_out) == 5


def test_of_many_files_every_twentieth_is_held_out_whole(tmp_path):
    folder_with(tmp_path, **{f"f{number:02}": f"<{number}>".encode() for number in range(40)})
    text = read_text([tmp_path])
    assert bytes(text.held_out.tolist()) == b"\0<19>\0<39>"
    assert b"<19>" not in bytes(text.train.tolist())


def test_folders_are_read_sorted_without_hidden_and_test_files(tmp_path):
    folder_with(
        tmp_path, b=b"B", a__z=b"AZ", a__tests__t=b"no", DOTgit__x=b"no", DOThidden=b"no", binary=b"\x7fELF\0no"
    )
    assert bytes(read_text([tmp_path]).train.tolist()) == b"\0B\0AZ"


def test_a_file_that_is_named_is_read_whatever_it_holds(tmp_path):
    folder_with(tmp_path, binary=b"\x7f\0" * 3)
    assert bytes(read_text([tmp_path / "binary"]).train.tolist()) == SEPARATOR + b"\x7f\0" * 3


def test_a_link_to_a_file_in_the_same_folder_is_not_read_twice(tmp_path):
    folder_with(tmp_path, a=b"once")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert bytes(read_text([tmp_path]).train.tolist()) == b"\0once"


def test_paths_that_overlap_are_read_once(tmp_path):
    folder_with(tmp_path, **{f"f{number:02}": f"<{number}>".encode() for number in range(20)})
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    once = read_text([tmp_path])
    for paths in ([tmp_path, tmp_path / "f03"], [tmp_path, link], [tmp_path / "f00", tmp_path / "f00", tmp_path]):
        again = read_text(paths)
        assert again.num_documents == 20 and again.fingerprint() == once.fingerprint()
    assert "(every 20th document, 1 document)" in once.describe()


def test_the_fingerprint_is_of_the_text_and_not_of_its_path(tmp_path):
    one = read_text([folder_with(tmp_path / "one", a=b"text")])
    two = read_text([folder_with(tmp_path / "two", b=b"text")])
    other = read_text([folder_with(tmp_path / "three", a=b"Text")])
    assert one.fingerprint() == two.fingerprint() != other.fingerprint()


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such file or folder"):
        read_text([tmp_path / "nowhere"])


def test_a_path_that_is_too_long_is_named():
    with pytest.raises(InputError, match=r"--text x+: cannot be read \(File name too long\)"):
        read_text([Path("x" * 300)])


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.write_bytes(b"")])
def test_an_empty_text_is_named(tmp_path, make):
    make(tmp_path / "void")
    with pytest.raises(InputError, match="void: expected text, but found 0 bytes"):
        read_text([tmp_path / "void"])


def test_too_few_tokens_for_the_sequence_says_both_numbers(tmp_path):
    text = read_text([folder_with(tmp_path, a=b"x" * 199) / "a"])
    check_length(text, 9)
    with pytest.raises(InputError, match="too few tokens for --sequence 10: the held-out part has 10 tokens, and 11"):
        check_length(text, 10)
    with pytest.raises(InputError, match="the training part has 190 tokens, and 191 are needed"):
        check_length(text, 190)


def test_each_epoch_draws_every_window_once_in_another_order():
    sampler = Sampler(num_bytes=101, sequence=10, seed=0)
    first, second = sampler.starts(sampler.windows), sampler.starts(sampler.windows)
    for epoch in (first, second):
        gaps = epoch.sort().values.diff()
        assert torch.equal(gaps, torch.full_like(gaps, 10))
        assert epoch.min() >= 0 and epoch.max() + 10 + 1 <= 101
    assert not torch.equal(first, second)


def test_steps_of_any_size_draw_the_same_sequence():
    whole = Sampler(500, 7, seed=3).starts(60)
    by_steps = Sampler(500, 7, seed=3)
    assert torch.equal(whole, torch.cat([by_steps.starts(n) for n in (1, 20, 39)]))


def test_a_sampler_goes_on_where_its_state_was_taken():
    sampler = Sampler(500, 7, seed=3)
    sampler.starts(45)
    resumed = Sampler(500, 7, seed=3)
    resumed.load_state(sampler.state())
    assert torch.equal(sampler.starts(100), resumed.starts(100))


@pytest.mark.parametrize(("num_bytes", "sequence", "seed"), [(501, 7, 3), (500, 8, 3), (500, 7, 4)])
def test_the_position_in_another_order_is_refused(num_bytes, sequence, seed):
    with pytest.raises(InputError, match="resume with the same --text, --sequence and --seed"):
        Sampler(num_bytes, sequence, seed).load_state(Sampler(500, 7, 3).state())


def test_the_shortest_text_has_one_window():
    sampler = Sampler(num_bytes=11, sequence=10, seed=0)
    assert sampler.windows == 1
    assert sampler.starts(3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("num_ranks", "accumulate"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 3), (3, 2)])
def test_micro_batches_of_all_ranks_are_the_global_batch(num_ranks, accumulate):
    starts = torch.arange(24)
    parts = [slice_of_rank(starts, rank, num_ranks, accumulate) for rank in range(num_ranks)]
    assert [[len(piece) for piece in part] for part in parts] == [[24 // num_ranks // accumulate] * accumulate] * (
        num_ranks
    )
    assert torch.equal(torch.cat([torch.cat(together) for together in zip(*parts, strict=True)]), starts)


def test_the_last_micro_batch_of_a_pipeline_may_be_smaller():
    of_both = [slice_of_rank(torch.arange(10), rank, 2, 3) for rank in range(2)]
    assert [[piece.tolist() for piece in part] for part in of_both] == [
        [[0, 1], [4, 5], [8]],
        [[2, 3], [6, 7], [9]],
    ]
    assert [len(slice_of_rank(torch.arange(2), 0, 1, 8)), len(slice_of_rank(torch.arange(2), 1, 2, 8))] == [2, 1]


def test_the_targets_are_the_tokens_one_byte_later():
    tokens, targets = windows_at(torch.arange(20, dtype=torch.uint8), torch.tensor([0, 7]), 4)
    assert tokens.tolist() == [[0, 1, 2, 3], [7, 8, 9, 10]]
    assert targets.tolist() == [[1, 2, 3, 4], [8, 9, 10, 11]]
