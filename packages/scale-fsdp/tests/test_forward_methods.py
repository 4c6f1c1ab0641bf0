"""Methods other than forward run gathered once they are registered, and are refused by name until then."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from fsdp_parity import assert_trains_as_plain, noise, sharded
from torch import Tensor, nn

from scale_core.errors import ContractError
from scale_fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from scale_fsdp.runtime.unit import unit_of


class Autoencoder(nn.Module):
    """Two halves that can be run by themselves; `encode` uses a parameter of the module's own as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inward, self.outward = nn.Linear(5, 3), nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.rand(3))

    def encode(self, x: Tensor) -> Tensor:
        return self.inward(x) * self.scale

    def decode(self, hidden: Tensor, *, fail: bool = False) -> dict[str, Tensor]:
        if fail:
            raise KeyError("as the method says")
        return {"x": self.outward(torch.tanh(hidden))}

    def reconstruct(self, x: Tensor) -> Tensor:
        return self.outward(torch.tanh(self.inward(x) * self.scale)).square()

    def halve(this, x: Tensor) -> Tensor:  # noqa: N805  # Nobody has to call it self.
        return this.inward(x) / 2

    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = self(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))["x"]


def registered(plain: nn.Module, units: list[str], names: tuple[str, ...] = ("encode", "decode", "generate")):
    model = sharded(plain, units)
    for name in names:
        register_fsdp_forward_method(model, name)
    return model


@pytest.mark.ranks(1, 2, 3, in_turn=True)
def test_methods_and_forward_train_as_in_the_plain_model():
    def register_methods(model: nn.Module, number: int) -> None:
        if unit_of(model) is not None and number == 0:
            for name in ("encode", "decode", "generate"):
                register_fsdp_forward_method(model, name)

    def by_methods(model: nn.Module, rank: int, number: int) -> Iterator[Tensor]:
        x = noise(2, 5, seed=10 * number + rank)
        yield model.decode(model.encode(x))["x"].square().mean()
        yield model(x).square().mean() + model.encode(x).square().mean()
        yield model.generate(x, 2).square().mean()

    for units in ([""], ["inward", ""]):
        assert_trains_as_plain(Autoencoder(), units, by_methods, before_step=register_methods)


@pytest.mark.ranks(2, in_turn=True)
def test_a_registered_method_gathers_its_unit_once():
    """How often the outermost unit is gathered while its module is called four times: by hand, and registered."""
    counts = []
    for names in ((), ("generate",)):
        model = registered(Autoencoder(), [""], names)
        unit, count = unit_of(model), 0
        gather = unit.buffers[0].gather

        def counted(*args, gather=gather, **options) -> None:
            nonlocal count
            count += 1
            gather(*args, **options)

        unit.buffers[0].gather = counted
        with torch.no_grad():
            if not torch.equal(model.generate(noise(2, 5), 4), Autoencoder().generate(noise(2, 5), 4)):
                count = -1
        counts.append(count)
    assert counts == [4, 1]


@pytest.mark.fault(85)
@pytest.mark.ranks(2, in_turn=True)
def test_an_unregistered_method_is_refused():
    model = sharded(Autoencoder(), [""])
    for call in (lambda: model.encode(noise(2, 5)), lambda: model.decode(noise(2, 3))):
        with pytest.raises(RuntimeError, match="a Linear of the root unit was called outside of the") as caught:
            call()
        words = "Where a method of it has called this, register_fsdp_forward_method(model, 'the method')"
        assert words in str(caught.value)
    model(noise(2, 5)).sum().backward()
    register_fsdp_forward_method(model, "decode")
    with pytest.raises(KeyError, match="as the method says"):
        model.decode(noise(2, 3), fail=True)
    assert not unit_of(model).gathered and unit_of(model).root.entry_unit is None
    with pytest.raises(RuntimeError, match="outside of the unit's forward"):
        model.outward(noise(2, 3))
    with pytest.raises(RuntimeError, match=r"was called .*register_fsdp_forward_method\(model, 'the method'\)"):
        model.halve(noise(2, 5))
    model(noise(2, 5)).sum().backward()
    model.decode(noise(2, 3))["x"].sum().backward()


@pytest.mark.ranks(2, in_turn=True)
def test_different_methods_on_two_ranks_are_an_error():
    """The two run the same units; what is averaged would be gradients of two different things."""
    model = registered(Autoencoder(), ["inward", "outward", ""], ("reconstruct",))
    for _ in range(3):
        model(noise(2, 5)).sum().backward()
        model.reconstruct(noise(2, 5)).sum().backward()
    kinds = [kind.phase for kind in unit_of(model).root.contract.history.orders]
    assert kinds == ["forward of ", "backward with reduction", "forward of  by reconstruct"]
    with pytest.raises(ContractError, match="the ranks differ in what they ran"):
        (model if dist.get_rank() else model.reconstruct)(noise(2, 5)).sum().backward()


@pytest.mark.ranks(2, in_turn=True)
def test_a_method_is_found_through_the_wrapper():
    model = FullyShardedDataParallel(Autoencoder())
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model.module, "encode")
    with torch.no_grad():
        assert torch.equal(model.encode(noise(2, 5)), Autoencoder().encode(noise(2, 5)))


def test_an_interrupted_method_leaves_nothing_open():
    model = registered(Autoencoder(), [""], ("generate",))

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.inward.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(noise(2, 5), 2)
    handle.remove()
    model.generate(noise(2, 5), 2).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_what_cannot_be_registered_is_said():
    with pytest.raises(ValueError, match=r"this Autoencoder is not a unit.*fully_shard\(module\) first"):
        register_fsdp_forward_method(Autoencoder(), "encode")
    model = fully_shard(Autoencoder())
    with pytest.raises(ValueError, match=r"write module\(...\)"):
        register_fsdp_forward_method(model, "forward")
    with pytest.raises(AttributeError, match=r"a Autoencoder has no method 'encoder'"):
        register_fsdp_forward_method(model, "encoder")
    with pytest.raises(TypeError, match="'training' of a Autoencoder is a bool, not a method"):
        register_fsdp_forward_method(model, "training")


def test_names_and_signatures_stay():
    model = registered(Autoencoder(), [""])
    assert model.decode.__name__ == "decode" and model.decode.__doc__ == Autoencoder.decode.__doc__
    assert list(model.state_dict()) == list(Autoencoder().state_dict())


def test_a_method_that_runs_later_is_refused() -> None:
    class Streams(nn.Linear):
        def tokens(self, x):
            yield self(x)

    model = fully_shard(Streams(2, 2))
    with pytest.raises(TypeError, match=r"'tokens' of a Streams is a generator or coroutine"):
        register_fsdp_forward_method(model, "tokens")
