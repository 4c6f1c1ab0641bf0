"""Which waits between streams are needed: each is taken out in turn, and the race checker is asked.

    python tools/planted_races.py                     # all of them: a table; some minutes
    python tools/planted_races.py --only transfer     # those of files whose path contains a word
    python tools/planted_races.py --smoke             # the first one
    python tools/planted_races.py --check             # whether each wait is planted or explained
    python tools/planted_races.py --date 2026-11-29   # also writes benchmarks/results/2026-11-29-planted_races.*

A wait that is missing gives wrong numbers on a GPU, now and then. `simulate(races=True)` finds it on any machine, if a
test reaches the line: so each join of streams, wait for an event, `record_stream`, wait for a transfer and reference
that keeps memory alive is left out of the source, one at a time, and the tests of races run that train by that way.

*found*: a test raised `RaceError`. *other error*: another check has stopped it. *not needed*: no test failed; the last
column says why the line stays. Each fault is planted in a process of its own, in the source as it is imported. Waits
that are not planted are listed in the script with their reason, and nothing runs if one is missing there.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.machinery
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from report import Table, save

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "packages"


@dataclass(frozen=True)
class Fault:
    """A line that is replaced.

    Attributes:
        file: From `packages/`, without `src/` and the package's folder in it.
        line: The text that is replaced; it occurs once.
        planted: What stands in its place.
        tests: The file of tests, below `packages/`, and which of them.
        why: Why the line stays, where it is not needed in the order of streams.
    """

    file: str
    line: str
    planted: str
    tests: tuple[str, str]
    why: str = ""

    @property
    def path(self) -> Path:
        package, _, rest = self.file.partition("/")
        return PACKAGES / package / "src" / package.replace("-", "_") / rest


@dataclass(frozen=True)
class Outcome:
    """What the tests have said of a fault."""

    file: str
    line: str
    outcome: str
    said: str
    why: str
    seconds: float


def of_fsdp(names: str) -> tuple[str, str]:
    return "scale-fsdp/tests/test_fsdp_races.py", names


ON_HOST = of_fsdp("shards and host")
COPIES = of_fsdp("late or back or one_rank")
OPTIMIZER = of_fsdp("optimizer and host")
CHECKPOINT = ("scale-checkpoint/tests/test_checkpoint_races.py", "offload or waits or never or blocks")
IN_FILE = ("scale-checkpoint/tests/test_checkpoint_races.py", "in_a_file")
CORE = ("scale-check/tests/test_races.py", "snapshot or outlives")
STREAMS, BUFFER = "scale-core/device/streams.py", "scale-core/flat/buffer.py"
HOST_STAGED = "scale-core/flat/host_staged.py"
TRANSFER, UPDATE = "scale-fsdp/offload/transfer.py", "scale-fsdp/offload/host_update.py"
PIPE, CHANNEL = ("scale-pipe/tests/test_pipe_races.py", "1f1b or zb"), "scale-pipe/distributed/p2p.py"
STORE, STORAGE = "scale-checkpoint/offload/store.py", "scale-checkpoint/offload/storage.py"
FLAT_STORAGE, GRADIENT = "scale-core/flat/storage.py", "scale-core/flat/gradient.py"
OSS, OSS_BUCKET = ("scale-oss/tests/test_oss_races.py", ""), "scale-oss/buckets/bucket.py"
TP, RING, ASYNC_TP = ("scale-tp/tests/test_tp_races.py", ""), "scale-tp/attention/ring.py", "scale-tp/async_tp/"
ADASCALE = ("scale-adascale/tests/test_adascale_races.py", "")
DISPATCHER = "scale-moe/token_dispatcher.py"
MOE = ("../tests/compositions/test_races_of_the_table.py", "moe")
IN_FLIGHT = "publishing waits once more; here it limits what is in flight, and names the ranks that differ"
BLOCKS = "for speed: a copy from or to memory that is not pinned blocks"
WAIT_FOR = "                    wait_for(self.op, *works.pop(0), limit_seconds, self._rank)"
NO_WAIT = "                    works.pop(0)"

FAULTS = [
    Fault(
        "scale-core/optim/step_hooks.py",
        "            owner.wait_sent()  # A forward",
        "            pass  # A forward",
        of_fsdp("without_a_backward"),
    ),
    Fault(
        "scale-fsdp/fsdp_module.py",
        "                        buffer.wait_sent()  # The caller",
        "                        pass  # The caller",
        of_fsdp("by_hand"),
    ),
    Fault(
        STREAMS,
        "            self._stream.wait_stream(self._module.current_stream(self._device))",
        "            pass",
        ON_HOST,
    ),
    Fault(
        STREAMS, "        self._module.current_stream(self._device).wait_stream(self._stream)", "        pass", ON_HOST
    ),
    Fault(STREAMS, "            tensor.record_stream(current_stream(tensor.device))", "            pass", ON_HOST),
    Fault(
        STREAMS,
        "        stream.record().synchronize()\n        return copy",
        "        return copy",
        of_fsdp("late or back"),
    ),
    Fault(STREAMS, "    stream.join()\n    return target", "    return target", COPIES),
    Fault("scale-core/comm/work.py", WAIT_FOR, NO_WAIT, of_fsdp("plain or int8")),
    Fault("scale-core/comm/work.py", WAIT_FOR, NO_WAIT, ("scale-oss/tests/test_oss_races.py", "")),
    Fault("scale-core/comm/work.py", WAIT_FOR, NO_WAIT, ("scale-tp/tests/test_tp_races.py", "")),
    Fault("scale-core/comm/work.py", WAIT_FOR, NO_WAIT, ("scale-adascale/tests/test_adascale_races.py", "")),
    Fault(
        "scale-core/comm/work.py",
        "        self._keep = list(keep)",
        "        self._keep = []",
        of_fsdp("plain or int8"),
        "NCCL keeps tensors until its handle is waited for; gloo does not",
    ),
    Fault(BUFFER, "            if copies_shard:\n                self.wait_sent()", "            pass", of_fsdp("fp8")),
    Fault(
        HOST_STAGED,
        "        self.copies.stream.join()\n        return",
        "        return",
        ON_HOST,
    ),
    Fault(
        BUFFER,
        "        if self._gathering is not None:\n            self.wait_gathered(limit_seconds)\n        part_group",
        "        self._gathering = None\n        part_group",
        of_fsdp("discarded"),
    ),
    Fault(
        BUFFER,
        "                self._host_copies.stream.join()",
        "                pass",
        of_fsdp("discarded or fails"),
        "a transfer that failed has not waited for what was computed before it; these succeed",
    ),
    Fault(
        BUFFER,
        "        self.release()\n        self.wait_sent()\n\n    def load",
        "        self.release()\n\n    def load",
        of_fsdp("discarded or fails"),
    ),
    Fault(BUFFER, "        self.wait_sent()\n        super().load", "        super().load", of_fsdp("discarded")),
    Fault(
        HOST_STAGED,
        "        self.copies.stream.join()\n        return",
        "        return",
        of_fsdp("discarded"),
    ),
    Fault(
        HOST_STAGED,
        "                self.copies.start(all_gather_input, local_shard)\n            stream.join()",
        "                self.copies.start(all_gather_input, local_shard)",
        of_fsdp("fp8"),
    ),
    Fault(
        HOST_STAGED,
        "        with stream.run():  # The collective",
        "        if True:  # The collective",
        of_fsdp("host and int8"),
        "for speed: the copy runs beside the computation",
    ),
    Fault(GRADIENT, "                copied.synchronize()", "                pass", ON_HOST),
    Fault(HOST_STAGED, "            self._sent.synchronize()", "            pass", ON_HOST),
    Fault("scale-snapshot/staging.py", "        current_stream(device).synchronize()", "        pass", CORE),
    Fault(
        "scale-core/state/state_dict.py",
        "    wait_sent()  # They are",
        "    pass  # They are",
        of_fsdp("writes_to_its_state"),
    ),
    Fault(
        "scale-fsdp/runtime/root.py",
        "            for buffer in unit.buffers:\n                buffer.wait_sent()",
        "            pass",
        of_fsdp("evaluates"),
    ),
    Fault(
        "scale-fsdp/runtime/checks.py",
        "        for buffer in unit.buffers:\n            buffer.wait_sent()",
        "        pass",
        of_fsdp("average"),
    ),
    Fault(
        "scale-fsdp/ema.py",
        "                for buffer in unit.buffers:\n                    buffer.wait_sent()",
        "                pass",
        of_fsdp("average"),
    ),
    Fault(
        TRANSFER, "        if self.free is not None:\n            self.free.synchronize()", "        pass", OPTIMIZER
    ),
    Fault(
        TRANSFER, "        with self._to_host.run():", "        with self._to_host.run(after_caller=False):", OPTIMIZER
    ),
    Fault(TRANSFER, "        self._to_device.join()", "        pass", OPTIMIZER),
    Fault(
        TRANSFER,
        "        self._arrived.synchronize()",
        "        pass",
        OPTIMIZER,
        "parameters follow on the same stream, and their bucket is waited for; a copy by itself would need it",
    ),
    Fault(TRANSFER, "self.copy_out(copies), write_backs, grads)", "self.copy_out(copies), write_backs, [])", OPTIMIZER),
    Fault(
        TRANSFER,
        "        self._source = None if grad.is_contiguous() else part_grad",
        "        self._source = None",
        OPTIMIZER,
        "a view in these tests; it counts where a part of a gradient is copied to be dense",
    ),
    Fault(UPDATE, "            bucket.ready.synchronize()", "            pass", OPTIMIZER),
    Fault(
        UPDATE,
        "part.param_on_host()], factor)\n        self.join()",
        "part.param_on_host()], factor)",
        OPTIMIZER,
    ),
    Fault(
        "scale-fsdp/offload/backward.py",
        "            raise errors[0]\n        self._update.join()",
        "            raise errors[0]",
        OPTIMIZER,
    ),
    Fault(
        "scale-fsdp/offload/backward.py",
        "        errors = [error for future in futures if (error := future.exception()) is not None]",
        "        errors: list[BaseException] = []",
        OPTIMIZER,
        "not seen: a simulated worker's copies are launched at once, before the stream is joined",
    ),
    Fault(
        STORAGE, "        with self._to_host.run():", "        with self._to_host.run(after_caller=False):", CHECKPOINT
    ),
    Fault(
        STORAGE,
        "        with self._to_device.run():",
        "        with self._to_device.run(after_caller=False):",
        CHECKPOINT,
    ),
    Fault(STORAGE, "        self._streams.wait(self.copied)\n", "", CHECKPOINT),
    Fault(STORE, "        copy_streams(self.device).wait(fetched)", "        pass", CHECKPOINT),
    Fault(STORE, "            self._fetched[1].synchronize()", "            pass", CHECKPOINT),
    Fault(
        STORE,
        "self._in_flight.append((stored, source, tensor.detach(), tensor._version))",
        "pass",
        CHECKPOINT,
    ),
    Fault(STORE, "                copy_streams(source.device).wait(stored.copied)", "                pass", CHECKPOINT),
    Fault(
        CHANNEL,
        "        for work in started.works:\n            self._wait(slot, work)",
        "        pass",
        PIPE,
    ),
    Fault(
        CHANNEL,
        "            for work in self._sent.pop(slot)[1]:\n                self._wait(slot, work)",
        "            self._sent.pop(slot)",
        PIPE,
        "NCCL keeps what is sent until its handle is waited for; gloo does not",
    ),
    Fault(
        "scale-oss/buckets/bucket.py",
        "            self.wait()  # Nothing is sent.",
        "            pass",
        ("scale-oss/tests/test_oss_races.py", ""),
        "it is called where nothing is sent, and only publishes the parameters",
    ),
    Fault(
        "scale-core/state/state_dict.py",
        "    wait_sent()\n    for key, source in sources.items():",
        "    for key, source in sources.items():",
        of_fsdp("loads_its_state"),
    ),
    Fault(
        "scale-fsdp/offload/backward.py",
        "        self._futures.clear()\n        self._update.join()",
        "        self._futures.clear()",
        of_fsdp("loads_an_optimizer"),
    ),
    Fault(
        "scale-fsdp/offload/backward.py",
        "        wait(self._futures)\n        self._futures.clear()",
        "        self._futures.clear()",
        of_fsdp("loads_an_optimizer"),
        "not seen: a simulated worker's copies are launched at once, before the stream is joined",
    ),
    Fault(UPDATE, "            transfer.join()", "            pass", OPTIMIZER),
    Fault(STORAGE, "        self.copied.synchronize()", "        pass", IN_FILE),
    Fault(
        STORAGE,
        "        self.written.result()",
        "        pass",
        IN_FILE,
        "not seen: what a simulated worker is given to write is written at once",
    ),
    Fault(STORAGE, "        event.wait(current_stream(self.device))", "        pass", CHECKPOINT),
    Fault(BUFFER, "            self._host_copies.wait()", "            pass", ON_HOST),
    Fault(
        "scale-core/flat/live_buffers.py", "        buffer.wait_sent()", "        pass", of_fsdp("writes_to_its_state")
    ),
    # Pinned memory: without it a copy blocks, which is slow and not wrong.
    Fault(STREAMS, "pin_memory=has_streams(device))", "pin_memory=False)", OPTIMIZER, BLOCKS),
    Fault(STREAMS, "device=device, pin_memory=pin)", "device=device, pin_memory=False)", ON_HOST, BLOCKS),
    Fault(STREAMS, "(tensor.pin_memory() if has_streams(device) else tensor)", "tensor", of_fsdp("plain"), BLOCKS),
    Fault(
        FLAT_STORAGE, "shard.pin_memory() if self._pins and not shard.is_pinned() else shard", "shard", ON_HOST, BLOCKS
    ),
    Fault(
        FLAT_STORAGE, "device=self.devices.shard, pin_memory=self._pins)", "device=self.devices.shard)", ON_HOST, BLOCKS
    ),
    # Waits for collectives, one by one.
    Fault(
        BUFFER,
        "            work.wait(limit_seconds)\n            deferred",
        "            late(work)\n            deferred",
        of_fsdp("plain"),
    ),
    Fault(
        BUFFER,
        "self._plain_transport.all_gather(self.shard.data, buffer, tag=tag).wait(limit_seconds)",
        "late(self._plain_transport.all_gather(self.shard.data, buffer, tag=tag))",
        of_fsdp("discarded or evaluates"),
    ),
    Fault(GRADIENT, "reduced = work.wait(limit_seconds)", "reduced = late(work)", of_fsdp("plain")),
    Fault(GRADIENT, "self._keep(work.wait(limit_seconds))", "self._keep(late(work))", of_fsdp("hybrid")),
    Fault(
        OSS_BUCKET,
        "                self._gather[0].wait(limit_seconds)",
        "                late(self._gather[0])",
        OSS,
    ),
    Fault(
        "scale-oss/sharded_ddp.py",
        "                self._contract.wait(bucket.gather_event, bucket.wait)",
        "                pass",
        OSS,
    ),
    Fault(
        "scale-oss/sharded_ddp.py",
        "            if not waiting.has_run:\n                waiting.wait()",
        "            pass",
        OSS,
        "a parameter waits by itself where a function of torch reads it; this is for other readers",
    ),
    Fault("scale-oss/step.py", "        self.wait()\n        loss = None", "        loss = None", OSS),
    Fault(
        "scale-oss/step.py",
        "            if bucket.is_gathering and (waits or bucket.is_read_past_parameters()):\n"
        "                self.contract.wait(bucket.gather_event, bucket.wait)",
        "            pass",
        OSS,
    ),
    Fault(
        "scale-oss/reducer.py",
        "                self._contract.wait(bucket.reduce_event, bucket.reduction.wait)",
        "                pass",
        OSS,
        IN_FLIGHT,
    ),
    Fault(
        "scale-oss/reducer.py",
        "        self.contract.wait(bucket.reduce_event, bucket.reduction.wait)",
        "        pass",
        OSS,
        IN_FLIGHT,
    ),
    Fault(
        "scale-oss/local_sgd.py",
        "            return work.wait(contract.limit_seconds)",
        "            return late(work)",
        OSS,
    ),
    Fault("scale-oss/local_sgd.py", "        contract.wait(event, work.wait)", "        pass", OSS),
    Fault(
        "scale-tp/comm.py", "                result = self.work.wait()", "                result = late(self.work)", TP
    ),
    Fault(
        RING,
        "        packed = packed if passing is None else passing.wait()\n    return",
        "        packed = packed if passing is None else late(passing)\n    return",
        TP,
    ),
    Fault(
        RING,
        "        packed = packed if passing is None else passing.wait()\n        arriving",
        "        packed = packed if passing is None else late(passing)\n        arriving",
        TP,
    ),
    Fault(RING, "of_packed += arriving.wait()", "of_packed += late(arriving)", TP),
    Fault(RING, "if arriving is None else arriving.wait())", "if arriving is None else late(arriving))", TP),
    Fault(
        "scale-tp/attention/ulysses.py",
        "        all_to_all(received, flat_input",
        "        unwaited(all_to_all)(received, flat_input",
        TP,
    ),
    Fault(ASYNC_TP + "all_reduce_matmul.py", "return None, pending.wait(),", "return None, late(pending),", TP),
    Fault(
        ASYNC_TP + "all_reduce_matmul.py",
        "                    previous[0].copy_(previous[1].wait())",
        "                    previous[0].copy_(late(previous[1]))",
        TP,
    ),
    Fault(
        ASYNC_TP + "all_reduce_matmul.py",
        "        previous[0].copy_(previous[1].wait())\n        return",
        "        previous[0].copy_(late(previous[1]))\n        return",
        TP,
    ),
    Fault(
        ASYNC_TP + "collective_matmul.py",
        "if gathering is None else gathering.wait())",
        "if gathering is None else late(gathering))",
        TP,
    ),
    Fault(
        ASYNC_TP + "collective_matmul.py",
        "if scattering is None else scattering.wait()",
        "if scattering is None else late(scattering)",
        TP,
    ),
    Fault(ASYNC_TP + "chunks.py", "received, chunk = pending.wait(),", "received, chunk = late(pending),", TP),
    Fault(ASYNC_TP + "chunks.py", "pieces = pending.wait().split(", "pieces = late(pending).split(", TP),
    Fault(
        "scale-tp/layers/linear_ops.py",
        "    all_to_all(received, sent, group",
        "    unwaited(all_to_all)(received, sent, group",
        TP,
    ),
    Fault(
        "scale-adascale/measurement/norm_reduction.py",
        "        vector = pending.wait()\n        if",
        "        vector = late(pending)\n        if",
        ADASCALE,
    ),
    Fault(
        DISPATCHER,
        "            all_to_all(\n                output,\n                rows.contiguous()",
        "            unwaited(all_to_all)(\n                output,\n                rows.contiguous()",
        MOE,
    ),
    Fault(
        DISPATCHER,
        "        all_to_all(\n            received,\n            sent,",
        "        unwaited(all_to_all)(\n            received,\n            sent,",
        MOE,
        "the host's sizes are made of it, which have no values in a simulation",
    ),
    Fault(
        "scale-moe/moe.py",
        "all_reduce(load, self.batch_group).wait()",
        "late(all_reduce(load, self.batch_group))",
        MOE,
        "no test of races balances by a bias",
    ),
]


READ_AT_ONCE = "from memory that is not pinned, which has been read when the call returns"
ELSEWHERE = {
    "scale-adascale/adam_preconditioner.py": READ_AT_ONCE,
    "scale-adascale/squared_norms.py": READ_AT_ONCE,
    "scale-adascale/measurement/norm_reduction.py": READ_AT_ONCE,
    "scale-checkpoint/planner/step.py": "measures a time",
    "scale-core/consistency/all_ranks.py": "a thread without tensors of a device",
    "scale-core/launch/launcher.py": "processes",
    "scale-fsdp/state_dict/full.py": "a tensor of a full state dict can't be simulated; `FlatBuffer.load` has the same",
    "scale-pipe/microbatch.py": "from the caller's memory, on the stream that computes with it",
    "scale-pipe/partition/profile.py": "measures a time",
    "scale-tools/doctor/environment.py": "measures a time",
    "scale-train/launch/launcher.py": "threads that read from processes",
    "scale-train/training/state.py": "measures a time",
}
"""Files with waits that are not planted, and why."""

NOT_WAITS = {
    ("scale-core/device/streams.py", "non_blocking="): "the copies whose waits are planted; one that blocks is slower",
    ("scale-fsdp/offload/transfer.py", "after_caller=False"): "leaves a wait out, because the host has made it",
    ("scale-snapshot/staging.py", "non_blocking=True"): "the copies whose wait is planted; one that blocks is slower",
    ("scale-snapshot/staging.py", "pin_memory="): BLOCKS,
}
"""Lines of files, by a part of their text, that are no waits, and why they are as they are."""

_WAITS = ("wait_stream", "wait_event", "synchronize", "record_stream", "wait_sent", "pin_memory")
_OPTIONS = ("non_blocking", "pin_memory")


def waits_in(path: Path) -> list[int]:
    """The lines that wait for a stream, an event, a transfer or a thread, pin memory, or start a copy that is late."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        joins = name == "join" and not node.args
        late = name in ("copy_", "to", "empty", "zeros", "tensor", "run") and any(
            word.arg in (*_OPTIONS, "after_caller") for word in node.keywords
        )
        if name in _WAITS or joins or late:
            lines.append(node.end_lineno or node.lineno)
    return sorted(set(lines))


