"""Comparison to the bit, for tests whose body runs on ranks: models, optimizers and tensors by name."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scale_check.comparison import compare
from scale_check.recording import Key, Phase, Recording
from scale_core.comm.collectives import exchange_text
from scale_core.comm.group import group_of


def gather_values(value: Any) -> list[Any]:
    """Returns the values of all ranks of the default group, by rank. All ranks call it together."""
    texts = exchange_text(pickle.dumps(value).hex(), group_of())
    return [pickle.loads(bytes.fromhex(text)) for text in texts]


def assert_equal(actual: Any, expected: Any, title: object = "") -> None:
    """Compares models, optimizers, tensors and nested containers of them: to the bit, and by dtype.

    Args:
        actual: The object under test.
        expected: The object that it has to be equal to.
        title: Begins the message of a difference.

    Raises:
        AssertionError: They differ. The message has the name of the first difference.
    """
    actual_leaves, expected_leaves = dict(_leaves(actual)), dict(_leaves(expected))
    different_names = sorted(actual_leaves.keys() ^ expected_leaves.keys())
    assert not different_names, f"{title}: only one side has {different_names}"
    tensors: dict[str, Tensor] = {}
    for name, value in expected_leaves.items():
        if isinstance(value, Tensor) and isinstance(actual_leaves[name], Tensor):
            tensors[name] = value
        else:
            assert actual_leaves[name] == value, f"{title}: {name} is {actual_leaves[name]!r} instead of {value!r}"
    assert_tensors_equal({name: actual_leaves[name] for name in tensors}, tensors, title=title)


def assert_tensors_equal(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], phase: Phase = Phase.WEIGHT, title: object = ""
) -> None:
    """Compares tensors by name, to the bit. All ranks call it together if tensors are sharded.

    Args:
        actual: Tensors of any shape by name; every name in `expected` is among them.
        expected: Tensors by name.
        phase: The kind of tensors, for the message.
        title: Begins the message.

    Raises:
        AssertionError: They differ. The message has the name, the index and both values of the first difference.
    """
    for name, tensor in expected.items():
        form, expected_form = (actual[name].dtype, actual[name].shape), (tensor.dtype, tensor.shape)
        assert form == expected_form, f"{title}: {phase.value} {name} is {form} instead of {expected_form}"
    plain, local = (
        Recording({Key(0, phase, name): _full(tensor) for name, tensor in side.items()}) for side in (expected, actual)
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    report = compare(plain, [*[plain] * rank, local], noise={})
    assert report.first is None, f"{title}: {report}"


def _full(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return full


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, nn.Module | torch.optim.Optimizer):
        tree = tree.state_dict()
    if isinstance(tree, Mapping | list | tuple):
        yield path, len(tree)
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(value, f"{path}.{key}".lstrip("."))
    else:
        yield path, tree
