"""Linear layers whose weight is divided between ranks, by columns of the product or by its rows.

A pair of them needs one sum: the first is divided by its outputs, so each rank computes some features; what comes
next works feature by feature; the second is divided by its inputs, so each rank has a summand of the result.

                  column                       row
    input  -->  [ W0 ] --> features of rank 0 --> [ V0 ] --\
    (on all)    [ W1 ] --> features of rank 1 --> [ V1 ] ---+--> sum (on all)

In a world of one rank both are `torch.nn.Linear`, to the bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.comm.group import GroupLike
from scale_tp.async_tp.lazy_input import DeferredInput
from scale_tp.comm import gather_features, scatter_features
from scale_tp.layers.base import ParallelModule, ParamSharding, rank_repr, resolve_split
from scale_tp.layers.linear_ops import (
    check_in_region,
    check_num_features,
    check_parallel_input,
    column_parallel_linear,
    row_parallel_linear,
    to_region,
)
from scale_tp.layers.options import LayerOptions
from scale_tp.parallel_state import tensor_parallel_group
from scale_tp.split import check_size
from scale_tp.weight_init import Initializer


class _ParallelLinear(ParallelModule):
    """The common part of both layers: a weight [out, in] that is divided along the dimension `_dim`, and a bias."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    master_weight: Tensor | None
    _dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        init_method: Initializer,
        stride: int,
        keep_full: bool,
        *,
        options: LayerOptions | None,
        process_group: GroupLike,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        options = options or LayerOptions()
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        ranks, shape = tensor_parallel_group(process_group), (out_features, in_features)
        super().__init__(ranks)
        self.in_features, self.out_features, self.init_method = in_features, out_features, init_method
        option = "out_features" if self._dim == 0 else "in_features"
        self.split = resolve_split(option, shape[self._dim], ranks, stride, options.split)
        self.sequence_parallel, self.sequence_dim = options.sequence_parallel, options.sequence_dim
        self.overlap_pieces = options.overlap_pieces
        self.add_parameter("weight", ParamSharding(shape, self._dim, self.split), device=device, dtype=dtype)
        if bias:
            sharding = ParamSharding((out_features,), 0, self.split if self._dim == 0 else None)
            self.add_parameter("bias", sharding, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)
        self.master_weight = self._init_parameters(keep_full)

    def reset_parameters(self) -> None:
        """Gives the parameters their initial values; on all ranks from the same random numbers."""
        self._init_parameters(False)

    def get_master_weight(self) -> Tensor:
        """Returns the full weight [out_features, in_features]; all ranks call it together."""
        return self.full_parameter("weight")

    def _init_parameters(self, keep_full: bool) -> Tensor | None:
        full = self.init_parameter("weight", self.init_method, keep_full=keep_full)
        if self.bias is not None:
            self.init_parameter("bias", nn.init.zeros_)
        return full

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class ColumnParallelLinear(_ParallelLinear):
    """`y = x W^T + b`; each rank computes some of the output features.

    Args:
        in_features: Size of the input's last dimension.
        out_features: Size of the full output's last dimension; it need not divide by the ranks.
        bias: Whether there is a bias; it is divided as the output is, and begins as zeros.
        gather_output: Whether every rank gets the full output. Otherwise it gets its own features, for a
            `RowParallelLinear` with `input_is_parallel=True`.
        init_method: Fills the full weight in place; each rank keeps its shard of the same values. A function that
            does nothing leaves the memory unchanged, for a checkpoint.
        stride: The number of equal matrices stacked in this one, each divided by itself.
        keep_master_weight_for_test: Keep the full weight, as it began, in `master_weight`.
        process_group: The ranks that divide the layer: a `ProcessGroup` or a `DeviceMesh` axis. None is the model axis
            of `initialize_model_parallel`, or only this process.
        device: Where the parameters are; on "meta" they get no values until `reset_parameters()`.
        dtype: Of the parameters.
        options: Sequences and features that are divided, and overlap: see `LayerOptions`.

    Attributes:
        weight: [out features of this rank, in_features]
        bias: [out features of this rank], or None.
        split: Which output features each rank has.

    Raises:
        ValueError: A size or option that makes no sense, or a group that is not known.

    Examples:
        >>> import torch
        >>> from scale_tp import ColumnParallelLinear
        >>> layer = ColumnParallelLinear(8, 21, gather_output=False)
        >>> layer(torch.randn(2, 8)).shape  # this rank's features: on one process, all
        torch.Size([2, 21])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    _dim = 0

    @checked_arguments(own="init_method")
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Initializer = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        *,
        process_group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        options: LayerOptions | None = None,
    ) -> None:
        super().__init__(
            *(in_features, out_features, bias, init_method, stride, keep_master_weight_for_test),
            options=options,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )
        self.gather_output = gather_output
        self.input_is_inside = options is not None and options.input_is_inside
        self._checked_input = False

    @property
    def output_size_per_partition(self) -> int:
        """Output features of this rank."""
        return self.split.sizes[self.group.rank]

    def forward(self, input_: Tensor | DeferredInput) -> Tensor:
        """Computes this rank's output features, or all of them.

        Args:
            input_: [..., in_features]: the same on all ranks or, with `sequence_parallel`, this rank's shard. With
                `input_is_inside`, the input of the divided region.

        Returns:
            [..., out_features], or [..., out features of this rank] without `gather_output`; always of the full
            sequence.

        Raises:
            TypeError: The input is not a tensor.
            ValueError: The input has a different last dimension, or it is not inside the divided region where it
                should be.
        """
        check_num_features("ColumnParallelLinear", input_, self.in_features)
        inside = input_
        if isinstance(input_, Tensor):
            if not self.input_is_inside:
                dim = self.sequence_dim if self.sequence_parallel else None
                inside = to_region(input_, self.group, dim, self.overlap_pieces)
            elif not self._checked_input:
                self._checked_input = check_in_region("ColumnParallelLinear", input_, self.group)
        output = column_parallel_linear(inside, self.weight, self.bias, self.group, self.split, reader=self)
        return gather_features(output, self.group, self.split) if self.gather_output else output

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gather_output={self.gather_output}{rank_repr(self.group)}"


class RowParallelLinear(_ParallelLinear):
    """`y = x W^T + b`, to which each rank adds what some of the input features give.

    Arguments that are not listed are the same as in `ColumnParallelLinear`.

    Args:
        in_features: Size of the full input's last dimension; it need not divide by the ranks.
        out_features: Size of the output's last dimension.
        bias: Whether there is a bias; every rank has all of it, and it is added once, to the sum.
        input_is_parallel: Whether the input has only this rank's features, for example from a `ColumnParallelLinear`
            without `gather_output`. Otherwise it is the same on all ranks, and each takes its shard.
        stride: As in `ColumnParallelLinear`, of the input features.
        options: As in `ColumnParallelLinear`.

    Attributes:
        weight: [out_features, in features of this rank]
        bias: [out_features], or None.
        split: Which input features each rank has.

    Raises:
        ValueError: A size or option that makes no sense, or a group that is not known.

    Examples:
        >>> import torch
        >>> from scale_tp import RowParallelLinear
        >>> layer = RowParallelLinear(21, 8, input_is_parallel=True)
        >>> layer(torch.randn(2, 21)).shape  # the sum over the ranks
        torch.Size([2, 8])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    _dim = 1

    @checked_arguments(own="init_method")
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Initializer = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        *,
        process_group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        options: LayerOptions | None = None,
    ) -> None:
        if options is not None:
            options.refuse("RowParallelLinear", "input_is_inside")
        super().__init__(
            *(in_features, out_features, bias, init_method, stride, keep_master_weight_for_test),
            options=options,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )
        if self.split.has_copies:
            raise ValueError(
                f"RowParallelLinear: expected a split that gives each input feature to one rank, got {self.split}: "
                "the products of copies would be added twice"
            )
        self.input_is_parallel = input_is_parallel
        self._checked_width: int | None = None

    @property
    def input_size_per_partition(self) -> int:
        """Input features of this rank."""
        return self.split.sizes[self.group.rank]

    def forward(self, input_: Tensor) -> Tensor:
        """Computes this rank's summand, and adds all of them.

        Args:
            input_: [..., in features of this rank] with `input_is_parallel`, or [..., in_features], on all ranks.

        Returns:
            [..., out_features], the same on all ranks or, with `sequence_parallel`, this rank's part of the sequence.

        Raises:
            ValueError: The input has a different last dimension on this rank or a different rank.
        """
        if self.group.size == 1:
            check_num_features("RowParallelLinear", input_, self.in_features)
            return F.linear(input_, self.weight, self.bias)
        if not self.input_is_parallel:
            check_num_features("RowParallelLinear", input_, self.in_features)
            input_ = scatter_features(input_, self.group, self.split)
        elif getattr(input_, "shape", ())[-1:] != (self._checked_width,):
            self._checked_width = check_parallel_input(
                "RowParallelLinear",
                input_,
                self.group,
                self.split,
                self._checked_width,
                fix="what comes before must be divided in the same way, as by ColumnParallelLinear(..., "
                f"{self.in_features}, gather_output=False) in the same group; or pass the full input to a layer with "
                "input_is_parallel=False",
            )
        return row_parallel_linear(
            input_,
            self.weight,
            self.bias,
            self.group,
            sequence_dim=self.sequence_dim if self.sequence_parallel else None,
            overlap_pieces=self.overlap_pieces,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, input_is_parallel={self.input_is_parallel}{rank_repr(self.group)}"
