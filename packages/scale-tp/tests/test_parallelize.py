"""parallelize.py: models of transformers, divided by a plan, compute what they compute on one process."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from parallelize_cases import gpt2, gpt_neox, llama, loss_of, tokens, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_core import clip_grad_norm_, group_of
from scale_core.comm.group import Group
from scale_core.errors import ShardedTensorError
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp.attention_heads import AttentionRule
from scale_tp.conversion.modules import RowParallelMixin
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import GPT2_PLAN, Plan, Style
from scale_tp.layers.base import ParallelModule
from scale_tp.layers.full_init import init_as_full
from scale_tp.layers.linear import RowParallelLinear
from scale_tp.layers.module_swap import swap_class
from scale_tp.state_dict import full_state_dict

LORA_PLAN: Plan = {
    "up.base_layer": "colwise",
    "up.lora_A.default": "replicate",
    "up.lora_B.default": "colwise",
    "down.base_layer": "rowwise",
    "down.lora_A.default": "rowwise",
    "down.lora_B.default": "replicate",
}
BUILDERS = {"llama": llama, "gpt2": gpt2}


def _divided(kind: str, options: dict[str, Any], sequence_parallel: bool = False) -> nn.Module:
    plan: Plan | None = GPT2_PLAN if kind == "gpt2" else None
    if options.get("tie_word_embeddings"):
        plan = {**llama()._tp_plan, "model.embed_tokens": "embedding_rowwise"}
    model = BUILDERS[kind](**options).double()
    return parallelize(model, plan, group_of(), sequence_parallel=sequence_parallel)


@pytest.mark.ranks("num_ranks", in_turn=True)
@pytest.mark.parametrize(
    "num_ranks, kind, options, ways",  # Without sequence parallelism, with it, or both.
    [
        (2, "llama", {}, [False]),
        (2, "llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}, [True]),
        (2, "llama", {"num_key_value_heads": 2, "attn_implementation": "sdpa", "tie_word_embeddings": True}, [False]),
        (2, "gpt2", {}, [False, True]),
        (3, "llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}, [True]),
        (4, "llama", {}, [True]),
        (4, "gpt2", {}, [False]),
    ],
)
def test_llama_and_gpt2_train_as_on_one_process(
    num_ranks: int, kind: str, options: dict[str, Any], ways: list[bool]
) -> None:
    plain = BUILDERS[kind](**options).double()
    expected = train(plain)
    for sequence_parallel in ways:
        model = _divided(kind, options, sequence_parallel)
        torch.testing.assert_close(train(model), expected, rtol=0, atol=1e-10)
        state = full_state_dict(model)
        assert list(state) == list(plain.state_dict())
        torch.testing.assert_close(dict(state), dict(plain.state_dict()), rtol=0, atol=1e-10)


@pytest.mark.ranks(2)
def test_half_precision_is_as_near_as_in_the_plain_model() -> None:
    """In half precision the divided model is as near to the exact one as the plain one is."""
    data = tokens(3)
    exact, plain, model = llama().double(), llama().bfloat16(), llama().bfloat16()
    parallelize(model, None, group_of())
    outputs = [each(input_ids=data).logits.double() for each in (exact, plain, model)]
    error, allowed = ((outputs[which] - outputs[0]).norm() for which in (2, 1))
    assert error <= 1.25 * allowed


@pytest.mark.ranks(2)
def test_each_element_counts_once_in_the_norm_of_the_gradients() -> None:
    """Copies of key-value heads too."""
    data = tokens(3)
    plain = llama(num_key_value_heads=1).double()
    model = _divided("llama", {"num_key_value_heads": 1})
    for each in (plain, model):
        loss_of(each(input_ids=data).logits, data).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(clip_grad_norm_(list(model.parameters()), 0.5), expected, rtol=1e-10, atol=0)
    norm = model.get_submodule("model.norm")
    torch.testing.assert_close(norm.weight.grad, plain.get_submodule("model.norm").weight.grad, rtol=0, atol=1e-10)


@pytest.mark.fault(84)
@pytest.mark.ranks(2)
def test_copies_and_pickles_of_a_divided_model_compute_the_same() -> None:
    data = tokens(1)
    model = _divided("gpt2", {})
    expected = model(input_ids=data).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=data).logits, expected)
        for path, module in model.named_modules():
            if isinstance(module, ParallelModule):
                for name, param in module.named_parameters(recurse=False):
                    assert shard_of(other.get_submodule(path).get_parameter(name)) == shard_of(param) is not None


@pytest.mark.ranks(2)
def test_frozen_and_checkpointed_layers_train_as_the_plain_ones() -> None:
    data, plain, model = tokens(1), gpt2().double(), _divided("gpt2", {})
    for each in (plain, model):
        each.transformer.h[0].attn.c_attn.weight.requires_grad_(False)
        first = each.transformer.h[0]
        first.forward = functools.partial(checkpoint, first.forward, use_reentrant=False)
        loss_of(each(input_ids=data).logits, data).backward()
    grads = {name: param.grad for name, param in plain.named_parameters()}
    for name, param in model.named_parameters():
        shard = shard_of(param)
        if shard is None or not shard.axes or grads[name] is None:
            assert (param.grad is None) == (grads[name] is None)
    torch.testing.assert_close(model.transformer.wpe.weight.grad, plain.transformer.wpe.weight.grad, rtol=0, atol=1e-10)
    # Without gradients, and at another length.
    with torch.inference_mode():
        longer = tokens(2, 11)
        torch.testing.assert_close(model(input_ids=longer).logits, plain(input_ids=longer).logits, rtol=0, atol=1e-10)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.ranks(2)
def test_the_plain_state_dict_goes_in_as_it_is() -> None:
    data, plain, model = tokens(1), gpt2().double(), _divided("gpt2", {})
    for param in plain.parameters():
        param.data.mul_(2)
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(input_ids=data).logits, plain(input_ids=data).logits, rtol=0, atol=1e-10)


class Styles(nn.Module):
    """A layer for each of the less common styles; 3 and 7 divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.words, self.width = nn.Embedding(11, 5, padding_idx=2), nn.Embedding(11, 5, padding_idx=7)
        self.gate_up, self.down = nn.Linear(5, 14), nn.Linear(7, 5)
        self.expert = Expert()
        self.whole, self.split = nn.Linear(5, 7), nn.Linear(7, 5)
        self.pack = nn.Linear(14, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) + self.width(x)
        gate, up = self.gate_up(y).chunk(2, -1)
        y = y + self.down(gate.sigmoid() * up)
        y = y + self.pack(torch.cat([gate, up], -1).tanh())
        y = y + self.expert(y)
        return y + self.split(self.whole(y).tanh())


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).tanh())
        return y


