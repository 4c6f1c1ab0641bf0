"""A sequence is cut as the balance says, and a balance that does not fit says which numbers and what to call."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_pipe.partition.partition import partition
from scale_pipe.partition.partition_function import describe_layers

CPU = torch.device("cpu")


def layers(number: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(number)))


def test_partitions_hold_the_very_layers_under_their_own_names() -> None:
    module = layers()
    modules, balance, devices = partition(module, (1, 3), ["cpu", "cpu", "cpu"])
    assert [list(part._modules) for part in modules] == [["0"], ["1", "2", "3"]]
    assert modules[1][0] is module[1]
    assert balance == [1, 3] and devices == [CPU, CPU]
    assert [key for part in modules for key in part.state_dict()] == list(module.state_dict())


def test_each_partition_is_moved_to_its_device_by_default() -> None:
    moved = partition(layers(), [2, 2], ["cpu", "meta"]).modules
    assert [next(part.parameters()).device.type for part in moved] == ["cpu", "meta"]
    stays = partition(layers(), [2, 2], ["cpu", "meta"], move=False).modules
    assert all(not parameter.is_meta for part in stays for parameter in part.parameters())


def test_a_sequence_without_layers_has_no_partitions() -> None:
    assert partition(nn.Sequential(), [], [CPU]).modules == []


def test_a_layer_that_is_frozen_in_evaluation_mode_stays_so() -> None:
    module = layers()
    module[1].eval()
    parts = partition(module, [2, 2], [CPU] * 2).modules
    assert [layer.training for part in parts for layer in part] == [True, False, True, True]
    assert [part.training for part in parts] == [True, True]


def test_the_mode_is_kept() -> None:
    assert [part.training for part in partition(layers().eval(), [2, 2], [CPU] * 2).modules] == [False, False]


@pytest.mark.fault(88)
@pytest.mark.parametrize(
    ("balance", "error", "message"),
    [
        (
            None,
            ValueError,
            r"how many of the 4 layers each partition has.*balance_by_time\(3, module, sample\)",
        ),
        (
            [2, 1],
            ValueError,
            r"the balance \[2, 1\] places 3 layers, but the module has 4.*balance_by_time\(2,",
        ),
        ([], ValueError, r"the balance \[\] places 0 layers.*balance_by_time"),
        ([0, 4], ValueError, r"at least one layer, but balance is \[0, 4\].*balance_by_time"),
        ([-1, 5], ValueError, r"at least one layer, but balance is \[-1, 5\].*balance_by_time"),
        ([2.0, 2], TypeError, r"balance\[0\] is 2.0"),
        ([True, 3], TypeError, r"balance\[0\] is True"),
        (2, TypeError, r"a balance is a list.*, but is 2;.*balance_by_time\(2, module, sample\)"),
        ([1, 1, 1, 1], IndexError, r"too few devices to hold given partitions \(devices: 3, partitions: 4\)"),
    ],
)
def test_a_balance_that_does_not_fit_is_refused_with_a_fix(balance: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        partition(layers(), balance, [CPU] * 3)


def test_modules_that_cannot_be_partitioned_are_refused() -> None:
    not_sequential: Any = nn.Linear(2, 2)
    with pytest.raises(
        TypeError, match=r"module must be nn.Sequential to be partitioned, but is Linear.*scale_pipe.split"
    ):
        partition(not_sequential, [1], [CPU])
    layer = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"module with duplicate children is not supported: '0' and '2' are one Linear"
    ):
        partition(nn.Sequential(layer, nn.ReLU(), layer), [3], [CPU])


def test_one_tensor_cannot_be_on_two_devices() -> None:
    module = layers(3)
    module[2].weight = module[0].weight
    with pytest.raises(
        ValueError,
        match=r"duplicate parameters on distinct devices is not supported: '0.weight' on cpu and '2.weight' on meta",
    ):
        partition(module, [2, 1], ["cpu", "meta"])
    assert not module[0].weight.is_meta  # Nothing was moved.
    assert len(partition(module, [2, 1], ["cpu", "cpu"]).modules) == 2


def test_a_balance_may_be_of_integers_of_any_library() -> None:
    assert partition(layers(), torch.tensor([1, 3]), [CPU] * 2).balance == [1, 3]  # type: ignore[arg-type]


def test_a_partition_is_named_by_its_layers() -> None:
    assert describe_layers(partition(layers(3), [1, 2], [CPU] * 2).modules[0]).startswith("layer 0 (")
    assert describe_layers(nn.Sequential(nn.Tanh(), nn.ReLU())) == "layers 0 (Tanh), 1 (ReLU)"
    assert describe_layers(nn.Sequential(nn.Tanh(), *(nn.ReLU() for _ in range(4)))) == "layers 0 (Tanh) to 4 (ReLU)"
    assert describe_layers(nn.Linear(1, 1)) == "Linear"


class Doubled(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_sequence_that_does_more_than_its_layers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"its own forward, Doubled\.forward, which would not run.*scale_pipe.split"):
        partition(Doubled(nn.ReLU()), [1], [CPU])
    replaced = layers(1)
    replaced.forward = nn.ReLU().forward  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"its own forward, Sequential\.forward, which would not run"):
        partition(replaced, [1], [CPU])
    for register in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        hooked = layers(1)
        getattr(hooked, f"register_{register}_hook")(print)
        with pytest.raises(ValueError, match=r"module has hooks, \['print'\], which would not run.*on its layers"):
            partition(hooked, [1], [CPU])


def test_what_has_no_values_cannot_be_moved() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"'1.weight' is on the meta device and has no values.*to_empty"):
        partition(module, [1, 1], ["meta", "cpu"])
    assert not module[0].weight.is_meta  # Nothing was moved.
    assert len(partition(module, [1, 1], ["cpu", "meta"]).modules) == 2


def test_parameters_over_one_memory_come_to_one_device() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].weight.data = layers[0].weight.data
    partition(layers, [1, 1], [torch.device("cpu")] * 2)
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' share one memory"):
        partition(layers, [1, 1], [torch.device("cpu"), torch.device("meta")])
