"""The bytes of a device whose step goes layer by layer, worked out by hand."""

from dataclasses import replace

import pytest

from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.memory import DeviceMemory, StageShape
from cost_model.profile import KindProfile, ModelProfile
from cost_model.sharded_memory import sharded_memory
from cost_model.sharding import Sharding


def three_layers() -> ModelProfile:
    """Layers of 10, 20 and 30 bytes of weights, which save 2, 3 and 4 bytes a sample and hand on 1."""
    sizes = zip((10.0, 20.0, 30.0), (2.0, 3.0, 4.0), strict=True)
    layers = tuple(LayerProfile(f"layer {i}", held, 1.0, saved) for i, (held, saved) in enumerate(sizes))
    times = (LayerTimes((1.0,), (2.0,)),) * 3
    return ModelProfile("three", 8, "float32", layers, {"one": KindProfile("measured", (1,), times)})


def need(profile: ModelProfile, sharding: Sharding, owned: set[int], num_microbatches: int) -> DeviceMemory:
    stage = StageShape(0, 3, 1, 1, num_microbatches=num_microbatches)
    return sharded_memory(profile, stage, sharding, lambda piece: piece.home not in owned)


def terms(memory: DeviceMemory) -> tuple[float, ...]:
    return memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes, memory.saved_bytes


def test_who_owns_the_first_layers_has_room_for_one_gradient_more() -> None:
    # The worst moment is the backward of the last layer: its 30 bytes of gradients, and all that is saved.
    found = need(three_layers(), Sharding.GRADIENTS, {0, 1}, 2)
    assert terms(found) == (60.0, 30.0 + 30.0, 2 * 30.0, 9.0)
    # The same under zero 3, with the weights of the last layer fetched for it
    found = need(three_layers(), Sharding.WEIGHTS, {0, 1}, 2)
    assert terms(found) == (30.0 + 30.0, 30.0 + 30.0, 2 * 30.0, 9.0)


def test_two_layers_of_others_are_there_at_once() -> None:
    # The backward of the first layer: its gradients, and those of the middle one, which are not reduced yet.
    found = need(three_layers(), Sharding.GRADIENTS, {2}, 1)
    assert terms(found) == (60.0, 30.0 + 20.0 + 10.0, 2 * 30.0, 2.0)
    # Under zero 3 that of the middle layer: its gradients, its weights, and those of the first, which comes.
    found = need(three_layers(), Sharding.WEIGHTS, {2}, 2)
    assert terms(found) == (30.0 + 20.0 + 10.0, 30.0 + 20.0, 2 * 30.0, 2.0 + 3.0)


def test_gradients_of_the_microbatch_before_wait_for_the_first_sum_of_this_one() -> None:
    # Of the first layer, of another: they are there until the last layer's sum begins, after its backward.
    profile, stage = three_layers(), StageShape(0, 3, 1, 1, num_microbatches=2)
    found = sharded_memory(profile, stage, Sharding.GRADIENTS, lambda piece: piece.home == 0)
    assert terms(found) == (60.0, 50.0 + 10.0, 2 * 50.0, 9.0)
    only = sharded_memory(
        profile, stage._replace(num_microbatches=1), Sharding.GRADIENTS, lambda p: p.home == 0
    )
    assert terms(only) == (60.0, 50.0 + 10.0, 2 * 50.0, 2.0)  # 10 + 2 of the first backward is more than 9
    # where no other device has the layers above, none of their sums frees anything
    alone = sharded_memory(
        profile, stage, Sharding.GRADIENTS, lambda piece: piece.home == 0, is_shared=lambda p: p.home == 0
    )
    assert terms(alone) == (60.0, 50.0 + 10.0, 2 * 50.0, 9.0)


@pytest.mark.parametrize("sharding", [Sharding.GRADIENTS, Sharding.WEIGHTS])
def test_who_owns_nothing_has_no_states_and_who_owns_all_needs_what_one_device_needs(sharding) -> None:
    profile = three_layers()
    assert need(profile, sharding, set(), 2).optimizer_bytes == 0.0
    assert terms(need(profile, sharding, {0, 1, 2}, 2)) == (60.0, 60.0, 120.0, 9.0)


def test_frozen_layers_have_no_gradients_and_stay_whole() -> None:
    layers = three_layers().layers
    frozen = (replace(layers[0], unreached_bytes=10.0), *layers[1:])
    found = need(replace(three_layers(), layers=frozen), Sharding.WEIGHTS, {1}, 2)
    # the first layer's weights are there all the time, those of the last while it works
    assert terms(found) == (10.0 + 20.0 + 30.0, 20.0 + 30.0, 2 * 20.0, 9.0)


