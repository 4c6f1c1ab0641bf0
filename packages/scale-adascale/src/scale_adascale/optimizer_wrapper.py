"""An optimizer whose gradients are measured: when that begins and ends, and what may be done amid the passes of a step.

Backward passes are measured (`local_grad_norms`), what ranks have measured is added up (`norm_reduction`), and what a
step knows then stands in the optimizer's parameter groups (`estimates`). What becomes of it is told elsewhere
(`adascale`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from scale_adascale.estimates import OF_GROUP, Reading, without_fairscale
from scale_adascale.norm_reduction import Meter
from scale_adascale.step_statistics import Sampling, Settings
from scale_adascale.validation import refuse_step, refuse_undivided
from scale_core.state.param_ownership import Holding


class Around(Optimizer):
    """Shows the inner optimizer's parameter groups, state and whatever else is asked for.

    Args:
        optimizer: The inner one.
    """

    _step_supports_amp_scaling = False  # Even if the inner one does: gradients must be unscaled before its step.

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        super().__setstate__({"defaults": optimizer.defaults})  # What torch's own constructor makes beside groups.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the inner optimizer."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the inner optimizer."""
        return self._optimizer.state

    @property
    def optimizer(self) -> Optimizer:
        """The inner one, by which others know what it is: `ShardedDataParallel` an OSS."""
        return self._optimizer

    @property
    def construction(self) -> str:
        """The line that builds it, for errors."""
        return f"AdaScale({type(self._optimizer).__name__}(model.parameters(), ...))"

    def state_holding(self, holding: Holding) -> Holding:
        """What this rank has of a parameter's state: as the inner optimizer says, if it says anything."""
        inner: Callable[[Holding], Holding] | None = getattr(self._optimizer, "state_holding", None)
        return holding if inner is None else inner(holding)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As the inner optimizer's, whose state it is; so are the three below."""
        return self._optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """See above."""
        return self._optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """See above."""
        return self._optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """See above."""
        return self._optimizer.register_load_state_dict_post_hook(hook, prepend)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an AdaScale can't be copied or pickled: it listens to the gradients of this very model: copy the model, "
            "build AdaScale(...) for it, and load optimizer.state_dict()"
        )


