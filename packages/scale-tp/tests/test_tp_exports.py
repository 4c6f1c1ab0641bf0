"""The package holds its place and nothing else, until it is filled."""

import subprocess
import sys

import scale_tp

IMPORT_AND_LIST = """
import sys
before = set(sys.modules)
import scale_tp
print(*sorted(set(sys.modules) - before))
"""


def test_an_empty_package_exports_nothing() -> None:
    assert scale_tp.__all__ == []
    assert [name for name in vars(scale_tp) if not name.startswith("_")] == []


def test_importing_an_empty_package_loads_nothing_else() -> None:
    """What loads no other module has nothing to start a thread or a process with."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LIST], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.split() == ["scale_tp"]
