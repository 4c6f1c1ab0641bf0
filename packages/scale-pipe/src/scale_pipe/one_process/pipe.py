"""`Pipe`: a sequence of layers on several devices of one process."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, overload

import torch
from torch import nn

from scale_core.arguments import checked_arguments
from scale_core.tree import tensors_in
from scale_pipe.batch_norm import DeferredBatchNorm
from scale_pipe.microbatch import Arguments, check_chunks, gather, scatter, scatter_each, unwrap_no_chunk
from scale_pipe.one_process.pipeline import Pipeline
from scale_pipe.partition.partition import check_balance, check_sequential, partition
from scale_pipe.partition.partition_function import Checkpoint, check_checkpoint
from scale_pipe.skip.layout import verify_skippables
from scale_pipe.skip.namespace import declared_skips

Device = torch.device | str | int


def resolve_devices(devices: Iterable[Device] | None, balance: Sequence[int] | None) -> list[torch.device]:
    """Returns devices with their index; None is all accelerators, or the CPU for each partition of the balance.

    Raises TypeError if `devices` is not a list, and ValueError if a device does not exist.
    """
    if devices is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return [torch.device("cpu")] * max(1, len(balance or ()))
        return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]
    if isinstance(devices, str | torch.device) or not isinstance(devices, Iterable):
        raise TypeError(f"devices are a list, one for each partition, but got {devices!r}: write devices=[{devices!r}]")
    return [_device(index, device) for index, device in enumerate(devices)]


def _device(place: int, given: Device) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    try:
        device = torch.device(given)
        is_there = device.type in ("cpu", "meta") or accelerator is not None
    except (RuntimeError, TypeError):
        is_there = False
    if is_there and (accelerator is None or device.type != accelerator.type):
        return device  # Of another type: a copy to it raises if it is not there.
    if not is_there or (device.index or 0) >= count:
        available = "no accelerators" if accelerator is None else f"{count} of the type {accelerator.type!r}"
        raise ValueError(
            f"there is no device {given!r}, as devices[{place}] names it: this process sees {available}, and the CPU, "
            'which may be given several times: devices=["cpu", "cpu"]'
        )
    is_numbered = device != torch.device(device.type)
    return device if is_numbered else torch.device(device.type, torch.accelerator.current_device_index())


_PARTITION_KEY = re.compile(r"partitions\.\d+\.(.+)", re.DOTALL)


def strip_partition_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Renames FairScale's and torchgpipe's keys in place: `partitions.1.3.weight` is `3.weight`, whatever the balance.

    There, a skippable layer holds the original layer as its `module`: `partitions.1.3.module.weight` is `3.weight` too.
    """
    if "partitions" in module._modules:
        return  # A layer has this name itself.
    skippables = [
        name for name, part in module.named_modules() if declared_skips(part) and "module" not in part._modules
    ]
    for key in [key for key in state_dict if key.startswith(prefix)]:
        match = _PARTITION_KEY.fullmatch(key[len(prefix) :])
        if match is None:
            continue
        plain = match.group(1)
        for name in skippables:
            if plain.startswith(f"{name}.module."):
                plain = name + plain[len(name) + len(".module") :]
        state_dict[prefix + plain] = state_dict.pop(key)


_logger = logging.getLogger(__name__)


