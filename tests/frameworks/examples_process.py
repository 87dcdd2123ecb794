"""One rank that runs examples one after the other, each with a store of its own that the test serves."""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from pathlib import Path

# DDP's functions take the group that is there when they are first imported as their default; here there is none yet.
import torch.distributed.nn

import syncline

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"


def main(folder: str, ports: str, *names: str) -> None:
    """Run each example, named with its arguments after colons, until one fails."""
    sys.path.insert(0, str(EXAMPLES))
    for port, name in zip(ports.split(","), names, strict=True):
        os.environ["MASTER_PORT"] = port
        script, *arguments = name.format(folder=folder).split(":")
        sys.argv = [script, *arguments]
        began_s = time.monotonic()
        try:
            runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
        except Exception:
            traceback.print_exc()
            sys.exit(f"{name} failed")
        assert not torch.distributed.is_initialized() or script.startswith("lightning")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if script == "accelerate_train":  # it keeps what it has chosen for the life of a process
            sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
        print(f"{name} took {time.monotonic() - began_s:.1f} s", flush=True)


if __name__ == "__main__":
    assert syncline.__version__
    main(*sys.argv[1:])
