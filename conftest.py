"""What holds for the tests of every package: the same cases and numbers in every run, a device for some, one import.

A test marked `ranks(n)` runs its body on each of n ranks, as `run_ranks` does: the program of the ranks is the test.
With `in_turn=True` it shares a start of the ranks with others of its file.

`pytest --hypothesis-seed=7` tries cases of Hypothesis that other runs have not tried.
"""

import gc
import os
import random
import re
import sys
from importlib.util import find_spec
from typing import Any

import pytest

# Of what the tests have imported, this takes ranks so long to import that it shows in every test.
SHARED = re.compile(
    r"pytest|hypothesis|scale_\w+|peft|transformers\.modeling_outputs|transformers\.models\.\w+\.modeling_\w+"
)


def pytest_configure(config: pytest.Config) -> None:
    """Has Hypothesis try the same cases in every run, where it is installed and no seed is given."""
    if find_spec("hypothesis") is None or config.getoption("--hypothesis-seed", None) is not None:
        return
    from hypothesis import settings

    settings.register_profile("same-cases", derandomize=True)
    settings.load_profile("same-cases")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Has a test draw the same random numbers alone, and in any order after others; seeds what is imported alone."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeats a test marked `ranks(1, 2)` for each number of ranks."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None and len(marker.args) > 1:
        if "num_ranks" not in metafunc.fixturenames:
            metafunc.fixturenames.append("num_ranks")
        metafunc.parametrize("num_ranks", marker.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs the body of a test marked `ranks` on that number of ranks, or on as many as the argument of that name says.

    With 0 it runs in the process of the test, without a process group. A test marked `local_tensors` sees shards as
    plain tensors.
    """
    marker = pyfuncitem.get_closest_marker("ranks")
    is_local = pyfuncitem.get_closest_marker("local_tensors") is not None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    num_ranks: Any = 0
    if marker is not None:
        num_ranks = marker.args[0] if len(marker.args) == 1 else pyfuncitem.callspec.params["num_ranks"]
        num_ranks = arguments[num_ranks] if isinstance(num_ranks, str) else num_ranks
    if not num_ranks and not is_local:
        return None
    from scale_core.testing.ranks import run_ranks, run_test

    if marker is not None and marker.kwargs.get("in_turn"):
        from ranks_in_turn import run_case  # type: ignore[import-not-found]  # in tests/shared

        run_case(pyfuncitem, num_ranks)
    elif marker is None or not num_ranks:
        run_test(pyfuncitem.obj, arguments, is_local)
    else:
        run_ranks(run_test, num_ranks, pyfuncitem.function, arguments, is_local, **marker.kwargs)
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` without a CUDA device, `simulation` without its torch, and `gloo` over another backend.

    torch is asked only if there is such a test.
    """
    if os.environ.get("SCALE_TEST_BACKEND", "gloo") != "gloo":
        for item in items:
            for marker in item.iter_markers("gloo"):
                _skip([item], f"only over gloo: {marker.args[0]}")
    on_gpu, simulated = ([item for item in items if item.get_closest_marker(name)] for name in ("gpu", "simulation"))
    simulated += [item for item in items if "scale_check/simulate" in item.nodeid]  # examples in docstrings
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            _skip(on_gpu, "needs a CUDA device")
    if simulated:
        from scale_core import compat

        if not compat.simulation_supported():
            _skip(simulated, f"simulation needs torch {compat.simulation_versions()}")


def _skip(items: list[pytest.Item], reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Has the server that ranks are forked from import what the tests have imported, and the collector leave it out."""
    gc.freeze()  # What is imported is left out of each collection, and of each search of all objects.
    testing = sys.modules.get("scale_core.testing.ranks")
    if testing is not None:
        testing.preload(*filter(SHARED.fullmatch, sorted(sys.modules)))
