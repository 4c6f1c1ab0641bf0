"""How long a backward pass takes beside the rest of its step: what a step of more micro-batches would cost."""

from __future__ import annotations

import time

import torch


class PassClock:
    """Looks at the clock when each forward and backward pass of a step begins, without waiting for the device.

    Args:
        device: That which computes; its own clock is taken where it has one.
    """

    def __init__(self, device: torch.device) -> None:
        self._has_events = device.type == "cuda"
        self._begun: list[float | torch.cuda.Event] = []

    def begin(self, index: int) -> None:
        """A pass begins.

        Args:
            index: Its number within the step.
        """
        if index == 0:
            self._begun = []
        if self._has_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._begun.append(event)
        else:
            self._begun.append(time.monotonic())

    def seconds(self) -> float | None:
        """Seconds of one pass of the last step, without the last one, which averages gradients; None if it had one."""
        if len(self._begun) < 2:
            return None
        first, last = self._begun[0], self._begun[-1]
        if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
            last.synchronize()
            whole: float = first.elapsed_time(last) / 1000
        else:
            assert isinstance(first, float) and isinstance(last, float)
            whole = last - first
        return whole / (len(self._begun) - 1)

    def seconds_by_batch(self, step: float, batch: int) -> dict[int, float]:
        """Returns seconds of a step by batch: as it was, and as it would be with a single pass.

        Args:
            step: Seconds of a step.
            batch: Sequences of a step, of all ranks.

        Returns:
            Nothing, where a step is one pass.
        """
        one_pass, passes = self.seconds(), len(self._begun)
        single = 0.0 if one_pass is None else step - (passes - 1) * one_pass
        return {batch: step, batch // passes: single} if single > 0 else {}
