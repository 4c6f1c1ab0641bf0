"""Cases of a test that share one start of its ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch


def together(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test for each value, as `pytest.mark.parametrize` does, but as one test: its ranks start once.

    All cases begin with the same random numbers. The error of a case has its values as a note.

    Args:
        names: Names of parameters of the test, with commas between them.
        values: A value for each case, or a tuple of as many as there are names.
    """
    keys = [name.strip() for name in names.split(",")]
    cases = [dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def in_turn(**arguments: Any) -> None:
            random_state = torch.get_rng_state()
            for case in cases:
                torch.set_rng_state(random_state)
                try:
                    test(**arguments, **case)
                except BaseException as error:
                    error.add_note(f"in the case {case}")
                    raise

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        in_turn.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # pytest reads it.
        return in_turn

    return decorate
