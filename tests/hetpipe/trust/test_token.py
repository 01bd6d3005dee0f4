import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cost_model.errors import InputError
from hetpipe.trust.token import TOKEN_VARIABLE, run_token, token_for


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_and_the_environment_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "a" * 32)
    assert run_token(None) == run_token(written(tmp_path, "a" * 32 + "\n")) == b"a" * 32


@pytest.mark.parametrize(
    "text, mode, told",
    [
        ("a" * 32, 0o644, "chmod 600"),
        ("short", 0o600, "16 at least"),
        ("two words of sixteen", 0o600, "without a space"),
        ("a" * 5000, 0o600, "larger than"),
    ],
)
def test_a_bad_token_is_refused(tmp_path: Path, text: str, mode: int, told: str):
    with pytest.raises(InputError, match=told):
        run_token(written(tmp_path, text, mode))


def test_no_token_says_how_to_make_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(InputError, match="umask 077"):
        run_token(None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hetpipe"


def test_processes_of_one_user_agree_on_a_token_for_each_purpose(cache: Path, tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: token_for("a", "b"), range(8)))
    assert len(found) == 1 and len(found.pop()) == 32
    assert [path.name for path in cache.iterdir()] == ["secret"]
    assert stat.S_IMODE((cache / "secret").stat().st_mode) == 0o600
    assert len({token_for("a", "b"), token_for("ab"), token_for("a", "c")}) == 3


def test_the_token_of_the_environment_goes_before_the_kept_one(cache: Path, monkeypatch: pytest.MonkeyPatch):
    kept = token_for("a")
    monkeypatch.setenv(TOKEN_VARIABLE, "e" * 32)
    assert token_for("a") not in (kept, b"e" * 32)


def test_a_kept_secret_that_others_may_read_is_refused(cache: Path):
    token_for("a")
    (cache / "secret").chmod(0o640)
    with pytest.raises(InputError, match="chmod 600"):
        token_for("a")


def test_where_no_secret_can_be_kept_a_token_is_asked_for(cache: Path):
    cache.write_text("no folder")
    with pytest.raises(InputError, match=f"cannot be made.*set {TOKEN_VARIABLE}"):
        token_for("a")
