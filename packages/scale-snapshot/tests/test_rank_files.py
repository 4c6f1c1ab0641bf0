import json
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from foreign_by_hand import assert_same_bits, fairscale_files, loaded
from torch import nn

from scale_core.testing import run_ranks
from scale_snapshot.convert import open_checkpoint
from scale_snapshot.convert.rank_files import read_rank_files

WEIGHTS = {
    "head.weight": torch.rand(3, 5),
    "head.bias": torch.rand(3),
    "layers.0.weight": torch.rand(4, 7, dtype=torch.float64).to(torch.bfloat16),
    "layers.0.bias": torch.rand(1).to(torch.bfloat16),
}
UNITS = {"": ["head.weight", "head.bias"], "layers.0": ["weight", "bias"]}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_fairscales_local_states_become_the_plain_models_weights(tmp_path, num_ranks):
    files = fairscale_files(tmp_path, WEIGHTS, num_ranks, UNITS)
    expected = {**WEIGHTS, "running_mean": torch.zeros(2)}
    assert_same_bits(loaded(open_checkpoint(tmp_path).tensors, "model."), expected)
    assert_same_bits(loaded(open_checkpoint(files[-1]).tensors, "model."), expected)


def test_what_fairscales_program_saved_beside_the_model_is_kept(tmp_path):
    fairscale_files(tmp_path, WEIGHTS, 2, UNITS, epoch=3, step=12)
    state = open_checkpoint(tmp_path)
    assert state.step == 12 and state.extra["epoch"] == 3 and "shard_metadata" not in state.extra


