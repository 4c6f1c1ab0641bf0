"""The promise: a `Pipe` computes what its layers compute, to the bit, however it is cut and whatever is recomputed.

The reference are the plain layers, called with each micro-batch.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pipe_u_net import u_net
from torch import Tensor, nn

from scale_checkpoint import checkpoint_wrapper, is_checkpointing, is_recomputing, offload_activations
from scale_core.tree import tensors_in
from scale_pipe import NoChunk, Pipe
from scale_pipe.one_process import pipeline
from scale_pipe.one_process.pipeline import clock_cycles

MODES: Any = ("always", "except_last", "never")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ELU(inplace=True), nn.Linear(4, 4))


def convolutions() -> nn.Sequential:
    parts = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(64, 3))


def tied() -> nn.Sequential:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last)


def checkpointed_inside() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Tanh())


def frozen() -> nn.Sequential:
    layers = mlp()
    layers[0].requires_grad_(False)
    layers[2].weight.requires_grad_(False)
    return layers


NETS: list[tuple[Callable[[], nn.Sequential], list[int], tuple[int, ...]]] = [
    (mlp, [2, 2, 1], (7, 4)),
    (in_place, [2, 2], (6, 4)),
    (convolutions, [1, 3, 3], (8, 1, 8, 8)),
    (checkpointed_inside, [1, 2], (4, 4)),
    (frozen, [2, 2, 1], (6, 4)),
    (u_net, [1, 2, 4, 1], (5, 1, 8, 8)),
]


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, tensor), (other_name, expected) in zip(
        one.state_dict().items(), other.state_dict().items(), strict=True
    ):
        assert name == other_name and torch.equal(tensor, expected), name
    for (name, param), expected_param in zip(one.named_parameters(), other.parameters(), strict=True):
        gradient, wanted = param.grad, expected_param.grad
        assert (gradient is None) == (wanted is None), name
        assert gradient is None or wanted is None or torch.equal(gradient, wanted), name


@pytest.mark.parametrize("net, balance, shape", NETS, ids=lambda value: getattr(value, "__name__", ""))
def test_outputs_gradients_and_buffers_are_those_of_the_layers(
    net: Callable[[], nn.Sequential], balance: list[int], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    layers, batches = net(), torch.randn(2, *shape)
    for checkpoint, chunks in (("always", 3), ("except_last", 3), ("never", 3), ("always", 1), ("except_last", 16)):
        if net is convolutions and chunks == 16:
            continue  # A batch norm wants two values at least.
        plain, pipe = copy.deepcopy(layers), Pipe(copy.deepcopy(layers), balance, chunks=chunks)
        pipe.checkpoint = checkpoint
        for batch in batches[: 2 if chunks == 3 else 1]:  # Gradients are accumulated, and buffers moved on.
            needed = net is not in_place  # Plain layers cannot overwrite a leaf whose gradient is wanted.
            expected_input, actual_input = (batch.clone().requires_grad_(needed) for _ in range(2))
            expected = torch.cat([plain(piece.clone()) for piece in expected_input.chunk(chunks)])
            actual = pipe(actual_input)
            assert torch.equal(actual, expected)
            expected.square().mean().backward()
            actual.square().mean().backward()
            if actual_input.grad is not None:
                assert expected_input.grad is not None and torch.equal(actual_input.grad, expected_input.grad)
        assert_equal(pipe, plain)
        with torch.no_grad():
            plain.eval(), pipe.eval()
            assert torch.equal(pipe(batch), torch.cat([plain(piece.clone()) for piece in batch.chunk(chunks)]))


def in_clock_order(layers: nn.Sequential, balance: list[int], batch: Tensor, chunks: int) -> Tensor:
    """What the layers compute if micro-batches go through them in the order of the table."""
    pieces, starts = list(batch.chunk(chunks)), [sum(balance[:place]) for place in range(len(balance) + 1)]
    for cycle in clock_cycles(len(pieces), len(balance)):
        for number, place in cycle:
            pieces[number] = layers[starts[place] : starts[place + 1]](pieces[number])
    return torch.cat(pieces)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_shared_parameter_has_its_gradient_in_table_order(checkpoint: Any) -> None:
    plain, batch = tied(), torch.randn(5, 4)
    pipe = Pipe(copy.deepcopy(plain), [1, 1, 1], chunks=3, checkpoint=checkpoint)
    in_clock_order(plain, [1, 1, 1], batch, 3).square().mean().backward()
    pipe(batch).square().mean().backward()
    assert_equal(pipe, plain)


@pytest.mark.parametrize("checkpoint", MODES)
def test_random_numbers_are_drawn_in_the_order_of_the_table(checkpoint: Any) -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))
    plain, pipe = layers, Pipe(copy.deepcopy(layers), [2, 3], chunks=3, checkpoint=checkpoint)
    batch = torch.randn(6, 4)
    torch.manual_seed(5)
    expected = in_clock_order(plain, [2, 3], batch, 3)
    expected.sum().backward()
    after = torch.rand(3)
    torch.manual_seed(5)
    actual = pipe(batch)
    actual.sum().backward()
    assert torch.equal(actual, expected) and torch.equal(torch.rand(3), after)
    assert_equal(pipe, plain)


class Count(nn.Module):
    """Counts the passes of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = self.first = self.again = 0

    def forward(self, input: Tensor) -> Tensor:
        self.plain += not (is_checkpointing() or is_recomputing())
        self.first += is_checkpointing()
        self.again += is_recomputing()
        return input.sin()


