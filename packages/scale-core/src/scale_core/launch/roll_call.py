"""The ranks of one start find each other in a store that may hold entries of earlier starts, and compare their facts.

torchrun's agent keeps its store over restarts, and the counts of restarts of two machines may differ. So nothing that a
launcher counts names a start: rank 0 draws a name and announces it, every rank answers under it, and rank 0 sets the
verdict that all wait for. Answers of ranks that have ended stand under other names.

Two jobs that were given one port meet in one store: a rank 0 that finds the port taken says so there (`warn_lead`).
Until it does, a rank of one job can take the place of the other job's. So where no launcher says that the ranks are of
one job, rank 0 gives others some seconds to contradict, before any rank begins.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import re
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from scale_core.errors import LaunchError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.005, 0.2  # between two looks at the store
_STAY_SECONDS = 0.5  # of a rank that hosts the store, so that the others read why it leaves
# Seconds for ranks of another job to come: where this job's ranks have one origin, and where they have several.
_SHORT_GRACE, _LONG_GRACE = 1.0, 5.0
JOB_VARIABLE = "SCALE_JOB_ID"
"""The environment variable with a name that all ranks of a job have, and no other job on these machines."""
# Variables that are equal on all ranks of a job. Those after the first two are equal in several jobs, too, so that no
# difference is a proof, or that equality is none.
_PROOFS = (JOB_VARIABLE, "TORCHELASTIC_RUN_ID")
_JOB_IDS = (*_PROOFS, "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
# Variables that say which rank of a job this is, which device it has, or by which process it was started.
_OF_RANK = re.compile("RANK|LOCAL|PROC|NODE|DEVICE|PID|SHLVL|^_$")
_TWO_JOBS = "two jobs are at this port: give each a MASTER_PORT of its own"


@dataclass(frozen=True)
class RankFacts:
    """The facts of a rank; all but `rank` and how it was started has to be the same on all ranks."""

    rank: int
    world_size: int
    versions: dict[str, str]
    config: Any  # as JSON gives it back
    job: dict[str, str] = field(default_factory=dict)  # the launcher's names for the job
    origin: str = ""  # equal where processes were started in one place, by one process
    process: str = ""  # for people


def facts_of(rank: int, world_size: int, config: object) -> RankFacts:
    """This rank's facts; a TypeError where `config` is nothing that JSON knows."""
    try:
        config = json.loads(json.dumps(config))
    except (TypeError, ValueError) as error:
        raise TypeError(f"expected a config of what JSON knows (dict, list, str, numbers): {error}") from error
    process = f"process {os.getpid()} on {socket.gethostname()}, {' '.join(sys.argv)[:100]}"
    return RankFacts(rank, world_size, versions(), config, _job(), _origin(), process)


def _job() -> dict[str, str]:
    ids = {name: os.environ[name] for name in _JOB_IDS if os.environ.get(name, "none") != "none"}
    if "SLURM_HET_SIZE" in os.environ:  # One job has several of these numbers.
        ids.pop("SLURM_JOB_ID", None)
    if not ids and "TORCHELASTIC_RUN_ID" in os.environ:
        return {"agent": f"{os.getppid()} on {socket.gethostname()}"}
    return ids


def _origin() -> str:
    variables = sorted(item for item in os.environ.items() if not _OF_RANK.search(item[0]))
    parts = (socket.gethostname(), os.getppid(), os.getcwd(), sys.argv, variables)
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def grace(answers: Sequence[RankFacts], timeout: float) -> float:
    """For how many seconds ranks of another job may contradict: none where a launcher says that this is one job."""
    equal = {name for name in answers[0].job if len({answer.job.get(name) for answer in answers}) == 1}
    if equal & {*_PROOFS, "PMIX_NAMESPACE", "agent"} or equal >= {"SLURM_JOB_ID", "SLURM_STEP_ID"}:
        return 0.0
    return min(_SHORT_GRACE if len({answer.origin for answer in answers}) == 1 else _LONG_GRACE, timeout / 4)


def versions() -> dict[str, str]:
    """The versions of Python, torch and the packages of scale that are loaded."""
    loaded = [(name, module) for name, module in sys.modules.items() if name.startswith("scale_") and "." not in name]
    scale = {name: str(module.__version__) for name, module in loaded if hasattr(module, "__version__")}
    return {"Python": platform.python_version(), "torch": torch.__version__, **scale}


def roll_call(store: Store, mine: RankFacts, timeout: float) -> str:
    """Returns the name of this start, which is the same on all ranks, once all of them are there and fit each other.

    Raises:
        LaunchError: On all ranks that are there: some did not come in time, two have one number, or facts differ.
    """
    lead = _lead if mine.rank == 0 else _follow
    name, trouble = lead(store, mine, time.monotonic() + timeout, timeout)
    if trouble:
        raise LaunchError(trouble)
    return name


def _lead(store: Store, mine: RankFacts, deadline: float, timeout: float) -> tuple[str, str]:
    name = uuid.uuid4().hex
    store.set(f"{name}/lead", mine.process)
    store.set("start", name)
    answers = [mine]
    trouble = remark = ""
    all_came = 0.0  # when
    while not trouble:
        answers += _answers(store, name, len(answers))
        trouble, remark = compare(answers)
        if (later := store.get("start").decode()) != name:  # The other one reads this answer, and says the same.
            _answer(store, later, mine)
            trouble = "two ranks have RANK=0"
        if store.check([f"{name}/other lead"]):
            trouble = f"two ranks have RANK=0, the other is {store.get(f'{name}/other lead').decode()}; {_TWO_JOBS}"
        now = time.monotonic()
        if not trouble and len(answers) == mine.world_size:
            all_came = all_came or now
            if now >= all_came + grace(answers, timeout):
                break
        elif not trouble and now > deadline:
            trouble = _absent(answers, mine.world_size, timeout)
        if not trouble:
            time.sleep(_SHORTEST_SECONDS)
    store.set(f"{name}/verdict", json.dumps([trouble, remark]))
    if remark:
        warnings.warn(remark, RuntimeWarning, stacklevel=5)
    if trouble:
        time.sleep(_STAY_SECONDS)
    return name, trouble


