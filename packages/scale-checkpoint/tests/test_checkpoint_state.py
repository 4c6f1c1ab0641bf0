"""Which pass a module is in, by thread."""

from __future__ import annotations

import threading

import pytest

from scale_checkpoint import disable_checkpointing, is_checkpointing, is_recomputing, state


def test_phases_nest_and_belong_to_their_thread() -> None:
    assert not is_checkpointing() and not is_recomputing()
    with state.checkpointing():
        assert is_checkpointing() and not is_recomputing()
        with state.recomputing():
            assert is_recomputing() and not is_checkpointing()
            with state.checkpointing():
                assert is_recomputing() and is_checkpointing()
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(is_checkpointing()))
        thread.start()
        thread.join()
        assert seen == [False] and is_checkpointing()
    with pytest.raises(KeyError), disable_checkpointing():
        assert state.is_disabled()
        raise KeyError
    assert not state.is_disabled() and not is_checkpointing()
