"""Mini-batches are cut, copied to devices, and outputs are merged; errors name what does not fit."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scale_pipe.microbatch import (
    Arguments,
    NoChunk,
    batch_size_of,
    check_chunks,
    copy_to,
    describe_arguments,
    gather,
    micro_batch_sizes,
    scatter,
    scatter_each,
)


@dataclass(frozen=True)
class Pair:
    one: Any
    other: Any


class Named(NamedTuple):
    value: Any
    rest: Any


def rows(number: int, width: int = 2) -> Tensor:
    return torch.arange(float(number * width)).view(number, width)


def test_sizes_are_those_of_torch_chunk() -> None:
    for batch_size in range(1, 20):
        for chunks in range(1, 22):
            expected = [len(piece) for piece in torch.empty(batch_size).chunk(chunks)]
            assert micro_batch_sizes(batch_size, chunks) == expected
    assert micro_batch_sizes(0, 3) == [0]


def test_whatever_tensors_are_nested_in_stays_what_it_was() -> None:
    x, y = rows(5), torch.arange(5)
    inputs = Arguments(((x, [y, None]), Pair(x, "word")), {"named": Named({"x": x, 3: 4}, 2.5)})
    parts = scatter(inputs, 2)
    assert [batch_size_of(part) for part in parts] == [3, 2]
    for part, expected, labels in zip(parts, x.split([3, 2]), y.split([3, 2]), strict=True):
        assert type(part) is Arguments
        (first, pair), named = part.args, part.kwargs["named"]
        assert torch.equal(first[0], expected) and torch.equal(first[1][0], labels) and first[1][1] is None
        assert type(pair) is Pair and pair.one is first[0] and pair.other == "word"
        assert type(named) is Named and named.value["x"] is first[0] and named.value[3] == 4 and named.rest == 2.5
    again = gather(parts)
    assert type(again) is Arguments and type(again.args[1]) is Pair
    assert torch.equal(again.args[0][0], x) and again.args[1].one is again.args[0][0]
    assert again.kwargs["named"].value[3] == 4


def test_inputs_without_samples_go_to_every_micro_batch() -> None:
    scale, thing = torch.tensor(2.0), object()
    for part in scatter((rows(4), scale, thing), 4):
        assert part[1] is scale and part[2] is thing and part[0].shape == (1, 2)


def test_a_tensor_that_belongs_to_no_sample_is_not_cut() -> None:
    mask = torch.ones(3, 3)
    for chunks in (1, 2):
        for part in scatter((rows(4), NoChunk(mask), [Pair(NoChunk(mask), 1)], {"mask": NoChunk(mask)}), chunks):
            assert part[1] is mask and part[2][0].one is mask and part[3]["mask"] is mask
    with pytest.raises(TypeError, match="expected a Tensor, got int"):
        NoChunk(3)  # type: ignore[arg-type]


def test_one_micro_batch_is_the_inputs_themselves() -> None:
    inputs = (rows(3), {"x": rows(3)})
    assert scatter(inputs, 1)[0] is inputs
    assert gather([inputs]) is inputs


@pytest.mark.fault(88)
def test_fewer_samples_than_chunks_make_fewer_micro_batches() -> None:
    assert [part.shape[0] for part in scatter(rows(3), 8)] == [1, 1, 1]
    assert [part.shape[0] for part in scatter(rows(0), 8)] == [0]


def test_gradients_come_back_to_what_was_cut() -> None:
    x = rows(5).requires_grad_()
    gather([(part * factor,) for factor, part in enumerate(scatter(x, 3))])[0].sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [0, 0, 1, 1, 2]


def test_inputs_without_a_tensor_to_cut_are_refused() -> None:
    with pytest.raises(TypeError, match="expected Tensor, but got int, NoneType"):
        scatter((3, None), 2)
    with pytest.raises(TypeError, match="expected Tensor, but got nothing"):
        scatter((), 2)
    with pytest.raises(TypeError, match="expected a tensor with a first dimension"):
        scatter(torch.tensor(1.0), 2)


def test_tensors_with_different_numbers_of_samples_are_named() -> None:
    inputs = Arguments((rows(8, 3),), {"mask": torch.ones(4), "other": NoChunk(torch.ones(1))})
    message = "inputs.args[0] [8, 3] has 8 samples, and inputs.kwargs['mask'] [4] has 4; what belongs to no sample is"
    with pytest.raises(ValueError, match=re.escape(message)):
        scatter(inputs, 2)


def test_tensors_of_different_sizes_with_equal_shares_are_cut() -> None:
    pairs = (rows(2, 1), [rows(4), NoChunk(rows(3))])
    with pytest.warns(UserWarning, match=r"inputs\[0\] \[2, 1\] and inputs\[1\]\[0\] \[4, 2\] have different"):
        parts = scatter_each(pairs, 2)
    assert [part[0].tolist() for part in parts] == [[[0]], [[1]]]
    assert [part[1][0].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert all(part[1][1].shape == (3, 2) for part in parts)
    assert scatter_each((rows(2), rows(3)), 1)[0][1].shape == (3, 2), "one micro-batch is everything, and no warning"
    assert [len(part[1]) for part in scatter_each((rows(4), rows(4)), 2)] == [2, 2]
    for first, second, told in (
        (8, 1, "[8, 2] makes micro-batches of 4, 4 samples, and inputs[1] [1, 2] of 1; what belongs to no sample is"),
        (5, 10, "[5, 2] makes micro-batches of 3, 2 samples, and inputs[1] [10, 2] of 5, 5;"),
        (0, 2, "[0, 2] makes micro-batches of 0 samples, and inputs[1] [2, 2] of 1, 1;"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"inputs[0] {told}")):
            scatter_each((rows(first), rows(second)), 2)


def test_numbers_of_chunks_are_integers_of_any_library() -> None:
    taken = [check_chunks(number) for number in (2, numpy.int64(2), torch.tensor(2))]
    assert taken == [2, 2, 2] and all(type(number) is int for number in taken)
    for wrong in (True, numpy.bool_(True), 42.0, numpy.float32(2), torch.tensor(2.0), "2", None, 0, numpy.int64(-1)):
        with pytest.raises(ValueError, match="number of chunks must be positive integer, got"):
            check_chunks(wrong)


def test_tensors_that_cannot_be_cut_are_named() -> None:
    sparse = torch.ones(4, 2).to_sparse()
    with pytest.raises(TypeError, match=r"inputs.args\[1\] is a sparse_coo tensor.*to_dense\(\).*NoChunk"):
        scatter(Arguments((torch.ones(4), sparse), {}), 2)
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"inputs.kwargs\['words'\] is a nested tensor.*to_padded_tensor"):
        scatter(Arguments((), {"words": nested}), 2)
    assert scatter(Arguments((sparse,), {}), 1)[0].args[0] is sparse
    assert scatter(Arguments((torch.ones(4), NoChunk(sparse)), {}), 2)[1].args[1] is sparse


def test_a_tensor_without_dimensions_is_named_as_such() -> None:
    with pytest.raises(TypeError, match=r"with a first dimension, .* have no dimension: Tensor \[\] float32, str; "):
        scatter(Arguments((torch.tensor(1.0), "text"), {}), 2)


def test_errors_say_what_a_module_was_given() -> None:
    given = Arguments((torch.ones(2, 3), [None]), {"mask": torch.ones(2, dtype=torch.bool), "flag": True})
    assert describe_arguments(given) == "Tensor [2, 3] float32, NoneType, mask=Tensor [2] bool, flag=bool"
    assert describe_arguments(Arguments((), {})) == "nothing"
    assert describe_arguments(Arguments(tuple(range(9)), {})).endswith("int, ...")


CPU, META = torch.device("cpu"), torch.device("meta")


def test_tensors_that_are_there_are_themselves() -> None:
    tree = {"x": (torch.ones(2), 3)}
    assert copy_to(CPU, tree) is tree


def test_all_others_are_copied_and_their_gradients_come_back() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    moved = copy_to(META, [x, {"again": x}, "word", torch.ones(1, device="meta")])
    assert moved[0].is_meta and moved[0].shape == (2, 3) and moved[0] is moved[1]["again"] and moved[2] == "word"
    assert moved[0].requires_grad and moved[0].grad_fn is not None


@pytest.mark.parametrize(
    "outputs, message",
    [
        ([torch.tensor(1.0)] * 2, "the output is a tensor without dimensions for each of 2 micro-batches"),
        ([(rows(1), 1), (rows(1), 2)], r"output\[1\] is not a tensor and differs between .*: 1 for 0, 2 for 1;"),
        ([(rows(1), None), (rows(1),)], r"micro-batches 0 and 1 differ at output\[1\]"),
        ([{"a": rows(1)}, {"b": rows(1)}], r"differ at output\['a'\]"),
        ([rows(1, 2), rows(1, 3)], r"of micro-batch 0 is \[1, 2\] float32, and of micro-batch 1 \[1, 3\] float32"),
        ([[rows(1)], [rows(1).double()]], r"output\[0\] .* \[1, 2\] float32, and .* \[1, 2\] float64"),
        ([[rows(1)], [1]], r"output\[0\] is a Tensor for micro-batch 0, and a int for 1"),
    ],
)
def test_outputs_that_do_not_go_together_are_named(outputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather(outputs)


def test_one_output_in_two_places_is_one_in_all_micro_batches() -> None:
    x, y = rows(1), rows(2)
    joined = gather([(x, x), (y, y)])
    assert joined[0] is joined[1] and torch.equal(joined[0], torch.cat([x, y]))
    with pytest.raises(ValueError, match="is one tensor with another output for micro-batch 0"):
        gather([(x, x), (y, y.clone())])


def test_what_is_no_number_in_all_outputs_is_the_same() -> None:
    assert str(gather([(torch.ones(1), float("nan"))] * 2 + [(torch.ones(1), float("nan"))])[1]) == "nan"
    with pytest.raises(ValueError, match=r"output\[1\] is not a tensor and differs between .*: nan for 0, 1.0"):
        gather([(torch.ones(1), float("nan")), (torch.ones(1), 1.0)])


class Halves:
    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.whole = torch.cat([left, right], 1)


def test_containers_that_make_their_tensors_anew_are_cut() -> None:
    pytree.register_pytree_node(
        Halves,
        lambda halves: ([halves.whole[:, :3], halves.whole[:, 3:]], None),
        lambda tensors, _: Halves(*tensors),
    )
    cuts = scatter(Halves(rows(4, 3), rows(4, 3)), 2)
    assert len(cuts) == 2
    assert torch.equal(torch.cat([cut.whole for cut in cuts]), torch.cat([rows(4, 3)] * 2, 1))
