"""Drawings and traces show every action at its time."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scale_pipe import simulate
from scale_pipe.schedules.classic import gpipe
from scale_pipe.schedules.visualize import chrome_trace, draw, save_chrome_trace, save_drawing
from scale_pipe.schedules.zero_bubble import zb_v

SVG = "{http://www.w3.org/2000/svg}"


def test_a_drawing_has_a_box_per_computation_a_row_per_rank() -> None:
    simulation = simulate(zb_v(2, 3))
    root = ElementTree.fromstring(draw(simulation))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == 3 * 4 * 3
    assert "F0.0: 0 to 1" in titles
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"rank 0", "rank 1", "forward", "gradient of inputs", "gradient of weights"} <= set(texts)
    kinds = [box for box in root.iter(f"{SVG}rect") if box.get("width") == box.get("height") == "14"]
    places = [float(box.get("x", 0)) for box in kinds]  # of the legend, beside one another
    assert len(places) == 3 and places == sorted(set(places)) and places[0] >= 0


def test_several_simulations_are_drawn_on_one_scale() -> None:
    planned, other = simulate(gpipe(2, 2)), simulate(gpipe(2, 4))
    root = ElementTree.fromstring(draw([planned, other]))
    bands = [float(box.get("width", 0)) for box in root.iter(f"{SVG}rect") if box.get("fill") == "#eeeeee"]
    assert bands[0] / bands[2] == pytest.approx(planned.makespan / other.makespan, abs=1e-3)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one simulation"):
        draw([])
    with pytest.raises(ValueError, match="width is 5"):
        draw(simulate(gpipe(2, 2)), width=5)


def test_a_trace_has_each_action_in_microseconds(tmp_path: Path) -> None:
    simulation = simulate(gpipe(2, 2))
    events = chrome_trace(simulation)["traceEvents"]
    timed = {event["name"]: event for event in events if event["ph"] == "X"}
    assert len(timed) == len(simulation.spans)
    assert (timed["F1.0"]["pid"], timed["F1.0"]["ts"], timed["F1.0"]["dur"]) == (1, 1e6, 1e6)
    save_chrome_trace(simulation, tmp_path / "trace.json")
    save_drawing(simulation, tmp_path / "picture.svg")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == events
    assert (tmp_path / "picture.svg").read_text() == draw(simulation)
