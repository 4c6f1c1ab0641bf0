"""backward_pass.py: what the ranks agree on at the end of a backward pass, with buckets that are written down here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from scale_core.comm.group import group_of
from scale_core.consistency.all_ranks import format_abort
from scale_core.consistency.backward_pass import BackwardPass, ParamKey, PassStatus
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import PassKind
from scale_core.errors import ContractError, StepError


@dataclass
class Gradients:
    with_grad: set[int]
    size: int = 3
    frozen_params: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.with_grad)

    def missing(self) -> list[int]:
        return [index for index in range(self.size) if index not in self.with_grad]

    def has_grad(self) -> list[int]:
        return sorted(self.with_grad)

    def frozen(self) -> list[int]:
        return self.frozen_params


@dataclass
class Bucket:
    gradient: Gradients
    reduced: set[int] = field(default_factory=set)

    def has_grad(self, index: int) -> bool:
        return index in self.reduced

    def drop_grad(self, index: int) -> None:
        self.reduced.discard(index)


class Engine:
    """Reduces buckets by writing down that it did."""

    def __init__(self, with_grad_by_bucket: list[set[int]]) -> None:
        self.contract = Contract(group_of())
        self.buckets = [Bucket(Gradients(with_grad)) for with_grad in with_grad_by_bucket]
        self.backward_pass = BackwardPass(
            self.contract, self.buckets, lambda reasons: format_abort("step 1", reasons, "Nothing has changed.")
        )
        self.log: list[object] = []
        self.contract.begin(PassKind("backward", grad=True, training=True), new_step=True)

    def reduce(self, number: int) -> None:
        self.log.append(number)
        self.buckets[number].gradient.with_grad = set()
        self.buckets[number].reduced = {0, 1, 2}

    def reduce_all(self) -> None:
        for number in range(len(self.buckets)):
            self.backward_pass.mark_reduced(number)
            self.reduce(number)

    def finish(self, error: BaseException | None = None) -> None:
        late = self.backward_pass.late_gradients(range(len(self.buckets)))
        status = PassStatus(late.number, len(self.backward_pass.unused), error is not None, note=5)
        statuses = self.backward_pass.compare(status, error)
        assert [rank_status.note for rank_status in statuses] == [5] * group_of().size
        committed = self.backward_pass.commit(statuses, late, self.reduce, self.log.append)
        self.log.append(committed)


@pytest.mark.ranks(1, 2, 3)
def test_only_what_no_rank_has_used_has_no_gradient(num_ranks: int) -> None:
    engine = Engine([{0}, {1, group_of().rank % 2}])  # rank 1 has used parameter 1 of bucket 1, and not parameter 0
    engine.reduce_all()
    engine.finish()
    unused = {ParamKey(0, 1), ParamKey(0, 2), ParamKey(1, 2)}
    assert engine.log == [0, 1, {}, (set(), unused)]
    assert [bucket.reduced for bucket in engine.buckets] == [{0}, {0, 1}]


@pytest.mark.ranks(1, 2)
def test_a_gradient_of_an_earlier_pass_is_kept(num_ranks: int) -> None:
    engine = Engine([set()])
    engine.buckets[0].reduced = {2}
    engine.reduce_all()
    engine.finish()
    assert engine.buckets[0].reduced == {2}


@pytest.mark.ranks(1, 2)
def test_what_comes_late_on_one_rank_is_reduced_on_all(num_ranks: int) -> None:
    engine = Engine([{0, 1}, {0, 1, 2}])
    engine.reduce_all()
    if group_of().rank == num_ranks - 1:
        engine.buckets[0].gradient.with_grad = {2}
        engine.buckets[1].gradient.frozen_params = [1]
    engine.finish()
    assert engine.log[:4] == [0, 1, 0, {1: [1]}]
    assert engine.buckets[0].reduced == {0, 1, 2}


@pytest.mark.ranks(2)
def test_an_error_of_one_rank_is_raised_on_all() -> None:
    engine = Engine([{0, 1, 2}])
    engine.reduce_all()
    if group_of().rank == 1:
        with pytest.raises(ValueError, match="no such token") as raised:
            engine.finish(ValueError("no such token"))
        assert any("rank 1 failed" in note for note in raised.value.__notes__)
    else:
        with pytest.raises(StepError, match=r"because rank 1 failed(?s:.*)ValueError: no such token"):
            engine.finish()
    assert engine.log == [0]


@pytest.mark.ranks(2)
def test_an_error_after_the_comparison_is_named_in_the_next() -> None:
    engine = Engine([{0, 1, 2}])
    fails = group_of().rank == 0
    engine.reduce_all()
    engine.finish()
    if fails:
        with pytest.raises(MemoryError), engine.backward_pass.committing():
            raise MemoryError
    engine.backward_pass.reset()
    engine.contract.begin(PassKind("backward", grad=True, training=True), new_step=True)
    with pytest.raises(ContractError, match=r"rank 0: .*failure after the comparison"):
        engine.finish()


def test_a_status_is_three_integers() -> None:
    for status in (PassStatus(), PassStatus(1, 2, True, 3), PassStatus(0, 0, False, 9)):
        assert len(status.pack()) == 3
        assert PassStatus.unpack(status.pack()) == status
