"""The page of the docs on what reliability costs and what it was tried with, made from the newest results.

    python tools/figures.py            # writes docs/internals/reliability-figures.md
    python tools/figures.py --check    # fails where the page would change; `nox -s house` asks this
    python tools/figures.py --smoke    # the same

A benchmark that is run again with --date brings its rows up to date, by this.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from report import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "internals" / "reliability-figures.md"

Figures = list[dict[str, Any]]


def newest(name: str) -> tuple[Figures, str] | None:
    """The newest results of a benchmark, and a line on when and where they were measured."""
    found = sorted(path for path in RESULTS.glob("*.json") if re.fullmatch(rf"[\d-]+-{name}", path.stem))
    if not found:
        return None
    content = json.loads(found[-1].read_text(encoding="utf-8"))
    script = _script(name)
    where = content["machine"]
    told = f"{where['processor']}, {where['cores']} cores, load {where['load'][0]:g}, torch {where['torch']}"
    return content["results"], f"{content['date']}, `{script}`: {told}, commit {where['commit']}."


def _script(name: str) -> str:
    return f"{'tools' if (ROOT / 'tools' / f'{name}.py').exists() else 'benchmarks'}/{name}.py"


def rows_of_the_matrix() -> dict[str, list[tuple[str, list[str]]]]:
    """The result of each fault and its tests, by section."""
    text = (ROOT / "tests/faults/faults.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## [A-F]\. (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return {
        title: [
            (outcome, re.findall(r"`([^`]+)`", tests))
            for outcome, tests in re.findall(r"^\| \d+ \| .* \| (.*) \| .* \| (.*) \|$", body, re.MULTILINE)
        ]
        for title, body in sections
    }


def faults() -> str:
    sections = rows_of_the_matrix()
    rows = [
        [title, str(len(rows)), str(len({test for _, tests in rows for test in tests}))]
        for title, rows in sections.items()
    ]
    every = [row for rows in sections.values() for row in rows]
    rows.append(["all", str(len(every)), str(len({test for _, tests in every for test in tests}))])
    table = Table("", ["faults of", "tried, and end as the guide says", "tests"], rows)
    return (
        "Faults with their [results](faults.md#faults-and-their-results) and the tests that show them. None ends in a "
        "wrong number, a wait without a limit or a lost snapshot.\n"
        f"{_body(table)}"
    )


def soak(figures: Figures) -> str:
    (found,) = figures
    rows = []
    for action, cost in found["costs"].items():
        lost, back = cost["steps_lost"], cost["back_after_seconds"]
        happened = cost["happened"]
        told = f"{mean(lost):.1f}, at most {max(lost)}" if lost else "0" if happened else "-"
        rows.append([action, str(happened), told, f"{median(back):.1f} s" if back else "at once" if happened else "-"])
    number = sum(cost["happened"] for cost in found["costs"].values())
    trainings = ", ".join(f"{count} {kind}" for kind, count in sorted(found["trainings"].items()))
    table = Table("", ["fault", "happened", "steps lost, on average", "back after, median"], rows)
    return (
        f"{found.get('minutes', 30):.0f} minutes of training on 2 ranks under torchrun, seed {found['seed']}: "
        f"trainings of 40 steps ({trainings}), {found['steps']} steps, {number} faults, a snapshot every 4 steps. "
        f"{found['snapshots']} snapshots were read again: none was damaged, none differed from the undisturbed "
        "run's, nor did a loss or a final weight, to the bit; no process and no temporary file was left. Frozen "
        f"ranks are waited for 15 s.\n{_body(table)}"
    )


def restart(figures: Figures) -> str:
    names = {"loop": "a loop with `fully_shard` and `scale_snapshot.save`", "scale-train": "`scale-train lm`"}
    rows = []
    for way in dict.fromkeys(turn["way"] for turn in figures):
        turns = [turn for turn in figures if turn["way"] == way]
        again = [turn["kill_to_resumed"] for turn in turns]
        row = [
            f"{median(turn['first_start'] for turn in turns):.1f} s",
            f"{median(again):.1f} s",
            f"{max(again):.1f} s",
        ]
        rows.append([names[way], *row])
    heads = ["what runs", "start to the first step", "kill to the next step", "at most"]
    return (
        "One of two ranks is killed, `torchrun --max-restarts` starts both again, and they go on from the last "
        "snapshot. Most of the time is the start of Python, torch and the ranks, as the first column shows.\n"
        f"{_body(Table('', heads, rows))}"
    )


def bad_inputs(figures: Figures) -> str:
    counts = Counter(each["outcome"] for each in figures)
    taken = [f"`{each['name']}({each['parameter']}={each['value']})`" for each in figures if each["outcome"] == "taken"]
    return (
        f"{len(figures)} calls of {len({each['name'] for each in figures})} functions and classes, each with one "
        "argument of a wrong type or value: None, text in the place of a number or a list, numbers below zero and no "
        f"numbers. {counts['clear']} end in a clear error, which names the argument or says what was expected and what "
        f"came, {counts['unclear']} in an unclear one. {counts['taken']} are taken: below zero, NaN or empty, most of "
        f"them as plain PyTorch's layers take them, or without an effect on one rank, such as {', '.join(taken[:3])}."
    )


def snapshots(figures: Figures) -> str:
    ways = {
        "plain": "plain files",
        "snapshot": "snapshot",
        "unverified": "snapshot, without checksums",
        "dcp": "`torch.distributed.checkpoint`",
    }
    parts = [
        "The same tensors, written and read in turns: plain files with `fsync`, snapshots, and torch's checkpoints. "
        "Ratios are medians of ratios within one turn. Smaller states and one rank: the newest "
        "`benchmarks/results/*-snapshots.md`."
    ]
    largest = max(each["megabytes"] for each in figures)
    row = [each["row"] for each in figures if each["megabytes"] == largest][-1]
    shown = [each for each in figures if each["row"] == row]
    lines, operations = [], ("write", "cold read", "warm read")
    for each in (each for each in shown if each["operation"] in operations):
        speed = f"{each['megabytes'] / 1000 / median(each['seconds']):.2f}"
        lines.append([each["operation"], ways[each["way"]], speed, f"{each['ratio']:.2f}", f"{each['cpu_ratio']:.2f}"])
    heads = ["operation", "format", "GB/s", "time over plain", "CPU time over plain"]
    parts.append(Table(f"{row}:", heads, lines).markdown().strip())
    parts += _cost_of_checksums(shown)
    return "\n\n".join(parts)


def _cost_of_checksums(figures: Figures) -> list[str]:
    by = {(each["operation"], each["way"]): each["seconds"] for each in figures}
    added = {
        operation: median(a / b for a, b in zip(seconds, by[operation, "unverified"], strict=True)) - 1
        for (operation, way), seconds in by.items()
        if way == "snapshot" and (operation, "unverified") in by
    }
    told = [f"{operation} {100 * share:+.0f} %" for operation, share in added.items()]
    return [f"What the checksums add to the time: {', '.join(told)}."] if told else []


def async_save(figures: Figures) -> str:
    copy = median(next(each for each in figures if each["engine"] == "plain copy")["stall_seconds"][1:])
    rows = []
    for each in figures:
        stall, total = (median(each[key][1:]) for key in ("stall_seconds", "total_seconds"))
        done = "" if each["engine"] == "plain copy" else f"{1e3 * total:.0f} ms"
        name = each["engine"] if each["engine"] == "plain copy" else f"`{each['engine']}`"
        rows.append([name, f"{1e3 * stall:.0f} ms", f"{stall / copy:.2f}", done, f"{each['extra_memory']:.2f}"])
    heads = ["engine", "stall of the step", "over a plain copy", "until it is saved", "extra memory, of the state"]
    return (
        f"{figures[0]['held_mb']:.0f} MB of state on each of 2 ranks: the time until the call returns, against a clone "
        f"of the same tensors, and the time until the snapshot is there.\n{_body(Table('', heads, rows))}"
    )


def _body(table: Table) -> str:
    return "\n" + table.markdown().strip()


SECTIONS: list[tuple[str, str | None, Callable[..., str]]] = [
    ("Faults tried and survived", None, faults),
    ("Minutes of training under faults", "soak", soak),
    ("From the kill of a rank until training goes on", "restart", restart),
    ("Wrong arguments", "bad_inputs", bad_inputs),
    ("Bandwidth of snapshots", "snapshots", snapshots),
    ("Stall of a step by a save", "async_save", async_save),
]


def page() -> str:
    """The whole page."""
    parts = [
        "# Reliability in figures",
        "What was tried, what it cost, and how fast snapshots are. `tools/figures.py` makes this page from the "
        "newest files in `benchmarks/results/`; each section says when and where its figures were measured. Times on a "
        "machine with other work are longer than on a quiet one: read the load.",
    ]
    for title, name, told in SECTIONS:
        parts.append(f"## {title}")
        if name is None:
            parts.append(told())
        elif found := newest(name):
            parts += [told(found[0]), found[1]]
        else:
            parts.append(f"Not measured yet: `python {_script(name)} --date ...`.")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", "--smoke", action="store_true", help="compare with what there is, and write nothing")
    made = page()
    if parser.parse_args().check:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
            print(f"{PAGE.relative_to(ROOT)} is not what its results are: run tools/figures.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
