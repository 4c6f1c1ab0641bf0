"""`DeferredBatchNorm`: running statistics of full mini-batches, updated once per mini-batch.

Each micro-batch is normalized by its own statistics, since the statistics of the others are not known yet.
At the end of a mini-batch they are merged, and the running averages are updated once, instead of once per micro-batch.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from scale_checkpoint import is_recomputing
from scale_core.arguments import checked_arguments
from scale_pipe.microbatch import check_chunks


class _BatchStats(NamedTuple):
    """The statistics of some micro-batches together."""

    num_micro_batches: int
    num_values: int  # per channel; 0 in a mini-batch without samples
    mean: Tensor  # [C]
    deviations: Tensor  # [C], the sum of the squared deviations from the mean

    def merge(self, other: _BatchStats) -> _BatchStats:
        """Merges both by Chan's formula: the difference of two large sums would lose digits."""
        num_values = self.num_values + other.num_values
        delta, share = other.mean - self.mean, other.num_values / max(1, num_values)
        return _BatchStats(
            self.num_micro_batches + other.num_micro_batches,
            num_values,
            self.mean + delta * share,
            self.deviations + other.deviations + delta.square() * (self.num_values * share),
        )


class DeferredBatchNorm(_BatchNorm):
    """A batch norm that updates its running statistics once per mini-batch, as `BatchNorm` does without a pipeline.

    A recomputation does not change them. Its state dict has the keys of `BatchNorm`.

    Args:
        num_features: Channels C of inputs [N, C, ...].
        eps: Added to the variance.
        momentum: Of the running statistics; None averages over all mini-batches.
        affine: Whether it has a weight and a bias [C].
        chunks: Micro-batches in a mini-batch, where no pipeline sets their number.

    Raises:
        ValueError: `chunks` is not positive.

    Examples:
        >>> import torch
        >>> from scale_pipe import DeferredBatchNorm
        >>> norm = DeferredBatchNorm(3, chunks=2)
        >>> for micro_batch in torch.ones(4, 3).chunk(2):
        ...     _ = norm(micro_batch)
        >>> norm.running_mean  # updated once per mini-batch
        tensor([0.1000, 0.1000, 0.1000])

    See also: [the guide to pipelines](../guides/pipe.md).
    """

    @checked_arguments(own="chunks")
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        chunks = check_chunks(chunks)
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.chunks = chunks
        self._expected: int | None = None
        self._collected: _BatchStats | None = None

    def begin_mini_batch(self, num_micro_batches: int) -> None:
        """Sets the number of micro-batches of the next mini-batch; statistics of one that failed are dropped.

        Args:
            num_micro_batches: At most `chunks`.
        """
        self._expected, self._collected = num_micro_batches, None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input [N, C, ...] of at least 2 dimensions, got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes a micro-batch [N, C, ...].

        Raises:
            ValueError: It has fewer than two dimensions.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance = self.running_mean, self.running_var
        assert mean is not None and variance is not None
        # With a momentum of 1 the kernel leaves this micro-batch's own statistics there, without another pass.
        mean, variance = torch.zeros_like(mean), torch.zeros_like(variance)
        output = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if not is_recomputing():
            num_values = input.numel() // max(1, input.shape[1])  # None or two: the kernel refuses to normalize one.
            self._add_stats(_BatchStats(1, num_values, mean, variance * max(0, num_values - 1)))
        return output

    def _add_stats(self, collected: _BatchStats) -> None:
        if self._collected is not None:
            collected = self._collected.merge(collected)
        self._collected = collected
        if collected.num_micro_batches >= (self._expected or self.chunks):
            self._collected = None
            self._update_running_stats(collected)

    @torch.no_grad()
    def _update_running_stats(self, collected: _BatchStats) -> None:
        mean, variance, tracked = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None and variance is not None and tracked is not None
        tracked.add_(1)
        if collected.num_values == 0:
            return  # `BatchNorm` counts a batch without samples, too, and keeps its statistics.
        share: float | Tensor = 1.0 / tracked.to(mean.dtype) if self.momentum is None else self.momentum
        mean.copy_((1 - share) * mean + share * collected.mean)
        # Unbiased, as `BatchNorm` keeps it.
        variance.copy_((1 - share) * variance + share * (collected.deviations / (collected.num_values - 1)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_expected": None, "_collected": None}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("sum", "sum_squares"):  # FairScale keeps its sums as buffers; they are not needed.
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> nn.Module:
        """Replaces each `BatchNorm1d`, `2d` and `3d` with running statistics by a `DeferredBatchNorm`.

        And each `DeferredBatchNorm` with other `chunks`. Parameters and buffers stay the same tensors, hooks and
        attributes stay. `SyncBatchNorm`, instance norms, and batch norms that override `forward` are not changed.

        Args:
            module: A batch norm, or a module with some inside; changed in place.
            chunks: Micro-batches in a mini-batch, where no pipeline sets their number.

        Returns:
            `module` itself, or its replacement.

        Raises:
            ValueError: `chunks` is not positive; a lazy batch norm has no channels yet.
        """
        chunks = check_chunks(chunks)
        for name, part in module.named_modules():
            if isinstance(part, _BatchNorm) and isinstance(part, LazyModuleMixin):
                raise ValueError(
                    f"{name or 'module'!r} is a {type(part).__name__}, whose number of channels is not known yet: "
                    "run the module once before it is converted"
                )
        return cls._convert(module, chunks, {})

    @classmethod
    def _convert(cls, module: nn.Module, chunks: int, known: dict[int, nn.Module]) -> nn.Module:
        if id(module) in known:
            return known[id(module)]
        is_deferred = isinstance(module, DeferredBatchNorm)
        if isinstance(module, DeferredBatchNorm) and module.chunks == chunks:
            known[id(module)] = module
            return module
        new = module
        has_torchs_forward = type(module).forward is _BatchNorm.forward and "forward" not in vars(module)
        is_batch_norm = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        if is_deferred or (is_batch_norm and has_torchs_forward and module.running_mean is not None):
            deferred = cls.__new__(cls)  # It takes everything of the module, hooks and the user's attributes included.
            vars(deferred).update(vars(module))
            vars(deferred).update(
                {kind: copy.copy(registry) for kind, registry in vars(module).items() if isinstance(registry, dict)}
            )
            deferred.chunks, deferred._expected, deferred._collected = chunks, None, None
            new = deferred
        known[id(module)] = new
        for name, child in module._modules.items():
            if child is not None:
                new._modules[name] = cls._convert(child, chunks, known)
        return new