@pytest.mark.ranks(2)
def test_the_less_common_styles_have_the_plain_numbers() -> None:
    plain, model = Styles().double(), Styles().double()
    plan: Plan = {
        "words": "embedding_rowwise",
        "width": "embedding_colwise",
        "gate_up": "packed_colwise",
        "down": "rowwise",
        "pack": "packed_rowwise",
        "expert.up": "local_colwise",
        "expert.down": "local_rowwise",
        "expert": "gather",
        "whole": "colwise_gather_output",
        "split": "rowwise_split_input",
    }
    parallelize(model, plan, group_of())
    data = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(0))
    data[0, :2] = torch.tensor([2, 7])
    _same_gradients(plain, model, lambda each: each(data))


@pytest.mark.ranks(2)
def test_projections_of_all_three_head_by_head_are_divided() -> None:
    plain, data = gpt_neox().double(), tokens(0)
    for sequence_parallel in (False, True):
        model = parallelize(gpt_neox().double(), None, group_of(), sequence_parallel=sequence_parallel)
        _same_gradients(plain, model, lambda each: each(input_ids=data).logits)


@pytest.mark.ranks(2)
def test_stacked_matrices_keep_the_order_of_full_features() -> None:
    """The outputs in the order of the layer that is not divided, and inputs that come in it."""
    torch.manual_seed(3)
    # One by one: behind each other, they would hide that both take the features in another order.
    for style, sizes in ((Style("outputs", stacked=2), (3, 10)), (Style("inputs", stacked=2), (10, 3))):
        plain = nn.Sequential(nn.Linear(*sizes)).double()
        model, x = parallelize(copy.deepcopy(plain), {"0": style}, group_of()), torch.randn(4, sizes[0]).double()
        _same_gradients(plain, model, lambda each, x=x: each(x))


