"""The command line and the help text of `scale-train plan`; nothing here loads torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from scale_train.configuration.fields import fields_of, purpose_of
from scale_train.configuration.help import HELP, help_page

GROUPS: dict[str, tuple[str, ...]] = {
    "[model] Choose it by --size, --config or --factory.": (
        *("size", "layers", "width", "heads", "vocabulary", "loss_chunk"),
        *("experts", "top_k", "expert_parallel", "config", "factory"),
    ),
    "[machine] Ranks and memory.": ("ranks", "ranks_per_host", "device_memory", "host_memory", "margin"),
    "[step] Batch and precision, and the techniques to compare.": (
        *("batch", "sequence", "precision", "activations", "only"),
    ),
    "[time] Speed of the machine. The time of a step follows from these numbers only.": (
        *("tflops", "attention_tflops", "link", "host_link", "memory_bandwidth", "host_bandwidth"),
    ),
    "[output]": ("jobs", "picture", "json"),
}
"""The options as `plan --help` groups them, by title."""


@dataclass(frozen=True)
class PlanOptions:
    """Say which parallelism fits the memory of a machine, and what each costs.

    The real training step of one rank runs on tensors without memory. So nothing is allocated, and you need no GPU.
    """

    size: str = "gpt3-1.3b"
    """A GPT by name: tiny, small, gpt3-125m, gpt3-350m, gpt3-760m, gpt3-1.3b, gpt3-2.7b, gpt3-6.7b, gpt3-13b or
    gpt3-175b."""
    layers: int | None = None
    """Number of blocks, if it is not that size's."""
    width: int | None = None
    """Number of features, if it is not that size's."""
    heads: int | None = None
    """Number of attention heads, if it is not that size's."""
    vocabulary: int = 256
    """Vocabulary size of a GPT by name (256 for byte tokens)."""
    experts: int = 0
    """Number of experts per block of a GPT by name (0: dense)."""
    top_k: int = 2
    """Number of experts that each token goes to."""
    expert_parallel: int = 1
    """Ranks that divide the experts of a block. fsdp, fsdp-offload, tensor-parallel, context-parallel and pipe are
    planned with and without divided experts."""
    config: Path | None = None
    """Plan a model of transformers: its config.json, or its folder."""
    factory: str | None = None
    """Plan your own model: package.module:function. The function returns a model that is called with tokens and targets
    and returns its loss, or a tuple of a model and a function of model, tokens and targets."""
    ranks: tuple[int, ...] = (8,)
    """Number of devices on all machines. Several numbers, for example 2 4 8, are compared."""
    ranks_per_host: int | None = None
    """Number of devices of one machine, which share its host memory; by default all of them, at most 8."""
    device_memory: str = "80GB"
    """Memory of one device."""
    host_memory: str = "1000GB"
    """Memory of one machine."""
    batch: int = 8
    """Sequences in a step, over all ranks."""
    sequence: int = 2048
    """Tokens in a sequence."""
    loss_chunk: int = 0
    """Number of tokens whose logits exist at one time, of a GPT by name (0: all)."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Dtype of the computation. AdamW works in fp32. With fp16 the loss is scaled."""
    activations: tuple[Literal["keep", "selective", "all", "offload"], ...] = ("keep", "selective", "all", "offload")
    """Ways to treat activations, each planned: keep them; recompute all; recompute all except results of linear layers
    and attention (selective). With offload, what does not fit is planned again with activations on the host, if fsdp
    shards."""
    margin: float = 0.1
    """Share of the device's memory that tensors leave free, for its allocator and the transport."""
    tflops: float = 200.0
    """10^12 operations per second that a device reaches in matrix products."""
    attention_tflops: float | None = None
    """10^12 operations per second that a device reaches in attention. By default half of --tflops. Causal attention has
    half of the operations."""
    link: float = 100.0
    """GB per second that a rank sends to others, over the slowest link."""
    host_link: float = 25.0
    """GB per second between a device and its host, in one direction."""
    memory_bandwidth: float = 2000.0
    """GB per second of a device's memory."""
    host_bandwidth: float = 100.0
    """GB per second of a host's memory, which its ranks share."""
    only: tuple[str, ...] = ()
    """Plan only these: ddp, oss, sharded-ddp, fsdp, fsdp-offload, tensor-parallel, context-parallel, pipe."""
    jobs: int | None = None
    """Number of processes that estimate in parallel; by default one per core, at most 8."""
    picture: Path | None = None
    """Draw the peaks by kind into this file, .svg or .png."""
    json: bool = False
    """Print one JSON object."""


def plan_help_text(width: int | None = None) -> str:
    """Returns all options of `scale-train plan`, by groups."""
    fields = {field.name: field for field in fields_of(PlanOptions, "plan", sys.modules[__name__])}
    fields["json"] = replace(fields["json"], placeholder="", default=None)  # `plan` takes no word after a flag
    groups = {title: [fields[name] for name in names] for title, names in GROUPS.items()}
    return help_page("usage: scale-train plan [OPTIONS]", purpose_of(PlanOptions), (HELP,), groups, width)
