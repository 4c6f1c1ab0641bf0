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
from fsdp_parity import adam, assert_same_grads, assert_trains_as_plain, mean_square, noise, sharded
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from scale_check.exact import assert_equal
from scale_core.flat.live_buffers import live_buffers
from scale_fsdp import fully_shard
from scale_fsdp.runtime.unit import units_in

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


def train_branches(step) -> None:
    for reshard in (True, False):
        kwargs = {"reshard_after_forward": reshard}
        assert_trains_as_plain(Branches(), [""], step, steps=6, **kwargs)
        assert_trains_as_plain(Branches(), ["stem", ""], step, steps=6, **kwargs)


@pytest.mark.ranks(1, 2)
def test_parameters_that_no_rank_uses_in_a_step_have_no_gradient():
    def unused_on_all(model, rank, step):
        yield model(noise(3, 4, seed=10 * step + rank), step % 2 == 0, step % 3 == 0).square().mean()

    train_branches(unused_on_all)


def unused_on_some(model, rank, step):
    yield model(noise(3, 4, seed=10 * step + rank), step % 2 == rank % 2, step % 3 == rank).square().mean()


@pytest.mark.fault(29)
@pytest.mark.ranks(2)
def test_parameters_unused_on_a_rank_count_as_zeros_there():
    train_branches(unused_on_some)


@pytest.mark.gloo("three ranks' sums in rank order, to the bit")
@pytest.mark.fault(29)
@pytest.mark.ranks(3)
def test_parameters_unused_on_one_of_three_count_as_zeros_there():
    train_branches(unused_on_some)


@pytest.mark.ranks(2)
def test_parameters_may_be_unused_in_one_micro_batch():
    def used_by_turns(model, rank, step):
        """Two micro-batches, of which each uses another branch on another rank."""
        yield model(noise(3, 4, seed=10 * step + rank), rank == 0, False).square().mean()
        yield model(noise(3, 4, seed=10 * step + rank + 5), False, rank == 1 and step > 1).square().mean()

    train_branches(used_by_turns)


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


@pytest.mark.ranks(2)
def test_a_unit_may_be_called_several_times_in_a_step():
    for units in (["block", ""], ["embed", "block", "head", ""]):
        for reshard in (True, False):
            assert_trains_as_plain(Repeated(), units, mean_square(2, 3), reshard_after_forward=reshard)


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


@pytest.mark.ranks(2)
def test_passes_forwarded_together_add_up_as_plainly():
    """A sum waits under no_sync; then two passes are forwarded before their backwards, and one graph is kept.

    The last backward reduces what the passes before it have left in the sum, so a block that ends its backward after
    the first of its three calls would send the sum by itself, and its own gradient later: other roundings.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
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
        assert_same_grads(model, plain, f"{order}, reshard {reshard}")


@pytest.mark.parametrize(
    "step",
    [two_forwards_then_two_backwards, one_backward_of_two_forwards, forwards_without_backward, forwards_before_it],
)
@pytest.mark.ranks(1, 2, in_turn=True)
def test_forwards_and_backwards_may_come_in_any_order(step):
    def three_linears() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))

    for units in (ALL, [""], ["1", ""]):
        for reshard in (True, False):
            kwargs = {"reshard_after_forward": reshard}
            assert_trains_as_plain(three_linears(), units, step, **kwargs, optimizers=[adam])


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


@pytest.mark.ranks(2)
def test_outputs_keep_their_container():
    class Inner(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.linear = kind, nn.Linear(3, 3)

        def forward(self, x: Tensor):
            return OUTPUTS[self.kind][0](self.linear(x))

    class Shaped(nn.Module):
        """A unit that returns its output in some container, inside a model that takes it out again."""

        def __init__(self, kind: str) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.kind = kind
            self.first, self.unit = nn.Linear(3, 3), Inner(kind)

        def forward(self, x: Tensor) -> Tensor:
            return OUTPUTS[self.kind][1](self.unit(self.first(x)))

    for kind in OUTPUTS:
        assert_trains_as_plain(Shaped(kind), ["first", "unit", ""], mean_square(2, 3), optimizers=[adam])
        out = sharded(Inner(kind), [""])(noise(2, 3))
        assert type(out) is type(OUTPUTS[kind][0](noise(2, 3))), f"{kind}: became {type(out)}"


@pytest.mark.ranks(2)
def test_a_unit_may_return_none():
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

    assert_trains_as_plain(Listener(), ["first", "silent", ""], mean_square(2, 3))


@pytest.mark.ranks(2)
def test_calls_by_keyword_alone():
    def call_by_keywords(model, rank, step):
        yield model(batch={"x": noise(2, 3, seed=step), "scale": noise(2, 1, seed=rank)}, flag=True).square().mean()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(3))

        def forward(self, *, x: Tensor, scale: list[Tensor]) -> Tensor:
            return x * scale[0] + self.bias

    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.body = nn.Linear(3, 3)
            self.scaled = Scaled()

        def forward(self, *, batch: dict[str, Tensor], flag: bool = False) -> Tensor:
            return self.scaled(x=self.body(input=batch["x"]), scale=[batch["scale"], None])

    assert_trains_as_plain(Keywords(), ["body", "scaled", ""], call_by_keywords)


@pytest.mark.ranks(2)
def test_a_unit_may_change_its_input_in_place():
    def in_place() -> nn.Sequential:
        torch.manual_seed(6)
        last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), last)

    for units in (["0", "1", "2", "3", ""], ["3", ""], ["1", "3", ""]):
        assert_trains_as_plain(in_place(), units, mean_square(2, 3), optimizers=[adam])


@pytest.mark.ranks(1, 2)
def test_outputs_that_are_views_may_be_changed_in_place():
    def write_into_the_output(model, rank, step):
        out = model(noise(2, 3, 4, seed=10 * step + rank))
        out[rank % 2] = 0
        out.mul_(2)
        yield out.square().mean()

    class Viewed(nn.Module):
        """A unit whose output is a view of what it has computed."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.reshape(-1, 4)).view(x.shape)

    torch.manual_seed(6)
    linears = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    views = nn.Sequential(Viewed(), nn.ReLU(inplace=True), Viewed())
    for plain in (linears, views):
        for units in (["0", "2", ""], ["0", "2"], [""]):
            for step in (mean_square(2, 3, 4), write_into_the_output):
                assert_trains_as_plain(plain, units, step, steps=3, optimizers=[adam])
                assert not bytes_of("gathered"), f"{units}: memory was left behind"


