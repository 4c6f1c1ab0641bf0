"""`torch_version`, as numbers."""

import re

import torch


def torch_version(version: str = torch.__version__) -> tuple[int, ...]:
    """Returns the numbers of a version.

    >>> torch_version("2.13.0+cpu")
    (2, 13, 0)
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()


__all__ = ["torch_version"]
