"""Causal models of transformers do not look for packed sequences, unless positions are given."""

from typing import Any

import pytest
import torch
from transformers import masking_utils

from folders import MODELS, tiny_model
from hetpipe.models.unpacked import keep_unpacked

CAUSAL = sorted(name for name in MODELS if "Bert" not in name)
IDS = torch.arange(12).reshape(2, 6)
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, 6)


@pytest.fixture
def found(monkeypatch) -> list[Any]:
    """What each search for packed sequences finds."""
    results: list[Any] = []
    search = masking_utils.find_packed_sequence_indices

    def noted(position_ids: torch.Tensor) -> torch.Tensor | None:
        results.append(search(position_ids))
        return results[-1]

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", noted)
    return results


@pytest.mark.parametrize("architecture", CAUSAL)
def test_nothing_would_be_found_and_it_is_not_looked_for(found, architecture):
    model = tiny_model(architecture).eval()
    expected = model(IDS, use_cache=False).logits
    assert found and not any(result is not None for result in found)
    packed = model(IDS, position_ids=PACKED, use_cache=False).logits
    keep_unpacked(model)
    found.clear()
    assert torch.equal(model(IDS, use_cache=False).logits, expected)
    assert found == []
    assert torch.equal(model(IDS, position_ids=PACKED, use_cache=False).logits, packed)
    assert found and found[-1] is not None


def test_it_is_looked_for_again_after_a_forward_that_a_stage_leaves(found):
    model = tiny_model("LlamaForCausalLM").eval()
    keep_unpacked(model)
    noted = masking_utils.find_packed_sequence_indices

    def leave(*_: object) -> None:
        raise KeyError

    handle = model.model.layers[0].register_forward_pre_hook(leave)
    with pytest.raises(KeyError):
        model(IDS, use_cache=False)
    assert masking_utils.find_packed_sequence_indices is noted
    handle.remove()
    model(IDS, position_ids=PACKED, use_cache=False)
    assert found
