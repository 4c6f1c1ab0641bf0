"""Programs of `benchmarks/peers` still train with other numbers than one process, with the versions that are installed.

A failure is good news for users of that library: `docs/internals/check-peers.md` says which version was the last one.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch.distributed as dist

from scale_core.launch.rendezvous import open_store
from scale_core.testing import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from peers import PROGRAMS, differs, library_of, merged  # noqa: E402
from report import Table  # noqa: E402

LIMIT_SECONDS = 300.0


def run_program(path: str, port: int) -> str:
    """Runs a program as torchrun does, and returns what this rank prints."""
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()  # The program has one of its own.
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    warnings.simplefilter("ignore")  # Those of the libraries.
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def last_record(program: str) -> str:
    """The newest version and date of which the results say that a program differs."""
    for results in sorted((BENCHMARKS / "results").glob("*-peers.json"), reverse=True):
        content = json.loads(results.read_text())
        for row in content["results"]:
            if row.get("program") == program:
                return f"{row['version']} did on {content['date']}"
    return "no version is recorded: run benchmarks/peers.py with --date"


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_of_a_peer_still_differs(path: Path) -> None:
    try:
        installed = f"{library_of(path)} {version(library_of(path))}"
    except PackageNotFoundError:
        pytest.skip(f"{library_of(path)} is not installed")
    store = open_store("127.0.0.1", 0, serve=True, timeout=LIMIT_SECONDS)
    printed = run_ranks(run_program, 2, str(path), store.port, limit_seconds=LIMIT_SECONDS)[0]
    assert any(differs(line) for line in printed.splitlines()), (
        f"with {installed}, {path.stem} trains as one process does; {last_record(path.stem)}. It printed: {printed}"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("loss: one process 1.5, FSDP2 [1.5, 1.5]", False),
        ("loss: one process 1.5, FSDP2 [1.5, 1.6]", True),
        ("loss per rank: one process [1.5, 2.5], FSDP2 [2.5, 1.5]", True),
        ("loss: one process 1.5, DeepSpeed ZeRO-1 1.5", False),
        ("loss and norm: one process (1.5, 2.0), DTensor (1.5, nan)", True),
        ("(loss, number) after a step: one process (1.5, 1), TP [(1.5, 1), (1.5, 1)]", False),
        ("loss: one process 1.5, FSDP2 1.5 (before doubling 1.1)", False),
        ("state per rank: without a restart [(1.0, -2e-05)], after dcp.load [(1.0, 2e-05)]", True),
        ("RuntimeError: not supported", False),
    ],
)
def test_what_a_program_prints_says_whether_it_differs(line: str, expected: bool) -> None:
    assert differs(line) is expected


def test_rows_that_were_not_run_again_stay_in_the_table() -> None:
    recorded = [{"program": "b", "differs": "yes"}, {"program": "a", "differs": "yes"}, {"engine": "ddp"}]
    table = merged(Table("", ("program", "differs"), [["b", "no"]]), recorded)
    assert table.rows == [["a", "yes"], ["b", "no"]]
