"""Tensors taken out of the arguments of a module, and put back into new containers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_checkpoint.tree import extract_tensors, insert_tensors


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Box:
    tensor: Tensor
    rest: Any


def test_tensors_are_taken_out_of_anything_and_put_back() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    tree = ((a, [b, {"k": a}]), {"p": Pair(a, None), "o": OrderedDict(x=b), "box": Box(b, [1, a, "t"]), "s": {1, 2}})
    tensors, rest = extract_tensors(tree)
    assert [id(tensor) for tensor in tensors] == [id(a), id(b)]
    back = insert_tensors(rest, [a, b])
    assert back[0] == (a, [b, {"k": a}]) or back[0][1][1]["k"] is a
    assert type(back[1]["p"]) is Pair and back[1]["p"].a is a and type(back[1]["o"]) is OrderedDict
    assert back[1]["box"].tensor is b and back[1]["box"].rest[1] is a and back[1]["s"] == {1, 2}
    other = insert_tensors(rest, [b, a])
    assert other[0][0] is b and tree[1]["box"].tensor is b, "what was taken apart is not touched"
    assert extract_tensors((Box, 3, None)) == ([], (Box, 3, None))


def test_containers_without_tensors_are_copied_for_a_forward() -> None:
    filled: list[int] = []
    counter = Box(torch.ones(1), {"seen": filled})
    _, rest = extract_tensors((filled, counter))
    filled.append(1)
    assert rest[0] == [] and rest[1].rest == {"seen": []} and counter.rest == {"seen": [1]}
