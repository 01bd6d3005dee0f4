"""How an error on one host becomes the same error, and the same exit code, on all."""

import time
from typing import Any

from cost_model.errors import CheckFailedError, DivergedError, InfeasibleError, InputError
from hetpipe.runtime.processes import NOTICED_AFTER_S, WorkerLostError

_KNOWN: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (InputError, InfeasibleError, CheckFailedError, DivergedError)
}

NO_RANK = -1
"""The rank of an error that is of none: of a launcher."""
_OF_RANKS = ("", "InputError", "InfeasibleError")  # `run_ranks` raises them as they are


def verdict_of(error: BaseException) -> dict[str, Any]:
    """Return an error as others are told of it: its type, text, and the code of a process that ends."""
    if isinstance(error, SystemExit):
        return {"type": "SystemExit", "text": "", "code": error.code if isinstance(error.code, int) else 1}
    if isinstance(error, KeyboardInterrupt):
        return {"type": "KeyboardInterrupt", "text": "interrupted"}
    name = next((name for name, kind in _KNOWN.items() if type(error) is kind), "")
    text = str(error) or type(error).__name__
    is_ours = bool(name) or isinstance(error, WorkerLostError)
    report = getattr(error, "report", {})
    return {
        "type": name,
        "text": text if is_ours else f"{type(error).__name__}: {text}",
        "rank": report.get("rank", NO_RANK),
        "cause": report.get("type", name),
        "full": report.get("full", False),
        "silent_s": report.get("silent_s"),
    }


def error_of(verdict: dict[str, Any]) -> BaseException:
    """Return the error of a verdict, to be raised."""
    name = verdict["type"]
    if name == "SystemExit":
        return SystemExit(int(verdict["code"]))
    if name == "KeyboardInterrupt":
        return KeyboardInterrupt()
    return _KNOWN.get(name, WorkerLostError)(str(verdict["text"]))


def placed(verdict: dict[str, Any], node: str) -> dict[str, Any]:
    """Return a verdict of another host that says where it is from, if it may be true there alone."""
    is_refusal = verdict["type"] in _KNOWN and verdict["type"] != DivergedError.__name__
    return {**verdict, "text": f"on {node}: {verdict['text']}"} if is_refusal else verdict


def alarm_of(verdict: dict[str, Any], age_s: float = NOTICED_AFTER_S) -> dict[str, Any]:
    """Return the event that ends the ranks of this host (`run_ranks`), of a verdict from another.

    age_s: how long ago it was.
    """
    return {
        "event": "error",
        "rank": verdict.get("rank", NO_RANK),
        "type": verdict.get("cause", ""),
        "text": verdict["text"],
        "when_s": time.monotonic() - age_s,
        "full": verdict.get("full", False),
        "silent_s": verdict.get("silent_s"),
        "told": True,
        "node": verdict.get("node"),
        "verdict": verdict,
    }


def error_in(alarm: dict[str, Any]) -> BaseException:
    """Return the error of an alarm, to be raised, with its event as `run_ranks` leaves it."""
    error = error_of(alarm["verdict"])
    if isinstance(error, WorkerLostError):
        error.report = alarm  # type: ignore[attr-defined]
    return error


def found_in(error: BaseException) -> BaseException:
    """Return what is to be raised for an error of `run_ranks`: that of another host, if it came from one."""
    verdict = getattr(error, "report", {}).get("verdict")
    if verdict is None or verdict["type"] in _OF_RANKS:
        return error
    found = error_of(verdict)
    found.report = error.report  # type: ignore[attr-defined]
    return found
