"""The planner's seconds over the number of devices, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shares import DP, LP, MILP, PARTS, REST, SIMULATOR

from hetpipe.reporting.colours import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY
from hetpipe.reporting.plots.style import new_axes, save, strip

LOOKS = {
    LP: (BLUE, "o", "master LP"),
    DP: (ORANGE, "s", "pricing DP"),
    MILP: (GREEN, "^", "rounding (MILP)"),
    SIMULATOR: (PURPLE, "D", "simulator"),
    REST: (SKY, "v", "rest"),
}
"""Colour, marker and words of each part: told apart without colours too."""


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> tuple[Path, Path]:
    """Lines of the whole plan and of its parts, both axes logarithmic; gives the PNG and the SVG."""
    ax = new_axes(7.0, 4.0)
    devices = [row["devices"] for row in rows]
    ax.plot(
        devices, [row["plan_s"] for row in rows], color=BLACK, linewidth=2, marker=".", label="whole plan"
    )
    for part in PARTS:
        colour, marker, label = LOOKS[part]
        seconds = [row["shares"][part] for row in rows]
        ax.plot(devices, seconds, color=colour, marker=marker, markersize=4, linewidth=1, label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(devices, [f"{count:,}" for count in devices])
    ax.minorticks_off()
    ax.set_xlabel("devices")
    ax.set_ylabel("seconds")
    ax.grid(axis="y", linewidth=0.4, alpha=0.5)
    strip(ax)
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure = ax.figure
    return save(figure, path)  # type: ignore[arg-type]
