import math

import pytest
import torch
from torch.nn import functional

from scale_train.model.config import SIZES, ModelConfig
from scale_train.model.gpt import GPT, IGNORED, generate, num_parameters, rotate


def model(**changes) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(**{"layers": 2, "width": 16, "heads": 2, **changes}))


def tokens(batch: int = 2, sequence: int = 8) -> torch.Tensor:
    return torch.randint(256, (batch, sequence), generator=torch.Generator().manual_seed(1))


def test_logits_have_one_row_per_token():
    assert model()(tokens()).shape == (2, 8, 256)


def test_a_position_sees_nothing_that_comes_after_it():
    net, left = model(), tokens()
    right = left.clone()
    right[:, 5:] = 0
    assert torch.equal(net(left)[:, :5], net(right)[:, :5])
    assert not torch.equal(net(left)[:, 5:], net(right)[:, 5:])


def test_the_loss_is_the_cross_entropy_of_the_logits():
    net, x, y = model(), tokens(), tokens().roll(1)
    expected = functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
    torch.testing.assert_close(net(x, y), expected)


def test_ignored_targets_do_not_count_in_a_sum():
    net, x, y = model(), tokens(), tokens().roll(1)
    partly = y.clone()
    partly[1] = IGNORED
    torch.testing.assert_close(net(x, partly, "sum"), net(x[:1], y[:1], "sum"))


@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_a_loss_in_chunks_has_the_same_value_and_gradients(chunk):
    whole, chunked = model(), model(loss_chunk=chunk)
    for net in (whole, chunked):
        net(tokens(), tokens().roll(1)).backward()
    torch.testing.assert_close(chunked(tokens(), tokens()), whole(tokens(), tokens()))
    for ours, theirs in zip(chunked.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_recomputing_blocks_changes_no_bit_of_loss_and_gradients():
    kept, recomputed = model(dropout=0.1), model(dropout=0.1, recompute=True)
    losses = []
    for net in (kept, recomputed):
        torch.manual_seed(3)
        loss = net(tokens(), tokens().roll(1))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    for ours, theirs in zip(recomputed.parameters(), kept.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_tied_embeddings_are_one_parameter_under_one_name():
    tied, untied = model(), model(tied=False)
    assert num_parameters(untied) - num_parameters(tied) == 256 * 16
    assert "head.weight" not in dict(tied.named_parameters())
    assert tied.head.weight is tied.embedding.weight


def test_a_rotation_keeps_lengths_and_depends_on_distance_only():
    x = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(1, 1, 6, 8)
    turned = rotate(x)[0, 0]
    torch.testing.assert_close(turned.norm(dim=-1), x[0, 0].norm(dim=-1))
    torch.testing.assert_close(turned[0] @ turned[2], turned[3] @ turned[5])


def test_residual_projections_start_smaller_in_deeper_models():
    torch.manual_seed(0)
    net = GPT(ModelConfig(layers=8, width=64, heads=2))
    wide, residual = net.blocks[0].feed_in.weight.std(), net.blocks[0].feed_out.weight.std()
    assert wide.item() == pytest.approx(math.sqrt(2 / (5 * 64)), rel=0.05)
    assert (wide / residual).item() == pytest.approx(math.sqrt(2 * 8), rel=0.05)


def test_a_new_model_knows_nothing():
    x = tokens(8, 32)
    assert model()(x, x.roll(1)).item() == pytest.approx(math.log(256), rel=0.05)


def test_the_sizes_of_gpt3_count_what_the_paper_says():
    billions = {"gpt3-125m": 0.085, "gpt3-1.3b": 1.21, "gpt3-6.7b": 6.44, "gpt3-13b": 12.6, "gpt3-175b": 174.0}
    for name, expected in billions.items():
        shape = SIZES[name]
        with torch.device("meta"):
            net = GPT(ModelConfig(1, shape.width, shape.heads))
        block = num_parameters(net.blocks[0])
        assert block * shape.layers / 1e9 == pytest.approx(expected, rel=0.01), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "width is 16 and heads is 3"),
        ({"heads": 16}, "must be even"),
        ({"layers": 0}, "layers must be at least 1, but is 0"),
    ],
)
def test_numbers_that_make_no_model_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        model(**changes)


def test_the_same_seed_generates_the_same_text():
    net, prompt = model().train(), torch.tensor([0])
    before = torch.get_rng_state()
    first = generate(net, prompt, 12, context=4, seed=5, temperature=1.0)
    assert torch.equal(first, generate(net, prompt, 12, context=4, seed=5, temperature=1.0))
    assert not torch.equal(first, generate(net, prompt, 12, context=4, seed=6, temperature=1.0))
    assert first.shape == (13,) and first[0] == 0
    assert torch.equal(before, torch.get_rng_state())
    assert net.training


def test_parameters_on_meta_are_passed_over_without_a_search(monkeypatch):
    searches, named_modules = [], GPT.named_modules
    monkeypatch.setattr(GPT, "named_modules", lambda self, *args: searches.append(1) or named_modules(self, *args))
    with torch.device("meta"):
        model = GPT(ModelConfig(layers=20, width=8, heads=2))
    assert len(searches) == 1
    for block in model.blocks:
        for module in block.modules():
            model.init_weights(module)
    assert len(searches) == 1
