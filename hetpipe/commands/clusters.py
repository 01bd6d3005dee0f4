"""clusters: what --cluster takes by name."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from cost_model.cluster import Cluster
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.known_clusters import known_clusters, source_of
from cost_model.strict_files import did_you_mean
from hetpipe.commands.options import JsonOption
from hetpipe.commands.output import print_json, write_output
from hetpipe.reporting.tables import new_table, show


def clusters_command(
    name: Annotated[str | None, typer.Argument(help="Print the file of this one.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write its file here, to be changed.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the clusters that --cluster takes by name, or print the file of one, to start from."""
    known = known_clusters()
    if name is not None and name not in known:
        raise InputError(f"no cluster is called {name!r}; {did_you_mean(name, known)}")
    if output is not None:
        _write(output, known, name)
    taken = {one: read_cluster(path) for one, path in known.items() if name in (None, one)}
    if json:
        rows = {one: {"source": source_of(known[one]), **taken[one].to_json()} for one in taken}
        print_json({"clusters": rows})
    elif output is not None:
        typer.echo(f"wrote {output}")
    elif name is not None:
        typer.echo(known[name].read_text(encoding="utf-8"), nl=False)
    else:
        table = new_table("cluster", "devices")
        for one, cluster in taken.items():
            table.add_row(one, _devices(cluster))
        show([table, "hetpipe clusters NAME prints its file, which says where it is from; -o writes it"])


def _write(output: Path, known: dict[str, Path], name: str | None) -> None:
    if name is None:
        raise InputError(f"-o {output} writes the file of one cluster; give its name, such as four-unequal")
    if output.exists() or output.is_symlink():
        raise InputError(f"{output}: exists already; give another name with -o")
    write_output(output, known[name].read_text(encoding="utf-8"))


def _devices(cluster: Cluster) -> str:
    counts = Counter(device.kind for device in cluster.devices)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
