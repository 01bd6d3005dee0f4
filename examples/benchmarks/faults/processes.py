"""The processes of a run that is under test: its launcher, the server that forks its ranks, the ranks."""

from pathlib import Path


def parents() -> dict[int, int]:
    """Return the parent of each process of this host that lives."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text(errors="replace").rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if state != "Z":
            found[int(name.split()[0])] = int(parent)
    return found


def ranks_of(launcher: int) -> list[int]:
    """Return the processes of the ranks that a launcher has started, and that are trained in."""
    of = parents()
    servers = {pid for pid, parent in of.items() if parent == launcher}
    return sorted(pid for pid, parent in of.items() if parent in servers)


def running_in_session(session: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for pid in parents():
        try:
            rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(rest[3]) == session:
            found.append(pid)
    return found
