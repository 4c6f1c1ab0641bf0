"""Skip connections between layers, from `scale_pipe`. Begin with `skippable`."""

from fairscale.nn.pipe.skip.namespace import Namespace
from fairscale.nn.pipe.skip.skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
