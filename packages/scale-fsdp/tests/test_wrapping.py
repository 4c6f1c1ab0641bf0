"""Which modules a policy makes units, and what is put around them; a stand-in takes the place of the real wrapper."""

import copy
import doctest
import functools
import re
import sys
import threading
import types
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import scale_fsdp.wrapping as wrap_module
from scale_core.shard import Shard, mark
from scale_fsdp.wrapping import (
    auto_wrap,
    class_policy,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    fully_shard_modules,
    name_policy,
    plan_units,
    size_policy,
    wrap,
)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **kwargs: object) -> None:
        super().__init__()
        self.module = module
        self.kwargs = kwargs


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


@pytest.fixture
def sharded(monkeypatch) -> Iterator[list[tuple[nn.Module, dict[str, object]]]]:
    """What `fully_shard` was called with, in order."""
    calls: list[tuple[nn.Module, dict[str, object]]] = []
    module = types.ModuleType("scale_fsdp.sharding")
    module.fully_shard = lambda part, **kwargs: calls.append((part, kwargs))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scale_fsdp.sharding", module)
    return calls


def test_outside_of_the_context_modules_come_back_as_they_are():
    model = Model()
    assert wrap(model, anything=1) is model
    assert auto_wrap(model, class_policy(Block)) is model
    assert not any(isinstance(module, Wrapper) for module in model.modules())


def test_arguments_of_the_call_go_before_those_of_the_module_and_those_before_the_contexts():
    module = nn.Linear(2, 2)
    module.wrapper_config = {"b": "module", "c": "module"}
    with enable_wrap(wrapper_cls=Wrapper, a="context", b="context", c="context"):
        wrapped = wrap(module, c="call")
    assert wrapped.module is module
    assert wrapped.kwargs == {"a": "context", "b": "module", "c": "call"}


def test_the_default_wrapper_is_fully_sharded_data_parallel(monkeypatch):
    stand_in = types.ModuleType("scale_fsdp.wrapper")
    stand_in.FullyShardedDataParallel = Wrapper
    monkeypatch.setitem(sys.modules, "scale_fsdp.wrapper", stand_in)
    with enable_wrap(flatten_parameters=True):
        assert wrap(nn.Linear(2, 2)).kwargs == {"flatten_parameters": True}


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


def test_children_are_wrapped_before_their_parents_and_keep_their_places():
    model = nn.Sequential(linears(4, 4), nn.ReLU(), nn.Linear(4, 4))
    seen = []

    class Recorder(Wrapper):
        def __init__(self, module, **kwargs):
            super().__init__(module, **kwargs)
            seen.append(module)

    modules = [model[0][0], model[0][1], model[0], model[2], model]

    def policy(*, module, recurse, unwrapped_params, module_is_root):
        return recurse or not isinstance(module, nn.ReLU)

    with enable_wrap(policy, wrapper_cls=Recorder):
        wrapped = auto_wrap(model, reshard=False)
    assert seen == modules
    assert wrapped.module is model and wrapped.kwargs == {"reshard": False}
    assert [type(child) for child in model] == [Recorder, nn.ReLU, Recorder]
    assert [child.module for child in model[0].module] == modules[:2]


def test_the_default_policy_wraps_what_is_large_and_counts_without_the_units_inside():
    policy = functools.partial(default_auto_wrap_policy, min_num_params=40)
    assert plan_units(linears(7, 7), policy) == ["0", "1"]
    assert plan_units(linears(5, 5), policy) == [""]
    assert plan_units(linears(7, 5, 5), policy) == ["0", ""]
    assert plan_units(linears(3, 3), policy) == []
    assert plan_units(linears(3), functools.partial(policy, skip_params_check_for_root=True)) == [""]


def test_lists_of_modules_are_entered_but_not_wrapped_and_attention_is_neither():
    model = nn.ModuleDict({"list": nn.ModuleList(linears(7, 7)), "attention": nn.MultiheadAttention(10, 1)})
    assert plan_units(model, size_policy(40)) == ["list.0", "list.1"]
    policy = functools.partial(default_auto_wrap_policy, min_num_params=40)
    assert "attention.out_proj" in plan_units(model, functools.partial(policy, force_leaf_modules=()))
    assert plan_units(model, functools.partial(policy, exclude_wrap_modules={nn.Linear})) == ["list", ""]


def test_the_default_policys_sets_may_be_changed_in_place():
    default_auto_wrap_policy.EXCLUDE_WRAP_MODULES.add(nn.Linear)
    try:
        assert plan_units(linears(7, 7), size_policy(40)) == [""]
    finally:
        default_auto_wrap_policy.EXCLUDE_WRAP_MODULES.remove(nn.Linear)


