"""Numbers for the tools that people watch: ``metrics()``, and what Prometheus reads, at a port or in files.

Names and units in what Prometheus reads follow its rules: seconds and bytes, ``_total`` for what only grows, and labels
of which there are few: phases, reasons of waits, kinds of calls, and the links above this rank.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch

from syncline.arguments import Whole, checked
from syncline.endpoints import metrics_endpoint
from syncline.errors import ConfigurationError, SynclineError
from syncline.pytorch.secret import read_secret
from syncline.runtime import Communicator
from syncline.runtime.watching import MOST_SECONDS
from syncline.variables import FLIGHT, METRICS, process_variables

if TYPE_CHECKING:
    from syncline.runtime import FleetStatistics

OPENTELEMETRY = "opentelemetry"
"""In place of a port or a folder."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
EXAMINED_S = 5.0
WRITE_S = 10.0
"""How often a file is written; who reads one does so every 15 s or more."""
SILENT_S = 10.0
"""Of whom nothing was heard for longer, the view says so, and a dump cannot be expected."""

Take = Callable[[], "FleetStatistics"]
_sources: list[tuple[Take, Callable[[], Communicator]]] = []
"""Of the jobs that this process has a part in, the last one counts."""


def metrics() -> dict[str, float]:
    """Return this rank's numbers by name: of the fleet, or else of the process group ``init_process_group`` made.

    Steps, goodput (the part of the time since the ranks were connected that finished steps took), seconds of this
    rank's own and seconds waited, bytes and calls. All values are floats, so that Weights & Biases, TensorBoard, MLflow
    and ``json.dumps`` take the dictionary as it is. Any thread may call it, and no other rank is asked. Raises
    :class:`ConfigurationError` where there is neither fleet nor group.

    >>> with syncline.init():
    ...     syncline.metrics()["steps"]
    0.0
    """
    return _source()[0]().metrics()


@checked
def note(*, loss: SupportsFloat | None = None, samples: Whole = 0) -> None:
    """Let reports, the live view and :func:`metrics` have this rank's ``loss``, and the ``samples`` of a step.

    A tensor of one element is read at once. Samples are added up. Any thread may call it; nothing is sent for it.
    Raises :class:`ConfigurationError` where there is neither fleet nor group.

    >>> with syncline.init():
    ...     syncline.note(loss=0.5, samples=32)
    ...     syncline.metrics()["loss"]
    0.5
    """
    communicator = _source()[1]()
    if loss is not None:
        try:
            value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"loss must be a number, or a tensor of one element, not {loss!r}: {error}"
            ) from error
        communicator.progress.loss = value
        if math.isfinite(value):  # JSON has no other numbers
            communicator.trace.counter("loss", value)
    communicator.progress.num_samples += samples


def _source() -> tuple[Take, Callable[[], Communicator]]:
    if not _sources:
        raise ConfigurationError(
            "There is neither a fleet nor a process group of Syncline; call syncline.init(), or "
            'init_process_group("syncline")'
        )
    return _sources[-1]


def publish(take: Take, find: Callable[[], Communicator]) -> Callable[[], None]:
    """Let :func:`metrics`, and Prometheus if the variable says so, have what ``take`` returns; return what ends that.

    ``find`` returns the job's communicator, whose trace gets the last numbers. Raises :class:`ConfigurationError` for a
    port or folder that cannot be had.
    """
    stop = _tell_prometheus(take, find)
    source = take, find
    _sources.append(source)

    def end() -> None:
        _sources.remove(source)
        if (trace := find().trace).enabled:
            with contextlib.suppress(SynclineError, RuntimeError):  # of a loop that has crashed, nothing is known
                trace.about("totals", **take().metrics())
        stop()

    return end


def _tell_prometheus(take: Take, find: Callable[[], Communicator]) -> Callable[[], None]:
    place, rank = process_variables().get(METRICS), find().rank
    if not place:
        return lambda: None
    if place == OPENTELEMETRY:
        return _tell_opentelemetry(take, rank)
    try:
        import prometheus_client
    except ImportError as error:
        raise ConfigurationError(
            f"{METRICS}={place} needs prometheus-client; pip install 'syncline[metrics]', or leave it out"
        ) from error
    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector(take, rank))
    if (endpoint := metrics_endpoint(place, what=METRICS)) is not None:
        address, port = endpoint
        from syncline.pytorch.serving import LIVE_PAGE, Page, serve

        pages: dict[str, Page] = {
            "/metrics": lambda _: (200, CONTENT_TYPE, prometheus_client.generate_latest(registry)),
            "/": lambda _: (200, "text/html; charset=utf-8", LIVE_PAGE.read_bytes()),
            "/view": lambda _: _view_page(find()),
            "/dump": lambda _: _dump_page(find()),
            "/explain": lambda query: _explain_page(find(), query),
        }
        try:
            return serve(address, port + rank, pages, read_secret(process_variables()), is_open="/metrics")
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"{METRICS}={place}: rank {rank} serves at that port + {rank}, and {port + rank} cannot be had: {error}"
            ) from error
    path = Path(place) / f"syncline-{rank}.prom"
    return _write_often(lambda: prometheus_client.write_to_textfile(str(path), registry), path)


