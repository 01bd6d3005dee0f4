from dataclasses import replace
from itertools import combinations

import pytest

from cost_model.errors import InfeasibleError
from cost_model.layer_profile import LayerProfile
from cost_model.memory import (
    StageShape,
    device_memory,
    leanest_segments,
    saved_bytes_per_sample,
    segment_choices,
    stage_activation_bytes,
    trained_bytes,
    working_bytes,
)
from hetpipe.program.costs import check_memory
from partition.estimates.layer_bytes import LayerBytes
from partition.estimates.plan_memory import plan_memory, summed_bytes
from small_case import plan_of, small_cluster, small_plan, small_profile


def test_memory_of_a_stage_term_by_term():
    # Layers 1 and 2, 3 microbatches of 2 in flight: saved 3 x 2 x (50 + 50); the next one's input 2 x 10, and
    # 3 outputs and the gradient of one of 2 x 10 each.
    need = device_memory(small_profile(), [StageShape(1, 3, in_flight=3, microbatch_size=2)])
    assert need.parameter_bytes == need.gradient_bytes == 400
    assert need.optimizer_bytes == 800
    assert need.saved_bytes == 600
    assert need.boundary_bytes == 20 + 4 * 20
    assert need.workspace_bytes == 5
    assert need.total_bytes == 400 + 400 + 800 + 600 + 100 + 5


def test_gradients_wait_here_for_a_stage_that_has_more_in_flight():
    profile = small_profile()
    shape = StageShape(1, 3, in_flight=3, microbatch_size=2)
    boundary = {
        before: stage_activation_bytes(profile, shape._replace(in_flight_before=before))[1]
        for before in (None, 3, 4, 7)
    }
    assert boundary == {None: 100, 3: 100, 4: 100 + 20, 7: 100 + 4 * 20}
    # none where the stage before gets no gradient: the first, and the first that has a backward
    embeddings = replace(profile.layers[0], unreached_bytes=400.0)
    head = replace(profile.layers[3], tied_to=None, tied_bytes=0.0)
    frozen = replace(profile, layers=(embeddings, *profile.layers[1:3], head))
    assert stage_activation_bytes(frozen, shape._replace(in_flight_before=7))[1] == 100
    assert stage_activation_bytes(profile, StageShape(0, 3, 3, 2, in_flight_before=7))[1] == 4 * 20
    # as a plan has it
    plan = plan_of([("a/0", 0, 1, 7), ("b/0", 1, 3, 3), ("c/0", 3, 4, 1)], num_samples=16, microbatch_size=2)
    assert [plan_memory(plan, profile, name).boundary_bytes for name in ("b/0", "c/0")] == [180, 20 + 2 * 20]


def test_a_stage_that_begins_with_a_block_keeps_what_is_made_before_all_blocks():
    # rotary tables of 7 a sample, for each of 3 microbatches of 2; embeddings have them among their own
    profile = small_profile()
    blocks = (replace(layer, prefix_bytes_per_sample=7.0) for layer in profile.layers[1:3])
    masked = replace(profile, layers=(profile.layers[0], *blocks, profile.layers[3]))
    saved, _ = stage_activation_bytes(masked, StageShape(1, 3, 3, 2))
    assert saved == 600 + 3 * 2 * 7
    assert stage_activation_bytes(masked, StageShape(0, 3, 3, 2)) == (6 * 120, 4 * 20)
    by_layer = StageShape(1, 3, 3, 2, recompute=True, segment_layers=1)  # one segment runs at a time
    assert stage_activation_bytes(masked, by_layer)[0] == stage_activation_bytes(profile, by_layer)[0] + 2 * 7
    tables = LayerBytes.of(masked)
    for start, stop in combinations(range(5), 2):
        assert tables.saved[start, stop] == saved_bytes_per_sample(masked, start, stop)
    assert (tables.saved[1, 1], tables.saved[1, 2], tables.saved[2, 4]) == (0, 57, 50 + 30 + 7)


