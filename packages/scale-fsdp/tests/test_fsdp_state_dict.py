"""State dicts are those of the plain model, whole and under its names, in both directions."""

import pytest
import torch
from fsdp_beside import adam, sharded
from fsdp_cases import differing_weights
from torch import Tensor, nn

from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((2,), float(seed)))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


TOKENS = torch.tensor([1, 2, 5])
WAYS = {"root": [""], "units": ["embed", "body.0", "body", ""], "head first": ["head", "body", ""]}


def wrapped(plain: nn.Module) -> nn.Module:
    """FullyShardedDataParallel at several levels."""
    plain.body[0] = FullyShardedDataParallel(plain.body[0])
    plain.body = FullyShardedDataParallel(plain.body)
    plain.embed = FullyShardedDataParallel(plain.embed)
    return FullyShardedDataParallel(plain)


def go_both_ways() -> list[str]:
    wrong = []
    for way, units in WAYS.items():
        for kwargs in (
            {},
            {"flatten_parameters": True},
            {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)},
        ):
            model = sharded(Model(0), units, **kwargs)
            wrong += differing_weights(model, Model(0))
            if list(model.state_dict()) != list(Model(0).state_dict()):
                wrong.append(f"order {list(model.state_dict())}")
            wrong += check_tied(model.state_dict())
            result = model.load_state_dict(Model(3).state_dict())
            if result.missing_keys or result.unexpected_keys:
                wrong.append(f"{way}: {result}")
            wrong += differing_weights(model, Model(3))
            plain = Model(1)
            plain.load_state_dict(model.state_dict())
            wrong += differing_weights(model, plain)
    return wrong


def check_tied(state: dict[str, Tensor]) -> list[str]:
    return [] if state["head.weight"] is state["embed.weight"] else ["a tied parameter has become two"]


@pytest.mark.parametrize("world", [1, 2])
def test_the_state_dict_is_the_plain_one_in_both_directions(world):
    assert not any(run_ranks(go_both_ways, world))


def wrap_at_several_levels() -> list[str]:
    model, plain = wrapped(Model(0)), Model(0)
    wrong = differing_weights(model, plain)
    for ours, theirs in (
        (list(model.state_dict()), list(plain.state_dict())),
        ([name for name, _ in model.named_parameters()], [name for name, _ in plain.named_parameters()]),
        ([name for name, _ in model.named_buffers()], [name for name, _ in plain.named_buffers()]),
    ):
        if ours != theirs:
            wrong.append(f"{ours} instead of {theirs}")
    if any("module" in name.split(".") for name, _ in model.named_modules()):
        wrong.append(f"modules {[name for name, _ in model.named_modules()]}")
    model.load_state_dict(Model(4).state_dict())
    wrong += differing_weights(model, Model(4))
    inner = model.body.state_dict()
    if list(inner) != list(Model(0).body.state_dict()):
        wrong.append(f"of a unit inside: {list(inner)}")
    model.body.load_state_dict(Model(5).body.state_dict())
    return wrong + differing_weights(model.body, Model(5).body)


def test_wrappers_at_several_levels_leave_no_trace_in_any_name():
    assert not any(run_ranks(wrap_at_several_levels, 2))


def ask_past_the_unit() -> list[str]:
    """`model.body` is no unit, but inside of one."""
    wrong = []
    for kwargs in ({}, {"flatten_parameters": True}):
        model = sharded(Model(0), ["body.0", ""], **kwargs)
        wrong += differing_weights(model.body, Model(0).body)
        wrong += differing_weights(model.head, Model(0).head)
        result = model.body.load_state_dict(Model(3).body.state_dict())
        if result.missing_keys or result.unexpected_keys:
            wrong.append(f"{result}")
        wrong += differing_weights(model.body, Model(3).body)
        wrong += differing_weights(model.embed, Model(0).embed)
        try:
            model.body.load_state_dict({**Model(3).body.state_dict(), "2.weight": torch.zeros(6, 5)})
            wrong.append("another shape was loaded")
        except RuntimeError as error:
            if "2.weight" not in str(error):
                wrong.append(str(error))
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_a_module_inside_a_unit_has_the_plain_state_dict_too(world):
    assert not any(run_ranks(ask_past_the_unit, world))


def nest_in_a_plain_parent() -> list[str]:
    plain = nn.Sequential(Model(0), nn.Linear(2, 2))
    parent = nn.Sequential(FullyShardedDataParallel(Model(0)), nn.Linear(2, 2))
    parent[1].load_state_dict(plain[1].state_dict())
    wrong = differing_weights(parent, plain)
    other = nn.Sequential(Model(6), nn.Linear(2, 2))
    parent.load_state_dict(other.state_dict())
    return wrong + differing_weights(parent, other)


