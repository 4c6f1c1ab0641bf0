"""The training program of scale: every technique behind one command."""

import logging
import typing

if typing.TYPE_CHECKING:
    from scale_train.training.reporters import initialisation_bar, loading_bar

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = ["initialisation_bar", "loading_bar"]


def __getattr__(name: str) -> typing.Any:
    """Loads what is public when it is asked for: torch takes a while, and the command may be stopped meanwhile."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from scale_train.training import reporters

    value = getattr(reporters, name)
    value.__module__ = __name__  # Tracebacks and documentation show the path by which people import.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