def test_a_rank_that_is_missing_is_found_out(tmp_path):
    files = fairscale_files(tmp_path, WEIGHTS, 3, UNITS)
    files[2].unlink()
    with pytest.raises(ValueError, match=r"flat_param_0 has 18 elements, and the 2 files .* hold 12: put"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("is_alike", [True, False])
def test_experts_that_differ_between_ranks_are_not_lost(tmp_path, is_alike):
    experts = [torch.ones(4), torch.ones(4) if is_alike else torch.zeros(4)]
    for rank, path in enumerate(fairscale_files(tmp_path, WEIGHTS, 2, UNITS)):
        saved = torch.load(path)
        saved["model"]["experts.0.flat_param_0"] = experts[rank]
        params = {"flat_param_0": {"names": ("weight",), "shapes": ((2, 2),), "numels": (4,), "padding": 0}}
        unit = {"fsdp_path": "experts.0", "params": params, "no_broadcast_optim_state": True, "shared_param_info": []}
        saved["shard_metadata"]["param_metadata"].append(unit)
        torch.save(saved, path)
    if is_alike:
        assert torch.equal(open_checkpoint(tmp_path).tensors["model.experts.0.weight"].load(), torch.ones(2, 2))
    else:
        with pytest.raises(ValueError, match=r"experts\.0\.flat_param_0 differs between .* as an expert does"):
            open_checkpoint(tmp_path)


def test_files_of_another_run_are_found_out(tmp_path):
    fairscale_files(tmp_path, WEIGHTS, 2, UNITS)
    (tmp_path / "x").mkdir()
    other = fairscale_files(tmp_path / "x", WEIGHTS, 2, {"": UNITS[""]})
    other[1].replace(tmp_path / other[1].name)
    with pytest.raises(ValueError, match=r"has no layers\.0\.flat_param_0, which .* has: they are of two runs"):
        open_checkpoint(tmp_path)


def test_flat_parameters_without_metadata_are_refused(tmp_path):
    torch.save({"model": {"_flat_param": torch.ones(3)}}, tmp_path / "rank0.pt")
    with pytest.raises(ValueError, match=r"nothing says which parameters they hold: .*local_metadata_dict\(\)"):
        open_checkpoint(tmp_path)


def scale_fsdp_state(rank: int) -> OrderedDict[str, torch.Tensor]:
    """What `local_state_dict()` of scale-fsdp returns on one of two ranks: 3 and then 1 elements of a weight [2, 2]."""
    start, stop = ((0, 3), (3, 4))[rank]
    weight = {"shape": [2, 2], "dtype": "torch.float32", "start": start, "stop": stop, "entry": "weight", "offset": 0}
    state = OrderedDict(weight=torch.arange(4.0)[start:stop].clone(), count=torch.tensor(rank))
    metadata = {"rank": rank, "world_size": 2, "parameters": {"weight": weight}, "tied": {}, "buffer_names": ["count"]}
    state._metadata = {"": {"version": 1, "scale_fsdp.local": metadata}}
    return state


@pytest.mark.parametrize("key", [None, "model"])
def test_local_states_of_scale_fsdp_describe_themselves(tmp_path, key):
    for rank in range(2):
        state = scale_fsdp_state(rank)
        torch.save(state if key is None else {key: state, "epoch": 3}, tmp_path / f"rank{rank}.pt")
    tree = read_rank_files([tmp_path / "rank1.pt", tmp_path / "rank0.pt"])
    assert torch.equal(tree["model"]["weight"].load(), torch.arange(4.0).view(2, 2))
    assert tree["model"]["count"].load() == 0
    assert tree.get("epoch") == (3 if key else None)
    torch.save(dict(scale_fsdp_state(0)), tmp_path / "rank0.pt")
    with pytest.raises(ValueError, match="nothing says which parameters they hold"):
        read_rank_files([tmp_path / "rank0.pt", tmp_path / "rank1.pt"])


def test_shared_parameters_of_fairscale_have_both_names(tmp_path):
    files = fairscale_files(tmp_path, WEIGHTS, 2, UNITS)
    for path in files:
        content = torch.load(path, weights_only=True)
        content["shard_metadata"]["param_metadata"][0]["shared_param_info"] = [("head.weight", "tied.weight")]
        torch.save(content, path)
    tree = read_rank_files(files)
    assert torch.equal(tree["model"]["tied.weight"].load(), WEIGHTS["head.weight"])
    assert open_checkpoint(files[0]).tied == {"model.tied.weight": "model.head.weight"}


def save_as_fsdp1(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3), nn.BatchNorm1d(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
            with FullyShardedDataParallel.state_dict_type(wrapped, kind):
                (folder / kind.name).mkdir(exist_ok=True)
                torch.save(
                    {"model": wrapped.state_dict(), "epoch": 2}, folder / kind.name / f"rank{dist.get_rank()}.pt"
                )
        with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
            return dict(wrapped.state_dict())


@pytest.fixture(scope="module")
def of_fsdp1(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("fsdp1")
    return folder, run_ranks(save_as_fsdp1, 2, folder)[0]


def test_fsdp1_sharded_state_dicts_become_plain_weights(of_fsdp1):
    folder, full = of_fsdp1
    state = open_checkpoint(folder / "SHARDED_STATE_DICT")
    assert_same_bits(loaded(state.tensors, "model."), full)
    assert json.loads(json.dumps(state.extra)) == {"epoch": 2}


def test_one_file_of_fsdp1_without_the_others_is_found_out(of_fsdp1, tmp_path):
    folder, _ = of_fsdp1
    (tmp_path / "rank0.pt").write_bytes((folder / "SHARDED_STATE_DICT" / "rank0.pt").read_bytes())
    with pytest.raises(ValueError, match=r"0\.weight, in 1 files from .*: 9 elements"):
        open_checkpoint(tmp_path)


def test_fsdp1s_local_state_dicts_are_refused_with_the_reason(of_fsdp1):
    folder, _ = of_fsdp1
    with pytest.raises(ValueError, match=r"flat parameters of torch's FSDP .*SHARDED_STATE_DICT"):
        open_checkpoint(folder / "LOCAL_STATE_DICT")
