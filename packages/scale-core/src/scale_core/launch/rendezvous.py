"""Rendezvous of the ranks of a job, under any launcher.

`init_distributed` joins the ranks that `torchrun` (or anything that sets its variables) started, and says which
variable is wrong where torch would wait. After a restart it uses keys of its own: the store of torchrun's agent
outlives the ranks, and still holds the addresses of the dead ones.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from scale_core.comm.group import Group, group_of
from scale_core.errors import LaunchError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_AGENT_HAS_STORE = "TORCHELASTIC_USE_AGENT_STORE"

_meetings = itertools.count()  # so that a process may leave its group and join again
_stores: dict[tuple[str, int], Store] = {}  # kept open: rank 0 of a job without an agent is the others' server


def init_distributed(
    backend: str | None = None, *, device: str | torch.device | None = None, timeout: float = 300.0
) -> Group:
    """Joins the ranks of this job and returns the default group; a second call returns it again.

    Without `RANK` and `WORLD_SIZE` in the environment this is a world of one, and torch.distributed stays off.

    Args:
        backend: The backend of the default group. By default gloo on CPU; on CUDA NCCL for what is there and gloo for
            what is on the host, so that small control messages need no device.
        device: "cpu" or "cuda"; by default CUDA where it is available. On CUDA the rank's device is made the current.
        timeout: Seconds, for the ranks to meet and for every collective after it.

    Raises:
        LaunchError: A variable is missing or wrong, two ranks have one number, or some did not come in time.
        ValueError: There are more local ranks than devices.

    Example:
        >>> init_distributed()  # in a plain Python, not under torchrun
        Group(rank=0, size=1, process_group=None, backend='none', ranks=(0,))
    """
    if dist.is_initialized():
        return group_of()
    place = _place()
    if place is None:
        return Group()
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if kind == "cuda":
        _take_device(place.local_rank)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # NCCL's last collectives, which errors read.
    store = _rendezvous(place, timeout)
    dist.init_process_group(
        backend or ("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"),
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout),
    )
    return group_of()


def open_store(host: str, port: int, *, serve: bool, timeout: float) -> Any:
    """Opens torch's TCP store: its server (port 0: any free one; see `.port`), or a client of it."""
    # torch exports it at run time, and its stubs do not say so.
    return cast(Any, dist).TCPStore(
        host, port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


def prefixed(name: str, store: Any) -> Any:
    """A view of a store with its own key prefix."""
    return cast(Any, dist).PrefixStore(name, store)


@dataclass(frozen=True)
class _RankEnvironment:
    """This rank's numbers, from the environment."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    attempt: int
    agent_has_store: bool


def _place() -> _RankEnvironment | None:
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if rank >= world_size:
        raise _error(f"expected RANK below WORLD_SIZE, got {rank} of {world_size}")
    if not os.environ.get("MASTER_ADDR"):
        raise _error("MASTER_ADDR is not set")
    return _RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_number("LOCAL_RANK", default=rank),
        host=os.environ["MASTER_ADDR"],
        port=_number("MASTER_PORT"),
        attempt=_number("TORCHELASTIC_RESTART_COUNT", default=0),
        agent_has_store=os.environ.get(_AGENT_HAS_STORE) == "True",
    )


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise _error(f"expected a number in {name}, got {text!r}" if text else f"{name} is not set")
    return int(text)


def _error(what: str) -> LaunchError:
    seen = ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in VARIABLES)
    return LaunchError(f"{what}. This rank saw {seen}. Start the ranks with torchrun, which sets them")


def _take_device(local_rank: int) -> None:
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        raise ValueError(
            f"expected at most {num_devices} ranks on this machine, one for each CUDA device, got LOCAL_RANK="
            f"{local_rank}: start fewer, or pass device='cpu'"
        )
    torch.cuda.set_device(local_rank)


def _rendezvous(place: _RankEnvironment, timeout: float) -> Any:
    """Opens the store and returns a view of it for this run, once all ranks are there and agree on their numbers."""
    address = (place.host, place.port)
    try:
        if address not in _stores:
            serve = place.rank == 0 and not place.agent_has_store
            _stores[address] = open_store(*address, serve=serve, timeout=timeout)
    except Exception as error:  # torch has several types for it, and no common one
        reason = str(error).partition("\n")[0]
        raise _error(f"no store at {place.host}:{place.port} within {timeout:g} s ({reason})") from error
    store = prefixed(f"attempt{place.attempt}/meeting{next(_meetings)}", _stores[address])
    _roll_call(prefixed("roll-call", store), place, timeout)
    return store


def _roll_call(store: Any, place: _RankEnvironment, timeout: float) -> None:
    sizes = store.compare_set("world size", "", str(place.world_size)).decode()
    trouble = ""
    if sizes != str(place.world_size):
        trouble = f"WORLD_SIZE is {sizes} on one rank and {place.world_size} on rank {place.rank}"
    elif store.add(f"rank {place.rank}", 1) > 1:
        trouble = f"two ranks have RANK={place.rank}"
    if trouble:
        store.set("verdict", trouble)
    elif store.add("present", 1) == place.world_size:
        store.set("verdict", "all present")
    try:
        store.wait(["verdict"], timedelta(seconds=timeout))
    except Exception as error:
        absent = [str(rank) for rank in range(place.world_size) if not store.check([f"rank {rank}"])]
        raise _error(
            f"rank {', '.join(absent)} of {place.world_size} did not come within {timeout:g} s, or could not stay"
        ) from error
    verdict = store.get("verdict").decode()
    if verdict != "all present":
        raise _error(verdict)
