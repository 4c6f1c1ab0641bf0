"""Pictures hold what they say: read back from the SVG, by the scale that it draws."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scale_checkpoint import LayerTrace
from scale_checkpoint.memory_tracker import plot_layers
from scale_checkpoint.planner.chart import MIB, plot_timelines
from scale_checkpoint.planner.timeline import Segment, Way, timeline

pytest.importorskip("matplotlib")

SVG = "{http://www.w3.org/2000/svg}"
BLOCK = {"keep": Way(1.0, 80 * MIB, 90 * MIB, 20 * MIB), "recompute": Way(1.5, 0, 40 * MIB, 100 * MIB)}
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


def test_each_plan_is_a_line_through_its_moments_under_its_name_and_peak(tmp_path: Path) -> None:
    plans = {"none": ["keep"] * 3, "all": ["recompute"] * 3, "planned": ["recompute", "keep", "keep"]}
    steps = {name: timeline(SEGMENTS, (), ways) for name, ways in plans.items()}
    plot_timelines(steps, tmp_path / "plan.svg", budget_bytes=200 * MIB)
    picture = Picture(tmp_path / "plan.svg")
    for name, step in steps.items():
        expected = [size / MIB for moment in step.moments for size in (moment.start_bytes, moment.peak_bytes)]
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
    plot_layers(traces, tmp_path / "layers.svg")
    picture = Picture(tmp_path / "layers.svg")
    assert picture.heights("axes_1", "forward") == pytest.approx([9, 12, 6], abs=0.1)
    assert picture.heights("axes_1", "backward") == pytest.approx([14], abs=0.1)
    for name, left in (("up", 4), ("down", 1)):
        assert max(picture.heights("axes_2", name)) == pytest.approx(left, abs=0.1), name
    assert {"up", "down", "pass", "MiB at its peak", "MiB left by its forward"} <= set(picture.words)
