"""Forwards of linear layers and embeddings of torch and transformers that were divided in place."""

from __future__ import annotations

from torch import Tensor, nn

from scale_tp.comm import gather_features, gather_from_region, reduce_from_region, scatter_features
from scale_tp.layers.embedding import local_padding_idx, look_up, look_up_local
from scale_tp.layers.linear_ops import (
    SEQUENCE_DIM,
    SharedInput,
    check_num_features,
    check_parallel_input,
    column_parallel_linear,
    linear,
    row_parallel_linear,
)
from scale_tp.layers.module_swap import ShardedMixin
from scale_tp.random import RegionRNG
from scale_tp.split import Range


class ColumnParallelMixin(ShardedMixin):
    """A linear layer of whose outputs each rank computes a part."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    shared_input: SharedInput
    gather_output: bool
    region_rng: RegionRNG | None
    path: str
    transposed: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., outputs of this rank], or all outputs, for [..., inputs]."""
        if self.weight.shape[self.weight_dim] != self.weight_size:
            raise self.weight_error()
        num_inputs = self.shardings["weight"].shape[0 if self.transposed else 1]
        check_num_features(f"'{self.path}'", input, num_inputs, fix=_COLUMN_FIX)
        inside = self.shared_input.to_region(input, self)
        output = column_parallel_linear(
            inside, self.weight, self.bias, self.group, self.split, reader=self, transposed=self.transposed
        )
        if self.region_rng is not None:
            self.region_rng.enter_if_needed()
        return gather_features(output, self.group, self.split) if self.gather_output else output


class RowParallelMixin(ShardedMixin):
    """A linear layer of whose inputs each rank has a part; the results are summed."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    split_input: bool
    reduce_output: bool
    sequence_parallel: bool
    path: str
    overlap_pieces: int | None = None
    region_rng: RegionRNG | None
    transposed: bool = False
    checked_width: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., outputs] for [..., inputs of this rank], or all inputs."""
        if self.weight.shape[self.weight_dim] != self.weight_size:
            raise self.weight_error()
        if self.region_rng is not None:
            self.region_rng.exit()
        if self.split_input:
            check_num_features(f"'{self.path}'", input, self.split.total)
            input = scatter_features(input, self.group, self.split)
        elif getattr(input, "shape", ())[-1:] != (self.checked_width,):
            self.checked_width = check_parallel_input(
                f"'{self.path}'", input, self.group, self.split, self.checked_width, fix=_ROW_FIX
            )
        bias = self.bias
        if not self.reduce_output:  # One of the summands brings the bias; its gradient is the same on all ranks.
            output = linear(input, self.weight, None, transposed=self.transposed)
            return output if bias is None else output + (bias - bias.detach() if self.group.rank else bias)
        return row_parallel_linear(
            input,
            self.weight,
            bias,
            self.group,
            sequence_dim=SEQUENCE_DIM if self.sequence_parallel else None,
            overlap_pieces=self.overlap_pieces,
            transposed=self.transposed,
        )


_COLUMN_FIX = (
    "a layer before it of the style 'colwise' hands on a part of its outputs: let this one be 'rowwise', or that one "
    "'colwise_gather_output'"
)
_ROW_FIX = (
    "the layer before it is divided in another way, or hands on all of its outputs, where the style is "
    "'rowwise_split_input'"
)


class VocabParallelMixin(ShardedMixin):
    """An embedding of whose rows each rank has a part; other ranks' tokens give zeros, and the results are summed."""

    weight: nn.Parameter
    padding_idx: int | None
    path: str

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., width] for [...] integers."""
        if self.weight.shape[self.weight_dim] != self.weight_size:
            raise self.weight_error()
        (local_range,) = self.split.ranges[self.group.rank]
        rows = look_up_local(
            f"'{self.path}'",
            input,
            self.weight,
            local_range,
            self.split.total,
            lambda rows: self._own_forward(rows, local_range),
        )
        return reduce_from_region(rows, self.group)

    def _own_forward(self, rows: Tensor, own: Range) -> Tensor:
        """The module's own forward, with its padding index among this rank's rows."""
        padding = self.padding_idx
        self.padding_idx = local_padding_idx(padding, own)
        try:
            logits: Tensor = super().forward(rows)
        finally:
            self.padding_idx = padding
        return logits


class WidthParallelMixin(ShardedMixin):
    """An embedding of whose width each rank has a part; the parts are gathered."""

    weight: nn.Parameter
    path: str

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., width] for [...] integers."""
        if self.weight.shape[self.weight_dim] != self.weight_size:
            raise self.weight_error()
        columns = look_up(f"'{self.path}'", input, self.shardings["weight"].shape[0], super().forward)
        return gather_from_region(columns, self.group, -1, self.split.sizes)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer with torch's own forward, or the transposed one of transformers."""
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is the linear layer of transformers whose weight is [inputs, outputs] (`Conv1D`)."""
    module_class = getattr(module, "original_class", type(module))
    return bool(module_class.__name__ == "Conv1D" and hasattr(module, "nf"))


def output_dim(module: nn.Module) -> int:
    """The dimension of the outputs in a linear layer's weight; the other one is for the inputs."""
    return 1 if is_transposed(module) else 0


def is_embedding(module: nn.Module) -> bool:
    """Whether a module is an embedding; one with a forward of its own may scale its result."""
    return isinstance(module, nn.Embedding)