def _follow(store: Store, mine: RankFacts, deadline: float, timeout: float) -> tuple[str, str]:
    name, latest, pause = "", "", _SHORTEST_SECONDS
    # Rank 0 may wait for others to contradict when all have come.
    while time.monotonic() < deadline + (_LONG_GRACE if name else 0):
        latest = store.get("start").decode() if store.check(["start"]) else ""
        is_new = latest not in ("", name)
        if is_new and not store.check([f"{latest}/verdict"]):  # With one, it is an earlier start.
            name = latest
            _answer(store, name, mine)
        if name and store.check([f"{name}/verdict"]):
            trouble, _ = json.loads(store.get(f"{name}/verdict"))
            return name, trouble
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SECONDS)
    if not name:
        trouble = f"rank 0 of {mine.world_size} did not come within {timeout:g} s"
        if latest and store.check([f"{latest}/lead"]):  # Of an earlier start of this job, or of another job.
            lead = store.get(f"{latest}/lead").decode()
            trouble += f"; a job that has begun has its store at this port, with {lead} as rank 0"
        return name, trouble
    return name, _absent([RankFacts(0, 0, {}, None), *_answers(store, name, 1)], mine.world_size, timeout)


def warn_lead(store: Store, mine: RankFacts) -> str:
    """Tells the rank 0 whose store this is that there is another one; returns its description, "" if it has none.

    A start that has its verdict goes on: nobody of this rank's job is in it.
    """
    deadline = time.monotonic() + _SHORT_GRACE
    while not store.check(["start"]):
        if time.monotonic() > deadline:
            return ""
        time.sleep(_SHORTEST_SECONDS)
    name = store.get("start").decode()
    store.set(f"{name}/other lead", mine.process)
    return store.get(f"{name}/lead").decode()


def _answer(store: Store, name: str, mine: RankFacts) -> None:
    # Counted, so that the answers of two ranks with one number both stand there.
    store.set(f"{name}/answer {store.add(f'{name}/answers', 1)}", json.dumps(asdict(mine)))


def _answers(store: Store, name: str, first: int) -> list[RankFacts]:
    """The answers that are there, from number `first` (counted from 1) on."""
    keys = (f"{name}/answer {number}" for number in itertools.count(first))
    present_keys = itertools.takewhile(lambda key: store.check([key]), keys)
    return [RankFacts(**json.loads(store.get(key))) for key in present_keys]


def _absent(answers: Sequence[RankFacts], world_size: int, timeout: float) -> str:
    present = {answer.rank for answer in answers}
    absent = ", ".join(str(rank) for rank in range(world_size) if rank not in present)
    return f"rank {absent or 0} of {world_size} did not come within {timeout:g} s, or could not stay"


def compare(answers: Sequence[RankFacts]) -> tuple[str, str]:
    """Says why ranks can't run together, and differences that they can run with but should not have; "" for nothing.

    Versions may differ in their third number. `answers` begins with rank 0's.
    """
    first, remarks = answers[0], list[str]()
    seen = {first.rank}
    for other in answers[1:]:
        other_rank = f"rank {other.rank}"
        if other.world_size != first.world_size:
            return f"WORLD_SIZE is {first.world_size} on rank {first.rank} and {other.world_size} on {other_rank}", ""
        if other.rank in seen:
            twin = next(answer for answer in answers if answer.rank == other.rank)
            other_rank = f": {twin.process}; and {other.process}" if other.process else ""
            return f"two ranks have RANK={other.rank}{other_rank}", ""
        seen.add(other.rank)
        for name in (*_PROOFS, "SLURM_JOB_ID"):
            first_id, other_id = first.job.get(name), other.job.get(name)
            if first_id and other_id and first_id != other_id:
                return f"{name} is {first_id} on rank {first.rank} and {other_id} on {other_rank}; {_TWO_JOBS}", ""
        for package in first.versions.keys() & other.versions.keys():
            first_version, other_version = first.versions[package], other.versions[package]
            if first_version == other_version:
                continue
            difference = f"{package} is {first_version} on rank {first.rank} and {other_version} on {other_rank}"
            if first_version.split(".")[:2] != other_version.split(".")[:2]:
                return f"{difference}: install the same version on all machines", ""
            remarks.append(difference)
        # No NaN is equal to another one, and these are no difference.
        if other.config != first.config and (names := differences(first.config, other.config)):
            difference = f"rank {first.rank} and {other_rank} have different configurations: {'; '.join(names[:10])}"
            return f"{difference}. Give all ranks the same config", ""
    return "", f"the ranks have different releases: {'; '.join(remarks)}" if remarks else ""


def differences(ours: Any, theirs: Any) -> list[str]:
    """Names the differences of two configurations, rank 0's and another.

    >>> differences({"model": {"width": 32, "depth": 2}}, {"model": {"width": 64, "depth": 2}, "lr": 1})
    ['lr is missing and 1', 'model.width is 32 and 64']
    """
    left, right = dict(_leaves(ours)), dict(_leaves(theirs))
    return [
        f"{name or 'it'} is {left.get(name, 'missing')} and {right.get(name, 'missing')}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name, "missing") != right.get(name, "missing")
    ]


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(tree)