def test_a_policy_is_called_with_keywords_only_as_in_fairscale():
    calls = []

    def policy(*, module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
        calls.append((type(module).__name__, recurse, unwrapped_params, module_is_root))
        return recurse or isinstance(module, nn.Linear)

    assert plan_units(linears(2), policy) == ["0"]
    assert calls == [
        ("Sequential", True, 4, True),
        ("Linear", True, 4, False),
        ("Linear", False, 4, False),
        ("Sequential", False, 0, True),
    ]


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
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=Wrapper, mixed_precision=True):
        auto_wrap(model)
    assert isinstance(model[0], nn.Linear)
    assert model[1].kwargs == {"mixed_precision": False}


def test_a_class_is_chosen_by_type_by_subclass_or_by_name():
    class Wide(Block): ...

    model = nn.Sequential(Block(), Wide(), nn.Linear(2, 2))
    assert plan_units(model, class_policy(Block)) == ["0", "1"]
    assert plan_units(model, class_policy("Block", "OfAnotherModel")) == ["0", "1"]
    assert plan_units(model, class_policy("Wide", nn.Linear)) == [
        *("0.mlp.0", "0.mlp.2", "1.mlp.0", "1.mlp.2", "1", "2"),
    ]
    assert plan_units(model, class_policy("Wide")) == ["1"]


def test_children_of_attention_are_never_units_of_their_own_since_nothing_calls_them():
    model = nn.Sequential(Block())
    assert plan_units(model, class_policy(nn.Linear)) == ["0.mlp.0", "0.mlp.2"]
    assert plan_units(model, name_policy(r".*attn.*")) == ["0.attn"]


def test_names_are_matched_whole_and_lists_and_empty_modules_passed_over():
    model = Model()
    assert plan_units(model, name_policy(r"layers\.\d+")) == ["layers.0", "layers.1"]
    assert plan_units(model, name_policy(r"layers\.1", "embed")) == ["embed", "layers.1"]
    assert plan_units(model, name_policy(r"layers.*")) == [
        f"layers.{i}.{part}" for i in range(2) for part in ("attn", "mlp.0", "mlp.2")
    ]


def test_a_pattern_or_class_that_matches_nothing_is_an_error_with_near_names():
    model = Model()
    with pytest.raises(ValueError, match=r"'layer\\\\.\\\\d\+' matches the name of no module; near.*'layers.0'"):
        plan_units(model, name_policy(r"layers\.\d+", r"layer\.\d+"))
    with pytest.raises(ValueError, match="no module is a Blok; near names in the model: 'Block'"):
        plan_units(model, class_policy("Blok"))
    with pytest.raises(
        ValueError,
        match=re.escape(r"a ModuleList, which is never called; select what it holds: name_policy(r'layers\.[^.]+')"),
    ):
        plan_units(model, name_policy("layers"))


def test_bad_policies_say_what_was_expected():
    with pytest.raises(ValueError, match="at least one pattern"):
        name_policy()
    with pytest.raises(ValueError, match=r"'\(' is no regular expression"):
        name_policy("(")
    with pytest.raises(ValueError, match="at least one class"):
        class_policy()
    with pytest.raises(TypeError, match=r"class_policy\(\*names\)"):
        class_policy(["Block"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_num_params is -1"):
        size_policy(-1)
    with pytest.raises(TypeError, match="got 'Block'"):
        plan_units(Model(), "Block")  # type: ignore[arg-type]
    module = nn.Linear(2, 2)
    module.wrapper_config = True
    with pytest.raises(TypeError, match="that of a Linear is True"), enable_wrap(wrapper_cls=Wrapper):
        wrap(module)


def test_a_shared_module_is_counted_once_and_wrapped_once_at_all_its_places():
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
        mark(param, Shard("", (4, 4), 0, 16))
    assert plan_units(model, class_policy(nn.Linear)) == ["1"]
    assert plan_units(model, size_policy(17)) == []


def test_modules_are_sharded_in_place_children_first_and_the_root_around_the_rest(sharded):
    model = Model()
    model.layers[1].wrapper_config = {"reshard_after_forward": False}
    assert fully_shard_modules(model, class_policy("Block"), reshard_after_forward=True) is model
    assert [part for part, _ in sharded] == [model.layers[0], model.layers[1], model]
    assert [kwargs["reshard_after_forward"] for _, kwargs in sharded] == [True, False, True]


def test_the_root_is_sharded_once_where_the_policy_selects_it_too(sharded):
    model = linears(4, 4)
    fully_shard_modules(model, size_policy(20))
    assert [part for part, _ in sharded] == [model]


def test_planning_changes_nothing():
    model = Model()
    before = copy.deepcopy(model)
    plan_units(model, size_policy(0))
    assert repr(model) == repr(before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_the_examples_in_the_docstring_hold():
    failed, tried = doctest.testmod(wrap_module)
    assert tried >= 4 and failed == 0
