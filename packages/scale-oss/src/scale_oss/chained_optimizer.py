"""Two optimizers for one model: one for its hidden matrices, for example Muon, and an element-wise one for all else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.arguments import checked_arguments
from scale_core.comm.group import GroupLike
from scale_core.shard import full_shape
from scale_core.state.param_ownership import ParamSlice, flat_buffer_of
from scale_oss.options import OSSOptions
from scale_oss.oss import OSS, clip_grads_of
from scale_oss.state_dict import StateByParam

OptimizerSpec = tuple[type[Optimizer], Mapping[str, Any]]  # a class and its arguments

_KINDS = ("matrix", "other")


@checked_arguments
def split_by(
    model: nn.Module,
    matrix: OptimizerSpec,
    other: OptimizerSpec,
    *,
    other_names: Sequence[str] = (),
    process_group: GroupLike = None,
    options: OSSOptions | None = None,
) -> SplitOptimizer:
    r"""Gives the hidden matrices of a model to one optimizer and all other parameters to a second one.

    A hidden matrix has two dimensions and at least one element, and is not an embedding. Parameters of an
    `nn.Embedding` or `nn.EmbeddingBag` are embeddings, and so are parameters tied to them, for example a head. Name an
    untied head in `other_names`.

        >>> import torch
        >>> from scale_oss import split_by
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> optimizer = split_by(
        ...     model,
        ...     matrix=(torch.optim.SGD, {"lr": 0.02, "momentum": 0.95}),  # as a rule torch.optim.Muon
        ...     other=(torch.optim.AdamW, {"lr": 3e-4}),
        ...     other_names=[r"^2\."],
        ... )
        >>> [group["param_names"] for group in optimizer.param_groups]
        [['1.weight'], ['0.weight', '1.bias', '2.weight', '2.bias']]

    With `ShardedDataParallel`, pass it the pair: `ShardedDataParallel(model, optimizer.optimizers)`.

    Args:
        model: The model: plain, or sharded already.
        matrix: The class of the optimizer for matrices, and its arguments.
        other: That for all else.
        other_names: Regular expressions; a parameter in whose name one is found goes to `other`.
        process_group: As in `OSS`.
        options: As in `OSS`, for both.

    Returns:
        One optimizer. A loop has one, and so have its scheduler, its scaler and its checkpoints; and gradients are
        clipped by one norm.

    Raises:
        ValueError: One of the two would have nothing; a name is found nowhere; several parameters are shown as one flat
            one; or as in `OSS`.
        TypeError: As in `OSS`.

    See also: [the guide to OSS](../guides/oss.md).
    """
    recipes = {"matrix": matrix, "other": other}
    sorted_params = _split_params(model, other_names)
    for kind, params in sorted_params.items():
        if not params:
            single = recipes["other" if kind == "matrix" else "matrix"][0].__name__
            raise ValueError(
                f"split_by: the model has no parameter for '{kind}'. Use one optimizer, "
                f"OSS(model.parameters(), torch.optim.{single}, ...)"
            )
    optimizers = {
        kind: OSS(
            params,
            recipes[kind][0],
            process_group,
            options=options,
            **dict(recipes[kind][1]),
        )
        for kind, params in sorted_params.items()
    }
    return SplitOptimizer(model, optimizers["matrix"], optimizers["other"], other_names)


class SplitOptimizer(Optimizer):
    """Two optimizers as one; `split_by` makes it.

    Its parameter groups are the same objects as the groups of the two, so that a scheduler changes both.

    Attributes:
        matrix: The optimizer of the hidden matrices.
        other: The optimizer of all else.

    Examples:
        >>> import torch
        >>> from scale_oss import split_by
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> optimizer = split_by(model, (torch.optim.SGD, {"lr": 0.1}), (torch.optim.AdamW, {"lr": 1e-3}))
        >>> type(optimizer).__name__
        'SplitOptimizer'

    See also: [the guide to OSS](../guides/oss.md).
    """

    @checked_arguments
    def __init__(self, model: nn.Module, matrix: OSS, other: OSS, other_names: Sequence[str] = ()) -> None:
        self.matrix, self.other = matrix, other
        self._model, self._other_names = model, tuple(other_names)
        self._built = False
        super().__init__(
            [{"params": group["params"]} for optimizer in self.optimizers for group in optimizer.param_groups], {}
        )
        self._sync_param_groups()
        self._built = True

    @property
    def optimizers(self) -> tuple[OSS, OSS]:
        """The two."""
        return self.matrix, self.other

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates all parameters; see `OSS.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step(**kwargs)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[Iterator[nn.Parameter]], Iterable[nn.Parameter]] | None = None,
    ) -> Tensor:
        """Scales the gradients of both optimizers by one norm, and returns it, a scalar; see `OSS.clip_grad_norm_`."""
        return clip_grads_of(self.optimizers, max_norm, norm_type, filter_params_fn)

    def wait(self) -> None:
        """Returns when the parameters are complete again; see `OSS.wait`."""
        for optimizer in self.optimizers:
            optimizer.wait()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the model; each goes where `split_by` had put it. All ranks together.

        Raises:
            ValueError: One is none of the model's, or in a group already.
        """
        if not self._built:
            super().add_param_group(param_group)
            return
        options = {key: value for key, value in param_group.items() if key not in ("params", "param_names")}
        new_params = param_group["params"]
        listed = (
            [new_params]
            if isinstance(new_params, Tensor)
            else [p[1] if isinstance(p, tuple) else p for p in new_params]
        )
        listed_ids = {id(param) for param in listed}
        chosen = {
            kind: [(name, param) for name, param in params if id(param) in listed_ids]
            for kind, params in _split_params(self._model, self._other_names).items()
        }
        chosen_ids = {id(param) for params in chosen.values() for _, param in params}
        present_ids = {id(param) for group in self.param_groups for param in group["params"]}
        for position, param in enumerate(listed):
            if id(param) not in chosen_ids or id(param) in present_ids:
                raise ValueError(
                    f"add_param_group: parameter {position} of the group, of shape {tuple(full_shape(param))}, "
                    + ("is in a group already" if id(param) in present_ids else "is none of the model's")
                )
        for kind, optimizer in zip(_KINDS, self.optimizers, strict=True):
            if chosen[kind]:
                optimizer.add_param_group({**options, "params": chosen[kind]})
        self._sync_param_groups()

    def __getattr__(self, name: str) -> Any:
        """A method or an attribute of one of the two, or of both; see `OSS`."""
        optimizers = [
            optimizer for optimizer in (vars(self).get("matrix"), vars(self).get("other")) if hasattr(optimizer, name)
        ]
        if not optimizers or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(optimizers[0], name)
        if not callable(value):
            return value

        def method(*args: Any, **kwargs: Any) -> None:
            for optimizer in optimizers:
                getattr(optimizer, name)(*args, **kwargs)

        return method

    # The state.

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Gathers the state of both; see `OSS.consolidate_state_dict`."""
        for optimizer in self.optimizers:
            optimizer.consolidate_state_dict(recipient_rank)

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Returns both states, {"matrix": ..., "other": ...}, each for the plain optimizer; see `OSS`."""
        return {kind: optimizer.state_dict(all_ranks) for kind, optimizer in zip(_KINDS, self.optimizers, strict=True)}

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes this rank's shard of both states; both are compared before either is written. See `OSS`.

        Raises:
            TypeError: It is not of the form that `state_dict` returns.
            ValueError: As in `OSS.load_state_dict`.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != set(_KINDS):
            keys = sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise TypeError(
                f"expected the states of both optimizers, {{'matrix': ..., 'other': ...}}, got {keys}: plain ones load "
                "as {'matrix': muon.state_dict(), 'other': adamw.state_dict()}"
            )
        checked = [
            optimizer.check_state_dict(state_dict[kind])
            for kind, optimizer in zip(_KINDS, self.optimizers, strict=True)
        ]
        for optimizer, local in zip(self.optimizers, checked, strict=True):
            optimizer.load_checked(local)

    def sharded_state(self, holding: ParamSlice) -> ParamSlice:
        """See `OSS.sharded_state`. Raises ValueError if neither optimizer has the parameter."""
        for optimizer in self.optimizers:
            if id(holding.owner) in optimizer.placements:
                return optimizer.sharded_state(holding)
        raise ValueError(f"'{holding.name}' is with neither optimizer")

    def _sync_param_groups(self) -> None:
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        parts = ((optimizer.optim, optimizer.placements) for optimizer in self.optimizers)
        self.state = StateByParam(*parts)  # type: ignore[assignment]  # a mapping, as torch uses it


