"""What the package shows is what people write, and importing it starts nothing."""

import subprocess
import sys

import scale_adascale

IMPORT_AND_LIST = """
import sys, threading, torch
import scale_adascale
assert threading.active_count() == 1
assert not torch.distributed.is_initialized()
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_its_names_are_those_that_it_says() -> None:
    assert sorted(scale_adascale.__all__) == scale_adascale.__all__
    for name in scale_adascale.__all__:
        assert getattr(scale_adascale, name).__module__ == "scale_adascale"


def test_importing_it_starts_nothing_and_imports_no_technique() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LIST], capture_output=True, text=True, timeout=600, check=True
    )
    loaded = set(run.stdout.split())
    assert {"scale_adascale", "scale_core", "torch"} <= loaded
    assert not {"scale_fsdp", "scale_oss", "sklearn", "matplotlib"} & loaded
