"""Chains of more than blocks in a row: encoder and decoder, torch's own, blocks with shared weights."""

import pytest
import torch
import transformers
from torch import nn

from cost_model.errors import InputError
from hetpipe.models.chain import ChainModel
from hetpipe.models.split_check import check_split


def ids(count, seed=0):
    return torch.randint(5, 60, (1, count), generator=torch.Generator().manual_seed(seed))


def padded():
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[0, -2:] = 0
    return {"input_ids": ids(9), "attention_mask": mask, "decoder_input_ids": ids(6, 1)}


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        block = nn.TransformerEncoderLayer(16, 2, 32, **{"batch_first": True, **options})
        self.encoder = nn.TransformerEncoder(
            block, 3, norm=nn.LayerNorm(16), enable_nested_tensor=block.self_attn.batch_first
        )
        self.head = nn.Linear(16, 64)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0))


class Both(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        self.encoder, self.decoder = nn.TransformerEncoder(encoder, 2), nn.TransformerDecoder(decoder, 3)
        self.head = nn.Linear(16, 64)

    def forward(self, source, target):
        memory = self.encoder(self.embedding(source))
        ahead = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.decoder(self.embedding(target), memory, tgt_mask=ahead))


def seeded(build):
    def seeded_build():
        torch.manual_seed(0)
        return build()

    return seeded_build


def holders_of(chain, name):
    return [
        layer for layer in range(chain.num_layers) if name in {info.name for info in chain.parameters(layer)}
    ]


LIKE_BART = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
    "attention_dropout": 0.1,
}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_decoder_layers": 2}
T5 |= {"num_heads": 2, "relative_attention_num_buckets": 8}


def bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**LIKE_BART))


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))


def albert(groups=1):
    return transformers.AlbertForMaskedLM(
        transformers.AlbertConfig(
            vocab_size=64,
            embedding_size=8,
            hidden_size=16,
            num_hidden_layers=4,
            num_hidden_groups=groups,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.1,
        )
    )


@pytest.mark.parametrize(
    ("build", "example"),
    [
        (Encoder, {"ids": ids(7)}),
        (Both, {"source": ids(7), "target": ids(5)}),
        (bart, padded()),
        (t5, padded()),
        (albert, {"input_ids": ids(9)}),
    ],
    ids=["encoder", "both", "bart", "t5", "albert"],
)
def test_split_equals_whole_with_dropout_on(build, example):
    report = check_split(seeded(build), example)
    assert report.passed, report.reason
    assert report.gradient_difference < 1e-15


def test_the_output_of_the_encoder_travels_beside_the_decoders_own_tensor():
    chain = ChainModel.from_module(seeded(bart), padded())
    names = ["embeddings", *(f"encoder-block{block}" for block in range(3))]
    names += ["decoder-embeddings", "decoder-block0", "decoder-block1", "head"]
    assert list(chain.layer_names) == names
    crossing = [[spec.shape_per_sample for spec in chain.boundary(layer)] for layer in range(1, 8)]
    assert crossing == [[(9, 16)]] * 4 + [[(6, 16), (9, 16)]] * 2 + [[(6, 16)]]
    embedding = [
        layer
        for layer in range(8)
        if any(info.name == "model.shared.weight" for info in chain.parameters(layer))
    ]
    assert embedding == [0, 4, 7]


def test_the_position_bias_of_t5_is_made_from_a_table_that_its_blocks_share():
    chain = ChainModel.from_module(seeded(t5), padded())
    table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    holders = holders_of(chain, table)
    assert holders == [1, 2, 3]
    drawn = [chain.materialise([layer], seed=3).owned_parameters()[table] for layer in holders]
    whole = chain.materialise(range(8), seed=3).owned_parameters()
    assert all(torch.equal(value, whole[table]) for value in drawn)
    plain = t5().double().eval()
    with torch.no_grad():
        for name, value in plain.named_parameters():
            value.copy_(whole[name])
        expected = plain(**padded(), use_cache=False).logits
        given = chain.materialise(range(8), seed=3, dtype=torch.float64).eval().run(0, 8, padded())[0]
    assert torch.allclose(given, expected, rtol=0, atol=1e-12)


def test_a_block_that_is_called_again_is_a_layer_again_and_its_weights_are_tied():
    chain = ChainModel.from_module(seeded(lambda: albert(groups=2)), {"input_ids": ids(9)})
    assert chain.layer_names == ("embeddings", "block0", "block1", "block2", "block3", "head")
    first, second, third = (chain.parameters(layer) for layer in (1, 2, 3))
    assert [info.name for info in first] == [info.name for info in second]
    assert {info.name for info in second}.isdisjoint(info.name for info in third)
    assert all(info.tied for info in first)


class LengthFirst(Encoder):
    def __init__(self):
        super().__init__(batch_first=False)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids).transpose(0, 1))).transpose(0, 1)


def test_samples_in_the_second_dimension_are_refused():
    with pytest.raises(InputError, match=r"first dimension of argument 0 .* is not the samples"):
        ChainModel.from_module(LengthFirst, {"ids": ids(7)})


class Gated(nn.Module):
    """Blocks that also return how often they were chosen."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, count):
            return self.linear(x), count + 1

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Gated.Block() for _ in range(2))

    def forward(self, x):
        x, count = self.first(x), 0
        for block in self.blocks:
            x, count = block(x, count)
        return x * count


def test_blocks_that_return_numbers_are_refused():
    with pytest.raises(InputError, match="return numbers beside their tensors, and only tensors travel"):
        ChainModel.from_module(Gated, {"x": torch.ones(1, 4)})