def test_recompute_keeps_inputs_and_one_microbatch():
    # 3 x 2 x 10 of inputs and one microbatch of 2 x 100
    saved, boundary = stage_activation_bytes(small_profile(), StageShape(1, 3, 3, 2, recompute=True))
    assert (saved, boundary) == (60 + 200, 100)


def test_recompute_by_segments_keeps_their_inputs_and_the_largest_one():
    profile = small_profile()
    # By layer: 3 x 2 x (10 + 10) of inputs. Block0 works with its 2 x 50, a workspace of 5, and its output
    # and the gradient of that, 2 x 10 each; block1's input of 2 x 10 has gone by then.
    by_layer = StageShape(1, 3, 3, 2, recompute=True, segment_layers=1)
    need = device_memory(profile, [by_layer])
    assert (need.saved_bytes, need.boundary_bytes) == (120 + 100 + 5 + 40 - 20, 100)
    assert need.workspace_bytes == 0  # counted above, with the segment that needs it
    whole = by_layer._replace(segment_layers=2)
    assert device_memory(profile, [whole]) == device_memory(profile, [whole._replace(segment_layers=0)])
    # all gradients but block0's are there while block0 is run again: having all in flight gains nothing
    assert device_memory(profile, [by_layer._replace(num_microbatches=3)]) == need


def test_segments_of_least_memory_are_longer_the_more_is_in_flight():
    layers = tuple(LayerProfile(f"block{index}", 0.0, 1.0, 20.0) for index in range(64))
    profile = replace(small_profile(), layers=layers, kinds={})

    def leanest(in_flight: int) -> int:
        return leanest_segments(profile, StageShape(0, 64, in_flight, 1, recompute=True))

    # k layers a segment: in_flight x 64 / k inputs, and 20 k
    assert [leanest(in_flight) for in_flight in (1, 6, 30, 200, 2000)] == [2, 4, 8, 32, 0]
    choices = [StageShape(0, 64, 6, 1, True, segment_layers=each) for each in segment_choices(64)]
    needs = {shape.segment_layers: device_memory(profile, [shape]).total_bytes for shape in choices}
    assert min(needs, key=needs.__getitem__) == 4 and needs[4] < needs[0] / 7


def test_recompute_of_a_whole_stage_saves_nothing_of_a_single_microbatch():
    profile = small_profile()
    for start, stop in combinations(range(5), 2):
        plain = StageShape(start, stop, 1, 2, num_microbatches=1)
        again = device_memory(profile, [plain._replace(recompute=True)])
        assert again.total_bytes >= device_memory(profile, [plain]).total_bytes


def test_ends_of_the_pipeline_have_no_boundary_buffers():
    profile = small_profile()
    assert stage_activation_bytes(profile, StageShape(0, 4, 3, 1)) == (3 * 150, 0)
    assert stage_activation_bytes(profile, StageShape(0, 3, 2, 1))[1] == 3 * 10


def test_parameters_that_the_loss_does_not_reach_cost_their_weights_only():
    need = device_memory(small_profile(), [StageShape(0, 1, 1, 1)])
    assert (need.parameter_bytes, need.gradient_bytes, need.optimizer_bytes) == (400, 360, 720)


def test_frozen_weights_cost_what_they_are_stored_in_and_trained_ones_their_lowered_copies():
    # layer 1: 100 parameters, 80 of them frozen in two bytes each; 20 in four, with a copy in two
    profile = small_profile()
    layer = replace(
        profile.layers[1], parameter_bytes=160.0 + 80.0, unreached_bytes=160.0, lowered_bytes=40.0,
        num_parameters=100,
    )  # fmt: skip
    profile = replace(profile, layers=(profile.layers[0], layer, *profile.layers[2:]))
    need = device_memory(profile, [StageShape(1, 2, 1, 1), StageShape(1, 2, 1, 1)])
    assert (need.parameter_bytes, need.gradient_bytes, need.optimizer_bytes) == (280, 80, 160)
    assert layer.trained_bytes == trained_bytes(profile, [1]) == 80


