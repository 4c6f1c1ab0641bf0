"""batch.py: what is cut of a batch, and what can't be."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import scale_tp
from scale_core.comm.group import Group, group_of

FIRST = Group(0, 2, None, "fake", (0, 1))
IDS = torch.arange(16).view(2, 8)
ONES = torch.ones(2, 8, dtype=torch.int64)


def test_each_tensor_is_cut_alike_and_positions_are_added() -> None:
    pixels, weights = torch.zeros(3, 4), {"a": 1}
    part = scale_tp.get_batch_on_this_cp_rank({"input_ids": IDS, "token_type_ids": IDS + 1, "options": weights}, FIRST)
    assert part["input_ids"].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert torch.equal(part["token_type_ids"], part["input_ids"] + 1)
    assert part["position_ids"].tolist() == [[0, 1, 6, 7]] * 2
    assert part["attention_mask"].tolist() == [[1] * 4] * 2
    assert part["options"] is weights and "num_items_in_batch" not in part
    embedded = scale_tp.get_batch_on_this_cp_rank({"inputs_embeds": torch.zeros(2, 8, 3)}, FIRST, is_causal=False)
    assert embedded["inputs_embeds"].shape == (2, 4, 3) and "attention_mask" not in embedded
    with pytest.raises(ValueError, match=r"expected batch\['pixels'\] to be \[batch, 8, ...\].*got \[3, 4\]"):
        scale_tp.get_batch_on_this_cp_rank({"input_ids": IDS, "pixels": pixels}, FIRST)


def _shifted() -> tuple[Tensor, Tensor, float]:
    labels = IDS.clone()
    labels[0, :5] = -100
    mask = ONES.clone()
    mask[1, 6:] = 0
    labels[1, 6:] = -100
    part = scale_tp.get_batch_on_this_cp_rank({"input_ids": IDS, "labels": labels, "attention_mask": mask}, group_of())
    assert torch.equal(part["labels"], part["shift_labels"]) and bool(part["attention_mask"].all())
    given = {"input_ids": IDS, "labels": labels, "num_items_in_batch": torch.tensor(7.0)}
    assert scale_tp.get_batch_on_this_cp_rank(given, group_of())["num_items_in_batch"] == 7
    return part["input_ids"], part["labels"], part["num_items_in_batch"].item()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": IDS}, "expected input_ids or inputs_embeds in the batch, got labels"),
        ({"input_ids": IDS[:, :7]}, "got 7: pad it on the right by 1, such as F.pad(input_ids, (0, 1))"),
        ({"input_ids": IDS[:, :2]}, "2 positions or more each, got 2: pad it on the right by 2"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 8, 8)},
            "batch['attention_mask'] to be [batch, length]",
        ),
        (
            {"input_ids": IDS, "labels": IDS, "attention_mask": ONES * (IDS % 8 < 6)},
            "batch['labels'][batch['attention_mask'] == 0] = -100",
        ),
        ({"input_ids": IDS, "ignore_index": 0}, "expected ignore_index=-100 in the batch, as the labels are counted"),
        ({"input_ids": IDS, "position_ids": IDS % 4}, "several sequences in a row would attend to one another"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        scale_tp.get_batch_on_this_cp_rank(batch, FIRST)


def test_padding_that_other_positions_would_attend_to_is_masked() -> None:
    mask = ONES.clone()
    mask[0, 6:] = 0
    part = scale_tp.get_batch_on_this_cp_rank({"input_ids": IDS, "attention_mask": mask}, FIRST, is_causal=False)
    assert part["attention_mask"].tolist() == [[[[True, True, False, False]]], [[[True] * 4]]]
    positions = (mask.flip(1).cumsum(1) - 1).clamp(min=0)
    batch = {"input_ids": IDS, "attention_mask": mask.flip(1), "position_ids": positions}
    part = scale_tp.get_batch_on_this_cp_rank(batch, FIRST)
    assert part["attention_mask"].shape == (2, 1, 4, 4) and part["position_ids"][0].tolist() == [0, 0, 4, 5]
    seen = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert part["attention_mask"][0, 0].int().tolist() == seen


@pytest.mark.ranks(2)
def test_ranks_to_count_over_have_to_be_passed() -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "context"))
    batch = {"input_ids": IDS, "labels": IDS}
    with pytest.raises(ValueError, match=r"process_group= has 1 of 2 ranks: pass loss_process_group= as well"):
        scale_tp.get_batch_on_this_cp_rank(batch, mesh["context"])
    assert (
        scale_tp.get_batch_on_this_cp_rank(batch, mesh["context"], loss_process_group=group_of())["num_items_in_batch"]
        == 14
    )


@pytest.mark.ranks(2)
def test_labels_are_shifted_before_the_cut_and_counted_over_all() -> None:
    _, labels, number = _shifted()
    by_rank = [[[-100, -100, 7, -100], [9, 10, -100, -100]], [[-100, -100, 5, 6], [11, 12, 13, -100]]]
    assert labels.tolist() == by_rank[group_of().rank]
    assert number == 8 / 2  # 3 and 5 tokens that count
