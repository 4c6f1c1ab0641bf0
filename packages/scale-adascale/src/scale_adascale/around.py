"""An optimizer around another one: what it is to schedulers, scalers and checkpoints, without what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from scale_core.holdings import Holding


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
