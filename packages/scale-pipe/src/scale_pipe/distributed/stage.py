"""One stage on its rank: a forward and a backward for each micro-batch, without knowledge of other ranks.

Inputs are payloads: the tensors of a pytree, and the tree without them. Those that need gradients become leaves of a
graph of their own, so each micro-batch's backward ends where its forward began, and outputs are detached likewise.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, increment_version

from scale_checkpoint import checkpoint_wrapper, disable_checkpointing
from scale_checkpoint.wrapper import is_checkpointed
from scale_core import compat
from scale_pipe.batch_norm import DeferredBatchNorm
from scale_pipe.distributed.gradients.data_parallel import DataParallelWrappers, outermost_wrappers
from scale_pipe.distributed.message import ChunkSize, Payload
from scale_pipe.microbatch import Arguments
from scale_pipe.partition.partition_function import Checkpoint, PartitionFunction, starts_in_place
from scale_pipe.skip.namespace import SkipKey, declared_skips
from scale_pipe.split_backward import Gradients, SplitBackward

StageLoss: TypeAlias = Callable[[Any, int, ChunkSize], Any]
"""From the last stage's output, the number of the micro-batch and its size to its loss, a scalar."""

OUTPUT = ""
"""The name of the output that a stage passes to the next; all other names are names of skips."""


