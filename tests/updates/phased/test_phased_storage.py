"""Files of stages: the published format, whole or not at all, and errors that say what to do."""

from __future__ import annotations

import errno
import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from syncline.errors import StorageError, UpdateError
from syncline.updates.bucket import BucketPlan, Slot
from syncline.updates.phased import storage as storage_module
from syncline.updates.phased.instructions import Kind, Pass, Phase
from syncline.updates.phased.kept_inputs import Message, decode
from syncline.updates.phased.micro_batches import Part
from syncline.updates.phased.stage import BufferPool
from syncline.updates.phased.stage_store import ShardState, read_state
from syncline.updates.phased.storage import Folder, TemporaryFiles
from syncline.updates.shard import Segment

TENSORS = {
    "weight": torch.randn(3, 5, dtype=torch.float64),
    "half": torch.randn(7).to(torch.bfloat16),
    "step": torch.tensor(4.0),
    "empty": torch.zeros(0, 3),
    "flags": torch.tensor([True, False]),
}


def test_any_program_reads_what_is_written(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    num_bytes = folder.write("stage", TENSORS, {"step": "3"})
    path = tmp_path / "stage.safetensors"
    assert path.stat().st_size == num_bytes
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name], value)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"step": "3"}
    read, notes = folder.read("stage")
    assert notes == {"step": "3"}
    assert all(torch.equal(read[name], value) for name, value in TENSORS.items())


def test_what_any_program_writes_is_read_in_place(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "stage.safetensors")
    into = {name: torch.zeros_like(TENSORS[name]) for name in ("half", "weight")}
    assert Folder(tmp_path).read_into("stage", into) == 3 * 5 * 8 + 7 * 2
    assert all(torch.equal(value, TENSORS[name]) for name, value in into.items())


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("stage", TENSORS, {})
    for name, like in (("weight", torch.zeros(5, 3, dtype=torch.float64)), ("bias", torch.zeros(2))):
        with pytest.raises(StorageError, match=f"should hold '{name}' .* it belongs to another model"):
            folder.read_into("stage", {name: like})


