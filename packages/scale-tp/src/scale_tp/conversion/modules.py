"""Linear layers that exist already, divided between ranks: torch's, and the transposed ones of transformers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from scale_tp.layers.embedding import check_words, local_padding, local_words, unknown_word
from scale_tp.layers.input_region import SEQUENCE_DIM, Entrance
from scale_tp.layers.linear_ops import check_features, check_parts, column_product, product, row_total
from scale_tp.layers.module_swap import Divided
from scale_tp.mappings import (
    gather_features,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_features,
)
from scale_tp.random import DividedRandomness
from scale_tp.split import Range, Split


class Columns(Divided):
    """A linear layer of whose outputs each rank computes a part."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    entrance: Entrance
    split: Split
    gathers: bool
    randomness: DividedRandomness | None
    path: str

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., outputs of this rank], or all outputs, for [..., inputs]."""
        self.check_weight()
        check_features(
            f"'{self.path}'",
            input,
            _num_inputs(self),
            mend="a layer before it of the style 'colwise' hands on a part of its outputs: let this one be 'rowwise', "
            "or that one 'colwise_gather_output'",
        )
        inside, transposed = self.entrance.enter(input, self), is_transposed(self)
        output = column_product(
            inside, self.weight, self.bias, self.group, self.split, reader=self, transposed=transposed
        )
        if self.randomness is not None:
            self.randomness.enter_if_wanted()
        if not self.gathers:
            return output
        return gather_features(output, self.group, self.split)


class Rows(Divided):
    """A linear layer of whose inputs each rank has a part; the results are summed."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    split: Split
    splits_input: bool
    sums: bool
    sequence_parallel: bool
    path: str
    overlap_pieces: int | None = None
    randomness: DividedRandomness | None
    fitting_width: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., outputs] for [..., inputs of this rank], or all inputs."""
        self.check_weight()
        if self.randomness is not None:
            self.randomness.leave()
        if self.splits_input:
            check_features(f"'{self.path}'", input, _num_inputs(self))
            input = scatter_features(input, self.group, self.split)
        elif not _has_features(input, self.fitting_width):
            self.fitting_width = check_parts(
                f"'{self.path}'",
                input,
                self.group,
                self.split,
                self.fitting_width,
                mend="the layer before it is divided in another way, or hands on all of its outputs, where the style "
                "is 'rowwise_split_input'",
            )
        bias, transposed = self.bias, is_transposed(self)
        if not self.sums:  # Of the summands, one brings the bias; its gradient is the same on all ranks.
            output = product(input, self.weight, None, transposed=transposed)
            return output if bias is None else output + (bias - bias.detach() if self.group.rank else bias)
        return row_total(
            input,
            self.weight,
            bias,
            self.group,
            sequence_dim=SEQUENCE_DIM if self.sequence_parallel else None,
            overlap_pieces=self.overlap_pieces,
            transposed=transposed,
        )


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer with torch's own forward, or the transposed one of transformers."""
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is the linear layer of transformers whose weight is [inputs, outputs]."""
    own = getattr(module, "own_class", type(module))
    return bool(own.__name__ == "Conv1D" and hasattr(module, "nf"))


def _has_features(given: object, expected: int | None) -> bool:
    """Whether this is a tensor of so many features."""
    return isinstance(given, Tensor) and given.shape[-1:] == (expected,)


def _num_inputs(module: Divided) -> int:
    """How many features the whole layer reads."""
    return module.placements["weight"].shape[1 - outputs_dim(module)]


def outputs_dim(module: nn.Module) -> int:
    """The dimension of the outputs in a linear layer's weight; the other one is that of the inputs."""
    return 1 if is_transposed(module) else 0


class Words(Divided):
    """An embedding of whose words each rank has a part; the others' words are zeros, and the results are summed."""

    weight: nn.Parameter
    padding_idx: int | None
    split: Split
    path: str

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., width] for [...] integers."""
        self.check_weight()
        check_words(f"'{self.path}'", input)
        try:
            found = self._found(input)
        except IndexError as error:  # On a CPU; elsewhere it would cost a synchronisation to know.
            raise unknown_word(f"'{self.path}'", input, self.split.total) from error
        return reduce_from_model_parallel_region(found, self.group)

    def _found(self, input: Tensor) -> Tensor:
        """The words that this rank has, and zeros for the others."""
        (own,) = self.split.ranges[self.group.rank]
        local, others, _ = local_words(input, own, self.split.total)
        if own[0] == own[1]:
            nothing = F.embedding(local, self.weight.new_zeros(1, self.weight.shape[1]))
            return nothing + self.weight.sum()
        return self._own_words(local, own).masked_fill(others[..., None], 0)

    def _own_words(self, local: Tensor, own: Range) -> Tensor:
        """What the module's own forward gives for words of this rank, counted from its first one."""
        padding = self.padding_idx
        self.padding_idx = local_padding(padding, own)
        try:
            found: Tensor = super().forward(local)
        finally:
            self.padding_idx = padding
        return found


class Width(Divided):
    """An embedding of whose width each rank has a part; the parts are put together."""

    split: Split
    path: str

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., width] for [...] integers."""
        self.check_weight()
        check_words(f"'{self.path}'", input)
        try:
            found = super().forward(input)
        except IndexError as error:
            raise unknown_word(f"'{self.path}'", input, self.placements["weight"].shape[0]) from error
        return gather_from_model_parallel_region(found, self.group, sizes=self.split.sizes)


def is_embedding(module: nn.Module) -> bool:
    """Whether a module is an embedding; one with a forward of its own may scale what it finds."""
    return isinstance(module, nn.Embedding)
