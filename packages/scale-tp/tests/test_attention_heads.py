"""attention_heads.py: what depends on the number of heads is mended by rules that are written down, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scale_core.comm.group import Group, group_of
from scale_tp.attention_heads import ATTENTION_RULES, AttentionRule, find_heads
from scale_tp.layers.linear_ops import reduce_grads_of_copies
from scale_tp.split import Split, split_heads


def _module(**attributes: int) -> nn.Module:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_heads_are_cut_between_ranks_and_attributes_follow() -> None:
    module = _module(num_heads=6, num_key_value_heads=3, num_key_value_groups=2, head_dim=4, all_head_size=24)
    heads = find_heads(module, "attn", {"q_proj": 24, "k_proj": 12, "v_proj": 12}, 2, ATTENTION_RULES)
    assert heads is not None and heads.head_size == 4
    assert heads.split.query.sizes == (4, 2) and heads.split.key_value.sizes == (2, 1)
    assert heads.local_attributes(0) == {
        "num_heads": 4, "num_key_value_heads": 2, "num_key_value_groups": 2, "all_head_size": 16
    }  # fmt: skip
    assert heads.local_attributes(1)["num_heads"] == 2


def test_ranks_that_share_a_key_value_head_have_fewer_queries() -> None:
    module = _module(n_heads=4, n_kv_heads=1, n_rep=4)
    heads = find_heads(module, "attn", {"wq": 8, "wk": 2}, 3, ATTENTION_RULES)
    assert heads is not None
    assert [heads.local_attributes(rank)["n_rep"] for rank in range(3)] == [2, 1, 1]
    assert heads.local_attributes(2)["n_kv_heads"] == 1


def test_head_numbers_not_on_a_module_are_those_of_its_config() -> None:
    module, config = nn.Module(), type("Config", (), {"num_attention_heads": 3, "num_key_value_heads": 1})()
    module.config = config
    heads = find_heads(module, "attn", {"q_proj": 6, "k_proj": 2}, 2, ATTENTION_RULES)
    assert heads is not None and heads.split.query.sizes == (2, 1) and heads.local_attributes(0) == {}


def test_a_fused_projection_holds_queries_keys_and_values() -> None:
    heads = find_heads(_module(num_heads=5, split_size=20), "attn", {"c_attn": 60}, 2, ATTENTION_RULES)
    assert heads is not None and heads.local_attributes(1) == {"num_heads": 2, "split_size": 8}


class GPTNeoXAttention(nn.Module):
    """As transformers calls it: the query, key and value of a head stand together, and the heads are in its config."""

    def __init__(self) -> None:
        super().__init__()
        self.head_size = 4
        self.config = type("Config", (), {"num_attention_heads": 3})()


class CodeGenAttention(nn.Module):
    num_attention_heads = 4


def test_what_stands_head_by_head_is_cut_between_heads() -> None:
    heads = find_heads(GPTNeoXAttention(), "attn", {"query_key_value": 36}, 2, ATTENTION_RULES)
    assert heads is not None and heads.projection_split("query_key_value") == Split.even(36, 2, block=12)
    own = AttentionRule("mine", fused=("mix",), layout="by_head")
    grouped = _module(num_heads=4, num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"'attn.mix': .* got 4 heads and 2 key-value heads: give it the style 'colwi"):
        find_heads(grouped, "attn", {"mix": 16}, 2, (own,))


def test_what_a_projection_of_all_three_holds_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"no rule fits its projections query_key_value: .*fused=.*layout='by_head'"):
        find_heads(_module(num_heads=4), "attn", {"query_key_value": 24}, 2, ATTENTION_RULES)
    with pytest.raises(ValueError, match=r"computes with its projection query_key_value, but no rule fits"):
        find_heads(nn.Module(), "attn", {"query_key_value": 24}, 2, ATTENTION_RULES)
    with pytest.raises(ValueError, match=r"\(CodeGenAttention\) computes with its attribute num_attention_heads"):
        find_heads(CodeGenAttention(), "attn", {"qkv_proj": 24}, 2, ATTENTION_RULES)


def test_copies_of_key_value_heads_in_one_projection_are_refused() -> None:
    module = _module(num_heads=4, num_key_value_heads=1)
    with pytest.raises(ValueError, match=r"'attn.qkv_proj': expected at least one key-value head for each of 2 ranks"):
        find_heads(module, "attn", {"qkv_proj": 12}, 2, ATTENTION_RULES)


def test_a_rule_of_ones_own_goes_before() -> None:
    own = AttentionRule("mine", query=("mix",), heads=("parts",))
    heads = find_heads(_module(parts=4), "attn", {"mix": 8}, 2, (own, *ATTENTION_RULES))
    assert heads is not None and heads.local_attributes(0) == {"parts": 2}


def test_a_module_without_heads_has_none() -> None:
    assert find_heads(nn.Module(), "mlp", {"up": 8}, 2, ATTENTION_RULES) is None


@pytest.mark.parametrize(
    ("attributes", "children", "message"),
    [
        ({"num_heads": 4}, {"mix": 8}, r"computes with its attribute num_heads, but no rule fits its projections mix"),
        (
            {"num_heads": 3, "head_dim": 2},
            {"q_proj": 8},
            r"'attn.q_proj': expected 6 outputs for 3 heads and 3 key-value",
        ),
        (
            {"num_heads": 4, "num_kv_heads": 2},
            {"q_proj": 8, "k_proj": 8},
            r"'attn.k_proj': expected 4 outputs for 4 heads",
        ),
        ({"num_heads": 2}, {"q_proj": 8}, r"'attn': expected at least one head for each of 3 ranks, got 2 heads"),
    ],
)
def test_what_does_not_fit_is_refused(attributes: dict[str, int], children: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_heads(_module(**attributes), "attn", children, 3, ATTENTION_RULES)


def test_ranks_with_the_same_indices_have_copies() -> None:
    assert split_heads(6, 2, 4).key_value.has_copies
    assert not Split.even(3, 2).has_copies
    assert not Split.even(1, 3).has_copies  # Two ranks have nothing, which is no copy of anything.


def test_without_copies_a_parameter_is_left_as_it_is() -> None:
    param = torch.ones(2)
    assert reduce_grads_of_copies(param, Group(0, 2, None, "fake", (0, 1)), Split.even(4, 2)) is param
    assert reduce_grads_of_copies(param, Group(), Split(2, (((0, 2),),))) is param


def _summed(dtype: torch.dtype) -> list[float]:
    group = group_of()
    split = split_heads(4, 2, 3).key_value  # the first two ranks share the first head
    param = torch.ones(2, dtype=dtype, requires_grad=True)
    weight = torch.tensor([1.0, 256.0], dtype=dtype) * (1 + group.rank)
    (reduce_grads_of_copies(param, group, split) * weight).sum().backward()
    assert param.grad is not None
    return param.grad.tolist()


@pytest.mark.ranks(3)
def test_copies_get_the_sum_of_their_gradients() -> None:
    assert [_summed(dtype) for dtype in (torch.float32, torch.bfloat16)] == [[3.0, 768.0]] * 2
