"""Partitions of a sequence of layers: by a balance, each on its device.

    layers     0  1  2  3  4  5          balance [2, 1, 3]
    partition  0  0  1  2  2  2

The layers keep their names: partition 1 of these holds the layer "2".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from scale_core.hooks.module_parts import is_for_each_part, take_hooks
from scale_core.parameters import MemoryRange, check_memory_unshared
from scale_pipe.integers import plain_integer
from scale_pipe.partition.partition_function import Partition

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of modules that hold the hooks of a forward and its backward."""


class Partitions(NamedTuple):
    """The partitions of a sequence, in the order of its layers."""

    modules: list[Partition]
    balance: list[int]  # The number of layers of each.
    devices: list[torch.device]


def partition(
    module: nn.Sequential,
    balance: Iterable[int] | None,
    devices: Sequence[torch.device | str | int],
    *,
    move: bool = True,
) -> Partitions:
    """Cuts a sequence into partitions of its layers, and moves each one to its device if `move`.

    More devices than partitions are ignored, fewer are an `IndexError`; one device may be named several times.
    """
    check_sequential(module)
    numbers = check_balance(balance, len(module), len(devices))
    if len(numbers) > len(devices):
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(devices)}, partitions: {len(numbers)}); name "
            f"some of them several times, or take a balance of {len(devices)} numbers"
        )
    stage_devices = [torch.device(device) for device in devices[: len(numbers)]]
    modules = slice_layers(module, numbers)
    _check_tensors(modules, stage_devices, move)
    if move:
        for part, device in zip(modules, stage_devices, strict=True):
            part.to(device)
    return Partitions(modules, numbers, stage_devices)


def slice_layers(module: nn.Sequential, numbers: Iterable[int]) -> list[Partition]:
    """Returns a sequence in slices of so many layers, under their names in it; one layer may be in it twice."""
    layers = iter(module._modules.items())
    slices = []
    for number in numbers:
        part = Partition(OrderedDict[str, Any](islice(layers, number)))
        part.training = module.training  # Of the sequence alone: a layer may be frozen in evaluation mode.
        take_hooks(part, module)
        slices.append(part)
    return slices


def check_sequential(module: nn.Module) -> None:
    """Checks that a module is an `nn.Sequential` of different layers, without a forward or hooks of its own."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, but is {type(module).__name__}; "
            'cut other models by names: scale_pipe.split(module, ["blocks.4"])'
        )
    # Its layers are called one by one, past itself: code of its own around them would silently be left out.
    if "forward" in vars(module) or type(module).forward is not nn.Sequential.forward:
        raise TypeError(
            f"module has its own forward, {type(module).__name__}.forward, which would not run, because the "
            "layers are called one by one: let a layer do what it does, or cut the model by names: "
            'scale_pipe.split(module, ["4"])'
        )
    if hooks := forward_hook_names(module):
        raise ValueError(
            f"module has hooks, {hooks}, which would not run, because its layers are called one by one: register "
            "them on its layers"
        )
    first: dict[int, str] = {}
    for name, layer in module._modules.items():
        if id(layer) in first:
            raise ValueError(
                f"module with duplicate children is not supported: {first[id(layer)]!r} and {name!r} are one "
                f"{type(layer).__name__}; make two of them that share their parameters"
            )
        first[id(layer)] = name


def forward_hook_names(module: nn.Module) -> list[str]:
    """Returns the names of a module's own forward and backward hooks, without those that each part of it gets."""
    hooks = (hook for kind in FORWARD_HOOKS for hook in vars(module)[kind].values() if not is_for_each_part(hook))
    return [getattr(hook, "__qualname__", repr(hook)) for hook in hooks]


def check_balance(balance: Iterable[int] | None, num_layers: int, num_devices: int = 2) -> list[int]:
    """Returns a balance as a list of positive integers whose sum is `num_layers`; `num_devices` is for hints."""
    if balance is None:
        raise ValueError(
            f"a balance is needed: how many of the {num_layers} layers each partition has; {_hint(num_devices)}"
        )
    argument: object = balance
    if not isinstance(argument, Iterable):
        partitions = argument if isinstance(argument, int) and argument > 0 else num_devices
        raise TypeError(
            f"a balance is a list, how many layers each partition has, but is {balance!r}; {_hint(partitions)}"
        )
    numbers = []
    for index, number in enumerate(balance):
        integer = plain_integer(number)
        if integer is None:
            raise TypeError(f"a balance has integers, but balance[{index}] is {number!r}")
        numbers.append(integer)
    partitions = len(numbers) or num_devices
    if sum(numbers) != num_layers:
        raise ValueError(
            f"the balance {numbers} places {sum(numbers)} layers, but the module has {num_layers}; {_hint(partitions)}"
        )
    if any(number <= 0 for number in numbers):
        raise ValueError(f"each partition has at least one layer, but balance is {numbers}; {_hint(partitions)}")
    return numbers


def _hint(partitions: int) -> str:
    return (
        f"let times decide: from scale_pipe import balance_by_time; balance = balance_by_time({partitions}, module, "
        "sample)"
    )


def _check_tensors(modules: Sequence[nn.Module], devices: Sequence[torch.device], move: bool) -> None:
    """Checks that no tensor would be on two devices, or be moved from the meta device to another one."""
    first: dict[int, tuple[str, torch.device]] = {}
    for part, device in zip(modules, devices, strict=True):
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            other, before = first.setdefault(id(tensor), (name, device))
            if before != device:
                raise ValueError(
                    f"module with duplicate parameters on distinct devices is not supported: {other!r} on {before} and "
                    f"{name!r} on {device} are one tensor; put both layers on one device, or use DistributedPipe, "
                    "which keeps such parameters equal"
                )
            if move and tensor.is_meta and device.type != "meta":
                raise ValueError(
                    f"{name!r} is on the meta device and has no values that could be moved to {device}: "
                    'give it some before, module.to_empty(device="cpu") and then its initialization or load_state_dict'
                )
    # Two parameters over one memory are cut apart as well, where they come to two devices.
    memory_of: dict[torch.device, list[MemoryRange]] = {}
    for part, device in zip(modules, devices, strict=True):
        elsewhere = [memory for other, ranges in memory_of.items() if other != device for memory in ranges]
        check_memory_unshared("Pipe", (), part.named_parameters(), elsewhere)
        memory_of.setdefault(device, []).extend(
            memory for name, param in part.named_parameters() for memory in MemoryRange.of(name, param)
        )
