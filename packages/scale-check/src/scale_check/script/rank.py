"""What runs in each process of `scale-check run`: the script, with the hooks that record it."""

from __future__ import annotations

import os
import random
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from scale_check.noise import CastRecorder, full_precision, perturb
from scale_check.recording import Key, Recorder, Recording
from scale_check.script import pickles
from scale_check.script.data import OutOfSamples, Samples, keeping, replaying

SEED = 0
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # Each has dropout between its layers.


class EnoughSteps(BaseException):
    """The steps that are compared are done; not an Exception, which a script may catch."""


@dataclass(frozen=True)
class ScriptTask:
    """What a process is to do.

    Attributes:
        arguments: The script and its arguments, as `sys.argv` has them.
        is_module: Whether the script is the name of a module, as after `python -m`.
        steps: How many steps of the optimizer are recorded; then the script is ended.
        samples: What the one process gets; None on ranks, which keep theirs.
        num_forwards: Of the model in the first step on each rank. A process that begins another one is ended there.
        perturbation: A seed by which the weights are changed in their last place; 0 for none.
        cast_eps: The smallest relative change of each weight.
        finds_casts: Whether to look for casts that lose precision.
        whole: The keys of large tensors that are kept as they are; of others only sums are kept.
        result: Where to write the `ScriptResult`.
    """

    arguments: tuple[str, ...]
    is_module: bool
    steps: int
    samples: Samples | None
    perturbation: int
    result: Path
    whole: frozenset[Key] = frozenset()
    num_forwards: int | None = None
    cast_eps: float = 0.0
    finds_casts: bool = False


@dataclass(frozen=True)
class ScriptResult:
    """What a process has recorded; `cast_eps` as in `CastRecorder`, if it was looked for."""

    recording: Recording
    samples: Samples
    cast_eps: float


class ScriptRecorder(Recorder):
    """Records a script, keeps or replaces the arguments of its model, and changes its weights for the noise."""

    def __init__(self, task: ScriptTask, samples: Samples) -> None:
        super().__init__(task.steps, _end, whole=task.whole)
        self._task, self._samples = task, samples
        self._perturbed: set[nn.Module] = set()
        self._num_calls = 0
        self._states_of_batch: tuple[Any, ...] | None = None  # Of random generators, when a loader gave its last batch

    def before_batch(self) -> None:
        """Called before a loader gives a batch."""
        self._states_of_batch = generator_states()

    def _before_module(self, module: nn.Module, args: Any) -> Any:
        is_outermost = self._depth == 0 and torch.is_grad_enabled()
        is_outermost = is_outermost and any(param.requires_grad for param in module.parameters())
        if is_outermost and self._task.perturbation and module not in self._perturbed:
            self._perturbed.add(module)
            perturb(module, self._task.perturbation, self._task.cast_eps)
        if is_outermost and self._states_of_batch is not None:
            self.recording.draws_of_loop |= self._states_of_batch != generator_states()
            self._states_of_batch = None
        is_model = is_outermost and self._models.get(module) == ""
        if is_model and self.step == 1 and self.recording.num_forwards.get(1) == self._task.num_forwards is not None:
            self._on_last()
        replaced = self._arguments(args) if is_outermost else None
        super()._before_module(module, args if replaced is None else replaced)
        return replaced

    def _arguments(self, args: Any) -> Any:
        """The joined arguments of all ranks, in the one process of a script without loaders; else None."""
        if self._task.samples is None:
            self._samples.of_model.append(args)
            return None
        samples = self._task.samples
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return samples.of_model[number] if not samples.of_loaders and number < len(samples.of_model) else None


def _end() -> NoReturn:
    raise EnoughSteps


