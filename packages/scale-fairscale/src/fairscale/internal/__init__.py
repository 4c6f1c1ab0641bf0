"""Functions of FairScale's own that programs import all the same. Begin with `containers.py`."""

from fairscale.internal.version import torch_version

__all__ = ["torch_version"]
