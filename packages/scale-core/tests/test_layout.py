"""The flat layout: every element once, no atom cut, local shapes and even shards, for any shapes."""

import doctest
import itertools
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scale_core.flat.layout as layout_module
from scale_core.flat.layout import Atom, BlockAtom, FlatLayout
from scale_core.flat.packing import ALIGN

SHAPES = st.lists(st.integers(0, 13), max_size=4).map(tuple)
ATOMS = st.one_of(st.sampled_from(["auto", "element", "row", "parameter"]), st.integers(1, 40).map(BlockAtom))
PARAMETERS = st.lists(st.tuples(SHAPES, ATOMS), max_size=8)
WORLDS = st.integers(1, 9)
PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)


def plan(parameters: list[tuple[tuple[int, ...], Atom]], world_size: int) -> FlatLayout:
    names = [f"p{i}" for i in range(len(parameters))]
    wishes = dict(zip(names, parameters, strict=True))
    return FlatLayout.plan(names, [shape for shape, _ in parameters], world_size, lambda name, shape: wishes[name][1])


def gpt_block(dim: int) -> dict[str, tuple[int, ...]]:
    return {
        "ln_1.weight": (dim,),
        "ln_1.bias": (dim,),
        "attn.c_attn.weight": (3 * dim, dim),
        "attn.c_attn.bias": (3 * dim,),
        "attn.c_proj.weight": (dim, dim),
        "attn.c_proj.bias": (dim,),
        "ln_2.weight": (dim,),
        "ln_2.bias": (dim,),
        "mlp.c_fc.weight": (4 * dim, dim),
        "mlp.c_fc.bias": (4 * dim,),
        "mlp.c_proj.weight": (dim, 4 * dim),
        "mlp.c_proj.bias": (dim,),
    }


@PROPERTY
@given(PARAMETERS, WORLDS)
def test_every_element_stands_on_exactly_one_rank(parameters, world_size):
    layout = plan(parameters, world_size)
    assert (layout.shard_numel > 0) == (layout.numel > 0)
    owners = {}
    for rank in range(world_size):
        for entry, span in zip(layout.entries, layout.spans(rank), strict=True):
            assert 0 <= span.start <= span.stop <= entry.numel
            for k in range(span.numel):
                place = rank * layout.shard_numel + span.shard_offset + k
                assert place == entry.offset + span.start + k
                assert place < (rank + 1) * layout.shard_numel
                assert owners.setdefault(place, (entry.name, span.start + k)) == (entry.name, span.start + k)
    whole = [(entry.name, k) for entry in layout.entries for k in range(entry.numel)]
    assert sorted(owners.values()) == sorted(whole)
    assert layout.full_numel == layout.numel + layout.padding == world_size * layout.shard_numel


@PROPERTY
@given(PARAMETERS, WORLDS)
def test_no_atom_is_cut_between_two_ranks(parameters, world_size):
    layout = plan(parameters, world_size)
    for (shape, wish), entry in zip(parameters, layout.entries, strict=True):
        assert entry.shape == shape
        if isinstance(wish, BlockAtom):
            assert (entry.cut, entry.atom) == ("block", wish.size)
        elif wish != "auto":
            assert entry.cut == wish
        for rank in range(1, world_size):
            inside = rank * layout.shard_numel - entry.offset
            if 0 < inside < entry.numel:
                assert inside % entry.atom == 0


@PROPERTY
@given(PARAMETERS, WORLDS)
def test_local_shapes_hold_exactly_the_elements_of_their_span(parameters, world_size):
    layout = plan(parameters, world_size)
    for rank in range(world_size):
        for entry, span in zip(layout.entries, layout.spans(rank), strict=True):
            assert math.prod(span.shape) == span.numel
            if span.numel == entry.numel:
                assert span.shape == entry.shape
            elif span.numel == 0:
                assert span.shape == (0, *entry.shape[1:])
            elif entry.cut == "row":
                assert len(span.shape) == len(entry.shape)
            else:
                assert span.shape == (span.numel,)


@PROPERTY
@given(PARAMETERS, WORLDS, st.randoms(use_true_random=False))
def test_the_callers_order_changes_no_size(parameters, world_size, random):
    mixed = random.sample(parameters, len(parameters))
    first, second = plan(parameters, world_size), plan(mixed, world_size)
    assert (first.shard_numel, first.padding) == (second.shard_numel, second.padding)


