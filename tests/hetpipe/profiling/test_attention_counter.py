"""The arithmetic of attention is what torch's own counter of FLOP says of it."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from folders import tiny_model
from hetpipe.profiling.attention_counter import AttentionCounter

IDS = torch.zeros(3, 12, dtype=torch.long)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM"])
def test_of_a_model_it_is_the_products_that_torch_counts_in_attention(architecture):
    model = tiny_model(architecture)
    model.config._attn_implementation = "eager"
    counter = AttentionCounter()
    with FlopCounterMode(display=False) as theirs:
        with counter:
            logits = model(input_ids=IDS).logits
        ahead, everywhere = products(theirs, in_attention=True), products(theirs)
        logits.square().sum().backward()
    assert counter.forward_flops == ahead > 0
    assert counter.backward_flops == products(theirs) - everywhere
    fused = AttentionCounter()
    model.config._attn_implementation = "sdpa"
    with fused:
        model(input_ids=IDS)
    assert (fused.forward_flops, fused.backward_flops) == (ahead, 2.5 * ahead)


def products(counter: FlopCounterMode, *, in_attention: bool = False) -> int:
    """FLOP of batched products, of all or of those in modules of attention: without rotary angles."""
    counts = counter.get_flop_counts()
    inner = [name for name in counts if name.rpartition(".")[-1] in ("self_attn", "attn", "self")]
    return sum(counts[name].get(torch.ops.aten.bmm, 0) for name in (inner if in_attention else ["Global"]))


def test_of_a_fused_kernel_it_is_by_the_formula_of_torch():
    query, key, value = torch.zeros(2, 8, 5, 16), torch.zeros(2, 2, 7, 16), torch.zeros(2, 2, 7, 24)
    with AttentionCounter() as counter:
        functional.scaled_dot_product_attention(query, key, value=value, enable_gqa=True)
    # 2 samples, 8 heads, 5 queries of 7 keys: 16 multiplied for each score, 24 values weighed by it
    assert counter.forward_flops == 2 * 2 * 8 * 5 * 7 * (16 + 24)
    assert counter.forward_flops == sdpa_flop_count(query.shape, key.shape, value.shape)
    equal = torch.zeros(2, 8, 7, 16)
    with AttentionCounter() as counter:
        functional.scaled_dot_product_attention(equal, equal, equal)
    shapes = [equal.shape] * 4
    assert counter.backward_flops == sdpa_backward_flop_count(*shapes)


@pytest.mark.parametrize("need_weights", [False, True])
def test_of_torchs_own_module_it_is_the_same(need_weights):
    attention, tokens = nn.MultiheadAttention(16, 4, batch_first=True), torch.zeros(3, 12, 16)
    with AttentionCounter() as counter:
        attention(tokens, tokens, tokens, need_weights=need_weights)
    assert counter.forward_flops == 3 * 4 * 12**2 * 16
    assert counter.backward_flops == (2.0 if need_weights else 2.5) * counter.forward_flops


def test_weights_and_outer_products_are_no_attention():
    one, two = torch.ones(3, 12, 1), torch.ones(3, 1, 5)
    with AttentionCounter() as counter:
        one @ two
        nn.Linear(5, 4)(one @ two)
        torch.matmul(one @ two, torch.ones(5, 4))
        assert counter.forward_flops == 0.0
        torch.baddbmm(torch.ones(3, 12, 5), torch.ones(3, 12, 4), batch2=torch.ones(3, 4, 5))
    assert counter.forward_flops == 2 * 3 * 12 * 4 * 5
