"""The names of `fairscale.nn.pipe.skip.layout` by torchgpipe's path."""

from fairscale.nn.pipe.skip.layout import SkipLayout, inspect_skip_layout

__all__ = ["SkipLayout", "inspect_skip_layout"]
