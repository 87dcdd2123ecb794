"""Stores through which ranks meet: within a process, and between processes of one machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class DictStore:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)


class ProxyStore(DictStore):
    """A store that sends everyone who looks for rank 0 to the proxy."""

    def __init__(self, proxy: Any, port: int) -> None:
        super().__init__()
        self.proxy, self.port = proxy, port

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("hello/0"):
            hello = json.loads(value)
            self.proxy.target, hello["port"] = hello["port"], self.port
            value = json.dumps(hello).encode()
        super().set(key, value)


class DirectoryStore:
    """A store that processes share: a file for each key, which appears whole or not at all."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def set(self, key: str, value: bytes) -> None:
        target = self.path / key.replace("/", "%")
        temporary = target.with_name(f"{target.name}.{os.getpid()}")
        temporary.write_bytes(value)
        temporary.rename(target)

    def get(self, key: str) -> bytes | None:
        try:
            return (self.path / key.replace("/", "%")).read_bytes()
        except FileNotFoundError:
            return None
