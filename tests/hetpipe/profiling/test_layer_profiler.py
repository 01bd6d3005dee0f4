import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import user_tasks
from cost_model.cluster import CPU, EMULATED
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.profiling import doubtful_profiles, profile_cache
from hetpipe.profiling.layer_profiler import profile_task
from hetpipe.profiling.layer_timer import Bench, _Marks
from hetpipe.profiling.merging import merge
from hetpipe.profiling.profile_cache import cache_key, profile_model
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings, TaskSettings
from runs import EMULATED_CLUSTER, RECOMPUTE, chain_plan, emulated_cluster, made_up_profile, run


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def measure(model: str, folder: Path) -> ModelProfile:
    return profile_model(
        model, emulated_cluster(folder), 64, budget_s=0.2, microbatch_sizes=(1, 2), use_cache=False
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelProfile]:
    """The profile of a model, measured once."""
    return cache(lambda model: measure(model, tmp_path_factory.mktemp("measured")))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_blocks"), [("bert-tiny", 6), ("gpt2-tiny", 4)])
def test_a_profile_describes_the_model(measured, model, num_blocks):
    profile = measured(model)
    chain = ChainModel.from_spec(model_spec(model))
    names = ["embeddings", *(f"block{index}" for index in range(num_blocks)), "head"]
    assert [layer.name for layer in profile.layers] == names
    with torch.device("meta"):
        whole = model_spec(model).build()
    # the embedding is in the first and the last layer
    tied = 4 * whole.get_parameter(next(info.name for info in chain.parameters(0) if info.tied)).numel()
    head = profile.layers[-1]
    assert head.tied_to == "embeddings"
    total = sum(layer.parameter_bytes for layer in profile.layers)
    assert total - head.tied_bytes == 4 * sum(value.numel() for value in whole.parameters())
    assert tied <= head.tied_bytes <= tied + 4 * 1024  # with the bias of the predictions, where it is tied
    # the loss does not reach BERT's pooler (64 x 64 + 64) and next-sentence head (2 x 64 + 2)
    assert head.unreached_bytes == (4.0 * (64 * 64 + 64 + 2 * 64 + 2) if model == "bert-tiny" else 0.0)
    assert all(layer.unreached_bytes == 0.0 for layer in profile.layers[:-1])
    assert [layer.output_bytes_per_sample for layer in profile.layers] == [
        *[64 * 64 * 4.0] * (num_blocks + 1),
        0,
    ]
    assert all(layer.saved_bytes_per_sample > 0 for layer in profile.layers)
    assert len({layer.saved_bytes_per_sample for layer in profile.layers[1:-1]}) == 1  # alike
    kind = profile.kinds[EMULATED]
    assert (kind.source, kind.microbatch_sizes) == ("measured", (1, 2))
    assert kind.optimizer_s_per_byte > 0
    assert kind.host_step_bytes_per_s and kind.host_step_bytes_per_s > 0
    assert all(value > 0 for layer in kind.layers for value in (*layer.forward_s, *layer.backward_s))


@pytest.mark.parametrize("size", [2, 8])
def test_saved_bytes_of_linear_layers_are_their_inputs(tmp_path, size):
    settings = TaskSettings("mine", 1)
    task = user_tasks.linear_task(RunFolder(tmp_path), settings)
    profile = profile_task(task, settings, CPU, (size,), 0.01, device=torch.device("cpu"))
    # 8 -> 16 -> 12 -> 4, float32. A linear layer keeps its input; that of the first is the data, which is
    # there anyway. The loss keeps the difference of prediction and target, and is 4 bytes itself.
    saved = [layer.saved_bytes_per_sample for layer in profile.layers]
    assert saved == [0.0, 4 * 16, 4 * 12 + 4 * 4 + 4 / size]
    assert [layer.output_bytes_per_sample for layer in profile.layers] == [4 * 16, 4 * 12, 0]
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * 9 * 16, 4 * 17 * 12, 4 * 13 * 4]


def test_layers_before_the_first_parameter_have_a_profile(tmp_path):
    settings = TaskSettings("mine", 1)
    task = user_tasks.mixed_task(RunFolder(tmp_path), settings)
    profile = profile_task(task, settings, CPU, (2,), 0.01, device=torch.device("cpu"))
    assert profile.layers[0].parameter_bytes == 0.0
    assert profile.num_layers == 6


