"""The profiles that the cache holds, for people to look at and to remove."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_model.errors import InputError
from cost_model.profile import ModelProfile, read_profile
from hetpipe.runs.cache import profiles_folder


@dataclass(frozen=True, slots=True)
class CachedProfile:
    """A file of the cache; profile: None where it cannot be read, as after an update."""

    path: Path
    profile: ModelProfile | None
    num_bytes: int
    age_s: float

    @property
    def standard_error(self) -> float | None:
        """Return the worst relative standard error of its kinds; None where it is not known."""
        if self.profile is None:
            return None
        errors = [times.standard_error for times in self.profile.kinds.values()]
        return max((error for error in errors if error is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        profile = self.profile
        return {
            "path": str(self.path),
            "model": profile and profile.model,
            "dtype": profile and profile.dtype,
            "sequence_length": profile and profile.sequence_length,
            "kinds": profile and list(profile.kinds),
            "standard_error": self.standard_error,
            "age_s": self.age_s,
            "num_bytes": self.num_bytes,
        }


def cached_profiles(model: str | None = None) -> tuple[CachedProfile, ...]:
    """Return the profiles of the cache, the newest first; of one model, if one is named."""
    found = []
    for path in sorted(profiles_folder().glob("*.json")):
        try:
            facts = path.stat()
        except FileNotFoundError:  # another process has just removed it
            continue
        try:
            profile = read_profile(path)
        except InputError:
            profile = None
        if model is None or (profile is not None and profile.model == model):
            found.append(CachedProfile(path, profile, facts.st_size, max(0.0, time.time() - facts.st_mtime)))
    return tuple(sorted(found, key=lambda entry: entry.age_s))
