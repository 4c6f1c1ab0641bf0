"""Namespaces of skips."""

from scale_pipe import Namespace

__all__ = ["Namespace"]
