"""Ranks on this machine, or those of torchrun, and their rendezvous.

Begin with `launcher`.
"""

from scale_core.errors import LaunchError
from scale_core.launch.launcher import die_with_parent, format_exit_code, launch_local
from scale_core.launch.rendezvous import init_distributed

__all__ = ["LaunchError", "die_with_parent", "format_exit_code", "init_distributed", "launch_local"]
