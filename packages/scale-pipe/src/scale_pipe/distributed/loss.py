"""The loss of a batch: the losses of its micro-batches, and the weight of each in their mean.

A micro-batch counts by its samples. Where the loss is a mean over the targets that count, as with `ignore_index`, a
micro-batch counts by the number of those, because the mean of such means is not the mean of the batch. The numbers have
to be known before the first backward, so they are counted in the target that `step` was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_core.tree import map_tensors, tensors_in
from scale_pipe.distributed.loss_graph import CrossEntropy, Scalar, element_means
from scale_pipe.distributed.message import ChunkSize
from scale_pipe.distributed.stage import input_alias
from scale_pipe.microbatch import Chunks


class _Term(NamedTuple):
    """A mean over elements in the loss of a micro-batch."""

    factor: Scalar
    num_elements: Scalar


_MISSING = _Term(1.0, 0)


class BatchLoss:
    """The loss of a pass, on the rank of the last stage.

    Args:
        loss_fn: The user's function of an output and perhaps a target; None where the output is the loss.
        targets: None where no target was given.
    """

    def __init__(self, loss_fn: Callable[..., Any] | None, targets: Chunks | None) -> None:
        self._loss_fn = loss_fn
        self._targets = targets
        self._target_weights: Sequence[Tensor] | None = None  # Of each micro-batch by its targets, once they count.
        self._sizes: dict[int, ChunkSize] = {}  # By micro-batch.
        self._terms: dict[tuple[bool, int], dict[int, _Term]] = {}  # By kind and number, then by micro-batch.

    def __call__(self, output: Any, micro_batch: int, chunk_size: ChunkSize) -> Any:
        """Returns the loss of a micro-batch.

        Raises:
            ValueError: The target has another number of samples than the batch. Or the loss of the batch is another
                than the mean over its micro-batches.
        """
        loss = self._call(output, micro_batch, chunk_size)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._sizes[micro_batch] = chunk_size
            self._note_terms(loss, micro_batch)
            if len(self._sizes) == chunk_size.num_micro_batches and loss.device.type == "cpu":
                self._check(loss.dtype)  # Before a stage steps. On other devices it is a wait.
        return loss

    def weight(self, micro_batch: int) -> float | Tensor:
        """Returns the weight of a micro-batch in the mean, a scalar."""
        if self._target_weights is not None:
            return self._target_weights[micro_batch]
        return self._sizes[micro_batch].weight

    def mean(self, losses: Mapping[int, Tensor]) -> Tensor:
        """Returns the loss of the batch, a scalar, once all losses are there. Raises ValueError as `__call__`."""
        loss = next(iter(losses.values()))
        if loss.device.type != "cpu":
            self._check(loss.dtype)
        first, *terms = (self._weighted(losses[number].reshape(()), number) for number in sorted(losses))
        return sum(terms, first).to(loss.dtype)

    def _weighted(self, loss: Tensor, micro_batch: int) -> Tensor:
        weight = self.weight(micro_batch)
        if isinstance(weight, float):
            return loss * weight
        return torch.where(weight == 0, 0, loss * weight)  # The mean over no target is NaN.

    def _call(self, output: Any, micro_batch: int, chunk_size: ChunkSize) -> Any:
        if self._targets is not None and self._targets.total not in (None, chunk_size.total):
            raise ValueError(
                f"the mini-batch has {chunk_size.total} samples, and target has {self._targets.total}: give target for "
                "the same samples"
            )
        if self._loss_fn is None:
            return output
        if torch.is_grad_enabled():
            return self._call_function(output, micro_batch)
        # An evaluation has a graph of the loss function alone: it says over how many targets the loss is a mean.
        with torch.inference_mode(False), torch.enable_grad():
            return self._call_function(map_tensors(_with_graph, output), micro_batch)

    def _call_function(self, output: Any, micro_batch: int) -> Any:
        assert self._loss_fn is not None
        if self._targets is not None:
            return self._loss_fn(output, self._targets.by_micro_batch[micro_batch])
        try:
            return self._loss_fn(output)
        except TypeError as error:
            error.add_note(
                "No target was given on the rank of the last stage: write target=target, as loss_fn takes it"
            )
            raise

    @torch.no_grad()
    def _note_terms(self, loss: Tensor, micro_batch: int) -> None:
        """Keeps the means in a loss, and weighs micro-batches by their targets if it is a mean over these."""
        for mean in element_means(loss):
            is_entropy = mean.cross_entropy is not None
            if mean.cross_entropy is not None and self._target_weights is None:
                self._target_weights = self._weights_by_targets(mean.cross_entropy, micro_batch)
            number = sum(micro_batch in terms for (kind, _), terms in self._terms.items() if kind == is_entropy)
            self._terms.setdefault((is_entropy, number), {})[micro_batch] = _Term(mean.factor, mean.num_elements)

    def _weights_by_targets(self, entropy: CrossEntropy, micro_batch: int) -> Sequence[Tensor] | None:
        """Returns weights by the targets that count; None where they are not those that the step was given."""
        if self._targets is None:
            return None
        targets = [list(tensors_in(target)) for target in self._targets.by_micro_batch]
        for number, target in enumerate(targets[micro_batch]):
            if _is_same_memory(target, entropy.target):
                counts = torch.stack([entropy.num_counted(tensors[number]) for tensors in targets])
                counts = counts if counts.device.type == "mps" else counts.double()
                return (counts / counts.sum()).unbind()
        return None

    @torch.no_grad()
    def _check(self, dtype: torch.dtype) -> None:
        """Raises ValueError if the mean over micro-batches does not give all their elements equal weight."""
        order = sorted(self._sizes)
        weights = _column([self.weight(number) for number in order])
        for (is_entropy, _), terms in self._terms.items():
            if not is_entropy and len(terms) < len(order):
                continue  # A term that only some micro-batches have, for example a penalty.
            factors = _column([terms.get(number, _MISSING).factor for number in order])
            counts = _column([terms.get(number, _MISSING).num_elements for number in order])
            tolerance = min(64 * torch.finfo(dtype).eps, 0.01)
            by_samples = self._target_weights is None and not is_entropy
            if by_samples and _is_constant(factors, tolerance) and _is_constant(counts, tolerance):
                continue  # Its elements are not those of samples, as in a penalty of weights.
            shares = torch.where(counts > 0, factors * weights, weights)
            difference = shares * counts.sum() - counts * shares.sum()
            if (difference.abs() > tolerance * (counts * shares.sum()).abs()).any():
                raise self._not_the_mean(counts, is_entropy or self._target_weights is None)

    def _not_the_mean(self, counts: Tensor, is_over_targets: bool) -> ValueError:
        listed = ", ".join(f"{count:g}" for count in counts.tolist())
        samples = ", ".join(str(size.samples) for _, size in sorted(self._sizes.items()))
        reason = (
            f"the loss is a mean over {listed} elements in micro-batches of {samples} samples, so the mean of these "
            "losses is not the loss of the batch: elements that do not count, as with ignore_index or a mask, are not "
            "spread evenly"
            if is_over_targets
            else f"the loss adds a mean over the targets that count and a mean over {listed} other elements in "
            f"micro-batches of {samples} samples, so no weight of a micro-batch is right for both"
        )
        return ValueError(
            f"{reason}. Divide the sum of each micro-batch by the number of elements that count in the batch:\n"
            "  count = (target != -100).sum()  # of all micro-batches, before step\n"
            '  def loss_fn(output, part):  # sum_loss, for example, is cross_entropy with reduction="sum"\n'
            "      return sum_loss(output, part) / count * (len(target) / len(part))"
        )


def check_mean_loss(loss_fn: Any) -> None:
    """Refuses a loss function with `reduction="sum"`, also in a partial (ValueError).

    The loss of a step is the mean over its micro-batches, each weighted by its samples, so of a sum over N samples it
    would be a fraction, and gradients with it. A function that sums without an attribute can't be distinguished from
    others.
    """
    function, reduction = loss_fn, None
    while isinstance(function, partial):
        reduction = reduction or function.keywords.get("reduction")
        function = function.func
    if (reduction or getattr(function, "reduction", None)) != "sum":
        return
    title = getattr(function, "__name__", type(function).__name__)
    raise ValueError(
        f'loss_fn is expected to return the mean over the samples of a micro-batch, and {title} has reduction="sum". '
        'Write reduction="mean"; or, for the gradients of the sum over a batch of N samples, '
        "loss_fn=lambda output, target: N * sum_loss(output, target) / len(target)"
    )


def _with_graph(tensor: Tensor) -> Tensor:
    """Returns the output of a stage without a graph, of the same memory, as the begin of one."""
    plain = tensor.clone() if tensor.is_inference() else tensor.detach()
    return input_alias(plain.requires_grad_()) if plain.is_floating_point() else plain


def _is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order, perhaps of another shape."""
    same = tensor.data_ptr() == other.data_ptr() and tensor.numel() == other.numel() > 0
    return same and tensor.dtype == other.dtype and tensor.is_contiguous() and other.is_contiguous()


def _column(values: Sequence[Scalar]) -> Tensor:
    """Returns numbers as a tensor [micro-batches], float64, on the host."""
    device = next((value.device for value in values if isinstance(value, Tensor) and value.device.type != "cpu"), None)
    if device is None:
        return torch.tensor([float(value) for value in values], dtype=torch.float64)
    stacked = torch.stack([torch.as_tensor(value, device=device).reshape(()) for value in values])  # One wait.
    return stacked.cpu().double()


def _is_constant(values: Tensor, tolerance: float) -> bool:
    return bool(((values - values[0]).abs() <= tolerance * values[0].abs()).all())
