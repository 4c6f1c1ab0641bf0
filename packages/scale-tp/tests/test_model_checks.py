"""model_checks.py: what of a model's own inputs and config is looked at, without transformers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_tp.attention.model_checks import ModelCheck

IDS = torch.zeros(1, 4, dtype=torch.int64)
PART = {"position_ids": IDS, "labels": IDS, "shift_labels": IDS, "num_items_in_batch": 2}


class Model(nn.Module):
    """Has what is asked of a model of transformers."""

    config_class = SimpleNamespace

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)

    def get_input_embeddings(self) -> nn.Module:
        return self

    def loss_function(self, labels: Tensor, shift_labels: Tensor | None = None, num_items_in_batch: Any = None) -> None:
        pass

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Any = None, **kwargs: Any) -> None:
        if labels is not None:
            self.loss_function(labels, **kwargs)


class OwnLoss(Model):
    """Accepts the count of tokens, and does nothing with it."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Any = None, **kwargs: Any) -> None:
        pass


class Windowed(Model):
    """A loss that only counts."""

    def loss_function(self, labels: Tensor, num_items_in_batch: Any = None) -> None:  # type: ignore[override]
        pass


class Unnumbered(Model):
    """Accepts positions, as BART does, and does nothing with them."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        pass


class Around(Unnumbered):
    """Hands all on to a model that takes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()


class Plain(nn.Module):
    """No model of transformers, such as a wrapper around one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _check(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    ModelCheck(num_ranks=2)(model, args, kwargs, None)


def test_what_is_no_model_or_has_all_that_it_needs_passes() -> None:
    _check(nn.Linear(2, 2), IDS)
    _check(Model(), IDS, **PART)
    _check(Plain(Unnumbered()), IDS)
    _check(Around(), IDS)
    _check(type("ShardedModel", (Model,), {})(), IDS, **PART)  # as fully_shard makes one
    _check(Model(), IDS, None, IDS)  # by position, without labels
    _check(Windowed(), IDS, IDS, IDS, num_items_in_batch=2)  # labels that are not shifted
    _check(Model(output_router_logits=True), IDS, None, IDS)  # without a loss
    _check(Model(output_router_logits=True), IDS, **PART, output_router_logits=False)
    _check(Model(sliding_window=8), IDS, **PART)  # as long as the full sequence
    _check(Model(sliding_window=8, layer_types=["full_attention", "sliding_attention"]), IDS, **PART)
    _check(Model(sliding_window=4, layer_types=["full_attention"]), IDS, **PART)


@pytest.mark.parametrize(
    ("model", "without", "message"),
    [
        (Model(), "position_ids", "Model was called inside of context_parallel without position_ids="),
        (type("ShardedModel", (Model,), {})(), "position_ids", "ShardedModel was called inside of context_parallel w"),
        (Unnumbered(), "", "Unnumbered was called inside of context_parallel, and its forward takes no position_ids"),
        (Model(), "shift_labels", "with labels but without shift_labels, so its loss is not the loss"),
        (Model(), "num_items_in_batch", "with labels but without num_items_in_batch"),
        (OwnLoss(), "", "OwnLoss was called inside of context_parallel with labels, and its loss takes no num_items"),
        (Windowed(), "", "its loss takes no shift_labels"),
        (Model(output_router_logits=True), "", "with labels and output_router_logits=True, which adds a loss"),
        (Model(sliding_window=7), "", "layers of sliding_attention (sliding_window=7)"),
        (Model(layer_types=["full_attention", "linear_attention"]), "", "has layers of linear_attention"),
        (Model(sliding_window=9, layer_types=["chunked_attention"]), "", "has layers of chunked_attention"),
    ],
)
def test_what_would_be_silent_is_refused(model: nn.Module, without: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _check(model, IDS, **{name: value for name, value in PART.items() if name != without})


def test_a_router_loss_that_a_call_asks_for_is_refused() -> None:
    with pytest.raises(ValueError, match="with labels and output_router_logits=True"):
        _check(Model(), IDS, **PART, output_router_logits=True)


def test_a_loss_that_would_ignore_other_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="its loss takes no ignore_index, so it is not the loss of the full sequence"):
        _check(Model(), IDS, **PART, ignore_index=0)
