"""`Pipe`: a sequence of layers on several devices of one process, through which micro-batches flow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, overload

import torch
from torch import nn

from scale_pipe.checkpoint_mode import Checkpoint, check_checkpoint
from scale_pipe.gathering import gather
from scale_pipe.micro_batches import Arguments, check_chunks, scatter, scatter_each
from scale_pipe.models.deferred_batch_norm import DeferredBatchNorm, begin_mini_batch
from scale_pipe.models.partition import check_balance, check_sequential, partition
from scale_pipe.models.skip_layout import verify_skippables
from scale_pipe.one_process.devices import devices_of
from scale_pipe.one_process.loading import plain_keys
from scale_pipe.one_process.pipeline import Pipeline


class Pipe(nn.Module):
    """Trains a sequence of layers on several devices of one process: while one computes, the others do as well.

        >>> import torch
        >>> from scale_pipe import Pipe
        >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> pipe = Pipe(layers, balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
        >>> pipe(torch.randn(8, 4)).shape
        torch.Size([8, 2])
        >>> [name for name, _ in pipe.named_parameters()]
        ['0.weight', '0.bias', '2.weight', '2.bias']

    A mini-batch is cut into micro-batches, which go through the partitions one after the other as GPipe has it. Outputs
    and gradients are those of the layers called with each micro-batch. Parameters keep the names of the sequence,
    whatever the balance; `partitions` can be walked, and belongs to no name.

    Args:
        module: The layers, each of them once. They are moved to their devices; each calls the next with its output.
        balance: How many layers each partition has.
        devices: A list with the device of each partition; one may stand several times. None is all accelerators, or
            the CPU where there is none.
        chunks: Micro-batches in a mini-batch; fewer where it has fewer samples.
        checkpoint: Which micro-batches keep the partitions' inputs alone: "always", "except_last" (the last one goes
            back at once, so nothing would be gained), or "never". None of them do in eval mode.
        deferred_batch_norm: Move the running statistics of batch norms once per mini-batch, not per micro-batch.

    Attributes:
        balance: As above.
        devices: One for each partition.
        chunks: As above; may be set.
        checkpoint: As above; may be set.
        partitions: An `nn.ModuleList` with an `nn.Sequential` for each device, of the very same layers.
        pipeline: What runs them.

    Raises:
        TypeError: The module is no `nn.Sequential`, or has a forward of its own; balance or devices is no list; `stash`
            and `pop` of its layers do not match.
        ValueError: The balance is missing, or does not fit; chunks or checkpoint is none of those above; a layer stands
            in it twice; the sequence itself has hooks; one tensor would have to be on two devices; there is no such
            device.
        IndexError: There are fewer devices than partitions.
    """

    balance: list[int]
    devices: list[torch.device]
    partitions: nn.ModuleList
    pipeline: Pipeline

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
        chunks = _checked(chunks, checkpoint)
        check_sequential(module)
        verify_skippables(module)
        numbers = None if balance is None else check_balance(balance, len(module))
        with _keeping_modes(module):
            cut = partition(module, numbers, devices_of(devices, numbers), move=False)
        if deferred_batch_norm:
            DeferredBatchNorm.convert_deferred_batch_norm(module, chunks)
        with _keeping_modes(module):
            cut = partition(module, numbers, cut.devices)
        self.chunks, self.checkpoint = chunks, checkpoint
        self.training = module.training
        # Past `add_module`, which refuses names that this class uses itself; partitions are no part of any name.
        self._modules.update(module.named_children())
        for part in cut.modules:
            part.training = module.training  # Of its own alone: a layer may be in another mode than the sequence.
        self.__dict__.update(
            balance=cut.balance,
            devices=cut.devices,
            partitions=nn.ModuleList(cut.modules),
            pipeline=Pipeline(cut.modules, cut.devices),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the output of a mini-batch.

        Args:
            args: Of the first layer: tensors [N, ...], nested in any way, which are cut; everything else, and tensors
                in a `NoChunk`, goes to each micro-batch. Tensors of different N are cut each by itself, in the same
                shares, with a warning. They may be on any device.
            kwargs: Of the first layer, in the same way.

        Returns:
            What the last layer returns, [N, ...], on the last device: tensors are concatenated, everything else has to
            be the same for each micro-batch.

        Raises:
            TypeError: There is no tensor to cut.
            ValueError: Tensors cannot be cut in the same shares; outputs cannot be put together.
            RuntimeError: A layer was replaced after the pipeline was made.
            Exception: What a layer has raised, with its own traceback, and a note on where that was. The next
                mini-batch is not affected.
        """
        chunks = _checked(self.chunks, self.checkpoint)
        self._check_layers()
        if not self.partitions:
            (input,) = scatter(_only_input(args, kwargs), 1)
            return input
        micro_batches = scatter_each(Arguments(args, kwargs), chunks, stacklevel=5)  # Past torch's two of a call.
        checkpointed = {"always": len(micro_batches), "except_last": len(micro_batches) - 1, "never": 0}
        begin_mini_batch(self, len(micro_batches))
        return gather(self.pipeline.run(micro_batches, checkpointed[self.checkpoint] if self.training else 0))

    def _check_layers(self) -> None:
        """Layers stand in this module under their names and in their partitions, and have to be the same in both."""
        for name, layer in self._layers():
            now = self._modules.get(name)
            if now is not layer:
                raise RuntimeError(
                    f"layer {name!r} of the pipeline is a {type(now).__name__} by its name, and another one, a "
                    f"{type(layer).__name__}, in its partition: it was replaced in one of these places after the "
                    "pipeline was made; replace layers before that, Pipe(module, balance), or inside of a layer"
                )

    def __len__(self) -> int:
        return sum(self.balance)

    def __iter__(self) -> Iterator[nn.Module]:
        return (layer for _, layer in self._layers())

    def _layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the layers by name; what was added to this module beside them is none."""
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
            TypeError: A device is given, or a tensor, which has one.
        """
        device = kwargs.get("device", kwargs.get("tensor"))
        if device is not None or any(isinstance(arg, torch.device | str | int | torch.Tensor) for arg in args):
            _deny("to")
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:
        """Is denied: each partition stays on its device."""
        _deny("cuda")

    def cpu(self) -> NoReturn:
        """Is denied: each partition stays on its device."""
        _deny("cpu")

    def xpu(self, device: Any = None) -> NoReturn:
        """Is denied: each partition stays on its device."""
        _deny("xpu")

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        """Is denied: each partition stays on its device."""
        _deny("to_empty")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        plain_keys(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@contextmanager
def _keeping_modes(module: nn.Module) -> Iterator[None]:
    """Layers that are in another mode than the sequence, as frozen norms are, stay in it."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _checked(chunks: Any, checkpoint: Any) -> int:
    check_checkpoint(checkpoint)
    return check_chunks(chunks)


def _only_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or kwargs:
        raise TypeError(
            "a pipeline without layers returns its one input, but is given "
            f"{len(args)} by place and {len(kwargs)} by keyword: pipe(input)"
        )
    return args[0]


def _deny(verb: str) -> NoReturn:
    raise TypeError(
        f"{verb}: denied to move parameters and buffers, because Pipe should manage device placement: give it devices "
        "when you make it, Pipe(module, balance, devices=[...])"
    )
