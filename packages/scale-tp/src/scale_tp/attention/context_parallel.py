"""Context parallelism as a switch: attention over a divided sequence, for models as they are.

Inside of the block the operator `scaled_dot_product_attention` has a kernel of its own. A name that is replaced, as
torch's own `context_parallel` replaces `torch.nn.functional.scaled_dot_product_attention`, would be missed by whoever
has imported the function before, and a mode by other threads. A kernel gets each call, whoever makes it: a
model, `nn.MultiheadAttention`, or a checkpoint that computes a block again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import exchange, fingerprint_of
from scale_core.comm.context_parallel_group import note_backward, set_context_parallel_group
from scale_core.comm.group import Group, GroupLike
from scale_core.compat import next_node_number, plain_tensor_types, saved_tensor_hooks, stand_in
from scale_core.hooks.autograd import in_backward
from scale_tp.attention.model_checks import checked_models
from scale_tp.attention.padding import Padding, gather_padding, padding_mask
from scale_tp.attention.ring import ring_attention
from scale_tp.attention.ulysses import ulysses_attention
from scale_tp.parallel_state import context_parallel_group

Attention: TypeAlias = Literal["ring", "ulysses"]

_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
# The keys that an operator made of others is looked up by, with gradients and in inference mode.
_DISPATCH_KEYS = tuple(key for device in ("CPU", "CUDA", "XPU") for key in (f"Autograd{device}", device))
_SIMULATED_KEY = "AutogradPrivateUse1"  # Where `scale_check.simulate` has the kernel of its accelerator
_NUM_COMPARED = 32  # elements of a key and a value


@contextmanager
def context_parallel(process_group: GroupLike = None, *, attention: Attention = "ring") -> Iterator[None]:
    """Makes `scaled_dot_product_attention` attend over the full sequence, divided over the ranks.

    Forward and backward stand in the block, on all ranks of the group. The inputs of the model are cut before, by
    `get_batch_on_this_cp_rank` for models of transformers, by `split_sequence` and `position_ids` for others, and its
    loss is divided by `num_tokens_per_rank`. On one rank the block changes nothing.

    A model that `torch.compile` has compiled runs uncompiled in the block, where torch warns of a hook on all modules.

    Args:
        process_group: The ranks that divide the sequence; None is the context axis of `initialize_model_parallel`, or
            only this process.
        attention: "ring" passes keys and values round (`ring_attention`), "ulysses" exchanges the sequence for heads
            (`ulysses_attention`), which allows dropout.

    Raises:
        ValueError: An attention's result would differ from one process. Reasons are a mask that is not for padding
            keys, dropout with "ring", keys and queries of different lengths (cross attention, a cache), or parts that
            are the same on all ranks. After the forward of a model of transformers without `position_ids`, or with
            sliding windows. At the end of the block, where no attention was computed. In a backward pass behind the
            block, where a checkpoint computes attention again.
        TransferError: Only some of the ranks have a mask.

    Examples:
        >>> import torch
        >>> from scale_tp import context_parallel, split_sequence
        >>> query = torch.randn(2, 4, 16, 8, requires_grad=True)  # [batch, heads, length, size]
        >>> part = split_sequence(query, dim=2)
        >>> with context_parallel():
        ...     output = torch.nn.functional.scaled_dot_product_attention(part, part, part, is_causal=True)
        ...     output.sum().backward()

    See also: [the guide to context parallel](../guides/context-parallel.md).
    """
    ranks = context_parallel_group(process_group)
    if attention not in get_args(Attention):
        expected = " or ".join(map(repr, get_args(Attention)))
        raise ValueError(f"context_parallel: expected attention to be {expected}, got {attention!r}")
    if ranks.size == 1:
        yield
        return
    block = _Block(ranks, attention)
    with ExitStack() as stack:
        stack.callback(_kernel.leave, block)
        _kernel.enter(block)
        stack.enter_context(checked_models(ranks.size))
        stack.enter_context(set_context_parallel_group(ranks))
        # Kernels that compute a whole layer or a compiled graph would not call the operator.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
        if not block.has_attended:
            raise ValueError(
                "context_parallel: no scaled_dot_product_attention was called inside of the block, so no attention saw "
                "more than this rank's part of the sequence: call the model inside, and let it use that function; a "
                'model of transformers does with from_pretrained(..., attn_implementation="sdpa")'
            )
        block.is_complete = True


class _Block:
    """One `with context_parallel(...)`."""

    def __init__(self, ranks: Group, attention: Attention) -> None:
        self.ranks, self.attention = ranks, attention
        self.has_attended = False
        self.has_gone_backward = False
        self.may_compute_again = False  # attention was called in a possible checkpoint
        self.is_complete = False  # left without an error
        self._first_node = next_node_number()
        # The last one, which a model gives to all of its layers, and its version: it may be filled again in place.
        self._mask: tuple[Tensor, int] | None = None
        self._padding: Padding | None = None  # that it means

    def nodes(self) -> range:
        """The numbers that torch has given to the autograd nodes made in the block until now."""
        return range(self._first_node, next_node_number())

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        """Attention over the full sequence, as the operator computes it; checked before anything is sent."""
        self.has_attended = True
        self.has_gone_backward |= in_backward()
        self.may_compute_again |= not torch.is_grad_enabled() or saved_tensor_hooks(False) is not None
        self._check_is_possible(query, key, value, mask, dropout, is_causal, enable_gqa)
        _check_parts_differ(key, value, self.ranks)
        padding = None if mask is None else self._padding_of(mask, query)
        if self.attention == "ring":
            hidden, causal = (None, is_causal) if padding is None else padding
            output = ring_attention(
                query, key, value, self.ranks, is_causal=causal, scale=scale, key_padding_mask=hidden
            )
        else:
            seen = None if padding is None else padding_mask(padding.hidden, is_causal=padding.is_causal)
            full_attention = partial(_OPERATOR.decompose, attn_mask=seen, is_causal=is_causal, scale=scale)
            output = ulysses_attention(
                query, key, value, self.ranks, attention=full_attention, order="zigzag", dropout_p=dropout
            )
        if output.requires_grad:
            output.register_hook(self._note_backward)
        return output

    def _padding_of(self, mask: Tensor, query: Tensor) -> Padding:
        mask_padding = self._mask
        is_known = mask_padding is not None and mask_padding[0] is mask and mask_padding[1] == mask._version
        if self._padding is None or not is_known or len(query) != len(self._padding.hidden):
            self._padding = gather_padding(mask, query.shape[0], query.shape[2], self.ranks)
            self._mask = None if mask.is_inference() else (mask, mask._version)  # The former count no versions.
        return self._padding

    def _note_backward(self, gradient: Tensor) -> None:
        self.has_gone_backward = True
        note_backward(self.ranks)

    def _check_is_possible(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        is_causal: bool,
        enable_gqa: bool,
    ) -> None:
        prefix = "scaled_dot_product_attention inside of context_parallel: expected "
        kinds = {type(tensor) for tensor in (query, key, value)} - {Tensor, nn.Parameter}
        if kinds and (kinds := kinds - plain_tensor_types()):  # Those of a simulation are plain as well.
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(
                f"{prefix}plain tensors, got {names}: give local tensors to the model, and compile it, if at all, "
                "before the block, in which it runs uncompiled"
            )
        if mask is not None and (is_causal or mask.requires_grad):
            got = "is_causal=True as well" if is_causal else "one that requires a gradient"
            raise ValueError(f"{prefix}an attn_mask that marks padding alone, got {got}: leave one of them out")
        if dropout and self.attention == "ring":
            raise ValueError(
                f'{prefix}dropout_p=0 with attention="ring", got {dropout:g}: set the dropout of the attention to 0, '
                "such as attention_dropout or attn_pdrop in a config of transformers, or pass "
                'attention="ulysses"'
            )
        if query.dim() != 4 or key.dim() != 4:
            return  # Refused by the attention itself.
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{prefix}as many keys as queries, got {query.shape[2]} queries and {key.shape[2]} keys: cross "
                "attention and attention to a cache are not divided; call generate() outside of the block, with full "
                "sequences"
            )
        if query.shape[2] < 2:
            raise ValueError(
                f"{prefix}2 positions or more on each rank, got {query.shape[2]}: take sequences of "
                f"{2 * self.ranks.size} positions or more"
            )
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"{prefix}as many key-value heads as heads, got {query.shape[1]} heads and {key.shape[1]} key-value "
                "heads: pass enable_gqa=True where heads share them"
            )


class _Kernel:
    """The operator's kernel: while a block is open, and as long behind it as a checkpoint may compute again."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._library: torch.library.Library | None = None
        self._open_nodes: list[range] = []  # of blocks that were left before their backward pass

    def enter(self, block: _Block) -> None:
        self._blocks.append(block)
        if self._library is None:
            self._library = torch.library.Library("aten", "IMPL")
            for key in _DISPATCH_KEYS:
                self._library.impl("scaled_dot_product_attention", self._compute, key)
            if stand_in() is not None:
                with warnings.catch_warnings():  # torch warns of a kernel that takes the place of another one.
                    warnings.simplefilter("ignore", UserWarning)
                    self._library.impl("scaled_dot_product_attention", self._compute, _SIMULATED_KEY)

    def leave(self, block: _Block) -> None:
        self._blocks.remove(block)
        if block.has_gone_backward:
            self._open_nodes.clear()
        elif block.is_complete and torch.is_grad_enabled() and block.may_compute_again and block.nodes():
            self._open_nodes.append(block.nodes())
        if not self._blocks and not self._open_nodes and self._library is not None:
            self._library._destroy()
            self._library = None

    def _compute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if self._blocks:
            return self._blocks[-1].attend(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if self._open_nodes and in_backward() and self._is_of_a_block(torch._C._current_autograd_node()):
            raise ValueError(
                "a checkpoint computed attention again in a backward pass after the context_parallel block had ended, "
                "where it sees only this rank's part of the sequence: call loss.backward() inside the block"
            )
        output: Tensor = _OPERATOR.decompose(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return output

    def _is_of_a_block(self, node: Any) -> bool:
        """Whether the node that goes backward, which a checkpoint computes again for, was made in a block."""
        return node is None or any(node._sequence_nr() in nodes for nodes in self._open_nodes)


_kernel = _Kernel()


class _PartsCheck:
    """Whether the check has passed that the ranks of a group have different parts."""

    passed = False


def _check_parts_differ(key: Tensor, value: Tensor, ranks: Group) -> None:
    """Compares some elements between the ranks, in the first attention of a group: nobody has cut equal parts."""
    if ranks.process_group is None or ranks.backend == "fake" or ranks.state.get_or_create(_PartsCheck).passed:
        return
    samples = [_sample(tensor) for tensor in (key, value)]
    are_constant = all(len(set(sample)) < 2 for sample in samples)
    rows = exchange([fingerprint_of(*map(str, samples)), int(are_constant)], ranks)
    if len({row[0] for row in rows}) == 1 and not are_constant:
        raise ValueError(
            f"context_parallel: all {ranks.size} ranks have the same keys and values, {list(key.shape)}, so each seems "
            "to have the full sequence instead of its part: cut the batch before, with "
            "scale_tp.get_batch_on_this_cp_rank(batch) or scale_tp.split_sequence(tokens)"
        )
    ranks.state.get_or_create(_PartsCheck).passed = True


def _sample(tensor: Tensor) -> list[float]:
    flat = tensor.detach().reshape(-1)
    sample: list[float] = flat[:: max(1, flat.numel() // _NUM_COMPARED)].float().tolist()
    return sample
