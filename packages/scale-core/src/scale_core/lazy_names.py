"""Names of a package that are imported at their first use, because their modules take long to import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, module_of: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package, called at the end of its `__init__`.

    Tracebacks and documentation show the path by which people import, for all names in `__all__`.

    Args:
        package: Its `__name__`.
        module_of: The module of each name, for example `{"ShardedEMA": "scale_fsdp.ema"}`.
    """
    namespace = vars(sys.modules[package])
    public: list[str] = namespace["__all__"]
    for name in set(public) - set(module_of):
        namespace[name].__module__ = package

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module_of[name]), name)
        if value.__module__.startswith(package):  # Others belong to torch.
            value.__module__ = package
        namespace[name] = value
        return value

    def names() -> list[str]:
        return sorted({*namespace, *public})

    return get, names