def test_a_sharded_model_inside_a_plain_parent():
    assert not any(run_ranks(nest_in_a_plain_parent, 2))


def break_it(model: nn.Module) -> dict[str, str]:
    messages = {}
    for what, change in {
        "missing": lambda state: state.pop("body.0.weight"),
        "unexpected": lambda state: state.update({"body.9.weight": torch.zeros(1)}),
        "shape": lambda state: state.update({"body.0.weight": torch.zeros(2, 2)}),
        "not a tensor": lambda state: state.update({"body.0.weight": "text"}),
    }.items():
        state = Model(0).state_dict()
        change(state)
        try:
            model.load_state_dict(state)
            messages[what] = ""
        except RuntimeError as error:
            messages[what] = str(error)
    return messages


def report_errors() -> tuple[dict[str, str], list[str]]:
    model = sharded(Model(0), ["body.0", ""])
    messages = break_it(model)
    state = Model(2).state_dict()
    state["extra"] = torch.zeros(1)
    del state["scale"]
    result = model.load_state_dict(state, strict=False)
    return messages, [*result.missing_keys, *result.unexpected_keys]


def test_strict_loading_names_what_is_wrong_and_loose_loading_returns_it():
    for messages, loose in run_ranks(report_errors, 2):
        assert "body.0.weight" in messages["missing"]
        assert "body.9.weight" in messages["unexpected"]
        assert "body.0.weight" in messages["shape"] and "(6, 5)" in messages["shape"] and "(2, 2)" in messages["shape"]
        assert "body.0.weight" in messages["not a tensor"]
        assert loose == ["scale", "extra"]


def test_prefix_and_keep_vars_work_as_in_torch():
    model, plain = sharded(Model(0), ["body", ""]), Model(0)
    assert list(model.state_dict(prefix="a.b.")) == list(plain.state_dict(prefix="a.b."))
    kept = model.state_dict(keep_vars=True)
    assert list(kept) == list(plain.state_dict(keep_vars=True))
    assert all(torch.equal(kept[name], tensor) for name, tensor in plain.state_dict().items())


def test_what_was_saved_does_not_change_with_the_next_step():
    model = sharded(Model(0), ["body", ""])
    saved = model.state_dict()
    model(TOKENS).sum().backward()
    adam(model.parameters()).step()
    assert all(torch.equal(saved[name], p) for name, p in Model(0).named_parameters())


def load_between_forward_and_backward() -> str:
    model = sharded(Model(0), ["body", ""])
    loss = model(TOKENS).sum()
    model.load_state_dict(Model(1).state_dict())
    with pytest.raises(RuntimeError, match="changed between its forward and its backward") as caught:
        loss.backward()
    model.zero_grad()
    plain = Model(1)
    for each in (model, plain):
        each(TOKENS).square().mean().backward()
    expected = {name: p.grad.norm() for name, p in plain.named_parameters()}
    norm = model.clip_grad_norm_(1e9)
    assert torch.allclose(norm, torch.stack(list(expected.values())).norm())
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
def test_loading_between_forward_and_backward_is_an_error_and_training_goes_on(world):
    for message in run_ranks(load_between_forward_and_backward, world):
        assert "loss.backward() first" in message


def load_and_evaluate() -> list[str]:
    wrong = []
    for reshard in (True, False):
        model = sharded(Model(0), ["body", ""], reshard_after_forward=reshard).eval()
        model(TOKENS)  # leaves parameters gathered, without resharding
        model.load_state_dict(Model(2).state_dict())
        if not torch.equal(model(TOKENS), Model(2).eval()(TOKENS)):
            wrong.append(f"old weights, reshard {reshard}")
    return wrong


def test_what_was_loaded_is_what_computes():
    assert not any(run_ranks(load_and_evaluate, 2))


def test_assign_is_refused():
    model = fully_shard(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="local shards"):
        model.load_state_dict(nn.Linear(3, 3).state_dict(), assign=True)


def test_a_half_precision_checkpoint_loads_into_fp32_shards():
    model = sharded(nn.Linear(3, 3), [""])
    half = {name: tensor.half() for name, tensor in nn.Linear(3, 3).state_dict().items()}
    model.load_state_dict(half)
    assert all(torch.equal(tensor, half[name].float()) for name, tensor in model.state_dict().items())
