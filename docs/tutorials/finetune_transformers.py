"""A Llama of transformers, fine-tuned with tensor parallelism and FSDP, and exported.

    torchrun --nproc-per-node 2 docs/tutorials/finetune_transformers.py

It runs on 1, 2, 4 or 8 ranks: two ranks divide each layer, the others shard what is
left. `--base` is a folder as `save_pretrained` writes it. Where there is none, a small
Llama with random weights is written there first, so that nothing is downloaded.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from scale_core import ParallelDims, clip_grad_norm_, group_of
from scale_core.launch import init_distributed
from scale_fsdp import ShardOptions, fully_shard_modules, no_split_policy
from scale_snapshot import load_pretrained, save_pretrained
from scale_tp import destroy_model_parallel, parallelize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, LENGTH, VOCABULARY = 16, 24, 32


def write_base(folder: Path) -> None:
    """Writes a small Llama with random weights; yours comes from the hub instead."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def batch_of(seed: int, part: int, num_parts: int) -> Tensor:
    """Returns tokens [16 / num_parts, 24]: a random start, then steps of one size.

    Each row counts by its own stride, modulo the vocabulary. From the third token on
    the next one can be known, so a model that has understood reaches a loss near 0.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH)) % VOCABULARY
    return tokens.chunk(num_parts)[part].to(DEVICE)


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains, and returns the loss of each step and at last that of the export."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--base", type=Path, default=Path("llama-base"))
    parser.add_argument("--out", type=Path, default=Path("llama-tuned"))
    options = parser.parse_args(arguments)
    init_distributed()
    world = group_of()
    if world.rank == 0 and not options.base.exists():
        write_base(options.base)
    if world.size > 1:
        torch.distributed.barrier()  # until the folder is there

    # 1. The model, without memory: no rank ever has all of it.
    config = AutoConfig.from_pretrained(options.base)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.use_cache = False

    # 2. Layers are divided along one axis, by the plan that the model carries;
    #    what is left of them is sharded along the other axis, block by block.
    tensor = 2 if world.size % 2 == 0 else 1
    dims = ParallelDims(tp=tensor)  # data parallel: the other ranks
    data = group_of(dims, "batch")
    if world.size > 1:
        parallelize(model, process_group=dims)
    policy = no_split_policy(model)  # the blocks that transformers names
    fully_shard_modules(model, policy, mesh=dims, options=ShardOptions(init=False))

    # 3. Each rank reads its own part of the weights. The optimizer comes afterwards.
    load_pretrained(model, options.base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    if world.rank == 0:
        print(f"data x tensor = {(data.size, tensor)}")

    # 4. A plain loop. Ranks that divide layers have the same tokens.
    losses = []
    for step in range(options.steps):
        tokens = batch_of(step, data.rank, data.size)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0)  # over both axes
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if world.size > 1:
            torch.distributed.all_reduce(loss)
        losses.append(float(loss) / world.size)
        if world.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {losses[-1]:.3f}")

    # 5. The export, in transformers' own format: all ranks write their parts.
    save_pretrained(model, options.out)
    plain = AutoModelForCausalLM.from_pretrained(options.out).to(DEVICE)
    with torch.no_grad():
        tokens = batch_of(1_000_000, 0, 1)
        exported = float(plain(input_ids=tokens, labels=tokens).loss)
        correct = plain(input_ids=tokens).logits[:, 2:-1].argmax(-1) == tokens[:, 3:]
    if world.rank == 0:
        share = float(correct.float().mean())
        print(f"{options.out}: loss {exported:.3f}, {share:.0%} of next tokens right")
    destroy_model_parallel()
    return [*losses, exported]


if __name__ == "__main__":
    main(sys.argv[1:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