class Pipe(nn.Module):
    """A pipeline of layers on several devices of one process, which compute at the same time (GPipe).

        >>> import torch
        >>> from scale_pipe import Pipe
        >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> pipe = Pipe(layers, balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
        >>> pipe(torch.randn(8, 4)).shape
        torch.Size([8, 2])
        >>> [name for name, _ in pipe.named_parameters()]
        ['0.weight', '0.bias', '2.weight', '2.bias']

    A mini-batch is cut into micro-batches, which go through the partitions one after the other, in GPipe's order.
    Outputs and gradients are the same as if the layers were called with each micro-batch. Parameters keep the names of
    the sequence, whatever the balance; `partitions` holds the same layers, and is in no name.

    Args:
        module: The layers, each of them once. They are moved to their devices; each calls the next with its output.
        balance: How many layers each partition has.
        devices: A list with the device of each partition; devices may repeat. None is all accelerators, or the CPU if
            there is no accelerator.
        chunks: Number of micro-batches per mini-batch; fewer if the mini-batch has fewer samples.
        checkpoint: Micro-batches that keep only the partitions' inputs, and are recomputed in the backward pass:
            "always", "except_last" or "never". The backward of the last one begins at once, so recomputing it saves
            nothing. In eval mode no micro-batch is recomputed.
        deferred_batch_norm: Update the running statistics of batch norms once per mini-batch, not per micro-batch.

    Attributes:
        balance: As above.
        devices: One for each partition.
        chunks: As above; may be set.
        checkpoint: As above; may be set.
        partitions: An `nn.ModuleList` with an `nn.Sequential` for each device, of the very same layers.
        pipeline: Runs them.

    Raises:
        TypeError: The module is not an `nn.Sequential`, or has its own forward; balance or devices is not a list;
            `stash` and `pop` of its layers do not match.
        ValueError: The balance is missing or does not fit; chunks or checkpoint has a wrong value; a layer occurs
            twice; the sequence itself has hooks; two devices would need the same tensor; a device does not exist.
        IndexError: There are fewer devices than partitions.

    See also: [the guide to pipelines](../guides/pipe.md).
    """

    partitions: nn.ModuleList
    _batch_norm_class = DeferredBatchNorm  # The class that replaces batch norms under `deferred_batch_norm`

    @checked_arguments(own="module balance devices chunks checkpoint")
    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: Checkpoint = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        check_checkpoint(checkpoint)
        chunks = check_chunks(chunks)
        self._checked = chunks, checkpoint
        check_sequential(module)
        verify_skippables(module)
        numbers = None if balance is None else check_balance(balance, len(module))
        cut = partition(module, numbers, resolve_devices(devices, numbers), move=False)  # Refuses before it changes.
        if deferred_batch_norm:
            self._batch_norm_class.convert_deferred_batch_norm(module, chunks)
        cut = partition(module, numbers, cut.devices)
        self.chunks, self.checkpoint = chunks, checkpoint
        self.balance, self.devices = cut.balance, cut.devices
        self.pipeline = Pipeline(cut.modules, cut.devices)
        self.training = module.training
        self.__dict__["partitions"] = nn.ModuleList(cut.modules)  # In no name.
        self._modules.update(module.named_children())  # `add_module` refuses names that this class uses itself.
        _logger.info(
            "Pipe: %s layers on %s; %d micro-batches, checkpoint=%s",
            *(self.balance, [str(device) for device in self.devices], chunks, checkpoint),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the output of a mini-batch.

        Args:
            args: Arguments of the first layer. Tensors [N, ...], nested in any way, are cut. Other values, and tensors
                in a `NoChunk`, go to each micro-batch. Tensors of different N are cut each by itself, in the same
                proportions, with a warning. They may be on any device.
            kwargs: Its keyword arguments, in the same way.

        Returns:
            The result of the last layer, [N, ...], on the last device: tensors are concatenated, everything else has to
            be the same for each micro-batch.

        Raises:
            TypeError: There is no tensor to cut.
            ValueError: Tensors cannot be cut in the same proportions; outputs cannot be merged.
            RuntimeError: A layer was replaced after the pipeline was made.
            Exception: The error of a layer, with its own traceback and a note on where it was raised. The next
                mini-batch is not affected.
        """
        if (self.chunks, self.checkpoint) != self._checked:  # Both may be set.
            check_checkpoint(self.checkpoint)
            self._checked = check_chunks(self.chunks), self.checkpoint
        self._check_layers()
        if not self.partitions:
            if len(args) != 1 or kwargs:
                raise TypeError(
                    "a pipeline without layers returns its one input, but is given "
                    f"{len(args)} by place and {len(kwargs)} by keyword: pipe(input)"
                )
            # Nothing is cut, so tensors may have no dimension; without a tensor there is an error.
            has_tensors = any(True for _ in tensors_in(args[0]))
            return unwrap_no_chunk(args[0]) if has_tensors else scatter(args[0], 1)
        chunks, checkpoint = self._checked
        micro_batches = scatter_each(Arguments(args, kwargs), chunks, stacklevel=5)  # Past torch's two of a call.
        checkpointed = {"always": len(micro_batches), "except_last": len(micro_batches) - 1, "never": 0}
        for part in self.modules():
            if isinstance(part, DeferredBatchNorm):
                part.begin_mini_batch(len(micro_batches))
        return gather(self.pipeline.run(micro_batches, checkpointed[checkpoint] if self.training else 0))

    def _check_layers(self) -> None:
        """Refuses a layer that was replaced under its name or in its partition, and not in both."""
        for part in self.partitions:
            for name, layer in part._modules.items():
                now = self._modules.get(name)
                if now is not layer:
                    raise RuntimeError(
                        f"layer {name!r} of the pipeline is a {type(now).__name__} by its name, and another one, a "
                        f"{type(layer).__name__}, in its partition: it was replaced in one of these places after the "
                        "pipeline was made. Replace layers before Pipe(module, balance), or inside of a layer"
                    )

    def __len__(self) -> int:
        return sum(self.balance)

    def __iter__(self) -> Iterator[nn.Module]:
        return (layer for _, layer in self._layers())

    def _layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the layers by name, without modules that were added to the pipeline."""
        for part in self.partitions:
            yield from part.named_children()

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> nn.Sequential: ...

    def __getitem__(self, index: int | slice) -> nn.Module:
        """Returns a layer by its number, or some of them as a sequence of their own."""
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self._layers())[index]))
        return list(self)[index]

    def train(self, mode: bool = True) -> Pipe:
        """Sets the mode of all layers, and of the partitions that hold them."""
        for part in self.partitions:
            part.training = mode
        return super().train(mode)

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Casts parameters and buffers: `pipe.to(dtype)`. They stay on their devices.

        Raises:
            TypeError: A device is given, or a tensor, which has a device.
        """
        device = kwargs.get("device", kwargs.get("tensor"))
        if device is not None or any(isinstance(arg, torch.device | str | int | torch.Tensor) for arg in args):
            self._refuse_move()
        return super().to(*args, **kwargs)

    def _refuse_move(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises TypeError: each partition stays on its device."""
        raise TypeError(
            "denied to move parameters and buffers, because Pipe should manage device placement: give it devices when "
            "you make it, Pipe(module, balance, devices=[...])"
        )

    cpu = cuda = xpu = to_empty = _refuse_move

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        strip_partition_keys(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
