"""What the events of a run are answered: whether training goes on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetpipe.runs.settings import Settings
from hetpipe.runtime.processes import Emit
from hetpipe.runtime.stopping import Stopping
from hetpipe.training.adaptation import Adaptation
from hetpipe.training.other_hosts import OtherHosts
from hetpipe.training.recovery import Recovery


@dataclass(slots=True)
class Answered:
    """Answers the events of a run, for its caller and for signals.

    complete: whether the last step is over, so that no signal has cut the run short. ended: whether held-out
    figures end training with the step at hand. diverged: what told of it, None if the run did not diverge.
    failed: what the caller raised, after which training ends as if it had answered True, so that a checkpoint
    under way is kept. joining: whether the attempt ends since a host is back.
    """

    on_event: Emit
    tell: Callable[[str], object]
    stopping: Stopping
    settings: Settings
    recovery: Recovery
    adaptation: Adaptation
    hosts: OtherHosts | None = None
    complete: bool = False
    ended: bool = False
    diverged: dict[str, Any] | None = None
    failed: BaseException | None = None
    joining: bool = False

    @property
    def over(self) -> bool:
        """Whether there is nothing to go on with."""
        return self.complete or self.ended or self.diverged is not None or self.failed is not None

    def __call__(self, event: dict[str, Any]) -> bool:
        """Tell the caller; return whether training is to end."""
        self.recovery.saw(event)
        if event["event"] == "told":
            self.tell(event["text"])
            self.ended |= "ends" in event
            return self.stopping.asked
        if event["event"] == "diverged":
            self.diverged = event
        adapts = self.adaptation.saw(
            event, self.recovery.prediction.plan, self.recovery.lost, self.recovery.room_bytes
        )
        answer = self._answer(event)
        self.joining = not answer and (self.joining or self._lets_in(event))
        if answer:
            self.adaptation.pending = None  # the caller ends the run
        if event["event"] == "step":
            self.stopping.begun, self.ended = True, False
            self.complete |= event["step"] >= self.settings.steps
        return answer or adapts or self.joining or self.stopping.asked

    def end(self) -> None:
        """Raise what the caller has raised, if it has."""
        if self.failed is not None:
            raise self.failed

    def takes_joining(self) -> bool:
        """Return whether the attempt ended since a host is back; once."""
        joining, self.joining = self.joining, False
        return joining

    def _answer(self, event: dict[str, Any]) -> bool:
        """Return what the caller answers: True from when on it has raised.

        Raises: what it does, where there is nothing to keep, or a signal does not wait.
        """
        if self.failed is not None:
            return True
        try:
            return self.on_event(event) is True
        except BaseException as error:
            if not self.stopping.begun or self.stopping.at_once:
                raise
            self.failed = error
            return True

    def _lets_in(self, event: Mapping[str, Any]) -> bool:
        """Return whether a host that is back joins now: at a checkpoint, any step where there are none."""
        at = "checkpoint" if self.settings.every or self.settings.every_s else "step"
        return self.hosts is not None and event["event"] == at and bool(self.hosts.waiting())
