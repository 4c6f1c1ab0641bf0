"""Mixtures of transformers, divided in place, against the same models undivided."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.models.deepseek_v3.modeling_deepseek_v3
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.mixtral.modeling_mixtral
import transformers.models.olmoe.modeling_olmoe
import transformers.models.qwen2_moe.modeling_qwen2_moe
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401  # For the server that ranks are forked from
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from scale_core.comm.group import Group, group_of
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_moe import MoE, average_replicated_gradients, parallelize_experts
from scale_moe.parallelize import ParallelExperts
from scale_snapshot import load_pretrained, save_pretrained

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    "qwen2_moe": {"num_experts": 5, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1},
    "qwen3_moe": {"num_experts": 4, "head_dim": 4, "decoder_sparse_step": 1},
    "olmoe": {"num_experts": 3},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 4, "layer_types": ["full_attention"] * 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_local_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 4,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    },
}


def build(name: str, implementation: str = "eager") -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.4, 0.4)
    return model


def batches(world: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(32, (2 * world, 6), generator=generator).split(2))


def steps_are_those_of_the_undivided(name: str, implementation: str) -> None:
    group = group_of()
    plain, model = build(name, implementation), build(name, implementation)
    assert parallelize_experts(model) is model
    average_replicated_gradients(model)
    parts, optimizers = batches(group.size), [torch.optim.SGD(each.parameters(), 0.2) for each in (model, plain)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(input_ids=parts[group.rank], labels=parts[group.rank]).loss
        loss.backward()
        expected = sum(plain(input_ids=part, labels=part).loss for part in parts) / group.size
        expected.backward()
        dist.all_reduce(loss := loss.detach())
        torch.testing.assert_close(loss / group.size, expected.detach(), rtol=1e-5, atol=1e-6, msg=f"{name}: {step}")
        if step == 0:
            compare_gradients(name, model, plain)
        for optimizer in optimizers:
            optimizer.step()
    state = model.state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
    states_are_those_of_the_undivided(name, implementation)


def compare_gradients(name: str, model: Any, plain: Any) -> None:
    for key, param in model.named_parameters():
        whole = plain.get_parameter(key).grad
        shard = shard_of(param)
        if whole is None:
            assert param.grad is None, key
        elif shard is None:
            torch.testing.assert_close(param.grad, whole, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}")
        else:
            grad = local_tensor(param.grad)
            start, count = shard.start // whole[0].numel(), len(grad)
            torch.testing.assert_close(grad, whole[start : start + count], rtol=1e-4, atol=1e-6)


def states_are_those_of_the_undivided(name: str, implementation: str) -> None:
    plain, model = build(name, implementation), parallelize_experts(build(name, implementation))
    experts = [module for module in model.modules() if isinstance(module, ParallelExperts)]
    assert len(experts) == (1 if name == "deepseek_v3" else 2)
    assert all(module.num_experts == module.shardings["down_proj"].shape[0] for module in experts)
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    state = copy.deepcopy(model).state_dict()
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
    unpickled = pickle.loads(pickle.dumps(experts[-1]))
    assert type(unpickled) is type(experts[-1])
    for key, value in plain.get_submodule(experts[-1].path).state_dict().items():
        assert torch.equal(unpickled.state_dict()[key], value)
    changed = {key: value + 1 for key, value in plain.state_dict().items()}
    model.load_state_dict(changed)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in changed.items())


@pytest.mark.ranks(2)
def test_models_of_transformers_compute_the_same_divided() -> None:
    for name in MODELS:
        steps_are_those_of_the_undivided(name, "eager")
    steps_are_those_of_the_undivided("mixtral", "grouped_mm")


@pytest.mark.ranks(2)
def test_weights_come_from_files_and_are_saved_again(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        build("mixtral").save_pretrained(tmp_path / "plain")
    dist.barrier()
    with torch.device("meta"):
        model = build("mixtral")
    parallelize_experts(model)
    load_pretrained(model, tmp_path / "plain")
    plain = build("mixtral")
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
    save_pretrained(model, tmp_path / "again")
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in again.state_dict().items())


@pytest.mark.fault(25)
@pytest.mark.ranks(2)
def test_what_differs_between_ranks_is_refused() -> None:
    rank = dist.get_rank()
    model = build("mixtral") if rank == 0 else build("olmoe")
    with pytest.raises(ValueError, match=r"the ranks are about to do different things: rank 0: parallelize_experts"):
        parallelize_experts(model)
    assert not any(isinstance(module, ParallelExperts) for module in model.modules())
    torch.manual_seed(0)
    layer = MoE(4, 6, 2 + rank)
    with pytest.raises(ValueError, match=r"rank 0: mixture of experts: MoE \d+: 2 experts.*rank 1: .*: 3 experts"):
        layer(torch.zeros(3, 4))
    model = parallelize_experts(build("mixtral"))
    if rank == 1:
        with torch.no_grad():
            model.model.layers[0].mlp.gate.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.experts': weights of choices are not finite.*of rank 1"):
        model(input_ids=batches(2)[rank])
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[0, 0] = rank
    with pytest.raises(
        ValueError, match=r"'model.layers.0.mlp.experts': the ranks \[0, 1\] have routers with different"
    ):
        model(input_ids=batches(2)[rank])
    torch.manual_seed(0)
    layer = MoE(4, 6, 2)
    layer.router.requires_grad_(rank == 0)
    with pytest.raises(
        ValueError, match=r"ranks differ in which tensors need gradients \(rank 0: tokens do not, weights do"
    ):
        layer(torch.zeros(3, 4))


@pytest.mark.soak
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.ranks("world")
def test_they_do_on_more_ranks(world: int) -> None:
    """With four of them, one has none of three experts."""
    steps_are_those_of_the_undivided("olmoe", "eager")
    steps_are_those_of_the_undivided("qwen2_moe", "grouped_mm")


class NoExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.weight = 2, nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_has_no_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"NoExperts has no modules of experts.*build layers with scale_moe.MoE"):
        parallelize_experts(NoExperts())


def test_what_can_not_be_divided_is_refused() -> None:
    model = build("mixtral")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp.experts.down_proj' is tied to 'model.layers.0.mlp"):
        parallelize_experts(model)
    model = build("mixtral")
    model.model.layers[0].mlp.experts.adapter = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"has a parameter 'adapter.weight' in a module inside of it.*before adapters"):
        parallelize_experts(model)


def test_one_process_has_nothing_to_divide() -> None:
    model = build("mixtral")
    parallelize_experts(model, Group())
    assert not any(isinstance(module, ParallelExperts) for module in model.modules())


@pytest.mark.ranks(2)
def test_an_optimizer_that_was_built_before_is_refused() -> None:
    model = build("olmoe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_experts(model)
    with pytest.raises(ValueError, match=r"is divided already"):
        parallelize_experts(model)
    part = batches(2)[dist.get_rank()]
    model(input_ids=part, labels=part).loss.backward()
    with pytest.raises(RuntimeError, match=r"model.layers.0.mlp.experts"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_shared_memory_is_refused_and_attributes_stay() -> None:
    model = build("mixtral")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    weight = second.down_proj
    second.down_proj = nn.Parameter(first.down_proj.data)
    with pytest.raises(
        ValueError, match=r"'model.layers.0.mlp.experts.down_proj' and 'model.layers.1.*share one memory"
    ):
        parallelize_experts(model)
    assert not isinstance(first, ParallelExperts)
    second.down_proj = weight
    vars(weight)["_no_weight_decay"] = True
    parallelize_experts(model)
    assert second.down_proj is not weight and second.down_proj._no_weight_decay
