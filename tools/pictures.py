"""Draws the pictures of the guides: a step of FSDP, buckets of OSS, a divided block, rows of experts, which technique.

    python tools/pictures.py            # draws them anew, into docs/guides
    python tools/pictures.py --check    # fails where a picture would change
    python tools/pictures.py --smoke    # draws, and writes nothing

The schedules of pipelines are drawn by scale_pipe itself (`save_drawing`), the packages by `architecture.py`.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from textwrap import wrap

GUIDES = Path(__file__).parent.parent / "docs" / "guides"
INK, SOFT, FAINT, WHITE = "#1f2430", "#6b7280", "#d7dbe3", "#ffffff"
BLUE, GREEN, ORANGE, VIOLET = "#3b6ea8", "#4f8a5b", "#c9803a", "#7a5ea8"
PALE = {BLUE: "#dce8f5", GREEN: "#dfeee2", ORANGE: "#f7e6d3", VIOLET: "#e8e1f3"}


class Drawing:
    """Shapes of one SVG, `width` by `height` pixels on white, so that it is read on a dark page too."""

    def __init__(self, width: float, height: float) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="sans-serif" font-size="13">',
            f'<rect width="{width:g}" height="{height:g}" fill="{WHITE}"/>',
            f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{SOFT}"/></marker></defs>',
        ]

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        color: str = INK,
        size: int = 13,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: str = "",
        *,
        color: str = BLUE,
        solid: bool = False,
    ) -> None:
        fill = color if solid else PALE.get(color, WHITE)
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{color}"/>'
        )
        lines = [line for part in words.split("\n") for line in wrap(part, max(1, int(width / 7)))]
        for index, line in enumerate(lines):
            below = y + height / 2 + 4.5 + 15 * (index - (len(lines) - 1) / 2)
            self.text(x + width / 2, below, line, color=WHITE if solid else INK, anchor="middle")

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        words: str = "",
        *,
        side: float = 6,
        color: str = SOFT,
        dashed: bool = False,
    ) -> None:
        dashes = ' stroke-dasharray="2 3"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" stroke-width="1.4"{dashes} '
            'marker-end="url(#tip)"/>'
        )
        if words:
            self.text((x1 + x2) / 2 + side, (y1 + y2) / 2 + (4 if x1 == x2 else -5), words, color=SOFT, size=12)

    def words(self, y: float, text: str) -> None:
        """Writes lines of text below what is drawn."""
        for index, line in enumerate(wrap(text, 104)):
            self.text(12, y + 18 * index, line, size=12)

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def fsdp_step() -> str:
    """Draws which FSDP unit is gathered when; the rows are those of the recorded order of three blocks."""
    passes = ["root", "A", "B", "C", "root", "root", "C", "B", "A", "root", "end"]
    rows = {
        "root": "# # # # # # # # # # r",
        "block A": "g # . . . . . g # r .",
        "block B": ". g # . . . g # r . .",
        "block C": ". . g # . g # r . . .",
    }
    looks = {"#": (BLUE, True), "g": (GREEN, False), "r": (ORANGE, False), ".": (FAINT, False)}
    cell, left, top = 58, 92, 66
    drawing = Drawing(left + cell * len(passes) + 14, top + 4 * 34 + 66)
    drawing.text(left, 22, "forward", bold=True)
    drawing.text(left + 5 * cell, 22, "backward", bold=True)
    drawing.text(12, 46, "computes", color=SOFT)
    for column, name in enumerate(passes):
        drawing.text(left + column * cell + cell / 2 - 2, 46, name, color=SOFT, anchor="middle")
    for row, (name, states) in enumerate(rows.items()):
        y = top + row * 34
        drawing.text(12, y + 18, name)
        for column, state in enumerate(states.split()):
            color, solid = looks[state]
            drawing.box(left + column * cell, y, cell - 4, 26, color=color, solid=solid)
    legend = [("#", "gathered"), ("g", "being gathered"), ("r", "gradient being reduced"), (".", "this rank's shard")]
    for index, (state, words) in enumerate(legend):
        x, y = left + index * 166, top + 4 * 34 + 16
        drawing.box(x, y, 24, 18, color=looks[state][0], solid=looks[state][1])
        drawing.text(x + 30, y + 14, words, size=12)
    return drawing.svg()


def oss_buckets() -> str:
    """Draws one step of `ShardedDataParallel` with `OSS`, from the backward pass to the next forward."""
    drawing = Drawing(800, 226)
    for x, words in ((92, "backward"), (448, "optimizer step"), (630, "next forward")):
        drawing.text(x, 22, words, bold=True)
    lanes = {"compute": 36, "send": 96}
    for name, y in lanes.items():
        drawing.text(12, y + 22, name, color=SOFT)
    for index in range(3):
        bucket = 2 - index
        drawing.box(92 + index * 90, 36, 84, 36, f"grads {bucket}")
        drawing.box(176 + index * 90, 96, 84, 40, f"reduce {bucket}", color=ORANGE)
        drawing.box(448 + index * 58, 36, 54, 36, f"step {bucket}", color=VIOLET)
        drawing.box(506 + index * 66, 96, 62, 40, f"gather {bucket}", color=GREEN)
        drawing.box(630 + index * 56, 36, 52, 36, f"fwd {index}")
    drawing.words(
        172,
        "A bucket is a flat buffer of gradients. reduce: a reduce-scatter starts when the bucket is full, and leaves "
        "each rank the averaged gradients of its shard. step: each rank updates its shard of the bucket. gather: an "
        "all-gather of the updated shards, waited for where the parameters are used.",
    )
    return drawing.svg()


def divided_block() -> str:
    """Draws a transformer block on two tensor parallel ranks, with its two all-reduces."""
    drawing = Drawing(760, 240)
    steps = [
        ("q k v", "columns"),
        ("attention", "heads"),
        ("o", "rows"),
        ("", ""),
        ("up", "columns"),
        ("gelu", ""),
        ("down", "rows"),
    ]
    for rank, (y, color) in enumerate(((44, BLUE), (124, GREEN))):
        drawing.text(12, y + 30, f"rank {rank}", color=SOFT)
        x = 84.0
        for name, kind in steps:
            if not name:
                x += 76
                continue
            drawing.box(x, y, 72, 48, f"{name}\n{kind}" if kind else name, color=color)
            if name not in ("o", "down"):
                drawing.arrow(x + 72, y + 24, x + 92, y + 24)
            x += 92
    for x in (348, 700):
        drawing.box(x, 44, 40, 128, "", color=ORANGE)
        drawing.text(x + 20, 112, "sum", anchor="middle")
    drawing.text(84, 24, "attention", bold=True)
    drawing.text(436, 24, "MLP", bold=True)
    drawing.words(
        204,
        "Column parallel layers give each rank some features, attention works head by head, row parallel layers give a "
        "summand on each rank: one all-reduce per half. In the backward pass the sums stand before the columns.",
    )
    return drawing.svg()


def all_to_all() -> str:
    """Draws how rows of two ranks travel to the experts that their tokens have chosen."""
    drawing = Drawing(760, 262)
    sent = [["a0 b0 c0", "b1", "a2", "c3"], ["e0", "d1 e1", "f2", "d3 f3"]]
    colors = [BLUE, GREEN]
    for rank in range(2):
        left = 20 + rank * 380
        drawing.text(left, 24, f"rank {rank}: rows of its tokens, by expert", bold=True)
        drawing.text(left, 186 + 46, f"rank {rank} has the experts {2 * rank} and {2 * rank + 1}", bold=True)
        for expert, rows in enumerate(sent[rank]):
            drawing.box(left + expert * 86, 40, 80, 34, rows, color=colors[expert // 2])
        for local in range(2):
            expert = 2 * rank + local
            rows = " ".join(sent[source][expert] for source in range(2))
            drawing.box(left + local * 172, 172, 164, 34, f"expert {expert}: {rows}", color=colors[rank])
        for target in range(2):
            drawing.arrow(left + 80 + target * 172, 78, 20 + target * 380 + 150 + rank * 24, 166)
    drawing.text(332, 128, "all-to-all", color=SOFT, size=12)
    return drawing.svg()


def expert_dispatch() -> str:
    """Draws one dispatch: the example that `test_token_dispatcher.py` of scale-moe holds to what two ranks send."""
    choices = {"a": (0, 2), "b": (0, 1), "c": (3, 0), "d": (1, 3), "e": (0, 1), "f": (2, 3)}
    colors = [BLUE, GREEN, ORANGE, VIOLET]
    rows = sorted((expert, token) for token, experts in choices.items() for expert in experts)
    cell, left, top, below = 32, 140, 44, 94
    starts = [left, left + 7 * cell + 60]
    drawing = Drawing(left + 2 * 7 * cell + 72, top + 2 * below + 72)
    steps = ["tokens, a copy for\neach expert", "rows of this rank's\nexperts", "added up for\neach token"]
    for step, words in enumerate(steps):
        for line, text in enumerate(words.split("\n")):
            drawing.text(8, top + step * below + 13 + 16 * line, text, color=SOFT)
    received = [[row for row in rows if row[0] // 2 == rank] for rank in range(2)]
    places = {row: starts[rank] + index * cell for rank in range(2) for index, row in enumerate(received[rank])}
    for rank, (tokens, start) in enumerate(zip(("abc", "def"), starts, strict=True)):
        drawing.text(start, 24, f"rank {rank}: experts {2 * rank} and {2 * rank + 1}", bold=True)
        for index, (expert, token) in enumerate(row for row in rows if row[1] in tokens):
            x, color, target = start + index * cell, colors[expert], places[expert, token]
            drawing.box(x, top, cell - 4, 30, f"{token}{expert}", color=color)
            middle, stays = cell / 2 - 2, expert // 2 == rank
            drawing.arrow(x + middle, top + 30, target + middle, top + below, color=color, dashed=stays)
        for expert, token in received[rank]:
            drawing.box(places[expert, token], top + below, cell - 4, 30, f"{token}{expert}", color=colors[expert])
        drawing.arrow(start + 46, top + below + 30, start + 46, top + 2 * below - 4, "experts, then back", side=12)
        for line, token in enumerate(tokens):
            words = " + ".join(f"w{expert} {token}{expert}" for expert in sorted(choices[token]))
            drawing.text(start, top + 2 * below + 13 + 20 * line, f"{token}: {words}")
    return drawing.svg()


def which_technique() -> str:
    """Draws the questions that lead to a technique, the first that is answered by "no" last."""
    questions = [
        ("Does the training step fit on one GPU?", "DDP, or OSS with ShardedDataParallel", GREEN),
        ("... with activation checkpointing?", "scale-checkpoint, then DDP or OSS", GREEN),
        ("... with optimizer state and gradients sharded?", "OSS with ShardedDataParallel (ZeRO-2)", BLUE),
        ("... with parameters sharded too, on a fast link?", "fully_shard (FSDP, ZeRO-3)", BLUE),
        ("Is the link fast inside a node alone?", "hybrid sharding (HSDP), or pipelines across nodes", VIOLET),
        ("Is one layer or the batch per GPU the limit?", "tensor parallel inside a node × fully_shard", VIOLET),
        ("Is one sequence the limit?", "context parallel", VIOLET),
    ]
    drawing = Drawing(780, 62 * len(questions) + 70)
    for index, (question, answer, color) in enumerate(questions):
        y = 16 + index * 62
        drawing.box(16, y, 350, 38, question, color=SOFT)
        drawing.arrow(366, y + 19, 424, y + 19, "yes", side=-10)
        drawing.box(430, y, 334, 38, answer, color=color)
        drawing.arrow(190, y + 38, 190, y + 60, "no", side=8)
    y = 16 + len(questions) * 62
    drawing.box(16, y, 350, 38, "Host memory left?", color=SOFT)
    drawing.arrow(366, y + 19, 424, y + 19, "yes", side=-10)
    drawing.box(430, y, 334, 38, "CPU offload, optimizer offload", color=ORANGE)
    return drawing.svg()


PICTURES = {
    "fsdp-step": fsdp_step,
    "oss-buckets": oss_buckets,
    "divided-block": divided_block,
    "all-to-all": all_to_all,
    "expert-dispatch": expert_dispatch,
    "which-technique": which_technique,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fails where a picture would change")
    parser.add_argument("--smoke", action="store_true", help="draws, and writes nothing")
    arguments = parser.parse_args()
    for name, draw in PICTURES.items():
        path, picture = GUIDES / f"{name}.svg", draw()
        if arguments.check and (not path.exists() or path.read_text(encoding="utf-8") != picture):
            sys.exit(f"{path} is another picture: python tools/pictures.py")
        if not arguments.check and not arguments.smoke:
            path.write_text(picture, encoding="utf-8")
        print(f"{name}: {len(picture):,} characters")


if __name__ == "__main__":
    main()
