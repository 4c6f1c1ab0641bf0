"""What the package shows is what people write, and importing it loads no torch and starts nothing."""

import subprocess
import sys

import scale_pipe

IMPORT_AND_LIST = """
import sys, threading
import scale_pipe
assert threading.active_count() == 1
print(*sorted({name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)))
"""

LOAD_PIPELINES = """
import sys
from scale_pipe import DistributedPipe, Pipe, split
print(*(name for name in sys.modules if name.startswith("scale_pipe.schedules.")))
"""


def test_its_names_are_found_where_people_import_them_from() -> None:
    for name in scale_pipe.__all__:
        assert getattr(scale_pipe, name).__module__ == "scale_pipe"


def test_importing_it_loads_the_standard_library_alone() -> None:
    run = subprocess.run(
        [sys.executable, "-I", "-c", IMPORT_AND_LIST], capture_output=True, text=True, timeout=600, check=True
    )
    assert "scale_pipe" in run.stdout.split()
    assert not {"torch", "numpy", "scale_core", "scale_checkpoint"} & set(run.stdout.split())


def test_pipelines_load_no_solver_simulator_or_pictures() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOAD_PIPELINES], capture_output=True, text=True, timeout=600, check=True
    )
    loaded = {name.split(".")[2] for name in run.stdout.split()}
    assert "schedule" in loaded
    assert not {"solver", "simulation", "visualize"} & loaded
