"""Which modules a policy makes units, what it says where it can't mean the model, and what is made of the units."""

import copy
import doctest
import re
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

import scale_fsdp.wrapping.auto_wrap as wrap_module
from scale_check.exact import assert_equal
from scale_core.shard import Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_fsdp import FullyShardedDataParallel, fully_shard
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.wrapping.auto_wrap import (
    auto_wrap,
    enable_wrap,
    fully_shard_modules,
    get_fsdp_instances,
    plan_units,
    wrap,
)
from scale_fsdp.wrapping.policy import class_policy, name_policy, no_split_policy, size_policy


class Block(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, 1)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def linears(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for size in sizes))


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
        *("0.mlp.0", "0.mlp.2", "1.mlp.0", "1.mlp.2", "1", "2")
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


# What they are wrapped in or sharded as; most tests give a wrapper that only remembers its arguments.


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **kwargs: object) -> None:
        super().__init__()
        self.module = module
        self.kwargs = kwargs


def test_outside_of_the_context_modules_come_back_as_they_are():
    model = Model()
    assert wrap(model, anything=1) is model
    assert auto_wrap(model, class_policy(Block)) is model
    assert not any(isinstance(module, Wrapper) for module in model.modules())


def test_arguments_of_the_call_come_first_then_the_module_s():
    module = nn.Linear(2, 2)
    module.wrapper_config = {"b": "module", "c": "module"}
    with enable_wrap(wrapper_cls=Wrapper, a="context", b="context", c="context"):
        wrapped = wrap(module, c="call")
    assert wrapped.module is module
    assert wrapped.kwargs == {"a": "context", "b": "module", "c": "call"}


def test_the_default_wrapper_is_fully_sharded_data_parallel():
    with enable_wrap(flatten_parameters=True):
        wrapped = wrap(nn.Linear(2, 2))
    assert type(wrapped) is FullyShardedDataParallel
    assert [name for name, _ in wrapped.named_parameters()] == ["flat_param_0"]


def test_an_inner_context_replaces_the_outer_one_until_it_ends():
    with enable_wrap(wrapper_cls=Wrapper, a=1):
        with enable_wrap(wrapper_cls=Wrapper, b=2):
            assert wrap(nn.ReLU()).kwargs == {"b": 2}
        assert wrap(nn.ReLU()).kwargs == {"a": 1}
    assert isinstance(wrap(nn.ReLU()), nn.ReLU)


def test_the_context_ends_with_an_error_too():
    with pytest.raises(RuntimeError, match="stop"), enable_wrap(wrapper_cls=Wrapper):
        raise RuntimeError("stop")
    assert isinstance(wrap(nn.ReLU()), nn.ReLU)


def test_another_thread_does_not_see_the_context():
    seen = []
    with enable_wrap(wrapper_cls=Wrapper):
        thread = threading.Thread(target=lambda: seen.append(wrap(nn.ReLU())))
        thread.start()
        thread.join()
    assert isinstance(seen[0], nn.ReLU)


def test_children_are_wrapped_before_their_parents():
    model = nn.Sequential(linears(4, 4), nn.ReLU(), nn.Linear(4, 4))
    seen = []

    class Recorder(Wrapper):
        def __init__(self, module, **kwargs):
            super().__init__(module, **kwargs)
            seen.append(module)

    modules = [model[0][0], model[0][1], model[0], model[2], model]

    def policy(*, module, recurse, nonwrapped_numel):
        return recurse or not isinstance(module, nn.ReLU)

    with enable_wrap(policy, wrapper_cls=Recorder):
        wrapped = auto_wrap(model, reshard=False)
    assert seen == modules
    assert wrapped.module is model and wrapped.kwargs == {"reshard": False}
    assert [type(child) for child in model] == [Recorder, nn.ReLU, Recorder]
    assert [child.module for child in model[0].module] == modules[:2]


def test_min_num_params_is_taken_as_a_policy_by_size():
    model = linears(7, 7, 3)
    with enable_wrap(wrapper_cls=Wrapper):
        assert auto_wrap(model, min_num_params=4e1) is model
        with pytest.raises(ValueError, match="both"):
            auto_wrap(model, size_policy(1), min_num_params=1)
    assert [type(child) for child in model] == [Wrapper, Wrapper, nn.Linear]
    assert model[0].kwargs == {}


def test_tagged_modules_are_wrapped_with_their_own_arguments():
    model = linears(2, 2)
    model[1].wrapper_config = {"mixed_precision": False}
    with enable_wrap(name_policy(r"\d"), wrapper_cls=Wrapper, mixed_precision=True):
        auto_wrap(model)
    assert [each.kwargs for each in model] == [{"mixed_precision": True}, {"mixed_precision": False}]


