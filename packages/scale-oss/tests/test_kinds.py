"""kinds.py: what is known of torch.optim's classes."""

from __future__ import annotations

import pytest
import torch
from torch.optim import Optimizer

from scale_oss.kinds import check_kind, works_by_element


class Mine(torch.optim.Adam):
    """May compute anything."""


def test_every_class_of_torch_is_cut_taken_whole_or_refused_by_name() -> None:
    whole = {"Adafactor", "Muon"}
    for name, kind in vars(torch.optim).items():
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
            continue
        if name in ("LBFGS", "SparseAdam"):
            with pytest.raises(ValueError, match=f"OSS can't shard {name}: it "):
                works_by_element(kind)
        else:
            assert works_by_element(kind) == (name not in whole), name


def test_what_looks_at_all_tensors_is_refused_until_one_rank_updates_all() -> None:
    known = type("Prodigy", (torch.optim.Adam,), {})
    derived = type("Mine", (known,), {})
    for each in (known, derived):
        for elementwise in (None, False, True):
            with pytest.raises(ValueError, match=r"from all tensors together.*OSS\(\.\.\., \w+, together=True\)"):
                check_kind(each, elementwise=elementwise, together=False)
        check_kind(each, elementwise=None, together=True)
    with pytest.raises(ValueError, match="pass elementwise=True or together=True"):
        check_kind(torch.optim.Adam, elementwise=True, together=True)
    check_kind(torch.optim.Adam, elementwise=None, together=True)


def test_of_any_other_class_nothing_is_assumed() -> None:
    assert not works_by_element(Mine)


def test_what_is_no_class_of_optimizers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected optim to be a class of optimizers, such as torch.optim.AdamW"):
        works_by_element(torch.nn.Linear)  # type: ignore[arg-type]  # what a user may write
