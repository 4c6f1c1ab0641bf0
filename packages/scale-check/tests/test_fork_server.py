"""Each rank has a process that imports torch and what the script begins with once, and forks for each of its runs."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scale_check.cli import main
from scale_check.script import pickles

# Each run of the script appends its rank, the number of ranks, and the process it is forked from.
SCRIPT = """
import os, torch, torch.distributed as dist
with open("runs", "a") as runs:
    print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE")), os.getppid(), file=runs)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each run has a process of its own")
def test_ranks_have_processes_of_their_own_for_all_runs() -> None:
    Path("script.py").write_text(SCRIPT)
    assert main(["run", "--steps", "1", "script.py"]) in (0, 1)
    runs = [line.split() for line in Path("runs").read_text().splitlines()]
    of_ranks = {rank: parent for rank, num_ranks, parent in runs if num_ranks == "2"}
    of_one_process = {parent for _, num_ranks, parent in runs if num_ranks == "1"}
    assert of_ranks.keys() == {"0", "1"} and of_ranks["0"] != of_ranks["1"]
    assert of_one_process == set(of_ranks.values())


# Each import of the library appends the number of its process.
LIBRARY = """
import os, threading
with open("imports", "a") as imports:
    print(os.getpid(), file=imports)
"""
# With a dropout that draws, the check ends with code 2.
DROPPED = """
class Dropped(torch.nn.Linear):
    def forward(self, x):
        return dropout(super().forward(x))

"""
# What the library does, how the script imports it, and how many processes import it: one for each rank, or each of the
# four runs as well.
OF_LIBRARIES = {
    "any": ("", "import some_library", 2),
    "asks for the rank": ("rank = os.environ.get('RANK')", "import some_library", 6),
    "starts a thread": (
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "import some_library",
        6,
    ),
    "asks a device": (
        # As torch says of CUDA after `torch.cuda.is_available()`.
        "import torch; process = os.getpid(); torch.cuda._is_in_bad_fork = lambda: os.getpid() != process",
        "import some_library",
        6,
    ),
    "may be missing": ("", "try:\n    import some_library\nexcept ImportError:\n    pass", 4),
    "takes dropout": ("from torch.nn.functional import dropout", "from some_library import dropout", 2),
}


def install_library(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("libraries").mkdir()
    Path("libraries", "some_library.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["libraries", os.environ.get("PYTHONPATH", "")]))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each run has a process of its own")
@pytest.mark.parametrize("kind", OF_LIBRARIES)
def test_a_library_is_imported_once_where_forks_may_share_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, statement, num_imports = OF_LIBRARIES[kind]
    install_library(f"{LIBRARY}{content}", monkeypatch)
    script = (
        SCRIPT.replace("model = torch.nn.Linear", f"{DROPPED}model = Dropped") if kind == "takes dropout" else SCRIPT
    )
    Path("script.py").write_text(f"{statement}\n{script}")
    assert main(["run", "--steps", "1", "script.py"]) in (0, 1)
    assert len(Path("imports").read_text().split()) == num_imports


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each run has a process of its own")
def test_a_module_beside_the_script_is_imported_in_each_run() -> None:
    Path("own_module.py").write_text(LIBRARY)
    Path("script.py").write_text(f"import own_module\n{SCRIPT}")
    assert main(["run", "--steps", "1", "script.py"]) in (0, 1)
    assert len(Path("imports").read_text().split()) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each run has a process of its own")
def test_a_library_finds_modules_beside_the_script_as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = Path("scripts")  # Not the folder of the process, where any program finds modules.
    scripts.mkdir()
    (scripts / "own_module.py").write_text(LIBRARY)
    install_library("try:\n    import own_module\nexcept ImportError:\n    own_module = None", monkeypatch)
    script = scripts / "script.py"
    script.write_text(f"import some_library\nassert some_library.own_module is not None\n{SCRIPT}")
    assert main(["run", "--steps", "1", str(script)]) in (0, 1)
    assert len(Path("imports").read_text().split()) == 6


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each run has a process of its own")
def test_numbers_that_a_library_draws_are_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    install_library("import random, numpy\nnumbers = random.random(), float(numpy.random.rand())", monkeypatch)
    write = "with open('numbers', 'a') as file:\n    print(*some_library.numbers, file=file)\n"
    Path("script.py").write_text(f"import some_library\n{write}{SCRIPT}")
    assert main(["run", "--steps", "1", "script.py"]) in (0, 1)
    numbers = Path("numbers").read_text().splitlines()
    assert len(numbers) == 4 and len(set(numbers)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each run has a process of its own")
def test_a_run_does_not_see_variables_of_imports_that_it_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    install_library("import os\nos.environ.setdefault('DEVICE', os.environ.get('LOCAL_RANK', ''))", monkeypatch)
    check = "assert os.environ['DEVICE'] == os.environ['LOCAL_RANK']\n"
    Path("script.py").write_text(f"import os, some_library\n{check}{SCRIPT}")
    assert main(["run", "--steps", "1", "script.py"]) in (0, 1)


def test_a_run_that_a_signal_ends_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    Path("killed.py").write_text("import os\nprint('so far', flush=True)\nos.kill(os.getpid(), 9)\n")
    assert main(["run", "killed.py"]) == 2
    message = capsys.readouterr().err
    assert "ended with code -9. It said last:" in message and "so far" in message


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(6, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor(3, dtype=torch.uint8),
        torch.empty(0, 3, dtype=torch.float16),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([[0.0, 1.0]]).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.layout}",
)
def test_tensors_are_the_same_after_pickling(tensor: Tensor) -> None:
    first, second = pickle.loads(pickles.dumps([tensor, tensor]))
    assert first is second and type(first) is type(tensor)
    assert first.dtype == tensor.dtype and first.requires_grad == tensor.requires_grad
    assert first.shape == tensor.shape and torch.equal(first.to_dense(), tensor.to_dense())
