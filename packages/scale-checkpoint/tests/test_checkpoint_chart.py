"""Plans as text."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scale_checkpoint import LayerMemoryTracker
from scale_checkpoint.memory_tracker import LayerTrace
from scale_checkpoint.planner.chart import MAX_BARS, MIB, bar_chart, plot_timelines, table
from scale_checkpoint.planner.timeline import Segment, SegmentPass, StrategyCost, Timeline, timeline


def step_of(num_blocks: int) -> Timeline:
    forward = [SegmentPass(f"block.{j}", False, j, 10 * (j + 1)) for j in range(num_blocks)]
    return Timeline(
        (*forward, *(SegmentPass(m.name, True, m.start_bytes, m.peak_bytes - 1) for m in reversed(forward))), 1.0
    )


def test_bars_are_as_long_as_peaks_are_high() -> None:
    lines = bar_chart(step_of(2), budget_bytes=40).splitlines()
    assert [line.count("█") for line in lines] == [12, 25, 24, 11]  # of 50 for the budget
    assert lines[1].endswith("20 B < peak")
    assert [line.split()[:2] for line in lines] == [
        ["forward", "block.0"],
        ["forward", "block.1"],
        ["backward", "block.1"],
        ["backward", "block.0"],
    ]


def test_many_blocks_share_bars_with_their_neighbors() -> None:
    lines = bar_chart(step_of(200), None).splitlines()
    assert len(lines) <= MAX_BARS + 2
    assert "block.0 .. block.8" in lines[0]
    assert sum("< peak" in line for line in lines) == 1


def test_what_lies_between_two_blocks_counts_for_the_one_before() -> None:
    moments = (SegmentPass("a", False, 0, 5), SegmentPass("after a", False, 5, 9), SegmentPass("b", False, 5, 7))
    assert bar_chart(Timeline(moments, 0.0), None).splitlines()[0].split()[-4:] == ["9", "B", "<", "peak"]


def test_a_table_stands_in_columns() -> None:
    assert table(("block", "way", "keeps"), [("a", "keep", "10 B")]) == (
        "block  way   keeps\n-----  ----  -----\na      keep   10 B"
    )


pytest.importorskip("matplotlib")

SVG = "{http://www.w3.org/2000/svg}"
BLOCK = {
    "keep": StrategyCost(1.0, 80 * MIB, 90 * MIB, 20 * MIB),
    "recompute": StrategyCost(1.5, 0, 40 * MIB, 100 * MIB),
}
SEGMENTS = tuple(Segment(name, i * 10 * MIB, i * 10 * MIB, BLOCK) for i, name in enumerate("abc"))


class Picture:
    """An SVG of matplotlib, with its words and with what stands where in the units of an axis."""

    def __init__(self, path: Path) -> None:
        parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
        self.root = ElementTree.fromstring(path.read_text(encoding="utf-8"), parser)
        self.words = [(part.text or "").strip() for part in self.root.iter(ElementTree.Comment)]

    def group(self, name: str, inside: ElementTree.Element | None = None) -> ElementTree.Element:
        (found,) = (part for part in (inside or self.root).iter(f"{SVG}g") if part.get("id") == name)
        return found

    def heights(self, axes: str, name: str) -> list[float]:
        """The vertical places of a group's points, in the units of the axes that it stands in."""
        group = self.group(name, self.group(axes))
        markers = [float(use.get("y", "nan")) for use in group.iter(f"{SVG}use")]
        paths = " ".join(path.get("d", "") for path in group.iter(f"{SVG}path"))
        drawn = markers or [float(y) for y in re.findall(r"[ML] \S+ (\S+)", paths)]
        (low, zero), *_, (high, one) = self._ticks(axes)
        return [low + (y - zero) / (one - zero) * (high - low) for y in drawn]

    def _ticks(self, axes: str) -> list[tuple[float, float]]:
        ticks = [part for part in self.group(axes).iter(f"{SVG}g") if (part.get("id") or "").startswith("ytick_")]
        found = []
        for tick in ticks:
            (word,) = (part.text or "" for part in tick.iter(ElementTree.Comment))
            (mark,) = (
                use.get("y", "") for use in tick.iter(f"{SVG}use") if "y" in use.attrib
            )  # The others are letters.
            found.append((float(word.replace("\N{MINUS SIGN}", "-")), float(mark)))
        return found


def test_each_plan_is_a_line_with_its_name_and_peak(tmp_path: Path) -> None:
    plans = {"none": ["keep"] * 3, "all": ["recompute"] * 3, "planned": ["recompute", "keep", "keep"]}
    steps = {name: timeline(SEGMENTS, (), strategies) for name, strategies in plans.items()}
    plot_timelines(steps, tmp_path / "plan.svg", budget_bytes=200 * MIB)
    picture = Picture(tmp_path / "plan.svg")
    for name, step in steps.items():
        expected = [size / MIB for moment in step.passes for size in (moment.start_bytes, moment.peak_bytes)]
        # Where a line goes straight on, a picture has no point.
        turns = [
            size
            for before, size, after in zip([None, *expected], expected, [*expected[1:], None], strict=False)
            if before is None or after is None or size - before != after - size
        ]
        assert picture.heights("axes_1", name) == pytest.approx(turns, abs=0.5), name
        assert f"{name}: {step.peak_bytes // MIB} MiB" in picture.words
    assert picture.heights("axes_1", "budget") == pytest.approx([200, 200], abs=0.5)
    assert {"forward", "backward", "budget", "MiB that live"} <= set(picture.words)


def test_layers_stand_at_their_peaks_and_leave_what_they_leave(tmp_path: Path) -> None:
    traces = [
        LayerTrace("up", "Linear", True, 0, 9 * MIB, 4 * MIB),
        LayerTrace("down", "Linear", True, 4 * MIB, 12 * MIB, 5 * MIB),
        LayerTrace("", "", True, 5 * MIB, 6 * MIB, 6 * MIB),
        LayerTrace("down", "Linear", False, 6 * MIB, 14 * MIB, 3 * MIB),
    ]
    tracker = LayerMemoryTracker()
    tracker._finished = traces
    tracker.plot(tmp_path / "layers.svg")
    picture = Picture(tmp_path / "layers.svg")
    assert picture.heights("axes_1", "forward") == pytest.approx([9, 12, 6], abs=0.1)
    assert picture.heights("axes_1", "backward") == pytest.approx([14], abs=0.1)
    for name, left in (("up", 4), ("down", 1)):
        assert max(picture.heights("axes_2", name)) == pytest.approx(left, abs=0.1), name
    assert {"up", "down", "pass", "MiB at its peak", "MiB left by its forward"} <= set(picture.words)
