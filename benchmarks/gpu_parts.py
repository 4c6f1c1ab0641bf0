"""The parts of `gpu_first.py`: each is a function that records its figures as it goes.

A part runs in a process of its own. What it has recorded stays when it fails, hangs or is killed.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from xml.etree import ElementTree

import gpu_techniques as techniques
import offload_gpu
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engines import GPT, VOCABULARY
from torch import Tensor, nn

import scale_fsdp
from scale_core import compat
from scale_core.testing.ranks import run_ranks

ROOT = Path(__file__).parent.parent
BACKEND = "cpu:gloo,cuda:gloo"
GIB = 2**30
_SYNCHRONIZES = "called a synchronizing CUDA operation"  # in torch's warning


class Run(NamedTuple):
    """What a part is given."""

    record: Callable[[str, Any], None]  # takes the name of a figure and its value
    folder: Path  # for files that are to be kept
    device: torch.device
    short: bool  # the smallest form: whether it runs

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        return BACKEND if self.on_gpu else "gloo"


def versions(run: Run) -> None:
    """What runs here, and whether one step of fully_shard runs at all."""
    run.record("torch", torch.__version__)
    run.record("python", sys.version.split()[0])
    run.record("cores", os.cpu_count())
    if run.on_gpu:
        properties = torch.cuda.get_device_properties(run.device)
        run.record("device", properties.name)
        run.record("device GiB", round(properties.total_memory / GIB, 1))
        run.record("CUDA", torch.version.cuda)
        run.record("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    (losses,) = run_ranks(technique_on_rank, 1, "fsdp", run.device.type, 2, 0.0, backend=run.backend)
    run.record("losses of fully_shard", losses)


def nccl(run: Run) -> None:
    """The calls that a group of one short-cuts, made directly on an NCCL group of one rank."""
    backend = "cpu:gloo,cuda:nccl" if run.on_gpu else "gloo"
    for name, result in run_ranks(direct_calls, 1, run.device.type, backend=backend)[0].items():
        run.record(name, result)


def direct_calls(kind: str) -> dict[str, str]:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    group: Any = dist.group.WORLD
    source, target = torch.arange(1024.0, device=device), torch.zeros(1024, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather_single": lambda: compat.all_gather_single(target, source, group),
        "reduce_scatter_single": lambda: compat.reduce_scatter_single(target, source, group),
        "all_to_all_single": lambda: dist.all_to_all_single(target, source, [1024], [1024], async_op=True),
        "all_gather of a list": lambda: dist.all_gather([target], source, async_op=True),
        "broadcast": lambda: dist.broadcast(target.copy_(source), 0, async_op=True),
    }
    if kind == "cuda":
        average = dist.ReduceOp.AVG
        calls["all_reduce, AVG"] = lambda: dist.all_reduce(target.copy_(source), op=average, async_op=True)
    results = {}
    for name, call in calls.items():
        target.zero_()
        try:
            call().wait()
            results[name] = "equal" if torch.equal(target, source) else "differs"
        except (RuntimeError, ValueError) as error:
            results[name] = str(error).splitlines()[0][:200]
    return results


def gpu_tests(run: Run, **environment: str) -> None:
    """The tests that are marked `gpu`, package by package, then four suites of scale-core that see no GPU."""
    packages = sorted(path.parent for path in (ROOT / "packages").glob("*/tests"))
    marked = [path for path in packages if any("mark.gpu" in file.read_text() for file in path.glob("tests/**/*.py"))]
    for package in marked[:1] if run.short else marked:
        record_tests(run, package, ["tests", "-m", "gpu"], {"CUDA_VISIBLE_DEVICES": "0", **environment})
    if run.on_gpu and not environment:
        names = [f"tests/test_{name}.py" for name in ("buffer", "reduction", "collectives", "streams")]
        record_tests(run, ROOT / "packages" / "scale-core", names, {"CUDA_VISIBLE_DEVICES": ""}, "without a GPU")


def record_tests(run: Run, package: Path, select: list[str], environment: dict[str, str], title: str = "") -> None:
    name = f"{package.name} {title}".strip()
    report = run.folder / f"{name.replace(' ', '-')}-{'-'.join(sorted(environment))}.xml".lower()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *select]
    variables = {**os.environ, **environment}
    ended = subprocess.run(command, cwd=package, env=variables, capture_output=True, text=True, check=False)
    if not report.exists():
        run.record(name, {"error": (ended.stdout + ended.stderr)[-2000:]})
        return
    suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    bad = [case.get("name") for case in suite.iter("testcase") if {child.tag for child in case} & {"failure", "error"}]
    run.record(f"{name}: failures", counts["failures"] + counts["errors"])
    run.record(f"{name}: passed", counts["tests"] - counts["skipped"] - counts["failures"] - counts["errors"])
    run.record(f"{name}: skipped", counts["skipped"])
    if bad:
        run.record(f"{name}: which", bad)
    reports = len(re.findall("CSAN detected", ended.stdout + ended.stderr + report.read_text()))
    if "TORCH_CUDA_SANITIZER" in environment:
        run.record(f"{name}: reports", reports)


def sanitizer(run: Run) -> None:
    """The tests under torch's stream sanitizer, and one step under compute-sanitizer where that is installed."""
    gpu_tests(run, **({"TORCH_CUDA_SANITIZER": "1"} if run.on_gpu else {}))
    tool = shutil.which("compute-sanitizer")
    if tool is None or not run.on_gpu:
        run.record("memcheck", "no compute-sanitizer here")
        return
    name = "fsdp, shards on the host"
    code = f"import gpu_parts as parts; parts.run_ranks(parts.technique_on_rank, 1, {name!r}, 'cuda', 1, 0.0)"
    command = [tool, "--tool", "memcheck", "--target-processes", "all", sys.executable, "-c", code]
    variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    errors = re.findall(r"ERROR SUMMARY: (\d+)", ended.stdout)
    run.record("memcheck", max(map(int, errors)) if errors else (ended.stdout + ended.stderr)[-1000:])


