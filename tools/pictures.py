"""Draws the pictures of the guides, and the logo. Each has the colors of a light and of a dark page.

    python tools/pictures.py            # draws them anew, into docs/guides
    python tools/pictures.py --check    # fails where a picture would change
    python tools/pictures.py --smoke    # draws, and writes nothing

The schedules of pipelines are drawn by scale_pipe itself (`save_drawing`), the packages by `architecture.py`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import wrap

import readme_bars

DOCS = Path(__file__).parent.parent / "docs"
GUIDES, IMAGES = DOCS / "guides", DOCS / "images"
COLORS = {
    "ink": ("#1f2430", "#e4e7ee"),
    "soft": ("#6b7280", "#a3abba"),
    "faint": ("#d7dbe3", "#4a5162"),
    "ground": ("#ffffff", "#1e2129"),
    "on-solid": ("#ffffff", "#ffffff"),
    "blue": ("#3b6ea8", "#4d82bf"),
    "green": ("#4f8a5b", "#5a9a67"),
    "orange": ("#c9803a", "#c07a37"),
    "violet": ("#7a5ea8", "#8d72bd"),
    "pale-blue": ("#dce8f5", "#26384d"),
    "pale-green": ("#dfeee2", "#263c2c"),
    "pale-orange": ("#f7e6d3", "#47351f"),
    "pale-violet": ("#e8e1f3", "#352c47"),
}
"""Of a light page and of a dark one: browsers choose by the color scheme of the page around the picture."""
INK, SOFT, FAINT, WHITE = (f"var(--{name})" for name in ("ink", "soft", "faint", "on-solid"))
BLUE, GREEN, ORANGE, VIOLET = (f"var(--{name})" for name in ("blue", "green", "orange", "violet"))
GROUND = "var(--ground)"
PALE = {color: color.replace("--", "--pale-") for color in (BLUE, GREEN, ORANGE, VIOLET)}


def style() -> str:
    """Returns the colors as variables of the picture."""
    light, dark = ("".join(f"--{name}:{pair[scheme]};" for name, pair in COLORS.items()) for scheme in (0, 1))
    return f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"


class Drawing:
    """Shapes of one SVG, `width` by `height` pixels, on a ground of its own so that it is read anywhere."""

    def __init__(self, width: float, height: float) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="sans-serif" font-size="13">',
            style(),
            f'<rect width="{width:g}" height="{height:g}" rx="6" fill="{GROUND}"/>',
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
        fill = color if solid else PALE.get(color, GROUND)
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

    def curve(self, points: Sequence[tuple[float, float]], color: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')

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
        ("Is the link fast only inside a node?", "hybrid sharding (HSDP), or pipelines across nodes", VIOLET),
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


def snapshot() -> str:
    """Draws which rank writes what of a snapshot, and who reads it."""
    drawing = Drawing(800, 282)
    for x, words in ((12, "two ranks save"), (322, "step-00000012/"), (640, "three ranks load")):
        drawing.text(x, 24, words, bold=True)
    for rank, y, color in ((1, 40, GREEN), (0, 128, BLUE)):
        drawing.box(12, y, 190, 66, f"rank {rank}: its shards of weights and optimizer", color=color)
        drawing.box(322, y + 8, 210, 46, f"rank-{rank:05}.safetensors", color=color)
        drawing.arrow(202, y + 31, 318, y + 31, "its shards, once", side=-50)
    drawing.box(322, 214, 210, 46, "manifest.json: names, shapes, checksums", color=ORANGE)
    drawing.arrow(107, 194, 318, 237, "", color=SOFT)
    drawing.text(108, 236, "rank 0, last: now it counts", size=12, color=SOFT)
    for rank, y in enumerate((40, 106, 172)):
        drawing.box(640, y, 148, 48, f"rank {rank}: reads its new shard", color=VIOLET)
        for source in ((71,), (71, 159), (159,))[rank]:
            drawing.arrow(532, source, 636, y + 24)
    return drawing.svg()


def hybrid_sharding() -> str:
    """Draws a mesh of two nodes with four GPUs: gathers inside a node, reductions of gradients between them."""
    drawing = Drawing(760, 268)
    for node, y in enumerate((36, 168)):
        drawing.box(84, y - 8, 580, 72, color=FAINT)
        drawing.text(12, y + 32, f"node {node}", bold=True)
        for gpu in range(4):
            x = 100 + gpu * 142
            drawing.box(x, y, 122, 56, f"GPU {4 * node + gpu}\nshard {gpu}", color=(BLUE, GREEN, ORANGE, VIOLET)[gpu])
            if gpu:
                drawing.arrow(x - 18, y + 28, x - 3, y + 28)
                drawing.arrow(x - 5, y + 36, x - 20, y + 36)
    for gpu in range(4):
        x = 161 + gpu * 142
        drawing.arrow(x, 132, x, 104, color=SOFT)
        drawing.arrow(x, 132, x, 156, color=SOFT)
    drawing.text(676, 70, "gathers", color=SOFT, size=12)
    for line, words in enumerate(("all-reduce of", "gradients")):
        drawing.text(676, 126 + 16 * line, words, color=SOFT, size=12)
    drawing.words(256, "Each node has all parameters once. Parameters never travel between nodes, gradients do.")
    return drawing.svg()


def oss_memory() -> str:
    """Draws the bytes per parameter on each of four ranks, for Adam in fp32, by what is sharded."""
    rows = {
        "DDP": (4, 4, 8),
        "OSS with DDP (ZeRO-1)": (4, 4, 2),
        "OSS with ShardedDataParallel (ZeRO-2)": (4, 1, 2),
        "fully_shard (FSDP, ZeRO-3)": (1, 1, 2),
    }
    left, unit = 262, 29
    drawing = Drawing(left + 16 * unit + 54, 44 * len(rows) + 62)
    parts = (("parameters", BLUE), ("gradients", GREEN), ("Adam's state", ORANGE))
    for index, (words, color) in enumerate(parts):
        drawing.box(left + index * 140, 12, 20, 18, color=color)
        drawing.text(left + 26 + index * 140, 26, words, size=12)
    for row, (name, sizes) in enumerate(rows.items()):
        x, y = float(left), 44 + row * 44
        drawing.text(12, y + 22, name)
        for size, (_, color) in zip(sizes, parts, strict=True):
            drawing.box(x, y, size * unit, 32, str(size), color=color)
            x += size * unit
        drawing.text(x + 8, y + 21, f"{sum(sizes)}", bold=True)
    drawing.words(44 * len(rows) + 50, "Bytes per parameter on each of 4 ranks, without activations and buffers.")
    return drawing.svg()


def context_ring() -> str:
    """Draws ring attention on four ranks: queries stay, keys and values travel, chunks from both ends of a sequence."""
    drawing = Drawing(780, 270)
    colors = (BLUE, GREEN, ORANGE, VIOLET)
    drawing.text(12, 24, "a sequence of 8 chunks: rank r has the r-th from the front and from the back", bold=True)
    for chunk in range(8):
        rank = min(chunk, 7 - chunk)
        drawing.box(12 + chunk * 94, 36, 90, 30, f"rank {rank}", color=colors[rank])
    drawing.text(12, 100, "attention: queries stay, keys and values go around the ring", bold=True)
    for rank, color in enumerate(colors):
        x = 12 + rank * 192
        drawing.box(x, 114, 156, 36, f"rank {rank}: queries {rank}, {7 - rank}", color=color)
        for step in range(2):
            source = (rank - step) % 4
            y = 168 + step * 34
            drawing.box(x, y, 156, 26, f"keys, values {source}, {7 - source}", color=colors[source])
        if rank < 3:
            drawing.arrow(x + 156, 184, x + 190, 210)
    drawing.words(252, "Two of four steps. While a rank computes with one part, the next one arrives: W - 1 messages.")
    return drawing.svg()


def gain_of(progress: float, scale: float) -> float:
    """Returns the gain of AdaScale, if the noise of the small batch's gradient grows from 1 to 12 times its square."""
    noise = math.pow(12.0, progress)
    return (noise + 1) / (noise / scale + 1)