def planted_lines(file: str) -> set[int]:
    """The lines of a file that some fault replaces."""
    lines: set[int] = set()
    for fault in FAULTS:
        if fault.file == file and (source := fault.path.read_text(encoding="utf-8")).count(fault.line):
            start = source.index(fault.line)
            lines |= set(range(source.count("\n", 0, start) + 1, source.count("\n", 0, start + len(fault.line)) + 2))
    return lines


def problems() -> list[str]:
    """Faults whose line is gone or is there twice, and waits that nobody has planted or explained."""
    found = []
    for fault in FAULTS:
        count = fault.path.read_text(encoding="utf-8").count(fault.line) if fault.path.exists() else 0
        if count != 1:
            found.append(f"{fault.file} has {count} times: {fault.line}")
    for package in sorted(PACKAGES.glob("scale-*")):
        root = package / "src" / package.name.replace("-", "_")
        for path in sorted(root.rglob("*.py")):
            file = f"{package.name}/{path.relative_to(root)}"
            if package.name in ("scale-check", "scale-fairscale") or file in ELSEWHERE:
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [
                f"{file}:{line} waits, and is neither planted nor explained: {lines[line - 1].strip()}"
                for line in sorted(set(waits_in(path)) - planted_lines(file))
                if not any(other == file and part in lines[line - 1] for other, part in NOT_WAITS)
            ]
    return found


