"""The moving average of shards is that of torch on the whole model, and is evaluated, saved and resharded."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_parity import noise, sharded
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_core.state import sharded_state_dict
from scale_core.state.validation import StateMismatch
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, ShardedEMA, fully_shard
from scale_fsdp import ema as ema_module
from scale_snapshot import load_snapshot, save_snapshot


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.up, self.down = nn.BatchNorm1d(5), nn.Linear(5, 17), nn.Linear(17, 3)
        self.up.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(self.norm(x)).relu())
        return result


LAYOUTS = {"units": {}, "flat": {"flatten_parameters": True}, "kept": {"reshard_after_forward": False}}


def change(model: nn.Module, step: int) -> None:
    """What an optimizer does, the same on any number of ranks; and what a batch norm does."""
    if isinstance(model, AveragedModel):
        return
    state = Model().state_dict()
    whole = {name: noise(*tensor.shape, seed=step).abs() for name, tensor in state.items() if tensor.ndim}
    count = {"norm.num_batches_tracked": torch.tensor(step)}
    model.load_state_dict({name: whole.get(name, count.get(name)) for name in state})


def followed(model: nn.Module, average: AveragedModel, ema: ShardedEMA, plain: nn.Module, steps: int = 5) -> None:
    for step in range(steps):
        for each in (plain, model):
            change(each, step)
        average.update_parameters(plain)
        ema.update()


def assert_is_average(state: dict, average: nn.Module | dict) -> None:
    expected = average if isinstance(average, dict) else average.state_dict()
    assert_equal({name: state[name] for name in expected}, expected)


@pytest.mark.ranks(1, 2, 3)
def test_it_equals_torchs_average_of_the_whole_model_bit_by_bit():
    for layout, kwargs in LAYOUTS.items():
        for use_buffers in (False, True):
            plain, model = Model(), sharded(Model(), ["up", ""], **kwargs)
            average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
            ema = ShardedEMA(model, 0.9, average_buffers=use_buffers)
            followed(model, average, ema, plain)
            x = noise(4, 5)
            model.eval()
            plain.eval()
            average.eval()
            assert torch.equal(model(x), plain(x)), f"{layout}, buffers {use_buffers}: the model itself"
            with ema.swapped():
                assert_is_average(model.state_dict(), average.module)
                assert torch.equal(model(x), average(x))
            assert torch.equal(model(x), plain(x))
            assert_is_average(model.state_dict(), plain)
            followed(model, average, ema, plain, steps=2)
            with ema.swapped():
                assert_is_average(model.state_dict(), average.module)


@pytest.mark.parametrize("wrap", [FullyShardedDataParallel, lambda model: model, lambda model: nn.Sequential(model)])
def test_any_model_that_holds_parameters_is_averaged(wrap):
    plain = Model()
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    model = wrap(copy.deepcopy(plain))
    inner = model[0] if isinstance(model, nn.Sequential) else model
    ema = ShardedEMA(model, 0.7)
    followed(inner, average, ema, plain)
    with ema.swapped():
        assert_is_average(inner.state_dict(), average.module)


def test_half_precision_is_averaged_in_a_wider_dtype():
    model = fully_shard(Model().bfloat16())
    ema = ShardedEMA(model, 0.999, dtype=torch.float32)
    ema.update()
    of_buffers = {name.removeprefix("norm."): average.dtype for name, average in ema.buffer_averages.items()}
    assert of_buffers == {
        "running_mean": torch.float32,
        "running_var": torch.float32,
        "num_batches_tracked": torch.int64,
    }
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.down.weight += 1.0
    changed = model.down.weight.detach().clone()
    ema.update()
    average = ema.state_dict()["ema.model.down.weight"].tensor
    assert average.dtype == torch.float32
    assert torch.equal(average, torch.lerp(start["down.weight"].float(), changed.float(), 1 - 0.999))
    with ema.swapped():
        assert torch.equal(model.down.weight, average.bfloat16())
    assert torch.equal(model.down.weight, changed)
    assert torch.equal(ema.state_dict()["ema.model.down.weight"].tensor, average)


def test_a_copy_of_model_and_average_goes_on_by_itself():
    model = fully_shard(Model())
    ema = ShardedEMA(model, 0.9)
    ema.update()
    its_model, its_ema = copy.deepcopy((model, ema))
    assert its_ema.model is its_model
    before = {key: copy.deepcopy(value) for key, value in ema.state_dict().items() if key.endswith("running_mean")}
    change(its_model, 3)
    its_ema.update()
    with its_ema.swapped():
        assert torch.equal(its_model(noise(2, 5)), its_model(noise(2, 5)))
    assert all(torch.equal(ema.state_dict()[key], value) for key, value in before.items())
    assert its_ema.num_updates == 2
    assert ema.num_updates == 1


def write(folder: str) -> None:
    plain, model = Model(), sharded(Model(), ["up", ""])
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ema = ShardedEMA(model, 0.9)
    followed(model, average, ema, plain)
    save_snapshot(f"{folder}/ours", 5, {**sharded_state_dict(model), **ema.state_dict()})
    dcp.save({"ema": ema.state_dict()}, checkpoint_id=f"{folder}/torch")
    fresh = ShardedEMA(model, 0.9)
    fresh.load_state_dict(ema.state_dict())
    with fresh.swapped():
        assert_is_average(model.state_dict(), average.module)
    full = {f"ema.model.{name}": tensor for name, tensor in average.module.state_dict().items()}
    fresh = ShardedEMA(model, 0.9)
    fresh.load_state_dict({**full, "ema.num_updates": 5})
    with fresh.swapped():
        assert_is_average(model.state_dict(), average.module)
    if group_of().rank == 0:
        torch.save((plain.state_dict(), average.module.state_dict()), f"{folder}/expected.pt")
    assert fresh.num_updates == 5, "num_updates"


def read(folder: str) -> None:
    weights, averages = torch.load(f"{folder}/expected.pt")
    for way in ("ours", "torch"):
        model = sharded(Model(), ["down", ""], flatten_parameters=way == "torch")
        ema = ShardedEMA(model, 0.9)
        if way == "ours":
            found = load_snapshot(f"{folder}/ours", {**sharded_state_dict(model), **ema.state_dict()})
            ema.load_state_dict(found.state)
            assert_is_average(model.state_dict(), weights)
        else:
            state = {"ema": ema.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/torch")
            ema.load_state_dict(state["ema"])
        assert ema.num_updates == 5, f"{way}: {ema.num_updates} updates"
        with ema.swapped():
            assert_is_average(model.state_dict(), averages)


def test_it_is_saved_and_read_at_another_world_and_wrapping(tmp_path: Path):
    run_ranks(write, 2, str(tmp_path))
    run_ranks(read, 3, str(tmp_path))


def test_what_cannot_be_right_is_refused():
    with pytest.raises(ValueError, match=r"a decay from 0 to 1, got 1.5"):
        ShardedEMA(Model(), 1.5)
    with torch.device("meta"):
        on_meta = Model()
    with pytest.raises(RuntimeError, match=r"is on the meta device and has no values to average.*reshard_to\("):
        ShardedEMA(on_meta).update()
    model = fully_shard(Model())
    ema = ShardedEMA(model, 0.5)
    ema.update()
    with ema.swapped():
        with pytest.raises(RuntimeError, match="inside another one"), ema.swapped():
            pass
        with pytest.raises(RuntimeError, match=r"update\(\) inside swapped\(\)"):
            ema.update()
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) inside swapped\(\)"):
            ema.load_state_dict(ema.state_dict())
    with model.summon_full_params(), pytest.raises(RuntimeError, match="in use"), ema.swapped():
        pass
    with pytest.raises(RuntimeError, match="changed inside"), ema.swapped(), torch.no_grad():
        model.down.bias.add_(1.0)
    loss = model(noise(2, 5)).sum()
    with ema.swapped():
        pass
    with pytest.raises(RuntimeError, match="changed between its forward and its backward"):
        loss.backward()
    state = ema.state_dict()
    with pytest.raises(StateMismatch, match=r"ema.model.down.bias is missing in the state"):
        ema.load_state_dict({key: value for key, value in state.items() if "down.bias" not in key})
    with pytest.raises(StateMismatch, match=r"ema.model.down.bias: the saved shape is \(4,\), expected \(3,\)"):
        ema.load_state_dict({**state, "ema.model.down.bias": torch.ones(4)})
    with pytest.raises(StateMismatch, match=r"ema.model.norm.running_mean: the saved shape is \(1,\), expected \(5,\)"):
        ema.load_state_dict({**state, "ema.model.norm.running_mean": torch.ones(1)})
    plain = ShardedEMA(Model())
    with pytest.raises(StateMismatch, match=r"ema.model.down.bias: the saved shape is \(1,\), expected \(3,\)"):
        plain.load_state_dict({**plain.state_dict(), "ema.model.down.bias": torch.ones(1)})
    model.to("meta")
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"parameters are no longer those that are averaged.*reshard_to"):
        ema.update()


def test_a_swap_that_fails_half_way_is_taken_back(monkeypatch):
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    ema = ShardedEMA(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    swap, calls = ema_module._swap, []

    def fails_at_the_third(live, average):
        calls.append(live)
        if len(calls) == 3:
            raise MemoryError
        return swap(live, average)

    monkeypatch.setattr(ema_module, "_swap", fails_at_the_third)
    with pytest.raises(MemoryError), ema.swapped():
        pass
    assert not ema.is_swapped
    assert_equal(model, before)
