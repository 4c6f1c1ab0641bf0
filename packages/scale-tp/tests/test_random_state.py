"""random.py: where random numbers stand, read and put back."""

from __future__ import annotations

import torch

from scale_tp.random import StreamState, go_to, random_state


def test_the_same_numbers_come_again() -> None:
    before = random_state()
    first = torch.rand(3)
    assert not before.equals(random_state())
    go_to(before)
    assert before.equals(random_state())
    assert torch.equal(torch.rand(3), first)


def test_of_the_host_s_numbers_alone_no_device_is_asked() -> None:
    state = random_state(torch.device("cpu"))
    assert state.device is None
    assert state.equals(StreamState(torch.get_rng_state(), None))
    assert not state.equals(StreamState(state.host, torch.zeros(1)))
    assert StreamState(state.host, torch.zeros(1)).equals(StreamState(state.host.clone(), torch.zeros(1)))