def test_workspace_is_measured_by_microbatch_size(tmp_path):
    settings = TaskSettings("mine", 1)
    task = user_tasks.linear_task(RunFolder(tmp_path), settings)
    profile = profile_task(task, settings, CPU, (1, 4, 16), 0.01, device=torch.device("cpu"))
    first, _, last = profile.layers
    assert [size for size, _ in last.workspace_by_size] == [1, 4, 16]
    assert all(layer.workspace_bytes == 0.0 for layer in profile.layers)
    # 8 -> 16: the gradient of the weights is there before it is summed, whatever the microbatch
    assert first.workspace_at(1) == first.workspace_at(16) >= 4 * 8 * 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_is_timed_by_events_and_counted_by_its_allocator(tmp_path):
    settings = TaskSettings("mine", 1)
    task = user_tasks.linear_task(RunFolder(tmp_path), settings)
    profile = profile_task(task, settings, "gpu", (1, 64), 0.01, device=torch.device("cuda", 0))
    assert all(0 < s < 1 for layer in profile.kinds["gpu"].layers for s in layer.forward_s + layer.backward_s)
    # as on a CPU, but in blocks of 512 bytes
    here = profile_task(task, settings, CPU, (1, 64), 0.01, device=torch.device("cpu"))
    for gpu, cpu in zip(profile.layers, here.layers, strict=True):
        assert 64 * abs(gpu.saved_bytes_per_sample - cpu.saved_bytes_per_sample) <= 64 * 4 * 512


def test_marks_that_number_readings_become_them():
    marks = _Marks(forward={0: 0.0, 1: 1.0}, backward={1: 2.0, 0: 3.0}).read([0.0, 0.5, 0.75, 2.0])
    assert (marks.forward, marks.backward) == ({0: 0.0, 1: 0.5}, {1: 0.75, 0: 2.0})


@pytest.mark.slow
def test_a_profile_in_the_cache_is_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(doubtful_profiles, "DOUBTFUL", 1e9)  # however busy this machine is
    first = measure("gpt2-tiny", tmp_path)

    def fail(*_: object) -> ModelProfile:
        raise AssertionError("measured again")

    monkeypatch.setattr(profile_cache, "_measure", fail)
    cluster = emulated_cluster(tmp_path)
    assert profile_model("gpt2-tiny", cluster, 64, microbatch_sizes=(1, 2)) == first
    for options in ({"use_cache": False}, {"dtype": "float64"}):
        with pytest.raises(AssertionError, match="measured again"):
            profile_model("gpt2-tiny", cluster, 64, microbatch_sizes=(1, 2), **options)
    with pytest.raises(AssertionError, match="measured again"):
        profile_model("gpt2-tiny", cluster, 32, microbatch_sizes=(1, 2))


def test_a_measurement_with_other_threads_has_another_key():
    settings = TaskSettings("bert-tiny")
    keys = {cache_key(settings, {CPU: count}, (1, 2), "") for count in (1, 2, 1)}
    assert len(keys) == 2


def test_memory_counts_in_the_key_only_where_sizes_depend_on_it():
    settings = TaskSettings("bert-tiny")
    for sizes, count in (((1, 2), 1), (None, 2)):
        assert (
            len({cache_key(settings, {CPU: 1}, sizes, "", {CPU: memory}) for memory in (1e9, 2e9)}) == count
        )


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=["plain", "recompute", "by layer"])
def test_measured_peaks_are_near_the_predicted_ones(tmp_path, measured, recompute):
    profile = measured("bert-tiny")
    plan = chain_plan("bert-tiny", [0, 2, 5, 8], 2, **recompute)
    report, _ = run(tmp_path / "run", plan, Settings("bert-tiny", 1, save=False), profile, EMULATED_CLUSTER)
    for name, device in report.devices.items():
        assert device.peak_bytes is not None
        assert device.peak_bytes == pytest.approx(device.predicted_bytes, rel=0.1), name


def test_kinds_of_several_profiles_are_joined():
    here, there = made_up_profile("bert-tiny", CPU), made_up_profile("bert-tiny", EMULATED)
    assert set(merge([here, there]).kinds) == {CPU, EMULATED}
    with pytest.raises(InputError, match="profiles of sequence_length 64 and 32 cannot be joined"):
        merge([here, replace(there, sequence_length=32)])


