"""The names of `fairscale.nn.pipe.skip.skippable` by torchgpipe's path."""

from fairscale.nn.pipe.skip.skippable import Skippable, pop, skippable, stash, verify_skippables

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]
