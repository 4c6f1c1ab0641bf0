"""A sequence of layers cut into partitions: as many layers each as the balance says, each on its device.

    layers     0  1  2  3  4  5          balance [2, 1, 3]
    partition  0  0  1  2  2  2

The layers keep their names, so partition 1 of these holds the layer "2" and no other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import nn

from scale_core.part_hooks import is_for_each_part, take_hooks
from scale_pipe.integers import plain_integer
from scale_pipe.microbatch import Arguments, in_words

MEND = (
    "let times decide: from scale_pipe import balance_by_time; "
    "balance = scale_pipe.balance_by_time({num_partitions}, module, sample)"
)


class Partition(nn.Sequential):
    """Some layers of a sequence; the first one takes whatever the pipeline is given, each other one what comes before.

    Args:
        layers: By their names in the whole sequence.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layers.

        Args:
            args: Of the first layer.
            kwargs: Of the first layer.
        """
        return run_layers(self, args, kwargs)


def run_layers(layers: nn.Sequential, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs a sequence whose first layer takes more than the one argument that torch's own hands on.

    Args:
        layers: At least one.
        args: Of the first layer.
        kwargs: Of the first layer.

    Raises:
        Exception: What a layer has raised, with a note that says which it was and what it was given.
    """
    given = Arguments(args, dict(kwargs))
    for name, layer in layers._modules.items():
        assert layer is not None
        try:
            given = Arguments((layer(*given.args, **given.kwargs),), {})
        except Exception as error:  # In a recomputation as well, where no traceback says which layer it is.
            error.add_note(f"in layer {name!r} of the pipeline, a {type(layer).__name__}, given {in_words(given)}")
            raise
    return given.args[0]


def contents_in_words(module: nn.Module) -> str:
    """Says what a partition or a stage holds, for errors: "layers 2 (Linear), 3 (Tanh)", or its class.

    Args:
        module: Of a partition or a stage.
    """
    if not isinstance(module, nn.Sequential):
        return str(module._get_name())
    layers = [f"{name} ({layer._get_name()})" for name, layer in module.named_children()]
    if len(layers) > 4:
        return f"layers {layers[0]} to {layers[-1]}"
    return f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(layers)}"


class Partitions(NamedTuple):
    """What `partition` returns.

    Attributes:
        modules: In the order of the layers; the layers have their own names in them.
        balance: How many layers each one has.
        devices: Of each one.
    """

    modules: list[Partition]
    balance: list[int]
    devices: list[torch.device]


def partition(
    module: nn.Sequential,
    balance: Iterable[int] | None,
    devices: Sequence[torch.device | str | int],
    *,
    move: bool = True,
) -> Partitions:
    """Cuts a sequence into partitions and moves each one to its device.

    Args:
        module: The layers; the same objects stand in the partitions afterwards.
        balance: How many layers each partition has.
        devices: Of the partitions, in order; more are ignored. One device may stand several times.
        move: Whether the layers are moved to their devices.

    Raises:
        TypeError: The module is no `nn.Sequential`, or has a forward of its own; a number of the balance is no integer.
        ValueError: A layer stands twice in the sequence; the sequence itself has hooks; one tensor would have to be on
            two devices; one on the meta device would have to leave it; the balance is missing, its sum is not the
            number of layers, or a number is not positive.
        IndexError: There are fewer devices than partitions.
    """
    check_sequential(module)
    numbers = check_balance(balance, len(module), len(devices))
    if len(numbers) > len(devices):
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(devices)}, partitions: {len(numbers)}); name "
            f"some of them several times, or take a balance of {len(devices)} numbers"
        )
    own = [torch.device(device) for device in devices[: len(numbers)]]
    layers, modules = list(module.named_children()), []
    for number in numbers:
        part = Partition(OrderedDict(layers[:number]))
        part.training = module.training  # Of the sequence alone: a layer may be frozen in evaluation mode.
        take_hooks(part, module)
        modules.append(part)
        del layers[:number]
    _check_one_device_each(modules, own)
    if move:
        _check_values(modules, own)
        for part, device in zip(modules, own, strict=True):
            part.to(device)
    return Partitions(modules, numbers, own)


