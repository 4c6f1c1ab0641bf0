"""One stage on its rank: a forward and a backward for each micro-batch, with nothing known of who is at the other end.

What comes in are contents: the tensors of a tree, and the tree without them. Those that need gradients become leaves of
a graph of their own, so each micro-batch's backward ends where its forward began, and what leaves is cut off likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, increment_version

from scale_checkpoint import checkpoint_wrapper, disable_checkpointing, is_checkpointed
from scale_core import compat
from scale_core.tree import map_tensors
from scale_pipe.batch_norm import begin_mini_batch
from scale_pipe.distributed.comm.messages import Content, Share, pack, unpack
from scale_pipe.distributed.data_parallel import Replicas
from scale_pipe.microbatch import Arguments
from scale_pipe.partition.partition import Checkpoint, contents_in_words, run_layers, works_in_place
from scale_pipe.skip.namespace import SkipKey
from scale_pipe.skip.tracker import run_with_skips
from scale_pipe.split_backward import Backward


class _Entry(torch.autograd.Function):
    """The identity, without a copy: what comes out is no leaf, so a layer may change it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def enter(tensor: Tensor) -> Tensor:
    """Returns what a layer gets for a tensor that has come in.

    Args:
        tensor: A leaf where it requires gradients, of any shape.
    """
    entered: Tensor = _Entry.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return entered


def note_changes(leaves: Sequence[Tensor], entries: Sequence[Tensor]) -> None:
    """Tells autograd what was changed in place: the stage before may have kept the same memory for its backward.

    Args:
        leaves: What has come in.
        entries: What `enter` has made of them.
    """
    for leaf, entry in zip(leaves, entries, strict=True):
        if entry is not leaf and entry._version:
            increment_version(leaf)


ToLoss: TypeAlias = Callable[[Any, int, Share], Any]
"""From the last stage's output, the number of the micro-batch and its share to its loss, a scalar."""

OUTPUT = ""
"""The name of what a stage hands to the next; others are those of skips."""


class _Live(NamedTuple):
    """A micro-batch between its forward and its backward.

    Attributes:
        leaves: By name, what has come in and gets gradients.
        roots: By name, what has left and gives gradients; of the last stage the loss.
    """

    leaves: Mapping[str, list[Tensor]]
    roots: Mapping[str, list[GradientEdge]]


class Kept(NamedTuple):
    """What stays with the last stage after a forward; nothing on others.

    Attributes:
        loss: Without its history, where one was asked for.
        output: Likewise the stage's output, where no gradients are wanted.
    """

    loss: Tensor | None = None
    output: Any = None


