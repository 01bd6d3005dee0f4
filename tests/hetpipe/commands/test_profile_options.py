"""What a profile was measured with, asked for beside it: --compile and --loss-chunks."""

import pytest

from cost_model.profile import read_profile
from hetpipe.profiling.merging import merge


@pytest.mark.parametrize(
    ("option", "was"),
    [
        ("--compile", "of blocks that were not compiled, and --compile is given"),
        ("--loss-chunks 4", "with no chunks of the loss, and --loss-chunks is 4"),
    ],
)
def test_what_a_profile_was_not_measured_with_is_refused_in_one_line(hetpipe, option, was):
    refused = hetpipe(f"plan --cluster cluster.toml --profile profile.json {option}")
    assert refused.code == 2 and refused.err == (
        f"error: profile.json: a profile {was}; profile again with it, or leave the option out\n"
    )


@pytest.mark.parametrize(("key", "text"), [("compiled", "true"), ("loss_chunks", "4")])
def test_it_is_kept_in_the_file_and_profiles_of_both_are_not_joined(hetpipe, key, text):
    plain = hetpipe.folder / "profile.json"
    hetpipe.write("other.json", plain.read_text().replace("{", f'{{"{key}": {text}, ', 1))
    other = read_profile(hetpipe.folder / "other.json")
    assert other.to_json()[key] == getattr(other, key) != getattr(read_profile(plain), key)
    refused = hetpipe("profile --merge profile.json other.json -o joined.json")
    assert refused.code == 2 and f"profiles of {key}" in refused.err and refused.err.count("\n") == 1
    assert merge([other, other]) == other
