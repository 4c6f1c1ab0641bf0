"""traits.py: what is known of torch.optim's classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from scale_core.optim.traits import KINDS, check_kind, is_elementwise
from scale_oss import OSS


def test_every_class_of_torch_is_known_or_refused() -> None:
    whole = {"Adafactor", "Muon"}
    for name, kind in vars(torch.optim).items():
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
            continue
        if name in ("LBFGS", "SparseAdam"):
            with pytest.raises(ValueError, match=f"OSS can't shard {name}: it "):
                is_elementwise(kind)
        else:
            assert is_elementwise(kind) == (name not in whole), name


def test_a_joint_optimizer_needs_together() -> None:
    known = type("Prodigy", (torch.optim.Adam,), {})
    derived = type("Mine", (known,), {})
    for each in (known, derived):
        for elementwise in (None, False, True):
            with pytest.raises(ValueError, match=r"from all tensors together.*OSS\(\.\.\., \w+, .*together=True\)"):
                check_kind(each, elementwise=elementwise, together=False)
        check_kind(each, elementwise=None, together=True)
    with pytest.raises(ValueError, match=r"pass OSSOptions\(elementwise=True\) or OSSOptions\(together=True\)"):
        check_kind(torch.optim.Adam, elementwise=True, together=True)
    check_kind(torch.optim.Adam, elementwise=None, together=True)


def test_what_measures_gradients_goes_around_oss_and_not_into_it() -> None:
    listening = type("AdaScaleWrapper", (torch.optim.SGD,), {"listens_to_gradients": True})
    with pytest.raises(ValueError, match=r"OSS can't shard AdaScaleWrapper: .*put AdaScale around, AdaScale\(OSS\("):
        is_elementwise(listening)


def test_of_any_other_class_nothing_is_assumed() -> None:
    class Mine(torch.optim.Adam):
        """May compute anything."""

    assert not is_elementwise(Mine)


def test_what_is_no_class_of_optimizers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected optim to be a class of optimizers, such as torch.optim.AdamW"):
        is_elementwise(torch.nn.Linear)  # type: ignore[arg-type]  # what a user may write


def test_the_defaults_of_a_built_optimizer_are_arguments() -> None:
    for cls in KINDS:
        if KINDS[cls].scope == "all" or KINDS[cls].sparse:
            continue
        built = cls([nn.Parameter(torch.ones(2, 2))], lr=0.25)
        ours = OSS(built.param_groups, cls, **built.defaults)
        plain = [{key: value for key, value in group.items() if key != "params"} for group in built.param_groups]
        assert [{key: value for key, value in group.items() if key != "params"} for group in ours.param_groups] == plain
    with pytest.raises(TypeError, match="unexpected keyword argument 'betta'"):
        OSS([nn.Parameter(torch.ones(2, 2))], torch.optim.Adam, betta=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'decoupled_weight_decay'"):
        OSS([nn.Parameter(torch.ones(2, 2))], torch.optim.AdamW, decoupled_weight_decay=False)
