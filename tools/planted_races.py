"""Which waits between streams are needed: each is taken out in turn, and the race checker is asked.

    python tools/planted_races.py                     # all of them: a table; some minutes
    python tools/planted_races.py --only transfer     # those of files whose path contains a word
    python tools/planted_races.py --smoke             # the first one
    python tools/planted_races.py --date 2026-11-29   # also writes benchmarks/results/2026-11-29-planted_races.*

A wait that is missing gives wrong numbers on a GPU, now and then. `simulate(races=True)` finds it on any machine, if a
test reaches the line: so each join of streams, wait for an event, `record_stream`, wait for a transfer and reference
that keeps memory alive is left out of the source, one at a time, and the tests of races run that train by that way.

*found*: a test raised `RaceError`. *other error*: another check has stopped it. *not needed*: no test failed; the last
column says why the line stays. Each fault is planted in a process of its own, in the source as it is imported.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import os
import re
import sys
import time
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
        line: The text that is replaced; it occurs once, or `nth` says which.
        planted: What stands in its place.
        tests: The file of tests, below `packages/`, and which of them.
        why: Why the line stays, where it is not needed in the order of streams.
    """

    file: str
    line: str
    planted: str
    tests: tuple[str, str]
    why: str = ""
    nth: int = 0

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
CORE = ("scale-check/tests/test_races.py", "snapshot or outlives")
STREAMS, BUFFER = "scale-core/device/streams.py", "scale-core/flat/buffer.py"
HOST_STAGED = "scale-core/flat/host_staged.py"
TRANSFER, UPDATE = "scale-fsdp/offload/transfer.py", "scale-fsdp/offload/host_update.py"
PIPE, CHANNEL = ("scale-pipe/tests/test_pipe_races.py", "1f1b or zb"), "scale-pipe/distributed/p2p.py"
STORE, STORAGE = "scale-checkpoint/offload/store.py", "scale-checkpoint/offload/storage.py"
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
        of_fsdp("loaded"),
    ),
    Fault(
        BUFFER,
        "                self._host_copies.stream.join()",
        "                pass",
        of_fsdp("loaded or failed"),
        "a transfer that failed has not waited for what was computed before it; these succeed",
    ),
    Fault(
        BUFFER,
        "        self.release()\n        self.wait_sent()\n\n    def load",
        "        self.release()\n\n    def load",
        of_fsdp("loaded or failed"),
    ),
    Fault(BUFFER, "        self.wait_sent()\n        super().load", "        super().load", of_fsdp("loaded")),
    Fault(
        HOST_STAGED,
        "        self.copies.stream.join()\n        return",
        "        return",
        of_fsdp("loaded"),
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
    Fault("scale-core/flat/gradient.py", "                copied.synchronize()", "                pass", ON_HOST),
    Fault(HOST_STAGED, "            self._sent.synchronize()", "            pass", ON_HOST),
    Fault("scale-snapshot/staging.py", "        current_stream(device).synchronize()", "        pass", CORE),
    Fault(
        "scale-core/state/state_dict.py",
        "    wait_sent()  # They are",
        "    pass  # They are",
        of_fsdp("written"),
    ),
    Fault(
        "scale-fsdp/runtime/root.py",
        "            for buffer in unit.buffers:\n                buffer.wait_sent()",
        "            pass",
        of_fsdp("evaluation"),
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
]


def planted(fault: Fault) -> str:
    """The source with the fault in it."""
    source = fault.path.read_text(encoding="utf-8")
    assert fault.line in source, f"{fault.file} has no longer: {fault.line}"
    before, after = re.split(f"({re.escape(fault.line)})", source, maxsplit=1)[::2]
    return before + fault.planted + after


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
    parser.add_argument("--date", help="also write results/, of this date")
    options = parser.parse_args()
    torch.set_num_threads(1)
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
