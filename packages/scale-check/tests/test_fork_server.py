"""Each rank has a process that imports torch and what the script begins with once, and forks for each of its runs."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from forked_servers import forked_servers, script_folder  # noqa: F401
from torch import Tensor

from scale_check.cli import main
from scale_check.script import pickles
from scale_check.script.imports import import_for_script

forks = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each run has a process of its own")

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


@forks
@pytest.mark.usefixtures("script_folder")
def test_ranks_have_processes_of_their_own_for_all_runs() -> None:
    Path("script.py").write_text(SCRIPT)
    assert main(["run", "--steps", "1", "script.py"]) in (0, 1)
    runs = [line.split() for line in Path("runs").read_text().splitlines()]
    of_ranks = {rank: parent for rank, num_ranks, parent in runs if num_ranks == "2"}
    of_one_process = {parent for _, num_ranks, parent in runs if num_ranks == "1"}
    assert of_ranks.keys() == {"0", "1"} and of_ranks["0"] != of_ranks["1"]
    assert of_one_process == set(of_ranks.values())


# Each import of the library appends the number of its process, and what it draws.
LIBRARY = """
import os, random
import numpy
with open("imports", "a") as imports:
    print(os.getpid(), random.random(), numpy.random.rand(), file=imports)
"""
# With a dropout that draws, the check ends with code 2.
DROPPED = """
class Linear(torch.nn.Linear):
    def forward(self, x):
        return dropout(super().forward(x))

torch.nn.Linear = Linear
"""
# What the library does, the first lines of the script, and how many processes import the library: one for each rank, or
# each of the four runs as well.
OF_LIBRARIES = {
    "any": ("", "import some_library", 2),
    "asks for the rank": (
        "os.environ.setdefault('DEVICE', os.environ.get('LOCAL_RANK', ''))",
        # A run that repeats the import does not see the variable that the first one has set.
        "import os, some_library\nassert os.environ['DEVICE'] == os.environ['LOCAL_RANK']",
        6,
    ),
    "may be missing": ("", "try:\n    import some_library\nexcept ImportError:\n    pass", 4),
    "takes dropout": (
        "from torch.nn.functional import dropout",
        f"import torch\nfrom some_library import dropout\n{DROPPED}",
        2,
    ),
}


@forks
@pytest.mark.parametrize("kind", OF_LIBRARIES)
@pytest.mark.usefixtures("forked_servers")
def test_a_library_is_imported_once_where_forks_may_share_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, lines, num_imports = OF_LIBRARIES[kind]
    Path("libraries").mkdir()
    Path("libraries", "some_library.py").write_text(f"{LIBRARY}{content}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["libraries", os.environ.get("PYTHONPATH", "")]))
    Path("script.py").write_text(f"{lines}\n{SCRIPT}")
    assert main(["run", "--steps", "1", "script.py"]) in (0, 1)
    imports = [line.partition(" ") for line in Path("imports").read_text().splitlines()]
    assert len(imports) == num_imports
    assert len({numbers for _, _, numbers in imports[:2]}) == 1  # Of the two ranks.


@forks
@pytest.mark.usefixtures("forked_servers")
def test_a_module_beside_the_script_is_imported_in_each_run() -> None:
    Path("own_module.py").write_text(LIBRARY)
    Path("script.py").write_text(f"import own_module\n{SCRIPT}")
    assert main(["run", "--steps", "1", "script.py"]) in (0, 1)
    assert len(Path("imports").read_text().split("\n")) == 5


# What a library does. Only the last import can be shared.
IMPORTED = {
    "starts_a_thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    # As torch says of CUDA after `torch.cuda.is_available()`.
    "asks_a_device": (
        "import os, torch\nprocess = os.getpid()\ntorch.cuda._is_in_bad_fork = lambda: os.getpid() != process"
    ),
    "finds_a_module_of_the_script": "try:\n    import own_module\nexcept ImportError:\n    own_module = None",
    "does_nothing": "",
}


@forks
@pytest.mark.ranks(1, backend=None)
@pytest.mark.parametrize("library", IMPORTED)
def test_an_import_that_a_fork_would_change_is_not_shared(library: str, tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"  # Not the folder of the process, where any program finds modules.
    scripts.mkdir()
    (scripts / "own_module.py").write_text("")
    (scripts / "script.py").write_text(f"import {library}\n")
    (tmp_path / f"{library}.py").write_text(IMPORTED[library])
    sys.path.append(str(tmp_path))
    assert import_for_script([str(scripts / "script.py")]) == (library == "does_nothing")
    assert vars(sys.modules[library]).get("own_module", 0) is not None


@pytest.mark.usefixtures("forked_servers")
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