def adascale_schedule() -> str:
    """Draws the learning rate of a small batch, and AdaScale's for a batch that is four times as large."""
    scale, steps, base = 4.0, 100, 34.0
    progress, large = 0.0, [(0.0, base * gain_of(0, scale))]
    while progress < steps:
        gain = gain_of(progress / steps, scale)
        progress += gain
        at = min(progress / steps, 1.0)
        large.append((len(large), base * gain_of(at, scale) * (1 + math.cos(math.pi * at)) / 2))
    small = [(step, base * (1 + math.cos(math.pi * step / steps)) / 2) for step in range(steps + 1)]
    left, bottom, across = 46, 182, 5.4
    drawing = Drawing(780, 246)
    drawing.arrow(left, bottom, left + across * steps + 30, bottom)
    drawing.arrow(left, bottom, left, 22)
    drawing.text(left + 8, 30, "learning rate", color=SOFT, size=12)
    drawing.text(left + across * steps + 36, bottom + 4, "optimizer steps", color=SOFT, size=12)
    for points, color, words in (
        (small, BLUE, f"small batch, {steps} steps: the schedule that you tuned"),
        (large, ORANGE, f"batch x 4 with AdaScale, {len(large) - 1} steps: that rate times the gain of the step"),
    ):
        drawing.curve([(left + across * x, bottom - 2.1 * y) for x, y in points], color)
        drawing.text(left + 300, 40 if color == ORANGE else 64, words, color=color, size=12)
    for points in (small, large):
        drawing.text(left + across * points[-1][0], bottom + 18, str(len(points) - 1), size=12, anchor="middle")
    drawing.words(
        222,
        "By AdaScale's formula, for noise that grows while training goes on. A gain of 2.5 counts as 2.5 steps of the "
        "small batch, and training ends when the gains add up to its steps.",
    )
    return drawing.svg()


