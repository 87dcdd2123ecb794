"""Lets the scenarios find the worlds of other rooms' tests, which they play on virtual time."""

import sys
from pathlib import Path

for _room in ("runtime", "updates/clustered", "updates/overlapped"):
    sys.path.append(str(Path(__file__).parents[1] / _room))
