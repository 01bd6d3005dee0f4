"""Samples of a user's own, as the batches that the ranks read."""

import math

import pytest
import torch

from cost_model.errors import InputError
from hetpipe.data.user_data import batch_of


def test_each_epoch_reads_each_sample_once_in_an_order_of_its_own():
    data = [(torch.tensor([float(index)]), index) for index in range(5)]
    read = batch_of(data, 7, shuffle=True)
    inputs, labels = read(0, 15)
    epochs = labels.view(3, 5).tolist()
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert torch.equal(inputs["input"].flatten(), labels.double().float())
    assert torch.equal(read(4, 3)[1], labels[4:7])  # a slice of a batch is a batch
    assert batch_of(data, 7, shuffle=False)(3, 4)[1].tolist() == [3, 4, 0, 1]


def test_samples_may_be_mappings_of_lists_and_arrays():
    data = [{"input_ids": [index, 1, 2], "labels": [index, -100, 2]} for index in range(3)]
    inputs, labels = batch_of(data, 0, shuffle=False)(0, 2)
    assert inputs["input_ids"].tolist() == [[0, 1, 2], [1, 1, 2]]
    assert labels.tolist() == [[0, -100, 2], [1, -100, 2]]
    with pytest.raises(InputError, match="samples of the data do not fit together"):
        batch_of([*data, {"input_ids": [1], "labels": [1]}], 0, shuffle=False)(2, 2)


@pytest.mark.parametrize("with_mask", [{0, 2}, {1}])
def test_samples_of_unlike_keys_are_refused(with_mask: set[int]):
    data = [
        {"input_ids": [1, 2], "labels": [1, 2], **({"mask": [1, 0]} if index in with_mask else {})}
        for index in range(3)
    ]
    some, other = ("2", "1") if 0 in with_mask else ("1", "0")
    said = rf"data\[{some}\] has 'mask', data\[{other}\] has not; give it in every sample"
    with pytest.raises(InputError, match=said):
        batch_of(data, 0, shuffle=False)(0, 3)


def test_floats_of_plain_python_become_float32():
    inputs, labels = batch_of([([1.0, 2.0], 0.5)], 0, shuffle=False)(0, 1)
    assert inputs["input"].dtype == labels.dtype == torch.float32
    assert math.isclose(float(labels), 0.5)
