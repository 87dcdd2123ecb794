"""`syncline cluster`: which machines would form a cluster, from which features, and why so many clusters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from syncline.cli.commands import new_app
from syncline.errors import ConfigurationError
from syncline.machines.clustering import Clustering, Inventory
from syncline.machines.features import Column, FeatureTable
from syncline.report.terminal import new_table
from syncline.topology import Topology
from syncline.units import format_duration, format_frequency, format_rate, format_size

app = new_app()
_MAX_FORMS = 3
_SPELLINGS: Mapping[str, Callable[[float], str]] = {
    "_hz": format_frequency,
    "_bytes_per_s": format_rate,
    "_bytes": format_size,
    "_s": format_duration,
}


@app.command()
def cluster(
    topology: Annotated[
        str | None, typer.Argument(metavar="TOPOLOGY", help="A topology file, or a shipped one's name.")
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(metavar="K", help="Number of clusters.", show_default="by silhouette")
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A feature that counts; repeat it.", show_default="the network's"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    here: Annotated[
        bool, typer.Option("--here", help="Print this machine's features, to be pasted into a topology file.")
    ] = False,
) -> None:
    """Print the features of the hosts, normalised, the clusters, the silhouette of each k, and why."""
    if here and topology is not None:
        raise ConfigurationError(f"--here is said of this machine, not of {topology!r}; give one of them")
    if here:
        _print_here(as_json=as_json)
        return
    if topology is None:
        raise ConfigurationError("no topology was given; name a file or a shipped topology, or say --here")
    loaded = Topology.load(topology)
    table, clustering = Inventory(topology=loaded, use=feature or ()).divide(num_clusters=clusters)
    if as_json:
        print(json.dumps(_record(loaded, table, clustering), indent=2))
    else:
        _print_tables(loaded, table, clustering)


def _print_here(*, as_json: bool) -> None:
    from syncline.machines.measurement import read_machine

    found = read_machine()
    pairs = ", ".join(f"{name}: {value:.6g}" for name, value in found.items())
    print(json.dumps({"features": found}, indent=2) if as_json else f"features: {{{pairs}}}")


def _record(topology: Topology, table: FeatureTable, clustering: Clustering) -> dict[str, object]:
    return {
        "topology": topology.name,
        "hosts": list(table.hosts),
        "columns": [
            {
                "label": column.label,
                "weight": column.weight,
                "values": [None if math.isnan(value) else value for value in column.values],
                "normalised": column.normalised.tolist(),
            }
            for column in table.columns
        ],
        "clusters": [[table.hosts[host] for host in hosts] for hosts in clustering.clusters],
        "ranks": [_ranks(topology, table, hosts) for hosts in clustering.clusters],
        "silhouettes": {str(k): score for k, score in clustering.silhouettes.items()},
        "reason": clustering.reason,
    }


def _ranks(topology: Topology, table: FeatureTable, hosts: tuple[int, ...]) -> list[int]:
    return sorted(rank for host in hosts for rank in topology.ranks_of(table.hosts[host]))


def _print_tables(topology: Topology, table: FeatureTable, clustering: Clustering) -> None:
    console = Console(soft_wrap=True)
    console.print(_feature_table(topology, table, clustering))
    scores = new_table("k", "mean silhouette", num_texts=0, title="silhouette")
    for k, score in clustering.silhouettes.items():
        scores.add_row(str(k), f"{score:.3f}")
    if clustering.silhouettes:
        console.print(scores)
    console.print(f"{clustering.reason}.", highlight=False)
    for number, hosts in enumerate(clustering.clusters):
        names = ", ".join(table.hosts[host] for host in hosts)
        ranks = ", ".join(map(str, _ranks(topology, table, hosts)))
        console.print(f"cluster {number}: hosts {names} (ranks {ranks})", highlight=False)


def _feature_table(topology: Topology, table: FeatureTable, clustering: Clustering) -> Table:
    shown = Table(
        title=f"{topology.name}: features, and below each its normal form (x - mean) / (max - min)",
        title_justify="left",
    )
    shown.add_column("host", overflow="fold")
    shown.add_column("cluster", justify="right", no_wrap=True)
    groups: dict[str, list[Column]] = {}
    for column in table.columns:
        groups.setdefault(column.feature, []).append(column)
    for feature, columns in groups.items():
        shown.add_column("\n".join([feature, *_names(columns)]), justify="right", overflow="fold")
    for host, name in enumerate(table.hosts):
        cells = [_cell(columns, host) for columns in groups.values()]
        shown.add_row(name, str(clustering.labels[host]), *cells)
    return shown


def _names(columns: list[Column]) -> list[str]:
    """Say what the normal forms of a feature with several columns stand for, in their order."""
    if columns[0].text is None and len(columns) == 1:
        return []
    names = [column.label.removeprefix(f"{column.feature} ").removeprefix("latency to ") for column in columns]
    more = " ..." if len(names) > _MAX_FORMS else ""
    return [("" if columns[0].text is not None else "to ") + " ".join(names[:_MAX_FORMS]) + more]


def _cell(columns: list[Column], host: int) -> str:
    """Show the value of a feature, and its normal form: one number for each column that it has."""
    values = [column.values[host] for column in columns]
    forms = [f"{column.normalised[host]:+.2f}" for column in columns[:_MAX_FORMS]]
    more = " ..." if len(columns) > _MAX_FORMS else ""
    if columns[0].text is not None:
        shown = next((column.text or "" for column in columns if column.values[host] == 1), "?")
    elif len(columns) > 1:
        shown = f"mean {_quantity(columns[0].feature, sum(values) / len(values))}"
    else:
        shown = "?" if math.isnan(values[0]) else _quantity(columns[0].feature, values[0])
    return f"{shown}\n{' '.join(forms)}{more}"


def _quantity(feature: str, value: float) -> str:
    """Spell a value in the unit that the feature's name ends with."""
    spell = next((spell for ending, spell in _SPELLINGS.items() if feature.endswith(ending)), None)
    return f"{value:.4g}" if spell is None else spell(value)
