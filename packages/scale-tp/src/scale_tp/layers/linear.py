"""Linear layers whose weight is divided between ranks, by columns of the product or by its rows.

A pair of them needs one sum: the first is divided by its outputs, so each rank computes some features alone; what comes
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

from scale_core.comm.group import GroupLike
from scale_tp.async_tp.lazy_input import Arrival
from scale_tp.autograd_regions import check_inside
from scale_tp.layers.base import ParallelModule, Placement, checked_split, ranks_described
from scale_tp.layers.linear_ops import check_features, check_overlap, check_parts, column_product, enter, row_total
from scale_tp.mappings import gather_features, scatter_features
from scale_tp.parallel_state import layer_group
from scale_tp.split import Split, check_size
from scale_tp.weight_init import Initialiser


class ColumnParallelLinear(ParallelModule):
    """`y = x W^T + b`, of which each rank computes some of the output features.

    Args:
        in_features: Size of the input's last dimension.
        out_features: Size of the whole output's last dimension; it need not divide by the ranks.
        bias: Whether there is a bias; it is divided as the output is, and begins as zeros.
        gather_output: Whether every rank gets the whole output. Otherwise it gets its own features, for a
            `RowParallelLinear` with `input_is_parallel=True`.
        init_method: What fills the whole weight in place; each rank keeps its part of the same values. A function that
            does nothing leaves the memory as it is, for a checkpoint.
        stride: How many equal matrices are stacked in this one, each of which is divided by itself.
        keep_master_weight_for_test: Keep the whole weight, as it began, in `master_weight`.
        group: The ranks that divide the layer: a process group or a `DeviceMesh` of one dimension; None is the model
            axis of `initialize_model_parallel`, or this process alone.
        device: Where the parameters are; on "meta" they get no values until `reset_parameters()`.
        dtype: Of the parameters.
        sequence_parallel: Whether the input is this rank's part of the sequence, of which all parts are gathered.
        sequence_dim: The dimension of the sequence then.
        split: Which output features each rank has, in place of `stride`. Ranks may have copies of each other's
            features, as of key-value heads; the gradients of copies are summed.
        overlap_pieces: Into how many pieces to cut the other ranks' parts of the sequence, each of which is multiplied
            while the next ones are on their way; in the backward pass the gradient of the input travels while that of
            the weight is computed, which without `sequence_parallel` is all there is. None does not overlap.
        input_is_inside: Whether the input has been brought into the divided region already, as by
            `copy_to_model_parallel_region`, for several layers together. Not with `sequence_parallel` or
            `overlap_pieces`, which say how it is brought there.

    Attributes:
        weight: [out features of this rank, in_features]
        bias: [out features of this rank], or None.
        split: Which output features each rank has.

    Raises:
        ValueError: A size or option that makes no sense, or a group that is not known.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    master_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Initialiser = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        *,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        split: Split | None = None,
        overlap_pieces: int | None = None,
        input_is_inside: bool = False,
    ) -> None:
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        check_overlap(overlap_pieces)
        if input_is_inside and (sequence_parallel or overlap_pieces is not None):
            raise ValueError(
                "ColumnParallelLinear: input_is_inside=True says that the input has been brought into the divided "
                f"region already, got sequence_parallel={sequence_parallel} and overlap_pieces={overlap_pieces} beside "
                "it: leave one or the other out"
            )
        ranks = layer_group(group)
        chosen = checked_split("out_features", out_features, ranks, stride, split)
        super().__init__(ranks)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.split = gather_output, chosen
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.overlap_pieces, self.input_is_inside = overlap_pieces, input_is_inside
        self.init_method = init_method
        self.place("weight", Placement((out_features, in_features), 0, chosen), device=device, dtype=dtype)
        if bias:
            self.place("bias", Placement((out_features,), 0, chosen), device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)
        self.master_weight = self._fill(keep_master_weight_for_test)

    @property
    def output_size_per_partition(self) -> int:
        """How many output features this rank has."""
        return self.split.sizes[self.group.rank]

    def reset_parameters(self) -> None:
        """Gives the parameters the values that they begin with; on all ranks from the same random numbers."""
        self._fill(False)

    def get_master_weight(self) -> Tensor:
        """Returns the whole weight [out_features, in_features]; all ranks call it together."""
        return self.whole_parameter("weight")

    def forward(self, input_: Tensor | Arrival) -> Tensor:
        """Computes this rank's output features, or all of them.

        Args:
            input_: [..., in_features]: the same on all ranks or, with `sequence_parallel`, this rank's part. With
                `input_is_inside`, what has been brought into the divided region, or is on its way.

        Returns:
            [..., out_features], or [..., out features of this rank] without `gather_output`; always of the whole
            sequence.

        Raises:
            TypeError: The input is no tensor.
            ValueError: The input has another last dimension, or is not inside where it should be.
        """
        check_features("ColumnParallelLinear", input_, self.in_features)
        sequence_dim = self.sequence_dim if self.sequence_parallel else None
        inside = input_
        if isinstance(input_, Tensor):
            if self.input_is_inside:
                check_inside("ColumnParallelLinear", input_, self.group)
            else:
                inside = enter(input_, self.group, sequence_dim, self.overlap_pieces)
        output = column_product(inside, self.weight, self.bias, self.group, self.split, reader=self)
        return gather_features(output, self.group, self.split) if self.gather_output else output

    def extra_repr(self) -> str:
        """What stands in the layer's line of a printed model."""
        described = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{described}, gather_output={self.gather_output}{ranks_described(self.group)}"

    def _fill(self, keep: bool) -> Tensor | None:
        whole = self.initialise("weight", self.init_method, keep_whole=keep)
        if self.bias is not None:
            self.initialise("bias", nn.init.zeros_)
        return whole


