"""What is checked and said of a profile before anything is planned by it."""

from collections.abc import Mapping

from cost_model.dtypes import dtypes_of
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.commands.options import ProfileOptions
from hetpipe.commands.output import warn


def warn_of_doubts(profile: ModelProfile, source: str | None = None) -> None:
    """Warn of times that are known too badly to plan by.

    source: the file that they are from; None where they were measured now, and are not kept.
    """
    from hetpipe.profiling.doubtful_profiles import doubt_sentences

    remedy = "was something else running? They are not kept: the next call measures anew"
    for sentence in doubt_sentences(profile):
        warn(f"{sentence}; {remedy}" if source is None else f"{source}: {sentence}; profile again")


def check_profile(profile: ModelProfile, options: ProfileOptions, name: str | None) -> None:
    """Check the profile of a file.

    Raises: InputError if it is of another model or dtype than asked for, or is to be measured anew.
    """
    if options.remeasure:
        raise InputError(
            f"--remeasure measures anew, and --profile {options.profile_file} takes what was measured; leave "
            "one of them out"
        )
    if name is not None and profile.model != name:
        raise InputError(
            f"{options.profile_file}: a profile of {profile.model!r}, not of --model {name!r}; give the "
            "profile of that model, or leave one of the two out"
        )
    if options.loss_chunks not in (None, profile.loss_chunks):
        raise InputError(
            f"{options.profile_file}: a profile with {profile.loss_chunks or 'no'} chunks of the loss, and "
            f"--loss-chunks is {options.loss_chunks}; profile again with it, or leave the option out"
        )
    if options.compiled and not profile.compiled:
        raise InputError(
            f"{options.profile_file}: a profile of blocks that were not compiled, and --compile is given; "
            "profile again with it, or leave the option out"
        )
    if options.dtype is not None:
        check_dtypes(
            profile, options.dtype, dtypes_of(options.dtype, profile.kinds), str(options.profile_file)
        )


def check_dtypes(profile: ModelProfile, text: str, wanted: Mapping[str, str], source: str) -> None:
    """Check that the kinds of a profile are in the precisions that a --dtype gives.

    Raises: InputError naming one that is not.
    """
    for kind, found in profile.dtypes.items():
        if wanted[kind] != found:
            several = {*profile.dtypes.values()}, {*wanted.values()}
            where = f" on {kind}" if any(len(each) > 1 for each in several) else ""
            raise InputError(
                f"{source}: a profile in {found}{where}, and --dtype is {text}; profile again with --dtype "
                f"{text}, or leave the option out"
            )