def test_profiles_that_do_not_belong_together_are_not_joined():
    here, there = made_up_profile("bert-tiny", CPU), made_up_profile("bert-tiny", EMULATED)
    renamed = (
        replace(there.layers[0], name="first"),
        *there.layers[1:-1],
        replace(there.layers[-1], tied_to="first"),
    )
    for other, message in (
        (replace(there, model="gpt2-tiny"), "profiles of model 'bert-tiny' and 'gpt2-tiny' cannot"),
        (
            replace(there, dtype="float64"),
            "float32 on cpu, float64 on emulated: these do not train one model together",
        ),
        (replace(there, layers=renamed), r"layers\[0\] is 'embeddings' and 'first' cannot be joined"),
        (made_up_profile("bert-tiny", CPU, 0.5), "two profiles hold kind 'cpu' with different times"),
    ):
        with pytest.raises(InputError, match=message):
            profile_cache.merge([here, other])
    assert profile_cache.merge([here, here]) == here


@pytest.mark.parametrize("turned", [False, True])
def test_profiles_of_other_weights_or_optimizers_are_not_joined(turned):
    here, there = made_up_profile("bert-tiny", CPU), made_up_profile("bert-tiny", EMULATED)

    def with_second(**changes: object) -> ModelProfile:
        return replace(
            there, layers=(there.layers[0], replace(there.layers[1], **changes), *there.layers[2:])
        )

    layer = there.layers[1]
    for other, key in (
        (replace(there, optimizer_bytes_per_parameter_byte=0.0), "optimizer_bytes_per_parameter_byte"),
        (replace(there, resident_states=True), "resident_states"),
        (with_second(parameter_bytes=2 * layer.parameter_bytes), "parameter_bytes"),
        (with_second(unreached_bytes=layer.parameter_bytes), "unreached_bytes"),
        (with_second(output_bytes_per_sample=2 * layer.output_bytes_per_sample), "output_bytes_per_sample"),
    ):
        with pytest.raises(InputError, match=rf"{key} .* cannot be joined"):
            merge([other, here] if turned else [here, other])
    more = with_second(saved_bytes_per_sample=3 * layer.saved_bytes_per_sample)
    (_, joined, *_) = merge([more, here] if turned else [here, more]).layers
    assert joined.saved_bytes_per_sample == 3 * layer.saved_bytes_per_sample


def test_a_joined_profile_has_the_larger_workspace_at_each_size():
    here, there = made_up_profile("bert-tiny", CPU), made_up_profile("bert-tiny", EMULATED)

    def with_first(profile: ModelProfile, **workspace: object) -> ModelProfile:
        plain = replace(profile.layers[0], workspace_bytes=0.0)
        return replace(profile, layers=(replace(plain, **workspace), *profile.layers[1:]))

    one = with_first(here, workspace_by_size=((1, 10.0), (4, 20.0)))
    two = with_first(there, workspace_by_size=((2, 12.0), (4, 50.0)))
    number = with_first(there, workspace_bytes=15.0)
    # at 1: 10 and half of 12; at 2: 10 + 10 / 3 and 12; at 4: 20 and 50
    (layer, *_) = profile_cache.merge([one, two]).layers
    assert dict(layer.workspace_by_size) == pytest.approx({1: 10, 2: 10 + 10 / 3, 4: 50})
    assert profile_cache.merge([one, number]).layers[0].workspace_by_size == ((1, 15.0), (4, 20.0))
    assert profile_cache.merge([number, one]).layers[0] == profile_cache.merge([one, number]).layers[0]
    assert (
        profile_cache.merge([with_first(here, workspace_bytes=4.0), number]).layers[0].workspace_at(9) == 15.0
    )


def fitting(
    monkeypatch: pytest.MonkeyPatch, folder: Path, largest: int, sizes: list[int] | None
) -> ModelProfile:
    """A profile on a device on which the forward of more than `largest` samples runs out of memory."""
    settings = TaskSettings("mine", 1)
    task = user_tasks.linear_task(RunFolder(folder), settings)
    count = Bench.count

    def limited(bench: Bench, size: int, cap_bytes: float = float("inf")) -> None:
        count(bench, size, cap_bytes)
        if size > largest:
            raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(Bench, "count", limited)
    return profile_task(task, settings, CPU, sizes, 1000.0, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("largest", "sizes", "expected"),
    [
        (4, [1, 2, 4, 8, 16], (1, 2, 4)),
        (11, None, (1, 2, 4, 8, 11)),
        (8, None, (1, 2, 4, 8)),
        (100, None, (1, 2, 4, 8, 16, 32, 64)),
        (1, None, (1,)),
    ],
)
def test_sizes_that_do_not_fit_are_left_out(monkeypatch, tmp_path, largest, sizes, expected):
    monkeypatch.setattr("hetpipe.profiling.layer_profiler.TARGET", float("inf"))  # no more rounds than needed
    profile = fitting(monkeypatch, tmp_path, largest, sizes)
    assert profile.kinds[CPU].microbatch_sizes == expected
    assert all(len(layer.forward_s) == len(expected) for layer in profile.kinds[CPU].layers)


