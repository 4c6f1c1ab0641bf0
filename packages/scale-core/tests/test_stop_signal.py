import os
import signal

import pytest

from scale_core.comm.group import Group, group_of
from scale_core.errors import ScaleDistributedError
from scale_core.launch import StopSignal
from scale_core.launch import stop_signal as interrupt
from scale_core.testing import run_ranks


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_its_handler_given_back(number: int) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert stop.on_any_rank(Group()) == 0
        kill_self(number)
        assert stop.on_any_rank(Group()) == number
    assert signal.getsignal(number) is before


@pytest.mark.fault(10)
def test_an_echo_of_the_same_key_press_does_not_interrupt() -> None:
    with StopSignal() as stop:
        kill_self(signal.SIGINT)
        kill_self(signal.SIGINT)
        assert stop.received == signal.SIGINT


@pytest.mark.fault(10)
def test_any_number_of_sigterms_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_ECHO_SECONDS", -1.0)
    with StopSignal() as stop:
        kill_self(signal.SIGTERM)
        kill_self(signal.SIGTERM)
        assert stop.exit_code == 143


@pytest.mark.fault(10)
def test_a_second_ctrl_c_interrupts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_ECHO_SECONDS", -1.0)
    with StopSignal(), pytest.raises(KeyboardInterrupt):
        kill_self(signal.SIGINT)
        kill_self(signal.SIGINT)


def test_a_sigterm_stays_caught_after_an_error_of_the_program() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(ScaleDistributedError), StopSignal(keep_after=ScaleDistributedError) as stop:
            raise ScaleDistributedError("lost", rank=0)
        kill_self(signal.SIGTERM)
        assert stop.received == signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_are_given_back_after_other_errors() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="other"), StopSignal(keep_after=ScaleDistributedError):
        raise ValueError("other")
    assert signal.getsignal(signal.SIGTERM) is before


def stop_on_rank_1() -> int:
    group = group_of()
    with StopSignal() as stop:
        if group.rank == 1:
            kill_self(signal.SIGTERM)
        return stop.on_any_rank(group)


@pytest.mark.fault(9)
def test_all_ranks_stop_when_one_is_asked_to() -> None:
    assert run_ranks(stop_on_rank_1, 2) == [signal.SIGTERM] * 2
