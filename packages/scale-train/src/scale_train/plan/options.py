"""The command line of `scale-train plan`, as a frozen dataclass; nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class PlanOptions:
    """Say which way of training a model fits into the memory of a machine, and what each costs.

    One rank's real training step runs on tensors without memory: nothing is allocated, and no GPU is needed.
    """

    size: str = "gpt3-1.3b"
    """A model by name: tiny, small, gpt3-125m, -350m, -760m, -1.3b, -2.7b, -6.7b, -13b or -175b."""
    layers: int | None = None
    """Blocks, if not the size's."""
    width: int | None = None
    """Features, if not the size's."""
    heads: int | None = None
    """Attention heads, if not the size's."""
    vocabulary: int = 256
    """Different tokens of a model by name; scale-train lm has the 256 bytes."""
    experts: int = 0
    """Experts of a mixture in place of each feed-forward layer, of a model by name; 0 for none."""
    top_k: int = 2
    """How many experts a token goes to."""
    expert_parallel: int = 1
    """Ranks that divide the experts of a block: fsdp, tensor-parallel, context-parallel and pipe are planned with
    these as well, beside experts that are not divided."""
    config: Path | None = None
    """In place of --size: config.json of a model of transformers, or its folder."""
    factory: str | None = None
    """In place of --size: package.module:function, which returns a model or a tuple of a model and its loss: a function
    of model, batch and sequence. A model by itself is called with tokens and targets, and returns its loss."""
    ranks: tuple[int, ...] = (8,)
    """Devices, of all machines together; several numbers, as 2 4 8, are compared with each other."""
    ranks_per_host: int | None = None
    """Devices of one machine, which share the memory of its host; by default all of them, at most 8."""
    device_memory: str = "80GB"
    """Memory of one device."""
    host_memory: str = "1000GB"
    """Memory of one machine."""
    batch: int = 8
    """Sequences in a step, of all ranks together."""
    sequence: int = 2048
    """Tokens in a sequence."""
    loss_chunk: int = 0
    """Tokens whose logits exist at one time, of a model by name; 0 for all."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """What the model computes in; the optimizer, AdamW, works in fp32. With fp16 the loss is scaled."""
    activations: tuple[Literal["keep", "selective", "all", "offload"], ...] = ("keep", "selective", "all", "offload")
    """What is done with activations, each planned: kept, or recomputed, all or but for the results of linear layers and
    attention; offload moves them to the host beside these, with fsdp, where they do not fit without."""
    margin: float = 0.1
    """The part of the device's memory that has to stay free, for its allocator and the transport."""
    tflops: float = 200.0
    """For the time of a step: what a device reaches in matrix products, in 10^12 operations in a second."""
    link: float = 100.0
    """For the time of a step: GB in a second that a rank sends to others, the slowest link on the way."""
    host_link: float = 25.0
    """For the time of a step: GB in a second between a device and its host, in one direction."""
    memory_bandwidth: float = 2000.0
    """For the time of a step: GB in a second of a device's memory."""
    host_bandwidth: float = 100.0
    """For the time of a step: GB in a second of a host's memory, which its ranks share."""
    only: tuple[str, ...] = ()
    """Plan these alone, of: ddp, oss, sharded-ddp, fsdp, fsdp-offload, tensor-parallel, context-parallel, pipe."""
    jobs: int | None = None
    """Processes that estimate side by side; by default one for each core, at most 8."""
    picture: Path | None = None
    """Draw the peaks by kind into this file, .svg or .png."""
    json: bool = False
    """Print one JSON object."""
