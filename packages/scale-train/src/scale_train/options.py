"""Options of a training as frozen dataclasses, from which the command line is made; `resolve` checks them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class DataOptions:
    """What is read, and how much of it in a step."""

    text: tuple[Path, ...] = ()
    """Files or folders to learn from (folders in them named test or tests are skipped): text, or JSON lines (.jsonl),
    each a document; by default the sources of Python's own standard library."""
    text_field: str = "text"
    """Of each object of a JSON-lines file, the field with its text."""
    tokenizer: str | None = None
    """byte, or a tokenizer.json (or its folder), which the library tokenizers reads; by default the one in the folder
    of --model, or byte."""
    token_cache: Path | None = None
    """Folder where tokens are kept for the next run; by default in the user's cache. Bytes are not kept."""
    sequence: int = 128
    """Tokens in a sequence."""
    batch: int = 32
    """Sequences in a step, of all ranks together."""
    held_out_tokens: int = 65_536
    """Most tokens of the held-out text that one evaluation reads; 0 for all."""


@dataclass(frozen=True)
class ModelOptions:
    """The model: a GPT of a size by name, any number of it changed, or a model of transformers."""

    size: str = "tiny"
    """tiny, small, gpt3-125m, -350m, -760m, -1.3b, -2.7b, -6.7b, -13b or -175b."""
    layers: int | None = None
    """Blocks, if not the size's."""
    width: int | None = None
    """Features, if not the size's."""
    heads: int | None = None
    """Attention heads, if not the size's."""
    untied_embeddings: bool = False
    """Give the output layer a weight of its own; otherwise it uses the embedding's."""
    dropout: float = 0.0
    """Part of each residual branch that is zeroed in training."""
    loss_chunk: int = 0
    """Tokens whose logits exist at one time; 0 for all."""
    experts: int = 0
    """Experts in place of the feed-forward layer of each block, each as wide as that; 0 for none."""
    top_k: int = 2
    """With --experts: how many of them a token goes to."""
    shared_experts: int = 0
    """With --experts: further ones that all tokens go through, as one layer of so many times the width."""
    capacity_factor: float = 0.0
    """With --experts: in training each takes at most so many times its even share of the choices in a micro-batch of
    all ranks, and further ones are dropped; 0 for no limit."""
    aux_loss_coef: float = 0.01
    """With --experts: what the load balancing loss is multiplied by. It is added to the gradients, and not to the loss
    that is reported."""
    model: Path | None = None
    """In place of --size: config.json of a causal language model of transformers, or its folder, whose weights are
    loaded if it has some."""


