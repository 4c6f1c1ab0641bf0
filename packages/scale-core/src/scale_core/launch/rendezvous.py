"""Rendezvous of the ranks of a job, under any launcher.

`init_distributed` joins the ranks that `torchrun` (or anything that sets its variables) started, and says which
variable is wrong where torch would wait. Each start uses keys of its own: the store of torchrun's agent outlives the
ranks, and still holds the addresses of the dead ones.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from scale_core import compat
from scale_core.arguments import checked_arguments
from scale_core.comm.group import Group, group_of
from scale_core.comm.work import process_limit
from scale_core.errors import LaunchError, renamed_arguments
from scale_core.launch.parent import die_with_parent, is_orphan
from scale_core.launch.roll_call import RankFacts, facts_of, roll_call, warn_lead

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
DEVICE_VARIABLE = "SCALE_DEVICE"
"""The environment variable by which `launch_local` says on which devices its ranks are."""
_AGENT_HAS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"

_LIMIT_SECONDS = 300.0
_REFUSAL_SECONDS = 2.0  # torch's own error at the limit comes a little later, and says more
_stores: dict[tuple[str, int], Store] = {}  # kept open: rank 0 of a job without an agent is the others' server


@checked_arguments
@renamed_arguments(timeout="limit_seconds=")
def init_distributed(
    backend: str | None = None,
    *,
    device: str | torch.device | None = None,
    limit_seconds: float | None = None,
    config: object = None,
) -> Group:
    """Joins the ranks of this job and returns the default group; a second call returns it again.

    Without `RANK` and `WORLD_SIZE` in the environment this is a world of one, and torch.distributed stays off. All
    ranks need the same versions of Python, torch and scale; a difference in only the third number is a warning. Under
    torchrun a rank ends with its agent, also where that is killed.

    Args:
        backend: The backend of the default group. By default gloo on CPU; on CUDA NCCL for CUDA tensors and gloo for
            tensors on the host, so that small control messages need no device.
        device: "cpu" or "cuda"; by default the device of `launch_local`, or else CUDA where it is available. On CUDA
            the rank's device is made the current: the device of its local rank, or the only one that it sees.
        limit_seconds: For the ranks to meet and for every collective after it; None is the environment variable
            `SCALE_LIMIT_SECONDS`, or 300. NCCL's own limit is five minutes more: after it NCCL ends the process, and
            the error that names the missing rank has to come first.
        config: The settings that have to be equal on all ranks, as anything that JSON knows: options, sizes, a model's
            name.

    Raises:
        LaunchError: A variable is missing or wrong, two ranks have one number, some ranks did not come in time, or
            versions or configurations differ. The error names them.
        ValueError: There are more local ranks than devices, or a limit is not above 0.

    Example:
        >>> init_distributed()  # in a plain Python, not under torchrun
        Group(rank=0, size=1, process_group=None, backend='none', ranks=(0,))

    See also: [the guide to starting ranks](../guides/scale-further.md#start-the-ranks-torchrun-slurm-elastic).
    """
    if dist.is_initialized():
        return group_of()
    limit = (process_limit() or _LIMIT_SECONDS) if limit_seconds is None else limit_seconds
    if not limit > 0:
        raise ValueError(f"expected limit_seconds above 0, got {limit}")
    place = _place()
    if place is None:
        return Group()
    if _UNDER_TORCHRUN in os.environ:
        _end_with_agent()
    default = os.environ.get(DEVICE_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = torch.device(device or default).type
    if kind == "cuda":
        _take_device(place.local_rank)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # NCCL's last collectives, which errors read.
    store = _rendezvous(place, limit, config)
    try:
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"),
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=limit),
        )
    except (RuntimeError, dist.DistError) as error:  # A rank has ended since it answered, or its address is no good.
        raise _error(f"the {place.world_size} ranks met, but could not connect to each other") from error
    for group in compat.process_groups():  # the default one
        compat.extend_nccl_limit(group, timedelta(seconds=limit))
    return group_of()


def _end_with_agent() -> None:
    if is_orphan():
        raise _error("torchrun's agent, which started this rank, has ended")
    die_with_parent(os.getppid())


def open_store(host: str, port: int, *, serve: bool, timeout: float) -> Any:
    """Opens torch's TCP store: its server (port 0: any free one; see `.port`), or a client of it."""
    # torch exports it at run time, and its stubs do not say so.
    return cast(Any, dist).TCPStore(
        host, port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )


def _open_within(host: str, port: int, *, serve: bool, timeout: float) -> Any:
    """`open_store`; TimeoutError where another program has the port, which torch would wait for without a limit."""
    opened: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def open_it() -> None:
        try:
            opened.put(open_store(host, port, serve=serve, timeout=timeout))
        except Exception as error:
            opened.put(error)

    threading.Thread(target=open_it, name="opens the store", daemon=True).start()
    try:
        store = opened.get(timeout=min(timeout + _REFUSAL_SECONDS, threading.TIMEOUT_MAX))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(store, Exception):
        raise store
    return store


def _what_listens(host: str, port: int) -> str:
    """The greeting of a program that is not a store, for an error."""
    told = b""
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection, suppress(OSError):
            connection.settimeout(1.0)
            told = connection.recv(60)
    except OSError:
        return "nobody answers there"
    if told:
        return f"another program listens there, which says {told!r}: choose another MASTER_PORT"
    return "something listens there, and has not answered as torch's store does: look whether it is rank 0"


def _who_has(host: str, port: int, mine: RankFacts) -> str:
    """The process that has the port of rank 0; another job's rank 0 gets a message about this one."""
    lead = ""
    with suppress(Exception):  # torch has several types for it, and no common one
        lead = warn_lead(prefixed("scale", _open_within(host, port, serve=False, timeout=_REFUSAL_SECONDS)), mine)
    if lead:
        return f"another job has its store there, with {lead} as rank 0: choose another MASTER_PORT"
    return "another program has this port"


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
    advice = "" if _UNDER_TORCHRUN in os.environ else ". Start the ranks with torchrun, which sets them"
    return LaunchError(f"{what}. This rank saw {seen}{advice}")


def _take_device(local_rank: int) -> None:
    num_devices = torch.cuda.device_count()
    if num_devices == 1 and "CUDA_VISIBLE_DEVICES" in os.environ and _UNDER_TORCHRUN not in os.environ:
        local_rank = 0  # As under Slurm's --gpus-per-task=1: each rank sees its own device, by number 0.
    if local_rank >= num_devices:
        raise ValueError(
            f"expected at most {num_devices} ranks on this machine, one for each CUDA device, got LOCAL_RANK="
            f"{local_rank}: start fewer, or pass device='cpu'"
        )
    torch.cuda.set_device(local_rank)


def _rendezvous(place: _RankEnvironment, timeout: float, config: object) -> Any:
    """Opens the store and returns a view of it for this start, once all ranks are there and fit each other."""
    mine = facts_of(place.rank, place.world_size, config)
    address = (place.host, place.port)
    try:
        if address not in _stores:
            serve = place.rank == 0 and not place.agent_has_store
            _stores[address] = _open_within(*address, serve=serve, timeout=timeout)
    except Exception as error:  # torch has several types for it, and no common one
        taken = _who_has(*address, mine) if "ADDRINUSE" in str(error) else _what_listens(*address)
        raise _error(f"no store at {place.host}:{place.port} within {timeout:g} s: {taken}") from error
    store = prefixed("scale", _stores[address])
    try:
        name = roll_call(store, mine, timeout)
    except LaunchError as error:
        raise _error(str(error)) from error
    except dist.DistError as error:
        raise _error(f"the store at {place.host}:{place.port} was lost before all ranks had come") from error
    return prefixed(name, store)
