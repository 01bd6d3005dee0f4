from pathlib import Path

import pytest

from cost_model.errors import InputError
from hetpipe.trust.token import TOKEN_VARIABLE, run_token


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