@dataclass(frozen=True)
class ParallelOptions:
    """How the work is divided."""

    ranks: int | None = None
    """Local ranks to start; by default every GPU, or two ranks on a CPU of several cores. Not under torchrun."""
    parallel: Literal["fsdp", "sharded-ddp", "oss", "ddp", "pipe", "none"] = "fsdp"
    """fsdp shards parameters, gradients and optimizer state; sharded-ddp gradients and state; oss the state alone; ddp
    replicates all of it; pipe puts some of the blocks on each rank; none is one plain process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is a GPU."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What the model computes in; the optimizer always works in fp32. With fp16 the loss is scaled, and a step whose
    gradients are not finite is skipped."""
    accumulate: int = 1
    """Micro-batches that a rank's part of the batch is cut into."""
    sync_each_micro_batch: bool = True
    """With fsdp or sharded-ddp, and --accumulate: reduce gradients after each micro-batch. false keeps unsharded
    gradients until the last one: fewer bytes sent, more memory."""
    checkpoint_activations: str = field(
        default="none", metadata={"bare": "all", "placeholder": "[all|selective|budget:SIZE|none]"}
    )
    """Recompute blocks' activations in the backward pass instead of keeping them: all, or selective, which keeps the
    results of linear layers and attention, or budget:2GiB, which plans what fits into that much memory of a device.
    Without a word it means all."""
    offload_activations: bool = False
    """Move the activations that blocks keep to the memory of the host until the backward pass."""
    tensor_parallel: int = 1
    """Ranks that divide the layers of each block between them; --parallel says what the others do. With fsdp or pipe, a
    rank then makes the whole model before it is divided."""
    sequence_parallel: bool = False
    """With --tensor-parallel: between the divided layers each rank has a part of the sequence. Less memory."""
    overlap_pieces: int | None = None
    """With --tensor-parallel: send what divided layers exchange in so many pieces, beside their matrix products. It
    is made for links of their own, as between GPUs; where the cores that multiply also send, it gains little."""
    context_parallel: int = 1
    """Ranks that divide each sequence between them, where its activations are too large for one; --parallel says what
    the others do, and averages over all."""
    context_attention: Literal["ring", "ulysses"] = "ring"
    """With --context-parallel: ring passes keys and values round, ulysses exchanges the sequence for heads."""
    expert_parallel: int = 1
    """With --experts: ranks that divide the experts of each block between them; those that have the same ones shard or
    average them by --parallel. All else is on all ranks, as without experts. With pipe they have the same stage, in
    pipelines beside each other."""
    stages: int | None = None
    """pipe: parts that the model is cut into; by default what the schedule is made for, on all ranks. With more ranks
    than those take there are several pipelines beside each other, each with its part of the batch."""
    # fmt: off
    schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "looped_breadth_first",
        "zb_h1", "zb_v", "v_half", "v_min", "dual_pipe_v", "solve",
    ] = "1f1b"
    # fmt: on
    """pipe: gpipe, 1f1b, interleaved_1f1b, looped_breadth_first, zb_h1, zb_v, v_half, v_min, dual_pipe_v; or solve,
    which measures a step and finds one for it."""
    chunks: int = 8
    """pipe: micro-batches that the batch is cut into."""
    data_parallel: Literal["ddp", "fsdp"] = "ddp"
    """pipe: what pipelines beside each other do with the stage that they share. ddp replicates it; fsdp
    shards its parameters, gradients and optimizer state among them."""
    reshard_after_forward: bool = True
    """fsdp: release each block's parameters between its forward and its backward pass. false keeps them: fewer bytes
    sent, more memory."""
    cpu_offload: bool = False
    """fsdp: keep shards, gradients and optimizer state in the memory of the host, where the optimizer steps."""


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW and its learning rate."""

    steps: int = 400
    """Steps of the whole training, those before a resume included."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup: int = 20
    """Steps until the peak; half a cosine follows, down to a tenth."""
    weight_decay: float = 0.1
    """Of the matrices; norms and biases have none."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 for no clipping."""
    optimizer_kernel: Literal["fused", "foreach", "plain"] = "fused"
    """Which implementation of torch's AdamW. fused is much the fastest, and equal to plain, which updates one
    parameter at a time, to some 2 units in the last place."""
    adascale: bool = False
    """Take --lr, --warmup and --steps for those of a smaller batch, and as many useful steps of the whole one as these
    are worth. The smaller batch is a micro-batch of one rank, or with pipe of one pipeline."""
    adascale_scale: float = 0.0
    """With --adascale: how many times --batch is as large as the smaller batch; 0 is ranks times --accumulate,
    with pipe pipelines times --chunks."""


@dataclass(frozen=True)
class RunOptions:
    """What is kept and what is shown."""

    seed: int = 0
    """Of the initial weights, the order of the data, and dropout."""
    out: Path | None = None
    """New folder for checkpoints, metrics.jsonl and loss.png; by default scale-runs/lm-N, or that of --resume."""
    resume: Path | None = None
    """Folder of an earlier run, or one of its checkpoints, to go on from."""
    save_every: int = 100
    """Steps between checkpoints; 0 for one at the end only."""
    async_save: bool = False
    """Write checkpoints in the background while the training goes on; takes memory for a copy of the state. The last
    one, and the one of an interruption, are waited for."""
    evaluate_every: int = 100
    """Steps between evaluations; 0 for one at the end only."""
    log_every: int = 10
    """Steps between lines, and between entries of metrics.jsonl."""
    log_format: Literal["auto", "rich", "plain", "json"] = "auto"
    """rich is a progress bar, json is one object per line; auto is rich on a terminal and plain elsewhere."""
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Log to these too, where they are installed: TensorBoard into the run's folder, Weights & Biases by its own
    settings (WANDB_PROJECT, WANDB_MODE)."""
    peak_flops: float | None = None
    """Operations in a second that one device reaches at most, for the utilization (MFU) that is logged; by default that
    of known GPUs, in bf16 and fp16."""
    export: Path | None = None
    """With --model: new folder for the trained model at the end, as from_pretrained of transformers reads it."""
    prompt: str = ""
    """What the sample of text at the end continues; by default the start of a file."""
    sample_length: int = 300
    """Tokens of that sample; 0 for none."""


@dataclass(frozen=True)
class Options:
    """Train a language model on text, and report how well it predicts text that it has not seen."""

    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    run: RunOptions = field(default_factory=RunOptions)
