"""What a `Pipe` is beside what it computes: a sequence, with errors that say what to write."""

import copy
import gc
import pickle
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import RecomputationError, check_recomputation, is_checkpointing, is_recomputing
from scale_pipe import Pipe, pop, skippable, stash
from scale_pipe.one_process.pipe import resolve_devices


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def test_it_is_a_sequence_of_its_layers() -> None:
    made = layers()
    pipe = Pipe(made, [2, 1], devices=["cpu", "cpu", "cpu"], chunks=3, checkpoint="never")
    assert len(pipe) == 3 and list(pipe) == list(made) and pipe[0] is made[0] and pipe[-1] is made[2]
    assert isinstance(pipe[1:], nn.Sequential) and list(pipe[1:]) == list(made[1:])
    with pytest.raises(IndexError):
        pipe[3]
    assert (pipe.balance, pipe.chunks, pipe.checkpoint) == ([2, 1], 3, "never")
    assert pipe.devices == [torch.device("cpu")] * 2
    assert [[name for name, _ in part.named_children()] for part in pipe.partitions] == [["0", "1"], ["2"]]
    assert all(isinstance(part, nn.Sequential) for part in pipe.partitions)


def test_modes_are_those_of_the_layers() -> None:
    made = layers()
    made[0].eval()
    pipe = Pipe(made, [2, 1])
    assert pipe.training and not made[0].training and made[1].training
    pipe.eval()
    assert not any(part.training for whole in (pipe, *pipe.partitions) for part in whole.modules())
    assert not Pipe(layers().eval(), [3]).training


@pytest.mark.fault(84)
def test_copies_and_pickles_are_whole() -> None:
    torch.manual_seed(0)  # With other weights no input may pass the ReLU.
    pipe, x = Pipe(layers(), [1, 2], chunks=2), torch.randn(4, 2)
    pipe(x).sum().backward()
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert torch.equal(other(x), pipe(x))
        assert other[0] is other.partitions[0][0] and other[0] is not pipe[0]
        with torch.no_grad():
            other[0].weight.zero_()
        assert not torch.equal(other(x), pipe(x))


def test_it_is_cast_and_never_moved() -> None:
    pipe = Pipe(layers(), [2, 1])
    assert pipe.to(torch.float64) is pipe and pipe.double()[0].weight.dtype is torch.float64
    assert pipe(torch.ones(1, 2, dtype=torch.float64)).dtype is torch.float64
    refused: list[Any] = [
        lambda: pipe.to("cpu"),
        lambda: pipe.to(torch.device("cpu"), torch.float32),
        lambda: pipe.to(0),
        lambda: pipe.to(device="cpu"),
        lambda: pipe.to(torch.ones(1)),
        pipe.cuda,
        pipe.cpu,
        pipe.xpu,
        lambda: pipe.to_empty(device="cpu"),
    ]
    for move in refused:
        with pytest.raises(TypeError, match="denied to move parameters and buffers, because Pipe should manage device"):
            move()


def test_an_empty_sequence_returns_its_input() -> None:
    pipe, x = Pipe(nn.Sequential(), []), torch.ones(2)
    scalar = torch.tensor(42)  # Nothing is cut, so it may have no dimension.
    assert pipe(x) is x and pipe(scalar) is scalar and pipe((scalar, None)) == (scalar, None) and len(pipe) == 0
    with pytest.raises(TypeError, match="expected Tensor, but got int"):
        pipe(3)
    one = Pipe(nn.Sequential(nn.ReLU()), [1], devices=["cpu"])
    with pytest.raises(
        TypeError, match=r"expected a tensor with a first .* have no dimension: Tensor \[\] int64; one "
    ):
        one(scalar)
    with pytest.raises(TypeError, match="returns its one input, but is given 1 by place and 1 by keyword"):
        pipe(x, mask=x)