def test_a_tied_pair_on_one_device_counts_once():
    profile = small_profile()
    assert trained_bytes(profile, [3]) == 300
    assert trained_bytes(profile, [0, 3]) == 360 + 300 - 250


def test_frozen_weights_of_two_layers_are_on_one_device_once():
    # the head has the 40 bytes that are not trained in the first layer, 250 that are trained, and 10 more
    profile = small_profile()
    head = replace(
        profile.layers[3], parameter_bytes=300.0, unreached_bytes=50.0, frozen_with=profile.layers[0].name,
        frozen_with_bytes=40.0,
    )  # fmt: skip
    profile = replace(profile, layers=(*profile.layers[:3], head))
    need = {layers: device_memory(profile, [StageShape(*layers, 1, 1)]) for layers in ((0, 4), (1, 4))}
    assert need[1, 4].parameter_bytes == 200 + 200 + 300
    assert need[0, 4].parameter_bytes == need[1, 4].parameter_bytes + 400 - 250 - 40
    assert need[0, 4].gradient_bytes == 360 + 200 + 200 + 250 - 250
    tables = LayerBytes.of(profile)
    for (start, stop), expected in need.items():
        assert tables.weights[start, stop] == expected.parameter_bytes
        assert tables.trained[start, stop] == expected.gradient_bytes


def test_layers_of_several_stages_count_once_but_their_activations_add_up():
    profile = small_profile()
    shape = StageShape(1, 2, 1, 1)
    once, twice = device_memory(profile, [shape]), device_memory(profile, [shape, shape])
    assert twice.parameter_bytes == once.parameter_bytes
    assert twice.saved_bytes == 2 * once.saved_bytes


def test_in_flight_beyond_the_microbatches_costs_nothing():
    many = plan_of([("a/0", 0, 3, 9), ("b/0", 3, 4, 1)], num_samples=2)
    few = plan_of([("a/0", 0, 3, 2), ("b/0", 3, 4, 1)], num_samples=2)
    assert plan_memory(many, small_profile(), "a/0") == plan_memory(few, small_profile(), "a/0")


def test_workspace_is_that_of_the_worst_layer_at_its_microbatch_size():
    profile = small_profile()
    curve = ((1, 4.0), (2, 6.0), (4, 30.0))
    layers = list(profile.layers)
    layers[2] = replace(layers[2], workspace_bytes=0.0, workspace_by_size=curve)
    profile = replace(profile, layers=tuple(layers))

    def workspace(*stages: tuple[int, int, int]) -> float:
        shapes = [StageShape(start, stop, 1, size) for start, stop, size in stages]
        return device_memory(profile, shapes).workspace_bytes

    # 3 lies half way between 6 and 30, 6 another 12 a sample beyond; block0's 5 comes when nothing is saved
    # of block1 any more
    assert [workspace((1, 3, size)) for size in (1, 2, 3, 4, 6)] == [4, 6, 18, 30, 54]
    assert workspace((1, 2, 4)) == 5
    # of two stages each has its own size
    assert workspace((1, 2, 4), (2, 3, 1)) == 5
    assert workspace((1, 2, 1), (2, 3, 4)) == 30


def test_workspace_of_a_layer_has_the_room_of_what_later_layers_save():
    profile = small_profile()
    layers = list(profile.layers)
    layers[1] = replace(layers[1], workspace_bytes=130.0)
    profile = replace(profile, layers=tuple(layers))

    # block0 works while nothing is saved of block1 (50 a sample): its 130 exceed that by 80, or by 30 of 2
    assert working_bytes(profile, 1, 1)[:3] == (0.0, 130.0, 80.0)
    assert working_bytes(profile, 1, 2)[:3] == (0.0, 130.0, 30.0)
    need = device_memory(profile, [StageShape(1, 3, in_flight=3, microbatch_size=2)])
    assert (need.saved_bytes, need.workspace_bytes) == (600, 30)
    # with recompute too only one microbatch is saved whole, and it is the one that works
    need = device_memory(profile, [StageShape(1, 3, 3, 2, recompute=True)])
    assert (need.saved_bytes, need.workspace_bytes) == (60 + 200, 30)


