"""What the alias says where a name has changed: one warning for each argument, and errors for what is not there.

A warning points to the line that called the alias, past the files of this distribution, of scale and of torch, and
holds the line to write instead. Each is given once in a process: wrapping a hundred layers in one way says it once.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from typing import Any, NoReturn

# Frames that are not the caller's: those of this distribution's own two modules, of the packages below it, and torch's.
_NOT_THE_CALLER = re.compile(
    r"(fairscale|torchgpipe|torch|contextlib|scale_(core|fsdp|oss|pipe|tp|adascale|checkpoint|moe))(\.|$)"
)


class FairScaleWarning(FutureWarning):
    """An argument or a name of FairScale's that does nothing here, or is written in another way."""


def warn_argument(function: str, argument: str, instead: str) -> None:
    """Warns, once in a process, that an argument has another name or no effect.

    Args:
        function: Whose argument it is, as its caller writes it: `"OSS"`.
        argument: Its name.
        instead: What holds now, and the line to write.
    """
    warn_once(f"{function}({argument}=)", instead)


@functools.cache
def warn_once(what: str, instead: str) -> None:
    """Warns, once in a process, at the line outside of this distribution that led here."""
    warnings.warn(f"{what}: {instead}", FairScaleWarning, stacklevel=_stacklevel_of_the_caller())


def refuse(what: str, why: str, instead: str) -> NoReturn:
    """Raises for what is not offered.

    Raises:
        NotImplementedError: Always; says why, and what to use.
    """
    raise NotImplementedError(f"{what} is not offered: {why}. Use {instead}")


class Refused:
    """A base for classes that can be imported, so that modules which mention them load, and refuse to be made.

    Subclasses set `why` and `instead`.
    """

    why: str
    instead: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse(type(self).__name__, self.why, self.instead)


def _stacklevel_of_the_caller() -> int:
    """The level of the nearest frame that is not ours, as `warnings.warn` counts from `warn_once`."""
    level, frame = 2, sys._getframe(2)
    while _NOT_THE_CALLER.match(frame.f_globals.get("__name__", "")) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level
