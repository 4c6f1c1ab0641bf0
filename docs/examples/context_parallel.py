"""A sequence divided between ranks: attention alone sees all of it, by scale-tp.

    torchrun --nproc-per-node 2 docs/examples/context_parallel.py

It prints the same losses on any number of ranks, up to rounding; `python docs/examples/context_parallel.py` runs it
on one.
"""

import torch
import torch.distributed as dist
from torch import nn

import scale_tp
from scale_core.launch import init_distributed
from scale_fsdp import fully_shard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 64  # of each sequence


class Decoder(nn.Module):
    """One block of causal attention between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(17, 32), nn.Embedding(LENGTH, 32)
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 17)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch, length, 17] for tokens [batch, length] at positions [length]."""
        x = self.tokens(tokens) + self.positions(positions)
        query, key, value = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: torch.Tensor = self.head(x + self.out(attended.transpose(1, 2).flatten(2)))
        return logits


def main() -> list[float]:
    """Trains for ten steps and returns the losses over all tokens."""
    group = init_distributed()
    if group.size > 1:
        scale_tp.initialize_model_parallel(1, context_parallel_size=group.size)
    torch.manual_seed(0)
    model = fully_shard(Decoder().to(DEVICE))  # gradients are averaged over the ranks that divide the sequences
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    losses = []
    for step in range(10):
        whole = torch.randint(17, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        # Shift first, then take this rank's part; all ranks read the same sequences.
        tokens, targets = (scale_tp.split_sequence(each) for each in (whole[:, :-1], whole[:, 1:]))
        with scale_tp.context_parallel():
            logits = model(tokens, scale_tp.position_ids(LENGTH, device=DEVICE))
            total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = total / scale_tp.num_tokens_per_rank(targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / group.size
        if group.size > 1:
            dist.all_reduce(loss)  # only to print the loss of the whole batch
        losses.append(float(loss))
        if group.rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
