"""Draws docs/images/architecture.svg: the packages, and the files that one step of `fully_shard` passes.

    python tools/architecture.py            # draws it anew
    python tools/architecture.py --check    # fails where the picture would change; `nox -s house` asks this
    python tools/architecture.py --smoke    # draws, and writes nothing

The packages and edges are those of `packages/*/pyproject.toml`. The step is traced (`step_path.py`): a column for each
public function of `scale_fsdp/runtime/step.py`, in the order of time; a row for each file, callers above what they
call, with the first line of its docstring.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import defaultdict
from html import escape
from pathlib import Path
from statistics import mean

from step_path import Trace, trace_step

from scale_core.testing import run_ranks

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
STEP = "scale_fsdp/runtime/step.py"
INK, SOFT, FAINT = "#1f2430", "#6b7280", "#d7dbe3"
COLORS = {"scale_fsdp": "#3b6ea8", "scale_core": "#4f8a5b"}
LINE, DOT, NAMES, CELL, LETTER = 22, 5.5, 285, 34, 6.6
"""Pixels: the height of a row, the radius of a dot, the widths of a file's name, of a column and of a letter."""


class Drawing:
    """Lines of SVG."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, *, size: int = 13, color: str = INK, how: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" {how}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, line: str = FAINT) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{line}"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = FAINT) -> None:
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}"/>')

    def dot(self, x: float, y: float, color: str) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{DOT}" fill="{color}"/>')

    def svg(self, width: float, height: float) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="system-ui, sans-serif">'
        )
        return "\n".join([head, '<rect width="100%" height="100%" rx="10" fill="#ffffff"/>', *self.parts, "</svg>\n"])


def edges() -> dict[str, list[str]]:
    """Returns which packages of ours each package needs."""
    found = {}
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        found[project["name"]] = [need.split("=")[0].split("[")[0] for need in project["dependencies"]]
    return {name: [need for need in needs if need in found] for name, needs in found.items()}


def floors(needs: dict[str, list[str]]) -> list[list[str]]:
    """Returns packages by how many others stand below them, the lowest first."""

    def height(name: str) -> int:
        return 1 + max(map(height, needs[name]), default=-1)

    levels: dict[int, list[str]] = defaultdict(list)
    for name in needs:
        levels[height(name)].append(name)
    return [levels[level] for level in sorted(levels)]


def columns(trace: Trace) -> dict[str, set[str]]:
    """Returns the files that each public function of the step's file enters, in the order of time."""
    found: dict[str, set[str]] = {}
    for stack in trace.stacks:
        inside = [number for number, (file, name) in enumerate(stack) if file == STEP and not name.startswith("_")]
        if inside:
            found.setdefault(stack[inside[-1]][1], set()).update(file for file, _ in stack[inside[-1] :])
    return {name: files for name, files in found.items() if len(files) > 1}


def rows(trace: Trace, shown: set[str]) -> list[str]:
    """Returns the files, those that call above those that are called."""
    depths: dict[str, list[int]] = defaultdict(list)
    for stack in trace.stacks:
        start = next((number for number, (file, _) in enumerate(stack) if file == STEP), None)
        if start is not None:
            depths[stack[-1][0]].append(len(stack) - start)
    packages = ["scale_fsdp", "scale_core"]
    return sorted(shown, key=lambda file: (packages.index(file.split("/")[0]), file != STEP, mean(depths[file]), file))


def sentence(file: str) -> str:
    """Returns the first line of a file's docstring."""
    package = file.split("/")[0]
    path = ROOT / "packages" / package.replace("_", "-") / "src" / file
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return (docstring or "").partition("\n")[0]


def draw(trace: Trace) -> str:
    """Returns the picture."""
    drawing = Drawing()
    phases = columns(trace)
    files = rows(trace, set().union(*phases.values()))
    width = 24 + NAMES + CELL * len(phases) + 16 + LETTER * max(len(sentence(file)) for file in files) + 24
    y = _draw_packages(drawing, width)

    drawing.text(24, y, "One step of fully_shard: what torch calls, and the files that it passes", size=16)
    drawing.text(24, y + 22, "packages/scale-fsdp/src, packages/scale-core/src", size=12, color=SOFT)
    top = y + 120
    for number, phase in enumerate(phases):
        x = 24 + NAMES + CELL * (number + 0.5)
        drawing.text(x, top - 12, phase, size=12, how=f'transform="rotate(-45 {x:g} {top - 12:g})"')
    for number, file in enumerate(files):
        y = top + LINE * (number + 0.5)
        color = COLORS[file.split("/")[0]]
        drawing.line(24, y + LINE / 2, width - 24, y + LINE / 2)
        drawing.text(24, y + 4, file, color=color, size=12, how='font-family="ui-monospace, monospace"')
        for column, entered in enumerate(phases.values()):
            if file in entered:
                drawing.dot(24 + NAMES + CELL * (column + 0.5), y, color)
        drawing.text(24 + NAMES + CELL * len(phases) + 16, y + 4, sentence(file), size=12, color=SOFT)
    return drawing.svg(width, top + LINE * len(files) + 24)


def _draw_packages(drawing: Drawing, width: float) -> float:
    """Draws the packages, the highest floor above; returns where it ends."""
    needs = edges()
    levels = floors(needs)
    drawing.text(24, 36, "The packages: each is installed by itself, with what it stands on", size=16)
    direct = {
        name: [need for need in below if not any(need in needs[other] for other in below)]
        for name, below in needs.items()
    }
    places: dict[str, tuple[float, float]] = {}
    for level, names in enumerate(levels):
        y = 60 + 78 * (len(levels) - 1 - level)
        room = (width - 48) / len(names)
        for number, name in enumerate(names):
            alone = level < len(levels) - 1 and level and len(names) == 1
            x = mean(places[need][0] for need in needs[name]) if alone else 24 + room * (number + 0.5)
            places[name] = (x, y)
    for name, below in direct.items():
        for need in below:
            (x1, y1), (x2, y2) = places[name], places[need]
            drawing.line(x1, y1 + 34, x2, y2, SOFT)
    for name, (x, y) in places.items():
        drawing.box(x - 70, y, 140, 34, "#f4f6fa")
        drawing.text(x, y + 22, name, how='text-anchor="middle"')
    return 60 + 78 * len(levels) + 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what there is, and write nothing")
    parser.add_argument("--smoke", action="store_true", help="write nothing")
    options = parser.parse_args()
    picture = draw(run_ranks(trace_step, 2, "fully_shard")[0])
    if options.check:
        if picture != PICTURE.read_text(encoding="utf-8"):
            sys.exit(f"{PICTURE.relative_to(ROOT)} is out of date: run `python tools/architecture.py`")
    elif not options.smoke:
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(picture, encoding="utf-8")
        print(f"drawn: {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
