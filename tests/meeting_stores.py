"""Stores through which ranks meet: within a process, and between processes of one machine."""

from __future__ import annotations

import os
from pathlib import Path


class DictStore:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str, timeout_s: float) -> bytes:
        try:
            return self.values[key]
        except KeyError:
            raise TimeoutError from None


class DirectoryStore:
    """A store that processes share: a file for each key, which appears whole or not at all."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def set(self, key: str, value: bytes) -> None:
        target = self.path / key.replace("/", "%")
        temporary = target.with_name(f"{target.name}.{os.getpid()}")
        temporary.write_bytes(value)
        temporary.rename(target)

    def get(self, key: str, timeout_s: float) -> bytes:
        try:
            return (self.path / key.replace("/", "%")).read_bytes()
        except FileNotFoundError:
            raise TimeoutError from None
