"""Programs written for FairScale's `Pipe` and torchgpipe's `GPipe` run, with the names and errors that they know."""

from __future__ import annotations

import importlib
import warnings
from collections import OrderedDict, deque
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fairscale
import scale_checkpoint
import scale_pipe
from fairscale import _warnings
from fairscale._warnings import FairScaleWarning
from fairscale.nn.pipe import LazyModule, Pipe
from fairscale.nn.pipe.balance import balance_by_size, balance_by_time, blockpartition
from fairscale.nn.pipe.balance.profile import layerwise_sandbox
from fairscale.nn.pipe.batchnorm import DeferredBatchNorm
from fairscale.nn.pipe.checkpoint import Checkpoint, Recompute, checkpoint, is_checkpointing, is_recomputing
from fairscale.nn.pipe.microbatch import Batch, check, gather, scatter
from fairscale.nn.pipe.pipe import BalanceError
from fairscale.nn.pipe.pipeline import clock_cycles
from fairscale.nn.pipe.skip import Namespace, pop, skippable, stash, verify_skippables
from fairscale.nn.pipe.skip.layout import inspect_skip_layout
from fairscale.nn.pipe.skip.skippable import Skippable
from torchgpipe import GPipe
from torchgpipe.gpipe import verify_module

Commands = Generator[Any, Any, Any]


@skippable(stash=["skip"])
class Down(nn.Linear):
    def forward(self, input: Tensor) -> Commands:
        yield stash("skip", input)
        return super().forward(input)


@skippable(pop=["skip"])
class Up(nn.Linear):
    def forward(self, input: Tensor) -> Commands:
        skip = yield pop("skip")
        return super().forward(input) + skip


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("kind", [Pipe, GPipe])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_outputs_and_gradients_are_those_of_micro_batches(kind: type[Pipe], checkpoint: str) -> None:
    pipe, plain, x = (
        kind(layers(), [2, 1], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint),
        layers(),
        torch.rand(7, 4),
    )
    output = pipe(x)
    assert torch.equal(output, torch.cat([plain(piece) for piece in x.chunk(3)]))
    output.square().sum().backward()
    torch.cat([plain(piece) for piece in x.chunk(3)]).square().sum().backward()
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.allclose(one.grad, other.grad, rtol=1e-6)
    with torch.no_grad():
        assert torch.equal(pipe.eval()(x), output)


def test_names_and_attributes_are_fairscales() -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(1, 1), b=nn.Linear(1, 1), c=nn.Linear(1, 1)))
    a, b, c = model
    pipe = Pipe(model, (2, 1), devices=("cpu",) * 4, chunks=42.0)  # type: ignore[arg-type]
    assert list(pipe.state_dict())[::2] == ["partitions.0.a.weight", "partitions.0.b.weight", "partitions.1.c.weight"]
    assert [name for name, _ in pipe.named_children()] == ["partitions"] and not hasattr(pipe, "a")
    assert (pipe.balance, pipe.devices, pipe.chunks, pipe.checkpoint) == (
        [2, 1],
        [torch.device("cpu")] * 2,
        42,
        "except_last",
    )
    assert [list(part) for part in pipe.partitions] == [[a, b], [c]] and list(pipe) == [a, b, c]
    assert len(pipe) == 3 and pipe[-1] is c and type(pipe.chunks) is int
    pipe.load_state_dict({name: torch.full_like(value, 2.0) for name, value in pipe.state_dict().items()})
    assert a.weight.item() == 2.0
    pipe.partitions[0][1] = nn.Identity()  # A partition runs what it holds, as in FairScale.
    assert pipe(torch.ones(1, 1)).item() == 10.0
    assert pipe.half().to(torch.double)[0].weight.dtype == torch.double
    for move in (lambda: pipe.cuda(), lambda: pipe.cpu(), lambda: pipe.to("cuda"), lambda: pipe.to(device=0)):
        with pytest.raises(TypeError, match="denied to move parameters and buffers, because Pipe should manage"):
            move()


