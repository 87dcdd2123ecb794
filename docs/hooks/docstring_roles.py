"""Shows names that docstrings mark as ``:class:`X``` as plain code, which is all that Markdown can make of them."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`~?(?P<name>[^`]+)`")


class PlainRoles(griffe.Extension):
    """Rewrites each docstring when its object has been read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Take the roles out of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(lambda match: f"`{match['name'].lstrip('.')}`", obj.docstring.value)
