"""Checks without a second rank: versions, devices, backends, memory, and variables of the environment."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Literal

import torch
import torch.distributed as dist

import scale_train
from scale_core import compat
from scale_train.training.memory import format_bytes, machine_bytes

DISTRIBUTIONS = (
    "scale-core",
    "scale-fsdp",
    "scale-oss",
    "scale-pipe",
    "scale-tp",
    "scale-moe",
    "scale-adascale",
    "scale-checkpoint",
    "scale-check",
    "scale-snapshot",
    "scale-train",
    "scale-tools",
    "scale-lightning",
    "scale-fairscale",
)
COPIED_BYTES = 64 << 20
GPU_COPIED_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: The check, for example `versions` or `network`.
        verdict: "ok", "note" where something is missing that a training may not need, or "failed".
        text: The finding.
        advice: The remedy; "" if none is needed.
        values: Numbers and names of it, for `--json`.
    """

    name: str
    verdict: Literal["ok", "note", "failed"]
    text: str
    advice: str = ""
    values: Mapping[str, object] = field(default_factory=dict)


def look() -> list[Finding]:
    """Returns the findings before any rank is started."""
    return [versions(), devices(), backends(), *interfaces(os.environ), *memory()]


def versions() -> Finding:
    """Python, torch and our packages, which have one version all together."""
    version_by_name = {}
    for name in DISTRIBUTIONS:
        try:
            version_by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    expected = scale_train.__version__
    others = {name: version for name, version in version_by_name.items() if version != expected}
    text = f"python {platform.python_version()}, torch {torch.__version__}, scale {expected}"
    values = {"python": platform.python_version(), "torch": torch.__version__, **version_by_name}
    if others:
        named = ", ".join(f"{name} {version}" for name, version in others.items())
        command = " ".join(["python -m pip install", *(f"{name}=={expected}" for name in others)])
        return Finding(
            "versions", "failed", f"{text}, but {named}: packages have one version together", command, values
        )
    if not compat.simulation_supported():
        advice = f"`scale-train plan` needs torch {compat.simulation_versions()}; all else works with this one"
        return Finding("versions", "note", text, advice, values)
    return Finding("versions", "ok", f"{text} ({len(version_by_name)} packages)", values=values)


def devices() -> Finding:
    """Cores, memory and GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    bytes_of_machine = machine_bytes()
    host = f"{cores} cores" + ("" if bytes_of_machine is None else f", {format_bytes(bytes_of_machine)}")
    values: dict[str, object] = {"cores": cores, "memory_bytes": bytes_of_machine}
    if not torch.cuda.is_available():
        values["gpus"] = []
        if torch.version.cuda is None:
            return Finding("devices", "ok", f"{host}; no GPU: this torch is built without CUDA", values=values)
        advice = "nvidia-smi lists the GPUs that the driver sees; CUDA_VISIBLE_DEVICES may hide them"
        return Finding(
            "devices", "note", f"{host}; torch has CUDA {torch.version.cuda}, but sees no GPU", advice, values
        )
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    values["gpus"] = [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus]
    named = ", ".join(f"{gpu.name} ({format_bytes(gpu.total_memory)})" for gpu in gpus)
    return Finding("devices", "ok", f"{host}; {len(gpus)} GPUs: {named}; CUDA {torch.version.cuda}", values=values)


def backends() -> Finding:
    """The backends of the ranks."""
    if not dist.is_available():
        text = "this torch is built without torch.distributed, so that no two ranks can train together"
        advice = "python -m pip install torch: the wheels of PyPI have torch.distributed"
        return Finding("backends", "failed", text, advice, {"available": []})
    available = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if "nccl" in available and torch.cuda.is_available() else None
    names = [f"nccl {nccl}" if name == "nccl" and nccl else name for name in available]
    values = {"available": available, "nccl_version": nccl}
    if "gloo" not in available:
        text, advice = f"{', '.join(names) or 'none'}; gloo is missing", "python -m pip install --force-reinstall torch"
        return Finding("backends", "failed", text, advice, values)
    return Finding("backends", "ok", ", ".join(names), values=values)


def interfaces(environment: Mapping[str, str]) -> list[Finding]:
    """Network interfaces that variables name, if this machine has none of that name; nothing where all is well."""
    interface_names = [name for _, name in socket.if_nameindex()]
    findings = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        setting = environment.get(variable, "")
        # NCCL takes beginnings of names, and in front of them ^ for all others, = for full names.
        names = [] if setting.startswith("^") else [part for part in setting.lstrip("=").split(",") if part]
        is_exact = variable.startswith("GLOO") or setting.startswith("=")
        if (
            any(
                name == interface if is_exact else interface.startswith(name)
                for name in names
                for interface in interface_names
            )
            or not names
        ):
            continue
        text = f"{variable}={setting} is not an interface of this machine, which has {', '.join(interface_names)}"
        findings.append(
            Finding("network", "failed", text, f"unset {variable}, or name one of these", {"variable": variable})
        )
    return findings


def memory() -> list[Finding]:
    """How fast the memory of the host and of the first GPU is copied: bytes read and written in a second."""
    rates = {"host": copy_rate(torch.device("cpu"), COPIED_BYTES)}
    if torch.cuda.is_available():
        rates["GPU 0"] = copy_rate(torch.device("cuda", 0), GPU_COPIED_BYTES)
    text = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items())
    return [Finding("memory", "ok", f"copied at {text} (read and written)", values={"bytes_per_second": rates})]


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Returns bytes read and written in a second by a copy, the best of five."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device)


def best_seconds(call: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Returns the least time of a call, without the first."""
    durations = []
    for _ in range(times + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - began)
    return max(min(durations[1:]), 1e-9)