def test_what_passes_each_layer_together_is_saved_together() -> None:
    # Two samples at the last layer: 9 bytes of each are saved, and its 30 bytes of gradients are there.
    profile, stage = three_layers(), StageShape(0, 3, 2, 1, num_microbatches=2)

    def together(stage: StageShape, sharding: Sharding, samples: int) -> DeviceMemory:
        return sharded_memory(profile, stage, sharding, lambda piece: piece.home == 2, together=samples)

    assert terms(together(stage, Sharding.GRADIENTS, 2)) == (60.0, 30.0 + 30.0, 2 * 30.0, 18.0)
    # Recomputed by layer: the inputs of the last two layers, and what one sample saves of the last.
    again = stage._replace(recompute=True, segment_layers=1)
    assert terms(together(again, Sharding.WEIGHTS, 2)) == (30.0 + 30.0, 30.0 + 30.0, 2 * 30.0, 2 * 2.0 + 4.0)
    # Three samples in microbatches of two are no four.
    uneven = stage._replace(microbatch_size=2)
    assert together(uneven, Sharding.GRADIENTS, 3).saved_bytes == 3 * 9.0


def test_with_several_in_flight_weights_of_the_other_end_come_next_too() -> None:
    # 30, 20 and 10 bytes, all of others. The worst moment of one in flight is the backward of the middle
    # layer: weights of it and the first, gradients of it and the last, 2 + 3 bytes saved. With two, the first
    # layer's backward is followed by the last layer's of the next microbatch, whose 9 bytes wait: weights of
    # both ends, gradients of the first two, 2 bytes saved.
    layers = tuple(
        replace(layer, parameter_bytes=size)
        for layer, size in zip(three_layers().layers, (30.0, 20.0, 10.0), strict=True)
    )
    profile = replace(three_layers(), layers=layers)
    assert terms(need(profile, Sharding.WEIGHTS, set(), 3)) == (30.0 + 20.0, 20.0 + 10.0, 0.0, 2.0 + 3.0)
    stage = StageShape(0, 3, 2, 1, num_microbatches=3)
    found = sharded_memory(profile, stage, Sharding.WEIGHTS, lambda _: True)
    assert terms(found) == (30.0 + 10.0, 30.0 + 20.0, 0.0, 9.0 + 2.0)


def test_weights_of_a_lower_stage_stay_and_what_is_summed_once_has_its_gradients_all_the_time() -> None:
    # All of the 10, 20 and 30 bytes are of others, and of the last layer only states are sharded. The worst
    # moment is the backward of the middle layer: its gradients, and those of the first before it.
    stage = StageShape(0, 3, 1, 1, num_microbatches=2)
    found = sharded_memory(
        three_layers(), stage, Sharding.WEIGHTS, lambda _: True,
        is_summed_once=lambda piece: piece.home == 2, is_fetched=lambda piece: piece.home != 2,
    )  # fmt: skip
    assert terms(found) == (30.0 + 20.0 + 10.0, 30.0 + 20.0 + 10.0, 0.0, 2.0 + 3.0)


def test_no_sum_follows_a_layer_whose_states_alone_are_sharded() -> None:
    profile = three_layers()
    sizes = zip(profile.layers, (30.0, 20.0, 10.0), strict=True)
    profile = replace(
        profile, layers=tuple(replace(layer, parameter_bytes=num_bytes) for layer, num_bytes in sizes)
    )

    def found(owned: set[int], at_the_end: int, num_microbatches: int) -> tuple[float, ...]:
        stage = StageShape(0, 3, 1, 1, num_microbatches=num_microbatches)
        return terms(
            sharded_memory(
                profile, stage, Sharding.GRADIENTS, lambda piece: piece.home not in owned,
                is_summed_once=lambda piece: piece.home == at_the_end,
            )
        )  # fmt: skip

    # Its own 20 bytes of the middle layer are summed at the end: the last layer's 10 wait for the sum of the
    # first, so that they are there in its backward, beside its 30 bytes.
    assert found({1}, 1, 1) == (60.0, 20.0 + 30.0 + 10.0, 2 * 20.0, 2.0)
    # The first layer's 30 are there all the time; what waits for the next microbatch are the middle's 20, in
    # the last layer's backward.
    assert found(set(), 0, 2) == (60.0, 30.0 + 20.0 + 10.0, 0.0, 9.0)