class Blocks(nn.Module):
    """Two perceptrons in a block, one of which is to give summands."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList([nn.ModuleDict({"one": Expert(), "other": Expert()})])
        self.blocks[0].forward = lambda x: x + self.blocks[0]["one"](x) + self.blocks[0]["other"](x)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks[0](x)
        return y


@pytest.mark.ranks(2)
def test_summands_within_a_divided_sequence_are_added() -> None:
    plan = {
        "blocks.0.one": "gather",
        "blocks.0.one.up": "local_colwise",
        "blocks.0.one.down": "local_rowwise",
        "blocks.0.other.up": "colwise",
        "blocks.0.other.down": "rowwise",
    }
    plain, model = Blocks().double(), Blocks().double()
    parallelize(model, plan, group_of(), sequence_parallel=True)
    for length in (2, 5):
        x = torch.randn(2, length, 5, generator=torch.Generator().manual_seed(length)).double()
        _same_gradients(plain, model, lambda each, x=x: each(x))


def _same_gradients(plain: nn.Module, model: nn.Module, act: Any) -> None:
    outputs = [act(each) for each in (plain, model)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-10)
    for each, output in zip((plain, model), outputs, strict=True):
        each.zero_grad()
        (output * torch.arange(output.numel(), dtype=output.dtype).view_as(output).cos()).sum().backward()
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            whole = plain.get_submodule(path).get_parameter(name).grad
            divided = isinstance(module, ParallelModule)
            expected = module.shardings[name].local_part(whole, group_of().rank) if divided else whole
            torch.testing.assert_close(local_tensor(param.grad), expected, rtol=0, atol=1e-10)


@pytest.mark.ranks(2)
def test_ranks_begin_with_the_values_of_the_first() -> None:
    expected = llama()(input_ids=tokens(1)).logits
    model = llama()
    if group_of().rank:  # As from another seed.
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.mul_(2)
    found = parallelize(model, None, group_of())(input_ids=tokens(1)).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    parallelize(nn.Sequential(nn.Linear(3, 4, device="meta")), {"0": "colwise_rep"}, group_of())


@pytest.mark.ranks(2)
def test_the_plan_for_lora_has_the_plain_numbers() -> None:
    """The plan for LoRA that the guide shows."""
    torch.manual_seed(3)
    plain = Block()
    plain.up, plain.down = Lora(plain.up), Lora(plain.down)
    plain.double()
    model = parallelize(copy.deepcopy(plain), LORA_PLAN, group_of())
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    _same_gradients(plain, model, lambda each: each(x))


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("tied", [False, True])
def test_code_that_takes_a_part_for_the_full_weight_is_seen(tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    plan = {**model._tp_plan, "model.embed_tokens": "embedding_rowwise"}
    with pytest.raises(ShardedTensorError, match=r"getitem of a parameter of shape \(37, 24\).*full_tensor\(\)"):
        parallelize(model, plan, group_of()).resize_token_embeddings(40, mean_resizing=False)


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize(
    "layer_type, style, shape",
    [
        (nn.Linear, "colwise_rep", (4, 4)),
        (nn.Linear, Style("inputs"), (6, 3)),
        (nn.Embedding, "embedding_colwise", (4, 5)),
    ],
)
def test_a_divided_weight_is_not_replaced_by_one_of_another_size(
    layer_type: Any, style: Any, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    plain = layer_type(4, 6)
    inputs = torch.arange(4) if layer_type is nn.Embedding else torch.randn(2, 4)
    layer = parallelize(copy.deepcopy(plain), style, group_of())  # A style by itself is that of the model.
    torch.testing.assert_close(layer(inputs), plain(inputs))
    with pytest.raises(ShardedTensorError, match=r"does not fit a parameter of shape"):
        layer.weight.data = torch.zeros(shape)
    with torch._C.DisableTorchFunctionSubclass():
        layer.weight.data = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"change the size of a layer.* before parallelize"):
        layer(inputs)


@pytest.mark.fault(25)
@pytest.mark.ranks(2)
def test_ranks_with_different_models_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6 + group_of().rank), nn.ReLU())
    with pytest.raises(ValueError, match=r"rank 0: parallelize: .*\(6, 4\).*rank 1: parallelize: .*\(7, 4\)"):
        parallelize(model, {"0": "colwise"}, group_of())
    assert type(model[0]) is nn.Linear


# What is refused is refused before anything is sent, so one process can play a rank of several.
TWO = Group(0, 2, None, "fake", (0, 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Lora(nn.Module):
    """A layer with a small one beside it, and names as peft gives them."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base_layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.embed_dim = 3, 6
        self.mix = nn.Linear(6, 18)


