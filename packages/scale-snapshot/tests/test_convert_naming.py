import json
import math

import pytest
import torch

from scale_snapshot.convert.lazy_tensor import LazyTensor
from scale_snapshot.convert.naming import SNAPSHOT_MARK, Renaming, renamed, stored_state
from scale_snapshot.convert.torch_files import of_tensor
from scale_snapshot.format.state_codec import decode_extra


def lazy(value: float = 1.0) -> LazyTensor:
    return of_tensor(torch.full((2,), value))


MODEL = {"a.weight": lazy(1), "b.weight": lazy(2)}
GROUP = {"lr": 0.1, "betas": (0.9, 0.99)}


def test_a_plain_state_dict_is_a_model():
    assert list(stored_state(MODEL, Renaming()).tensors) == ["model.a.weight", "model.b.weight"]


@pytest.mark.parametrize("word", ["model", "state_dict", "model_state_dict", "module"])
def test_the_model_is_found_under_its_usual_names(word):
    state = stored_state({"epoch": 2, word: MODEL, "global_step": 7, "args": {"lr": [1, None]}}, Renaming())
    assert list(state.tensors) == ["model.a.weight", "model.b.weight"]
    assert state.step == 7 and state.extra == {"epoch": 2, "global_step": 7, "args": {"lr": [1, None]}}


def test_a_model_under_another_name_is_named_or_listed():
    tree = {"generator": MODEL, "epoch": 1}
    assert list(stored_state(tree, Renaming(model="generator")).tensors) == ["model.a.weight", "model.b.weight"]
    with pytest.raises(ValueError, match=r"it has no dict 'net'; it has generator, epoch"):
        stored_state(tree, Renaming(model="net"))


def test_names_change_by_their_beginning_the_longest_first():
    tree = {"module.a": lazy(), "module.head.b": lazy(), "c": lazy()}
    state = stored_state(tree, Renaming([("module.", ""), ("module.head.", "out.")]))
    assert list(state.tensors) == ["model.a", "model.out.b", "model.c"]


def test_two_tensors_that_would_get_one_name_are_an_error():
    with pytest.raises(ValueError, match=r"two tensors would be named model\.a: rename one of them"):
        stored_state({"x.a": lazy(), "a": lazy()}, Renaming([("x.", "")]))


@pytest.mark.parametrize("by", ["names", "param_names"])
def test_an_optimizers_state_by_name_is_kept(by):
    slots = {"step": of_tensor(torch.tensor(3.0)), "exp_avg": lazy(), "count": 4}
    optimizer = (
        {"state": {"m.a": slots}, "param_groups": [{**GROUP, "params": ["m.a"]}]}
        if by == "names"
        else {"state": {0: slots}, "param_groups": [{**GROUP, "params": [0], "param_names": ["m.a"]}]}
    )
    state = stored_state({"model": {"m.a": lazy()}, "optimizer": optimizer}, Renaming([("m.", "")]))
    assert list(state.tensors) == ["model.a", "optim.a.step", "optim.a.exp_avg"]
    groups = {key: value for key, value in state.values.items() if key.startswith("optim.groups[0].")}
    assert state.values["optim.a.count"] == 4
    assert list(groups.values()) == [{"lr": 0.1, "betas": [0.9, 0.99], "params": ["a"]}]


def test_a_flattened_optimizer_state_is_put_together():
    optimizer = {
        "state.a.exp_avg": lazy(),
        "param_groups.a.lr": 0.1,
        "state.b.w.exp_avg": lazy(),
        "param_groups.b.w.lr": 0.2,
    }
    state = stored_state({"model": MODEL, "optimizer": optimizer}, Renaming())
    assert {"optim.a.exp_avg", "optim.b.w.exp_avg"} <= state.tensors.keys()
    assert [value for key, value in state.values.items() if "groups" in key] == [
        {"lr": 0.1, "params": ["a"]},
        {"lr": 0.2, "params": ["b.w"]},
    ]


def test_an_optimizer_state_by_number_is_refused_with_a_fix():
    optimizer = {"state": {0: {"exp_avg": lazy()}}, "param_groups": [{**GROUP, "params": [0]}]}
    with pytest.raises(ValueError, match=r"parameters by number \(0\) .* --skip optimizer, or save it by names"):
        stored_state({"model": MODEL, "optimizer": optimizer}, Renaming())
    assert len(stored_state({"model": MODEL, "optimizer": optimizer}, Renaming(skip=["optimizer"])).tensors) == 2


@pytest.mark.parametrize(
    "tree, words",
    [
        ({"model": MODEL, "rng": lazy()}, "rng is a tensor outside of the model, and would be lost: .* --skip rng"),
        ({"model": MODEL, "args": {"x": object()}}, r"args\.x is a object, and would be lost: .* --skip args\.x"),
        ({"model": {**MODEL, "n": 3}}, r"model\.n is a int and not a tensor, so it would be lost: .* --skip model\.n"),
        ({"epoch": 3}, "no tensors by name"),
        ({"model": MODEL, "optimizer": {"lr": 3}}, r"optimizer is not an optimizer's state_dict\(\)"),
    ],
)
def test_nothing_is_lost_without_a_word(tree, words):
    with pytest.raises(ValueError, match=words):
        stored_state(tree, Renaming())


def test_what_is_skipped_is_left_out_at_any_depth():
    tree = {"model": {**MODEL, "n": 3}, "args": {"x": object(), "y": 1}, "rng": lazy()}
    state = stored_state(tree, Renaming(skip=["model.n", "args.x", "rng"]))
    assert len(state.tensors) == 2 and state.extra == {"args": {"y": 1}}


def test_what_is_not_finite_is_kept_beside_the_model():
    extra = stored_state({"model": MODEL, "best": math.inf, "args": {"loss": math.nan}}, Renaming()).extra
    found = decode_extra(json.loads(json.dumps(extra, allow_nan=False)))
    assert found["best"] == math.inf and math.isnan(found["args"]["loss"])


def test_tied_names_are_told():
    shared = torch.ones(3)
    tree = {"embed": of_tensor(shared), "head": of_tensor(shared), "part": of_tensor(shared[:2])}
    assert stored_state(tree, Renaming()).tied == {"model.head": "model.embed"}


def test_what_was_a_snapshot_is_one_again_with_other_names():
    mark = {"step": 5, "values": {"optim.groups[0].x": {"lr": 1, "params": ["m.a"]}}, "extra": {"k": 1}}
    tree = {"model.m.a": lazy(), "optim.m.a.exp_avg": lazy(), SNAPSHOT_MARK: json.dumps(mark)}
    state = stored_state(tree, Renaming([("m.", "")]))
    assert list(state.tensors) == ["model.a", "optim.a.exp_avg"] and (state.step, state.extra) == (5, {"k": 1})
    assert [value["params"] for value in state.values.values()] == [["a"]]
    assert renamed(state, Renaming(skip=["optim"])).tensors.keys() == {"model.a"}
