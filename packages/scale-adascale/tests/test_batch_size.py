"""The suggested batch size: where throughput and what a sample is worth are at their best together."""

from __future__ import annotations

import pytest
import torch
from adascale_cases import net
from torch.optim import SGD

from scale_adascale import AdaScale, NoiseScale, fit_speed, halves, legw, linear, square_root, suggest_batch_size

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


def test_without_noise_the_smallest_batch_is_best_if_time_grows():
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
        ({64: 1.0}, 1.0, 1, [], "expected candidate batch sizes of at least 1"),
        ({64: 1.0}, 1.0, 1, [0, 4], "expected candidate batch sizes of at least 1"),
    ],
)
def test_numbers_out_of_their_range_are_refused(seconds, noise, base, candidates, words):
    with pytest.raises(ValueError, match=words):
        suggest_batch_size(seconds, noise, base, candidates)


def test_a_noise_scale_is_taken_as_it_is_measured():
    seconds = {64: 0.50, 128: 0.52, 256: 0.56}
    assert suggest_batch_size(seconds, NoiseScale(400.0, 300.0, 500.0), 64) == suggest_batch_size(seconds, 400, 64)


def test_halves_have_all_samples_in_order():
    batch = {"x": torch.arange(12).view(6, 2), "y": [torch.arange(6)]}
    first, second = halves(batch)
    assert torch.equal(torch.cat([first["x"], second["x"]]), batch["x"])
    assert first["y"][0].tolist() == [0, 1, 2] and second["y"][0].tolist() == [3, 4, 5]


def test_a_step_on_two_halves_is_one_on_the_whole_with_the_gain():
    models = [net(), net()]
    optimizer = AdaScale(SGD(models[0].parameters(), lr=0.1), scale=4.0, num_gradients_to_accumulate=2)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 5, generator=generator)
    for half in halves(batch):
        (models[0](half).square().mean() / 2).backward()
    models[1](batch).square().mean().backward()
    optimizer.step()
    SGD(models[1].parameters(), lr=0.1 * optimizer.gain()).step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)
    assert 1 < optimizer.gain() < 4


@pytest.mark.parametrize(
    "batch", [torch.ones(3, 2), torch.ones(0, 2), [torch.ones(4), torch.ones(2)], torch.ones(()), 7]
)
def test_what_has_no_two_halves_is_refused(batch):
    with pytest.raises(ValueError, match="one even number of samples"):
        list(halves(batch))


def test_linear_is_the_scale_and_square_root_its_root():
    assert linear(16.0) == 16.0 and square_root(16.0) == 4.0


def test_legw_reaches_the_root_over_as_many_epochs_as_the_scale():
    assert [legw(16.0, epoch, base_warmup_epochs=0.5) for epoch in (0, 2, 4, 8, 30)] == [0.0, 1.0, 2.0, 4.0, 4.0]
    assert legw(16.0, 0.0, base_warmup_epochs=0.0) == 4.0


def test_what_is_no_scale_and_no_epoch_is_refused():
    for rule in (linear, square_root, lambda scale: legw(scale, 1.0, 1.0)):
        with pytest.raises(ValueError, match=r"Scale must be at least 1, got 0\.5"):
            rule(0.5)
    with pytest.raises(ValueError, match="epochs of 0 or more, got epoch=-1"):
        legw(2.0, -1, 1)
