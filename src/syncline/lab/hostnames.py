"""Names of the hosts inside a lab: the `/etc/hosts` that a command in the lab sees.

`ip netns exec` shows a command the files in `/etc/netns/NAMESPACE` in place of those in `/etc`. The machine's own name
leads to the lab's host there, since programs look up their own name to find their address.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
from pathlib import Path

from syncline.errors import LabError
from syncline.lab.plan import NAMESPACE_PREFIX, LabHost, LabPlan, lab_id_of

FOLDER = Path("/etc/netns")


def write_host_names(plan: LabPlan, folder: Path = FOLDER) -> None:
    """Write the names for every host of a lab."""
    own_name = socket.gethostname()
    try:
        for host in plan.hosts:
            place = folder / host.namespace
            place.mkdir(parents=True)
            (place / "hosts").write_text(_hosts_file(plan, host, own_name), encoding="utf-8")
    except OSError as error:
        raise LabError(
            f"the lab writes the names of its hosts to {folder}, but cannot ({error.strerror}); make it writable"
        ) from error


def remove_host_names(lab_id: str, folder: Path = FOLDER) -> None:
    """Remove what :func:`write_host_names` wrote."""
    for place in _places(folder):
        if lab_id_of(place.name) == lab_id:
            shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()  # where it is empty


def labs_with_host_names(folder: Path = FOLDER) -> set[str]:
    """Return the ids of the labs for which names are written."""
    return {lab_id_of(place.name) for place in _places(folder)}


def _places(folder: Path) -> tuple[Path, ...]:
    return tuple(folder.glob(f"{NAMESPACE_PREFIX}*"))


def _hosts_file(plan: LabPlan, own: LabHost, own_name: str) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in plan.hosts:
        names = [host.name, own_name] if host is own and own_name != host.name else [host.name]
        lines.append(f"{host.address} {' '.join(names)}")
        lines.append(f"::ffff:{host.address} {host.name}.lab")  # the form in which a listener on [::] sees its clients
    return "\n".join(lines) + "\n"