def _split_params(model: nn.Module, other_names: Sequence[str]) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """The named parameters of each kind, by their full shapes: a shard of a matrix may have one dimension."""
    named = list(model.named_parameters())
    embeddings = {
        id(param)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for param in module.parameters(recurse=False)
    }
    patterns = [re.compile(pattern) for pattern in ([other_names] if isinstance(other_names, str) else other_names)]
    for pattern in patterns:
        if not any(pattern.search(name) for name, _ in named):
            raise ValueError(
                f"split_by: no parameter's name has {pattern.pattern!r} in it; they are "
                f"{', '.join(name for name, _ in named[:5])}{' and so on' if len(named) > 5 else ''}"
            )
    params_by_kind: dict[str, list[tuple[str, nn.Parameter]]] = {kind: [] for kind in _KINDS}
    for name, param in named:
        buffer = flat_buffer_of(param)
        if buffer is not None:
            raise ValueError(
                f"split_by: '{name}' is one flat parameter that holds {len(buffer.names)}, as '{buffer.names[0]}', so "
                "matrices can't be found in it. Shard the model with flatten_parameters=False"
            )
        shape = full_shape(param)
        is_matrix = len(shape) == 2 and shape.numel() > 0 and id(param) not in embeddings
        by_name = any(pattern.search(name) for pattern in patterns)
        params_by_kind["matrix" if is_matrix and not by_name else "other"].append((name, param))
    return params_by_kind
