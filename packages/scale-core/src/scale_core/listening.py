"""Who is told when the gradient of a whole parameter has come: whoever reduces it, as long as that lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from scale_core.backward import after_gradient


class GradientListeners:
    """The hooks of one object on the whole parameters of its buffers.

    Args:
        tell: A method of that object, which is held weakly; called with the number of the buffer and that of the
            parameter in it, when the parameter's gradient of this pass stands in its `grad`.
    """

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell = weakref.WeakMethod(tell)  # Autograd holds the hooks, and shows nobody what its hooks hold.
        self._on: set[tuple[int, int]] = set()

    def listen(self, params: Sequence[Sequence[nn.Parameter]]) -> None:
        """Listens to every parameter that trains, and that it does not listen to yet; they come by buffer."""
        for number, members in enumerate(params):
            for index, param in enumerate(members):
                if param.requires_grad and (number, index) not in self._on:
                    self._on.add((number, index))
                    after_gradient(param, self._listener(number, index))

    def forget(self) -> None:
        """There are other parameters now, that nobody listens to yet."""
        self._on.clear()

    def _listener(self, number: int, index: int) -> Callable[[Tensor], None]:
        held = self._tell

        def listen(_: Tensor) -> None:
            tell = held()
            assert tell is not None, "a gradient has come whose listener is gone"
            tell(number, index)

        return listen
