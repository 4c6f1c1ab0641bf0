"""Processes that are forked from a rank: they share its connections, which no message of theirs may go over."""

from __future__ import annotations

import ctypes
import os

from scale_core import compat
from scale_core.comm.group_state import group_state, known_groups
from scale_core.errors import LaunchError


class ForkCount:
    """How often this process, or one that it comes from, was forked while it had modules of scale."""

    number = 0


def forked_error() -> LaunchError:
    """The error of a forked process that communicates."""
    return LaunchError(
        f"process {os.getpid()} was forked from process {os.getppid()}, a rank that had its process group already, and "
        "shares its connections: a collective here would break the connections of all ranks. Train in that process, "
        'and start helpers by multiprocessing.get_context("spawn")'
    )


def _after_fork() -> None:
    ForkCount.number += 1
    for process_group in {*compat.process_groups(), *known_groups()}:
        if not compat.is_fake_group(process_group):
            group_state(process_group).is_of_parent = True
            # It must outlive this process: its destructor would end the connections, and waits for threads that are
            # not here.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))


if hasattr(os, "register_at_fork"):  # Not where processes can't be forked.
    os.register_at_fork(after_in_child=_after_fork)
