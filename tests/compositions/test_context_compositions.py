"""Context parallelism beside the techniques that spread a model of transformers over the other ranks.

Four ranks are two replicas, sharded over all four, whose sequences two ranks divide each; or two ranks that divide
layers, times two that divide sequences. Three clipped steps equal one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from rank_values import by_rank
from torch import Tensor, nn
from trainings import add_weights, assert_parity, train

import scale_fsdp
import scale_tp
from scale_check.recording import Recording
from scale_checkpoint import apply_checkpointing
from scale_core import clip_grad_norm_
from scale_core.testing import preload
from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel
from scale_tp import megatron

transformers = pytest.importorskip("transformers")
preload("transformers.models.llama.modeling_llama")

WORDS, LENGTH, LR, CLIP = 19, 8, 0.5, 0.5


def llama() -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).double()


def batch_of(rows: slice) -> dict[str, Tensor]:
    """Rows of the global batch [4, LENGTH], of which some tokens do not count."""
    ids = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids[rows], "labels": labels[rows]}


def spread(kind: str, attention: Any) -> Recording:
    size = 2 if kind == "layers" else 1
    scale_tp.initialize_model_parallel(size, context_parallel_size=2)
    replicas = megatron.get_data_context_parallel_group()
    model = called = llama()
    if kind == "layers":
        scale_tp.parallelize(model)
    if kind == "sharded":
        for layer in model.model.layers:
            apply_checkpointing(layer, "recompute")
    if kind in ("layers", "sharded"):
        fully_shard(model, mesh=replicas)
        optimizer = torch.optim.SGD(model.parameters(), LR)
    else:
        optimizer = OSS(model.parameters(), torch.optim.SGD, process_group=replicas, lr=LR)
        called = ShardedDataParallel(model, optimizer, process_group=replicas)
    rank, number = megatron.get_data_parallel_rank(), megatron.get_data_parallel_world_size()
    part = scale_tp.get_batch_on_this_cp_rank(batch_of(slice(rank * 4 // number, (rank + 1) * 4 // number)))

    def loss_of(model: Any, step: int) -> Tensor:
        with scale_tp.context_parallel(attention=attention):
            loss: Tensor = called(**part).loss
            loss.backward()
        return loss.detach()

    trained = train(model, optimizer, loss_of, range(3), clip=partial(clip_grad_norm_, list(model.parameters()), CLIP))
    if isinstance(optimizer, OSS):
        optimizer.wait()
    full = {"sharded": scale_fsdp.full_state_dict, "layers": scale_tp.full_state_dict}.get(kind, nn.Module.state_dict)
    add_weights(trained, full(model))
    scale_tp.destroy_model_parallel()
    return trained


@pytest.mark.composition("context parallel", "scale-fsdp")
@pytest.mark.composition("context parallel", "ShardedDataParallel")
@pytest.mark.composition("scale-tp", "context parallel", "scale-fsdp")
@pytest.mark.soak  # test_train_transparency.py goes through the same axes with scale-train's own model
@pytest.mark.parametrize(
    "kind, attention", [("sharded", "ring"), ("replicated", "ulysses"), ("layers", "ring"), ("layers", "ulysses")]
)
@pytest.mark.ranks(4, in_turn=True)
def test_a_llama_with_divided_sequences_trains_as_one_process(kind: str, attention: str) -> None:
    model: Any = llama()
    clip = partial(clip_grad_norm_, list(model.parameters()), CLIP)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    batch = batch_of(slice(4))
    expected = train(
        model, optimizer, lambda each, step: each(**batch).loss, range(3), clip=clip, state=model.state_dict
    )
    assert_parity(expected, by_rank(spread(kind, attention)), rel=1e-6)
