"""What keeps stashed tensors until they are popped, by thread."""

from scale_pipe.skip.tracker import SkipTracker, current_skip_tracker, use_skip_tracker

__all__ = ["SkipTracker", "current_skip_tracker", "use_skip_tracker"]
