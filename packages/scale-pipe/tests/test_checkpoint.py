"""A partition is a function of what it is given and pops, computed at once or once more."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_pipe import pop, skippable, stash
from scale_pipe.microbatch import Arguments
from scale_pipe.one_process.checkpoint import PartitionRun
from scale_pipe.partition.partition import Partition

CPU = torch.device("cpu")
KEY = (None, "skip")


class Scale(nn.Module):
    def forward(self, input: Tensor, factor: float, *, shift: Tensor) -> Tensor:
        return input * factor + shift


@skippable(stash=["other"], pop=["skip"])
class Exchange(nn.Module):
    def forward(self, input: Tensor) -> Any:
        skip = yield pop("skip")
        yield stash("other", skip * input)
        return nn.functional.dropout(input * skip)


def test_the_first_layer_takes_everything_and_the_others_one_output() -> None:
    partition = Partition(Scale(), nn.ReLU())
    assert partition(torch.tensor([1.0, -2.0]), 2.0, shift=torch.ones(2)).tolist() == [3, 0]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_skips_are_inputs_and_outputs_with_gradients_like_all_others(checkpoint: bool) -> None:
    run = PartitionRun(Partition(nn.Linear(2, 2), Exchange()), CPU)
    x, skip = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2, requires_grad=True)

    def gradients(outputs: Any) -> list[Tensor]:
        total = outputs[0].sum() + outputs[1][None, "other"].sum()
        return list(torch.autograd.grad(total, [x, skip, *run.partition.parameters()]))

    def plain() -> Any:
        hidden = run.partition[0](x)  # type: ignore[index]
        return nn.functional.dropout(hidden * skip), {(None, "other"): skip * hidden}

    torch.manual_seed(4)
    expected = gradients(plain())
    torch.manual_seed(4)
    actual = run(Arguments((x,), {}), {KEY: skip}, checkpoint, False)
    after = torch.rand(2)
    for one, other in zip(gradients(actual), expected, strict=True):
        assert torch.equal(one, other)
    torch.manual_seed(4)
    plain()
    assert torch.equal(torch.rand(2), after)


@pytest.mark.parametrize(
    "checkpoint, from_batch, copied", [(False, False, False), (False, True, True), (True, False, True)]
)
def test_a_first_layer_that_works_in_place_gets_a_copy_where_its_input_is_still_needed(
    checkpoint: bool, from_batch: bool, copied: bool
) -> None:
    run = PartitionRun(Partition(nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(2, 2)), CPU)
    x = torch.tensor([[1.0, -1.0]])
    run(Arguments((x,), {}), {}, checkpoint, from_batch)
    assert x.tolist() == ([[1, -1]] if copied else [[1, 0]])