def technique_on_rank(name: str, kind: str, steps: int, delay: float) -> list[float]:
    technique, _ = techniques.TECHNIQUES[name]
    device = device_of(kind)
    with techniques.delayed(device, delay) if delay else nullcontext():
        return technique(device, steps, nullcontext)


def device_of(kind: str) -> torch.device:
    if kind == "cuda":
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)


def parity(run: Run) -> None:
    """Each technique beside plain PyTorch, and beside itself with a pause on each side stream and collective."""
    steps, chosen = (
        (2, ["fsdp", "experts", "ring attention", "fp8 gather, shards on the host"])
        if run.short
        else (10, list(techniques.TECHNIQUES))
    )
    for name in chosen:
        plain = techniques.TECHNIQUES[name][1]
        expected = None if plain is None else plain(run.device, steps, nullcontext)
        for num_ranks in (2,) if run.short else (1, 2):
            title = f"{name}, {num_ranks} ranks"
            try:
                arguments = (num_ranks, name, run.device.type, steps)
                losses, *others = run_ranks(technique_on_rank, *arguments, 0.0, backend=run.backend, limit_seconds=60.0)
                late = run_ranks(technique_on_rank, *arguments, 0.02, backend=run.backend, limit_seconds=60.0)
            except Exception as error:  # The others are measured all the same.
                run.record(f"{title}: error", f"{type(error).__name__}: {error}"[:500])
                continue
            run.record(f"{title}: delayed equals undelayed", late == [losses, *others])
            if expected is not None:
                apart = max(abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True))
                run.record(f"{title}: relative difference to plain PyTorch", apart)


def host_waits(run: Run) -> None:
    """How often the host waits for the device in a steady step."""
    for name in ["fsdp", "experts"] if run.short else list(techniques.TECHNIQUES):
        try:
            counts = run_ranks(waits_on_rank, 2, name, run.device.type, backend=run.backend, limit_seconds=60.0)
        except Exception as error:
            run.record(f"{name}: error", f"{type(error).__name__}: {error}"[:500])
            continue
        run.record(f"{name}: waits", counts[0][0])
        if counts[0][1]:
            run.record(f"{name}: where", counts[0][1])


def waits_on_rank(name: str, kind: str) -> tuple[int, list[str]]:
    seen: list[list[str]] = []

    @contextmanager
    def counted() -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if kind == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                if kind == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        synchronizing = [each for each in caught if _SYNCHRONIZES in str(each.message)]
        seen.append([f"{Path(each.filename).name}:{each.lineno}" for each in synchronizing])

    techniques.TECHNIQUES[name][0](device_of(kind), 4, counted)
    return len(seen[-1]), sorted(set(seen[-1]))


def offload(run: Run) -> None:
    """`offload_gpu.py` with 12 layers and 3 turns, FSDP2 beside it."""
    sizes = ["--smoke"] if run.short else ["--layers", "12", "--turns", "3"]
    options = offload_gpu.parsed(sizes)
    start_single_rank(run)
    seconds: dict[str, float] = {}
    for engine in [offload_gpu.NOTHING, offload_gpu.HALF] if run.short else offload_gpu.ENGINES:
        result = offload_gpu.measure(engine, options, run.device)
        seconds[engine] = result.step_seconds
        run.record(f"{engine}: ms", round(1e3 * result.step_seconds, 2))
        run.record(f"{engine}: GiB", round(result.peak_bytes / GIB, 3))
        if result.error:
            run.record(f"{engine}: error", result.error)
        if engine in offload_gpu.GOALS and (other := offload_gpu.GOALS[engine][1]) in seconds:
            run.record(f"{engine}: over {other}", round(seconds[engine] / seconds[other], 3))
        release(run)
    for engine, (_, other) in offload_gpu.GOALS.items():
        if engine in seconds and other in seconds:
            run.record(f"{engine}: over {other}", round(seconds[engine] / seconds[other], 3))