def planted(fault: Fault) -> str:
    """The source with the fault in it."""
    source = fault.path.read_text(encoding="utf-8")
    before, after = re.split(f"({re.escape(fault.line)})", source, maxsplit=1)[::2]
    return before + fault.planted + after


def late(work: Any, kept: list[Any] = []) -> Any:  # noqa: B006  # they live as long as the process
    """The result of a collective that nobody waits for; its handle is kept, which would wait at its end."""
    if hasattr(work, "work"):  # A pending tensor of scale_tp.
        result = late(work.work)
        return result if work.finish is None else work.finish(result)
    kept.append(work)
    return work._result


def unwaited(start: Callable[..., Any]) -> Callable[..., Any]:
    """A collective whose handle does not wait."""

    class Handle:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._work = start(*args, **kwargs)

        def wait(self, *_: Any) -> Any:
            return late(self._work)

    return Handle


class Watch:
    """What pytest tells of failures."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.num_tests = 0

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        self.num_tests += call.when == "call"
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            self.failures.append(f"{type(call.excinfo.value).__name__}: {call.excinfo.value}")


def try_here(fault: Fault) -> dict[str, Any]:
    """Runs the tests of a fault in this process, which imports our packages now."""
    path, source, get_code = str(fault.path), planted(fault), importlib.machinery.SourceFileLoader.get_code

    def get_changed_code(loader: Any, name: str) -> Any:
        if loader.get_filename(name) == path:
            return compile(source, path, "exec")
        return get_code(loader, name)

    vars(builtins).update(late=late, unwaited=unwaited)
    importlib.machinery.SourceFileLoader.get_code = get_changed_code  # type: ignore[method-assign]
    file, names = fault.tests
    os.chdir(PACKAGES / file.split("/")[0])
    watch = Watch()
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-s"]
    code = pytest.main([str(PACKAGES / file), *options, *(["-k", names] if names else [])], plugins=[watch])
    return {"code": int(code), "failures": watch.failures, "tests": watch.num_tests}


def try_fault(fault: Fault) -> Outcome:
    """Plants a fault in a process of its own."""
    began = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            answer = try_here(fault)
        except BaseException as error:
            answer = {"code": 99, "failures": [repr(error)], "tests": 0}
        os.write(writing, json.dumps(answer)[:60_000].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    failures: list[str] = answer["failures"]
    races = [failure for failure in failures if "RaceError" in failure or "Race(earlier" in failure]
    if races:
        outcome, said = "found", races[0]
    elif failures:
        outcome, said = "other error", failures[0]
    elif answer["tests"]:
        outcome, said = "not needed", f"{answer['tests']} tests pass"
    else:
        outcome, said = "no test", f"pytest ended with {answer['code']}"
    first = fault.line.strip().splitlines()
    line = " ".join(part.strip() for part in first)
    return Outcome(fault.file, line, outcome, said, fault.why, round(time.monotonic() - began, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Leaves out each wait between streams.")
    parser.add_argument("--only", default="", help="a word in the path of the file")
    parser.add_argument("--smoke", action="store_true", help="the first fault")
    parser.add_argument("--check", action="store_true", help="only whether each wait is planted or explained")
    parser.add_argument("--date", help="also write results/, of this date")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if found := problems():
        sys.exit("\n".join(found))
    if options.check:
        return
    faults = [fault for fault in FAULTS if options.only in fault.file][: 1 if options.smoke else None]
    outcomes = []
    for fault in faults:
        outcomes.append(try_fault(fault))
        one = outcomes[-1]
        print(f"{one.outcome:<12} {one.seconds:5.1f} s  {one.file}: {one.line[:90]}", flush=True)
        if one.outcome != "found":
            print(f"             {one.said[:300]}", flush=True)
    rows = [
        [one.file, f"`{one.line[:100]}`", one.outcome, one.why if one.outcome != "found" else _streams_of(one.said)]
        for one in outcomes
    ]
    counts = ", ".join(
        f"{sum(one.outcome == kind for one in outcomes)} {kind}"
        for kind in ("found", "other error", "not needed", "no test")
    )
    table = Table(
        f"{len(outcomes)} waits, each left out: {counts}", ["file", "left out", "outcome", "what is said"], rows
    )
    print(table.markdown())
    if options.date:
        save("planted_races", options.date, __doc__ or "", [table], [asdict(one) for one in outcomes])
    if any(one.outcome == "no test" for one in outcomes):
        sys.exit(1)


def _streams_of(said: str) -> str:
    """The two accesses of a race, without their lines."""
    said = said.replace("Race(earlier='", "first: ").replace("later='", "second: ")
    found = re.findall(r"(?:first|second):\s+(.*?)(?: \(made at [^)]*\))?: ", said)
    return "; ".join(found)


if __name__ == "__main__":
    main()
