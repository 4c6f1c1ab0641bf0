"""What a model's blocks cost in each way, measured once on the machine that will train it.

Nothing here needs the memory that a plan is to save. One step is followed with every block computed again: that says
where memory stands at every segment by all that no plan changes. Then the model runs forward without gradients, and
each block, when its turn comes, is tried by itself in every way on the inputs that it gets there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scale_checkpoint.live_memory import storage_bytes
from scale_checkpoint.offload.offload import fetched_early
from scale_checkpoint.planner.block_benchmark import Call, Trial, try_memory, try_time
from scale_checkpoint.planner.blocks import find_blocks
from scale_checkpoint.planner.cost_model import Tried, assemble, pooled
from scale_checkpoint.planner.model_signature import BlockShape, left_out, shape_of
from scale_checkpoint.planner.step import Step, device_of, least_seconds, steady, undisturbed
from scale_checkpoint.planner.strategies import KEEP, OFFLOAD, RECOMPUTE, Ways, resolve, treated
from scale_checkpoint.planner.timeline import Crossing, Segment, Way
from scale_checkpoint.planner.trace import StepTrace, Visit, following
from scale_checkpoint.tree import tensors_in

FORMAT = 2


@dataclass(frozen=True)
class MemoryProfile:
    """Costs of the segments of a step, from which plans for any budget are made.

    Attributes:
        segments: In the order of the forward; bytes count all that lives, parameters, buffers and inputs included.
        crossings: Tensors between the segments.
        blocks: What the blocks are, by name.
        hows: What each way does, by its name, as `apply_checkpointing` takes it.
        device: The device that it was measured on, such as "cuda".
        left_out: Modules of the same classes that are no blocks: of these names the model may have more.
    """

    segments: tuple[Segment, ...]
    crossings: tuple[Crossing, ...]
    blocks: Mapping[str, BlockShape]
    hows: Mapping[str, str | tuple[str, ...]]
    device: str
    left_out: tuple[str, ...] = ()

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the profile as JSON.

        Args:
            path: A file, replaced if it is there.

        Raises:
            OSError: It cannot be written.
        """
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> MemoryProfile:
        """Reads a profile that `save` has written.

        Args:
            path: The file.

        Raises:
            ValueError: It is no profile, or one of another format.
            OSError: It cannot be read.
        """
        return cls.from_json(read_json(path, "a memory profile"), path)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], path: object) -> MemoryProfile:
        """Builds a profile from what JSON holds.

        Args:
            content: Of the file.
            path: For the error.

        Raises:
            ValueError: It is no profile, or one of another format.
        """
        try:
            segments = tuple(
                replace(Segment(**segment), ways={name: _way(**way) for name, way in segment["ways"].items()})
                for segment in content["segments"]
            )
            crossings = tuple(Crossing(**crossing) for crossing in content["crossings"])
            blocks = {
                name: BlockShape(block["kind"], {key: tuple(shape) for key, shape in block["parameters"].items()})
                for name, block in content["blocks"].items()
            }
            hows = {name: how if isinstance(how, str) else tuple(how) for name, how in content["hows"].items()}
            profile = cls(segments, crossings, blocks, hows, content["device"], tuple(content["left_out"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no memory profile: {type(error).__name__}: {error}") from error
        _check_whole(profile, path)
        return profile


def read_json(path: str | PathLike[str], what: str) -> dict[str, Any]:
    """Reads a JSON file of our format.

    Args:
        path: The file.
        what: What it is expected to hold, for the error.

    Raises:
        ValueError: It is not JSON, or of another format.
        OSError: It cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} was expected to hold {what} as JSON, but is not JSON: {error}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} was expected to hold {what} of format {FORMAT}, but its format is {found}")
    return dict(content)


def profile_memory(
    model: nn.Module,
    sample_input: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    ways: Ways | None = None,
    blocks: Sequence[str] | None = None,
    repeats: int = 5,
) -> MemoryProfile:
    """Measures what each block keeps, needs and takes in each way.

    The model's gradients, buffers and random numbers are afterwards what they were. Needs about the memory of a step
    in which every block is computed again.

    Args:
        model: In the state in which it will train: its device, its dtype, `train()`; before it is sharded or wrapped.
        sample_input: A batch as in training: a tensor, a tuple of positional or a dict of keyword arguments.
        loss: Makes a scalar of what the model returns; None takes the output's `loss`, a scalar output as it is, or
            else gives every result a gradient of ones.
        ways: What may be done with each block: see `Ways`; None takes "keep", "recompute", "selective" and, where the
            device is not the host itself, "offload".
        blocks: Names of modules that are to be planned; None finds them.
        repeats: How often each time is taken at least; the least counts, which other work disturbs least. Of blocks
            that are alike, in shapes and in memory, the first alone is timed so often.

    Raises:
        ValueError: `repeats` is less than 1, no blocks are found, a name is none of the model's, or the step has no
            gradient.
    """
    if repeats < 1:
        raise ValueError(f"repeats: each time is taken at least once, but repeats={repeats} was given")
    found = find_blocks(model, blocks)
    device = device_of(model)
    hows = resolve(ways, device)
    step = Step(model, sample_input, loss)
    with undisturbed(model), steady(device):
        trace = _follow(step, found, device)
        seconds = _seconds_of(step, found, device, repeats)
        tried = pooled(_try_blocks(step, found, trace.visits, _Trying(device, hows, repeats)))
        # Once more: so that what disturbed the machine for a while does not stand between the step and its blocks.
        seconds = min(seconds, _seconds_of(step, found, device, repeats))
    standing_bytes = storage_bytes([*model.parameters(), *model.buffers(), *tensors_in((step.args, step.kwargs))])
    segments, crossings = assemble(trace, tried, standing_bytes, seconds)
    shapes = {name: shape_of(block) for name, block in found.items()}
    return MemoryProfile(segments, crossings, shapes, hows, device.type, left_out(model, found))


def _follow(step: Step, blocks: Mapping[str, nn.Module], device: torch.device) -> StepTrace:
    """Follows a step in which every block is computed again."""
    trace = StepTrace(device)
    with _recomputed(blocks):
        step.run()  # Kernels prepare themselves at the first call.
        step.forget()
        with following(trace, blocks):
            step.run()
    step.forget()
    return trace


def _seconds_of(step: Step, blocks: Mapping[str, nn.Module], device: torch.device, repeats: int) -> float:
    """Takes the time of the same step."""
    with _recomputed(blocks):
        seconds = least_seconds({"step": lambda: step.seconds(device)}, repeats)["step"]
    step.forget()
    return seconds


@contextmanager
def _recomputed(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for block in blocks.values():
            stack.enter_context(treated(block, RECOMPUTE))
        yield


class _Trying:
    """Tries blocks in every way.

    Args:
        device: Where the model is.
        hows: What each way does.
        repeats: How often the first of several equal blocks is timed.
    """

    def __init__(self, device: torch.device, hows: Mapping[str, str | tuple[str, ...]], repeats: int) -> None:
        self._device, self._hows, self._repeats = device, hows, repeats
        self._timed: set[tuple[str, tuple[Trial, ...]]] = set()

    def tried(self, block: nn.Module, call: Call) -> dict[str, Tried]:
        """Returns what a block takes, by way."""
        device, trials = self._device, dict[str, Trial]()
        for name, how in self._hows.items():
            with treated(block, how):
                trials[name] = try_memory(block, call, device)
        kind = repr(shape_of(block)), tuple(trials.values())
        seconds = least_seconds(
            {name: partial(self._seconds, block, call, how) for name, how in self._hows.items()},
            1 if kind in self._timed else self._repeats,
        )
        self._timed.add(kind)
        early_bytes = fetched_early(trials[KEEP].saved_bytes, device)
        return {
            name: Tried(trials[name], seconds[name], early_bytes if how == OFFLOAD else 0)
            for name, how in self._hows.items()
        }

    def _seconds(self, block: nn.Module, call: Call, how: str | tuple[str, ...]) -> float:
        with treated(block, how):
            return try_time(block, call, self._device)


def _try_blocks(
    step: Step, blocks: Mapping[str, nn.Module], visits: Sequence[Visit], trying: _Trying
) -> list[dict[str, Tried]]:
    """Tries the block of each visit in every way; returns what was found by way, in the order of the visits."""
    waiting = [visit for visit in visits if visit.name]
    found: list[dict[str, Tried]] = []
    is_trying = False

    def try_here(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal is_trying
        if is_trying:
            return
        is_trying = True
        visit = waiting[len(found)]
        try:
            found.append(trying.tried(block, Call(args, kwargs, visit.wants_gradient)) if visit.gives_gradient else {})
        except RuntimeError as error:
            error.add_note(
                f"This happened while the block '{visit.name}' was tried by itself. It runs several times on what the "
                "model has given it, so it must not change that, as it changes a cache: write "
                "model.config.use_cache = False for models of transformers, or use_cache=False in the call, as for T5."
            )
            raise
        is_trying = False

    with ExitStack() as stack:
        for block in blocks.values():
            stack.callback(block.register_forward_pre_hook(try_here, with_kwargs=True, prepend=True).remove)
        with torch.no_grad():
            step.model(*step.args, **step.kwargs)
    return found


def _check_whole(profile: MemoryProfile, path: object) -> None:
    """Checks that what a file says of segments, blocks and crossings belongs together: it may have been cut."""
    told = f"{path} holds no whole memory profile"
    for segment in profile.segments:
        if segment.is_block and segment.name not in profile.blocks:
            raise ValueError(f"{told}: its segments visit the block {segment.name!r}, which its blocks do not have")
        for number in (number for way in segment.ways.values() for number in way.holds):
            if not 0 <= number < len(profile.crossings):
                raise ValueError(f"{told}: {segment.name!r} holds crossing {number} of {len(profile.crossings)}")
    for number, crossing in enumerate(profile.crossings):
        if not 0 <= crossing.born <= crossing.last < len(profile.segments):
            raise ValueError(
                f"{told}: crossing {number} passes from segment {crossing.born} to {crossing.last} of "
                f"{len(profile.segments)}"
            )


def _way(holds: Sequence[int] = (), **numbers: Any) -> Way:
    for name, number in numbers.items():
        if not isinstance(number, int | float):
            raise TypeError(f"'{name}' is a number, but is {number!r}")
    return Way(**numbers, holds=tuple(holds))
