"""Numbers for the tools that people watch: ``metrics()``, and what Prometheus reads, at a port or in files.

Names and units in what Prometheus reads follow its rules: seconds and bytes, ``_total`` for what only grows, and labels
of which there are few: phases, reasons of waits, kinds of calls, and the links above this rank.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import torch

from syncline.arguments import Whole, checked
from syncline.endpoints import parse_endpoint
from syncline.errors import ConfigurationError
from syncline.pytorch.secret import read_secret
from syncline.pytorch.serving import Page, as_json, serve
from syncline.runtime import Communicator, FleetStatistics
from syncline.variables import FLIGHT, METRICS, process_variables

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WRITE_S = 10.0
"""How often a file is written; who reads one does so every 15 s or more."""

Take = Callable[[], FleetStatistics]
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
        communicator.progress.loss = value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
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
            with contextlib.suppress(Exception):  # of a loop that has crashed, nothing is known
                trace.about("totals", **take().metrics())
        stop()

    return end


def _tell_prometheus(take: Take, find: Callable[[], Communicator]) -> Callable[[], None]:
    place, rank = process_variables().get(METRICS), find().rank
    if not place:
        return lambda: None
    try:
        import prometheus_client
    except ImportError as error:
        raise ConfigurationError(
            f"{METRICS}={place} needs prometheus-client; pip install 'syncline[metrics]', or leave it out"
        ) from error
    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector(take, rank))
    if place.isdecimal() or ":" in place:
        where = place if ":" in place else f"127.0.0.1:{place}"
        address, port = parse_endpoint(where, default_port=0, what=METRICS)
        pages: dict[str, Page] = {
            "/metrics": lambda: (200, CONTENT_TYPE, prometheus_client.generate_latest(registry)),
            "/view": lambda: _view_page(find()),
            "/dump": lambda: _dump_page(find()),
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
    return as_json(view)


def _dump_page(communicator: Communicator) -> tuple[int, str, bytes]:
    folder = process_variables().get(FLIGHT)
    if not folder:
        return 409, "text/plain", f"the job has no folder for it; start it with --log-dir, or {FLIGHT}\n".encode()
    if communicator.rank:
        return 404, "text/plain", b"rank 0 tells all ranks to write; ask its port\n"
    communicator.dump_flights()
    return as_json({"folder": folder, "ranks": communicator.world_size})


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

        statistics, rank = self._take(), self._rank
        connections = statistics.fabric.connections
        counted: dict[str, tuple[str, str, Mapping[str, float]]] = {
            "steps": ("Steps that are finished", "", {"": statistics.num_steps}),
            "step_seconds": ("Seconds in finished steps", "", {"": statistics.steps_s}),
            "connected_seconds": ("Seconds since the ranks were connected", "", {"": statistics.total_s}),
            "own_seconds": ("Seconds of this rank's own in each phase", "phase", statistics.own_s),
            "waited_seconds": ("Seconds waited for other ranks", "reason", statistics.waited_s),
            "calls": ("Collectives that are over", "call", statistics.calls),
            "call_bytes": ("Bytes of their buffers", "call", statistics.call_bytes),
            "sent_bytes": ("Payload sent to other ranks", "", {"": statistics.fabric.sent_bytes}),
            "received_bytes": ("Payload received from other ranks", "", {"": statistics.fabric.received_bytes}),
            "uplink_bytes": ("Payload put on each link above this rank", "link", statistics.uplink_bytes()),
            "reconnects": (
                "Connections that broke and were opened again",
                "",
                {"": sum(x.reconnects for x in connections)},
            ),
        }
        gauged = {
            "goodput_ratio": ("Part of the time that finished steps took", statistics.goodput),
            "queued_bytes": ("Payload that waits to be sent", statistics.queued_bytes),
            "pending_calls": ("Collectives under way", statistics.num_pending_calls),
            "lost_ranks": ("Ranks that are lost, or have left", len(statistics.fabric.lost_peers)),
            "epoch": ("How often the members of the job have changed", statistics.epoch),
        }
        for name, (meaning, label, values) in counted.items():
            family = CounterMetricFamily(f"syncline_{name}", meaning, labels=["rank", *([label] if label else [])])
            for value_of, value in values.items():
                family.add_metric([str(rank), *([value_of] if label else [])], value)
            yield family
        for name, (meaning, value) in gauged.items():
            gauge = GaugeMetricFamily(f"syncline_{name}", meaning, labels=["rank"])
            gauge.add_metric([str(rank)], value)
            yield gauge
