"""Settings of transformers models that compute something else for a part of a sequence than it needs.

These would be silent: positions that each rank counts from 0, a window that a part is too short to show, and a loss
that shifts labels within the part, is the mean of this rank's alone, or is of how its tokens are routed. Nothing of
transformers is imported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks


@functools.lru_cache(maxsize=1024)
def _signature_of_model(kind: type[nn.Module]) -> inspect.Signature | None:
    """The arguments of a model's forward; None of a module that is none of transformers' models."""
    # Attributes of a PreTrainedModel that the modules inside of it do not have.
    is_model = hasattr(kind, "get_input_embeddings") and hasattr(kind, "config_class")
    return inspect.signature(kind.forward) if is_model else None


def _check_inner_models(module: nn.Module) -> None:
    """Lets a model without `position_ids` pass where one inside of it takes them, which is checked by itself."""
    kinds: set[Any] = {type(inner) for inner in module.modules()}
    signatures = map(_signature_of_model, kinds)
    if not any(signature is not None and "position_ids" in signature.parameters for signature in signatures):
        raise ValueError(
            f"{type(module).__name__} was called inside of context_parallel, and its forward takes no position_ids, so "
            "each rank numbers its part of the sequence from 0: take a model whose forward does, such as Llama or "
            "GPT-2, or train without context_parallel. In a model of your own that needs no positions, write "
            "def forward(..., position_ids=None)"
        )


@contextmanager
def checked_models(num_ranks: int) -> Iterator[None]:
    """Checks each model that is called inside."""
    handle = module_hooks.register_module_forward_hook(ModelCheck(num_ranks), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        # torch 2.13's handle leaves this entry behind, and torch.compile would warn of a hook for ever.
        module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)


class ModelCheck:
    """A forward hook of all modules: a `ValueError` after the forward of a model that would compute something else."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        kind: Any = type(module)
        signature = _signature_of_model(kind)
        if signature is None:
            return
        bound = signature.bind(module, *args, **kwargs).arguments
        bound |= kwargs
        if "position_ids" not in signature.parameters:
            _check_inner_models(module)
        elif bound.get("position_ids") is None:
            raise ValueError(
                f"{kind.__name__} was called inside of context_parallel without position_ids=, so each rank numbers "
                "its part of the sequence from 0: call model(**scale_tp.get_batch_on_this_cp_rank(batch)), or pass "
                "position_ids=scale_tp.position_ids(length)[None]"
            )
        self._check_loss(module, bound)
        self._check_windows(module, bound)

    def _check_loss(self, module: nn.Module, given: dict[str, Any]) -> None:
        if given.get("labels") is None:
            return
        name = f"{type(module).__name__} was called inside of context_parallel with labels"
        adds_router_loss = given.get("output_router_logits")
        if adds_router_loss is None:
            adds_router_loss = getattr(module.config, "output_router_logits", False)
        if adds_router_loss:
            raise ValueError(
                f"{name} and output_router_logits=True, which adds a loss of how the router divides this rank's tokens "
                "alone, whose mean over the ranks is not the loss of the full sequence: set "
                "model.config.output_router_logits = False, or train without context_parallel"
            )
        # A model with a loss of its own, as BERT's, accepts these arguments and does nothing with them.
        uses_loss_function = "loss_function" in inspect.unwrap(type(module).forward).__code__.co_names
        loss = getattr(module, "loss_function", None) if uses_loss_function else None
        takes = inspect.signature(loss).parameters if callable(loss) else {}
        needed = {"num_items_in_batch"}
        if "ignore_index" in given:
            needed.add("ignore_index")
        if "shift_labels" in takes or "shift_labels" in given:
            needed.add("shift_labels")
        if needed - takes.keys():
            raise ValueError(
                f"{name}, and its loss takes no {' and no '.join(sorted(needed - takes.keys()))}, so it is not "
                "the loss of the full sequence: take labels out of the batch, and compute the loss from logits and "
                "targets = scale_tp.split_sequence(labels): F.cross_entropy(logits.flatten(0, 1), targets.flatten(), "
                'reduction="sum") / scale_tp.num_tokens_per_rank(targets)'
            )
        missing = sorted(name for name in needed if given.get(name) is None)
        if missing:
            raise ValueError(
                f"{name} but without {' and '.join(missing)}, so its loss is not the loss of the full sequence: call "
                "model(**scale_tp.get_batch_on_this_cp_rank(batch))"
            )

    def _check_windows(self, module: nn.Module, given: dict[str, Any]) -> None:
        config: Any = module.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        window = getattr(config, "sliding_window", None)
        layer_types = getattr(config, "layer_types", None)
        if layer_types is None:
            layer_types = ["full_attention" if window is None else "sliding_attention"]
        inputs = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
        length = inputs.shape[1] * self.num_ranks if isinstance(inputs, Tensor) and inputs.dim() > 1 else None
        fits = window is not None and length is not None and length <= window
        partial = sorted(
            {kind for kind in layer_types if kind != "full_attention" and not (kind == "sliding_attention" and fits)}
        )
        if partial:
            raise ValueError(
                f"{type(module).__name__} was called inside of context_parallel, and has layers of "
                f"{', '.join(partial)} (sliding_window={window}), which are not divided: "
                "each position attends to the full sequence. Take a model of full attention alone, or train without "
                "context_parallel"
            )
