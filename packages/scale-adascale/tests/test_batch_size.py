"""The suggested batch size: where throughput and what a sample is worth are at their best together."""

from __future__ import annotations

import pytest

from scale_adascale import NoiseScale, fit_speed, suggest_batch_size

BENT = {64: 0.50, 128: 0.52, 256: 0.56}  # 0.48 s, and 0.3125 ms per sample


def test_a_line_is_found_again():
    constant, per_sample = fit_speed(BENT)
    assert (constant, per_sample) == pytest.approx((0.48, 0.04 / 128))


def test_no_part_of_the_line_is_below_zero():
    assert fit_speed({10: 1.0, 20: 3.0}).constant == 0.0
    assert fit_speed({10: 3.0, 20: 1.0}).per_sample == 0.0
    assert fit_speed({10: 2.0}) == (0.0, pytest.approx(0.2))


def test_the_suggestion_is_the_best_of_all_candidates():
    best = suggest_batch_size(BENT, noise=400, base_batch_size=64, candidates=range(64, 2049, 64))
    by_hand = {m: m / (0.48 + m * 0.04 / 128) * 464 / (400 + m) for m in range(64, 2049, 64)}
    assert best.batch_size == max(by_hand, key=by_hand.__getitem__)
    assert best.goodput == pytest.approx(best.throughput * best.efficiency, rel=1e-12)
    assert best.goodput == pytest.approx(by_hand[best.batch_size], rel=1e-6)
    # The derivative of m / ((a + b m) (B + m)) is zero at m = sqrt(a B / b).
    assert abs(best.batch_size - (0.48 * 400 / (0.04 / 128)) ** 0.5) < 64


def test_without_noise_the_smallest_batch_is_best_where_time_grows_with_it():
    assert suggest_batch_size({32: 1.0, 64: 2.0}, noise=0, base_batch_size=32).batch_size == 32


def test_what_was_measured_counts_more_than_the_line():
    assert suggest_batch_size({64: 1.0, 128: 0.1, 256: 4.0}, 1e9, 64, candidates=[64, 128, 256]).batch_size == 128


@pytest.mark.parametrize(
    "seconds, noise, base, candidates, words",
    [
        ({}, 1.0, 1, None, "expected seconds of a step by batch size"),
        ({64: 0.0}, 1.0, 1, None, "expected seconds of a step by batch size"),
        ({64: 1.0}, -1.0, 1, None, "expected noise >= 0"),
        ({64: 1.0}, float("nan"), 1, None, "expected noise >= 0"),
        ({64: 1.0}, 1.0, 0, None, "base_batch_size > 0"),
        ({64: 1.0}, 1.0, 1, [], "expected candidates of at least 1"),
        ({64: 1.0}, 1.0, 1, [0, 4], "expected candidates of at least 1"),
    ],
)
def test_numbers_out_of_their_range_are_refused(seconds, noise, base, candidates, words):
    with pytest.raises(ValueError, match=words):
        suggest_batch_size(seconds, noise, base, candidates)


def test_a_noise_scale_is_taken_as_it_is_measured():
    seconds = {64: 0.50, 128: 0.52, 256: 0.56}
    assert suggest_batch_size(seconds, NoiseScale(400.0, 300.0, 500.0), 64) == suggest_batch_size(seconds, 400, 64)