@pytest.mark.parametrize(("again_s", "largest"), [(0.1, 64), (5.0, 1)])
def test_kernels_that_load_at_the_first_run_do_not_end_the_search_for_sizes(
    monkeypatch, tmp_path, again_s, largest
):
    """By a clock on which the first run of a size takes 10 s; for a budget in which eight would not fit."""
    now_s, seen = [0.0], set[int]()
    count = Bench.count

    def slow(bench: Bench, size: int, cap_bytes: float = float("inf")) -> None:
        now_s[0] += again_s if size in seen else 10.0
        seen.add(size)
        count(bench, size, cap_bytes)

    monkeypatch.setattr(Bench, "count", slow)
    monkeypatch.setattr("hetpipe.profiling.layer_profiler.TARGET", float("inf"))
    clock = SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("hetpipe.profiling.layer_profiler.time", clock)
    settings = TaskSettings("mine", 1)
    task = user_tasks.linear_task(RunFolder(tmp_path), settings)
    profile = profile_task(task, settings, CPU, None, 30.0, device=torch.device("cpu"))
    assert profile.kinds[CPU].microbatch_sizes[-1] == largest


def test_a_device_without_room_for_the_smallest_microbatch_is_refused(monkeypatch, tmp_path):
    with pytest.raises(InputError, match=r"a microbatch of 2 does not fit this device \(too much\)"):
        fitting(monkeypatch, tmp_path, 1, [2, 4])


def test_memory_of_an_emulated_device_limits_the_sizes(monkeypatch, tmp_path):
    monkeypatch.setattr("hetpipe.profiling.layer_profiler.TARGET", float("inf"))
    settings = TaskSettings("mine", 1)
    task = user_tasks.linear_task(RunFolder(tmp_path), settings)
    # 8 -> 16 -> 12 -> 4: data and outputs of one sample are 4 x (8 + 16 + 12 + 4) = 160 bytes, so 16 samples
    # need more than 2000 bytes; the smallest is measured in any case, a plan may cut the model finer
    for memory_bytes, largest in ((2000, 8), (10, 4)):
        profile = profile_task(
            task, settings, EMULATED, (4, 8, 16), 0.01, device=torch.device("cpu"), memory_bytes=memory_bytes
        )
        assert profile.kinds[EMULATED].microbatch_sizes[-1] <= largest
        assert profile.kinds[EMULATED].microbatch_sizes[0] == 4


def test_out_of_memory_in_a_timed_round_is_remembered(monkeypatch, tmp_path):
    monkeypatch.setattr("hetpipe.profiling.layer_profiler.TARGET", float("inf"))
    tried: list[int] = []
    time = Bench.time

    def limited(bench: Bench, size: int) -> None:
        tried.append(size)
        if size == 4 and tried.count(size) == 2:
            raise torch.OutOfMemoryError("fragmented")
        time(bench, size)

    monkeypatch.setattr(Bench, "time", limited)
    settings = TaskSettings("mine", 1)
    task = user_tasks.linear_task(RunFolder(tmp_path), settings)
    profile = profile_task(task, settings, CPU, (2, 4, 8), 0.01, device=torch.device("cpu"))
    assert profile.kinds[CPU].microbatch_sizes == (2,)
    assert tried.count(4) == 2


def test_rounds_go_on_until_the_median_is_known_or_the_budget_is_spent(monkeypatch, tmp_path):
    errors = iter([(0.5, "a"), (0.1, "b"), (0.01, "c")])
    monkeypatch.setattr(Bench, "standard_error", lambda *_: next(errors))
    settings = TaskSettings("mine", 1)
    task = user_tasks.linear_task(RunFolder(tmp_path), settings)
    for budget_s, found in ((0.0, (0.5, "a")), (100.0, (0.01, "c"))):
        kind = profile_task(task, settings, CPU, (2,), budget_s, device=torch.device("cpu")).kinds[CPU]
        assert (kind.standard_error, kind.standard_error_of) == found