def _view_page(communicator: Communicator) -> tuple[int, str, bytes]:
    view = communicator.view()
    if view is None:
        return 404, "text/plain", b"rank 0 alone has a view of all ranks; ask its port\n"
    return 200, "application/json", json.dumps(view).encode()


def _dump_page(communicator: Communicator) -> tuple[int, str, bytes]:
    folder = process_variables().get(FLIGHT)
    if not folder:
        return 409, "text/plain", f"the job has no folder for it; start it with --log-dir, or {FLIGHT}\n".encode()
    if communicator.rank:
        return 404, "text/plain", b"rank 0 tells all ranks to write; ask its port\n"
    communicator.dump_flights()  # which tells them, and waits for nobody
    known = (communicator.view() or {"ranks": []})["ranks"]
    silent = [rank["name"] for rank in known if rank["silent_s"] > SILENT_S]
    told = {"folder": folder, "ranks": communicator.world_size - len(silent), "silent": silent}
    return 200, "application/json", json.dumps(told).encode()


def _explain_page(communicator: Communicator, query: Mapping[str, str]) -> tuple[int, str, bytes]:
    try:
        seconds = float(query.get("seconds", EXAMINED_S))
        if not 0 <= seconds <= MOST_SECONDS:
            return 400, "text/plain", f"seconds must lie between 0 and {MOST_SECONDS:g}\n".encode()
        return 200, "application/json", json.dumps(communicator.examine(seconds)).encode()
    except (SynclineError, ValueError) as error:
        return 409, "text/plain", f"{error}\n".encode()


def _write_often(write: Callable[[], None], path: Path) -> Callable[[], None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        raise ConfigurationError(f"{METRICS}: {path} cannot be written: {error.strerror}") from error
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(WRITE_S):
            with contextlib.suppress(Exception):  # the next one may succeed
                write()

    thread = threading.Thread(target=go_on, name="syncline-metrics", daemon=True)
    thread.start()

    def stop() -> None:
        is_over.set()
        thread.join()
        with contextlib.suppress(Exception):
            write()

    return stop


class Collector:
    """What the official client asks for everything; ``rank`` is a label of all of it."""

    def __init__(self, take: Take, rank: int) -> None:
        self._take = take
        self._rank = rank

    def collect(self) -> Iterator[Any]:
        """Yield what Prometheus reads, as of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        from syncline.runtime.statistics import measures  # a start counts nothing

        rank = str(self._rank)
        for name, measure in measures(self._take()).items():
            kind = CounterMetricFamily if measure.is_counted else GaugeMetricFamily
            family = kind(f"syncline_{name}", measure.meaning, labels=["rank", *filter(None, [measure.label])])
            for value_of, value in measure.values.items():
                family.add_metric([rank, *([value_of] if measure.label else [])], value)
            yield family


def _tell_opentelemetry(take: Take, rank: int) -> Callable[[], None]:
    """Let the meter provider that the program, or opentelemetry-instrument, has set observe all measures."""
    try:
        from opentelemetry import metrics as api
    except ImportError as error:
        raise ConfigurationError(
            f"{METRICS}={OPENTELEMETRY} needs its SDK; pip install 'syncline[opentelemetry]', or leave it out"
        ) from error
    from syncline.runtime.statistics import measures  # a start counts nothing

    meter, is_over = api.get_meter("syncline"), threading.Event()

    def observe(name: str, _: object) -> Iterator[api.Observation]:
        if is_over.is_set():  # nothing ends an instrument
            return
        measure = measures(take())[name]
        for value_of, value in measure.values.items():
            labels = {"rank": str(rank)} | ({measure.label: value_of} if measure.label else {})
            yield api.Observation(value, labels)

    for name, measure in measures(take()).items():
        make = meter.create_observable_counter if measure.is_counted else meter.create_observable_gauge
        make(f"syncline.{name}", [partial(observe, name)], description=measure.meaning)
    return is_over.set
