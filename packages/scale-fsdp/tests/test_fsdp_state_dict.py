"""State dicts are those of the plain model, whole and under its names, in both directions."""

import pytest
import torch
from fsdp_parity import adam, sharded
from torch import Tensor, nn

from scale_check.exact import assert_equal
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


@pytest.mark.ranks(1, 2)
def test_the_state_dict_is_the_plain_one_in_both_directions():
    def check_tied(state: dict[str, Tensor]) -> None:
        assert state["head.weight"] is state["embed.weight"], "a tied parameter has become two"

    for way, units in WAYS.items():
        for kwargs in (
            {},
            {"flatten_parameters": True},
            {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)},
        ):
            model = sharded(Model(0), units, **kwargs)
            assert_equal(model, Model(0))
            assert list(model.state_dict()) == list(Model(0).state_dict()), f"order {list(model.state_dict())}"
            check_tied(model.state_dict())
            result = model.load_state_dict(Model(3).state_dict())
            assert not result.missing_keys and not result.unexpected_keys, f"{way}: {result}"
            assert_equal(model, Model(3))
            plain = Model(1)
            plain.load_state_dict(model.state_dict())
            assert_equal(model, plain)


@pytest.mark.ranks(2)
def test_wrappers_at_several_levels_leave_no_trace_in_any_name():
    def wrapped(plain: nn.Module) -> nn.Module:
        """FullyShardedDataParallel at several levels."""
        plain.body[0] = FullyShardedDataParallel(plain.body[0])
        plain.body = FullyShardedDataParallel(plain.body)
        plain.embed = FullyShardedDataParallel(plain.embed)
        return FullyShardedDataParallel(plain)

    model, plain = wrapped(Model(0)), Model(0)
    assert_equal(model, plain)
    for ours, theirs in (
        (list(model.state_dict()), list(plain.state_dict())),
        ([name for name, _ in model.named_parameters()], [name for name, _ in plain.named_parameters()]),
        ([name for name, _ in model.named_buffers()], [name for name, _ in plain.named_buffers()]),
    ):
        assert ours == theirs, f"{ours} instead of {theirs}"
    assert not any("module" in name.split(".") for name, _ in model.named_modules())
    model.load_state_dict(Model(4).state_dict())
    assert_equal(model, Model(4))
    inner = model.body.state_dict()
    assert list(inner) == list(Model(0).body.state_dict()), f"of a unit inside: {list(inner)}"
    model.body.load_state_dict(Model(5).body.state_dict())
    assert_equal(model.body, Model(5).body)


@pytest.mark.ranks(1, 2)
def test_a_module_inside_a_unit_has_the_plain_state_dict_too():
    """`model.body` is no unit, but inside of one."""
    for kwargs in ({}, {"flatten_parameters": True}):
        model = sharded(Model(0), ["body.0", ""], **kwargs)
        assert_equal(model.body, Model(0).body)
        assert_equal(model.head, Model(0).head)
        result = model.body.load_state_dict(Model(3).body.state_dict())
        assert result.missing_keys == result.unexpected_keys == []
        assert_equal(model.body, Model(3).body)
        assert_equal(model.embed, Model(0).embed)
        with pytest.raises(RuntimeError, match=r"2\.weight"):
            model.body.load_state_dict({**Model(3).body.state_dict(), "2.weight": torch.zeros(6, 5)})


@pytest.mark.ranks(2)
def test_a_sharded_model_inside_a_plain_parent():
    plain = nn.Sequential(Model(0), nn.Linear(2, 2))
    parent = nn.Sequential(FullyShardedDataParallel(Model(0)), nn.Linear(2, 2))
    parent[1].load_state_dict(plain[1].state_dict())
    assert_equal(parent, plain)
    other = nn.Sequential(Model(6), nn.Linear(2, 2))
    parent.load_state_dict(other.state_dict())
    assert_equal(parent, other)


@pytest.mark.ranks(2)
def test_strict_loading_names_what_loose_loading_returns():
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

    model = sharded(Model(0), ["body.0", ""])
    messages = break_it(model)
    state = Model(2).state_dict()
    state["extra"] = torch.zeros(1)
    del state["scale"]
    result = model.load_state_dict(state, strict=False)
    messages, loose = (messages, [*result.missing_keys, *result.unexpected_keys])
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


@pytest.mark.ranks(1, 2)
def test_loading_between_forward_and_backward_is_an_error():
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
    message = str(caught.value)
    assert "loss.backward() first" in message


@pytest.mark.ranks(2)
def test_what_was_loaded_is_what_computes():
    for reshard in (True, False):
        model = sharded(Model(0), ["body", ""], reshard_after_forward=reshard).eval()
        model(TOKENS)  # leaves parameters gathered, without resharding
        model.load_state_dict(Model(2).state_dict())
        assert torch.equal(model(TOKENS), Model(2).eval()(TOKENS)), f"old weights, reshard {reshard}"


def test_assign_is_refused():
    model = fully_shard(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="local shards"):
        model.load_state_dict(nn.Linear(3, 3).state_dict(), assign=True)


def test_a_half_precision_checkpoint_loads_into_fp32_shards():
    model = sharded(nn.Linear(3, 3), [""])
    half = {name: tensor.half() for name, tensor in nn.Linear(3, 3).state_dict().items()}
    model.load_state_dict(half)
    assert all(torch.equal(tensor, half[name].float()) for name, tensor in model.state_dict().items())