def test_the_gradient_of_tied_weights_waits_for_their_first_layer():
    profile = small_profile()
    # While the blocks work backwards, the head's 250 bytes of shared gradient are there, while the embeddings
    # do its sum with theirs too; but nothing is saved of the head (30 a sample) and the blocks (50) any more.
    assert working_bytes(profile, 0, 1) == (0.0, 0.0, 5.0, 5.0, 2 * 250.0 - 30.0 - 2 * 50.0)
    assert working_bytes(profile, 1, 1) == (0.0, 5.0, 5.0, 0.0)
    need = device_memory(profile, [StageShape(0, 4, in_flight=1, microbatch_size=3)])
    assert need.workspace_bytes == 5.0 + 250.0 - 3 * 30.0


def test_missing_bytes_are_named():
    # a/0: parameters 800, gradients 760, optimizer 1520, saved 2 x 120, boundary 3 x 10, workspace 5: 3355
    check_memory(small_plan(), small_profile(), small_cluster(fast_bytes=3355))
    with pytest.raises(InfeasibleError, match=r"'a/0'.*55 bytes are missing") as caught:
        check_memory(small_plan(), small_profile(), small_cluster(fast_bytes=3300))
    assert caught.value.device == "a/0"
    assert caught.value.missing_bytes == 55


def test_all_microbatches_in_flight_do_not_meet_all_gradients():
    # Layers 1 and 2: gradients 400, 2 x 100 saved a microbatch. After three forwards 600 and no gradients;
    # after the first backward 400 and 400 of gradients: that is the worse moment.
    whole = StageShape(1, 3, in_flight=3, microbatch_size=2, num_microbatches=3)
    need = device_memory(small_profile(), [whole])
    assert (need.gradient_bytes, need.saved_bytes) == (400, 400)
    # Gradients that are summed with other devices have their room from the start: 400 + 600.
    need = device_memory(small_profile(), [whole], summed_bytes=400)
    assert (need.gradient_bytes, need.saved_bytes) == (400, 600)
    # With more microbatches to come, forwards meet gradients; with one only, its activations never do.
    need = device_memory(small_profile(), [StageShape(1, 3, 3, 2, num_microbatches=4)])
    assert (need.gradient_bytes, need.saved_bytes) == (400, 600)
    need = device_memory(small_profile(), [StageShape(1, 3, 1, 2, num_microbatches=1)])
    assert (need.gradient_bytes, need.saved_bytes) == (400, 0)


def test_a_large_workspace_of_the_first_backward_meets_the_other_microbatches():
    # Layers 1 and 2, all of 2 microbatches in flight. In the first backward block0 needs 900, with 50 of its
    # own saved; of its 200 and block1's 200 of gradients none has been made then that was not there before.
    profile = small_profile()
    layers = list(profile.layers)
    layers[1] = replace(layers[1], workspace_bytes=900.0)
    profile = replace(profile, layers=tuple(layers))
    shape = StageShape(1, 3, in_flight=2, microbatch_size=1, num_microbatches=2)
    need = device_memory(profile, [shape], summed_bytes=400)
    assert need.gradient_bytes + need.saved_bytes + need.workspace_bytes == 400 + 100 + 900 + 50
    # gradients that are made by then are not there twice
    need = device_memory(profile, [shape])
    assert (need.gradient_bytes, need.saved_bytes, need.workspace_bytes) == (400, 100, 900 - 50)


def test_gradients_summed_with_other_devices_are_there_from_the_start():
    # The head on a device of its own sums its 250 tied bytes with the embeddings' device.
    assert summed_bytes(small_plan(), small_profile(), small_plan().device_names[-1]) == 250