def start_single_rank(run: Run) -> None:
    backend = "cpu:gloo,cuda:nccl" if run.on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def release(run: Run) -> None:
    gc.collect()
    if run.on_gpu:
        torch.cuda.empty_cache()


def sizes_of(run: Run) -> dict[str, int]:
    if run.short:
        return {"layers": 2, "width": 64, "length": 32, "batch": 2}
    return {"layers": 24, "width": 2048, "length": 1024, "batch": 8}


def gpt(run: Run) -> None:
    """A GPT of 1.2 billion parameters on one rank: step, launch time and memory, of plain PyTorch, FSDP2 and ours."""
    start_single_rank(run)
    sizes = sizes_of(run)
    seconds, peak = {}, 0
    for engine, build in (("plain", plain_gpt), ("FSDP2", offload_gpu.torch_fsdp), ("scale-fsdp", offload_gpu.scale)):
        seconds[engine], peak = record_gpt(run, engine, build, sizes)
        release(run)
    for engine in ("plain", "FSDP2"):
        run.record(f"scale-fsdp over {engine}", round(seconds["scale-fsdp"] / seconds[engine], 3))
    if compat.simulation_supported():
        code = "import json, sys, gpu_parts; print(gpu_parts.simulated_peak(**json.loads(sys.argv[1])))"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code, json.dumps(sizes)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        simulated = ended.stdout.strip() or ended.stderr[-500:]
        run.record("simulated GiB", round(int(simulated) / GIB, 3) if simulated.isdecimal() else simulated)
        if run.on_gpu and simulated.isdecimal():
            run.record("scale-fsdp: allocated over simulated", round(peak / int(simulated), 4))


def gpt_expandable(run: Run) -> None:
    """The memory of the same step where the allocator has expandable segments."""
    start_single_rank(run)
    record_gpt(run, "scale-fsdp, expandable segments", offload_gpu.scale, sizes_of(run))


