"""A parameter of which this rank has a part, for code that gives values to a whole one.

To its shape, and to what fills it, it is the whole parameter: all of it is drawn, and what is not this rank's is
dropped. Where such code looks at values (a row that is set to zero, a decomposition), the whole is built after all,
and what was done so far is done to it once more, from the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from scale_tp.initialising import RANDOM, NeedsValuesError, WholeOfPart
from scale_tp.random_state import StreamState, go_to, random_state
from scale_tp.split_sizes import Split


class _Done(NamedTuple):
    """One operation on the whole parameter.

    Attributes:
        operation: What was called with it.
        args: The other arguments.
        kwargs: Those given by name.
        state: Where the random numbers stood before; None where none were drawn.
        generator_state: Where the generator that was given stood; None without.
    """

    operation: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: StreamState | None
    generator_state: Tensor | None


class WholeView(WholeOfPart):
    """A part that looks like the whole; see above. Whoever makes one calls `finish` when it has been given its values.

    Attributes:
        param: What `finish` leaves the values in: this rank's part.
        dealt: How the dimension `divided` is dealt to the ranks.
        rank: Whose part it is.
        built: The whole, where one was needed; until then None.
    """

    param: Tensor
    dealt: Split
    rank: int
    built: Tensor | None
    _done: list[_Done]
    _is_param: bool

    @classmethod
    def of(cls, param: Tensor, shape: tuple[int, ...], dim: int, split: Split, rank: int) -> Self:
        """Returns the whole of `param`, [shape, but for `dim` with the indices of `rank`]."""
        held = param.detach()
        made = cls(held.contiguous(), shape, dim, split.ranges[rank])
        made.param, made.dealt, made.rank, made.built, made._done = held, split, rank, None, []
        made._is_param = True  # What isinstance(..., nn.Parameter) asks of a tensor that is none by its class.
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        whole, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(whole, cls) and whole.built is None:
            generator = kwargs.get("generator")
            drawn = random_state(whole.device) if func in RANDOM else None
            generator_state = None if generator is None else generator.get_state()
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            except NeedsValuesError:
                pass
            else:
                if func is not torch.ops.aten.detach.default:
                    whole._done.append(_Done(func, args[1:], kwargs, drawn, generator_state))
                return result
        if func is torch.ops.aten.detach.default:
            return whole
        args, kwargs = tree_map_only(cls, cls.build, (args, kwargs))
        result = func(*args, **kwargs)
        return whole if isinstance(whole, cls) and result is whole.built else result

    def build(self) -> Tensor:
        """Returns the whole parameter with the values that it has by now; NaN where only other ranks have them."""
        if self.built is None:
            before = random_state(self.device)
            whole = torch.full(tuple(self.shape), torch.nan, dtype=self.dtype, device=self.device)
            for done in self._done:
                generator = done.kwargs.get("generator")
                now = None if generator is None else generator.get_state()
                if done.state is not None:
                    go_to(done.state, self.device)
                if generator is not None:
                    generator.set_state(done.generator_state)
                done.operation(whole, *done.args, **done.kwargs)
                if generator is not None:
                    generator.set_state(now)
            go_to(before, self.device)
            ranges = self.dealt.ranges[self.rank]
            pieces = self.part.split([stop - start for start, stop in ranges], self.divided)
            for (start, stop), piece in zip(ranges, pieces, strict=True):
                whole.narrow(self.divided, start, stop - start).copy_(piece)
            self.built = whole
            self._done.clear()
        return self.built

    def finish(self) -> None:
        """Leaves this rank's part of the values in `param`."""
        if self.built is not None:
            self.param.copy_(self.dealt.take(self.built, self.rank, self.divided))
        elif self.part is not self.param:
            self.param.copy_(self.part)
