"""Flight records on the disk, for `scale-train why` and for people: one file for each rank that failed.

The store in which ranks publish their records ends with the job. Where the environment variable
`SCALE_FLIGHT_RECORDS` names a folder that all ranks can write to, they leave them there too.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

VARIABLE = "SCALE_FLIGHT_RECORDS"
FORMAT = "scale-flight-record"


def write_flight_record(ranks: Sequence[int], rank: int, name: str, events: Sequence[object]) -> None:
    """Writes this rank's last events, if the variable says where; the error at hand matters more than one in here.

    Args:
        ranks: The ranks of the group in the job.
        rank: This one in the group.
        name: The record's name, the same on all ranks of the group.
        events: The last events, oldest first.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    record = {
        "format": FORMAT,
        "rank": ranks[rank],
        "ranks": list(ranks),
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "events": [str(event) for event in events],
    }
    path = Path(folder) / f"rank-{ranks[rank]:05d}-{name.replace('/', '-')}.json"
    unfinished = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(record), encoding="utf-8")
        unfinished.replace(path)
