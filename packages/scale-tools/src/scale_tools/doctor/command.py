"""`scale-train doctor`: looks, tests two ranks, prints a line for each thing and a verdict.

Exit codes: 0 everything works; 1 something does not, and the line below it has the remedy; 2 wrong input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import NamedTuple

import torch
import torch.distributed as dist

from scale_core.launch import init_distributed
from scale_tools.doctor.environment import Finding, look
from scale_tools.doctor.options import DoctorOptions
from scale_tools.doctor.self_test import MOST_DIFFERENCE, SelfTest, run_self_test
from scale_train.configuration.resolve import resolve_device
from scale_train.errors import InputError, reported
from scale_train.launch.launcher import is_under_torchrun, launch_and_collect, shortened

FAILED = 1
_RANKS = 2
LIMIT_FACTOR = 1.5
"""Times the longest wait for a rank: how long the test of ranks that are started here may take."""


def doctor(options: DoctorOptions) -> int:
    """Runs the command and returns its exit code."""
    return reported(lambda: _doctor(options))


def _doctor(options: DoctorOptions) -> int:
    if not options.limit_seconds > 0:
        raise InputError(f"--limit-seconds {options.limit_seconds:g}: a number above 0 is needed")
    device, began = _device(options), time.monotonic()
    findings = look()
    is_first_rank = os.environ.get("RANK", "0") == "0"
    if not is_first_rank:
        findings = [finding for finding in findings if finding.verdict == "failed"]
    if not any(finding.verdict == "failed" and finding.name in ("backends", "network") for finding in findings):
        outcome = _as_rank(options, device) if is_under_torchrun(os.environ) else _on_new_ranks(options, device)
        findings += judge(outcome, device)
    failed = [finding for finding in findings if finding.verdict == "failed"]
    if is_first_rank or failed:
        _print(findings, options, time.monotonic() - began)
    return FAILED if failed else 0


def _device(options: DoctorOptions) -> str:
    """The device of the ranks: cuda if each of them has a GPU."""
    device = resolve_device(options.device)
    if device == "cpu" or is_under_torchrun(os.environ) or torch.cuda.device_count() >= _RANKS:
        return device
    if options.device == "cuda":
        raise InputError(f"--device cuda: {_RANKS} ranks need {_RANKS} GPUs, and there is one; take --device cpu")
    return "cpu"


def _as_rank(options: DoctorOptions, device: str) -> SelfTest | str:
    """The findings of torchrun's ranks, or why they could not meet."""
    try:
        group = init_distributed(device=device, limit_seconds=options.limit_seconds)
        torch_device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        return run_self_test(group, torch_device)
    except Exception as error:
        return shortened(f"{type(error).__name__}: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class TimedOut(NamedTuple):
    """Ranks that were ended, as they took too long: the message, and the remedy."""

    text: str
    advice: str


def _on_new_ranks(options: DoctorOptions, device: str) -> SelfTest | TimedOut | str:
    """Starts two ranks; returns their findings, or why there are none."""
    limit, ended = options.limit_seconds * LIMIT_FACTOR, threading.Event()

    def end() -> None:
        ended.set()
        os.kill(os.getpid(), signal.SIGTERM)  # It is passed on to the ranks, and handled by who waits for them.

    timer = threading.Timer(limit, end)
    timer.start()
    try:
        code, outcomes = launch_and_collect(_as_rank, _RANKS, options, device, device=device, grace=1.0)
    finally:
        timer.cancel()
    if ended.is_set() and code:
        return _timed_out(limit, device)
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        raise SystemExit(code)  # Somebody has stopped it: that says nothing of the ranks.
    errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if errors or code or not outcomes:
        return errors[0] if errors else f"the ranks ended with code {code}"
    results: list[SelfTest] = outcomes
    return next((result for result in results if not result.is_right), results[0])


def _timed_out(limit: float, device: str) -> TimedOut:
    """Ranks hang, or the machine is too busy for them."""
    cores = os.cpu_count() or 1
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    text = f"no result of the {_RANKS} ranks within {limit:g} s"
    if busy <= 1.5 * cores:
        return TimedOut(f"{text}: they hang", _advice(device))
    text += f", while {busy:.0f} processes share {cores} cores here: the machine may be too busy"
    return TimedOut(text, "try again when the machine is idle, or with --limit-seconds 60")


def judge(outcome: SelfTest | TimedOut | str, device: str) -> list[Finding]:
    """Returns the verdict on the ranks, and the speed of their link."""
    if isinstance(outcome, TimedOut):
        return [Finding("self-test", "failed", outcome.text, outcome.advice)]
    if isinstance(outcome, str):
        return [Finding("self-test", "failed", f"the ranks could not train together: {outcome}", _advice(device))]
    where = f"{outcome.ranks} ranks ({outcome.backend})"
    values = {"difference": outcome.difference, "ranks": outcome.ranks, "backend": outcome.backend}
    if not outcome.is_right:
        text = f"a step of fully_shard on {where} differs from one process by {outcome.difference:.2g}"
        advice = f"at most {MOST_DIFFERENCE:g} is rounding: report it with the output of scale-train doctor --json"
        findings = [Finding("self-test", "failed", text, advice, values)]
    else:
        text = f"a step of fully_shard on {where} equals one process (largest difference {outcome.difference:.1g})"
        findings = [Finding("self-test", "ok", text, values=values)]
    rates = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in outcome.bytes_per_second.items())
    values = {"bytes_per_second": outcome.bytes_per_second}
    return [*findings, Finding("link", "ok", f"each rank sends: {rates}", values=values)]


def _advice(device: str) -> str:
    if device == "cuda":
        return "NCCL_DEBUG=INFO shows what NCCL tries; --device cpu tests the ranks without the GPUs"
    return "GLOO_SOCKET_IFNAME names the interface that ranks use; a firewall may close ports between them"


def _print(findings: list[Finding], options: DoctorOptions, seconds: float) -> None:
    failed = [finding.name for finding in findings if finding.verdict == "failed"]
    if options.json:
        report = {"verdict": "failed" if failed else "ok", "seconds": seconds}
        print(json.dumps({**report, "findings": [asdict(finding) for finding in findings]}))
        return
    marks = {"ok": "ok", "note": "note", "failed": "FAILED"}
    for shown in findings:
        print(f"{shown.name:<10} {marks[shown.verdict]:<7} {shown.text}")
        if shown.advice:
            print(f"{'':<18} {shown.advice}")
    verdict = f"does not work: {', '.join(failed)}" if failed else "training on several ranks works here"
    print(f"{'verdict':<10} {'FAILED' if failed else 'ok':<7} {verdict} ({seconds:.0f} s)")
    sys.stdout.flush()
