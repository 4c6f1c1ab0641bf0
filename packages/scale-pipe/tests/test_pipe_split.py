"""Stages that run one after another are the model: its outputs, gradients, random numbers and names, to the bit."""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from split_models import Tower, run_in_turn
from torch import Tensor, nn

from scale_checkpoint import checkpoint_wrapper
from scale_pipe import shared_parameters, split

INPUT = torch.linspace(-1, 1, 20).view(5, 4)


def assert_stages_are_the_model(
    model: nn.Module,
    cuts: Sequence[str],
    run: Callable[[Callable[..., Tensor]], Tensor],
    hold: Mapping[str, int | Sequence[int]] | None = None,
) -> list[nn.Module]:
    """Runs the model and its stages twice from the same random numbers; everything has to be the same."""
    model.zero_grad()
    plain = copy.deepcopy(model)
    stages = split(model, cuts, hold=hold)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = run(plain)
        expected.sum().backward()
        drawn = torch.rand(1)
        torch.manual_seed(seed)
        output = run(lambda *args, **kwargs: run_in_turn(stages, *args, **kwargs))
        output.sum().backward()
        assert torch.equal(output, expected)
        assert torch.equal(torch.rand(1), drawn)
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        assert torch.equal(one.grad, other.grad), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    keys = {key for stage in stages for key in stage.state_dict()}
    assert keys == set(plain.state_dict())
    return stages


@pytest.mark.parametrize(
    ("odd", "cuts"),
    [
        ("", ["blocks.0"]),
        ("", ["blocks.1", "blocks.3"]),
        ("", ["dropout", "blocks.2", "head"]),
        ("forwards", ["blocks.1", "head"]),
        ("recomputed", ["blocks.1", "blocks.3"]),
        ("straight", ["blocks.0.0", "blocks.1.2", "blocks.3.1"]),
        ("straight", ["blocks.3", "blocks.3.1", "blocks.3.2"]),
    ],
)
def test_a_model_with_a_forward_of_its_own(odd: str, cuts: list[str]) -> None:
    assert_stages_are_the_model(Tower(odd), cuts, lambda model: model(INPUT, mask=INPUT[:, :1] > 0))


def test_stages_run_in_inference_mode_and_then_train() -> None:
    model = Tower().eval()
    stages = split(model, ["blocks.1", "blocks.3"])
    with torch.inference_mode():
        expected = run_in_turn(stages, INPUT)
    output = run_in_turn(stages, INPUT)
    output.sum().backward()
    assert torch.equal(output, expected) and torch.equal(model(INPUT), expected)