@contextmanager
def without_dropout() -> Iterator[None]:
    """Switches dropout off: also in a right script each rank draws its own random numbers."""
    attention = functional.scaled_dot_product_attention
    originals = {name: getattr(functional, name) for name in _DROPOUTS}
    recurrent = {name: getattr(torch._VF, name) for name in _RECURRENT}

    def without(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            return original(input, 0.0, training, inplace)

        return dropout

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        return attention(*args, **{**kwargs, **({"dropout_p": 0.0} if "dropout_p" in kwargs else {})})

    def recurrent_without(original: Callable[..., Any]) -> Callable[..., Any]:
        def network(*args: Any) -> Any:
            # The probability is the one float, at a place that depends on whether the sequences are packed.
            return original(*(0.0 if type(arg) is float else arg for arg in args))

        return network

    functional.scaled_dot_product_attention = scaled_dot_product_attention
    for name, original in originals.items():
        setattr(functional, name, without(original))
    for name, network in recurrent.items():
        setattr(torch._VF, name, recurrent_without(network))
    try:
        yield
    finally:
        for name, network in recurrent.items():
            setattr(torch._VF, name, network)
        functional.scaled_dot_product_attention = attention
        for name, original in originals.items():
            setattr(functional, name, original)


@contextmanager
def exact_norms(before: Callable[[Sequence[Tensor]], object] = lambda tensors: None) -> Iterator[None]:
    """Has norms of float32 tensors summed in float64, and calls `before` with tensors whose norms are taken next.

    torch adds up their squares in float32, and the error grows with the number of elements: 2e-4 of the norm of 38M of
    them, and a third of that for each half. Ranks that have shards clip by another norm, and the difference is no
    rounding that changed weights would show.
    """
    vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm
    foreach_norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm

    def exact_vector_norm(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            before([x])
        if x.dtype is not torch.float32 or dtype is not None or "out" in kwargs:
            return vector_norm(x, *args, dtype=dtype, **kwargs)
        norm: Tensor = vector_norm(x, *args, dtype=torch.float64, **kwargs)
        return norm.to(x.dtype)

    def exact_foreach_norm(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Sequence[Tensor]:
        if not torch.compiler.is_compiling():
            before(tensors)
        if any(tensor.dtype is not torch.float32 for tensor in tensors) or len(args) > 1 or "dtype" in kwargs:
            return foreach_norm(tensors, *args, **kwargs)
        if any(isinstance(tensor, DTensor) for tensor in tensors):  # torch 2.15 takes no dtype for a list of them
            norms = [vector_norm(tensor, *args, **kwargs, dtype=torch.float64) for tensor in tensors]
            return [norm.to(torch.float32) for norm in norms]
        return [norm.to(torch.float32) for norm in foreach_norm(tensors, *args, **kwargs, dtype=torch.float64)]

    replaced = (
        (torch.linalg, "vector_norm", vector_norm, exact_vector_norm),
        (torch, "_foreach_norm", foreach_norm, exact_foreach_norm),
    )
    for module, name, _, exact in replaced:
        setattr(module, name, exact)
    try:
        yield
    finally:
        for module, name, original, _ in replaced:
            setattr(module, name, original)


def seed_everything(seed: int) -> None:
    """Seeds the generators of Python, torch, and numpy where it is loaded; a script may seed them again."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def generator_states() -> tuple[Any, ...]:
    """The states of the generators that `seed_everything` seeds."""
    states: tuple[Any, ...] = random.getstate(), bytes(torch.get_rng_state().tolist())
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, *_ = numpy.random.get_state()
        states += name, keys.tobytes(), position
    return states


def run_task(task: ScriptTask) -> int:
    """Runs the script and writes what it has computed; returns the exit code of the process."""
    samples = Samples()
    recorder = ScriptRecorder(task, samples)
    sys.argv = list(task.arguments)
    script = task.arguments[0]
    code = 0
    seed_everything(SEED)
    before_batch = recorder.before_batch
    loaders = keeping(samples, before_batch) if task.samples is None else replaying(task.samples, before_batch)
    exact = exact_norms(recorder.add_before_clipping)
    casts = CastRecorder()
    finding = casts if task.finds_casts else nullcontext()
    with recorder.hooks(), loaders, without_dropout(), full_precision(), exact, finding:
        try:
            if task.is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                sys.path[0:0] = [os.path.dirname(os.path.abspath(script))]
                runpy.run_path(script, run_name="__main__")
        except (EnoughSteps, OutOfSamples):
            pass
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code)
        except BaseException:
            traceback.print_exc()
            code = 1
    if not code:
        try:
            task.result.write_bytes(pickles.dumps(ScriptResult(recorder.recording, samples, casts.eps)))
        except Exception as error:  # Each class has its own.
            print(
                f"the samples can't be kept: {error}: give tensors, lists and dicts, and no class of the script itself"
            )
            code = 1
    return code