def _refused(
    model: nn.Module, plan: Plan | None, message: str, error: type[Exception] = ValueError, **options: Any
) -> None:
    before = dict(model.named_parameters())
    classes = [type(module) for module in model.modules()]
    with pytest.raises(error, match=message):
        parallelize(model, plan, TWO, **options)
    assert [type(module) for module in model.modules()] == classes
    assert all(before[name] is param for name, param in model.named_parameters())


def test_a_plan_that_does_not_fit_is_refused() -> None:
    block = nn.Sequential(Block())
    _refused(block, {"0.upp": "colwise"}, r"'0.upp' matches none of the 5 modules; near it are '0.up'")
    _refused(
        block,
        {"0.act": "colwise"},
        r"'0.act': expected an nn.Linear to divide its outputs, got torch.nn.*ReLU",
        TypeError,
    )
    _refused(
        block,
        {"0.up": "embedding_rowwise"},
        r"expected an nn.Embedding to divide its words, got torch.nn.modules.linear.Linear",
        TypeError,
    )
    packed = {"0.up": Style("outputs", output="part", stacked=7), "0.down": "rowwise"}
    _refused(
        block, packed, r"'0.down' takes 7 inputs in parts of \[4, 3\], but '0.up' gives 7 outputs in parts of \[7, 0\]"
    )
    _refused(
        block, {"0.up": Style("outputs", stacked=2)}, r"'0.up': expected 2 stacked matrices of one size, got 7 rows"
    )
    _refused(block, None, r"Sequential carries no plan \(_tp_plan\): pass one")
    _refused(block, {"0.down": "local_rowwise"}, r"'0.down' gives a summand on each rank, but no module around it sums")
    embedding = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0))
    _refused(embedding, {"0": "embedding_colwise"}, r"'0': max_norm=1.0 changes the weight while it is read")
    computed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
    _refused(
        computed, {"0": "colwise_rep"}, r"'0': expected its weight to be a parameter, but it is computed", TypeError
    )
    tied = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    tied[1].weight = tied[0].weight
    _refused(
        tied, {"0": "embedding_rowwise"}, r"'0.weight' and '1.weight' are one parameter, but the plan does not divide"
    )
    _refused(
        tied, {"0": "embedding_colwise", "1": "colwise_rep"}, r"are one parameter, but the plan does not divide both"
    )
    _refused(block, {"0.up": "colwise"}, r"expected one nn.ModuleList of blocks that holds all", sequence_parallel=True)


