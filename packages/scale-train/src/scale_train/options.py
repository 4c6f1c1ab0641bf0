"""Options of a training as frozen dataclasses, from which the command line is made; `resolve` checks them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class DataOptions:
    """The text, and the size of a step.

    Examples:
        >>> from scale_train import DataOptions
        >>> DataOptions(sequence=64, batch=8).held_out_tokens
        65536

    See also: [the guide to the training program](../guides/scale-train.md).
    """

    text: tuple[Path, ...] = ()
    """Files or folders to learn from. A file is text, or JSON lines (.jsonl) with a document per line. Folders named
    test or tests are skipped. By default it reads the source code of Python's standard library."""
    text_field: str = "text"
    """Field with the text in each object of a JSON-lines file."""
    tokenizer: str | None = None
    """byte, or a tokenizer.json (or its folder) for the library tokenizers. By default the tokenizer in the folder of
    --model, or byte."""
    token_cache: Path | None = None
    """Folder that keeps tokens for the next run; by default in the user's cache. Bytes are not kept."""
    sequence: int = 128
    """Tokens in a sequence."""
    batch: int = 32
    """Sequences in a step, over all ranks."""
    held_out_tokens: int = 65_536
    """Number of held-out tokens that one evaluation reads at most (0: all)."""


@dataclass(frozen=True)
class ModelOptions:
    """A GPT by name, with numbers that you may change, or a model of transformers.

    Examples:
        >>> from scale_train import ModelOptions
        >>> ModelOptions(size="gpt3-125m", layers=4).layers
        4

    See also: [the guide to the training program](../guides/scale-train.md).
    """

    size: str = "tiny"
    """tiny, small, gpt3-125m, gpt3-350m, gpt3-760m, gpt3-1.3b, gpt3-2.7b, gpt3-6.7b, gpt3-13b or gpt3-175b."""
    layers: int | None = None
    """Number of blocks, if it is not that size's."""
    width: int | None = None
    """Number of features, if it is not that size's."""
    heads: int | None = None
    """Number of attention heads, if it is not that size's."""
    untied_embeddings: bool = False
    """Give the output layer a separate weight; otherwise it shares the embedding's."""
    dropout: float = 0.0
    """Probability to drop an element of a residual branch in training."""
    loss_chunk: int = 0
    """Number of tokens whose logits exist at one time (0: all). Saves memory with a large vocabulary."""
    experts: int = 0
    """Number of experts per block (0: dense). Each is as wide as the feed-forward layer that they replace."""
    top_k: int = 2
    """With --experts: number of experts that each token goes to."""
    shared_experts: int = 0
    """With --experts: number of experts for all tokens. They are one layer of that multiple of the width."""
    capacity_factor: float = 0.0
    """With --experts: limit of an expert's tokens, as a multiple of its even share. 0 means no limit. In training,
    further tokens of a micro-batch of all ranks are dropped."""
    aux_loss_coef: float = 0.01
    """With --experts: factor of the load balancing loss. It adds to the gradients, but not to the reported loss."""
    model: Path | None = None
    """Instead of --size: a causal language model of transformers, by its config.json or its folder. Weights in the
    folder are loaded."""


