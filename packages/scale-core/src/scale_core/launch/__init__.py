"""Ranks on this machine, or ranks that torchrun started, and their rendezvous.

Begin with `launcher`.
"""

from scale_core.errors import LaunchError
from scale_core.launch.launcher import launch_local
from scale_core.launch.parent import die_with_parent
from scale_core.launch.rendezvous import init_distributed
from scale_core.launch.stop_signal import StopSignal

__all__ = ["LaunchError", "StopSignal", "die_with_parent", "init_distributed", "launch_local"]
