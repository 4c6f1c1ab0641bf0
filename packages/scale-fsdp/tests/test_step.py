"""step.py: whatever its module takes, returns, uses or raises, training goes on as in the plain model."""

import collections
import dataclasses
import functools
import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from fsdp_beside import Beside, adam, mean_square, noise, sharded
from fsdp_cases import differing_grads
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from scale_core.flat.buffer import live_buffers
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard
from scale_fsdp.runtime.unit import units_in


def assert_on_ranks(fn, world, *args):
    __tracebackhide__ = True
    assert not any(run_ranks(fn, world, *args))


def three_linears() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))


ALL = ["0", "1", "2", ""]


# Parameters that a step does not use.


class Branches(nn.Module):
    """One unit with two branches of which a step may use either, both or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, left: bool, right: bool) -> Tensor:
        x = self.stem(x)
        y = x if not left else x + self.left(x)
        return y if not right else y * self.right(x)


def unused_on_all(model, rank, step):
    yield model(noise(3, 4, seed=10 * step + rank), step % 2 == 0, step % 3 == 0).square().mean()


def unused_on_some(model, rank, step):
    yield model(noise(3, 4, seed=10 * step + rank), step % 2 == rank % 2, step % 3 == rank).square().mean()


def used_by_turns(model, rank, step):
    """Two micro-batches, of which each uses another branch on another rank."""
    yield model(noise(3, 4, seed=10 * step + rank), rank == 0, False).square().mean()
    yield model(noise(3, 4, seed=10 * step + rank + 5), False, rank == 1 and step > 1).square().mean()


def train_branches(step) -> list[str]:
    wrong = []
    for reshard in (True, False):
        kwargs = {"reshard_after_forward": reshard}
        wrong += Beside(Branches(), [""], step, steps=6, kwargs=kwargs).differences()
        wrong += Beside(Branches(), ["stem", ""], step, steps=6, kwargs=kwargs).differences()
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_that_no_rank_uses_in_a_step_have_no_gradient(world):
    assert_on_ranks(train_branches, world, unused_on_all)


@pytest.mark.fault(29)
@pytest.mark.parametrize("world", [2, 3])
def test_parameters_that_some_ranks_use_count_as_zeros_on_the_others(world):
    assert_on_ranks(train_branches, world, unused_on_some)


def test_parameters_may_be_unused_in_one_micro_batch_and_used_in_the_next():
    assert_on_ranks(train_branches, 2, used_by_turns)


# Calls.


class Repeated(nn.Module):
    """One block, called several times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.block, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = torch.tanh(self.block(x))
        return self.head(x)


def train_repeated() -> list[str]:
    wrong = []
    for units in (["block", ""], ["embed", "block", "head", ""]):
        for reshard in (True, False):
            wrong += Beside(
                Repeated(), units, mean_square(2, 3), kwargs={"reshard_after_forward": reshard}
            ).differences()
    return wrong


def test_a_unit_may_be_called_several_times_in_a_step():
    assert_on_ranks(train_repeated, 2)


def two_forwards_then_two_backwards(model, rank, step):
    first = model(noise(2, 4, seed=step + rank)).square().mean()
    second = model(noise(2, 4, seed=9 + step + rank)).square().mean()
    yield second
    yield first


def one_backward_of_two_forwards(model, rank, step):
    first = model(noise(2, 4, seed=step + rank)).square().mean()
    yield first + model(noise(2, 4, seed=9 + step + rank)).square().mean()


def forwards_without_backward(model, rank, step):
    loss = model(noise(2, 4, seed=step + rank)).square().mean()
    model(noise(2, 4, seed=5))  # with gradients, and dropped
    model.eval()
    with torch.no_grad():
        model(noise(2, 4, seed=6))
    model(noise(2, 4, seed=7))
    model.train()
    yield loss


def forwards_before_it(model, rank, step):
    model(noise(2, 4, seed=5))
    with torch.no_grad():
        model(noise(2, 4, seed=6))
    yield model(noise(2, 4, seed=step + rank)).square().mean()


