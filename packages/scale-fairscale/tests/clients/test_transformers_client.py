"""transformers 4.26.1, unmodified: its Trainer with FairScale's options on two CPU ranks, beside DDP.

It is not installed beside our packages: `nox -s fairscale_clients` makes an environment for it.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or metadata.version("transformers") != "4.26.1",
    reason="needs transformers 4.26.1: nox -s 'fairscale_clients(transformers)'",
)

PROGRAM = """
import json
import sys
import warnings
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

warnings.simplefilter("ignore")
way, folder, resume, rank = sys.argv[1], sys.argv[2], sys.argv[3] == "resume", int(sys.argv[4])
set_seed(1)
generator = torch.Generator().manual_seed(5)
rows = torch.randint(50, (64, 12), generator=generator)
samples = [{"input_ids": row, "labels": row} for row in rows]
sizes = dict(vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2)
model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
arguments = TrainingArguments(
    folder, max_steps=6, save_steps=3, logging_steps=1, per_device_train_batch_size=2, learning_rate=1e-2,
    gradient_accumulation_steps=2, max_grad_norm=0.5, no_cuda=True, xpu_backend="gloo", local_rank=rank,
    sharded_ddp="" if way == "ddp" else way, report_to=[], disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=samples)
trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3") if resume else None)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
Path(folder, f"losses-{resume}-{rank}.json").write_text(json.dumps(losses))
"""


def train(way: str, folder: Path, resume: bool) -> list[float]:
    """Returns the losses that the Trainer logs, the same on both ranks."""
    (folder / "program.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        # It loads its own files by torch.load as it was before 2.6.
        environment |= {"MASTER_ADDR": "127.0.0.1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": 1, "HF_HUB_OFFLINE": 1}
        arguments = [way, str(folder), "resume" if resume else "begin", str(rank)]
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(folder / "program.py"), *arguments],
                env=os.environ | {name: str(value) for name, value in environment.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    printed = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(printed)
    return list(json.loads((folder / f"losses-{resume}-0.json").read_text()))


@pytest.fixture(scope="module")
def of_ddp(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train("ddp", tmp_path_factory.mktemp("ddp"), resume=False)


def test_the_trainer_trains_saves_and_resumes_as_with_ddp(of_ddp: list[float], tmp_path: Path) -> None:
    assert train("simple", tmp_path, resume=False) == of_ddp and len(of_ddp) == 6
    assert train("simple", tmp_path, resume=True) == of_ddp


@pytest.mark.parametrize("way", ["zero_dp_2", "zero_dp_3", "zero_dp_3 auto_wrap"])
def test_sharded_models_train_as_with_ddp(way: str, of_ddp: list[float], tmp_path: Path) -> None:
    assert train(way, tmp_path, resume=False) == of_ddp


def test_a_state_of_which_the_trainer_has_saved_one_part_alone_is_refused(tmp_path: Path) -> None:
    train("zero_dp_3", tmp_path, resume=False)  # It saves what rank 0 has of the optimizer's state.
    with pytest.raises(AssertionError, match="this optimizer state is the shard of rank 0 of 2, and this rank holds"):
        train("zero_dp_3", tmp_path, resume=True)
