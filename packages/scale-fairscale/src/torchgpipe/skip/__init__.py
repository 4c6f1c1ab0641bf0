"""Skip connections between layers. Begin with `skippable`."""

from torchgpipe.skip.namespace import Namespace
from torchgpipe.skip.skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
