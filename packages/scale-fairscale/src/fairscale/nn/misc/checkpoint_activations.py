"""The older path of `fairscale.nn.checkpoint.checkpoint_activations`."""

from fairscale.nn.checkpoint.checkpoint_activations import *  # noqa: F403
from fairscale.nn.checkpoint.checkpoint_activations import __all__ as __all__
