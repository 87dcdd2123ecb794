"""What is asked of CUDA, in which order: with stand-ins for its streams, events and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncline.errors import ConfigurationError
from syncline.tensors.collectives import check_tensors
from syncline.tensors.device_copies import CopyKind, CopyRange, CudaCopier, HostCopy, PlainCopier, find_copier

GPU = torch.device("cuda", 0)


class Recorder:
    """Notes what is asked of the GPU."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current = Stream(self, "user")
        self.num_streams = self.num_events = 0
        self.is_on_device = False

    def make_stream(self, _: torch.device) -> Stream:
        self.num_streams += 1
        return Stream(self, f"side {self.num_streams}")

    def make_event(self, *, blocking: bool) -> Event:
        assert blocking, "a thread that waits for an event must sleep"
        self.num_events += 1
        return Event(self, f"event {self.num_events}")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device == GPU
        self.is_on_device = True
        yield
        self.is_on_device = False

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert self.is_on_device, "else it would go back to a stream of another GPU"
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def wait_event(self, event: Event) -> None:
        self.recorder.calls.append((self.name, "waits for", event.name))


class Event:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def record(self, stream: Stream) -> None:
        self.recorder.calls.append((stream.name, "records", self.name))

    def synchronize(self) -> None:
        self.recorder.calls.append(("thread", "waits for", self.name))


class Tensor:
    device = GPU
    nbytes, dtype = 8, torch.float32

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def detach(self) -> Tensor:
        return self

    def copy_(self, source: Tensor, *, non_blocking: bool = False) -> None:
        how = "copies aside" if non_blocking else "copies"
        self.recorder.calls.append((self.recorder.current.name, how, source.name, self.name))

    def record_stream(self, stream: Stream) -> None:
        self.recorder.calls.append((stream.name, "uses", self.name))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "Stream", recorder.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", recorder.make_event)
    monkeypatch.setattr(torch.cuda, "stream", recorder.stream)
    monkeypatch.setattr(torch.cuda, "device", recorder.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: recorder.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return recorder


def test_copies_run_on_side_streams_between_events(gpu: Recorder) -> None:
    copier = CudaCopier()
    device, host = Tensor(gpu, "device"), Tensor(gpu, "host")
    each: Any = CopyRange(device=device, host=host)  # type: ignore[arg-type]
    called = copier.mark(GPU)
    loaded = copier.copy(GPU, CopyKind.TO_HOST, [each], [called])
    copier.wait(loaded)
    stored = copier.copy(GPU, CopyKind.TO_DEVICE, [each], [called])
    copier.follow(stored)
    assert gpu.calls == [
        ("user", "records", "event 1"),
        ("side 1", "waits for", "event 1"),
        ("side 1", "copies aside", "device", "host"),
        ("side 1", "uses", "device"),
        ("side 1", "records", "event 2"),
        ("thread", "waits for", "event 2"),
        ("side 2", "waits for", "event 1"),
        ("side 2", "copies aside", "host", "device"),
        ("side 2", "uses", "device"),
        ("side 2", "records", "event 3"),
        ("user", "waits for", "event 3"),
    ]


def test_a_temporary_is_copied_behind_what_came_to_it(gpu: Recorder) -> None:
    copier = CudaCopier()
    source: Any = Tensor(gpu, "temporary")
    target: Any = Tensor(gpu, "tensor")
    with copier.aside(GPU):
        copier.follow(copier.put(source, target))
    assert gpu.calls == [
        ("side 1", "copies", "temporary", "tensor"),
        ("side 1", "uses", "temporary"),
        ("side 1", "uses", "tensor"),
        ("side 1", "records", "event 1"),
        ("side 1", "waits for", "event 1"),
    ]


def test_what_is_queued_aside_uses_its_tensors_until_it_is_done(gpu: Recorder) -> None:
    copier = CudaCopier()
    tensor: Any = Tensor(gpu, "tensor")
    with copier.aside(GPU, CopyKind.TO_HOST, [tensor]):
        copier.mark(GPU)
    assert gpu.calls == [("side 1", "records", "event 1"), ("side 1", "uses", "tensor")]


def test_only_tensors_on_a_gpu_are_taken() -> None:
    assert not CudaCopier().takes(torch.ones(1))


def test_a_bucket_is_loaded_behind_the_training_and_stored_behind_what_may_still_read_it(gpu: Recorder) -> None:
    """The training goes on at once; the next load must not overwrite what a store still reads."""
    device: Any = Tensor(gpu, "flat")
    copier: Any = CudaCopier()
    copier.allocate_host = lambda _: SimpleNamespace(view=lambda _: Tensor(gpu, "host"))
    copy = HostCopy(copier, device)
    copy.load(device)
    copy.wait()
    copy.allow()
    copy.enter()
    copy.store(device, waits=True)
    copy.load(device)
    assert gpu.calls == [
        ("user", "records", "event 1"),
        ("side 1", "waits for", "event 1"),
        ("side 1", "copies aside", "flat", "host"),
        ("side 1", "uses", "flat"),
        ("side 1", "records", "event 2"),
        ("thread", "waits for", "event 2"),
        ("user", "records", "event 3"),
        ("user", "waits for", "event 3"),
        ("user", "records", "event 4"),
        ("side 2", "waits for", "event 4"),
        ("side 2", "waits for", "event 3"),
        ("side 2", "copies aside", "host", "flat"),
        ("side 2", "uses", "flat"),
        ("side 2", "records", "event 5"),
        ("thread", "waits for", "event 5"),
        ("user", "records", "event 6"),
        ("side 1", "waits for", "event 6"),
        ("side 1", "waits for", "event 5"),
        ("side 1", "copies aside", "flat", "host"),
        ("side 1", "uses", "flat"),
        ("side 1", "records", "event 7"),
    ]


def test_a_graph_that_is_captured_is_refused_with_a_remedy(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigurationError, match=r"all_reduce cannot be captured .*make_graphed_callables"):
        check_tensors("all_reduce", [SimpleNamespace(is_cuda=True)])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="cannot be captured"):
        CudaCopier().mark(GPU)
    assert not gpu.calls
    check_tensors("all_reduce", [torch.ones(1)])


def test_every_device_but_the_host_has_a_copier() -> None:
    assert find_copier(torch.device("cpu")) is None
    assert isinstance(find_copier(GPU), CudaCopier)
    copier = find_copier(torch.device("meta"))
    assert isinstance(copier, PlainCopier)
    copy, flat = HostCopy(copier, torch.empty(2)), torch.tensor([1.0, 2.0])
    copy.load(flat)
    copy.host.mul_(2)
    copy.store(flat, waits=True)
    assert flat.tolist() == [2, 4]
