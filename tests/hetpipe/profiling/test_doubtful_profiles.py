"""Times that are known badly: measured again, told of, and never taken from the cache."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cost_model.cluster import EMULATED
from cost_model.layer_profile import LayerTimes
from cost_model.profile import ModelProfile, profile_text
from hetpipe.profiling import profile_cache
from hetpipe.profiling.cached_profiles import cached_profiles
from hetpipe.profiling.doubtful_profiles import doubt_sentences
from hetpipe.profiling.profile_cache import LEAST_REPEATED_S, profile_model
from hetpipe.runs.cache import profiles_folder
from runs import EMULATED_CLUSTER, emulated_cluster, made_up_profile
from shell import Shell
from small_case import small_profile


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


SIZES = (1, 2, 4)


def known_to(error: float, factor: float = 1.0) -> ModelProfile:
    profile = made_up_profile("bert-tiny", EMULATED)
    seconds = tuple(factor * 0.001 * size for size in SIZES)
    times = replace(
        profile.kinds[EMULATED],
        microbatch_sizes=SIZES,
        layers=(LayerTimes(seconds, seconds),) * profile.num_layers,
        standard_error=error,
        standard_error_of="block0 backward, microbatch 2",
    )
    return replace(profile, kinds={EMULATED: times})


Measured = Callable[..., list[ModelProfile]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Let the next measurements give these profiles; the list shrinks with each."""

    def given(*profiles: ModelProfile) -> list[ModelProfile]:
        left = list(profiles)
        monkeypatch.setattr(profile_cache, "_measure", lambda *_: left.pop(0))
        return left

    return given


def profiled(folder: Path, budget_s: float = 60.0, **options: bool) -> ModelProfile:
    return profile_model("bert-tiny", emulated_cluster(folder), 64, budget_s=budget_s, **options)


def test_a_doubtful_measurement_is_repeated_once_and_the_better_one_taken(tmp_path, measured):
    left = measured(known_to(1.0), known_to(0.03, factor=2.0), known_to(0.01))
    assert profiled(tmp_path) == known_to(0.03, factor=2.0)
    assert len(left) == 1 and len(cached_profiles()) == 1
    assert profiled(tmp_path) == known_to(0.03, factor=2.0) and len(left) == 1  # from the cache


def test_what_stays_doubtful_is_not_cached(tmp_path, measured):
    left = measured(known_to(1.0), known_to(0.4), known_to(0.05))
    assert profiled(tmp_path) == known_to(0.4)
    assert cached_profiles() == ()
    assert profiled(tmp_path) == known_to(0.05) and left == []


def test_a_rough_measurement_that_was_asked_for_is_not_repeated(tmp_path, measured):
    left = measured(known_to(1.0), known_to(0.05))
    assert profiled(tmp_path, budget_s=LEAST_REPEATED_S / 2) == known_to(1.0) and len(left) == 1


def test_a_doubtful_profile_in_the_cache_is_measured_again(tmp_path, measured):
    measured(known_to(0.05))
    profiled(tmp_path)
    (kept,) = cached_profiles()
    kept.path.write_text(profile_text(known_to(1.005)))
    assert measured(known_to(0.02)) and profiled(tmp_path) == known_to(0.02)
    assert cached_profiles()[0].standard_error == 0.02


def test_a_profile_in_the_cache_that_can_be_neither_read_nor_removed_is_measured_again(tmp_path, measured):
    """As a damaged one in a cache that is read-only."""
    measured(known_to(0.01))
    profiled(tmp_path)
    (kept,) = cached_profiles()
    kept.path.unlink()
    kept.path.mkdir()
    measured(known_to(0.02))
    with pytest.warns(UserWarning, match="profiles cannot be written") as told:
        assert profiled(tmp_path) == known_to(0.02)
    assert [warning.filename for warning in told] == [__file__], "a line of hetpipe's is shown"


def test_where_times_are_known_badly_is_said():
    assert doubt_sentences(known_to(0.1)) == [] == doubt_sentences(small_profile())
    assert doubt_sentences(known_to(1.005)) == [
        "the times of 'emulated' are known to 100 % only (block0 backward, microbatch 2), so plan and "
        "prediction may be far off"
    ]


