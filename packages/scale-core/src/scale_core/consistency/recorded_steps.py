"""What a `Contract` asks of the record of optimizers' steps, which `scale_core.optim.step_hooks` keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from scale_core.comm.group import Group


class RecordedSteps(Protocol):
    """The steps of optimizers on one model since its ranks compared them."""

    def status(self) -> int:
        """Returns a number that is equal where the steps are."""

    def differ(self, statuses: Sequence[int]) -> bool:
        """Whether some ranks have made other steps than others."""

    def difference(
        self, statuses: Sequence[int], named_params: Iterable[tuple[str, Tensor]], group: Group, limit_seconds: float
    ) -> str:
        """Says on which parameter they differ; "" where they do not. All ranks call it together."""

    def end(self, statuses: Sequence[int]) -> None:
        """Forgets the steps, which were compared."""
