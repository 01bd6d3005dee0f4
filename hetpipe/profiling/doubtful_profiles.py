"""Profiles whose times are known too badly to plan by them."""

from collections.abc import Mapping

from cost_model.profile import ModelProfile

DOUBTFUL = 0.10
"""Relative standard error of a median above which a profile is measured again, told of and not kept."""


def doubtful_kinds(profile: ModelProfile) -> Mapping[str, float]:
    """Return the kinds whose worst standard error is above `DOUBTFUL`, with that error."""
    errors = {kind: times.standard_error for kind, times in profile.kinds.items()}
    return {kind: error for kind, error in errors.items() if error is not None and error > DOUBTFUL}


def more_precise(first: ModelProfile, second: ModelProfile) -> ModelProfile:
    """Return the one of two profiles whose worst standard error is smaller."""
    return min(first, second, key=_worst)


def _worst(profile: ModelProfile) -> float:
    return max((times.standard_error or 0.0 for times in profile.kinds.values()), default=0.0)


def doubt_sentences(profile: ModelProfile) -> list[str]:
    """Say which times are known badly, and where it is worst; [] if none are."""
    sentences = []
    for kind, error in doubtful_kinds(profile).items():
        where = profile.kinds[kind].standard_error_of
        place = "" if where is None else f" ({where})"
        sentences.append(
            f"the times of {kind!r} are known to {100 * error:.0f} % only{place}, so plan and prediction "
            "may be far off"
        )
    return sentences