def check_sequential(module: nn.Module) -> None:
    """Checks that a module is a sequence of layers, each of which stands in it once, and nothing beside it.

    Args:
        module: Any.

    Raises:
        TypeError: It is no `nn.Sequential`, or has a forward of its own.
        ValueError: A layer stands in it twice; it has forward or backward hooks itself.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, but is {type(module).__name__}; "
            'cut other models by names: scale_pipe.split(module, ["blocks.4"])'
        )
    # Its layers are called one by one, past itself: what it does around them would be left out without a word.
    if "forward" in vars(module) or type(module).forward is not nn.Sequential.forward:
        raise TypeError(
            f"module has a forward of its own, that of {type(module).__name__}, which would not run, as its layers are "
            "called one by one: let a layer do what it does, or cut the model by names: "
            'scale_pipe.split(module, ["4"])'
        )
    if own_hooks(module):
        raise ValueError(
            f"module has hooks of its own, {own_hooks(module)}, which would not run, as its layers are called one by "
            "one: register them on its layers"
        )
    first: dict[int, str] = {}
    for name, layer in module._modules.items():
        if id(layer) in first:
            raise ValueError(
                f"module with duplicate children is not supported: {first[id(layer)]!r} and {name!r} are one "
                f"{type(layer).__name__}; make two of them that share their parameters"
            )
        first[id(layer)] = name


def own_hooks(module: nn.Module) -> list[str]:
    """Returns the names of the hooks around the forward and backward of a module itself, not of what it holds.

    Those that each part of it takes along are not among them.

    Args:
        module: Any.
    """
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    hooks = (hook for kind in kinds for hook in vars(module)[kind].values() if not is_for_each_part(hook))
    return [getattr(hook, "__qualname__", repr(hook)) for hook in hooks]


def check_balance(balance: Iterable[int] | None, num_layers: int, num_devices: int = 2) -> list[int]:
    """Returns a balance as a list of positive integers.

    Args:
        balance: How many layers each partition has.
        num_layers: How many there are.
        num_devices: How many partitions a line that mends it asks for.

    Raises:
        TypeError: A number is no integer, or the balance no sequence.
        ValueError: It is missing, its sum is not the number of layers, or a number is not positive.
    """
    if balance is None:
        mend = MEND.format(num_partitions=num_devices)
        raise ValueError(f"a balance is needed: how many of the {num_layers} layers each partition has; {mend}")
    given: object = balance
    if not isinstance(given, Iterable):
        mend = MEND.format(num_partitions=given if isinstance(given, int) and given > 0 else num_devices)
        raise TypeError(f"a balance is a list, how many layers each partition has, but is {balance!r}; {mend}")
    numbers = [_integer(index, number) for index, number in enumerate(balance)]
    mend = MEND.format(num_partitions=len(numbers) or num_devices)
    if sum(numbers) != num_layers:
        raise ValueError(f"the balance {numbers} places {sum(numbers)} layers, but the module has {num_layers}; {mend}")
    if any(number <= 0 for number in numbers):
        raise ValueError(f"each partition has at least one layer, but balance is {numbers}; {mend}")
    return numbers


def _integer(index: int, number: Any) -> int:
    integer = plain_integer(number)
    if integer is None:
        raise TypeError(f"a balance has integers, but balance[{index}] is {number!r}")
    return integer


def _check_one_device_each(modules: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
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


def _check_values(modules: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    for part, device in zip(modules, devices, strict=True):
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            if tensor.is_meta and device.type != "meta":
                raise ValueError(
                    f"{name!r} is on the meta device and has no values that could be moved to {device}: "
                    'give it some before, module.to_empty(device="cpu") and then its initialisation or load_state_dict'
                )


Checkpoint: TypeAlias = Literal["always", "except_last", "never"]
"""Which micro-batches are computed again; the last one's backward begins at once, so it need not be."""


def check_checkpoint(checkpoint: Any) -> None:
    """Checks that it is one of the three.

    Raises:
        ValueError: It is not.
    """
    if checkpoint not in get_args(Checkpoint):
        raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never', but {checkpoint!r}")


def works_in_place(module: nn.Module) -> bool:
    """Whether the first layer that runs says that it overwrites what it is given, as `nn.ReLU(inplace=True)` does.

    What such a layer is given has to be copied where it is needed again.
    """
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return getattr(module, "inplace", False) is True