class Stage:
    """A stage's module, and its micro-batches.

    Args:
        index: Its number, from 0.
        module: Its part of the model.
        pops: By the names of the skips that end here, the keys that its layers know.
        stashes: Of those that begin here.
        checkpoint: For which micro-batches activations are computed again in the backward pass.

    Attributes:
        shared: Its parameters that other ranks hold as well.
        replicas: The wrappers in it, as they are in this pass.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        pops: Mapping[str, SkipKey],
        stashes: Mapping[str, SkipKey],
        checkpoint: Checkpoint = "never",
    ) -> None:
        self.index = index
        self.module = module
        self._pops = pops
        self._stashes = stashes
        self._checkpoint = checkpoint
        self._run: nn.Module = _Run(module)
        if checkpoint != "never":
            self._run = checkpoint_wrapper(_Run(module, clones=works_in_place(module)))
        self._live: dict[int, _Live] = {}
        self._later: dict[int, Backward] = {}
        self._splits = self._counted = False
        self._kept_memory: set[int] = set()
        self.shared: Sequence[nn.Parameter] = ()
        self.replicas = Replicas(module)

    def begin(self, *, splits: bool) -> None:
        """A step begins.

        Args:
            splits: The schedule computes gradients of inputs and of parameters apart.
        """
        self._counted = False
        self.replicas = Replicas(self.module, self.shared)
        self._splits = splits and self._checkpoint == "never" and not self.replicas.any and not _recomputes(self.module)
        self._kept_memory = {_memory(buffer) for buffer in self.module.buffers()}

    def forward(
        self,
        micro_batch: int,
        given: Arguments,
        arrived: Mapping[str, Content],
        share: Share,
        *,
        reduces: bool = False,
        is_last: bool = False,
        to_loss: ToLoss | None = None,
    ) -> tuple[dict[str, Content], Kept]:
        """Computes a micro-batch.

        Args:
            micro_batch: Its number.
            given: What the stage gets beside what other stages hand to it.
            arrived: By name, what these have handed to it.
            share: Which part of the mini-batch it is.
            reduces: Its backward will be the stage's last one in this step.
            is_last: It is the model's last stage, whose output goes to nobody.
            to_loss: Then, where a loss is asked for.

        Returns:
            By name, what is handed on; and what stays here.

        Raises:
            ValueError: The loss is no scalar, or has no gradient.
            TypeError: What is handed on can't be sent.
        """
        trains = torch.is_grad_enabled()
        if not self._counted:
            self._counted = True
            begin_mini_batch(self.module, share.num_micro_batches)
        entries = {name: [enter(t) if trains else t for t in content.tensors] for name, content in arrived.items()}
        opened = {name: unpack(content.structure, entries[name]) for name, content in arrived.items()}
        popped = {self._pops[name]: tree for name, tree in opened.items() if name != OUTPUT}
        args = (opened[OUTPUT],) if OUTPUT in opened else given.args
        with self.replicas.waiting(quiet=trains and not reduces), self._checkpointing(micro_batch, share):
            output, stashed = self._run(popped, args, given.kwargs)
        for name, content in arrived.items():
            note_changes(content.tensors, entries[name])
        handed = {name: stashed.pop(key) for name, key in self._stashes.items()}
        leaving, kept = {}, Kept()
        roots: dict[str, list[GradientEdge]] = {}
        if is_last:
            loss = None if to_loss is None else _checked(to_loss(output, micro_batch, share), trains=trains)
            if loss is not None and trains:
                roots[OUTPUT] = [compat.gradient_edge(loss)]
            kept = Kept(None if loss is None else loss.detach(), None if trains else output)
        else:
            handed = {OUTPUT: output, **handed}
        for name, tree in handed.items():
            structure, tensors = pack(tree)
            roots[name] = [compat.gradient_edge(tensor) for tensor in tensors if tensor.requires_grad] if trains else []
            leaving[name] = Content(structure, [self._cut_off(tensor) for tensor in tensors], share)
        if trains:
            leaves = {name: [t for t in content.tensors if t.requires_grad] for name, content in arrived.items()}
            self._live[micro_batch] = _Live(leaves, roots)
        return leaving, kept

    def backward(
        self, micro_batch: int, arrived: Mapping[str, Content], seed: Tensor | None, *, apart: bool, reduces: bool
    ) -> dict[str, list[Tensor | None]]:
        """Computes the gradients of what came in, and those of the parameters unless they come apart.

        Args:
            micro_batch: Its number.
            arrived: By name, the gradients of what was handed on.
            seed: The gradient of the loss, on the last stage.
            apart: The gradients of the parameters are computed by `weight_gradients`, later.
            reduces: This is the stage's last backward in this step.

        Returns:
            By name, the gradients of what came in.
        """
        live = self._live.pop(micro_batch)
        gradients: list[Tensor | None] = []
        for name, roots in live.roots.items():
            given = unpack(arrived[name].structure, list(arrived[name].tensors)) if name in arrived else [seed]
            assert len(given) == len(roots)
            gradients += given
        leaves = [leaf for group in live.leaves.values() for leaf in group]
        backward = Backward([root for roots in live.roots.values() for root in roots], leaves, splits=self._splits)
        groups = {name: len(group) for name, group in live.leaves.items()}
        del live, leaves
        with self.replicas.waiting(quiet=not reduces):
            found = backward.run_inputs(gradients) if apart else backward.run(gradients)
        if apart:
            self._later[micro_batch] = backward
        return dict(zip(groups, _in_groups(found, groups.values()), strict=True))

    def weight_gradients(self, micro_batch: int) -> None:
        """Computes the gradients of the parameters that `backward` has left.

        Args:
            micro_batch: Its number.
        """
        self._later.pop(micro_batch).run_weights()

    def _cut_off(self, tensor: Tensor) -> Tensor:
        """The same memory without its history, and a leaf where it has one.

        A buffer is copied: the next micro-batch may change it before this one is sent, or looked at. So is a view that
        nobody may change in place, since autograd would not notice it if the next stage did so to its memory.
        """
        own = tensor.detach()
        if (self._kept_memory and _memory(own) in self._kept_memory) or compat.may_not_change_in_place(tensor):
            own = own.clone()
        return own.requires_grad_(tensor.requires_grad)

    def discard(self) -> None:
        """Forgets all micro-batches of a step that was given up, and gradients that wait in wrappers."""
        self._live.clear()
        self._later.clear()
        self.replicas.discard()

    @contextmanager
    def _checkpointing(self, micro_batch: int, share: Share) -> Iterator[None]:
        with ExitStack() as stack:
            if self._checkpoint == "except_last" and micro_batch == share.num_micro_batches - 1:
                stack.enter_context(disable_checkpointing())
            yield


class _Run(nn.Module):
    """A stage's module as a function of all that it is given, so that it can be computed again.

    Args:
        module: The stage's.
        clones: What it is given is needed again, and may not be changed in place.
    """

    def __init__(self, module: nn.Module, *, clones: bool = False) -> None:
        super().__init__()
        self.module = module
        self._clones = clones

    def _get_name(self) -> str:
        return f"stage with {contents_in_words(self.module)}"

    def forward(self, popped: Mapping[SkipKey, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls it, and returns its output and what it has stashed."""
        if self._clones:
            args, kwargs = map_tensors(torch.clone, (args, kwargs))
        return run_with_skips(self._call, popped, *args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """A sequence that somebody has made a stage gives all that it gets to its first layer, too."""
        if type(self.module) is nn.Sequential and (len(args) != 1 or kwargs) and len(self.module):
            return run_layers(self.module, args, kwargs)
        return self.module(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    """Tells memory apart while it is there."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def _checked(loss: Any, *, trains: bool) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(
            f"the loss of a micro-batch has to be a tensor with one element, and is {got}: pass "
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


def _in_groups(found: Sequence[Tensor | None], lengths: Any) -> Iterator[list[Tensor | None]]:
    start = 0
    for length in lengths:
        yield list(found[start : start + length])
        start += length


def _recomputes(module: nn.Module) -> bool:
    """Whether a part of it is computed again in the backward pass, which should then be one."""
    return any(
        is_checkpointed(part)
        or type(part).__name__ == "CheckpointWrapper"
        or getattr(part, "gradient_checkpointing", False) is True
        for part in module.modules()
    )