class _InputAlias(torch.autograd.Function):
    """The identity, without a copy: its output is not a leaf, so a layer may change it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class _MicroBatchGraph(NamedTuple):
    """A micro-batch between its forward and its backward, by name of its messages."""

    leaves: Mapping[str, list[Tensor]]  # inputs that get gradients
    roots: Mapping[str, list[GradientEdge]]  # outputs that receive gradients; of the last stage the loss


class LastStageResult(NamedTuple):
    """The results that stay with the last stage after a forward, detached; empty on other stages."""

    loss: Tensor | None = None
    output: Any = None  # of an evaluation


class Stage:
    """A stage's module and its micro-batches; skips are given by name, with the keys that its layers use."""

    def __init__(
        self,
        module: nn.Module,
        pops: Mapping[str, SkipKey],
        stashes: Mapping[str, SkipKey],
        checkpoint: Checkpoint = "never",
    ) -> None:
        self.module = module
        self._pops = pops
        self._stashes = stashes
        self._checkpoint = checkpoint
        self._function: PartitionFunction | None = None  # None where the module can be called as it is
        if checkpoint != "never":
            clones = starts_in_place(module)
            self._function = checkpoint_wrapper(PartitionFunction(module, title="stage", clones=clones))
        elif type(module) is nn.Sequential or any(declared_skips(part) is not None for part in module.modules()):
            self._function = PartitionFunction(module, title="stage")
        self._graphs: dict[int, _MicroBatchGraph] = {}
        self._pending_weights: dict[int, SplitBackward] = {}
        self._batch_norms: list[DeferredBatchNorm] = []
        self._splits = self._begun = False
        self._buffer_memory: set[int] = set()
        self.shared: Sequence[nn.Parameter] = ()  # parameters that other ranks hold as well
        self.wrappers: DataParallelWrappers | None = None  # in this pass

    @property
    def is_wrapped(self) -> bool:
        """Whether a data-parallel wrapper is around the module, or in it."""
        return any(callable(getattr(part, "no_sync", None)) for part in self.module.modules())

    def begin(self, *, splits_backward: bool) -> None:
        """Begins a pass: looks at the module as it is wrapped now."""
        parts, is_wrapped = list(self.module.modules()), self.is_wrapped
        self.wrappers = DataParallelWrappers(outermost_wrappers(self.module), self.shared) if is_wrapped else None
        self._batch_norms = [part for part in parts if isinstance(part, DeferredBatchNorm)]
        # Hooks of wrappers, and recomputation, need a backward that is one.
        self._splits = splits_backward and self._checkpoint == "never" and not (is_wrapped or _recomputes(parts))
        self._buffer_memory = {_memory(buffer) for buffer in self.module.buffers()}
        self._begun = False

    def forward(
        self,
        micro_batch: int,
        given: Arguments,
        arrived: Mapping[str, Payload],
        chunk_size: ChunkSize,
        *,
        reduces: bool = False,
        is_last: bool = False,
        loss_fn: StageLoss | None = None,
    ) -> tuple[dict[str, Payload], LastStageResult]:
        """Computes a micro-batch, and returns by name the outputs to send on, and those that stay here.

        `reduces`: its backward will be the stage's last one in this step. `is_last`: this is the model's last stage.
        """
        trains = torch.is_grad_enabled()
        if not self._begun:
            self._begun = True
            for norm in self._batch_norms:
                norm.begin_mini_batch(chunk_size.num_micro_batches)
        aliases = {
            name: [input_alias(t) if trains else t for t in payload.tensors] for name, payload in arrived.items()
        }
        trees = {name: unpack(payload.structure, aliases[name]) for name, payload in arrived.items()}
        is_kept = self._checkpoint == "except_last" and micro_batch == chunk_size.num_micro_batches - 1
        with (
            nullcontext() if self.wrappers is None else self.wrappers.no_sync(skip_reduce=trains and not reduces),
            disable_checkpointing() if is_kept else nullcontext(),
        ):
            output, stashed = self._call(given, trees)
        for name, arrival in arrived.items():
            for leaf, alias in zip(arrival.tensors, aliases[name], strict=True):
                # The stage before may have kept the same memory for its backward.
                if alias is not leaf and alias._version:
                    increment_version(leaf)
        outputs = {name: stashed.pop(key) for name, key in self._stashes.items()}
        roots: dict[str, list[GradientEdge]] = {}
        result = LastStageResult()
        if is_last:
            loss = None if loss_fn is None else _check_loss(loss_fn(output, micro_batch, chunk_size), trains=trains)
            if loss is not None and trains:
                roots[OUTPUT] = [get_gradient_edge(loss)]
            result = LastStageResult(None if loss is None else loss.detach(), None if trains else output)
        else:
            outputs = {OUTPUT: output, **outputs}
        sent = {}
        for name, tree in outputs.items():
            structure, tensors = pack(tree)
            roots[name] = [get_gradient_edge(tensor) for tensor in tensors if trains and tensor.requires_grad]
            sent[name] = Payload(structure, [self._detach(tensor) for tensor in tensors], chunk_size)
        if trains:
            leaves = {name: [t for t in payload.tensors if t.requires_grad] for name, payload in arrived.items()}
            self._graphs[micro_batch] = _MicroBatchGraph(leaves, roots)
        return sent, result

    def _call(self, given: Arguments, trees: Mapping[str, Any]) -> tuple[Any, dict[SkipKey, Any]]:
        """Calls the module with its arguments and received values; returns its output, and the values it stashes."""
        args = (trees[OUTPUT],) if OUTPUT in trees else given.args
        if self._function is None:
            return self.module(*args, **given.kwargs), {}
        popped = {self._pops[name]: tree for name, tree in trees.items() if name != OUTPUT}
        return self._function.run(popped, Arguments(args, given.kwargs))

    def backward(
        self,
        micro_batch: int,
        arrived: Mapping[str, Payload],
        loss_grad: Tensor | None,
        *,
        inputs_only: bool,
        reduces: bool,
    ) -> dict[str, list[Tensor | None]]:
        """Computes the gradients of the inputs, and of the parameters unless they are left to `weight_gradients`.

        `loss_grad` is given on the last stage, `arrived` has gradients of other outputs. Returns gradients of inputs.
        """
        graph = self._graphs.pop(micro_batch)
        gradients: list[Tensor | None] = []
        for name, roots in graph.roots.items():
            if name not in arrived:
                gradients.append(loss_grad)
                continue
            structure, tensors, _ = arrived[name]
            # Where each root has a gradient of its own, the tensors of the list are the list.
            grads = tensors if len(tensors) == len(roots) else unpack(structure, tensors)
            gradients += grads if isinstance(grads, list) else [grads]
        assert len(gradients) == sum(map(len, graph.roots.values()))
        roots = [root for group in graph.roots.values() for root in group]
        leaves = [leaf for group in graph.leaves.values() for leaf in group]
        lengths = {name: len(group) for name, group in graph.leaves.items()}
        del graph
        with nullcontext() if self.wrappers is None else self.wrappers.no_sync(skip_reduce=not reduces):
            leaf_grads: list[Tensor | None] | None = None
            if inputs_only and self._splits:
                backward = SplitBackward(roots, leaves)
                leaf_grads = backward.run_inputs(gradients)
                if leaf_grads is not None:
                    self._pending_weights[micro_batch] = backward
            if leaf_grads is None:
                leaf_grads = run_backward(roots, leaves, gradients)
        grads = iter(leaf_grads)
        return {name: [next(grads) for _ in range(length)] for name, length in lengths.items()}

    def weight_gradients(self, micro_batch: int) -> None:
        """Computes the gradients of the parameters that `backward` has left, if it has left any."""
        if (backward := self._pending_weights.pop(micro_batch, None)) is not None:
            backward.run_weights()

    def _detach(self, tensor: Tensor) -> Tensor:
        """The same memory without its graph, as a leaf.

        A buffer is copied: the next micro-batch may change it before this one is sent, or looked at. So is a view that
        nobody may change in place, since autograd would not notice it if the next stage did so to its memory.
        """
        detached = tensor.detach()
        is_buffer = bool(self._buffer_memory) and _memory(detached) in self._buffer_memory
        if is_buffer or (tensor._is_view() and compat.forbids_in_place(tensor)):
            detached = detached.clone()
        return detached.requires_grad_(tensor.requires_grad)

    def discard(self) -> None:
        """Drops all micro-batches of an aborted step, and gradients that wait in wrappers."""
        self._graphs.clear()
        self._pending_weights.clear()
        if self.wrappers is not None:
            self.wrappers.discard_grads()