ALL_PENALISED = ["first", "block", "last", ""]


@pytest.mark.ranks(2)
def test_what_a_unit_keeps_may_be_a_part_of_the_loss():
    def with_penalty(model, rank, step):
        loss = model(noise(2, 4, seed=10 * step + rank)).square().mean()
        yield loss + 0.1 * model.block.penalty

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

    for when, units in itertools.product(("before", "after", "output"), (ALL_PENALISED, ["block", ""], [""])):
        assert_trains_as_plain(PenalisedNet(when), units, with_penalty)


@pytest.mark.ranks(1, 2)
def test_a_unit_may_return_an_unknown_object():
    def open_the_output(model, rank, step):
        yield model(noise(2, 4, seed=step + rank)).hidden.square().mean()

    def look_in_between(model, rank, step):
        loss = model(noise(2, 4, seed=step + rank)).square().mean()
        with torch.no_grad():
            model(noise(2, 4))
        yield loss

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

    for step in (mean_square(2, 4), look_in_between, two_forwards_then_two_backwards, one_backward_of_two_forwards):
        for units in (["first", "secretive", "last", ""], ["secretive", ""], ["first", "secretive", "last"]):
            assert_trains_as_plain(Opener(), units, step, optimizers=[adam])
    assert_trains_as_plain(Secretive(), [""], open_the_output, optimizers=[adam])
    assert not bytes_of("gathered"), "memory was left behind"


@pytest.mark.ranks(2)
def test_units_whose_inputs_need_no_gradient():
    class Parallel(nn.Module):
        """Nothing but the end of backward says that one of its units is done."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return sum(layer(x) for layer in self.layers)

    assert_trains_as_plain(Parallel(), ["layers.0", "layers.1", "layers.2", ""], mean_square(2, 3))


# Torch's own modules with a life of their own.


@pytest.mark.ranks(2)
def test_lstm_gru_and_multihead_attention():
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

    for units in ([""], ["lstm", "gru", "attention", ""]):
        assert_trains_as_plain(Recurrent(), units, mean_square(2, 5, 3), optimizers=[adam])
    model = sharded(Recurrent(), ["lstm", "gru", "attention", ""])
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(noise(2, 5, 3)), Recurrent().eval()(noise(2, 5, 3))), "evaluation differs"


@pytest.mark.ranks(2)
def test_buffers_follow_each_ranks_own_data():
    torch.manual_seed(9)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = sharded(plain, ["0", "1", ""])
    for step in range(3):
        data = noise(5, 3, seed=10 * step + dist.get_rank())
        for each in (plain, model):
            each(data)
    assert_equal(dict(model.named_buffers()), dict(plain.named_buffers()))
    plain.eval(), model.eval()
    assert torch.equal(model(noise(5, 3)), plain(noise(5, 3))), "evaluation differs"


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


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.ranks(2, in_turn=True)
def test_full_parameters_are_freed_after_their_last_use(reshard):
    size, units = 8, ["0", "1", "2", "3"]
    notes: list[int] = []
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(size, size, bias=False), Watch(notes)) for _ in units))
    for name in units:
        fully_shard(plain.get_submodule(name), reshard_after_forward=reshard)
    model = fully_shard(plain)
    optimizer = adam(model.parameters())
    unit = size * size * 4
    for _ in range(3):
        notes.clear()
        loss = model(noise(2, size)).sum()
        if reshard:
            assert max(notes) // unit <= 2  # the unit that runs, and the next one
        assert bytes_of("gathered") // unit == (0 if reshard else 4)
        loss.backward()
        assert bytes_of("gathered") == bytes_of("gradient") == 0
        optimizer.step()
        with torch.no_grad():
            model(noise(2, size))
        assert bytes_of("gathered") == 0


# Errors.


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.ranks(1, 2, in_turn=True)
def test_training_goes_on_after_an_exception_on_all_ranks(where):
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

    for reshard in (True, False):
        for units in (["0", "1", "2", ""], [""], ["1", ""]):
            kwargs = {"reshard_after_forward": reshard}
            assert_trains_as_plain(plain, units, step, steps=4, **kwargs, optimizers=[adam])


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
