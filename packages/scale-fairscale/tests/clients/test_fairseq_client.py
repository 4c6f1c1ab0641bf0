"""fairseq 0.12.2, unmodified, trains under `--ddp-backend fully_sharded` on two CPU ranks as under `legacy_ddp`.

It is not installed beside our packages: `nox -s fairscale_clients` makes an environment for it.
"""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from two_ranks import launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fairseq") is None, reason="needs fairseq: nox -s 'fairscale_clients(fairseq)'"
)

SHIM = '''
"""What fairseq 0.12.2 needs before it starts, on Python 3.11 and without CUDA; its source stays as it is."""
import dataclasses

import torch

if not torch.cuda.is_available():
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # Its trainer calls this under fully_sharded alone.

plain = dataclasses.dataclass


def dataclass(cls=None, /, **kwargs):  # Python 3.11 takes no default that can't be hashed.
    def decorate(of):
        return plain(of, **{**({} if "__hash__" in vars(of) else {"unsafe_hash": True}), **kwargs})

    return decorate if cls is None else decorate(cls)


dataclasses.dataclass = dataclass
'''
TRAIN = (
    "--task dummy_lm --arch transformer_lm --batch-size 2 --optimizer adam --lr 0.0001 --disable-validation "
    "--log-format json --log-interval 1 --seed 1 --cpu --distributed-backend gloo --distributed-world-size 2"
)
SMALL = (
    "--dict-size 1000 --tokens-per-sample 16 --decoder-layers 2 --decoder-embed-dim 64 --decoder-ffn-embed-dim 64 "
    "--decoder-attention-heads 2 --dropout 0.0"
)
SHARDED = ("--ddp-backend", "fully_sharded", "--cpu-offload", "--checkpoint-activations")


def train(folder: Path, num_updates: int, *options: str, model: str = SMALL) -> list[str]:
    """Runs fairseq-train on two ranks; returns the loss of each update as it prints it.

    Args:
        folder: Where it runs.
        num_updates: After how many updates it ends.
        *options: Of this run.
        model: The sizes; empty for fairseq's own.
    """
    shim = folder / "shim"
    shim.mkdir(exist_ok=True)
    (shim / "sitecustomize.py").write_text(SHIM)
    arguments = [*TRAIN.split(), *model.split(), "--max-update", str(num_updates), *options]
    printed = launch(folder, Path(sys.executable).with_name("fairseq-train"), *arguments, pythonpath=shim)
    lines = re.findall(r"INFO \| train_inner \| (\{.*\})", printed)
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses under fairseq's own data parallelism."""
    return train(tmp_path_factory.mktemp("legacy"), 5, "--ddp-backend", "legacy_ddp", "--no-save")


def test_losses_are_those_of_legacy_ddp(expected: list[str], tmp_path: Path) -> None:
    assert len(expected) == 5 and len(set(expected)) == 5
    assert train(tmp_path, 5, *SHARDED, "--no-save") == expected


@pytest.mark.parametrize("options", [(), ("--use-sharded-state",)], ids=["whole", "sharded"])
def test_it_saves_and_resumes(expected: list[str], tmp_path: Path, options: tuple[str, ...]) -> None:
    save = ("--save-dir", str(tmp_path / "checkpoints"), "--save-interval-updates", "3")
    assert train(tmp_path, 3, *SHARDED, *save, *options) == expected[:3]
    assert list((tmp_path / "checkpoints").glob("checkpoint_last*.pt"))
    assert train(tmp_path, 5, *SHARDED, *save, *options) == expected[3:]


def test_it_resumes_with_the_state_of_its_optimizer_sharded(expected: list[str], tmp_path: Path) -> None:
    sharding = ("--ddp-backend", "legacy_ddp", "--zero-sharding", "os")
    save = ("--save-dir", str(tmp_path / "checkpoints"), "--save-interval-updates", "3")
    assert train(tmp_path, 3, *sharding, *save) == expected[:3]
    assert train(tmp_path, 5, *sharding, *save) == expected[3:]


def test_losses_at_fairseqs_sizes_equal_legacy_ddp_over_a_resume(tmp_path: Path) -> None:
    """70 million parameters, 49,996 words, 512 tokens in a sample, and dropout, which is drawn alike."""
    plain = train(tmp_path, 5, "--ddp-backend", "legacy_ddp", "--no-save", model="")
    assert len(plain) == 5 and len(set(plain)) == 5
    save = ("--save-dir", str(tmp_path / "checkpoints"), "--save-interval-updates", "3")
    assert train(tmp_path, 3, *SHARDED, *save, model="") == plain[:3]
    assert train(tmp_path, 5, *SHARDED, *save, model="") == plain[3:]
    shutil.rmtree(tmp_path / "checkpoints")  # 841 MB each.