class RowParallelLinear(ParallelModule):
    """`y = x W^T + b`, to which each rank adds what some of the input features give.

    Args:
        in_features: Size of the whole input's last dimension; it need not divide by the ranks.
        out_features: Size of the output's last dimension.
        bias: Whether there is a bias; every rank has all of it, and it is added once, to the sum.
        input_is_parallel: Whether the input is this rank's features alone, as of a `ColumnParallelLinear` without
            `gather_output`. Otherwise it is the same on all ranks, and each takes its part.
        init_method: As in `ColumnParallelLinear`.
        stride: As in `ColumnParallelLinear`, of the input features.
        keep_master_weight_for_test: As in `ColumnParallelLinear`.
        group: As in `ColumnParallelLinear`.
        device: As in `ColumnParallelLinear`.
        dtype: As in `ColumnParallelLinear`.
        sequence_parallel: Whether the output is this rank's part of the sequence alone.
        sequence_dim: The dimension of the sequence then.
        split: Which input features each rank has, in place of `stride`.
        overlap_pieces: Into how many pieces to cut each rank's part of the sequence, or the rows without
            `sequence_parallel`: the sum of one travels while the next is multiplied. None does not overlap.

    Attributes:
        weight: [out_features, in features of this rank]
        bias: [out_features], or None.
        split: Which input features each rank has.

    Raises:
        ValueError: A size or option that makes no sense, or a group that is not known.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    master_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Initialiser = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        *,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        split: Split | None = None,
        overlap_pieces: int | None = None,
    ) -> None:
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        check_overlap(overlap_pieces)
        ranks = layer_group(group)
        chosen = checked_split("in_features", in_features, ranks, stride, split)
        if sum(chosen.sizes) != chosen.total:
            raise ValueError(
                f"RowParallelLinear: expected a split that gives each input feature to one rank, got {chosen}: "
                "the products of copies would be added twice"
            )
        super().__init__(ranks)
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel, self.split = input_is_parallel, chosen
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.overlap_pieces = overlap_pieces
        self.init_method = init_method
        self._fitting_width: int | None = None
        self.place("weight", Placement((out_features, in_features), 1, chosen), device=device, dtype=dtype)
        if bias:
            self.place("bias", Placement((out_features,)), device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)
        self.master_weight = self._fill(keep_master_weight_for_test)

    @property
    def input_size_per_partition(self) -> int:
        """How many input features this rank has."""
        return self.split.sizes[self.group.rank]

    def reset_parameters(self) -> None:
        """Gives the parameters the values that they begin with; on all ranks from the same random numbers."""
        self._fill(False)

    def get_master_weight(self) -> Tensor:
        """Returns the whole weight [out_features, in_features]; all ranks call it together."""
        return self.whole_parameter("weight")

    def forward(self, input_: Tensor) -> Tensor:
        """Computes this rank's summand, and adds all of them.

        Args:
            input_: [..., in features of this rank] with `input_is_parallel`, or [..., in_features], on all ranks.

        Returns:
            [..., out_features], the same on all ranks or, with `sequence_parallel`, this rank's part of the sequence.

        Raises:
            ValueError: The input has another last dimension, on this rank or on another one.
        """
        if self.group.size == 1:
            check_features("RowParallelLinear", input_, self.in_features)
            return F.linear(input_, self.weight, self.bias)
        return row_total(
            self._own_features(input_),
            self.weight,
            self.bias,
            self.group,
            sequence_dim=self.sequence_dim if self.sequence_parallel else None,
            overlap_pieces=self.overlap_pieces,
        )

    def extra_repr(self) -> str:
        """What stands in the layer's line of a printed model."""
        described = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{described}, input_is_parallel={self.input_is_parallel}{ranks_described(self.group)}"

    def _own_features(self, input_: Tensor) -> Tensor:
        if self.input_is_parallel:
            self._fitting_width = check_parts(
                "RowParallelLinear",
                input_,
                self.group,
                self.split,
                self._fitting_width,
                mend="what comes before must be divided alike, as by ColumnParallelLinear(..., "
                f"{self.in_features}, gather_output=False) in the same group; or pass the whole input to a layer with "
                "input_is_parallel=False",
            )
            return input_
        check_features("RowParallelLinear", input_, self.in_features)
        return scatter_features(input_, self.group, self.split)

    def _fill(self, keep: bool) -> Tensor | None:
        whole = self.initialise("weight", self.init_method, keep_whole=keep)
        if self.bias is not None:
            self.initialise("bias", nn.init.zeros_)
        return whole