@pytest.mark.parametrize("kind, module", [(Pipe, "fairscale.nn.pipe.balance"), (GPipe, "torchgpipe.balance")])
def test_balances_that_do_not_fit_say_where_one_can_be_had(kind: type[Pipe], module: str) -> None:
    for balance in (None, [1], [3, 0]):
        with pytest.raises(BalanceError, match=f"from {module} import balance_by_time"):
            kind(layers(), balance)
    with pytest.raises(IndexError, match=r"too few devices to hold given partitions \(devices: 1, partitions: 2\)"):
        kind(layers(), [2, 1], devices=["cpu"])
    for arguments, words in [
        ({"chunks": 0}, "number of chunks must be positive integer"),
        ({"checkpoint": "sometimes"}, "checkpoint is not one of 'always', 'except_last', or 'never'"),
    ]:
        with pytest.raises(ValueError, match=words):
            kind(layers(), [3], devices=["cpu"], **arguments)  # type: ignore[arg-type]


def test_uncuttable_modules_and_torchgpipes_ties_are_refused() -> None:
    layer, one, other = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    other.weight = one.weight
    for kind in (Pipe, GPipe):
        with pytest.raises(TypeError, match=r"module must be nn\.Sequential to be partitioned"):
            kind(nn.Module(), [1])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="module with duplicate children is not supported"):
            kind(nn.Sequential(layer, layer), [1, 1])
    shared = nn.Sequential(one, other)
    Pipe(shared, [1, 1], devices=["cpu", "cpu"])
    with pytest.raises(ValueError, match="module with duplicate parameters in distinct children is not supported"):
        verify_module(shared)
    with pytest.raises(ValueError, match="'0' and '1' share one"):
        GPipe(shared, [1, 1], devices=["cpu", "cpu"])


def test_a_pipe_takes_and_returns_a_tensor_or_a_tuple_of_them() -> None:
    class Says(nn.Module):
        def forward(self, input: Any) -> Any:
            return (input[0] * 2, "done") if isinstance(input, tuple) else "done"

    pipe, x = Pipe(nn.Sequential(Says()), [1], devices=["cpu"]), torch.ones(2)
    for given in (x, (x, x), "hello", (x, "hello"), [x]):
        with pytest.raises(TypeError, match="expected Tensor, but got"):
            pipe(given)
    with pytest.raises(TypeError):
        pipe(x, x)  # type: ignore[call-arg]
    empty, scalar = Pipe(nn.Sequential(), []), torch.tensor(42)
    assert empty(scalar) is scalar and empty((scalar,)) == (scalar,)
    with pytest.raises(TypeError, match="expected Tensor, but got int"):
        empty(42)  # type: ignore[arg-type]


def test_skippable_layers_are_held_as_module_in_names_and_repr() -> None:
    outer, inner = Namespace(), Namespace()
    down = [Down(8, 4).isolate(outer), Down(4, 2).isolate(inner)]
    net = nn.Sequential(*down, nn.Tanh(), Up(2, 4).isolate(inner), Up(4, 8).isolate(outer))
    verify_skippables(net)
    assert repr(net[0]) == "@skippable(Down(in_features=8, out_features=4, bias=True))" and isinstance(net[0], Down)
    assert isinstance(net[0], Skippable) and list(net[0].stashable()) == [(outer, "skip")] and not net[0].poppable()
    layout = inspect_skip_layout([net[:2], net[2:4], net[4:]])
    assert [list(layout.copy_policy(number)) for number in range(3)] == [[], [(0, inner, "skip")], [(0, outer, "skip")]]
    assert layout.requires_copy(outer, "skip") and not layout.requires_copy(None, "skip")
    x = torch.rand(4, 8)
    expected = net(x)
    pipe = Pipe(net, [2, 2, 1], devices=["cpu"] * 3, chunks=2)
    assert torch.equal(pipe(x), expected)
    assert next(iter(pipe.state_dict())) == "partitions.0.0.module.weight"
    with pytest.raises(TypeError, match="'0' declared 'skip' as poppable but it was not stashed"):
        Pipe(nn.Sequential(Up(1, 1)), [1], devices=["cpu"])


