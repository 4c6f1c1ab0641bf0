"""The picture of one dispatch in the guide of experts, drawn from what two ranks send each other.

    python benchmarks/dispatch_picture.py            # writes docs/guides/expert-dispatch.svg
    python benchmarks/dispatch_picture.py --check    # fails where the picture would change
    python benchmarks/dispatch_picture.py --smoke    # the same

Two ranks with three tokens each, four experts, two choices of each token: the example of the guide, which
`packages/scale-moe/tests/test_token_dispatcher.py` holds to what is sent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_moe import combine, dispatch, plan_dispatch

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "expert-dispatch.svg"
CHOICES = [[[0, 2], [0, 1], [3, 0]], [[1, 3], [0, 1], [2, 3]]]
TOKENS = "abcdef"
COLORS = ["#4477aa", "#66ccee", "#ccbb44", "#ee6677"]
"""Of experts 0 to 3."""
CELL, GAP, LEFT, TOP = 30, 64, 150, 64


class Rank(NamedTuple):
    """What one rank has, as tokens with their experts."""

    chosen: list[tuple[str, int]]  # its own, by expert
    received: list[tuple[str, int]]  # by expert
    sums: list[str]  # what it adds up for each token


def on_ranks() -> Rank:
    """Dispatches numbers that say which token a row is of, and sends them back with the number of their expert."""
    rank, choices = dist.get_rank(), torch.tensor(CHOICES[dist.get_rank()])
    names = TOKENS[3 * rank : 3 * rank + 3]
    numbers = torch.arange(3.0 * rank, 3.0 * rank + 3)[:, None].expand(3, 4).contiguous()
    weight = torch.ones(3, 2)
    plan = plan_dispatch(numbers, choices, weight, 4, group_of())
    rows = dispatch(numbers, plan)
    experts = [2 * rank + place for place, count in enumerate(plan.counts) for _ in range(count)]
    received = [(TOKENS[int(row)], expert) for row, expert in zip(rows[:, 0].tolist(), experts, strict=True)]
    back = combine(10.0 ** torch.tensor(experts)[:, None].expand_as(rows), weight, plan)[:, 0]
    sums = [
        f"{name}: " + " + ".join(f"w{expert} {name}{expert}" for expert in range(4) if int(total) // 10**expert % 10)
        for name, total in zip(names, back.tolist(), strict=True)
    ]
    by_expert = choices.flatten()[plan.order].tolist()
    chosen = [(names[token], expert) for token, expert in zip(plan.token.tolist(), by_expert, strict=True)]
    return Rank(chosen, received, sums)


def picture(ranks: list[Rank]) -> str:
    """The drawing: a line for each step, the ranks side by side, and an arrow for each row that is sent."""
    width, lines = LEFT + 2 * (7 * CELL + GAP), [TOP + place * (CELL + GAP) for place in range(3)]
    starts = [LEFT + rank * (7 * CELL + GAP) for rank in range(2)]
    words = ["tokens, a copy for", "rows of this rank's", "added up for"], ["each expert", "experts", "each token"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {lines[2] + 3 * 20 + 16}" '
        'font-family="sans-serif" font-size="13">',
        "<title>One dispatch of two ranks with three tokens each and four experts</title>",
        f'<rect width="{width}" height="{lines[2] + 76}" fill="white"/>',
    ]
    for rank, start in enumerate(starts):
        parts.append(text(start, 24, f"rank {rank}: experts {2 * rank} and {2 * rank + 1}", bold=True))
    for line, (first, second) in zip(lines, zip(*words, strict=True), strict=True):
        parts += [text(8, line + 12, first), text(8, line + 28, second)]
    places: dict[tuple[str, int], float] = {}
    for rank, start in zip(ranks, starts, strict=True):
        for place, row in enumerate(rank.received):
            places[row] = start + place * CELL
    for number, (rank, start) in enumerate(zip(ranks, starts, strict=True)):
        for place, row in enumerate(rank.chosen):
            x = start + place * CELL
            crosses = row[1] // 2 != number
            parts.append(arrow(x, lines[0] + CELL, places[row], lines[1], COLORS[row[1]], crosses))
            parts.append(cell(x, lines[0], row))
        parts += [cell(places[row], lines[1], row) for row in rank.received]
        parts += [text(start, lines[2] + 14 + 20 * place, line) for place, line in enumerate(rank.sums)]
        parts.append(arrow(start + 60, lines[1] + CELL, start + 60, lines[2] - 8, "#888888", crosses=False))
        parts.append(text(start + 85, lines[1] + CELL + 36, "experts, then the same way back"))
    return "\n".join([*parts, "</svg>", ""])


def text(x: float, y: float, words: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}"{weight}>{words}</text>'


def cell(x: float, y: float, row: tuple[str, int]) -> str:
    box = f'<rect x="{x:g}" y="{y:g}" width="{CELL - 3}" height="{CELL}" rx="3" fill="{COLORS[row[1]]}"/>'
    return f'{box}<text x="{x + CELL / 2 - 1.5:g}" y="{y + 20:g}" text-anchor="middle">{row[0]}{row[1]}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float, color: str, crosses: bool) -> str:
    middle = CELL / 2 - 1.5
    style = "" if crosses else ' stroke-dasharray="2 3"'
    line = f'x1="{x + middle:g}" y1="{y:g}" x2="{to_x + middle:g}" y2="{to_y:g}"'
    return f'<line {line} stroke="{color}" stroke-width="{2.5 if crosses else 1.5}"{style}/>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    parser.add_argument("--smoke", action="store_true", help="the same as --check")
    options = parser.parse_args()
    drawn = picture(run_ranks(on_ranks, 2))
    if not (options.check or options.smoke):
        PICTURE.write_text(drawn, encoding="utf-8")
        return 0
    if PICTURE.read_text(encoding="utf-8") != drawn:
        print(f"{PICTURE.name} is not what two ranks send: run python benchmarks/dispatch_picture.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
