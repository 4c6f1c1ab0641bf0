"""Trainers that use FairScale, unmodified: each trains on two CPU ranks as it does under its own DDP.

None is installed beside our packages: `nox -s fairscale_clients` makes an environment for each.
"""

import functools
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from two_ranks import run_program

Expected = Callable[[str], dict[str, Any]]


class Trainer(NamedTuple):
    requirement: str
    ways: tuple[str, ...]  # of sharding, by the names of its program in `programs`
    saves_one_part: tuple[str, ...] = ()  # of the optimizer's state, that of rank 0, of which no other can resume
    resumes: bool = True


ZERO = ("zero_dp_2", "zero_dp_3", "zero_dp_3 auto_wrap")
TRAINERS = {
    "transformers": Trainer("transformers==4.26.1", ("simple", *ZERO), saves_one_part=ZERO),
    "lightning": Trainer("pytorch-lightning==1.9.5", ("ddp_sharded", "fsdp"), saves_one_part=("fsdp",)),
    "classy_vision": Trainer("classy-vision==0.7.0", ("zero", "zero and ShardedDataParallel")),
    "espnet": Trainer("espnet==202511", ("sharded_ddp",)),
    "stoke": Trainer("stoke==0.2.1", ("sddp", "fsdp"), resumes=False),  # That is the user's own.
}


def train(name: str, folder: Path, way: str, stage: str = "begin") -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the losses of rank 0's passes in this stage, and the trained weights."""
    losses, weights = run_program(f"train_{name}", folder, way, stage)
    return torch.tensor(losses, dtype=torch.float64), [torch.tensor(each, dtype=torch.float64) for each in weights]


def assert_equal(found: Any, expected: Any, name: str) -> None:
    """ClassyVision reads images as fp32; the others train in fp64."""
    rtol = 1e-5 if name == "classy_vision" else 1e-10
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """What a trainer computes under its own DDP, from its name; a test of one that is not installed is skipped."""

    @functools.cache
    def expected(name: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(name)
        return {stage: train(name, folder, "ddp", stage) for stage in ("begin", "resume")[: 1 + TRAINERS[name].resumes]}

    def expected_or_skip(name: str) -> dict[str, Any]:
        requirement = TRAINERS[name].requirement
        if not _is_installed(requirement):
            assert os.environ.get("FAIRSCALE_CLIENT") != name, f"the session must install {requirement}"
            pytest.skip(f"needs {requirement}: nox -s 'fairscale_clients({name})'")
        return expected(name)

    return expected_or_skip


def _is_installed(requirement: str) -> bool:
    name, version = requirement.split("==")
    try:
        return metadata.version(name) == version
    except metadata.PackageNotFoundError:
        return False


WAYS = [(name, way) for name, trainer in TRAINERS.items() for way in trainer.ways]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_it_trains_saves_and_resumes_as_under_ddp(name: str, way: str, of_ddp: Expected, tmp_path: Path) -> None:
    expected = of_ddp(name)
    losses, _ = expected["begin"]
    assert len(losses) >= 6 and len(set(losses.tolist())) > 4
    assert_equal(train(name, tmp_path, way), expected["begin"], name)
    if way in TRAINERS[name].saves_one_part:
        with pytest.raises(AssertionError, match=r"is the shard of rank 0 of 2, and this rank holds other elements"):
            train(name, tmp_path, way, "resume")
    elif TRAINERS[name].resumes:
        assert 0 < len(expected["resume"][0]) < len(losses)  # It has read its checkpoint.
        assert_equal(train(name, tmp_path, way, "resume"), expected["resume"], name)


def test_lightning_resumes_from_the_full_state_of_a_module(of_ddp: Expected, tmp_path: Path) -> None:
    expected, way = of_ddp("lightning"), "fsdp with its state"
    assert_equal(train("lightning", tmp_path, way), expected["begin"], "lightning")
    assert_equal(train("lightning", tmp_path, way, "resume"), expected["resume"], "lightning")
