"""`LayerOptions`: what the layers take beyond the arguments of Megatron, FairScale and torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from scale_core.arguments import checked_arguments
from scale_tp.split import Split, check_size


@checked_arguments(own="split overlap_pieces")
@dataclass(frozen=True)
class LayerOptions:
    """How a divided layer divides sequences and features, and overlaps communication.

        >>> from scale_tp import LayerOptions, RowParallelLinear
        >>> layer = RowParallelLinear(8, 4, options=LayerOptions(sequence_parallel=True, overlap_pieces=2))

    Attributes:
        sequence_parallel: Whether the input of a `ColumnParallelLinear` is this rank's part of the sequence, which the
            layer gathers. For a `RowParallelLinear` or a `VocabParallelEmbedding`, whether the output is such a part.
        sequence_dim: The dimension of the sequence then.
        split: Which output features of a `ColumnParallelLinear`, or input features of a `RowParallelLinear`, each rank
            has, in place of `stride`. Ranks may have copies of the same output features, for example of key-value
            heads. The gradients of copies are summed.
        overlap_pieces: In a `ColumnParallelLinear`, the number of pieces of other ranks' parts of the sequence. Each
            piece is multiplied while the next ones are sent. In the backward pass, the gradient of the input is sent
            while the gradient of the weight is computed; without `sequence_parallel` only this overlaps. In a
            `RowParallelLinear`, the number of pieces of each rank's part of the sequence, or of the rows without
            `sequence_parallel`. The sum of one piece is sent while the next is multiplied. None does not overlap.
        input_is_inside: Whether the input of a `ColumnParallelLinear` has been brought into the divided region already,
            as by `copy_to_tensor_model_parallel_region`, for several layers together. Not with `sequence_parallel` or
            `overlap_pieces`, which say how it is brought there.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: Fields that contradict each other, or a number of pieces below 1.

    See also: [the guide to tensor parallelism](../guides/tensor-parallel.md).
    """

    sequence_parallel: bool = False
    sequence_dim: int = -2
    split: Split | None = None
    overlap_pieces: int | None = None
    input_is_inside: bool = False

    def __post_init__(self) -> None:
        if self.input_is_inside and (self.sequence_parallel or self.overlap_pieces is not None):
            raise ValueError(
                "LayerOptions: input_is_inside=True says that the input is in the divided region already, got "
                f"sequence_parallel={self.sequence_parallel} and overlap_pieces={self.overlap_pieces} as well. Leave "
                "these out, because they bring the input there"
            )
        check_size("overlap_pieces", 1 if self.overlap_pieces is None else self.overlap_pieces, 1)

    def refuse(self, layer: str, *names: str) -> None:
        """Raises ValueError for options that this layer does not have."""
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{layer}: there is no option {field.name} for this layer, got "
                    f"{field.name}={getattr(self, field.name)!r}: leave it out of LayerOptions"
                )