@pytest.mark.parametrize("checkpoint, recomputed", [("always", 4), ("except_last", 3), ("never", 0)])
def test_as_many_micro_batches_are_recomputed_as_the_mode_says(checkpoint: Any, recomputed: int) -> None:
    count = Count()
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), count), [1, 1], chunks=4, checkpoint=checkpoint)
    pipe(torch.randn(4, 2)).sum().backward()
    assert (count.plain, count.first, count.again) == (4 - recomputed, recomputed, recomputed)
    pipe.eval()
    pipe(torch.randn(4, 2)).sum().backward()
    pipe.train()
    with torch.no_grad():
        pipe(torch.randn(4, 2))
    assert (count.plain, count.again) == (12 - recomputed, recomputed)


def autocast(cache: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("checkpoint", MODES)
def test_outer_autocast_holds_in_all_layers(checkpoint: Any, threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if threads:
        monkeypatch.setattr(pipeline, "worker_for", lambda device: ThreadPoolExecutor(1))
    plain, batch = mlp(), torch.randn(6, 4)
    pipe = Pipe(copy.deepcopy(plain), [2, 2, 1], chunks=3, checkpoint=checkpoint)
    with autocast(cache=False):  # With a cache of casts, gradients of micro-batches are summed in bfloat16.
        expected, actual = torch.cat([plain(piece) for piece in batch.chunk(3)]), pipe(batch)
    assert actual.dtype is torch.bfloat16 and torch.equal(actual, expected)
    expected.sum().backward()
    actual.sum().backward()
    assert_equal(pipe, plain)


# For the workers these are several devices, for torch one.
@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1", "cpu:2"], ["cpu:0", "cpu:1", "cpu:0"]], ids=",".join)
@pytest.mark.parametrize("checkpoint", MODES)
def test_partitions_in_threads_of_their_own_compute_the_same(
    checkpoint: Any, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "worker_for", lambda device: ThreadPoolExecutor(1))
    for net, balance, shape in NETS:
        plain, batch = net(), torch.randn(shape)
        cut = [*balance[:2], sum(balance[2:])][: len(balance)]
        pipe = Pipe(copy.deepcopy(plain), cut, devices=devices, chunks=3, checkpoint=checkpoint)
        torch.cat([plain(piece.clone()) for piece in batch.chunk(3)]).square().mean().backward()
        pipe(batch).square().mean().backward()
        assert_equal(pipe, plain)


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]
    name: str


class Starts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, pair: tuple[Tensor, Tensor], factor: int, *, mask: Tensor, scale: Tensor | None = None
    ) -> dict[str, Any]:
        hidden = self.linear(pair[0]) * mask + pair[1]
        return {"hidden": hidden if scale is None else hidden * scale, "factor": factor}


class Ends(nn.Module):
    def forward(self, given: dict[str, Any]) -> Output:
        logits = given["hidden"] * given["factor"]
        return Output(logits, [given["hidden"], logits.argmax(-1)], "ends")