@pytest.mark.parametrize("kept", [0, 5, 40, -3])
def test_a_file_that_was_cut_off_is_refused(kept: int, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("stage", {"weight": TENSORS["weight"]}, {})
    path = tmp_path / "stage.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(StorageError, match=r"stage\.safetensors cannot be read"):
        folder.read_into("stage", {"weight": torch.zeros(3, 5, dtype=torch.float64)})
    with pytest.raises(StorageError, match=r"stage\.safetensors cannot be read"):
        folder.read("stage")


def test_on_a_full_disk_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(file: Any, memory: memoryview) -> None:
        file.write(memory[: len(memory) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = Folder(tmp_path)
    folder.write("stage", {"weight": torch.ones(4)}, {"step": "1"})
    monkeypatch.setattr(storage_module, "_write_all", fill_up)
    with pytest.raises(StorageError, match=r"The storage is full: .* bytes .* are free .*make room"):
        folder.write("stage", {"weight": torch.zeros(4)}, {"step": "2"})
    assert [path.name for path in tmp_path.iterdir()] == ["stage.safetensors"]
    found, notes = folder.read("stage")
    assert found["weight"].tolist() == [1.0] * 4
    assert notes == {"step": "1"}


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StorageError, match="cannot be made for stages"):
        Folder(tmp_path / "taken")


def test_types_that_the_format_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="complex128"):
        Folder(tmp_path).write("stage", {"weight": torch.zeros(2, dtype=torch.complex128)}, {})


def test_what_is_removed_is_gone_and_what_is_forced_to_the_disk_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    folder.write("stage", {"weight": torch.ones(4)}, {})
    forced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: forced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    folder.sync(["stage"])
    assert forced == [str(tmp_path / "stage.safetensors"), str(tmp_path)]
    for _ in range(2):
        folder.remove("stage")
        assert not list(tmp_path.iterdir())
    with pytest.raises(StorageError, match=r"stage\.safetensors cannot be written"):
        folder.sync(["stage"])


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("has_nameless", [True, False])
def test_temporary_files_have_no_name(temporary: Path, has_nameless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the file system can open them so, or they are unlinked at once."""
    if not has_nameless:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what a kernel that does not know it makes of it
    files = TemporaryFiles()
    assert files.place == str(temporary)
    for step in ("1", "2"):
        files.write("stage", TENSORS, {"step": step})
        files.write("state", {}, {})
        assert not list(temporary.iterdir())
    into = {name: torch.zeros_like(TENSORS[name]) for name in ("half", "weight")}
    assert files.read_into("stage", into) == 3 * 5 * 8 + 7 * 2
    assert all(torch.equal(value, TENSORS[name]) for name, value in into.items())
    for _ in range(2):
        read, notes = files.read("stage")
        assert notes == {"step": "2"}
        assert all(torch.equal(read[name], value) for name, value in TENSORS.items())
    with pytest.raises(StorageError, match=r"'weight' .* it belongs to another model"):
        files.read_into("state", {"weight": torch.zeros(2)})
    gc.collect()  # else what earlier tests have left may be closed meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    files.sync(["stage"])
    for _ in range(2):
        files.remove("state")
        assert len(list(Path("/proc/self/fd").iterdir())) == before - 1
    files.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 2
    with pytest.raises(StorageError, match="the storage is closed"):
        files.read("stage")


@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOSPC, "The storage is full: .*make room"), (errno.EMFILE, "ulimit -n")]
)
def test_what_stops_a_temporary_file(
    number: int, message: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    files = TemporaryFiles()
    files.write("stage", {"weight": torch.ones(4)}, {})
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(storage_module, "_write_all", stop)
    with pytest.raises(StorageError, match=message):
        files.write("stage", {"weight": torch.zeros(4)}, {})
    assert files.read("stage")[0]["weight"].tolist() == [1.0] * 4
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    files.close()


def slot(position: int, start: int, stop: int) -> Slot:
    return Slot(name=f"p{position}", position=position, start=start, stop=stop, shape=(stop - start,), stride=(1,))


def test_state_of_pieces_comes_back_as_it_was(tmp_path: Path) -> None:
    slots = (slot(1, 0, 6), slot(4, 6, 10))
    plan = BucketPlan(index=0, group=0, dtype=torch.float32, device=torch.device("cpu"), slots=slots)
    segments = (Segment(slot=slots[0], start=2, stop=6), Segment(slot=slots[1], start=6, stop=7))
    other = (Segment(slot=slots[1], start=8, stop=10),)
    state = {"step": torch.tensor(3.0), "exp_avg": torch.randn(5), "momentum_buffer": None}
    before = ShardState([[(segments, state), (other, {})]])
    assert before.num_bytes == 4 + 5 * 4
    folder = Folder(tmp_path)
    folder.write("state", before.tensors(), before.notes())
    after = read_state([plan], *folder.read("state"))
    (found, values), (rest, nothing) = after.buckets[0]
    assert (found, rest, nothing) == (segments, other, {})
    assert values["momentum_buffer"] is None
    assert torch.equal(values["exp_avg"], state["exp_avg"])
    assert values["step"].shape == ()


def test_state_that_no_file_can_hold() -> None:
    with pytest.raises(UpdateError, match="keeps 'history' as a list"):
        ShardState([[((), {"history": [1, 2]})]]).notes()


def test_a_message_describes_what_follows() -> None:
    message = Message(
        phase=Phase(Kind.BACKWARD, 3, 5),
        kind=Pass.TRAIN,
        number=17,
        payload=(torch.zeros(2, 3, dtype=torch.bfloat16), None, torch.tensor(1.0)),
        is_tuple=True,
        num_samples=2.5,
        share=0.3,
        part=Part(2, 3, 7),
        loss=0.1,
    )
    text = message.encode()
    found, payloads = decode(text)
    assert [payload.nbytes for payload in payloads] == [12, 4]
    assert (found.phase, found.kind, found.number) == (message.phase, message.kind, 17)
    assert (found.is_tuple, found.num_samples, found.share, found.loss) == (True, 2.5, 0.3, 0.1)
    assert found.part == Part(2, 3, 7)
    assert found.num_bytes == 16
    assert [None if one is None else (one.dtype, tuple(one.shape)) for one in found.payload] == [
        (torch.bfloat16, (2, 3)),
        None,
        (torch.float32, ()),
    ]
    json.loads(text)


def test_rooms_are_used_again_and_counted() -> None:
    buffers = BufferPool(num_buffers=2, num_bytes=100)
    first, second = buffers.take(100), buffers.take(60)
    buffers.give_back(first)
    third = buffers.take(30)
    assert third.data_ptr() == first.data_ptr()
    assert buffers.ledger.live_bytes == 90
    buffers.give_back(second)
    buffers.give_back(third)
    assert (buffers.ledger.live_bytes, buffers.ledger.peak_bytes) == (0, 160)
