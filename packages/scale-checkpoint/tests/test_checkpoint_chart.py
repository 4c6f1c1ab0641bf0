"""Plans as text."""

from scale_checkpoint.planner.chart import MAX_BARS, bar_chart, table
from scale_checkpoint.planner.timeline import Moment, Timeline


def step_of(num_blocks: int) -> Timeline:
    forward = [Moment(f"block.{j}", False, j, 10 * (j + 1)) for j in range(num_blocks)]
    return Timeline(
        (*forward, *(Moment(m.name, True, m.start_bytes, m.peak_bytes - 1) for m in reversed(forward))), 1.0
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


def test_many_blocks_share_bars_with_their_neighbours() -> None:
    lines = bar_chart(step_of(200), None).splitlines()
    assert len(lines) <= MAX_BARS + 2
    assert "block.0 .. block.8" in lines[0]
    assert sum("< peak" in line for line in lines) == 1


def test_what_lies_between_two_blocks_counts_for_the_one_before() -> None:
    moments = (Moment("a", False, 0, 5), Moment("after a", False, 5, 9), Moment("b", False, 5, 7))
    assert bar_chart(Timeline(moments, 0.0), None).splitlines()[0].split()[-4:] == ["9", "B", "<", "peak"]


def test_a_table_stands_in_columns() -> None:
    assert table(("block", "way", "keeps"), [("a", "keep", "10 B")]) == (
        "block  way   keeps\n-----  ----  -----\na      keep   10 B"
    )
