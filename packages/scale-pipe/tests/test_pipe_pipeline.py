"""GPipe's clock cycles, and the partition of one task, computed at once or recomputed."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_pipe import Pipe, pop, skippable, stash
from scale_pipe.microbatch import Arguments
from scale_pipe.one_process.pipeline import PartitionRunner, Task, clock_cycles
from scale_pipe.partition.partition_function import Partition

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


def test_the_first_layer_takes_all_and_others_one_output() -> None:
    partition = Partition(Scale(), nn.ReLU())
    assert partition(torch.tensor([1.0, -2.0]), 2.0, shift=torch.ones(2)).tolist() == [3, 0]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_skips_are_inputs_and_outputs_with_gradients(checkpoint: bool) -> None:
    partition = Partition(nn.Linear(2, 2), Exchange())
    runner = PartitionRunner(partition, CPU)
    x, skip = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2, requires_grad=True)

    def gradients(outputs: Any) -> list[Tensor]:
        total = outputs[0].sum() + outputs[1][None, "other"].sum()
        return list(torch.autograd.grad(total, [x, skip, *partition.parameters()]))

    def plain() -> Any:
        hidden = partition[0](x)
        return nn.functional.dropout(hidden * skip), {(None, "other"): skip * hidden}

    torch.manual_seed(4)
    expected = gradients(plain())
    torch.manual_seed(4)
    actual = runner.run(Arguments((x,), {}), {KEY: skip}, checkpoint, False)
    after = torch.rand(2)
    for one, other in zip(gradients(actual), expected, strict=True):
        assert torch.equal(one, other)
    torch.manual_seed(4)
    plain()
    assert torch.equal(torch.rand(2), after)


@pytest.mark.parametrize(
    "checkpoint, from_batch, copied", [(False, False, False), (False, True, True), (True, False, True)]
)
def test_a_first_layer_in_place_gets_a_copy_of_a_needed_input(checkpoint: bool, from_batch: bool, copied: bool) -> None:
    runner = PartitionRunner(Partition(nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(2, 2)), CPU)
    x = torch.tensor([[1.0, -1.0]])
    runner.run(Arguments((x,), {}), {}, checkpoint, from_batch)
    assert x.tolist() == ([[1, -1]] if copied else [[1, 0]])


def test_the_table_is_that_of_its_description() -> None:
    expected = [
        {0: 0},
        {0: 1, 1: 0},
        {0: 2, 1: 1, 2: 0},
        {1: 2, 2: 1},
        {2: 2},
    ]
    assert [{task.partition: task.micro_batch for task in cycle} for cycle in clock_cycles(3, 3)] == expected


def test_every_task_stands_once_after_what_it_needs() -> None:
    for num_micro_batches in range(1, 5):
        for num_partitions in range(1, 5):
            order = [task for cycle in clock_cycles(num_micro_batches, num_partitions) for task in cycle]
            assert len(set(order)) == len(order) == num_micro_batches * num_partitions
            for number, task in enumerate(order):
                if task.partition:
                    assert order.index(Task(task.micro_batch, task.partition - 1)) < number


class Note(nn.Module):
    """Notes when a micro-batch comes by, in both directions."""

    def __init__(self, number: int, notes: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.number, self.notes, self.weight = number, notes, nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        micro_batch = int(input.detach().flatten()[0])
        self.notes.append(("forward", micro_batch, self.number))
        output = input * self.weight
        output.register_hook(partial(self.note_backward, micro_batch))
        return output

    def note_backward(self, micro_batch: int, gradient: Tensor) -> None:
        self.notes.append(("backward", micro_batch, self.number))


def test_the_backward_pass_is_the_forward_one_from_its_end() -> None:
    notes: list[tuple[str, int, int]] = []
    pipe = Pipe(nn.Sequential(*(Note(number, notes) for number in range(3))), [1, 1, 1], chunks=4, checkpoint="never")
    pipe(torch.arange(4.0)[:, None]).sum().backward()
    table = [("forward", *task) for cycle in clock_cycles(4, 3) for task in cycle]
    assert notes[:12] == table
    assert notes[12:] == [("backward", number, place) for _, number, place in reversed(table)]


def test_the_last_micro_batch_goes_back_before_recomputation() -> None:
    notes: list[tuple[str, int, int]] = []
    pipe = Pipe(nn.Sequential(*(Note(number, notes) for number in range(2))), [1, 1], chunks=3)
    pipe(torch.arange(3.0)[:, None]).sum().backward()
    for place in range(2):
        order = [note[:2] for note in notes[6:] if note[2] == place]
        assert order[0] == ("backward", 2)
        again = [number for kind, number in order if kind == "forward"]
        assert again == [1, 0]
        assert order.index(("backward", 1)) < order.index(("forward", 0))
