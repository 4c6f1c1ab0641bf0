"""What a step costs: the times of each stage, of each link, and the memory that a stage's activations take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scale_pipe.schedules.action import Action, Kind
from scale_pipe.schedules.placement import Placement


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch by stage, in any one unit; seconds where they are measured.

    Attributes:
        forward: Time of the forward, by stage.
        input_gradient: Time of the gradient of the input, by stage.
        weight_gradient: Time of the gradients of the parameters, by stage.
        link: Time of a transfer between stage s and s + 1, either way, at index s, where these stand on two ranks. A
            link between two ranks carries one tensor after another in each direction. Between stages of one rank
            nothing moves.

    Raises:
        ValueError: The lengths differ, or a time is negative or not finite.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    link: tuple[float, ...]

    def __post_init__(self) -> None:
        num_stages = len(self.forward)
        expected = {"forward": num_stages, "input_gradient": num_stages, "weight_gradient": num_stages}
        for name, length in {**expected, "link": max(num_stages - 1, 0)}.items():
            times = getattr(self, name)
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
        """Returns equal costs for all stages.

        Args:
            num_stages: How many.
            forward: Time of the forward.
            input_gradient: Time of the gradient of the input.
            weight_gradient: Time of the gradients of the parameters.
            link: Time of a transfer.
        """
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
        """Returns costs from lists; one link time may stand for all.

        Args:
            forward: By stage.
            input_gradient: By stage.
            weight_gradient: By stage.
            link: Of all links, or by link.

        Raises:
            ValueError: See the class.
        """
        links = (float(link),) * (len(forward) - 1) if isinstance(link, int | float) else tuple(map(float, link))
        return cls(
            tuple(map(float, forward)), tuple(map(float, input_gradient)), tuple(map(float, weight_gradient)), links
        )

    @property
    def num_stages(self) -> int:
        """For how many stages there are costs."""
        return len(self.forward)

    def of(self, action: Action) -> float:
        """Returns the time that an action keeps its rank busy; none for transfers and steps.

        Args:
            action: Any.
        """
        match action.kind:
            case Kind.FORWARD:
                return self.forward[action.stage]
            case Kind.INPUT_GRADIENT:
                return self.input_gradient[action.stage]
            case Kind.WEIGHT_GRADIENT:
                return self.weight_gradient[action.stage]
            case Kind.BACKWARD:
                return self.input_gradient[action.stage] + self.weight_gradient[action.stage]
            case _:
                return 0.0

    def work(self, stage: int) -> float:
        """Returns the time of a stage's forward and backward on one micro-batch.

        Args:
            stage: Which.
        """
        return self.forward[stage] + self.input_gradient[stage] + self.weight_gradient[stage]

    def check_for(self, placement: Placement) -> None:
        """Checks that there are costs for the stages of a placement.

        Args:
            placement: Any.

        Raises:
            ValueError: There are fewer or more.
        """
        if placement.num_stages != self.num_stages:
            raise ValueError(
                f"the placement has {placement.num_stages} stages, but there are costs for {self.num_stages}; "
                f"write Costs.uniform({placement.num_stages})"
            )