def test_a_configuration_that_is_no_mapping_is_refused():
    module = nn.Linear(2, 2)
    module.wrapper_config = True
    with pytest.raises(TypeError, match="a Linear has True"), enable_wrap(wrapper_cls=Wrapper):
        wrap(module)


def test_a_shared_module_is_counted_and_wrapped_once():
    shared = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()), shared)
    assert plan_units(model, size_policy(17)) == []
    with enable_wrap(wrapper_cls=Wrapper):
        auto_wrap(model, size_policy(16))
    assert isinstance(model[0], Wrapper)
    assert model[0] is model[1][0] is model[2]
    assert model[0].module is shared


def test_a_tied_parameter_is_counted_once():
    model = Model()
    assert plan_units(model, size_policy(40)) == ["embed", "layers.0.mlp", "layers.0", "layers.1.mlp", "layers.1"]


def test_what_is_wrapped_already_is_left_alone():
    model = linears(4, 4)
    with enable_wrap(wrapper_cls=Wrapper):
        model[0] = first = wrap(model[0])
        auto_wrap(model, class_policy(nn.Linear))
        assert model[0] is first and isinstance(first.module, nn.Linear)
        assert isinstance(model[1], Wrapper)
        second = model[1]
        auto_wrap(model, size_policy(16))
        assert model[1] is second
        with pytest.raises(ValueError, match="got a Wrapper"):
            wrap(first)


def test_what_is_sharded_in_place_already_is_left_alone():
    model = nn.Sequential(linears(4, 4), nn.Linear(4, 4, bias=False))
    for param in model[0].parameters():
        set_shard(param, Shard("", (4, 4), 0, 16))
    assert plan_units(model, class_policy(nn.Linear)) == ["1"]
    assert plan_units(model, size_policy(17)) == []


def test_modules_are_sharded_in_place_children_first():
    model = Model()
    model.layers[1].wrapper_config = {"reshard_after_forward": False}
    assert fully_shard_modules(model, class_policy("Block"), reshard_after_forward=True) is model
    units = {unit.name: unit for unit in units_in(model)}
    assert list(units) == ["", "layers.0", "layers.1"]
    assert units[""].buffers[0].names == ["embed.weight"]
    assert [unit.reshard_after_forward for unit in units.values()] == [True, True, False]


def test_a_root_that_the_policy_selects_is_sharded_once():
    model = fully_shard_modules(linears(4, 4), size_policy(20))
    assert [unit.module for unit in units_in(model)] == [model]


def test_units_are_found_also_inside_an_empty_one():
    model = nn.Sequential(FullyShardedDataParallel(nn.Sequential(fully_shard(nn.Linear(2, 2)))), nn.Linear(2, 2))
    outer = model[0].module
    assert get_fsdp_instances(model) == [outer, outer[0]]
    assert get_fsdp_instances(model, skip_empty=True) == [outer[0]]
    assert get_fsdp_instances(nn.Linear(2, 2)) == []


def test_planning_changes_nothing():
    model = Model()
    before = copy.deepcopy(model)
    plan_units(model, size_policy(0))
    assert repr(model) == repr(before)
    assert_equal(model, before)


def test_the_examples_in_the_docstring_hold():
    failed, tried = doctest.testmod(wrap_module)
    assert tried >= 5 and failed == 0


def test_a_parameter_that_cant_be_cut_is_refused_or_ignored():
    class Packed(torch.Tensor):
        """As the quantized weights of some libraries are."""

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    packed = nn.Parameter(torch.ones(3, 3).as_subclass(Packed), requires_grad=False)
    model[0].weight = packed
    with pytest.raises(TypeError, match=r"'0.weight' is a Packed, which can't be cut.*ignored_params="):
        fully_shard_modules(model, class_policy(nn.Linear))
    Packed.fsdp_pre_all_gather = None  # type: ignore[attr-defined]  # as FSDP2's extensions have
    with pytest.raises(TypeError, match=r"fsdp_pre_all_gather is not called here: .*communication=CommunicationPolicy"):
        fully_shard_modules(model, class_policy(nn.Linear))
    assert get_fsdp_instances(model) == [], "nothing was sharded"
    fully_shard_modules(model, class_policy(nn.Linear), ignored_params={packed})
    assert model[0].weight is packed and len(get_fsdp_instances(model)) == 3
    model(torch.randn(2, 3)).sum().backward()
    assert model[0].bias.grad is not None and packed.grad is None
