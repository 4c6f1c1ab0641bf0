"""root.py: what is prefetched, kept and reduced in which order, and that a pass that fails leaves no trace."""

import pytest
import torch
from fsdp_parity import noise, sharded
from torch import nn

from scale_check.exact import assert_equal
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.live_buffers import live_buffers
from scale_fsdp.runtime.unit import units_in


def stack(num_layers: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))


UNITS = ["0", "1", "2", "3", ""]


def follow_gathers(reshard: bool) -> list[list[str]]:
    """Returns, for each of three steps, the gathers that were started and the computations, in order."""
    model = sharded(stack(), UNITS, reshard_after_forward=reshard)
    names = {id(buffer): unit.name for unit in units_in(model) for buffer in unit.buffers}
    events: list[str] = []
    start = FlatBuffer.gather

    def note_gather(buffer: FlatBuffer, tag: int = 0, **options: bool) -> None:
        was = buffer.state
        start(buffer, tag, **options)
        if buffer.state is not was:
            events.append(f"gather {names[id(buffer)]}")

    FlatBuffer.gather = note_gather
    for name, layer in model.named_children():
        # Registered after the unit's own hook, so it runs when the parameters are there.
        layer.register_forward_pre_hook(lambda *_, name=name: events.append(f"forward {name}"))
    steps = []
    for _ in range(3):
        events.clear()
        loss = model(noise(2, 4)).sum()
        events.append("backward")
        loss.backward()
        steps.append(list(events))
    return steps


@pytest.mark.ranks(2)
def test_the_next_unit_is_gathered_while_a_unit_computes():
    first, *later = follow_gathers(True)
    assert [event for event in first if event.startswith(("gather", "backward"))] == [
        *(f"gather {unit}" for unit in "0123"),
        "backward",
        *(f"gather {unit}" for unit in "3210"),
    ]
    for step in later:
        forward, backward = step[: step.index("backward")], step[step.index("backward") :]
        assert forward == [
            "gather 0",
            *("gather 1", "forward 0"),
            *("gather 2", "forward 1"),
            *("gather 3", "forward 2"),
            "forward 3",
        ]
        assert backward == ["backward", *(f"gather {unit}" for unit in "3210")]


@pytest.mark.ranks(2)
def test_without_resharding_nothing_is_gathered_in_backward():
    steps = follow_gathers(False)
    for step in steps:
        assert step[step.index("backward") :] == ["backward"]


def gathered(model: nn.Module) -> str:
    return "".join(unit.name for unit in units_in(model) if unit.gathered)


@pytest.mark.ranks(2)
def test_an_evaluation_leaves_nothing_gathered():
    model = sharded(stack(), UNITS, reshard_after_forward=False)
    for _ in range(3):
        with torch.no_grad():
            model(noise(2, 4))
    without = gathered(model)
    model(noise(2, 4))
    assert (without, gathered(model)) == ("", "0123")


@pytest.mark.parametrize("reshard, stay", [(True, ""), (False, "0123")])
@pytest.mark.ranks(2, in_turn=True)
def test_without_resharding_units_stay_between_micro_batches(reshard: bool, stay: str) -> None:
    model = sharded(stack(), UNITS, reshard_after_forward=reshard)
    with model.no_sync():
        model(noise(2, 4)).sum().backward()
    assert gathered(model) == stay
    model(noise(2, 4)).sum().backward()
    assert gathered(model) == ""


@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.ranks(2, in_turn=True)
def test_a_failed_forward_leaves_nothing_gathered(position):
    plain = stack()
    model = sharded(plain, UNITS)
    for _ in range(3):
        model(noise(2, 4)).sum().backward()
    model.zero_grad()
    handle = model[position].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(noise(2, 4))
    assert gathered(model) == ""
    assert not sum(tensor.untyped_storage().nbytes() for kind, tensor in live_buffers() if kind != "shard")
    handle.remove()
    model(noise(2, 4)).sum().backward()
    plain(noise(2, 4)).sum().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert torch.allclose(model.clip_grad_norm_(1e9), norm)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.ranks(2, in_turn=True)
def test_what_is_written_to_param_data_is_seen(reshard):
    """Writes to `param.data`, which leaves no trace, after a forward whose backward never comes."""
    model, fresh = (sharded(stack(), UNITS, reshard_after_forward=reshard) for _ in range(2))
    model(noise(2, 4))
    for each in (model, fresh):
        for param in each.parameters():
            param.data.mul_(2)
    assert torch.equal(model(noise(2, 4)), fresh(noise(2, 4)))


@pytest.mark.ranks(2)
def test_units_may_be_called_by_themselves_beside_their_model():
    plain = stack()
    model = sharded(plain, UNITS)
    runs = (lambda m: m(noise(2, 4)), lambda m: m[1](noise(2, 4)), lambda m: m[3](m[2](noise(2, 4))))
    for _ in range(3):
        for run in runs:
            for each in (model, plain):
                each.zero_grad()
                run(each).sum().backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
            assert torch.allclose(model.clip_grad_norm_(1e9), norm)


@pytest.mark.ranks(2)
def test_in_backward_the_unit_before_is_fetched_ahead():
    """Which units are gathered, or being gathered, when the gradient of each one's output has been computed."""
    model = sharded(stack(), UNITS)
    seen: list[str] = []

    def watch(layer: nn.Module, name: str) -> None:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            output.register_hook(lambda _: seen.append(f"{name}: {gathered(model)}"))

        layer.register_forward_hook(hook)

    for name, layer in model.named_children():
        watch(layer, name)
    for _ in range(2):
        seen.clear()
        model(noise(2, 4)).sum().backward()
    assert seen == ["3: 23", "2: 12", "1: 01", "0: 0"]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.ranks(1, 2, in_turn=True)
def test_a_pass_that_fails_keeps_the_gradients_that_wait(where):
    """A failed pass between two micro-batches; the gradients are twice what one pass alone gives."""
    alone, model = sharded(stack(), UNITS), sharded(stack(), UNITS)
    alone(noise(2, 4)).sum().backward()
    with model.no_sync():
        model(noise(2, 4)).sum().backward()

    def fail(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if where == "forward":
            raise KeyError(where)
        output.register_hook(lambda _: {}[where])

    handle = model[1].register_forward_hook(fail)
    with pytest.raises(KeyError), model.no_sync():
        model(noise(2, 4)).sum().backward()
    handle.remove()
    saved = model.state_dict()
    with model.summon_full_params():
        assert_equal(dict(model.named_parameters()), saved)
    model(noise(2, 4)).sum().backward()
    for param, one in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(param.grad, 2 * one.grad)
    assert_equal(saved, stack())