def test_torchs_transformer_has_a_memory_for_each_layer() -> None:
    source, target = torch.rand(2, 4, 8), torch.rand(2, 3, 8)
    model = nn.Transformer(8, 2, 2, 2, dim_feedforward=8, dropout=0.1, batch_first=True)
    cuts = ["encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]
    assert_stages_are_the_model(model, cuts, lambda model: model(source, target))
    for stage in (stages := split(model.eval(), cuts)):
        stage.eval()
    with torch.no_grad():
        assert torch.equal(run_in_turn(stages, source, target), model(source, target))


def test_random_numbers_drawn_for_an_input_are_drawn_once() -> None:
    assert_stages_are_the_model(Tower("random input"), ["blocks.1", "blocks.3"], lambda model: model(INPUT))


@pytest.mark.parametrize(
    ("odd", "hold"),
    [("parameter", {"scale": (0, 2)}), ("called again", {"embed": (0, 2)}), ("tied", {"embed": [0, 2]})],
)
def test_what_several_stages_use_is_held_by_all_of_them(odd: str, hold: Mapping[str, Sequence[int]]) -> None:
    model = Tower(odd)
    if odd == "tied":
        model.head.requires_grad_(False)
        del model.head
        model.head = nn.Identity()  # type: ignore[assignment]
    stages = assert_stages_are_the_model(model, ["blocks.1", "blocks.3"], lambda model: model(INPUT), hold)
    shared = shared_parameters(stages)
    assert [[stage for stage, _ in places] for places in shared] == [[0, 2]] * len(shared)
    assert {name.split(".")[0] for places in shared for _, name in places} == set(hold)


def test_a_module_used_late_is_held_where_it_is_used() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.head(self.second(self.first(x)))
            return output

    stages = assert_stages_are_the_model(Late(), ["second"], lambda model: model(INPUT), {"head": 1})
    assert [list(stage.state_dict()) for stage in stages] == [
        ["first.weight", "first.bias"],
        ["head.weight", "head.bias", "second.weight", "second.bias"],
    ]


def test_a_sequence_is_sliced_and_its_layers_keep_their_names() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    stages = assert_stages_are_the_model(layers, ["2", "3"], lambda model: model(INPUT))
    assert all(isinstance(stage, nn.Sequential) for stage in stages) and len(stages) == 3
    assert [[name for name, _ in stage.named_children()] for stage in stages] == [["0", "1"], ["2"], ["3"]]
    nested = nn.Sequential(layers, nn.Linear(4, 2))
    assert_stages_are_the_model(nested, ["0.2"], lambda model: model(INPUT))
    tanh = nn.Tanh()  # One layer in several places.
    twice = nn.Sequential(nn.Linear(4, 4), tanh, nn.Linear(4, 4), tanh)
    stages = assert_stages_are_the_model(twice, ["2"], lambda model: model(INPUT))
    assert [list(stage._modules) for stage in stages] == [["0", "1"], ["2", "3"]]


def test_weights_tied_over_stages_are_found_under_both_names() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    assert isinstance(layers[0], nn.Linear) and isinstance(layers[2], nn.Linear)
    layers[2].weight = layers[0].weight
    assert shared_parameters(split(layers, ["1", "2"])) == [[(0, "0.weight"), (2, "2.weight")]]
    assert shared_parameters(split(layers, [])) == []


def test_a_stage_keeps_class_and_attributes_and_its_part_only() -> None:
    model = Tower()
    first, second = split(model, ["blocks.2"])
    assert type(first) is Tower and isinstance(second, Tower)
    assert first.embed is model.embed and second.head is model.head
    assert first.blocks[0][0] is model.blocks[0][0]  # type: ignore[index]
    own = {id(parameter) for parameter in second.parameters()}
    assert own == {id(parameter) for module in (*model.blocks[2:], model.head) for parameter in module.parameters()}
    assert isinstance(second.embed, nn.Linear) and second.embed.in_features == 4
    assert second.embed.weight.shape == (6, 4) and second.scale.dtype == torch.float32
    assert sum(parameter.numel() for parameter in second.embed.parameters()) == 0


def test_a_model_on_the_meta_device_never_becomes_whole() -> None:
    with torch.device("meta"):
        model = Tower()
    first, second = split(model, ["blocks.2"])
    second.to_empty(device="cpu")
    assert first.embed.weight.is_meta  # type: ignore[union-attr]
    assert all(not tensor.is_meta for tensor in second.parameters())


def test_stages_are_copied_and_pickled() -> None:
    model = Tower().eval()
    stages = split(model, ["blocks.1", "blocks.3"])
    expected = model(INPUT)
    for others in (copy.deepcopy(stages), pickle.loads(pickle.dumps(stages))):
        for parameter in model.parameters():
            parameter.data.zero_()
        assert torch.equal(run_in_turn(others, INPUT), expected)
        for own, other in zip(stages, others, strict=True):
            own.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*blocks\.0\.0\.weight.*blocks\.0\.2\.running_mean"):
        stages[2].load_state_dict({**stages[0].state_dict(), **stages[2].state_dict()})


def test_hooks_and_checkpoints_of_a_split_model_work() -> None:
    model = Tower()
    checkpoint_wrapper(model.blocks[2])
    stages = assert_stages_are_the_model(model, ["blocks.1", "blocks.3"], lambda model: model(INPUT))
    checkpoint_wrapper(stages[1])
    checkpoint_wrapper(stages[2].blocks[3])  # type: ignore[index, arg-type]
    model.zero_grad()
    torch.manual_seed(0)
    run_in_turn(stages, INPUT).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

    seen: list[object] = []
    model = Tower()
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    output = run_in_turn(split(model, ["blocks.1", "blocks.3"]), INPUT)
    assert seen[0] is INPUT and seen[1] is output and len(seen) == 2


def test_only_the_inputs_that_are_asked_for_are_passed_on() -> None:
    image, labels = torch.rand(5, 4), torch.rand(5, 6)

    class Labeled(Tower):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            hidden = self.embed(x).view(len(x), -1)
            for block in self.blocks:
                hidden = block(hidden)
            return ((hidden - labels) ** 2).mean(1)

    model = Labeled().eval()
    expected = model(image, labels)
    for pass_on, num_tensors in ((None, 3), (["labels"], 2)):
        stages = split(model, ["blocks.1", "blocks.3"], pass_on=pass_on)
        assert len(stages[0](image, labels).tensors) == num_tensors
        assert torch.equal(run_in_turn(stages, image, labels), expected)
        assert torch.equal(run_in_turn(stages, labels=labels, x=image), expected)
        # A stage may have inputs of its own: only the last one needs labels.
        handed = stages[1](stages[0](image, labels=None))
        assert torch.equal(stages[2](handed, labels=labels), expected)
    with pytest.raises(ValueError, match=r"pass_on names 'label', which .*; did you mean 'labels'"):
        split(model, ["blocks.1"], pass_on=["label"])


def test_a_frame_whose_forward_was_replaced_is_refused() -> None:
    model = nn.Sequential(Tower(), nn.Linear(3, 3))
    checkpoint_wrapper(model[0])
    with pytest.raises(ValueError, match=r"'0' is cut through, but its forward was replaced \(CheckpointedForward\)"):
        split(model, ["0.blocks.2"])


def test_a_sequence_keeps_its_hooks_and_the_modes_of_its_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[1].eval()
    assert [[layer.training for layer in stage] for stage in split(model, ["1"])] == [[True], [False, True]]  # type: ignore[attr-defined]
    model.register_forward_hook(lambda module, args, output: output * 3)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert_stages_are_the_model(model, ["1"], lambda run: run(INPUT))


def test_names_that_are_no_list_are_refused() -> None:
    wrong: list[Any] = [({"cuts": None}, "cuts are a list"), ({"pass_on": "mask"}, "pass_on is a list of names")]
    wrong += [
        ({"hold": ["head"]}, "hold gives the stage of each name"),
        ({"hold": {"head": 1.0}}, "is the number of a stage"),
    ]
    for options, message in wrong:
        with pytest.raises(TypeError, match=message):
            split(Tower(), **{"cuts": ["blocks.1"], **options})
    function: Any = print
    with pytest.raises(TypeError, match=r"the model that is cut is an nn.Module, but is builtin_function_or_method"):
        split(function, ["blocks.1"])
