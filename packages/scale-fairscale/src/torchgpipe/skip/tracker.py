"""The names of `fairscale.nn.pipe.skip.tracker` by torchgpipe's path."""

from fairscale.nn.pipe.skip.tracker import SkipTracker, current_skip_tracker, use_skip_tracker

__all__ = ["SkipTracker", "current_skip_tracker", "use_skip_tracker"]