class Listening(Around):
    """Listens to the gradients of an optimizer's parameters.

    Args:
        optimizer: The inner one.
        meter: Adds up what ranks have measured.
        settings: What the user has said.

    Attributes:
        listens_to_gradients: For an OSS, which steps on pieces that no backward pass brings a gradient to: it refuses a
            class that has this.
    """

    listens_to_gradients = True

    def __init__(self, optimizer: Optimizer, meter: Meter, settings: Settings) -> None:
        super().__init__(optimizer)
        self._settings = settings
        self._reading = Reading(optimizer)
        self._is_unhooked = False
        self._sampling = Sampling(meter, settings, self._reading)
        self._listen()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; what was measured of them counts as nothing, unless a step was taken.

        Raises:
            RuntimeError: More backward passes were to come before the next step.
        """
        if not self._sampling.local.fails:
            self._check_between_steps("zero_grad", "Don't zero_grad in backward")
        self._sampling.begin_anew()
        self._optimizer.zero_grad(set_to_none=set_to_none)
        self._sampling.gradients_are_cleared(to_zeros=not set_to_none)
        self._listen()  # To what was unfrozen.

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divides the gradients by the number of those that were added up, where losses were not.

        Raises:
            RuntimeError: Losses are, as AdaScale was told; more backward passes are to come; or it was done already.
        """
        sampling, number = self._sampling, self._settings.num_gradients
        if self._settings.is_scaled_loss:
            raise RuntimeError(
                "Must use unscaled loss for scale_grad_by_num_grads_to_accum(): AdaScale was told that losses are "
                "divided by the number of gradients: leave this call out, or build AdaScale(..., is_scaled_loss=False)"
            )
        if sampling.passes != number or sampling.is_divided:
            came = "they are divided already" if sampling.is_divided else f"{sampling.passes} came"
            raise RuntimeError(
                f"scale_grad_by_num_grads_to_accum(): expected {number} gradients to divide by, but {came}: call it "
                "once, between the last backward() and step()"
            )
        sampling.is_divided = True
        grads = [holder.grad for holder in sampling.meter.holders if holder.grad is not None]
        if grads:  # Of small models a rank may have no piece.
            torch._foreach_div_(grads, float(number))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the inner optimizer; its gain begins at 1.

        Raises:
            RuntimeError: More backward passes are to come before the next step.
        """
        self._check_at_rest("add_param_group", "Can't add parameter group during backward")
        self._optimizer.add_param_group(param_group)
        self._reading.write(self._reading.estimates)  # So that each group has some, which checkpoints expect.
        self._sampling.forget_last()
        self._listen()

    def unhook(self) -> None:
        """Stops to measure until `hook`, and lets go of what it has of gradients; steps go on with the last gain.

        Raises:
            RuntimeError: A step of a pipeline is under way, whose ranks would wait for what this one has measured.
        """
        if self._sampling.local.is_announced:
            raise RuntimeError(
                "unhook() inside of a pipeline's step, some of whose gradients have been measured, and other ranks "
                "would wait for their sum: call it after pipe.step(...), or before it on all ranks"
            )
        self._is_unhooked = True
        self._sampling.unhook()

    def hook(self) -> None:
        """Measures again, from the next backward pass on, after `unhook`."""
        self._is_unhooked = False
        self._listen()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Returns the inner optimizer's state; what AdaScale knows stands in its parameter groups.

        Raises:
            RuntimeError: More backward passes are to come before the next step.
        """
        self._check_between_steps("state_dict", "Don't checkpoint in backward")
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` has returned, an inner optimizer's own state, or one of FairScale's AdaScale.

        Raises:
            RuntimeError: More backward passes are to come before the next step.
            ValueError: It has other parameter groups; nothing was loaded.
        """
        self._check_between_steps("load_state_dict", "Don't load checkpoint in backward")
        own, averages = without_fairscale(state_dict, len(self.param_groups))
        before = [(group, group.pop(OF_GROUP)) for group in self.param_groups if OF_GROUP in group]
        try:
            self._optimizer.load_state_dict(own)
        except BaseException:
            for group, row in before:
                group[OF_GROUP] = row
            raise
        if averages is not None:
            self._reading.write(self._reading.estimates.with_groups(averages))
        self._sampling.begin_anew()
        self._sampling.forget_last()

    # What these are made of.

    def _listen(self) -> None:
        if self._is_unhooked:
            return
        self._sampling.listen([param for group in self.param_groups for param in group["params"]])

    def _is_due(self) -> bool:
        """Whether the gradients of a whole step are there; False where nothing is measured, or nothing can change.

        Raises:
            RuntimeError: A step would be one with the gradients of some passes only, or with others than were said.
        """
        number = self._settings.num_gradients
        if not self._sampling.local.hearing.is_listening or not (
            self._sampling.passes or any(group["lr"] for group in self.param_groups)
        ):
            return False  # torch's checkpoint functions step once with a learning rate of 0, so that there is a state.
        self._sampling.check_measured()
        self._sampling.count_pass_without_gradients()
        refuse_step(self._sampling.passes, number, self._sampling.local)
        refuse_undivided(number, divided=self._settings.is_scaled_loss or self._sampling.is_divided)
        return True

    def _check_at_rest(self, method: str, words: str) -> None:
        """As below, even when all passes have come and the step has not."""
        self._check_between_steps(method, words, or_before_step=self._sampling.passes > 0)

    def _check_between_steps(self, method: str, words: str, *, or_before_step: bool = False) -> None:
        """Refuses what would tear a step apart; `words` is what FairScale says of this method."""
        passes, number = self._sampling.passes, self._settings.num_gradients
        if self._sampling.local.is_in_pass or 0 < passes < number or or_before_step:
            raise RuntimeError(
                f"{words}: {method}() in the middle of a step, of whose backward passes {passes} of {number} have "
                f"ended: call it after optimizer.step(), or pass num_gradients_to_accumulate={max(1, passes)} if no "
                "more are to come"
            )