def expert_balance() -> str:
    """Draws how many of 32 rows four experts get, without balancing and with it, and where a capacity cuts."""
    drawing = Drawing(760, 250)
    colors = (BLUE, GREEN, ORANGE, VIOLET)
    titles = ("without balancing", "balanced: bias_update_rate, or an auxiliary loss")
    for panel, (title, rows) in enumerate(zip(titles, ((17, 8, 5, 2), (9, 8, 8, 7)), strict=True)):
        left, bottom, unit = 40 + panel * 376, 196, 8
        drawing.text(left, 24, title, bold=True)
        for expert, count in enumerate(rows):
            x = left + expert * 78
            drawing.box(x, bottom - count * unit, 60, count * unit, color=colors[expert], solid=False)
            drawing.text(x + 30, bottom - 6, str(count), anchor="middle", size=12)
            drawing.text(x + 30, bottom + 18, f"expert {expert}", anchor="middle", size=12, color=SOFT)
        limit = bottom - 10 * unit
        drawing.parts.append(
            f'<line x1="{left - 8}" y1="{limit}" x2="{left + 306}" y2="{limit}" stroke="{SOFT}" '
            'stroke-dasharray="5 4"/>'
        )
        drawing.text(left + 310, limit + 4, "10", size=12, color=SOFT)
    drawing.words(
        240, "32 rows: the busiest expert sets the time of a step. capacity_factor=1.25 drops the rows above 10."
    )
    return drawing.svg()


def measured() -> str:
    """Draws memory and time of a step next to torch's engines: the bars of the README."""
    _, content = readme_bars.newest()
    rows = {row["engine"]: row for row in content["results"] if row["row"] == "gpt"}
    left, width = 164, 196
    drawing = Drawing(780, 44 + 38 * len(readme_bars.NAMES) + 34)
    panels = (
        ("peak memory of a rank, MB", {engine: rows[engine]["peak_mb"] for engine in readme_bars.NAMES}, "{:.0f}"),
        (
            "time of a step, DDP = 1",
            {engine: rows[engine]["timings"]["torchrun"]["wall_ratio"] for engine in readme_bars.NAMES},
            "{:.2f}",
        ),
    )
    for panel, (title, values, form) in enumerate(panels):
        x = left + panel * (width + 112)
        drawing.text(x, 26, title, bold=True)
        for row, (engine, value) in enumerate(values.items()):
            y = 40 + row * 38
            color = BLUE if "scale" in readme_bars.NAMES[engine] else FAINT
            length = width * value / max(values.values())
            drawing.box(x, y, length, 26, color=color, solid=True)
            drawing.text(x + length + 8, y + 18, form.format(value))
            if not panel:
                drawing.text(12, y + 18, readme_bars.NAMES[engine], bold=color == BLUE)
    drawing.words(
        44 + 38 * len(readme_bars.NAMES) + 16,
        f"A GPT of 6 blocks of width 512 on two CPU ranks, torch {content['machine']['torch']}, {content['date']}.",
    )
    return drawing.svg()


def mark(color: str, accent: str) -> list[str]:
    """Returns the shapes of the logo: four bars, each cut into the pieces of its ranks."""
    shapes = []
    for index, height in enumerate((16, 28, 40, 52)):
        x, y = 6 + index * 14, 58 - height
        shapes.append(f'<rect x="{x}" y="{y}" width="10" height="{height}" rx="2" fill="{color}"/>')
        shapes.append(f'<rect x="{x}" y="{58 - 13 - 12 * index}" width="10" height="13" rx="2" fill="{accent}"/>')
    return shapes


def logo(color: str = "#24507f", accent: str = "#e08a3c") -> str:
    """Draws the logo: one more piece on each rank, and a model that grows with them."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64" width="64" height="64">'
    return "\n".join([head, *mark(color, accent), "</svg>", ""])


def logo_white() -> str:
    """Draws the logo for the header of the site, which is dark."""
    return logo("#ffffff", "#f2a65e")


PICTURES = {
    "fsdp-step": fsdp_step,
    "oss-buckets": oss_buckets,
    "oss-memory": oss_memory,
    "hybrid-sharding": hybrid_sharding,
    "snapshot": snapshot,
    "divided-block": divided_block,
    "context-ring": context_ring,
    "all-to-all": all_to_all,
    "expert-dispatch": expert_dispatch,
    "expert-balance": expert_balance,
    "adascale-schedule": adascale_schedule,
    "which-technique": which_technique,
}
IN_IMAGES = {"measured": measured, "logo": logo, "logo-white": logo_white}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fails where a picture would change")
    parser.add_argument("--smoke", action="store_true", help="draws, and writes nothing")
    arguments = parser.parse_args()
    pictures = {GUIDES / f"{name}.svg": draw for name, draw in PICTURES.items()}
    pictures |= {IMAGES / f"{name}.svg": draw for name, draw in IN_IMAGES.items()}
    for path, draw in pictures.items():
        picture = draw()
        if arguments.check and (not path.exists() or path.read_text(encoding="utf-8") != picture):
            sys.exit(f"{path} is another picture: python tools/pictures.py")
        if not arguments.check and not arguments.smoke:
            path.write_text(picture, encoding="utf-8")
        print(f"{path.stem}: {len(picture):,} characters")


if __name__ == "__main__":
    main()
