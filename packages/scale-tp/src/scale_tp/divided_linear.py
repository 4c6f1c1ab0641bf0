"""Linear layers that exist already, divided between ranks: torch's, and the transposed ones of transformers."""

from __future__ import annotations

from torch import Tensor, nn

from scale_tp.divided import Divided
from scale_tp.divided_randomness import DividedRandomness
from scale_tp.entrance import SEQUENCE_DIM, Entrance
from scale_tp.features import gather_features, scatter_features
from scale_tp.fitting import check_features, check_parts
from scale_tp.linear_regions import column_product, product, row_total
from scale_tp.split_sizes import Split


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