def accumulated_over_two_forwards_at_once() -> list[str]:
    """A sum waits under no_sync; then two passes are forwarded before their backwards, and one graph is kept.

    The last backward reduces what the passes before it have left in the sum, so a block that ends its backward after
    the first of its three calls would send the sum by itself, and its own gradient later: other roundings.
    """
    rank, world, wrong = torch.distributed.get_rank(), torch.distributed.get_world_size(), []
    for order, reshard in itertools.product(([0, 1, 2], [0, 2, 1], [0, 1, 1, 2], [0, 1, 2, 2]), (True, False)):
        plain = Repeated()
        model = sharded(plain, ["embed", "block", "head", ""], reshard_after_forward=reshard)
        grads = []
        for each in range(world):
            for number in order:
                plain(noise(2, 3, seed=10 * number + each)).square().mean().backward()
            grads.append([param.grad for param in plain.parameters()])
            plain.zero_grad()
        for param, *of_ranks in zip(plain.parameters(), *grads, strict=True):
            param.grad = functools.reduce(torch.add, of_ranks) / world
        with model.no_sync():
            losses = [model(noise(2, 3, seed=rank)).square().mean()]
            losses[0].backward()
            losses += [model(noise(2, 3, seed=10 * number + rank)).square().mean() for number in (1, 2)]
            for number in order[1:-1]:
                losses[number].backward(retain_graph=True)
        losses[order[-1]].backward()
        wrong += [f"{order}, reshard {reshard}: {line}" for line in differing_grads(model, plain)]
    return wrong


def test_passes_forwarded_together_add_up_as_in_the_plain_model_though_a_unit_is_called_again():
    assert_on_ranks(accumulated_over_two_forwards_at_once, 2)


def train_linears(step) -> list[str]:
    wrong = []
    for units in (ALL, [""], ["1", ""]):
        for reshard in (True, False):
            kwargs = {"reshard_after_forward": reshard}
            wrong += Beside(three_linears(), units, step, kwargs=kwargs, both=[adam]).differences()
    return wrong


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "step",
    [two_forwards_then_two_backwards, one_backward_of_two_forwards, forwards_without_backward, forwards_before_it],
)
def test_forwards_and_backwards_may_come_in_any_order(step, world):
    assert_on_ranks(train_linears, world, step)


# Inputs and outputs.

Pair = collections.namedtuple("Pair", ["first", "second"])  # noqa: PYI024  # the untyped kind must work too


@dataclasses.dataclass(frozen=True)
class Result:
    hidden: Tensor
    steps: int
    nested: dict[str, Tensor]


OUTPUTS = {
    "dict": (lambda x: {"a": x, "b": 3, "c": None}, lambda out: out["a"]),
    "list": (lambda x: [x, [x * 2]], lambda out: out[0] + out[1][0]),
    "tuple with others": (lambda x: (None, "text", x, 4), lambda out: out[2]),
    "namedtuple": (lambda x: Pair(x, x * 2), lambda out: out.first * out.second),
    "dataclass": (lambda x: Result(x, 2, {"x": x + 1}), lambda out: out.hidden + out.nested["x"]),
    "ModelOutput": (lambda x: BaseModelOutput(last_hidden_state=x), lambda out: out.last_hidden_state),
    "detached and not": (lambda x: (x.detach(), x), lambda out: out[0] * out[1]),
}


class Shaped(nn.Module):
    """A unit that returns its output in some container, inside a model that takes it out again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.kind = kind
        self.first, self.unit = nn.Linear(3, 3), Inner(kind)

    def forward(self, x: Tensor) -> Tensor:
        return OUTPUTS[self.kind][1](self.unit(self.first(x)))


class Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(3, 3)

    def forward(self, x: Tensor):
        return OUTPUTS[self.kind][0](self.linear(x))


def train_outputs() -> list[str]:
    wrong = []
    for kind in OUTPUTS:
        found = Beside(Shaped(kind), ["first", "unit", ""], mean_square(2, 3), both=[adam]).differences()
        wrong += [f"{kind}: {line}" for line in found]
        out = sharded(Inner(kind), [""])(noise(2, 3))
        if type(out) is not type(OUTPUTS[kind][0](noise(2, 3))):
            wrong.append(f"{kind}: became {type(out)}")
    return wrong


def test_outputs_keep_their_container():
    assert_on_ranks(train_outputs, 2)


class Silent(nn.Module):
    """A unit that returns nothing; the caller finds what it has left."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(3, 3), []

    def forward(self, x: Tensor) -> None:
        self.kept.append(self.linear(x))


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.silent = nn.Linear(3, 3), Silent()

    def forward(self, x: Tensor) -> Tensor:
        assert self.silent(self.first(x)) is None
        return self.silent.kept.pop()


def train_without_output() -> list[str]:
    return Beside(Listener(), ["first", "silent", ""], mean_square(2, 3)).differences()


def test_a_unit_may_return_none():
    assert_on_ranks(train_without_output, 2)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(3, 3)
        self.scaled = Scaled()

    def forward(self, *, batch: dict[str, Tensor], flag: bool = False) -> Tensor:
        return self.scaled(x=self.body(input=batch["x"]), scale=[batch["scale"], None])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, *, x: Tensor, scale: list[Tensor]) -> Tensor:
        return x * scale[0] + self.bias


def call_by_keywords(model, rank, step):
    yield model(batch={"x": noise(2, 3, seed=step), "scale": noise(2, 1, seed=rank)}, flag=True).square().mean()