@pytest.mark.parametrize("checkpoint", MODES)
def test_nested_inputs_and_outputs_of_any_kind_go_through(checkpoint: Any) -> None:
    plain = nn.Sequential(Starts(), Ends())
    pipe = Pipe(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint=checkpoint)
    x, y, mask, scale = torch.randn(3, 4), torch.randn(3, 4), torch.randn(1, 4), torch.tensor(2.0)
    outputs = [
        plain[1](plain[0]((a, b), 3, mask=mask, scale=scale)) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)
    ]
    actual = pipe((x, y), 3, mask=NoChunk(mask), scale=scale)
    assert type(actual) is Output and actual.name == "ends" and not actual.hidden[1].requires_grad
    for number, tensor in enumerate(tensors_in(actual)):
        assert torch.equal(tensor, torch.cat([list(tensors_in(output))[number] for output in outputs]))
    torch.cat([output.logits for output in outputs]).sum().backward()
    actual.logits.sum().backward()
    assert_equal(pipe, plain)


def test_saved_tensors_may_be_offloaded_around_it() -> None:
    plain, batch = mlp(), torch.randn(6, 4)
    pipe = Pipe(copy.deepcopy(plain), [2, 2, 1], chunks=2)
    torch.cat([plain(piece) for piece in batch.chunk(2)]).sum().backward()
    with offload_activations(pipe, min_bytes=0):
        output = pipe(batch)
    output.sum().backward()
    assert_equal(pipe, plain)


def test_a_pipe_may_be_recomputed_and_called_several_times() -> None:
    plain, batches = mlp(), torch.randn(2, 6, 4)
    pipe = Pipe(copy.deepcopy(plain), [2, 2, 1], chunks=2)
    outer = checkpoint_wrapper(nn.Sequential(pipe, nn.Tanh()))
    torch.stack([torch.tanh(torch.cat([plain(p) for p in batch.chunk(2)])) for batch in batches]).sum().backward()
    torch.stack([outer(batch) for batch in batches]).sum().backward()
    for param, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad)  # Calls go back one by one here, in another order there.


def test_running_statistics_are_deferred_for_all_micro_batches() -> None:
    plain: Any = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    for chunks in (2, 8):
        for checkpoint in MODES:
            pipe: Any = Pipe(copy.deepcopy(plain), [1, 1], chunks=chunks, deferred_batch_norm=True)
            pipe.checkpoint = checkpoint
            reference = copy.deepcopy(plain)
            for batch in torch.randn(2, 10, 3):
                reference(batch)
                pipe(batch).sum().backward()
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                torch.testing.assert_close(getattr(pipe[0], name), getattr(reference[0], name))


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [[0, 0, 0], ["cpu", 0, "cpu"], [0, "cpu", 0]], ids=str)
@pytest.mark.parametrize("checkpoint", MODES)
def test_devices_of_any_kind_compute_what_the_layers_compute(devices: Any, checkpoint: Any) -> None:
    torch.manual_seed(2)
    plain, batch = u_net().double(), torch.randn(6, 1, 8, 8, dtype=torch.float64)
    pipe = Pipe(copy.deepcopy(plain), [2, 2, 4], devices=devices, chunks=3, checkpoint=checkpoint)
    for _ in range(3):
        expected, actual = plain(batch), pipe(batch)
        assert actual.device == pipe.devices[-1]
        torch.testing.assert_close(actual.cpu(), expected)
        expected.square().sum().backward()
        actual.square().sum().backward()
    for param, wanted in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert param.grad is not None and param.grad.device == param.device
        torch.testing.assert_close(param.grad.cpu(), wanted.grad)


@pytest.mark.gpu
def test_random_numbers_of_a_device_are_drawn_again() -> None:
    x = torch.ones(6, 50, device="cuda", requires_grad=True)
    pipe = Pipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.3)), [1, 1], devices=[0, "cpu"], chunks=3)
    pipe.checkpoint = "always"
    output = pipe(x)
    output.sum().backward()
    assert x.grad is not None and torch.equal(x.grad.cpu(), output)
    linear = Pipe(nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)), [1, 1], devices=[0, 0], chunks=3)
    with torch.autocast("cuda", torch.bfloat16):
        assert linear(x).dtype is torch.bfloat16