def test_what_cannot_be_a_pipe_is_refused() -> None:
    repeated = nn.ReLU()
    tied = layers()
    tied[2].weight = tied[0].weight
    both = skippable(stash=["x"])(type("Stash", (nn.Module,), {}))()
    doubled = type("Doubled", (nn.Sequential,), {"forward": lambda self, input: input * 2})
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (nn.ReLU(), {}, TypeError, "module must be nn.Sequential to be partitioned"),
        (nn.Sequential(repeated, repeated), {"balance": [2]}, ValueError, "duplicate children is not supported"),
        (doubled(nn.ReLU()), {"balance": [1]}, TypeError, r"has its own forward, Doubled\.forward"),
        (layers(), {}, ValueError, "balance_by_time"),
        (layers(), {"balance": 2}, TypeError, "balance_by_time"),
        (layers(), {"balance": [3], "devices": "cpu"}, TypeError, "devices are a list"),
        (layers(), {"balance": [3], "devices": ["gpu"]}, ValueError, "there is no device 'gpu'"),
        (layers(), {"balance": [2, 2]}, ValueError, "balance_by_time"),
        (layers(), {"balance": [3, 0]}, ValueError, "balance_by_time"),
        (layers(), {"balance": [2, 1], "devices": ["cpu"]}, IndexError, "too few devices to hold given partitions"),
        (layers(), {"balance": [3], "chunks": 0}, ValueError, "number of chunks must be positive integer, got 0"),
        (layers(), {"balance": [3], "chunks": 1.5}, ValueError, "number of chunks must be positive integer, got 1.5"),
        (layers(), {"balance": [3], "checkpoint": "all"}, ValueError, "not one of 'always', 'except_last', or 'never'"),
        (nn.Sequential(both), {"balance": [1]}, TypeError, "one or more pairs of stash and pop do not match"),
        (tied, {"balance": [2, 1], "devices": ["cpu", "meta"]}, ValueError, "duplicate parameters on distinct devices"),
    ]
    for module, options, error, message in cases:
        with pytest.raises(error, match=message):
            Pipe(module, **options)
    norm = nn.Sequential(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="balance_by_time"):
        Pipe(norm, [2], deferred_batch_norm=True)
    assert type(norm[0]) is nn.BatchNorm1d  # What is refused was not changed.


def test_inputs_that_cannot_be_cut_are_refused() -> None:
    pipe = Pipe(layers(), [2, 1], chunks=2)
    for wrong in (None, "text"):
        with pytest.raises(TypeError, match="expected Tensor, but got"):
            pipe(wrong)
    with pytest.raises(TypeError, match="have no dimension"):
        pipe(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"inputs.args\[0\] \[4, 2\] makes .* and inputs.kwargs\['mask'\] \[3\] of"):
        pipe(torch.ones(4, 2), mask=torch.ones(3))
    pipe.chunks = -1
    with pytest.raises(ValueError, match="number of chunks must be positive integer, got -1"):
        pipe(torch.ones(4, 2))


class FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.failed, self.calls = False, 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2 and not self.failed:
            self.failed = True
            self.complain()
        return input

    def complain(self) -> None:
        raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_in_a_layer_keeps_its_traceback(place: int) -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=1.0), nn.Tanh())
    made: list[nn.Module] = list(copy.deepcopy(plain))
    after = FailsOnce()
    made[place] = nn.Sequential(made[place], FailsOnce())
    made[2] = nn.Sequential(made[2], after)
    pipe = Pipe(nn.Sequential(*made), [1, 1, 1], chunks=4, deferred_batch_norm=True)
    after.failed = True
    x = torch.randn(8, 2)
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        pipe(x + 9)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "complain"
    assert after.calls <= 2  # The others stopped soon.
    after.calls = 0
    output = pipe(x)
    output.sum().backward()
    assert after.calls >= 4 and output.shape == (8, 2)
    plain(x)
    statistics = [buffer for name, buffer in pipe.named_buffers() if name.endswith("running_mean")]
    torch.testing.assert_close(statistics[0], plain[1].running_mean)


