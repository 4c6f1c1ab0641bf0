"""Checks of options that need neither torch nor the number of ranks: all mistakes are reported at once.

Options that depend on the ranks are checked in `resolve.py`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

from scale_train.configuration.derived import budget_bytes, gpt_config
from scale_train.configuration.fields import option_fields
from scale_train.data.tokenizer import open_tokenizer, tokenizer_of
from scale_train.huggingface.config import number_in, read_config
from scale_train.options import ModelOptions, Options

LIMITS: dict[str, tuple[float, float]] = {
    "sequence": (1, 10**7),
    "batch": (1, 10**7),
    "held_out_tokens": (0, 10**12),
    "layers": (1, 10_000),
    "width": (1, 1_000_000),
    "heads": (1, 100_000),
    "loss_chunk": (0, 10**9),
    "ranks": (1, 10**6),
    "accumulate": (1, 10**6),
    "tensor_parallel": (1, 10**5),
    "overlap_pieces": (1, 1000),
    "context_parallel": (1, 10**5),
    "stages": (1, 10_000),
    "chunks": (1, 10**6),
    "steps": (1, 10**9),
    "warmup": (0, 10**9),
    "weight_decay": (0, 10**6),
    "clip": (0, 10**12),
    "adascale_scale": (0, 10**6),
    "seed": (0, 2**63 - 1),
    "save_every": (0, 10**9),
    "evaluate_every": (0, 10**9),
    "log_every": (1, 10**9),
    "sample_length": (0, 10**6),
    "peak_flops": (1, 10**18),
    "vocabulary": (1, 10**8),
    "experts": (0, 10**5),
    "top_k": (1, 10**5),
    "shared_experts": (0, 1000),
    "capacity_factor": (0, 10**6),
    "aux_loss_coef": (0, 10**6),
    "expert_parallel": (1, 10**5),
}
"""The least and the most of each number, of `lm` and of `plan`. Above it nothing can be meant, and memory would fill
before anything else is checked."""


EXPERT_NUMBERS = ("experts", "top_k", "shared_experts", "capacity_factor", "aux_loss_coef")
"""The options of the model that are for experts."""


def option_problems(options: Options) -> list[str]:
    """Returns the impossible options, one line for each problem."""
    problems = list(_number_problems(options))
    if not problems:  # A model of -1 layers was reported above.
        problems += [*_model_problems(options), *_mixture_problems(options)]
    return [*problems, *_activation_problems(options), *_optimizer_problems(options), *_logger_problems(options)]


def _logger_problems(options: Options) -> Iterator[str]:
    for name in dict.fromkeys(options.run.log_to):
        if importlib.util.find_spec(name) is None:
            yield f"--log-to {name}: {name} is not installed: pip install {name}"


def _number_problems(options: Options) -> Iterator[str]:
    for field in option_fields().values():
        value = getattr(getattr(options, field.table), field.name)
        if field.name not in LIMITS or value is None:
            continue
        if problem := number_problem(field.name, value):
            yield problem
    if not 0 < options.optimizer.lr < math.inf:
        yield f"--lr {options.optimizer.lr}: a number above 0 is needed"
    if not 0 <= options.model.dropout < 1:
        yield f"--dropout {options.model.dropout}: a number from 0 to below 1 is needed"


def number_problem(name: str, value: float) -> str:
    """Returns the mistake in a number that has limits; "" if there is none."""
    flag, (least, most) = f"--{name.replace('_', '-')}", LIMITS[name]
    if not value >= least or value == math.inf:
        return f"{flag} {value}: {'0 or more' if least == 0 else f'at least {least:g}'} is needed"
    return f"{flag} {value}: more than can be meant; at most {int(most)}" if value > most else ""


def _model_problems(options: Options) -> Iterator[str]:
    try:
        vocabulary = open_tokenizer(tokenizer_of(options)).vocabulary
        if options.model.model is None:
            gpt_config(options)
        else:
            yield from _transformers_problems(options, read_config(options.model.model), vocabulary)
    except ValueError as error:
        yield str(error)
    if options.run.export is not None and options.model.model is None:
        yield "--export: the GPT of --size is not a model of transformers; name one with --model"


def _transformers_problems(options: Options, config: dict[str, Any], vocabulary: int) -> Iterator[str]:
    """Options that do not go with a model of transformers."""
    model, parallel = options.model, options.parallel
    flag = f"--model {model.model}"
    for name in ("size", "layers", "width", "heads", "untied_embeddings", "dropout", "loss_chunk", *EXPERT_NUMBERS):
        if getattr(model, name) != getattr(ModelOptions(), name):
            yield f"--{name.replace('_', '-')} is for the GPT of --size, and {flag} names another model; leave one out"
    vocab_size = config.get("vocab_size")
    if isinstance(vocab_size, int) and vocab_size < vocabulary:
        yield f"{flag}: its vocabulary has {vocab_size} tokens, and the tokenizer has {vocabulary}"
    positions = number_in(config, "positions")
    if positions is not None and options.data.sequence > positions:
        yield f"--sequence {options.data.sequence}: {flag} has {positions} positions; take at most {positions}"
    if parallel.parallel == "pipe":
        yield f"--parallel pipe: {flag} is not divided into stages; take fsdp"
    if parallel.context_parallel > 1:
        yield f"--context-parallel {parallel.context_parallel}: {flag} sees full sequences; take 1"
    if parallel.sequence_parallel:
        yield f"--sequence-parallel: {flag} is divided by the plan that it carries; leave it out"
    if budget_bytes(parallel.checkpoint_activations) is not None:
        choice = parallel.checkpoint_activations
        yield f"--checkpoint-activations {choice}: {flag} is not planned; take all or selective"


def _mixture_problems(options: Options) -> Iterator[str]:
    """Options that do not go with experts, or not without them."""
    model, parallel = options.model, options.parallel
    ranks = f"--expert-parallel {parallel.expert_parallel}"
    if model.model is not None:
        if parallel.expert_parallel > 1:
            yield f"{ranks}: each rank has all experts of --model {model.model}; take 1"
        return
    changed = [name for name in EXPERT_NUMBERS if getattr(model, name) != getattr(ModelOptions, name)]
    changed += ["expert_parallel"] * (parallel.expert_parallel > 1)
    yield from expert_problems(model.experts, model.top_k, parallel.expert_parallel, changed)
    if not model.experts:
        return
    if parallel.sequence_parallel and parallel.tensor_parallel > 1:
        yield (
            f"--sequence-parallel: ranks that divide layers route the same tokens to --experts {model.experts}, and so "
            "have full sequences; leave it out"
        )
    if options.optimizer.adascale and parallel.expert_parallel > 1:
        if parallel.tensor_parallel > 1:
            yield (
                f"{ranks}: --adascale measures experts that are each on one rank, and --tensor-parallel "
                f"{parallel.tensor_parallel} divides each of them as well; take 1 for one of the two"
            )
        elif parallel.parallel == "pipe" and parallel.data_parallel == "ddp":
            yield (
                f"{ranks}: --adascale measures gradients that are averaged in the backward pass, and pipelines with "
                "--data-parallel ddp average after it what is beside experts; take --data-parallel fsdp"
            )


def expert_problems(experts: int, top_k: int, expert_parallel: int, given: list[str]) -> Iterator[str]:
    """Yields mistakes in numbers of experts, of `lm` and of `plan`; `given` are options that need some."""
    flag = f"--experts {experts}"
    if not experts and given:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        yield f"{flags}: for a model with experts; say how many, as --experts 8, or leave it out"
    if experts and top_k > experts:
        yield f"--top-k {top_k}: a token goes to at most all {experts} of {flag}"
    if experts and expert_parallel > experts:
        ranks = f"--expert-parallel {expert_parallel}"
        yield f"{ranks}: a rank would have none of the {experts} of {flag}; take at most {experts}"


def _activation_problems(options: Options) -> Iterator[str]:
    parallel = options.parallel
    choice = parallel.checkpoint_activations
    if choice in ("none", "all", "selective"):
        return
    if budget_bytes(choice) is None:
        yield f"--checkpoint-activations {choice}: take all, selective, or a budget, as budget:2GiB"
    elif parallel.parallel in ("fsdp", "pipe"):
        yield (
            f"--checkpoint-activations {choice}: a plan is measured on a full model, which "
            f"{parallel.parallel} has on no rank; take all or selective, or --parallel sharded-ddp"
        )
    elif parallel.offload_activations:
        yield f"--offload-activations: the plan of --checkpoint-activations {choice} says what is offloaded"


def _optimizer_problems(options: Options) -> Iterator[str]:
    scale, parallel = options.optimizer.adascale_scale, options.parallel
    if scale > 0 and not options.optimizer.adascale:
        yield f"--adascale-scale {scale:g} has no effect without --adascale"
    elif 0 < scale < 1:
        yield f"--adascale-scale {scale:g}: at least 1 is needed"
    if parallel.cpu_offload and parallel.parallel != "fsdp":
        yield f"--cpu-offload: --parallel {parallel.parallel} keeps its state on the device; take --parallel fsdp"
    if parallel.parallel == "pipe" and parallel.accumulate > 1:
        yield (
            f"--accumulate {parallel.accumulate}: with --parallel pipe it is --chunks that cuts the batch; take "
            f"--chunks {parallel.accumulate * parallel.chunks}"
        )
