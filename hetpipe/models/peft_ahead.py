"""To import this loads peft for all that a server forks, unless CUDA would start there."""

from contextlib import suppress

from cost_model.errors import InputError
from hetpipe.models.adapters import loaded_peft, peft_starts_cuda

if not peft_starts_cuda():
    with suppress(InputError):  # each rank says so
        loaded_peft()
