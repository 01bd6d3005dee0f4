"""The events of a step with their times: the common result of the simulator and the executor."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetpipe.program.instructions import (
    Broadcast,
    Compute,
    Exchange,
    Gather,
    Instruction,
    Norm,
    Pass,
    Reduce,
    Step,
    Sync,
    Transfer,
)
from hetpipe.program.program_text import parse_instruction


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction on one rank; seconds since the first event of the step."""

    rank: int
    instruction: Instruction
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def to_json(self) -> list[Any]:
        return [self.rank, str(self.instruction), self.start_s, self.end_s]


def events_of_json(rows: Iterable[Sequence[Any]]) -> tuple["Event", ...]:
    """Return events from what `Event.to_json` gives; an instruction that comes again is read once."""
    known: dict[str, Instruction] = {}
    events = []
    for rank, text, start_s, end_s in rows:
        if text not in known:
            known[text] = parse_instruction(text)
        events.append(Event(rank, known[text], start_s, end_s))
    return tuple(events)


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of one step on all ranks, in order of rank and start.

    Computations and STEP occupy the device; a transfer or broadcast lasts from its start to its arrival.
    """

    device_names: tuple[str, ...]
    events: tuple[Event, ...]
    _busy_s: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        busy = [0.0] * len(self.device_names)
        for event in self.events:
            if isinstance(event.instruction, Compute | Step):
                busy[event.rank] += event.duration_s
        object.__setattr__(self, "_busy_s", tuple(busy))

    def to_json(self) -> dict[str, Any]:
        return {"devices": self.device_names, "events": [event.to_json() for event in self.events]}

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> "Trace":
        """Return the trace that `to_json` was made of."""
        return cls(tuple(data["devices"]), events_of_json(data["events"]))

    @property
    def makespan_s(self) -> float:
        """Return the seconds from the first start to the end of the last STEP and of its broadcasts."""
        starts = [event.start_s for event in self.events]
        ends = [event.end_s for event in self.events if isinstance(event.instruction, Step | Broadcast)]
        return max(ends) - min(starts)

    def busy_s(self, rank: int) -> float:
        return self._busy_s[rank]

    @property
    def bubble(self) -> float:
        """Return the idle share of the makespan over all devices, in [0, 1]."""
        return self.bubble_of(self.makespan_s)

    def bubble_of(self, step_s: float) -> float:
        """Return the idle share of a step that took step_s by another clock than the events'."""
        return 1 - sum(self._busy_s) / (len(self.device_names) * step_s) if step_s else 0.0

    def stage_busy_s(self) -> dict[tuple[int, int], float]:
        """Return the seconds of forwards and backwards by (pipeline, stage)."""
        busy: dict[tuple[int, int], float] = {}
        for event in self.events:
            if isinstance(event.instruction, Compute):
                key = (event.instruction.pipeline, event.instruction.stage)
                busy[key] = busy.get(key, 0.0) + event.duration_s
        return dict(sorted(busy.items()))


_CATEGORY = {
    Compute: "compute",
    Transfer: "transfer",
    Sync: "sync",
    Norm: "norm",
    Step: "optimizer",
    Broadcast: "broadcast",
    Reduce: "reduce",
    Gather: "gather",
}
_COLOURS = {Pass.FORWARD: "thread_state_running", Pass.BACKWARD: "rail_response"}


def chrome_trace(
    processes: Sequence[tuple[str, Trace]], clocks: Sequence[tuple[float, float, float]] = ()
) -> str:
    """Return Chrome trace events as JSON, a process per named trace, for Perfetto and chrome://tracing.

    clocks: of each rank that was measured, the seconds by which its clock was behind the common one, by which
    these grew a second, and by which they may be wrong.
    """
    events = [event for pid, (name, trace) in enumerate(processes) for event in _process(pid, name, trace)]
    names = ("offset_s", "drift", "error_s")
    other = {"clocks": [dict(zip(names, clock, strict=True)) for clock in clocks]}
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, separators=(",", ":")
    )


def _process(pid: int, name: str, trace: Trace) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    for rank, device in enumerate(trace.device_names):
        for lane, suffix in enumerate(("", " messages")):
            yield {
                "ph": "M",
                "pid": pid,
                "tid": 2 * rank + lane,
                "name": "thread_name",
                "args": {"name": device + suffix},
            }
    for event in trace.events:
        instruction = event.instruction
        messages = isinstance(instruction, Transfer | Exchange) and not isinstance(instruction, Norm)
        row: dict[str, Any] = {
            "ph": "X",
            "pid": pid,
            "tid": 2 * event.rank + int(messages),
            "name": str(instruction),
            "cat": _CATEGORY[type(instruction)],
            "ts": round(event.start_s * 1e6, 3),
            "dur": round(event.duration_s * 1e6, 3),
        }
        if isinstance(instruction, Compute):
            row["cname"] = _COLOURS[instruction.op]
        if isinstance(instruction, Compute | Transfer):
            row["args"] = {
                "pass": "forward" if instruction.op is Pass.FORWARD else "backward",
                "pipeline": instruction.pipeline,
                "stage": instruction.stage,
                "microbatch": instruction.microbatch,
            }
            if isinstance(instruction, Compute) and instruction.layer is not None:
                row["args"]["layer"] = instruction.layer
        if messages:  # they may overlap: asynchronous pairs, not nested slices
            begin = {**row, "ph": "b", "id": f"{pid}.{event.rank}.{instruction}"}
            del begin["dur"]
            yield begin
            yield {**begin, "ph": "e", "ts": round(event.end_s * 1e6, 3)}
        else:
            yield row
    yield from _arrows(pid, trace)


def _arrows(pid: int, trace: Trace) -> Iterable[dict[str, Any]]:
    """Draw an arrow from each computation to the one of the next stage that takes what it made."""
    slices = {event.instruction: event for event in trace.events if isinstance(event.instruction, Compute)}
    for giver, sent in slices.items():
        step = 1 if giver.op is Pass.FORWARD else -1
        taker = slices.get(replace(giver, stage=giver.stage + step))
        if taker is None or taker.rank == sent.rank:
            continue
        row = {"pid": pid, "name": "message", "cat": "message", "id": f"{pid}.{giver}"}
        # an arrow leaves within its slice, and ends at the slice that begins there
        left_s = sent.start_s + sent.duration_s / 2
        yield {**row, "ph": "s", "tid": 2 * sent.rank, "ts": round(left_s * 1e6, 3)}
        yield {**row, "ph": "f", "bp": "e", "tid": 2 * taker.rank, "ts": round(taker.start_s * 1e6, 3)}
