"""What was found is kept for the next start of a job on the same hosts: a topology file of the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from syncline.errors import TopologyError
from syncline.topology import Host, Topology
from syncline.topology.tree import changed


def discovery_folder(variables: Mapping[str, str]) -> Path | None:
    """Return where topologies are kept, ``$XDG_CACHE_HOME/syncline/networks``; None where there is no such folder."""
    base = variables.get("XDG_CACHE_HOME") or (f"{home}/.cache" if (home := variables.get("HOME")) else "")
    return Path(base) / "syncline" / "networks" if base else None


def kept_file(folder: Path, flat: Topology) -> Path:
    """Return the file of the network of ``flat``'s hosts."""
    names = "\n".join(sorted(host.name for host in flat.hosts))
    return folder / f"{len(flat.hosts)}-hosts-{hashlib.sha256(names.encode()).hexdigest()[:12]}.yaml"


def keep(folder: Path, topology: Topology) -> Path | None:
    """Write the topology where :func:`recall` finds it; None if it cannot be written, which is no fault of the job."""
    path = kept_file(folder, topology)
    with contextlib.suppress(OSError, ValueError):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(topology.to_yaml())
        unfinished.replace(path)
        return path
    return None


def forget(folder: Path | None, flat: Topology) -> None:
    """Let the next job on the hosts of ``flat`` measure anew."""
    if folder is not None:
        with contextlib.suppress(OSError):
            kept_file(folder, flat).unlink()


def recall(folder: Path, flat: Topology) -> Topology | None:
    """Return what was found earlier between the hosts of ``flat``, with the ranks that they have in this job."""
    path = kept_file(folder, flat)
    try:
        known = Topology.parse(path.read_text(), source=str(path))
    except (OSError, UnicodeDecodeError, TopologyError):
        return None
    hosts = {host.name: host for host in flat.hosts}
    if {host.name for host in known.hosts} != set(hosts):
        return None
    root = changed(
        known.root, lambda node: replace(hosts[node.name], link=node.link) if isinstance(node, Host) else node
    )
    return Topology(name=known.name, root=root, source=str(path))