def train_keywords() -> list[str]:
    return Beside(Keywords(), ["body", "scaled", ""], call_by_keywords).differences()


def test_calls_by_keyword_alone():
    assert_on_ranks(train_keywords, 2)


def in_place() -> nn.Sequential:
    torch.manual_seed(6)
    last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), last)


def train_in_place() -> list[str]:
    wrong = []
    for units in (["0", "1", "2", "3", ""], ["3", ""], ["1", "3", ""]):
        wrong += Beside(in_place(), units, mean_square(2, 3), both=[adam]).differences()
    return wrong


def test_a_unit_may_change_its_input_in_place():
    assert_on_ranks(train_in_place, 2)


class Viewed(nn.Module):
    """A unit whose output is a view of what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, 4)).view(x.shape)


def write_into_the_output(model, rank, step):
    out = model(noise(2, 3, 4, seed=10 * step + rank))
    out[rank % 2] = 0
    out.mul_(2)
    yield out.square().mean()


def train_views() -> list[str]:
    torch.manual_seed(6)
    linears = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    views = nn.Sequential(Viewed(), nn.ReLU(inplace=True), Viewed())
    wrong = []
    for plain in (linears, views):
        for units in (["0", "2", ""], ["0", "2"], [""]):
            for step in (mean_square(2, 3, 4), write_into_the_output):
                wrong += Beside(plain, units, step, steps=3, both=[adam]).differences()
                if bytes_of("gathered"):
                    wrong.append(f"{units}: memory was left behind")
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_outputs_that_are_views_may_be_changed_in_place(world):
    assert_on_ranks(train_views, world)


class Unknown:
    """What nobody can look into."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Secretive(nn.Module):
    """A unit whose output can't be seen by who waits for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Unknown:
        return Unknown(torch.tanh(self.linear(x)))


class Opener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.secretive, self.last = nn.Linear(4, 4), Secretive(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.secretive(self.first(x)).hidden)


def look_in_between(model, rank, step):
    loss = model(noise(2, 4, seed=step + rank)).square().mean()
    with torch.no_grad():
        model(noise(2, 4))
    yield loss


def open_the_output(model, rank, step):
    yield model(noise(2, 4, seed=step + rank)).hidden.square().mean()


class Penalised(nn.Module):
    """Keeps a penalty on its weight in an attribute, computed before or after its output, or of its output."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.linear, self.when, self.penalty = nn.Linear(4, 4), when, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        penalty = self.linear.weight.pow(2).sum() if self.when == "before" else None
        y = torch.tanh(self.linear(x))
        if self.when == "after":
            penalty = (self.linear.weight @ self.linear.weight.t()).square().mean()
        self.penalty = y.pow(2).mean() if penalty is None else penalty
        return y


class PenalisedNet(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.block, self.last = nn.Linear(4, 4), Penalised(when), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))


def with_penalty(model, rank, step):
    loss = model(noise(2, 4, seed=10 * step + rank)).square().mean()
    yield loss + 0.1 * model.block.penalty


def train_penalised() -> list[str]:
    wrong = []
    for when, units in itertools.product(("before", "after", "output"), (ALL_PENALISED, ["block", ""], [""])):
        wrong += [f"{when}, {units}: {line}" for line in Beside(PenalisedNet(when), units, with_penalty).differences()]
    return wrong


ALL_PENALISED = ["first", "block", "last", ""]


def test_what_a_unit_keeps_beside_its_outputs_may_be_a_part_of_the_loss():
    assert_on_ranks(train_penalised, 2)


