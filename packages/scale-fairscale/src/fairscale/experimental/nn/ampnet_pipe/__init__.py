"""Asynchronous pipelines, which are not offered. Begin with `pipe.py`."""

from fairscale.experimental.nn.ampnet_pipe.pipe import AMPnetPipe

__all__ = ["AMPnetPipe"]