def plain_gpt(model: GPT, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model.to(device)
    forward = model.forward

    def in_bf16(*args: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return forward(*args)

    model.forward = in_bf16  # type: ignore[method-assign]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def record_gpt(run: Run, engine: str, build: Any, sizes: dict[str, int]) -> tuple[float, int]:
    """Seconds of a step, and the peak of the device in bytes."""
    torch.manual_seed(0)
    plain = GPT(sizes["layers"], sizes["width"], max(1, sizes["width"] // 128), sizes["length"])
    num_elements = sum(param.numel() for param in plain.parameters())
    model, optimizer = build(plain, run.device)
    del plain
    shape = (sizes["batch"], sizes["length"] + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0)).to(run.device)
    steps, launches = [], []
    for step in range(2 if run.short else 8):
        if run.on_gpu:
            torch.cuda.synchronize()
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        launches.append(time.perf_counter() - begin)
        if run.on_gpu:
            torch.cuda.synchronize()
        steps.append(time.perf_counter() - begin)
    seconds = median(steps[2:] or steps)
    run.record(f"{engine}: ms", round(1e3 * seconds, 2))
    run.record(f"{engine}: launch ms", round(1e3 * median(launches[2:] or launches), 2))
    flops = 6 * num_elements * sizes["batch"] * sizes["length"]
    run.record(f"{engine}: TFLOP/s by 6 N T", round(flops / seconds / 1e12, 1))
    if run.on_gpu:
        run.record(f"{engine}: allocated GiB", round(torch.cuda.max_memory_allocated() / GIB, 3))
        run.record(f"{engine}: reserved GiB", round(torch.cuda.max_memory_reserved() / GIB, 3))
        inactive = torch.cuda.memory_stats()["inactive_split_bytes.all.peak"]
        run.record(f"{engine}: inactive GiB", round(inactive / GIB, 3))
    return seconds, torch.cuda.max_memory_allocated() if run.on_gpu else 0


def simulated_peak(layers: int, width: int, length: int, batch: int) -> int:
    """The peak of the same step in a simulation, in bytes."""
    from scale_check.simulate import simulate

    with simulate(device=compat.STAND_IN) as sim:
        with sim.device:
            model = GPT(layers, width, max(1, width // 128), length)
        model, optimizer = offload_gpu.scale(model, sim.device)
        for step in range(3):
            if step == 2:
                sim.restart()
            tokens = torch.zeros(batch, length + 1, dtype=torch.int64, device=sim.device)
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sim.peak_bytes


def kernels(run: Run) -> None:
    """A block of ring attention beside torch's attention, and a layer of experts beside the products alone."""
    from scale_tp import ring_attention

    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    shape = (1, 2, 128, 16) if run.short else (1, 16, 8192, 128)
    parts = [torch.randn(shape, dtype=dtype, device=run.device).requires_grad_() for _ in range(3)]

    def both(attend: Callable[..., Tensor]) -> None:
        attend(*parts, is_causal=True).sum().backward()

    times = {
        "scaled_dot_product_attention": seconds_of(run, partial(both, F.scaled_dot_product_attention)),
        "ring_attention": seconds_of(run, partial(both, partial(ring_attention, process_group=None))),
    }
    for name, value in times.items():
        run.record(f"{name}: ms", round(1e3 * value, 3))
    ratio = times["ring_attention"] / times["scaled_dot_product_attention"]
    run.record("ring_attention over scaled_dot_product_attention", round(ratio, 2))
    record_experts(run, dtype)


def record_experts(run: Run, dtype: torch.dtype) -> None:
    from scale_core.comm.group import Group
    from scale_moe import MoE

    dim, hidden, number, tokens = (32, 64, 4, 64) if run.short else (2048, 4096, 16, 16384)
    layer = MoE(dim, hidden, number, process_group=Group(), gated=False, device=run.device, dtype=dtype)
    x = torch.randn(tokens, dim, dtype=dtype, device=run.device).requires_grad_()
    up, down = (torch.randn(number, *size, dtype=dtype, device=run.device) for size in ((dim, hidden), (hidden, dim)))
    rows = torch.randn(2 * tokens, dim, dtype=dtype, device=run.device)
    inner = torch.randn(2 * tokens, hidden, dtype=dtype, device=run.device)
    ends = (torch.arange(1, number + 1, device=run.device) * (2 * tokens // number)).to(torch.int32)

    def products() -> None:  # Those of forward and backward: three pairs.
        for _ in range(3):
            torch._grouped_mm(rows, up, offs=ends)
            torch._grouped_mm(inner, down, offs=ends)

    layer_seconds = seconds_of(run, lambda: layer(x).sum().backward())
    run.record("MoE: ms", round(1e3 * layer_seconds, 3))
    if run.on_gpu:
        product_seconds = seconds_of(run, products)
        run.record("grouped products: ms", round(1e3 * product_seconds, 3))
        run.record("MoE over its grouped products", round(layer_seconds / product_seconds, 2))


def seconds_of(run: Run, call: Callable[[], None]) -> float:
    times = []
    for _ in range(2 if run.short else 8):
        if run.on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if run.on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[len(times) // 2 :])


def trace(run: Run) -> None:
    """A profile of one step of fully_shard on two ranks: the trace, and the duration of each kind of kernel."""
    durations = run_ranks(traced_step, 2, run.device.type, run.short, str(run.folder), backend=run.backend)[0]
    for name, microseconds in durations.items():
        run.record(name, microseconds)


def traced_step(kind: str, short: bool, folder: str) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile

    device = device_of(kind)
    torch.manual_seed(0)
    model = GPT(*((2, 64, 1, 32) if short else (4, 2048, 16, 1024))).to(device)
    policy = scale_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        scale_fsdp.fully_shard(block, mp_policy=policy)
    scale_fsdp.fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (2, 33) if short else (4, 1025)
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == "cuda" else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=activities) as profiled:
            step()
            if kind == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
    if dist.get_rank() == 0:
        profiled.export_chrome_trace(str(Path(folder) / "fully_shard-step.json.gz"))
    attribute = "self_device_time_total" if kind == "cuda" else "self_cpu_time_total"
    events = profiled.key_averages()  # type: ignore[no-untyped-call]
    longest = sorted(events, key=lambda event: -getattr(event, attribute))[:40]
    return {f"{event.key} x {event.count}": round(getattr(event, attribute), 1) for event in longest}


PARTS: dict[str, Callable[[Run], None]] = {
    "versions": versions,
    "nccl": nccl,
    "parity": parity,
    "tests": gpu_tests,
    "sanitizer": sanitizer,
    "waits": host_waits,
    "offload": offload,
    "gpt": gpt,
    "gpt_expandable": gpt_expandable,
    "kernels": kernels,
    "trace": trace,
}


def run_part(name: str, folder: Path, figures: Path, device: torch.device, *, short: bool) -> None:
    """Runs one part; each figure is a line of `figures` as soon as it is there."""

    def record(figure: str, value: Any) -> None:
        with figures.open("a") as file:
            file.write(json.dumps([figure, value], default=str) + "\n")

    PARTS[name](Run(record, folder, device, short))
