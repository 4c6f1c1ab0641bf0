"""Ranks on this machine, or those that torchrun has started, and how they find each other.

Begin with `launcher`.
"""

from scale_core.launch.launcher import die_with_parent, launch_local, name_of_exit
from scale_core.launch.rendezvous import LaunchError, init_distributed

__all__ = ["LaunchError", "die_with_parent", "init_distributed", "launch_local", "name_of_exit"]