@pytest.mark.fault(81)
def test_an_optimizer_built_before_is_refused_when_it_steps() -> None:
    """It holds the full parameters, which nobody uses any more, and would train nothing."""
    model = nn.Sequential(Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {"0.up": "colwise", "0.down": "rowwise"}
    parallelize(model, plan, TWO, sync_module_states=False)
    with pytest.raises(
        RuntimeError, match=r"SGD was built before .* '0.up.weight' is not the model's parameter any more"
    ):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_arguments_of_another_kind_are_refused() -> None:
    block: Any = nn.Sequential(Block())
    _refused(block, ["0.up"], r"expected a plan from names of modules to styles, got list: write", TypeError)  # type: ignore[arg-type]
    lora = nn.Sequential(Block())
    lora[0].up = Lora(lora[0].up)
    message = r"got test_parallelize.Lora: give the style to the layer in it, '0.up.base_layer'"
    _refused(lora, {"0.up": "colwise"}, message, TypeError)
    lora[0].up.lora_dropout = nn.Dropout(0.1)
    _refused(lora, {"0.up.base_layer": "colwise_rep"}, r"'0.up' drops 0.1 of what the adapters of '0.up.base_")
    _refused(block, {}, "expected a plan that names a module at least, got an empty one")
    rule: Any = AttentionRule("one")
    message = r"to be a tuple of scale_tp.AttentionRule, got AttentionRule: write attention_rules=\(AttentionRule"
    _refused(block, {"0.up": "colwise"}, message, TypeError, attention_rules=rule)
    with pytest.raises(TypeError, match=r"expected a model, a torch.nn.Module, got Tensor"):
        parallelize(torch.ones(1), {"0": "colwise"}, TWO)  # type: ignore[arg-type]


class NormedBlock(nn.Module):
    """A block that holds its norm, a scale of its branch and a small head beside its divided layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 7), nn.Linear(7, 6)
        self.scale, self.head = nn.Parameter(torch.linspace(0.5, 1.5, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.down(self.up(self.norm(x)).relu())
        y: Tensor = self.head(x)
        return y


@pytest.mark.ranks(2, 3)
def test_a_block_that_holds_its_norm_has_the_plain_numbers() -> None:
    torch.manual_seed(0)
    plain = NormedBlock().double()
    model = parallelize(copy.deepcopy(plain), {"up": "colwise", "down": "rowwise"}, group_of())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for step in range(5):
        x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        _same_gradients(plain, model, lambda each, x=x: each(x))
        for optimizer in optimizers:
            optimizer.step()
    assert type(model.norm) is nn.LayerNorm and not isinstance(model.head, ParallelModule)


class HeadNorm(nn.Module):
    """Attention with a norm of each head, whose gradient is a summand on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 4
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)
        self.q_norm, self.o_proj = nn.RMSNorm(4), nn.Linear(8, 6)


def test_a_parameter_that_fits_a_part_of_any_size_needs_a_style() -> None:
    """Each rank would have a summand of its gradient, or the whole, and nothing would show which."""
    plan = {"0.up": "colwise", "0.down": "rowwise"}
    block = nn.Sequential(Block())
    block[0].act = nn.Sequential(nn.PReLU())
    message = r"'0.act.0.weight' \[1\] \(PReLU\) is a sibling of divided layers, has no style, .* Add '0.act.0': 'repl"
    _refused(block, plan, message)
    block[0].act, block[0].scale = nn.ReLU(), nn.Parameter(torch.ones(1))
    _refused(block, plan, r"'0.scale' \[1\] \(Block\) is a sibling of divided layers, has no style")
    parallelize(block, plan | {"0": "replicate"}, Group())
    del block[0].scale
    block[0].scale = nn.Linear(6, 1, bias=False)
    _refused(block, plan, r"'0.scale.weight' \[1, 6\] \(Linear\) is a sibling of divided layers")
    block[0].scale = nn.Parameter(torch.ones(5, 1))  # A factor of each position.
    _refused(block, plan, r"'0.scale' \[5, 1\] \(Block\) is a sibling of divided layers")
    heads = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise") | {"o_proj": "rowwise"}
    _refused(HeadNorm(), heads, r"'q_norm.weight' \[4\] \(RMSNorm\) .* Add 'q_norm': .* 'replicated_with_grad_allreduc")
    parallelize(HeadNorm(), heads | {"q_norm": "replicated_with_grad_allreduce"}, TWO, sync_module_states=False)