@dataclass(frozen=True)
class ParallelOptions:
    """How ranks divide the work.

    Examples:
        >>> from scale_train import ParallelOptions
        >>> ParallelOptions(ranks=2, parallel="fsdp", precision="bf16").accumulate
        1

    See also: [the guide to the training program](../guides/scale-train.md).
    """

    ranks: int | None = None
    """Number of local ranks to start. By default one per GPU, or two on a CPU of several cores. Not under torchrun."""
    parallel: Literal["fsdp", "sharded-ddp", "oss", "ddp", "pipe", "none"] = "fsdp"
    """How ranks share the training. fsdp shards parameters, gradients and optimizer state; sharded-ddp shards gradients
    and state; oss shards only the state; ddp replicates all; pipe puts some blocks on each rank; none is one plain
    process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda if there is a GPU, otherwise cpu."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of the computation; the optimizer always works in fp32. With fp16 the loss is scaled, and a step is skipped
    if its gradients are not finite."""
    accumulate: int = 1
    """Number of micro-batches of each rank in a step."""
    sync_each_micro_batch: bool = True
    """With --accumulate, and fsdp or sharded-ddp: reduce gradients after each micro-batch. false reduces only after the
    last one, which sends fewer bytes but needs more memory."""
    checkpoint_activations: str = field(
        default="none", metadata={"bare": "all", "placeholder": "[all|selective|budget:SIZE|none]"}
    )
    """Recompute activations of blocks in the backward pass. all (also without a word) recomputes all of them; selective
    keeps results of linear layers and attention; budget:2GiB plans what fits that memory of a device."""
    offload_activations: bool = False
    """Move activations of blocks to host memory until the backward pass."""
    tensor_parallel: int = 1
    """Number of ranks that divide the layers of each block. --parallel applies between these groups. With fsdp or pipe,
    each rank builds the full model first."""
    sequence_parallel: bool = False
    """With --tensor-parallel: also divide the sequence between the layers, which saves memory."""
    overlap_pieces: int | None = None
    """With --tensor-parallel: number of pieces in which layers send during their matrix products. This is made for
    GPUs; on CPUs it gains little, because the same cores compute and send."""
    context_parallel: int = 1
    """Number of ranks that divide each sequence, if its activations do not fit on one. --parallel averages over all
    ranks."""
    context_attention: Literal["ring", "ulysses"] = "ring"
    """With --context-parallel: ring passes keys and values around, ulysses exchanges sequence parts for heads."""
    expert_parallel: int = 1
    """With --experts: number of ranks that divide the experts of each block. Ranks with the same experts shard or
    average them, as --parallel says. With pipe these ranks hold the same stage, in parallel pipelines."""
    stages: int | None = None
    """With pipe: number of stages; by default the schedule's number for all ranks. If there are more ranks than these
    stages need, several pipelines run in parallel, each on its part of the batch."""
    # fmt: off
    schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "looped_breadth_first",
        "zb_h1", "zb_v", "v_half", "v_min", "dual_pipe_v", "solve",
    ] = "1f1b"
    # fmt: on
    """With pipe: the order of forwards and backwards. solve measures a step and finds a schedule for it; the others are
    gpipe, 1f1b, interleaved_1f1b, looped_breadth_first, zb_h1, zb_v, v_half, v_min and dual_pipe_v."""
    chunks: int = 8
    """With pipe: number of micro-batches."""
    data_parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several pipelines: ddp replicates each stage; fsdp shards its parameters, gradients and optimizer state."""
    reshard_after_forward: bool = True
    """With fsdp: free the parameters of a block between forward and backward. false keeps them, which sends fewer bytes
    but needs more memory."""
    cpu_offload: bool = False
    """With fsdp: keep shards, gradients and optimizer state in host memory. The optimizer steps there."""


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW, and its schedule.

    Examples:
        >>> from scale_train import OptimizerOptions
        >>> OptimizerOptions(steps=100, lr=1e-3).warmup
        20

    See also: [the guide to the training program](../guides/scale-train.md).
    """

    steps: int = 400
    """Number of steps of the full run, including steps before a resume."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup: int = 20
    """Steps until the peak. Then half a cosine goes down to a tenth of it."""
    weight_decay: float = 0.1
    """Weight decay of matrices. Norms and biases have none."""
    clip: float = 1.0
    """Largest norm of the gradient (0: no clipping)."""
    optimizer_kernel: Literal["fused", "foreach", "plain"] = "fused"
    """Implementation of torch's AdamW. fused is by far the fastest. It equals plain, which updates one parameter at a
    time, within about 2 units in the last place."""
    adascale: bool = False
    """Treat --lr, --warmup and --steps as tuned for a small batch. Then it runs fewer, larger steps. The small batch is
    a micro-batch of one rank, or with pipe of one pipeline."""
    adascale_scale: float = 0.0
    """With --adascale: --batch divided by the small batch. 0 is ranks times --accumulate, or with pipe, pipelines times
    --chunks."""


@dataclass(frozen=True)
class RunOptions:
    """Checkpoints, evaluation and logging.

    Examples:
        >>> from scale_train import RunOptions
        >>> RunOptions(save_every=50, log_format="json").seed
        0

    See also: [the guide to the training program](../guides/scale-train.md).
    """

    seed: int = 0
    """Seed of initial weights, data order and dropout."""
    out: Path | None = None
    """New folder for checkpoints, metrics.jsonl and loss.png; by default scale-runs/lm-N, or the folder of --resume."""
    resume: Path | None = None
    """Continue from this run's folder, or from one of its checkpoints."""
    save_every: int = 100
    """Steps between checkpoints (0: only at the end)."""
    async_save: bool = False
    """Write checkpoints in the background. This needs memory for a copy of the state. The run waits for its last
    checkpoint, and for the one after an interruption."""
    evaluate_every: int = 100
    """Steps between evaluations (0: only at the end)."""
    log_every: int = 10
    """Steps between printed lines, and between entries of metrics.jsonl."""
    log_format: Literal["auto", "rich", "plain", "json"] = "auto"
    """rich is a progress bar, json is one object per line. auto is rich on a terminal, otherwise plain."""
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also log to these, if they are installed. TensorBoard writes into the run's folder; Weights & Biases takes its
    own settings (WANDB_PROJECT, WANDB_MODE)."""
    peak_flops: float | None = None
    """Peak operations per second of one device, for the logged utilization (MFU). By default known for common GPUs, in
    bf16 and fp16."""
    export: Path | None = None
    """With --model: new folder for the trained model, in the format of transformers' from_pretrained."""
    prompt: str = ""
    """Text that the sample at the end continues; by default the start of a file."""
    sample_length: int = 300
    """Number of tokens of that sample (0: none)."""


@dataclass(frozen=True)
class Options:
    """Train a language model on text, and report how well it predicts text that it has not seen.

    Examples:
        >>> from scale_train import Options, OptimizerOptions, ParallelOptions
        >>> options = Options(parallel=ParallelOptions(ranks=2), optimizer=OptimizerOptions(steps=100))
        >>> options.parallel.parallel, options.data.batch
        ('fsdp', 32)

    See also: [the guide to the training program](../guides/scale-train.md).
    """

    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    run: RunOptions = field(default_factory=RunOptions)
