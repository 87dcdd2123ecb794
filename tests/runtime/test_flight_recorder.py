"""The last calls of each rank, as torch's own program reads them."""

from __future__ import annotations

import gc
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline.errors import DeadlineError
from syncline.runtime import Communicator
from syncline.runtime.direct import DirectCall
from syncline.runtime.flight_recorder import MOST_CALLS
from syncline.runtime.reduction import numpy_reduction

CALL = DirectCall(
    stream=0, label="scatter", timeout_s=60.0, direction="scatter", root=0, num_ranks=1, about="", sends=(), receives=()
)


def analysed(folder: Path) -> Any:
    """Return what ``torchfrtrace`` finds; it leaves the collector of garbage off."""
    from torch.distributed.flight_recorder import fr_trace

    try:
        fr_trace.main([str(folder), "-o", str(folder.parent / "found")])
    finally:
        gc.enable()
    return pickle.loads((folder.parent / "found").read_bytes())[1]


def summed() -> tuple[memoryview, Any]:
    return memoryview(np.ones(12, np.float32)).cast("B"), numpy_reduction("float32")


def reduce(communicator: Communicator, **settings: Any) -> Any:
    return communicator.all_reduce(*summed(), **settings)


def test_torchs_program_reads_the_calls_of_all_ranks(in_memory: Callable[..., Any], tmp_path: Path) -> None:
    communicators = in_memory(2)
    works = [reduce(one) for one in communicators]
    works += [one.all_gather(memoryview(bytearray(7))) for one in communicators]
    works += [one.reduce_scatter(*summed()) for one in communicators]
    works += [reduce(one, stream=5, label="gradients", step=3) for one in communicators]
    for work in works:
        work.wait(60)
    for one in communicators:
        one._recorder.write(tmp_path / "records", one.rank)
    found = analysed(tmp_path / "records")
    assert [(one.collective_name, one.pass_check, one.collective_state) for one in found.collectives] == [
        ("gloo:all_reduce", True, "completed"),
        ("gloo:all_gather_v", True, "completed"),
        ("gloo:reduce_scatter_v", True, "completed"),
        ("gloo:all_reduce", True, "completed"),
    ]
    assert sorted(group.id[:8] for group in found.groups) == ["stream 0", "stream 5"]
    entries = pickle.loads((tmp_path / "records" / "flight_rank_0").read_bytes())["entries"]
    assert entries[0]["input_sizes"] == [[12]]
    assert entries[3]["syncline_call"] == "gradients, step 3"


def test_who_did_not_come_to_a_call_is_found(in_memory: Callable[..., Any], tmp_path: Path) -> None:
    communicators = in_memory(2)
    for work in [one.reduce_scatter(*summed()) for one in communicators]:
        work.wait(60)
    are_written = [threading.Event() for _ in communicators]

    def write(one: Communicator) -> None:
        one._recorder.write(tmp_path / "records", one.rank)
        are_written[one.rank].set()

    for one in communicators:
        one.watch_failure(lambda _, one=one: write(one))
    with pytest.raises(DeadlineError):
        reduce(communicators[1], timeout_s=0.05).wait(60)
    assert all(is_written.wait(60) for is_written in are_written)
    found = analysed(tmp_path / "records")
    late = [one for one in found.collectives if one.missing_ranks]
    assert [(one.collective_seq_id, one.missing_ranks, one.collective_state) for one in late] == [(2, {0}, "started")]


@pytest.mark.usefixtures("usual_signal")
def test_a_signal_and_the_end_write_the_last_calls(
    in_memory: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (former,) = in_memory(1)
    former.write_flight(tmp_path / "former")
    (alone,) = in_memory(1)
    monkeypatch.chdir(tmp_path)
    alone.write_flight(Path("asked").absolute())
    for _ in range(MOST_CALLS + 5):
        alone._recorder.note(CALL, (0,))
    with alone._recorder._lock:  # as a call that begins meanwhile
        signal.raise_signal(signal.SIGUSR1)
    assert "test_flight_recorder.py" in capfd.readouterr().err, "the stacks of its threads"
    path = tmp_path / "asked" / "flight_rank_0"
    entries = pickle.loads(path.read_bytes())["entries"]
    assert (len(entries), entries[0]["record_id"]) == (MOST_CALLS, 5)
    path.unlink()
    alone.close()
    assert path.exists()