class UnnamedHeads(nn.Module):
    """Attention that says its head size by another name, and has one full key-value head or norms of each head."""

    def __init__(self, beside: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.width_of_head = 2
        self.wq, self.wo = nn.Linear(6, 8), nn.Linear(8, 6)
        for name, module in beside.items():
            self.add_module(name, module)


@pytest.mark.parametrize(
    ("beside", "refused"),
    [
        ({"q_norm": nn.RMSNorm(2)}, r"'q_norm.weight' \[2\] \(RMSNorm\) .* Add 'q_norm': "),
        ({"norms": nn.ModuleDict({"q": nn.LayerNorm(4)})}, r"'norms.q.weight' \[4\] \(LayerNorm\)"),
        ({"key_value": nn.Linear(6, 2)}, r"'key_value.weight' \[2, 6\] \(Linear\)"),
        ({"mixed": nn.Linear(2, 2)}, r"'mixed.weight' \[2, 2\] \(Linear\)"),
        ({"norm": nn.LayerNorm(6), "head": nn.Linear(6, 3), "gate": nn.Linear(6, 6)}, None),
        ({"adapter": nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2), nn.Linear(2, 6))}, None),
        ({"stem": nn.Conv1d(3, 4, 2), "channels": nn.BatchNorm1d(4), "words": nn.Embedding(9, 2)}, None),
    ],
)
def test_parameters_of_the_size_of_a_head_need_a_style(beside: Mapping[str, nn.Module], refused: str | None) -> None:
    plan = {"wq": "colwise", "wo": "rowwise"}
    if refused is not None:
        _refused(UnnamedHeads(beside), plan, refused)
        plan |= {
            name: "replicated_with_grad_allreduce"
            for name, _ in UnnamedHeads(beside).named_modules()
            if any(name.startswith(each) for each in beside)
        }
    parallelize(UnnamedHeads(beside), plan, TWO, sync_module_states=False)


class OneKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = 4, 1
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 2)


@pytest.mark.parametrize("style", ["replicate", "replicated_with_grad_allreduce", "colwise_gather_output", None])
def test_whole_keys_beside_divided_queries_are_refused(style: str | None) -> None:
    """Each rank would have a summand of their gradients, and of that of their input."""
    plan: Plan = {"0.q_proj": "colwise", "0.v_proj": "colwise"} | ({} if style is None else {"0.k_proj": style})
    _refused(nn.Sequential(OneKey()), plan, r"'0.k_proj' gives all keys or values to queries .* the style 'colwise'")


def test_a_part_of_the_sequence_that_nobody_has_is_refused() -> None:
    block = nn.Sequential(Block())
    plan = {"0.up": "colwise", "0.down": "rowwise", "0.act": "sequence_parallel"}
    _refused(block, plan, r"'0.act' has the style 'sequence_parallel', but here each rank has the full sequence")
    blocks = nn.ModuleDict({"blocks": nn.ModuleList([Block()]), "norm": nn.LayerNorm(6)})
    plan = {"blocks.0.up": "colwise", "blocks.0.down": "rowwise", "norm": "sequence_parallel"}
    _refused(blocks, plan, r"'norm' has the style 'sequence_parallel', but here", sequence_parallel=True)
    summing = plan | {"norm": "replicate", "blocks.0": "gather"}
    _refused(blocks, summing, r"'blocks.0' sums what its ranks give, and each has another part", sequence_parallel=True)


