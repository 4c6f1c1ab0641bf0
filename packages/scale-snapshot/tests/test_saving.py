"""A resumed training equals the one that was never interrupted, whatever it consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_values import by_rank
from sharded_by_hand import Model, adam, cut
from sharded_by_hand import train as train_by_hand
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scale_core import ShardedGradScaler
from scale_core.errors import ScaleDistributedError
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.state.local_shard import LocalShard
from scale_core.testing import run_ranks
from scale_snapshot import RandomState, SnapshotError, async_save, latest, load, load_snapshot, save, save_snapshot


class Batches:
    """A source of data with a position, which draws its order."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position, self.order = rank, 0, list(range(20))
        torch.manual_seed(rank)
        self.order = torch.randperm(20).tolist()

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Tensor:
        self.position += 1
        return torch.full((4, 6), float(self.order[self.position % 20] + self.rank)) / 20

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": tuple(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], list(state["order"])


class Training:
    """With dropout, a scheduler, a scaler, averaged weights and data of its own on each rank, under DDP."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.model: nn.Module = DistributedDataParallel(plain) if dist.is_initialized() else plain
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = OneCycleLR(self.optimizer, 0.05, total_steps=30)
        self.scaler = ShardedGradScaler(init_scale=2.0**40, growth_interval=2)  # Its first steps are left out.
        self.average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        self.data = Batches(dist.get_rank() if dist.is_initialized() else 0)
        torch.manual_seed(seed + self.data.rank)

    @property
    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "average": self.average,
            "data": self.data,
            "random": RandomState(),
        }

    def run(self, num_steps: int) -> list[Tensor]:
        losses = []
        for _ in range(num_steps):
            loss = self.model(next(self.data)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.average.update_parameters(self.model)
            losses.append(loss.detach())
        # Buffers of averages differ between ranks; those of the lowest one are saved.
        averages = self.average.state_dict() if self.data.rank == 0 else dict(self.average.named_parameters())
        return [*losses, *(value.detach().clone() for value in averages.values())]


def save_half_way(folder: Path) -> list[Tensor]:
    training = Training()
    training.run(6)
    save(folder, 6, training.objects)
    return training.run(6)


def resume(folder: Path) -> list[Tensor]:
    training = Training(seed=7)
    assert load(folder, training.objects).step == 6
    return training.run(6)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("num_ranks", [0, 2])
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path: Path, num_ranks: int) -> None:
    if num_ranks == 0:
        pairs = [(save_half_way(tmp_path), resume(tmp_path))]
    else:
        pairs = list(
            zip(run_ranks(save_half_way, num_ranks, tmp_path), run_ranks(resume, num_ranks, tmp_path), strict=True)
        )
    for expected, got in pairs:
        assert len(got) == len(expected)
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "steps": lambda optimizer: MultiStepLR(optimizer, [2, 3, 3, 5]),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer), CosineAnnealingLR(optimizer, 5)]),
    "in turn": lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 5)], [2]),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_of_torch_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int) -> list[float]:
        found = []
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "plateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    (model, optimizer, scheduler), (other, fresh, its) = made(), made()
    rates(optimizer, scheduler, 3)
    save(tmp_path, 3, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    load(tmp_path, {"model": other, "optimizer": fresh, "scheduler": its})
    fresh.step()  # As torch expects before a scheduler's step.
    assert rates(fresh, its, 4) == rates(optimizer, scheduler, 4)


# ----------------------------------------------------------------------------------- modules and their optimizers


def two_modules() -> dict[str, Any]:
    generator, critic = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    with torch.no_grad():
        for param in [*generator.parameters(), *critic.parameters()]:
            param.uniform_()
    return {
        "generator": generator,
        "of_critic": torch.optim.AdamW(critic[0].parameters(), lr=0.1),
        "critic": critic,
        "of_generator": torch.optim.SGD(generator.parameters(), lr=0.2, momentum=0.9),
        "of_critics_end": torch.optim.Adagrad(critic[1].parameters(), lr=0.3),
    }


def step(objects: dict[str, Any]) -> None:
    objects["critic"](objects["generator"](torch.ones(1, 3))).sum().backward()
    for name in ("of_critic", "of_generator", "of_critics_end"):
        objects[name].step()
        objects[name].zero_grad()


def test_the_history_of_lbfgs_goes_on_where_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.randn(16, 3)

    def build() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=4)}

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        def closure() -> float:
            optimizer.zero_grad()
            loss = model(batch).sub(batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss.item()

        return [float(optimizer.step(closure)) for _ in range(3)]

    objects, others = build(), build()
    losses(**objects)
    save(tmp_path, 3, objects)
    undisturbed = losses(**objects)
    load(tmp_path, others)
    assert losses(**others) == undisturbed


def test_several_optimizers_go_with_the_modules_they_step_on(tmp_path: Path) -> None:
    objects, others = two_modules(), two_modules()
    step(objects)
    save(tmp_path, 1, objects)
    load(tmp_path, others)
    for each in (objects, others):
        step(each)
    for name in ("generator", "critic"):
        for got, expected in zip(others[name].parameters(), objects[name].parameters(), strict=True):
            assert torch.equal(got, expected)


def test_an_optimizer_of_two_modules_is_refused_with_a_fix(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="'both' steps on parameters of the modules first and second") as caught:
        save(tmp_path, 1, {"first": first, "second": second, "both": both})
    assert "pass the modules as one, nn.ModuleDict({'first': first, 'second': second})" in str(caught.value)
    save(tmp_path, 1, {"model": nn.ModuleDict({"first": first, "second": second}), "both": both})
    assert not list(tmp_path.glob("*.tmp*"))


@pytest.mark.parametrize("objects", [{}, {"model": nn.Linear(3, 1)}])
def test_an_optimizer_of_no_module_is_refused_with_what_to_write(tmp_path: Path, objects: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"a parameter of shape \(2, 2\) that is in none of the modules") as caught:
        save(tmp_path, 1, {**objects, "optimizer": optimizer})
    assert '{"model": model, "optimizer": optimizer}' in str(caught.value)


@pytest.mark.parametrize("name", ["a.b", "", "scale", "a[1]", "model@1"])
def test_what_can_be_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="can't be the name of an object"):
        save(tmp_path, 1, {name: nn.Linear(1, 1)})
    with pytest.raises(ValueError, match=r"'model.x' is the name of an entry of the object 'model'"):
        save(tmp_path, 1, {"model": nn.Linear(1, 1), "model.x": 1})


@pytest.mark.parametrize("first", ["a", "a.b"])
def test_values_whose_entries_would_have_one_name_are_refused(tmp_path: Path, first: str) -> None:
    values = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"'a.b' would be the name of two entries"):
        save(tmp_path, 1, dict(sorted(values.items(), key=lambda item: item[0] != first)))


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step of at least 0, got -1"):
        save(tmp_path, -1, {})
    with pytest.raises(ValueError, match="keep of at least 1, got 0"):
        save(tmp_path, 1, {}, keep=0)
    with pytest.raises(TypeError, match="expected objects to be a mapping, got list of Linear"):
        save(tmp_path, 1, [nn.Linear(1, 1)])  # type: ignore[arg-type]  # As programs do.
    with pytest.raises(TypeError, match=r"thing: a builtins.object can't be saved"):
        save(tmp_path, 1, {"thing": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks(2)
def test_wrong_arguments_of_one_rank_are_an_error_on_all(tmp_path: Path) -> None:
    is_wrong = dist.get_rank() == 1
    found = []
    for call in (
        lambda: save(tmp_path, -1 if is_wrong else 1, {"a": 1}),
        lambda: async_save(tmp_path, 1, {"a": 1}, keep=0 if is_wrong else 1),
        lambda: load(tmp_path, {"a": 1}, step=-1 if is_wrong else 1),
    ):
        with pytest.raises(ValueError, match="of at least") as caught:
            call()
        found.append(str(caught.value))
    for messages in zip(*by_rank(found), strict=True):
        assert all("of at least" in message for message in messages), messages


@pytest.mark.ranks(2)
def test_ranks_of_which_one_saves_and_one_loads_both_hear_of_it(tmp_path: Path) -> None:
    with pytest.raises(ScaleDistributedError) as caught:
        save(tmp_path, 1, {"a": 1}) if dist.get_rank() == 0 else load(tmp_path, {"a": 1})
    message = str(caught.value)
    assert "the ranks do different things: rank 0: saving objects; rank 1: loading objects" in message


# --------------------------------------------------------------------------------------------------- other shardings


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = Model()
    if dist.is_initialized():
        model = cut(model, dist.get_rank(), dist.get_world_size(), leave_whole=("frozen",))
    return model, adam(model)


def save_sharded(folder: Path, as_objects: bool) -> None:
    model, optimizer = sharded()
    train_by_hand(model, optimizer, 3)
    if as_objects:
        save(folder, 3, {"model": model, "optim": optimizer, "note": {"of": (1, 2), "at": torch.ones(2)}})
    else:
        save_snapshot(folder, 3, sharded_state_dict(model, optimizer))


def differences(folder: Path, as_objects: bool) -> list[str]:
    model, optimizer = sharded()
    if as_objects:
        found = load(folder, {"model": model, "optim": optimizer}, strict=False)
        assert found.state["model"] is model
    else:
        found = load_snapshot(folder, lambda saved: target_state_dict(model, optimizer, saved), strict=False)
        load_sharded_state_dict(found.state, model, optimizer)
    expected, its = sharded()
    train_by_hand(expected, its, 3)
    for pair in ((model, optimizer), (expected, its)):
        train_by_hand(*pair, 2, first=3)
    ours, theirs = sharded_state_dict(model, optimizer), sharded_state_dict(expected, its)
    return [*(ours.keys() ^ theirs.keys()), *(key for key in ours if not is_same(ours[key], theirs[key]))]


def is_same(ours: Any, theirs: Any) -> bool:
    ours, theirs = (value.tensor if isinstance(value, LocalShard) else value for value in (ours, theirs))
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else bool(ours == theirs)


@pytest.mark.filterwarnings(
    "ignore:.*is loaded in part, as strict=False says. 2 unexpected in it. note.at, note$:UserWarning"
)
@pytest.mark.parametrize("saved_as_objects", [True, False])
@pytest.mark.parametrize("loaded_as_objects", [True, False])
def test_objects_named_model_and_optim_have_sharded_state_keys(
    tmp_path: Path, saved_as_objects: bool, loaded_as_objects: bool
) -> None:
    if not saved_as_objects and not loaded_as_objects:
        return
    run_ranks(save_sharded, 2, tmp_path, saved_as_objects)
    assert differences(tmp_path, loaded_as_objects) == []
    if loaded_as_objects:
        assert run_ranks(differences, 3, tmp_path, loaded_as_objects) == [[]] * 3


def test_a_flat_state_dict_is_saved_and_loaded_as_it_is(tmp_path: Path) -> None:
    model, optimizer = sharded()
    train_by_hand(model, optimizer, 2)
    path = save(tmp_path, 2, sharded_state_dict(model, optimizer))
    assert "scale.objects" not in (path / "manifest.json").read_text()
    state = sharded_state_dict(model, optimizer)
    expected = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    for value in expected:
        state[value].detach().zero_()
    loaded = load(tmp_path, state)
    assert loaded.state.keys() == state.keys()
    assert all(torch.equal(state[key], value) for key, value in expected.items())


def test_tensors_are_written_in_place_and_values_are_returned(tmp_path: Path) -> None:
    note = {"of": (1, 2), "at": torch.ones(2), 3: b"x", "worst": float("inf")}
    save(tmp_path, 1, {"best": torch.full((2,), 3.0), "note": note, "epoch": 4}, extra={"by": "me"})
    best = torch.zeros(2)
    loaded = load(tmp_path, {"best": best, "note": None, "epoch": None})
    assert best.tolist() == [3.0, 3.0]
    assert loaded.state["best"] is best
    assert loaded.state["epoch"] == 4
    assert loaded.extra == {"by": "me"}
    assert torch.equal(loaded.state["note"].pop("at"), torch.ones(2))
    assert loaded.state["note"] == {"of": (1, 2), 3: b"x", "worst": float("inf")}
    assert latest(tmp_path) == tmp_path / "step-00000001"


# ---------------------------------------------------------------------------------------------- what was not saved


def test_missing_and_unexpected_objects_are_one_error(tmp_path: Path) -> None:
    model, optimizer = sharded()
    save(tmp_path, 1, {"model": model, "optimizer": optimizer, "scaler": ShardedGradScaler()})
    given = {"model": model, "random": RandomState()}
    with pytest.raises(SnapshotError, match=r"not saved: random; not given: optimizer, scaler") as caught:
        load(tmp_path, given)
    assert "the snapshot has the objects model, optimizer, scaler, and load was given model, random" in str(
        caught.value
    )
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"not saved: random; not given: optimizer, scaler\); only what is in both"):
        load(tmp_path, given, strict=False)
    assert torch.equal(before, torch.get_rng_state())


def test_an_object_of_another_kind_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, {"one": nn.Linear(1, 1), "two": ShardedGradScaler()})
    with pytest.raises(SnapshotError, match="'one' was saved as a module, and is an object with a state_dict here"):
        load(tmp_path, {"one": ShardedGradScaler(), "two": ShardedGradScaler()})
    with pytest.raises(SnapshotError, match="'two' was saved as an object with a state_dict, and is a NoneType here"):
        load(tmp_path, {"one": nn.Linear(1, 1), "two": None})


class Refusing(Batches):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("epoch")


def test_an_object_that_does_not_take_its_state_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1, {"data": Batches(0)})
    with pytest.raises(
        SnapshotError, match=r"'data' did not take .*: Refusing.load_state_dict raised KeyError: 'epoch'"
    ):
        load(tmp_path, {"data": Refusing(0)})


@pytest.mark.ranks(2)
def test_ranks_with_different_objects_all_hear_of_it(tmp_path: Path) -> None:
    objects: dict[str, Any] = {"model": nn.Linear(1, 1)}
    if dist.get_rank() == 1:
        objects["scaler"] = ShardedGradScaler()
    with pytest.raises(SnapshotError) as caught:
        save(tmp_path, 1, objects)
    first, second = by_rank(str(caught.value))
    assert first == second
    assert "'scaler' is not given on rank 0 and an object with a state_dict on rank 1" in first


@pytest.mark.ranks(2)
def test_what_one_rank_can_not_save_is_an_error_on_all(tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        save(tmp_path, 1, {"thing": object() if dist.get_rank() == 1 else 1})
    first, second = by_rank((type(caught.value).__name__, str(caught.value)))
    assert first[0] == "ValueError" and "thing: a builtins.object can't be saved" in first[1] and "rank 1" in first[1]
    assert second[0] == "TypeError"
    assert not list(tmp_path.iterdir())


def test_what_fits_of_a_changed_module_is_loaded_if_asked_for(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(tmp_path, 1, {"model": model, "optimizer": optimizer})
    other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5), nn.Linear(1, 1))
    before = other[1].weight.detach().clone()
    its = torch.optim.SGD(other.parameters(), lr=0.7)
    with pytest.raises(SnapshotError, match=r"\(2 missing in it: model.2.weight, model.2.bias; 2 of another shape"):
        load(tmp_path, {"model": other, "optimizer": its})
    with pytest.warns(UserWarning, match="loaded in part") as caught:
        load(tmp_path, {"model": other, "optimizer": its}, strict=False)
    (text,) = (str(warning.message) for warning in caught)
    assert "2 missing in it: model.2.weight, model.2.bias" in text
    assert "the saved shape is (4, 2), expected (5, 2)" in text
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[1].weight, before)
    assert its.param_groups[0]["lr"] == 0.1


@pytest.mark.fault(112)
def test_a_hyperparameter_of_another_kind_changes_nothing(tmp_path: Path) -> None:
    saved, model = nn.Linear(3, 2), nn.Linear(3, 2)
    spoiled = torch.optim.Adam(saved.parameters())
    spoiled.param_groups[0]["lr"] = "0.1"
    save(tmp_path, 1, {"model": saved, "optimizer": spoiled})
    before = model.weight.detach().clone()
    with pytest.raises(SnapshotError, match=r"optim.groups: 'lr' was saved as '0.1', expected a number"):
        load(tmp_path, {"model": model, "optimizer": torch.optim.Adam(model.parameters())})
    assert torch.equal(model.weight, before)


def test_weights_are_converted_where_that_is_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save(tmp_path, 1, {"model": model})
    other = nn.Linear(3, 2, dtype=torch.bfloat16)
    with pytest.raises(SnapshotError, match=r"2 of another dtype: model\.weight: .* or convert with cast=True"):
        load(tmp_path, {"model": other})
    load(tmp_path, {"model": other}, cast=True)
    assert torch.equal(other.weight, model.weight.bfloat16())


def test_a_damaged_snapshot_is_passed_over_without_a_change(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    for step in (1, 2):
        save(tmp_path, step, {"model": model, "scaler": ShardedGradScaler()})
    file = tmp_path / "step-00000002" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.warns(UserWarning, match="passing over an incomplete snapshot"):
        assert load(tmp_path, {"model": model, "scaler": ShardedGradScaler()}).step == 1
