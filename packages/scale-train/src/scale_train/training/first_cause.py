"""Tells all ranks what one of them has raised, where their collectives are torch's own and only say that it has gone.

The collectives of `DistributedDataParallel` fail with a RuntimeError of the transport when another rank ends. So each
rank publishes what it raises in the rendezvous store, which outlives it, and reads there what the others have raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from scale_core.comm.group import Group
from scale_core.consistency.flight_recorder import FlightRecorder
from scale_core.errors import ScaleDistributedError, ScaleError, TransferError

_RAISED = "raised "
_LOST = "has lost another rank: "


@contextmanager
def naming_first_cause(group: Group) -> Iterator[None]:
    """A context of what all ranks do together; entered on all of them.

    Raises:
        ScaleDistributedError: In place of an error of the transport: which rank has raised what.
    """
    recorder = FlightRecorder(group)
    try:
        yield
    except Exception as error:
        if isinstance(error, ScaleError) and type(error) is not TransferError:  # The ranks know of these.
            raise
        is_lost = _is_of_transport(error)
        recorder.events.append((_LOST if is_lost else _RAISED) + _line(error))
        recorder.publish()
        if not is_lost or group.size == 1:
            raise
        raised = [f"rank {rank} {text}" for rank, text in recorder.dump_all_ranks().items() if text.startswith(_RAISED)]
        raise ScaleDistributedError("; ".join(raised) or _line(error), rank=group.rank) from error


def _is_of_transport(error: Exception) -> bool:
    """Whether torch says that another rank has gone or did not come in time; gloo's errors have no class of their own.

    >>> _is_of_transport(RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1234"))
    True
    """
    if isinstance(error, dist.DistError | TransferError):
        return True
    return type(error) is RuntimeError and "gloo/transport/" in str(error)


def _line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
