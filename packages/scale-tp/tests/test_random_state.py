"""random.py: where random numbers stand, read and put back."""

from __future__ import annotations

import torch

from scale_tp.random import RNGState, get_rng_state, set_rng_state


def test_the_same_numbers_come_again() -> None:
    before = get_rng_state()
    first = torch.rand(3)
    assert not before.equals(get_rng_state())
    set_rng_state(before)
    assert before.equals(get_rng_state())
    assert torch.equal(torch.rand(3), first)


def test_of_the_host_s_numbers_alone_no_device_is_asked() -> None:
    state = get_rng_state(torch.device("cpu"))
    assert state.device is None
    assert state.equals(RNGState(torch.get_rng_state(), None))
    assert not state.equals(RNGState(state.host, torch.zeros(1)))
    assert RNGState(state.host, torch.zeros(1)).equals(RNGState(state.host.clone(), torch.zeros(1)))
