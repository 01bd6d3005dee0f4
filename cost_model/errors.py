"""The ways in which a request can fail that are not bugs."""


class InputError(ValueError):
    """Bad input: the message gives value, reason and remedy in one line; the command line exits with 2."""


class InfeasibleError(ValueError):
    """No plan of the space asked for fits: the command line exits with 3.

    device: the device that lacks memory, None where no single one is to blame.
    missing_bytes: how much more it needs, 0 where memory is not the reason.
    """

    def __init__(self, message: str, *, device: str | None = None, missing_bytes: float = 0.0) -> None:
        super().__init__(message)
        self.device = device
        self.missing_bytes = missing_bytes


class CheckFailedError(ValueError):
    """A split model does not compute what the whole one does: the command line exits with 4."""


class DivergedError(CheckFailedError):
    """Training diverged, so that more steps would change nothing: the command line exits with 4."""
