"""What the package shows is what people write, and importing it starts nothing."""

import subprocess
import sys

import scale_checkpoint

IMPORT_AND_LIST = """
import sys, threading
import torch
threads = threading.active_count()
before = {name.split(".")[0] for name in sys.modules}
import scale_checkpoint
assert threading.active_count() == threads and not torch.cuda.is_initialized()
print(*sorted({name.split(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))
"""


def test_its_names_are_found_where_people_import_them_from() -> None:
    for name in scale_checkpoint.__all__:
        assert getattr(scale_checkpoint, name).__module__ == "scale_checkpoint"


def test_an_import_loads_only_torch_and_core_starts_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LIST], capture_output=True, text=True, timeout=600, check=True
    )
    assert run.stdout.split() == ["scale_checkpoint", "scale_core"]
