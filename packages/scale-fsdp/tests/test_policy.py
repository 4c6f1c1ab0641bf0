"""Which modules a policy makes units, and what it says where it can't mean the model."""

import re
from functools import partial

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from wrapping_models import Block, Model, linears

from scale_fsdp.wrapping.auto_wrap import plan_units
from scale_fsdp.wrapping.policy import class_policy, name_policy, no_split_policy, size_policy


def test_a_policy_by_size_counts_without_the_units_inside():
    assert plan_units(linears(7, 7), size_policy(40)) == ["0", "1"]
    assert plan_units(linears(5, 5), size_policy(40)) == [""]
    assert plan_units(linears(7, 5, 5), size_policy(40)) == ["0", ""]
    assert plan_units(linears(3, 3), size_policy(40)) == []


def test_lists_of_modules_are_entered_but_not_wrapped():
    model = nn.ModuleDict({"list": nn.ModuleList(linears(7, 7)), "attention": nn.MultiheadAttention(10, 1)})
    assert plan_units(model, size_policy(40)) == ["list.0", "list.1"]


def test_policies_of_fsdp1_choose_the_same_modules():
    for model in (linears(7, 7), linears(5, 5), linears(7, 5, 5), linears(3, 3)):
        assert plan_units(model, partial(size_based_auto_wrap_policy, min_num_params=40)) == plan_units(
            model, size_policy(40)
        )
    model = nn.Sequential(Block(), nn.Linear(2, 2))
    assert plan_units(model, partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})) == ["0"]


def test_a_function_is_called_with_keywords_only_as_in_fsdp1():
    calls = []

    def policy(*, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        calls.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or isinstance(module, nn.Linear)

    assert plan_units(linears(2), policy) == ["0"]
    assert calls == [("Sequential", True, 4), ("Linear", True, 4), ("Linear", False, 4), ("Sequential", False, 0)]


def test_a_class_is_chosen_by_type_by_subclass_or_by_name():
    class Wide(Block): ...

    model = nn.Sequential(Block(), Wide(), nn.Linear(2, 2))
    assert plan_units(model, class_policy(Block)) == ["0", "1"]
    assert plan_units(model, class_policy("Block", "OfAnotherModel")) == ["0", "1"]
    assert plan_units(model, class_policy("Wide", nn.Linear)) == [
        *("0.mlp.0", "0.mlp.2", "1.mlp.0", "1.mlp.2", "1", "2"),
    ]
    assert plan_units(model, class_policy("Wide")) == ["1"]


def test_children_of_attention_are_never_units():
    model = nn.Sequential(Block())
    assert plan_units(model, class_policy(nn.Linear)) == ["0.mlp.0", "0.mlp.2"]
    assert plan_units(model, name_policy(r".*attn.*")) == ["0.attn"]


def test_names_are_matched_whole_and_lists_passed_over():
    model = Model()
    assert plan_units(model, name_policy(r"layers\.\d+")) == ["layers.0", "layers.1"]
    assert plan_units(model, name_policy(r"layers\.1", "embed")) == ["embed", "layers.1"]
    assert plan_units(model, name_policy(r"layers.*")) == [
        f"layers.{i}.{part}" for i in range(2) for part in ("attn", "mlp.0", "mlp.2")
    ]


@pytest.mark.fault(92)
def test_a_pattern_or_class_without_a_match_is_an_error():
    model = Model()
    with pytest.raises(ValueError, match=r"'layer\\\\.\\\\d\+' matches the name of no.*did you mean .*'layers.0'"):
        plan_units(model, name_policy(r"layers\.\d+", r"layer\.\d+"))
    with pytest.raises(ValueError, match="no module is a Foo or Blok; did you mean 'Block'"):
        plan_units(model, class_policy("Foo", "Blok"))
    with pytest.raises(ValueError, match="no module is a Blok; did you mean 'Block'"):
        plan_units(model, class_policy("Blok"))
    with pytest.raises(
        ValueError,
        match=re.escape(r"a ModuleList, which is never called; select what it holds: name_policy(r'layers\.[^.]+')"),
    ):
        plan_units(model, name_policy("layers"))


def test_bad_policies_say_what_was_expected():
    with pytest.raises(ValueError, match="at least one pattern"):
        name_policy()
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        name_policy("(")
    with pytest.raises(ValueError, match="at least one class"):
        class_policy()
    with pytest.raises(TypeError, match=r"class_policy\(\*names\)"):
        class_policy(["Block"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_num_params is -1"):
        size_policy(-1)
    with pytest.raises(TypeError, match="got 'Block'"):
        plan_units(Model(), "Block")  # type: ignore[arg-type]


@pytest.mark.parametrize("listed", [{"Block"}, ["Block", "OfAnotherModel"], ("Block",)])
def test_the_blocks_that_a_model_names_itself_are_units(listed):
    model = Model()
    model._no_split_modules = listed
    assert plan_units(model, no_split_policy(model)) == ["layers.0", "layers.1"]
    assert plan_units(nn.Sequential(model), no_split_policy(nn.Sequential(model))) == ["0.layers.0", "0.layers.1"]


@pytest.mark.parametrize("listed", [None, [], set()])
def test_a_model_that_names_no_blocks_is_told_which_it_has(listed):
    model = Model()
    model._no_split_modules = listed
    with pytest.raises(ValueError, match=r"this Model has no _no_split_modules.*; write class_policy\('Block'\)"):
        no_split_policy(model)
    with pytest.raises(ValueError, match=r"this Linear has.*; write size_policy\(min_num_params=...\)"):
        no_split_policy(nn.Linear(2, 2))
