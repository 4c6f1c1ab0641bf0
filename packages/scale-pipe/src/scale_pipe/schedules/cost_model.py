"""The cost model of a pipeline: the times of each stage and of each link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scale_pipe.integers import checked_arguments
from scale_pipe.schedules.action import FREES, GIVES_INPUT_GRADIENT, Action, Kind
from scale_pipe.schedules.placement import StagePlacement


@checked_arguments
@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch by stage, in any one unit; seconds where they are measured.

    Attributes:
        forward: Time of the forward, by stage.
        input_gradient: Time of the gradient of the input, by stage.
        weight_gradient: Time of the gradients of the parameters, by stage.
        link: Time of a transfer between stage s and s + 1, either way, at index s, where these are on two ranks. A link
            between two ranks carries one tensor at a time in each direction. Between stages of one rank nothing moves.

    Raises:
        ValueError: The lengths differ, or a time is negative or not finite.

    Examples:
        >>> from scale_pipe import Costs, simulate
        >>> from scale_pipe.schedules.classic import gpipe
        >>> costs = Costs(forward=(1.0, 2.0), input_gradient=(1.0, 2.0), weight_gradient=(1.0, 2.0), link=(0.5,))
        >>> simulate(gpipe(2, 4), costs).makespan
        28.0

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    link: tuple[float, ...]

    def __post_init__(self) -> None:
        num_stages = len(self.forward)
        for name in self.__dataclass_fields__:
            times = getattr(self, name)
            length = max(num_stages - 1, 0) if name == "link" else num_stages
            if len(times) != length:
                raise ValueError(
                    f"expected a time for each of {num_stages} stages (links: one less), but {name} has {len(times)} "
                    f"where {length} are needed"
                )
            for index, time in enumerate(times):
                if not (math.isfinite(time) and time >= 0):
                    raise ValueError(f"times are finite and not negative, but {name}[{index}] is {time}")

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
        link: float = 0.0,
    ) -> Costs:
        """Returns equal costs for all stages; see the class for the arguments."""
        return cls(
            (forward,) * num_stages,
            (input_gradient,) * num_stages,
            (weight_gradient,) * num_stages,
            (link,) * max(num_stages - 1, 0),
        )

    @classmethod
    def measured(
        cls,
        forward: Sequence[float],
        input_gradient: Sequence[float],
        weight_gradient: Sequence[float],
        link: float | Sequence[float] = 0.0,
    ) -> Costs:
        """Returns costs from lists by stage; `link` is the time of every link, or by link.

        Raises:
            ValueError: See the class.
        """
        links = (float(link),) * (len(forward) - 1) if isinstance(link, int | float) else tuple(map(float, link))
        return cls(
            tuple(map(float, forward)), tuple(map(float, input_gradient)), tuple(map(float, weight_gradient)), links
        )

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    def duration(self, action: Action) -> float:
        """Returns the time for which an action keeps its rank busy: 0 for transfers and steps."""
        kind, stage, _ = action
        if kind is Kind.FORWARD:
            return self.forward[stage]
        time = self.input_gradient[stage] if kind in GIVES_INPUT_GRADIENT else 0.0
        return time + self.weight_gradient[stage] if kind in FREES else time

    def stage_time(self, stage: int) -> float:
        """Returns the time of a stage's forward and backward on one micro-batch."""
        return self.forward[stage] + self.input_gradient[stage] + self.weight_gradient[stage]

    def check_for(self, placement: StagePlacement) -> None:
        """Raises `ValueError` if the placement has a different number of stages."""
        if placement.num_stages != self.num_stages:
            raise ValueError(
                f"the placement has {placement.num_stages} stages, but there are costs for {self.num_stages}; "
                f"write Costs.uniform({placement.num_stages})"
            )
