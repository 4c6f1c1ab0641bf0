"""The version is FairScale's last, and two distributions of one module do not stand beside each other."""

import importlib
from importlib import metadata
from typing import Any

import pytest

import fairscale


def test_versions_compare_as_strings_as_fairseq_does() -> None:
    assert not fairscale.__version__ < "0.4.0"
    assert fairscale.__version__ == ".".join(map(str, fairscale.__version_tuple__))


def test_the_version_of_the_distribution_is_known_as_transformers_asks_for_it() -> None:
    assert metadata.version("fairscale") == fairscale.__version__
    assert metadata.requires("fairscale") == ["scale-fairscale"]


def test_it_refuses_to_stand_beside_fairscale(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metadata.distributions

    def with_fairscale(**kwargs: Any) -> Any:
        return found(name="torch") if kwargs.get("name") == "fairscale" else found(**kwargs)

    monkeypatch.setattr(metadata, "distributions", with_fairscale)
    with pytest.raises(ImportError, match="pip uninstall fairscale and then reinstall scale-fairscale"):
        importlib.reload(fairscale)