@PROPERTY
@given(st.lists(SHAPES, max_size=8), st.integers(2, 9))
def test_auto_pads_one_percent_at_most_or_as_elements(shapes, world_size):
    names = [f"p{i}" for i in range(len(shapes))]
    auto = FlatLayout.plan(names, shapes, world_size)
    elements = FlatLayout.plan(names, shapes, world_size, "element")
    assert auto.padding <= max(elements.padding, auto.numel // 100)
    for entry in auto.entries:
        assert entry.cut == ("row" if len(entry.shape) >= 2 else "element") or entry.note


def test_element_shards_differ_from_an_even_split_by_nothing():
    for numel, world_size in itertools.product([0, 1, 2, 3, 7, 97, 1009], range(1, 9)):
        assert FlatLayout.plan(["p"], [(numel,)], world_size).shard_numel == math.ceil(numel / world_size)


def test_a_world_of_one_has_no_padding_and_no_gaps():
    layout = FlatLayout.plan(["a", "b", "c", "d"], [(3, 7), (), (0, 4), (5,)], 1, BlockAtom(4))
    assert layout.padding == 0
    spans = sorted((entry.offset, entry.numel) for entry in layout.entries)
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans))
    assert [span.shape for span in layout.spans(0)] == [(3, 7), (), (0, 4), (5,)]


def test_nothing_but_empty_tensors_needs_no_shard():
    layout = FlatLayout.plan(["a", "b"], [(0,), (3, 0)], 4)
    assert (layout.shard_numel, layout.padding) == (0, 0)
    assert [span.shape for span in layout.spans(3)] == [(0,), (3, 0)]
    assert FlatLayout.plan([], [], 2).describe().startswith("0 parameters, 0 elements on 2 ranks: 0 each")


@pytest.mark.fault(87)
def test_fewer_elements_than_ranks_leave_ranks_that_hold_nothing():
    layout = FlatLayout.plan(["scale", "pair"], [(), (2,)], 4)
    assert layout.shard_numel == 1
    assert sorted(span.shape for rank in range(4) for span in layout.spans(rank) if span.numel) == [(), (1,), (1,)]
    assert [span.shape for span in layout.spans(3)] == [(0,), (0,)]


def test_rows_are_slices_of_the_first_dimension_above_one():
    layout = FlatLayout.plan(["p"], [(1, 4, 3)], 2, "row")
    assert layout.entries[0].atom == 3
    assert [layout.span(0, rank).shape for rank in range(2)] == [(1, 2, 3), (1, 2, 3)]


def test_the_last_block_may_be_shorter():
    layout = FlatLayout.plan(["p"], [(10,)], 2, BlockAtom(4))
    assert [(span.start, span.stop) for span in (layout.span(0, 0), layout.span(0, 1))] == [(0, 4), (4, 10)]


def test_parameters_that_fit_into_a_gap_fill_it():
    layout = FlatLayout.plan(["bias", "weight", "scale"], [(6,), (5, 6), ()], 2, "row")
    assert {entry.name: entry.offset for entry in layout.entries} == {"scale": 0, "weight": 1, "bias": 31}
    assert layout.padding == 1


@pytest.mark.parametrize("dim", [768, 1024, 1600, 4096])
def test_a_gpt_block_on_eight_ranks_is_cut_at_rows(dim):
    block = gpt_block(dim)
    layout = FlatLayout.plan(list(block), list(block.values()), 8)
    assert layout.padding < 0.01 * layout.numel
    assert all(entry.cut == "row" for entry in layout.entries if len(entry.shape) == 2)
    assert all(entry.offset % ALIGN == 0 for entry in layout.entries)
    assert layout.shard_numel % ALIGN == 0


def test_the_longest_rows_fall_back_to_elements_first():
    layout = FlatLayout.plan(["long", "short"], [(7, 1000), (10, 10)], 4)
    assert [entry.cut for entry in layout.entries] == ["element", "row"]
    assert "auto: rows of 1,000 elements would pad the plan by more than 1 %" in layout.describe()


def test_an_explicit_row_is_kept_at_any_price():
    layout = FlatLayout.plan(["p"], [(3, 1000)], 2, "row")
    assert [layout.span(0, rank).shape for rank in range(2)] == [(2, 1000), (1, 1000)]
    assert layout.padding == 1000


