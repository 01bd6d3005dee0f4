"""Dropout keyed by sample."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import dropout as imported_by_name

from cost_model.errors import InputError
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.keyed_dropout import PREFIX, KeyedDropout


def draw(x, *, samples, seed=0, step=0, layer=1, calls=1, p=0.5):
    with KeyedDropout(seed) as dropout:
        dropout.at(step, samples)
        dropout.enter_layer(layer)
        return [F.dropout(x, p) for _ in range(calls)][-1]


def test_masks_belong_to_samples_not_to_microbatches():
    x = torch.ones(4, 3, 5)
    whole = draw(x, samples=(10, 11, 12, 13))
    assert torch.equal(whole[2:], draw(x[2:], samples=(12, 13)))
    assert torch.equal(whole[[1, 0]], draw(x[:2], samples=(11, 10)))


@pytest.mark.parametrize("change", [{"seed": 1}, {"step": 1}, {"samples": (1,)}, {"layer": 2}, {"calls": 2}])
def test_every_part_of_the_key_changes_the_mask(change):
    x = torch.ones(1, 64)
    assert not torch.equal(draw(x, samples=(0,)), draw(x, **{"samples": (0,), **change}))


def test_calls_are_counted_anew_in_each_layer():
    x = torch.ones(1, 64)
    with KeyedDropout(seed=0) as dropout:
        dropout.at(0, (0,))
        dropout.enter_layer(0)
        F.dropout(x)
        dropout.enter_layer(1)
        assert torch.equal(F.dropout(x), draw(x, samples=(0,), layer=1))


def test_masks_keep_the_expectation_and_do_not_depend_on_the_dtype():
    x = torch.ones(2, 20_000)
    kept = draw(x, samples=(0, 1), p=0.1)
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.9])
    assert kept.mean().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(draw(x.double(), samples=(0, 1), p=0.1) > 0, kept > 0)
    assert torch.equal(draw(x, samples=(0, 1), p=1.0), torch.zeros_like(x))


def test_modules_are_keyed_and_gradients_follow_the_mask():
    x = torch.ones(2, 50, requires_grad=True)
    with KeyedDropout(seed=0) as dropout:
        dropout.at(0, (0, 1))
        dropout.enter_layer(1)
        out = nn.Dropout(0.5)(x)
    out.sum().backward()
    assert torch.equal(x.grad, draw(torch.ones(2, 50), samples=(0, 1)))


def test_samples_may_be_flattened_with_their_tokens():
    x = torch.ones(2, 3, 4)
    assert torch.equal(draw(x.view(6, 4), samples=(0, 1)).view(2, 3, 4), draw(x, samples=(0, 1)))


def test_nothing_is_dropped_in_evaluation_or_outside_of_layers():
    x = torch.ones(1, 64)
    with KeyedDropout(seed=0) as dropout:
        dropout.at(0, (0,))
        assert F.dropout(x) is x
        dropout.enter_layer(1)
        assert F.dropout(x, training=False) is x
        dropout.enter_layer(PREFIX)
        assert F.dropout(x) is x


def test_dropout_that_cannot_be_keyed_is_refused():
    x = torch.ones(2, 3, 4, 4)
    with KeyedDropout(seed=0) as dropout:
        dropout.at(0, (0, 1))
        dropout.enter_layer(1)
        F.scaled_dot_product_attention(x, x, x)
        with pytest.raises(InputError, match=r"scaled_dot_product_attention .* use eager attention"):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        with pytest.raises(InputError, match="alpha_dropout"):
            nn.AlphaDropout(0.1)(x)
        with pytest.raises(InputError, match="not made of the 2 samples"):
            F.dropout(torch.ones(3, 4))


@pytest.mark.parametrize(
    "random",
    [
        torch.randn_like,
        F.gumbel_softmax,
        lambda x: x * torch.empty_like(x).bernoulli_(),
        lambda x: F.rrelu(x, training=True),
    ],
)
def test_other_random_numbers_are_refused_with_the_name_of_the_layer(random):
    x = torch.ones(2, 4)
    with (
        pytest.raises(InputError, match=r"layer 3 draws random numbers other than by"),
        KeyedDropout(0) as dropout,
    ):
        dropout.at(0, (0, 1), range(5))
        for layer in range(5):
            dropout.enter_layer(layer)
            x = random(x) if layer == 3 else F.dropout(x)


def test_dropout_between_the_layers_of_an_lstm_is_refused():
    lstm = nn.LSTM(3, 3, num_layers=2, dropout=0.5)
    with pytest.raises(InputError, match="layer 1 draws random numbers"), KeyedDropout(0) as dropout:
        dropout.at(0, (0, 1))
        dropout.enter_layer(1)
        lstm(torch.ones(2, 5, 3))


def test_calls_of_torch_are_watched_in_the_first_forward_alone():
    seen, dropout, x = [], KeyedDropout(0), torch.ones(2, 64)

    def step(number, drop, **options):
        dropout.at(number, (0, 1), range(2))
        with dropout:
            for layer in range(2):
                dropout.enter_layer(layer)
                seen.append(len(torch.overrides._get_current_function_mode_stack()))
                found = drop(x, **options)
        return found

    step(0, nn.Dropout(0.0))
    step(1, nn.Dropout(0.3))
    assert torch.equal(step(2, nn.Dropout(0.5)), draw(x, samples=(0, 1), step=2))
    assert seen == [1, 1, 0, 0, 0, 0]
    with pytest.raises(InputError, match="drew none in its first forward"):
        step(3, torch.nn.functional.alpha_dropout, training=True)


def test_dropout_that_was_imported_by_name_is_keyed_too():
    dropout, x = KeyedDropout(0), torch.ones(2, 64)
    for training in (False, True, True):
        dropout.at(0, (0, 1), (1,))
        with dropout:
            dropout.enter_layer(1)
            found = imported_by_name(x, 0.5, training)
        assert torch.equal(found, draw(x, samples=(0, 1)) if training else x)
    assert F.dropout is imported_by_name


def test_dropout_in_place_is_the_same_dropout():
    x = torch.ones(2, 8)
    with KeyedDropout(0) as dropout:
        dropout.at(0, (0, 1))
        dropout.enter_layer(1)
        assert F.dropout(x, 0.5, inplace=True) is x
    assert torch.equal(x, draw(torch.ones(2, 8), samples=(0, 1)))


def test_model_with_dropout_gives_the_same_logits_for_every_microbatch_size(bert_tiny):
    layers = bert_tiny.materialise(range(bert_tiny.num_layers), seed=0, dtype=torch.float64)
    ids = torch.arange(4 * 8).view(4, 8)

    def logits(microbatch_size):
        parts = []
        with KeyedDropout(seed=3) as dropout, torch.no_grad():
            layers.on_layer = dropout.enter_layer
            for start in range(0, 4, microbatch_size):
                samples = range(start, start + microbatch_size)
                dropout.at(5, samples)
                parts += layers.run(0, layers.num_layers, {"input_ids": ids[list(samples)]})
        return torch.cat(parts)

    # Masks are equal bit for bit; matrix products of different sizes may round differently.
    torch.testing.assert_close(logits(1), logits(4), rtol=0.0, atol=1e-13)
    torch.testing.assert_close(logits(2), logits(4), rtol=0.0, atol=1e-13)


@pytest.fixture(scope="module")
def bert_tiny():
    return ChainModel.from_spec(model_spec("bert-tiny"))


def test_attention_of_torch_drops_by_sample_whoever_is_beside_it():
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def attended(*rows):
        with KeyedDropout(seed=0) as dropout:
            dropout.at(0, rows)
            dropout.enter_layer(1)
            given = x[list(rows)]
            return attention(given, given, given, need_weights=False)[0]

    whole = attended(0, 1, 2)
    assert torch.allclose(attended(1), whole[1:2], atol=1e-6)
    assert torch.allclose(attended(2, 0), whole[[2, 0]], atol=1e-6)
    assert not torch.allclose(whole, attention.eval()(x, x, x, need_weights=False)[0], atol=1e-3)