def test_balances_translate_a_timeout_and_refuse_gradients() -> None:
    _warnings.warn_once.cache_clear()
    module, sample = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.rand(16, 64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert sum(balance_by_time(2, module, sample, timeout=0.01)) == 4
    (warning,) = caught
    assert warning.filename == __file__ and "balance_by_time(2, module, sample, seconds=0.01)" in str(warning.message)
    assert balance_by_size(2, module, sample, chunks=2, param_scale=4.0, device="cpu") == [2, 2]
    assert blockpartition.solve([1, 2, 3, 4, 5, 6], partitions=2) == [[1, 2, 3, 4], [5, 6]]
    for costs, partitions in (([42], 0), ([], 1), ([42], 2)):
        with pytest.raises(ValueError, match=r"partitions must be a positive|sequence is shorter"):
            blockpartition.solve(costs, partitions)
    copies = list(layerwise_sandbox(module.eval(), torch.device("cpu")))
    assert all(layer.training for layer in copies) and not any(layer.training for layer in module)
    module(sample).sum().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        balance_by_time(1, module, sample)


def test_micro_batches_are_batches() -> None:
    x, y = torch.rand(4, 1), torch.rand(4, 2)
    pieces = scatter((x, y), 2)
    assert [(len(piece), piece.atomic, piece.index) for piece in pieces] == [(2, False, 0), (2, False, 1)]
    whole = gather(pieces)
    assert isinstance(whole, tuple) and torch.equal(whole[0], x) and torch.equal(whole[1], y)
    one = Batch(x)
    assert one.atomic and one.tensor is x and list(one) == [x] and one.call(torch.neg).tensor_or_tensors.equal(-x)
    one[0] = y
    assert one.tensor is y and pieces[0][1].shape == (2, 2)
    with pytest.raises(IndexError, match="multiple tensors"):
        one[:] = (x, y)
    with pytest.raises(AttributeError, match="atomic"):
        _ = one.tensors
    with pytest.raises(AttributeError, match="not atomic"):
        _ = pieces[0].tensor
    check((x, y))
    assert list(clock_cycles(3, 2)) == [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]


def test_recomputation_has_one_answer_for_all() -> None:
    seen = []

    def double(x: Tensor) -> Tensor:
        seen.append((is_checkpointing(), is_recomputing(), scale_checkpoint.is_recomputing()))
        return x.square()

    x = torch.ones(2, requires_grad=True)
    checkpoint(double, x).sum().backward()
    assert seen == [(True, False, False), (False, True, True)] and torch.equal(x.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path, name",
    [
        ("fairscale.nn.pipe", "AsyncPipe"),
        ("fairscale.nn", "PipeRPCWrapper"),
        ("fairscale.experimental.nn.distributed_pipeline", "PipelineModulesGraph"),
        ("fairscale.experimental.nn.distributed_pipeline", "DistributedLoss"),
        ("fairscale.experimental.nn.distributed_pipeline", "DistributedPipeline"),
        ("fairscale.experimental.nn.distributed_pipeline.trace", "make_graph"),
    ],
)
def test_pipelines_of_several_processes_say_what_to_write(path: str, name: str) -> None:
    refused = getattr(importlib.import_module(path), name)
    with pytest.raises(NotImplementedError, match=f"^{name} is not offered: .* Use .*(pipe.step|scale_pipe.split)"):
        refused([LazyModule(lambda: nn.Linear(1, 1))], balance=[1])


@pytest.mark.parametrize(
    "path",
    [
        "",
        *(".balance", ".batchnorm", ".checkpoint", ".microbatch", ".pipeline"),
        *(".skip", ".skip.layout", ".skip.namespace", ".skip.skippable", ".skip.tracker"),
    ],
)
def test_torchgpipes_paths_hold_what_fairscales_do(path: str) -> None:
    ours, theirs = importlib.import_module(f"torchgpipe{path}"), importlib.import_module(f"fairscale.nn.pipe{path}")
    for name in set(ours.__all__) - {"GPipe", "__version__", "blockpartition"}:
        assert getattr(ours, name) is getattr(theirs, name)


@pytest.mark.parametrize("kind", [Pipe, GPipe])
def test_deferred_batch_norms_show_what_they_have_collected(kind: type[Pipe]) -> None:
    norm = nn.BatchNorm1d(3)
    pipe = kind(nn.Sequential(norm), balance=[1], devices=["cpu"], chunks=2, deferred_batch_norm=True)
    deferred = pipe.partitions[0][0]
    assert type(deferred) is DeferredBatchNorm and deferred.state_dict().keys() == norm.state_dict().keys()
    inputs = torch.randn(4, 3)
    pipe(inputs)
    assert torch.equal(deferred.sum, torch.zeros(3)) and torch.equal(deferred.sum_squares, torch.zeros(3))
    deferred.begin_mini_batch(3)
    deferred(inputs)
    deferred(2 * inputs)
    torch.testing.assert_close(deferred.sum, 3 * inputs.sum(0))
    torch.testing.assert_close(deferred.sum_squares, 5 * inputs.square().sum(0))
    assert (deferred.counter, deferred.tracked) == (8, 2)


def test_fairscales_tutorial_runs_as_written() -> None:
    """`devices` is left out there: all accelerators, or the CPU."""
    model: Any = nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    model = fairscale.nn.Pipe(model, balance=[2, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loss_fn = F.nll_loss
    optimizer.zero_grad()
    target = torch.randint(0, 2, size=(20, 1)).squeeze()
    data = torch.randn(20, 10)
    device = model.devices[0]
    before = [param.detach().clone() for param in model.parameters()]
    outputs = model(data.to(device))
    loss = loss_fn(outputs.to(device), target.to(device))
    loss.backward()
    optimizer.step()
    assert not any(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


def test_fairscales_readme_runs_with_the_devices_that_there_are() -> None:
    a, b, c, d = (torch.nn.Linear(4, 4) for _ in range(4))
    model = torch.nn.Sequential(a, b, c, d)
    pipe = fairscale.nn.Pipe(model, balance=[2, 2], devices=["cpu", "cpu"], chunks=8)
    assert isinstance(pipe, scale_pipe.Pipe) and pipe(torch.ones(16, 4)).shape == (16, 4)


@pytest.mark.parametrize("recomputes_before", [False, True])
@pytest.mark.parametrize("atomic", [True, False])
def test_checkpoint_functions_recompute_the_same_random_numbers(recomputes_before: bool, atomic: bool) -> None:
    """As torchgpipe's own pipeline applies them."""
    calls = []

    def function(given: Any) -> Tensor:
        calls.append((is_checkpointing(), is_recomputing()))
        x = given if atomic else given[0] * given[1]
        return F.dropout(x * 2, 0.5)

    inputs = [torch.ones(64, requires_grad=True) for _ in range(1 if atomic else 2)]
    recomputed: Any = deque()
    states: Any = deque()
    phony = torch.zeros((), requires_grad=True)
    arguments = (recomputed, states, function, atomic, *inputs)
    out = Checkpoint.apply(phony, *arguments)
    if recomputes_before:
        out = out + 0 * Recompute.apply(phony, *arguments)
    torch.rand(1)
    state = torch.random.get_rng_state()
    out.sum().backward(retain_graph=True)
    assert calls == [(True, False), (False, True)] and not recomputed and len(states) == 1
    assert torch.equal(torch.random.get_rng_state(), state)
    grads = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    out.sum().backward()  # Once more, with the same numbers.
    assert all(torch.equal(tensor.grad, grad) for tensor, grad in zip(inputs, grads, strict=True))  # type: ignore[arg-type]
    for tensor in inputs:
        assert tensor.grad is not None and torch.equal(tensor.grad, out.detach())  # 4 or 0, by the same draws
    assert 0 < int((out == 0).sum()) < 64


def test_a_replaced_method_of_a_checkpoint_warns_of_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    _warnings.warn_once.cache_clear()
    with pytest.warns(FairScaleWarning, match=r"Recompute\.forward =: pipelines recompute by scale_checkpoint"):
        monkeypatch.setattr(Recompute, "forward", Recompute.forward)