def test_the_digest_is_stable_and_depends_on_the_layout():
    layout = FlatLayout.plan(["a", "b"], [(4, 2), (3,)], 2)
    assert layout.digest() == FlatLayout.plan(("a", "b"), ([4, 2], [3]), 2).digest() == 4168637376387808716
    first, second = layout.entries
    others = [
        replace(layout, world_size=3),
        replace(layout, shard_numel=layout.shard_numel + 1),
        replace(layout, entries=(second, first)),
        replace(layout, entries=(replace(first, name="c"), second)),
        replace(layout, entries=(replace(first, shape=(2, 4)), second)),
        replace(layout, entries=(replace(first, offset=first.offset + 1), second)),
    ]
    assert len({layout.digest(), *(other.digest() for other in others)}) == 1 + len(others)


def test_bad_arguments_say_what_came_and_what_was_expected():
    with pytest.raises(ValueError, match=r"BlockAtom\(0\)"):
        BlockAtom(0)
    with pytest.raises(ValueError, match="'p' got 'rows'; did you mean 'row'"):
        FlatLayout.plan(["p"], [(2,)], 2, "rows")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'p' got 3"):
        FlatLayout.plan(["p"], [(2,)], 2, lambda name, shape: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="world_size is 0"):
        FlatLayout.plan(["p"], [(2,)], 0)
    with pytest.raises(ValueError, match="1 names and 2 shapes"):
        FlatLayout.plan(["p"], [(2,), (3,)], 2)
    with pytest.raises(ValueError, match=r"'p' has the shape \(2, -1\)"):
        FlatLayout.plan(["p"], [(2, -1)], 2)
    with pytest.raises(ValueError, match="'p' was given more than once"):
        FlatLayout.plan(["p", "p"], [(2,), (2,)], 2)
    with pytest.raises(ValueError, match="0 to 1, but 2"):
        FlatLayout.plan(["p"], [(2,)], 2).span(0, 2)


@pytest.mark.parametrize("world_size", [8, 1000])
def test_a_thousand_row_lengths_are_planned_in_no_time(world_size):
    # The one test with a clock: planning within 0.3 s is promised. CPU time of this process, the least of three runs,
    # is some 0.03 s (8 ranks) and 0.15 s (1,000 ranks, where half of the rows fall back), however busy the machine is.
    names, shapes = [f"p{i}" for i in range(1000)], [(17 + i % 13, 101 + i) for i in range(1000)]
    seconds = []
    for _ in range(3):
        start = time.process_time()
        layout = FlatLayout.plan(names, shapes, world_size)
        seconds.append(time.process_time() - start)
    assert layout.padding <= 0.01 * layout.numel
    assert min(seconds) < 0.3


def test_the_table_in_the_docstring_is_what_describe_prints():
    failed, tried = doctest.testmod(layout_module)
    assert tried >= 3 and failed == 0


@PROPERTY
@given(PARAMETERS, WORLDS, st.sampled_from([1, 2, 4, 16]))
def test_every_local_part_starts_at_a_multiple_of_the_alignment(parameters, world_size, alignment):
    names = [f"p{i}" for i in range(len(parameters))]
    wishes = {name: wish for name, (_, wish) in zip(names, parameters, strict=True)}
    shapes = [shape for shape, _ in parameters]
    layout = FlatLayout.plan(names, shapes, world_size, lambda name, _: wishes[name], alignment=alignment)
    assert all(entry.offset % alignment == 0 for entry in layout.entries)
    for span in itertools.chain.from_iterable(layout.spans(rank) for rank in range(world_size)):
        assert span.numel == 0 or span.shard_offset % alignment == 0


@pytest.mark.parametrize("dim", [768, 1024, 1600])
def test_alignment_changes_no_layout_of_a_gpt_block(dim):
    block = gpt_block(dim)
    plain, aligned = (FlatLayout.plan(list(block), list(block.values()), 8, alignment=k) for k in (1, 8))
    assert plain == aligned


def test_alignment_costs_fewer_elements_than_it_is_per_parameter():
    shapes = [(1000, 7), (33,), (5, 64), ()]
    layout = FlatLayout.plan([f"p{i}" for i in range(4)], shapes, 1, alignment=4)
    assert layout.padding == 3 + 3  # Of 33 and of 1.
    with pytest.raises(ValueError, match="alignment is 0"):
        FlatLayout.plan(["p"], [(2,)], 2, alignment=0)