def train_unknown_outputs() -> list[str]:
    wrong = []
    for step in (mean_square(2, 4), look_in_between, two_forwards_then_two_backwards, one_backward_of_two_forwards):
        for units in (["first", "secretive", "last", ""], ["secretive", ""], ["first", "secretive", "last"]):
            wrong += Beside(Opener(), units, step, both=[adam]).differences()
    wrong += Beside(Secretive(), [""], open_the_output, both=[adam]).differences()
    return wrong if not bytes_of("gathered") else [*wrong, "memory was left behind"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_unit_may_return_an_unknown_object(world):
    assert_on_ranks(train_unknown_outputs, world)


class Parallel(nn.Module):
    """Nothing but the end of backward says that one of its units is done."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers)


def train_parallel() -> list[str]:
    return Beside(Parallel(), ["layers.0", "layers.1", "layers.2", ""], mean_square(2, 3)).differences()


def test_units_whose_inputs_need_no_gradient():
    assert_on_ranks(train_parallel, 2)


# Torch's own modules with a life of their own.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, (hidden, _) = self.lstm(x)
        x, _ = self.gru(x)
        out, _ = self.attention(x, x, x, need_weights=False)
        return out + hidden[-1].unsqueeze(1)


def train_recurrent() -> list[str]:
    wrong = []
    for units in ([""], ["lstm", "gru", "attention", ""]):
        wrong += Beside(Recurrent(), units, mean_square(2, 5, 3), both=[adam]).differences()
    model = sharded(Recurrent(), ["lstm", "gru", "attention", ""])
    model.eval()
    with torch.no_grad():
        if not torch.equal(model(noise(2, 5, 3)), Recurrent().eval()(noise(2, 5, 3))):
            wrong.append("evaluation differs")
    return wrong


def test_lstm_gru_and_multihead_attention():
    assert_on_ranks(train_recurrent, 2)


def normalise() -> list[str]:
    torch.manual_seed(9)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = sharded(plain, ["0", "1", ""])
    wrong = []
    for step in range(3):
        data = noise(5, 3, seed=10 * step + dist.get_rank())
        for each in (plain, model):
            each(data)
    for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        if not torch.equal(ours, theirs):
            wrong.append(f"{name} is {ours} instead of {theirs}")
    plain.eval(), model.eval()
    if not torch.equal(model(noise(5, 3)), plain(noise(5, 3))):
        wrong.append("evaluation differs")
    return wrong


def test_buffers_follow_each_ranks_own_data_as_in_the_plain_model():
    assert_on_ranks(normalise, 2)


# Memory.


def bytes_of(kind: str) -> int:
    return sum(tensor.untyped_storage().nbytes() for name, tensor in live_buffers() if name == kind)


class Watch(nn.Module):
    """Notes how much is gathered while it runs."""

    def __init__(self, notes: list[int]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(bytes_of("gathered"))
        return x


def measure_memory(reshard: bool) -> dict[str, list[int]]:
    size = 8
    notes: list[int] = []
    model = nn.Sequential(*(nn.Sequential(nn.Linear(size, size, bias=False), Watch(notes)) for _ in range(4)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model)
    optimizer = adam(model.parameters())
    unit = size * size * 4
    found: dict[str, list[int]] = {"during": [], "forward": [], "backward": [], "evaluation": [], "gradients": []}
    for _ in range(3):
        notes.clear()
        loss = model(noise(2, size)).sum()
        found["during"].append(max(notes) // unit)
        found["forward"].append(bytes_of("gathered") // unit)
        loss.backward()
        found["backward"].append(bytes_of("gathered"))
        found["gradients"].append(bytes_of("gradient"))
        optimizer.step()
        with torch.no_grad():
            model(noise(2, size))
        found["evaluation"].append(bytes_of("gathered"))
    return found


def test_full_parameters_are_freed_after_forward_and_after_backward():
    for found in run_ranks(measure_memory, 2, True):
        assert max(found["during"]) <= 2  # the unit that runs, and the next one
        assert found["forward"] == found["backward"] == found["evaluation"] == found["gradients"] == [0, 0, 0]


def test_without_resharding_full_parameters_are_freed_after_backward():
    for found in run_ranks(measure_memory, 2, False):
        assert found["forward"] == [4, 4, 4]
        assert found["backward"] == found["evaluation"] == found["gradients"] == [0, 0, 0]


# Errors.


class Fragile(nn.Module):
    """Raises where it is told to, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(4, 4), ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise KeyError("in forward")
        x = self.linear(x)
        if self.where == "backward":
            x.register_hook(self.fail)
        return x

    def fail(self, grad: Tensor) -> None:
        raise KeyError("in backward")


def fail_and_go_on(where: str) -> list[str]:
    torch.manual_seed(10)
    plain = nn.Sequential(nn.Linear(4, 4), Fragile(), nn.Linear(4, 2))

    def step(model, rank, number):
        if number == 2:
            model[1].where = where
            try:
                model(noise(3, 4)).sum().backward()
                raise AssertionError("nothing was raised")
            except KeyError:
                model[1].where = ""
                # Nobody is told that a backward pass has failed: its memory is freed when the next pass begins.
                if where == "forward" and (bytes_of("gathered") or bytes_of("gradient")):
                    raise AssertionError("memory was left behind") from None
                model.zero_grad()
        yield model(noise(3, 4, seed=10 * number + rank)).square().mean()

    wrong = []
    for reshard in (True, False):
        for units in (["0", "1", "2", ""], [""], ["1", ""]):
            kwargs = {"reshard_after_forward": reshard}
            wrong += Beside(plain, units, step, steps=4, kwargs=kwargs, both=[adam]).differences()
    return wrong


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception_on_all_ranks(where, world):
    assert_on_ranks(fail_and_go_on, world, where)


def test_a_model_that_is_thrown_away_is_freed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    held = [weakref.ref(buffer) for unit in units_in(model) for buffer in unit.buffers]
    del model, optimizer
    gc.collect()
    assert [buffer() for buffer in held] == [None, None]