def run_backward(roots: Sequence[GradientEdge], leaves: Sequence[Tensor], gradients: Gradients) -> list[Tensor | None]:
    """Adds gradients of parameters to their `grad`, and returns gradients of `leaves`; `gradients` are of `roots`."""
    pairs = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
    leaf_grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return leaf_grads


# Trees of tensors.


class _Packer(pickle.Pickler):
    """Pickles everything but tensors with values; a tensor that occurs twice is taken out once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self._positions: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor) or obj.is_meta:
            return None
        position = self._positions.setdefault(id(obj), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(obj)
        return position


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        tensor: Tensor = self._tensors[pid]
        return tensor


def _pickled(tree: Any) -> tuple[bytes, list[Tensor]]:
    packer = _Packer(file := io.BytesIO())
    packer.dump(tree)
    return file.getvalue(), packer.tensors


_ONE_TENSOR, _ = _pickled(torch.empty(0))


def pack(tree: Any) -> tuple[bytes, list[Tensor]]:
    """Takes the tensors out of a pytree, but none on the meta device. Raises TypeError if it can't be pickled."""
    if type(tree) is Tensor and not tree.is_meta:
        return _ONE_TENSOR, [tree]
    try:
        return _pickled(tree)
    except Exception as error:
        raise TypeError(
            f"what a stage returns is sent to another process, and this can't be pickled: {error}. Return tensors, "
            "numbers and strings, in tuples, lists, dicts or dataclasses of a module's top level"
        ) from error


def unpack(structure: bytes, tensors: list[Tensor]) -> Any:
    """Puts the tensors that `pack` took out back into their pytree."""
    if structure == _ONE_TENSOR:
        return tensors[0]
    return _Unpacker(io.BytesIO(structure), tensors).load()


# Tensors of a stage.


def input_alias(tensor: Tensor) -> Tensor:
    """Returns the same memory, as no leaf of the graph where it needs a gradient."""
    alias: Tensor = _InputAlias.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return alias


def _memory(tensor: Tensor) -> int:
    """An id of the tensor's memory while it exists."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def _check_loss(loss: Any, *, trains: bool) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(
            f"the loss of a micro-batch has to be a tensor with one element, and is {got}. Pass "
            "loss_fn=lambda output, target: ..., or let the last stage return the mean loss"
        )
    if loss.is_complex():
        raise ValueError(f"the loss of a micro-batch has to be real, and is {loss.dtype}: take its .real or its .abs()")
    if trains and not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on anything that requires a gradient: no parameter trains, or the last stage or "
            "loss_fn detaches its output"
        )
    return loss


def _recomputes(parts: Sequence[nn.Module]) -> bool:
    """Whether one of these modules is recomputed in the backward pass."""
    return any(
        is_checkpointed(part)
        or type(part).__name__ == "CheckpointWrapper"
        or getattr(part, "gradient_checkpointing", False) is True
        for part in parts
    )
