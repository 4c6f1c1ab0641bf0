from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, AdamW

from scale_adascale import AdaScale, AdaScaleOptions, AdaScaleWrapper, fit_speed, until_steps


def test_a_wrong_argument_is_told_by_name_before_the_optimizer_is_touched() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    before = set(vars(optimizer))
    scaled = AdaScale(SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    wrong: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (AdaScale, (optimizer,), {"is_scaled_loss": "false"}, "; write is_scaled_loss=False"),
        (AdaScale, (optimizer,), {"debias_ewma": None}, "AdaScale: expected debias_ewma to be a bool, got None"),
        (AdaScaleOptions, (), {"grad_scaler": 1.0}, "AdaScaleOptions: expected grad_scaler to be a GradScaler or None"),
        (AdaScale, (optimizer,), {"power": 1.0}, r"write options=AdaScaleOptions\(power=...\)"),
        (
            AdaScaleWrapper,
            (model.parameters(),),
            {"optim_cls": optimizer},
            "expected optim_cls to be a class, got SGD; write SGD for",
        ),
        (until_steps, ("text", scaled, 1), {}, "until_steps: expected batches to be a collection"),
        (fit_speed, ([0.1],), {}, "fit_speed: expected seconds to be a mapping, got list of float"),
    ]
    for call, args, kwargs, text in wrong:
        with pytest.raises(TypeError, match=text):
            call(*args, **kwargs)
    assert vars(optimizer).keys() == before and not any(param._backward_hooks for param in model.parameters())
    assert AdaScale(AdamW(model.parameters()), options=AdaScaleOptions(preconditioned=0)).gain() >= 1  # type: ignore[arg-type]