class Watches(nn.Module):
    """Holds what it has computed weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, input: Tensor) -> Tensor:
        output = input.sin()
        self.seen.append(weakref.ref(output))
        return output.cos()


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_nothing_of_a_mini_batch_is_left(checkpoint: Any) -> None:
    watches = Watches()
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), watches, nn.Linear(2, 2)), [1, 1, 1], chunks=3, checkpoint=checkpoint)
    gc.disable()
    try:
        output = pipe(torch.randn(3, 2))
        kept = {"always": 0, "except_last": 1, "never": 3}[checkpoint]
        assert sum(seen() is not None for seen in watches.seen) == kept
        output.sum().backward()
        del output
        assert len(watches.seen) == 6 - kept and not any(seen() is not None for seen in watches.seen)
    finally:
        gc.enable()


def test_each_partition_computes_on_its_device() -> None:
    pipe = Pipe(layers(), [2, 1], devices=["cpu", "meta"], chunks=2)
    assert [param.device.type for param in pipe.parameters()] == ["cpu", "cpu", "meta", "meta"]
    with torch.no_grad():
        assert pipe(torch.ones(4, 2)).device.type == "meta"


class WritesToItsInput(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input.relu_()


def test_a_layer_that_overwrites_what_is_needed_is_refused() -> None:
    x = torch.randn(4, 2)
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), WritesToItsInput(), nn.Linear(2, 2)), [1, 2], chunks=2)
    with pytest.raises(RuntimeError, match=r"is given in place, so it could not be computed again.*inplace=False"):
        pipe(x)
    pipe.checkpoint = "never"
    pipe(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"in-?place"):
        Pipe(nn.Sequential(WritesToItsInput()), [1], chunks=2)(x.requires_grad_())


def test_hooks_on_partitions_and_layers_are_called() -> None:
    pipe, calls = Pipe(layers(), [2, 1], chunks=3), list[Any]()
    pipe.partitions[0].register_forward_hook(lambda *_: calls.append("partition"))
    pipe[2].register_forward_hook(lambda *_: calls.append(is_checkpointing()))
    pipe(torch.ones(3, 2))
    assert calls.count("partition") == 3 and [call for call in calls if call != "partition"] == [True, True, False]


def test_an_error_names_its_place_in_the_pipeline_also_again() -> None:
    pipe = Pipe(layers(), [2, 1], chunks=2)
    with pytest.raises(RuntimeError) as caught:
        pipe(torch.ones(4, 3))
    assert caught.value.__notes__ == [
        "in layer '0' of the pipeline, a Linear, given Tensor [2, 3] float32",
        "in partition 0 on cpu, micro-batch 0",
    ]
    again = Pipe(nn.Sequential(nn.Linear(2, 2), FailsAgain(), nn.Tanh()), [3], chunks=2)
    with pytest.raises(ZeroDivisionError) as second:
        again(torch.ones(4, 2)).sum().backward()
    assert second.value.__notes__[0] == "in layer '1' of the pipeline, a FailsAgain, given Tensor [2, 2] float32"


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.saved_tensors[0] + ctx.saved_tensors[0])


class Squares(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return ReadsTwice.apply(input.sin())


def test_a_function_that_reads_saved_values_twice_is_recomputed() -> None:
    found = []
    for checkpoint in ("never", "always"):
        x = torch.tensor([[0.5], [2.0]], requires_grad=True)
        Pipe(nn.Sequential(Squares()), [1], chunks=2, checkpoint=checkpoint)(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


class Differs(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input.sin().cos() if is_recomputing() else input.exp().cos()


def test_errors_of_recomputations_name_the_layers_only() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), Differs()), [1, 1], devices=["cpu"] * 2, checkpoint="always")
    with (
        check_recomputation(pipe),
        pytest.raises(RecomputationError, match="recomputing 'partition with layer 1 ") as told,
    ):
        pipe(torch.ones(2, 2)).sum().backward()
    assert "operator 0 was aten.exp.default in '1' in the forward, and is aten.sin" in str(told.value)
    assert told.value.__notes__ == [
        "in layer '1' of the pipeline, a Differs, given Tensor [2, 2] float32",
        "This happened while the forward of a partition with layer 1 (Differs) was computed again.",
    ]


def test_tensors_of_different_sizes_go_together_and_apart() -> None:
    class Both(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
            return one * 2, other + one.sum()

    pipe = Pipe(nn.Sequential(Both()), [1], chunks=numpy.int64(2))
    with pytest.warns(UserWarning, match="each is cut by itself, in 2 micro-batches"):
        doubled, shifted = pipe(torch.tensor([1.0, 2.0]), torch.zeros(4))
    assert doubled.tolist() == [2, 4] and shifted.tolist() == [1, 1, 2, 2]


class FailsAgain(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        if is_recomputing():
            raise ZeroDivisionError
        return input


def test_a_replaced_layer_is_found_before_it_computes() -> None:
    x = torch.ones(2, 2)
    by_name, in_its_partition, gone = (Pipe(layers(), [2, 1]) for _ in range(3))
    setattr(by_name, "1", nn.Tanh())
    in_its_partition.partitions[0][1] = nn.Tanh()  # type: ignore[operator, index]
    del gone._modules["1"]
    for pipe in (by_name, in_its_partition, gone):
        with pytest.raises(RuntimeError, match=r"layer '1' of the pipeline is a .*Replace layers before Pipe\("):
            pipe(x)


def test_what_is_added_beside_the_layers_is_no_layer() -> None:
    pipe = Pipe(layers(), [2, 1])
    pipe.loss = nn.MSELoss()
    assert len(pipe) == len(list(pipe)) == len(pipe[:]) == 3 and pipe(torch.ones(2, 2)).shape == (2, 2)


def test_trained_norms_of_an_evaluated_pipeline_see_mini_batches() -> None:
    norm = nn.BatchNorm1d(2)
    pipe = Pipe(nn.Sequential(nn.Identity(), copy.deepcopy(norm)), [1, 1], chunks=4, deferred_batch_norm=True)
    pipe.eval()[1].train()
    for size in (8, 4):
        x = torch.randn(size, 2)
        pipe.chunks = size // 2
        pipe(x)
        norm(x)
        torch.testing.assert_close(pipe[1].running_var, norm.running_var)


@skippable(stash=["skip"])
class Stashes(nn.Module):
    def forward(self, input: Tensor) -> Any:
        yield stash("skip", input)
        return input


@skippable(pop=["skip"])
class Pops(nn.Module):
    def forward(self, input: Tensor) -> Any:
        return input + (yield pop("skip"))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_skip_that_a_layer_would_overwrite_is_refused(checkpoint: Any) -> None:
    for in_place in (True, False):
        made = nn.Sequential(nn.Linear(2, 2), Stashes(), nn.ReLU(inplace=in_place), Pops())
        pipe = Pipe(made, [2, 1, 1], chunks=2, checkpoint=checkpoint)
        if not in_place:
            pipe(torch.ones(2, 2))
            continue
        with pytest.raises(RuntimeError, match=r"'skip' is stashed, and a layer overwrites it in place before it is"):
            pipe(torch.ones(2, 2))


CPU = torch.device("cpu")


def test_devices_are_what_they_are_called() -> None:
    assert resolve_devices(["cpu", CPU, "meta"], [1, 1, 1]) == [CPU, CPU, torch.device("meta")]


def test_without_accelerators_all_partitions_are_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert resolve_devices(None, [1, 2]) == [CPU, CPU] and resolve_devices(None, None) == [CPU]


def test_an_accelerator_has_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert resolve_devices(None, [1, 1]) == [first, second]
    assert resolve_devices(["cuda", "cuda:0", "cpu"], None) == [second, first, CPU]
    with pytest.raises(
        ValueError, match=r"no device 'cuda:2', as devices\[1\] names it: this process sees 2 of the type"
    ):
        resolve_devices(["cuda:1", "cuda:2"], None)


def test_what_is_no_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    wrong: Any
    for wrong in ("gpu:0", None, "cuda:0", "cuda"):
        with pytest.raises(ValueError, match=r"there is no device .*, as devices\[1\] names it.*sees no accelerators"):
            resolve_devices(["cpu", wrong], None)
    for wrong in ("cpu", CPU, 2):
        with pytest.raises(TypeError, match=r"devices are a list, one for each partition, but got .*write devices=\["):
            resolve_devices(wrong, None)


@skippable(stash=["skip"])
class Stash(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        yield stash("skip", input)
        return super().forward(input)


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, input: Tensor) -> Iterator[Any]:
        return input + (yield pop("skip"))  # type: ignore[return-value]


def model() -> nn.Sequential:
    return nn.Sequential(Stash(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Pop())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


def test_names_are_those_of_the_layers_in_any_balance() -> None:
    plain = model()
    expected = {key: value.clone() for key, value in plain.state_dict().items()}
    pipe = Pipe(plain, [1, 1, 1])
    assert same(pipe.state_dict(), expected)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]
    other, again = Pipe(model(), [2, 1]), model()
    other.load_state_dict(pipe.state_dict())
    again.load_state_dict(pipe.state_dict())
    assert same(other.state_dict(), expected) and same(again.state_dict(), expected)


def as_fairscale(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The same state as FairScale's Pipe with a balance [1, 2] names it, whose skippable layers hold a module."""
    named = {}
    for key, value in state.items():
        layer, name = key.split(".", 1)
        named[f"{prefix}partitions.{int(layer != '0')}.{layer}.{'module.' if layer == '0' else ''}{name}"] = value
    return named


