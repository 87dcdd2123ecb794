"""The topologies that come with Syncline, each a YAML file here, and found by its name without a path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from syncline.errors import TopologyError

_SUFFIX = ".yaml"


def shipped_names() -> tuple[str, ...]:
    """Return the names of the shipped topologies, sorted."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX)))


def find_topology_text(path: str | Path) -> tuple[str, str]:
    """Return the text of a topology and its source; a file of that name goes before a shipped topology."""
    file = Path(path)
    try:
        if not file.is_file() and str(path) in shipped_names():
            name = f"{path}{_SUFFIX}"
            return resources.files(__name__).joinpath(name).read_text(encoding="utf-8"), name
        return file.read_text(encoding="utf-8"), str(path)
    except OSError as error:
        names = ", ".join(shipped_names())
        raise TopologyError(
            f"Topology {str(path)!r} cannot be read ({error.strerror}); give a file, or one of the shipped topologies: "
            f"{names}"
        ) from error
    except UnicodeDecodeError as error:
        raise TopologyError(f"Topology {str(path)!r} is not UTF-8 text; save it as UTF-8") from error
