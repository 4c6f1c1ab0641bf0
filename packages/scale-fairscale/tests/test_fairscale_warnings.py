"""A warning says once what has changed, at the line outside of the alias, with the line to write."""

import warnings

import pytest

from fairscale import _warnings
from fairscale._warnings import FairScaleWarning, Refused, warn_argument


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    _warnings.warn_once.cache_clear()


def test_an_argument_is_warned_about_once_and_at_the_callers_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            warn_argument("OSS", "group", "has another name: OSS(params, SGD, process_group=group)")
    (warning,) = caught
    assert warning.category is FairScaleWarning
    assert warning.filename == __file__
    assert str(warning.message) == "OSS(group=): has another name: OSS(params, SGD, process_group=group)"


def test_what_is_not_offered_says_why_and_what_to_use() -> None:
    class Gone(Refused):
        why = "nobody used it"
        instead = "torch.nn.Linear"

    with pytest.raises(NotImplementedError, match=r"^Gone is not offered: nobody used it\. Use torch.nn.Linear$"):
        Gone(1, two=2)