def test_state_of_fairscale_is_loaded_into_any_balance() -> None:
    saved, pipe = model().state_dict(), Pipe(model(), [2, 1])
    foreign = as_fairscale(saved)
    assert "partitions.0.0.module.weight" in foreign and "partitions.1.1.0.weight" in foreign
    pipe.load_state_dict(foreign)
    assert same(pipe.state_dict(), saved)
    outer = nn.ModuleDict({"pipe": Pipe(model(), [1, 2])})
    outer.load_state_dict(as_fairscale(saved, "pipe."))
    assert same(outer["pipe"].state_dict(), saved)


def test_keys_that_belong_to_nothing_are_still_refused() -> None:
    pipe = Pipe(model(), [2, 1])
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"9\.weight"'):
        pipe.load_state_dict({**pipe.state_dict(), "partitions.1.9.weight": torch.ones(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        pipe.load_state_dict({})


def test_a_layer_of_that_name_is_itself() -> None:
    made = nn.Sequential()
    made.add_module("partitions", nn.Sequential(nn.Linear(2, 2)))
    pipe = Pipe(made, [1])
    assert list(pipe.state_dict()) == ["partitions.0.weight", "partitions.0.bias"]
    saved = {key: torch.full_like(value, 3) for key, value in pipe.state_dict().items()}
    pipe.load_state_dict(saved)
    assert same(pipe.state_dict(), saved) and isinstance(pipe.partitions, nn.ModuleList)