def test_attention_without_a_rule_is_refused_with_one_to_write() -> None:
    model = nn.Sequential(Attention())
    _refused(
        model,
        {"0.mix": "colwise"},
        r"'0' \(Attention\) computes with its attribute num_heads, but no rule fits .*query=",
    )
    odd = llama(num_attention_heads=6)
    odd.model.layers[1].self_attn.num_key_value_groups = 5
    _refused(odd, None, r"'model.layers.1.self_attn': expected its attribute num_key_value_groups to be 2, .* got 5")
    few = nn.Sequential(Attention())
    few[0].q_proj, few[0].num_heads = nn.Linear(6, 6), 1
    _refused(few, {"0.q_proj": "colwise"}, r"'0': expected at least one head for each of 2 ranks, got 1 heads")


def test_a_divided_model_is_not_divided_again() -> None:
    # One rank alone has nobody to divide with, so this is done by hand.
    for group, message in (
        (TWO, r"'0.down' is divided already"),
        (
            Group(0, 2, None, "fake", (0, 2)),
            r"'0.down' is divided between the ranks \[0, 2\], and the plan .* \[0, 1\]",
        ),
    ):
        model = nn.Sequential(Block())
        swap_class(model[0].down, RowParallelMixin, group, {})
        _refused(model, {"0.down": "rowwise"}, message)
    ours = nn.Sequential(nn.Linear(3, 4), RowParallelLinear(4, 3, process_group=Group(0, 2, None, "fake", (0, 2))))
    _refused(ours, {"0": "colwise"}, r"'1' is divided between the ranks \[0, 2\]")


@pytest.mark.fault(87)
def test_on_one_rank_nothing_changes() -> None:
    model = llama()
    before = [(type(module), id(module)) for module in model.modules()]
    assert parallelize(model, None, Group()) is model
    assert [(type(module), id(module)) for module in model.modules()] == before


def test_a_carried_plan_that_divides_no_block_is_refused() -> None:
    config = transformers.GptOssConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=4,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, layer_types=["full_attention"],
        pad_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    model._tp_plan = {"lm_head": "colwise_rep"}  # What it carries in some versions of transformers.
    share = round(100 * 64 / sum(param.numel() for param in model.parameters()))
    with pytest.raises(
        ValueError,
        match=rf"GptOssForCausalLM carries divides lm_head, {share} % of its parameters, and nothing in "
        r"model.layers.\*, which every rank would replicate: .*parallelize\(model, {'lm_head': 'colwise_rep'}\)",
    ):
        parallelize(model, None, Group())
    assert not any(isinstance(module, ParallelModule) for module in model.modules())
    parallelize(model, {"lm_head": "colwise_rep"}, Group())  # Who names it gets it.
    parallelize(llama(), None, Group())


@pytest.mark.ranks(2)
def test_shared_memory_is_refused_and_attributes_stay() -> None:
    plan: Plan = {"0": "embedding_rowwise", "1": "colwise_gather_output"}
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10, bias=False))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight'.*model\[1\].weight = model\[0\].weight, before"):
        parallelize(model, plan, group_of())
    assert type(model[1]) is nn.Linear
    model[1] = nn.Linear(6, 10)
    model.append(nn.Linear(10, 10, bias=False))
    model.register_buffer("shadow", model[2].weight.data)  # Neither is divided.
    vars(model[1].bias)["_no_weight_decay"] = True
    parallelize(model, plan, group_of())
    assert model[1].bias._no_weight_decay

    def mark(module: nn.Module) -> None:
        assert module.get_parameter("1.bias")._no_weight_decay  # type: ignore[attr-defined]
        vars(module.get_parameter("1.weight"))["_initialized"] = True

    init_as_full(model, mark)
    assert model[1].weight._initialized and set(vars(model[1].weight)) <= {"_initialized", "_shard_spec"}