@pytest.fixture(autouse=True)
def emulated_devices(hetpipe: Shell) -> None:
    hetpipe.write("emulated.toml", EMULATED_CLUSTER)


MEASURE = "--model bert-tiny --cluster emulated.toml"


def test_every_verb_warns_of_doubtful_times(hetpipe, measured):
    measured(*[known_to(0.5)] * 4)
    said = "warning: the times of 'emulated' are known to 50 % only (block0 backward, microbatch 2), so plan"
    for verb in ("plan --json --no-proof", "profile -o doubtful.json"):
        result = hetpipe(f"{verb} {MEASURE}")
        assert result.code == 0 and result.err.count(said) == 1 and "not kept" in result.err, verb
    result = hetpipe("plan --json --no-proof --profile doubtful.json --cluster emulated.toml")
    assert "doubtful.json: the times of 'emulated' are known to 50 %" in result.err


def test_remeasure_measures_what_the_cache_holds_and_replaces_it(hetpipe, measured):
    left = measured(known_to(0.01), known_to(0.02, factor=2.0), known_to(0.03))
    for option, expected in (("", 0.01), ("", 0.01), ("--remeasure", 0.02), ("", 0.02)):
        assert hetpipe(f"profile {MEASURE} {option}").code == 0
        assert [entry.standard_error for entry in cached_profiles()] == [expected], option
    assert len(left) == 1
    for verb in ("plan --cluster cluster.toml", "profile"):
        refused = hetpipe(f"{verb} --remeasure --profile profile.json")
        assert refused.code == 2 and "--remeasure" in refused.err and refused.err.count("\n") == 1


def test_the_cache_is_listed_and_cleared(hetpipe, measured):
    assert "kept: 0 profiles, 0 B" in hetpipe("cache").out
    measured(known_to(0.012))
    assert hetpipe(f"profile {MEASURE}").code == 0
    listed = hetpipe("cache").out
    assert "bert-tiny" in listed and "1.2 %" in listed and "kept: 1 profile, " in listed
    (row,) = hetpipe("cache bert-tiny --json").json["profiles"]
    assert (row["model"], row["kinds"], row["standard_error"]) == ("bert-tiny", ["emulated"], 0.012)
    refused = hetpipe("cache gpt2-tiny")
    assert refused.code == 2 and "it holds bert-tiny" in refused.err
    assert "removed: 1 profile" in hetpipe("cache --clear bert-tiny").out
    assert cached_profiles() == ()


def test_a_file_of_the_cache_that_cannot_be_read_is_listed_and_cleared(hetpipe, tmp_path):
    folder = profiles_folder()
    folder.mkdir(parents=True)
    (folder / "old.json").write_text("{}")
    assert "cannot be read: old.json" in hetpipe("cache").out
    (folder / "stuck.json").mkdir()  # which is no file to remove
    cleared = hetpipe("cache --clear")
    assert cleared.code == 0 and [path.name for path in folder.iterdir()] == ["stuck.json"]
    assert "removed: 1 profile" in cleared.out and "skipped: stuck.json: it cannot be removed" in cleared.out
    (skipped,) = hetpipe("cache --clear --json").json["skipped"]
    assert skipped["path"] == str(folder / "stuck.json")


def test_where_the_cache_cannot_be_written_it_is_said_and_the_profile_taken(hetpipe, measured, monkeypatch):
    """As in a container whose home is read-only: a minute of measuring had ended with exit code 2."""
    (hetpipe.folder / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(hetpipe.folder / "file"))
    measured(known_to(0.012), known_to(0.012))
    result = hetpipe(f"plan --no-proof {MEASURE}")
    assert result.code == 0 and "strategy" in result.out
    place = hetpipe.folder / "file" / "hetpipe" / "profiles"
    said = f"warning: {place} cannot be written (Not a directory), so that what was measured is not kept"
    assert result.err.count(said) == 1
    with pytest.warns(UserWarning, match=r"profiles cannot be written \(Not a directory\)"):
        profiled(hetpipe.folder)
