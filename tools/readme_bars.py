"""The bars of the README: peak memory and time of a step beside torch's engines, from the newest results.

    python tools/readme_bars.py            # prints the bars
    python tools/readme_bars.py --write    # puts them into the README
    python tools/readme_bars.py --smoke    # the same as without

The figures are those of `benchmarks/data_parallel.py`. A test compares the README with what this prints.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
NAMES = {
    "ddp": "torch DDP",
    "fsdp2": "torch FSDP2",
    "scale": "scale-fsdp (ZeRO-3)",
    "oss-sharded": "scale-oss (ZeRO-2)",
}
WIDTH = 32  # of the longest bar


def newest() -> tuple[Path, dict[str, Any]]:
    """Returns the newest results of `data_parallel.py`, and their file."""
    path = max((ROOT / "benchmarks" / "results").glob("*-data_parallel.json"))
    return path, json.loads(path.read_text(encoding="utf-8"))


def bars() -> str:
    """Returns the lines between the fences of the README."""
    _, content = newest()
    rows = {row["engine"]: row for row in content["results"] if row["row"] == "gpt"}
    memory = {name: rows[engine]["peak_mb"] for engine, name in NAMES.items()}
    seconds = {name: rows[engine]["timings"]["torchrun"]["wall_ratio"] for engine, name in NAMES.items()}
    lines = ["peak memory of a rank"]
    lines += [f"{name:20} {_bar(value, memory)} {value:.0f} MB" for name, value in memory.items()]
    lines += ["", "time of a step, DDP = 1"]
    lines += [f"{name:20} {_bar(value, seconds)} {value:.2f}" for name, value in seconds.items()]
    return "\n".join(lines)


def _bar(value: float, values: dict[str, float]) -> str:
    return "█" * round(WIDTH * value / max(values.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    print(bars())
    if arguments.write:
        text = README.read_text(encoding="utf-8")
        README.write_text(
            re.sub(r"(```text\npeak memory.*?)(?=```)", lambda _: f"```text\n{bars()}\n", text, flags=re.S)
        )


if __name__ == "__main__":
    main()
