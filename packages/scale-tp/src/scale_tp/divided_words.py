"""Embeddings that exist already, divided between ranks by their words or by their width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from scale_tp.divided import Divided
from scale_tp.regions import gather_from_model_parallel_region, reduce_from_model_parallel_region
from scale_tp.split_sizes import Range, Split
from scale_tp.vocabulary import check_words, local_padding, local_words, unknown_word


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
