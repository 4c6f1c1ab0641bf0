"""random.py: random numbers that are the same on all ranks, and others that differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import scale_snapshot
import scale_tp
from scale_check.exact import gather_values
from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_snapshot import SnapshotError
from scale_tp import megatron
from scale_tp.megatron import get_cuda_rng_tracker
from scale_tp.random import RNGState, RNGStatesTracker, get_rng_state, get_rng_tracker, set_rng_state


@pytest.fixture(autouse=True)
def _no_streams() -> Iterator[None]:
    yield
    get_rng_tracker().reset()


def seeded(seed: int, count: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.rand(3) for _ in range(count)]


def test_a_stream_is_what_its_seed_gives_and_changes_no_other() -> None:
    first, second = seeded(11, 2), seeded(22, 2)
    torch.manual_seed(11)
    streams = RNGStatesTracker()
    streams.add("other", 22)
    with streams.fork("other"):
        assert torch.equal(torch.rand(3), second[0])
    assert torch.equal(torch.rand(3), first[0])
    with pytest.raises(ZeroDivisionError), streams.fork("other"):
        assert torch.equal(torch.rand(3), second[1])
        _ = 1 / 0
    assert torch.equal(torch.rand(3), first[1]), "also after an error"


def test_streams_can_be_kept_and_put_back() -> None:
    streams = RNGStatesTracker()
    streams.add("other", 5)
    kept = streams.get_states()
    with streams.fork("other"):
        expected = torch.rand(3)
    streams.set_states(kept)
    with streams.fork("other"):
        assert torch.equal(torch.rand(3), expected)
    streams.reset()
    assert streams.get_states() == {}
    streams.add("other", 5)


def test_streams_within_each_other() -> None:
    one, two = seeded(1, 2), seeded(2, 1)
    streams = RNGStatesTracker()
    streams.add("one", 1)
    streams.add("two", 2)
    with streams.fork("one"):
        assert torch.equal(torch.rand(3), one[0])
        with streams.fork("two"):
            assert torch.equal(torch.rand(3), two[0])
        assert torch.equal(torch.rand(3), one[1])


def test_a_stream_within_itself_goes_on() -> None:
    expected = seeded(1, 5)
    streams = RNGStatesTracker()
    streams.add("one", 1)
    streams.add("two", 2)
    found = []
    with streams.fork("one"):
        found.append(torch.rand(3))
        with streams.fork("one"):
            found.append(torch.rand(3))
        with streams.fork("two"), streams.fork("one"):
            found.append(torch.rand(3))
        found.append(torch.rand(3))
    with streams.fork("one"):
        found.append(torch.rand(3))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_can_not_be_is_refused() -> None:
    streams = RNGStatesTracker()
    with pytest.raises(KeyError, match=r"cuda rng state model-parallel-rng is not added \(there are: none\)"):
        streams.fork().__enter__()
    streams.add("one", 1)
    with pytest.raises(ValueError, match="seed 1 already exists"):
        streams.add("two", 1)
    with pytest.raises(ValueError, match="cuda rng state one already exists"):
        streams.add("one", 2)
    for given in (torch.get_rng_state(), 1234):  # As other trackers keep it.
        with pytest.raises(
            TypeError, match=r"stream 'two' to be one that get_states\(\) gives, .*got (Tensor|int): Fair"
        ):
            streams.set_states({"two": given})  # type: ignore[dict-item]
    with pytest.raises(KeyError, match=r"is not added \(there are: 'one'\)"):
        streams.fork("two").__enter__()


def test_the_names_of_fairscale_are_the_same_streams() -> None:
    assert get_cuda_rng_tracker() is get_rng_tracker()
    megatron.model_parallel_cuda_manual_seed(100)
    assert torch.initial_seed() == 100
    with get_cuda_rng_tracker().fork():
        found = torch.rand(3)
    assert torch.equal(found, seeded(100 + 2718, 1)[0])
    scale_tp.model_parallel_manual_seed(100)


def noisy(x: Tensor) -> Tensor:
    with get_rng_tracker().fork():
        x = torch.nn.functional.dropout(x.sin(), 0.5)
        with get_rng_tracker().fork():
            x = torch.nn.functional.dropout(x.sin(), 0.5)
        x = torch.nn.functional.dropout(x.sin(), 0.5)
    x = torch.nn.functional.dropout(x, 0.5)
    with get_rng_tracker().fork():
        return torch.nn.functional.dropout(x.sin(), 0.5)


@pytest.mark.parametrize("own_function", [True, False])
def test_a_recomputation_gets_the_numbers_of_the_forward(own_function: bool) -> None:
    def train(checkpointed: bool) -> tuple[Tensor, Tensor, Tensor]:
        get_rng_tracker().reset()
        scale_tp.model_parallel_manual_seed(3)
        x = torch.ones(200, requires_grad=True)
        if not checkpointed:
            loss = noisy(noisy(x)).sum()
            if not own_function:
                with get_rng_tracker().fork():
                    loss = loss + noisy(x).sum()
        elif own_function:
            loss = scale_tp.checkpoint(noisy, scale_tp.checkpoint(noisy, x)).sum()
        else:
            contexts = {"use_reentrant": False, "context_fn": get_rng_tracker().replayed}
            loss = torch_checkpoint(noisy, torch_checkpoint(noisy, x, **contexts), **contexts).sum()
            with get_rng_tracker().fork():
                loss = loss + torch_checkpoint(noisy, x, **contexts).sum()
        loss.backward()
        with get_rng_tracker().fork():
            return loss.detach(), x.grad, torch.rand(2)

    for found, expected in zip(train(True), train(False), strict=True):
        assert torch.equal(found, expected)


def test_a_recomputation_that_would_get_other_numbers_is_refused() -> None:
    scale_tp.model_parallel_manual_seed(3)
    loss = torch_checkpoint(noisy, torch.ones(3, requires_grad=True), use_reentrant=False).sum()
    with pytest.raises(RuntimeError, match=r"context_fn=scale_tp\.random\.get_rng_tracker"):
        loss.backward()


@pytest.mark.ranks(4)
def test_ranks_draw_alike_but_in_their_part_of_the_model() -> None:
    scale_tp.initialize_model_parallel(2)
    megatron.model_parallel_cuda_manual_seed(7)
    with get_rng_tracker().fork():
        own = torch.rand(2).tolist()
    assert group_of().size == 4
    (same, first), (also, second), *replica = gather_values((torch.rand(2).tolist(), own))
    assert same == also
    assert first != second
    assert replica == [(same, first), (same, second)]


def dropped(folder: Path, resumed: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """What dropout leaves in and outside of the stream of each rank, after two steps that are saved."""
    scale_tp.initialize_model_parallel(2)
    scale_tp.model_parallel_manual_seed(8 if resumed else 7)
    objects = {"random": scale_snapshot.RandomState(), "streams": get_rng_tracker()}

    def steps(count: int) -> list[Tensor]:
        seen = []
        for _ in range(count):
            seen.append(nn.functional.dropout(torch.ones(16)))
            with get_rng_tracker().fork():
                seen.append(nn.functional.dropout(torch.ones(16)))
        return seen

    if resumed:
        scale_snapshot.load(folder, objects)
    else:
        steps(2)
        scale_snapshot.save(folder, 2, objects)
    found = steps(3)
    with pytest.raises(ValueError, match=r"seed .* already exists"):  # The seeds are known, too.
        get_rng_tracker().add("another", 7 + 2718 + group_of().rank)
    return found, objects["streams"].state_dict()


def test_a_resumed_training_drops_what_an_uninterrupted_does(tmp_path: Path) -> None:
    expected = run_ranks(dropped, 2, tmp_path, False)
    for (ours, state), (theirs, its) in zip(run_ranks(dropped, 2, tmp_path, True), expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
        assert state["seeds"] == its["seeds"]
    assert not torch.equal(expected[0][0][1], expected[1][0][1]), "each rank has its own stream"


def test_streams_of_one_rank_are_never_given_to_two(tmp_path: Path) -> None:
    streams = RNGStatesTracker()
    streams.add("own", 3)
    scale_snapshot.save(tmp_path, 1, {"streams": streams})
    for text in run_ranks(load_streams, 2, tmp_path):
        assert "was saved by 1 ranks, each of which had a state of its own, and there are 2 ranks now" in text
    with pytest.raises(ValueError, match="the streams and seeds that state_dict"):
        streams.load_state_dict(streams.get_states())


def load_streams(folder: Path) -> str:
    with pytest.raises(SnapshotError) as caught:
        scale_snapshot.load(folder, {"streams": RNGStatesTracker()})
    return str(caught.value)


@pytest.mark.gpu
def test_streams_hold_for_cuda_too() -> None:
    torch.manual_seed(22)
    expected = torch.rand(3, device="cuda")
    streams = RNGStatesTracker()
    streams.add("other", 22)
    before = torch.cuda.get_rng_state()
    with streams.fork("other"):
        assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert torch.equal(torch.cuda.get_rng_state(), before)


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
