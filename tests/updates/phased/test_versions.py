"""Versions: which step all ranks have, and whether what is stored is what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from syncline.errors import StorageError, UpdateError
from syncline.updates.phased.storage import Folder
from syncline.updates.phased.versions import Manifest, checksum, common_steps, read_manifests, store_first


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_common_steps() -> None:
    assert common_steps([(4, 5), (5, 6), (5,)]) == [5]
    assert common_steps([(1, 2), (2, 1)]) == [2, 1]
    assert common_steps([(), ()]) == common_steps([(), (0,)]) == []
    with pytest.raises(UpdateError, match="rank 0 has step 3; rank 1 has none: start each rank where its folder is"):
        common_steps([(3,), ()])


def test_a_manifest_is_whole_or_none(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    generator = torch.arange(16, dtype=torch.uint8)
    manifest = Manifest(step=4, description="a job", files={}, generator=generator)
    manifest.write(folder)
    (found,) = read_manifests(folder).values()
    assert (found.step, found.description, found.files) == (4, "a job", {})
    assert torch.equal(found.generator, generator)
    path = tmp_path / "versions.0.safetensors"
    flip_last_bit(path)
    assert read_manifests(folder) == {}
    text = '{"format": 99}'
    folder.write(
        "versions.1",
        {"generator": generator},
        {"manifest": text, "check": str(checksum({"generator": generator}, {"manifest": text}))},
    )
    with pytest.raises(StorageError, match="have format 99, and this Syncline reads 1"):
        read_manifests(folder)


def test_each_thing_that_a_manifest_names_is_checked(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    stored = {name: {"weight": torch.arange(3.0)} for name in ("first", "second")}
    files = store_first(folder, stored)
    assert [file for file, _ in files.values()] == ["first.0", "second.0"]
    manifest = Manifest(step=0, description="", files=files, generator=torch.zeros(1, dtype=torch.uint8))
    manifest.write(folder)
    assert manifest.is_whole(folder)
    folder.write("second.0", {"weight": torch.arange(3.0)}, {"step": "2"})
    assert not manifest.is_whole(folder)
    folder.remove("second.0")
    assert not manifest.is_whole(folder)
