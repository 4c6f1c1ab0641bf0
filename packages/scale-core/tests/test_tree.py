"""tree.py: no tensor is overlooked, and containers keep their type."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from scale_core.tree import map_leaves, map_tensors, tensors_in


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]
    name: str = "a name"
    made: int = 0

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Output
    mask: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    logits: Tensor


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Any]):
    """The manner of transformers: a mapping, a dataclass and a sequence in one."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __delitem__(self, key: str) -> None:
        raise TypeError("a model's output loses nothing")


class Batch(UserDict[str, Any]):
    pass


class Strict(dict[str, Any]):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("filled by `put` only")

    def put(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)


class Stack(list[Tensor]):
    note = ""


class Row(tuple[Tensor, ...]):
    pass


def double(tensor: Tensor) -> Tensor:
    return tensor * 2 if tensor.is_floating_point() else tensor


def one() -> Tensor:
    return torch.ones(2)


def test_plain_containers_at_any_depth_keep_their_type() -> None:
    tree = {"a": [one(), (one(), None, 3)], "b": Pair(one(), None), "c": OrderedDict(d="text"), "e": deque([one()])}
    mapped = map_tensors(double, tree)
    assert mapped["a"][0].tolist() == mapped["a"][1][0].tolist() == [2, 2]
    assert mapped["a"][1][1:] == (None, 3)
    assert type(mapped["b"]) is Pair and mapped["b"].left.tolist() == [2, 2] and mapped["b"].right is None
    assert mapped["c"] == OrderedDict(d="text")
    assert type(mapped["e"]) is deque and mapped["e"][0].tolist() == [2, 2]
    assert tree["a"][0].tolist() == [1, 1]  # type: ignore[index]


def test_a_bare_tensor_is_a_tree() -> None:
    assert map_tensors(double, one()).tolist() == [2, 2]
    assert len(list(tensors_in(one()))) == 1


@pytest.mark.parametrize("leaf", [None, 3, "text", Output, object(), torch.Size((2, 3))])
def test_what_holds_no_tensor_is_returned_as_it_is(leaf: object) -> None:
    assert map_tensors(double, leaf) is leaf
    assert list(tensors_in(leaf)) == []


def test_a_tree_in_which_nothing_changes_is_the_very_same_object() -> None:
    for tree in ([one()], Output(one(), [one()]), ModelOutput(logits=one()), Batch(ids=one()), Stack([one()])):
        assert map_tensors(lambda tensor: tensor, tree) is tree


class Computed(UserDict[str, Any]):
    """Makes its tensors anew each time."""

    def __getitem__(self, key: str) -> Tensor:
        return torch.tensor(self.data[key])


def test_tensors_that_are_made_on_the_way_stay_apart() -> None:
    numbers, values = [torch.tensor(number) for number in range(100)], iter(range(100))
    mapped = map_tensors(lambda tensor: numbers[next(values)], Computed({str(value): value for value in range(100)}))
    assert list(mapped.data.values()) == numbers


@pytest.mark.parametrize("tree", [{one(), one()}, [1, frozenset([(1, one())])], {"a": Output(one(), {one()})}])  # type: ignore[arg-type]
def test_tensors_without_an_order_are_refused(tree: object) -> None:
    for act in (lambda: map_tensors(double, tree), lambda: map_leaves(id, tree), lambda: list(tensors_in(tree))):
        with pytest.raises(TypeError, match=r"set of tensors has a different order on each rank.*put them into a list"):
            act()
    names = {"a", ("b", 1)}
    assert map_tensors(double, [names])[0] is names and list(tensors_in([names])) == []


def test_a_dataclass_is_copied_without_running_its_constructor() -> None:
    output = Output(one(), [one(), one()])
    mapped = map_tensors(double, output)
    assert type(mapped) is Output
    assert mapped.logits.tolist() == mapped.hidden[1].tolist() == [2, 2]
    assert (mapped.name, mapped.made) == ("a name", 1)
    assert output.logits.tolist() == [1, 1]
    assert len(list(tensors_in(output))) == 3


def test_frozen_dataclasses_are_mapped_too() -> None:
    mapped = map_tensors(double, Frozen(Output(one(), [])))
    assert mapped.inner.logits.tolist() == [2, 2]
    assert map_tensors(double, Slotted(one())).logits.tolist() == [2, 2]


def test_a_mapping_that_is_a_dataclass_changes_as_both() -> None:
    mapped = map_tensors(double, ModelOutput(loss=one(), logits=one()))
    assert type(mapped) is ModelOutput
    assert mapped.loss is mapped["loss"] and mapped.logits is mapped["logits"]
    assert mapped.loss is not None and mapped.loss.tolist() == [2, 2]
    assert list(mapped) == ["loss", "logits"]
    assert list(map_tensors(double, ModelOutput(logits=one()))) == ["logits"]


def test_the_outputs_of_transformers_change_as_both() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutputWithPast(loss=one(), logits=one(), hidden_states=(one(), one()))
    mapped = map_tensors(double, output)
    assert type(mapped) is type(output)
    assert mapped.loss is mapped["loss"] and mapped.loss.tolist() == [2, 2]
    assert mapped.hidden_states[1].tolist() == mapped["hidden_states"][1].tolist() == [2, 2]
    assert len({id(tensor) for tensor in tensors_in(output)}) == 4


def test_mappings_of_one_s_own_keep_class_attributes_and_order() -> None:
    strict = Strict(5)
    strict.put("z", one())
    strict.put("a", 1)
    mapped = map_tensors(double, strict)
    assert type(mapped) is Strict and mapped.size == 5 and list(mapped) == ["z", "a"]
    assert mapped["z"].tolist() == [2, 2]
    batch = map_tensors(double, Batch(ids=one()))
    assert type(batch) is Batch and batch["ids"].tolist() == [2, 2]
    grouped = map_tensors(double, defaultdict(list, a=[one()]))
    assert grouped["a"][0].tolist() == [2, 2] and grouped["new"] == []


def test_lists_and_tuples_of_one_s_own_keep_their_class() -> None:
    stack = Stack([one()])
    stack.note = "kept"
    mapped = map_tensors(double, stack)
    assert type(mapped) is Stack and mapped.note == "kept" and mapped[0].tolist() == [2, 2]
    assert stack[0].tolist() == [1, 1]
    row = map_tensors(double, Row((one(),)))
    assert type(row) is Row and row[0].tolist() == [2, 2]


def test_a_packed_sequence_stays_one() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    mapped = map_tensors(double, packed)
    assert type(mapped) is PackedSequence
    assert mapped.data.tolist() == [2] * 5
    assert mapped.batch_sizes.tolist() == packed.batch_sizes.tolist()


def test_a_structure_that_torch_returns_stays_one() -> None:
    mapped = map_tensors(double, torch.max(torch.ones(2, 2), dim=0))
    assert mapped.values.tolist() == [2, 2] and mapped.indices.tolist() == [0, 0]


def test_a_tensor_that_stands_twice_is_mapped_once() -> None:
    tensor = one()
    first, second = map_tensors(double, (tensor, {"again": tensor}))
    assert first is second["again"]
    assert [seen is tensor for seen in tensors_in([tensor, tensor])] == [True, True]
