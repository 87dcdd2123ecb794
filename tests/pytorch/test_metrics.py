"""Numbers for the tools that people watch: flat, JSON, and as Prometheus reads them."""

from __future__ import annotations

import json
import math
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import syncline
from syncline.cli.explain import ask, dump, top
from syncline.cli.launcher.scratch import reserved_port
from syncline.errors import ConfigurationError
from syncline.observe import Trace
from syncline.pytorch import metrics, serving
from syncline.pytorch.distribute import distribute
from syncline.pytorch.fleet import Fleet
from syncline.runtime import FleetStatistics


def trained(fleet: Fleet) -> FleetStatistics:
    model = torch.nn.Linear(4, 2)
    model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), fleet=fleet)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert fleet.metrics().keys() >= fleet.statistics().metrics().keys() - {"waited_elsewhere_s"}
    return fleet.statistics()


ROOT = Path(__file__).parents[2]
VIEW: dict[str, Any] = {"seconds": 8.0, "ranks": [], "links": [], "said": ["rank 1 holds the others up"]}


def job(rank: int) -> Callable[[], Any]:
    told = SimpleNamespace(rank=rank, trace=Trace(), world_size=2, dumps=[])
    told.view = lambda: VIEW if rank == 0 else None
    told.dump_flights = lambda: told.dumps.append(rank)
    return lambda: told


@pytest.fixture(scope="module")
def statistics() -> FleetStatistics:
    from thread_fleets import run_fleets

    found: FleetStatistics = run_fleets(2, trained)[0]
    return found


def test_metrics_are_flat_and_floats_and_goodput_has_its_parts(statistics: FleetStatistics) -> None:
    found = statistics.metrics()
    assert json.loads(json.dumps(found)) == found
    assert {type(value) for value in found.values()} == {float}
    assert found["steps"] == 3
    assert 0 < found["goodput"] <= 1
    assert found["starting_s"] + found["steps_s"] + found["between_steps_s"] == pytest.approx(found["total_s"])
    own_s = sum(value for name, value in found.items() if name.startswith("own_"))
    assert own_s + found["waited_s"] == pytest.approx(found["total_s"], rel=0.2)
    assert found["calls_reduce_scatter"] == 3
    assert found["uplink_h0_bytes"] > 0


def test_there_are_none_without_a_job() -> None:
    with pytest.raises(ConfigurationError, match="neither a fleet nor a process group"):
        syncline.metrics()


def test_a_note_reaches_metrics_and_the_trace_and_nonsense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="neither a fleet nor a process group"):
        syncline.note(loss=1.0)
    with syncline.init(trace=tmp_path / "trace.json") as fleet:
        syncline.note(loss=torch.tensor(0.5), samples=32)
        syncline.note(samples=8)
        found = syncline.metrics()
        assert (found["loss"], found["samples"]) == (0.5, 40.0)
        syncline.note(loss=math.nan)
        assert "loss" not in fleet.metrics(), "no tool takes NaN"
        with pytest.raises(ConfigurationError, match="samples"):
            syncline.note(samples=-1)
    fleet.trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["args"] for event in events if event["name"] == "loss"] == [{"value": 0.5}]
    (totals,) = [event["args"] for event in events if event["name"] == "syncline_totals"]
    assert totals["samples"] == 40.0


def test_prometheus_reads_them_at_a_port_and_in_a_file(
    statistics: FleetStatistics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser: Any = pytest.importorskip("prometheus_client.parser")
    texts = []
    with reserved_port() as port:
        monkeypatch.setenv("SYNCLINE_METRICS", str(port))
        stop = metrics.publish(lambda: statistics, job(0))
        assert syncline.metrics() == statistics.metrics()
        with pytest.raises(ConfigurationError, match=f"rank 0 serves at that port \\+ 0, and {port} cannot be had"):
            metrics.publish(lambda: statistics, job(0))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            texts.append(answer.read().decode())
        stop()
    monkeypatch.setenv("SYNCLINE_METRICS", str(tmp_path / "files"))
    metrics.publish(lambda: statistics, job(1))()
    texts.append((tmp_path / "files" / "syncline-1.prom").read_text())
    for rank, text in enumerate(texts):
        families = {family.name: family for family in parser.text_string_to_metric_families(text)}
        assert all(name.startswith("syncline_") for name in families)
        (steps,) = families["syncline_steps"].samples
        assert (steps.name, steps.labels, steps.value) == ("syncline_steps_total", {"rank": str(rank)}, 3.0)
        phases = {sample.labels["phase"] for sample in families["syncline_own_seconds"].samples}
        assert phases == {"elsewhere", "forward", "backward", "step"}


def test_the_dashboard_shows_numbers_that_are_there(statistics: FleetStatistics) -> None:
    pytest.importorskip("prometheus_client")
    names = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in metrics.Collector(lambda: statistics, 0).collect()
    }
    board = json.loads((ROOT / "docs" / "grafana" / "syncline.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found = {name for text in asked for name in re.findall(r"syncline_\w+", text)}
    assert found <= names
    assert len(found) >= 10
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    labels = {label for text in asked for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(", ")}
    assert labels <= {"rank", "phase", "reason", "link", "call"}


def test_opentelemetry_observes_the_same_until_the_end(
    statistics: FleetStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import metrics as api
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader: Any = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(api, "get_meter", provider.get_meter)
    monkeypatch.setenv("SYNCLINE_METRICS", "opentelemetry")
    stop = metrics.publish(lambda: statistics, job(0))

    def read() -> dict[str, list[tuple[dict[str, str], float]]]:
        data = reader.get_metrics_data()
        scopes = data.resource_metrics[0].scope_metrics if data and data.resource_metrics else []
        told = [one for scope in scopes for one in scope.metrics]
        return {one.name: [(dict(p.attributes), p.value) for p in one.data.data_points] for one in told}

    found = read()
    assert found["syncline.steps"] == [({"rank": "0"}, 3)]
    own = {labels["phase"]: value for labels, value in found["syncline.own_seconds"]}
    assert own == dict(statistics.own_s)
    stop()
    assert not any(read().values()), "a job that is over is observed no more"
    provider.shutdown()


def test_the_port_has_a_view_and_dumps_and_asks_for_the_secret_from_elsewhere(
    statistics: FleetStatistics, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("prometheus_client")
    (tmp_path / "secret").write_text("s" * 32)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "other").write_text("o" * 32)
    (tmp_path / "other").chmod(0o600)
    first, second = job(0), job(1)
    with reserved_port() as port:
        monkeypatch.setenv("SYNCLINE_METRICS", str(port))
        monkeypatch.setenv("SYNCLINE_SECRET_FILE", str(tmp_path / "secret"))
        stop = metrics.publish(lambda: statistics, first)
        monkeypatch.delenv("SYNCLINE_SECRET_FILE")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which is for others than a cluster's own hosts
        top(str(port), once=True)
        monkeypatch.delenv("http_proxy")
        assert capsys.readouterr().out == "8 s: no rank has said anything yet\nrank 1 holds the others up\n"
        with pytest.raises(ConfigurationError, match="no folder for it; start it with --log-dir"):
            dump(str(port))
        monkeypatch.setenv("SYNCLINE_FLIGHT_RECORD", "/records")
        dump(f"127.0.0.1:{port}")
        assert "2 ranks write to /records" in capsys.readouterr().out
        assert first().dumps == [0]
        heard = [{"name": f"rank {rank} (host a1)", "silent_s": silent_s} for rank, silent_s in ((0, 1.0), (1, 40.0))]
        monkeypatch.setattr(first(), "view", lambda: VIEW | {"ranks": heard})
        told = ask(str(port), "/dump", None)
        assert told == {"folder": "/records", "ranks": 1, "silent": ["rank 1 (host a1)"]}
        monkeypatch.setattr(first(), "view", lambda: VIEW)
        monkeypatch.setattr(serving, "is_near", lambda _: False)
        for secret in (None, tmp_path / "other"):
            with pytest.raises(ConfigurationError, match="this needs the job's secret"):
                ask(str(port), "/view", secret)
        assert ask(str(port), "/view", tmp_path / "secret") == VIEW
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert b"syncline_steps_total" in answer.read()
        with pytest.raises(ConfigurationError, match="there is /metrics, /, /view, /dump"):
            ask(str(port), "/none", None)
        stop()
        with pytest.raises(ConfigurationError, match="no job answers"):
            ask(str(port), "/view", None)
        monkeypatch.setenv("SYNCLINE_METRICS", str(port - 1))
        stop = metrics.publish(lambda: statistics, second)
        monkeypatch.undo()
        with pytest.raises(ConfigurationError, match="rank 0 alone has a view"):
            ask(str(port), "/view", None)
        stop()


def test_a_host_may_have_ipv6_alone() -> None:
    with reserved_port() as port:
        stop = serving.serve("::1", port, {"/view": lambda _: (200, "application/json", b"{}")}, None, is_open="-")
        try:
            assert ask(f"[::1]:{port}", "/view", None) == {}
        finally:
            stop()


def test_a_code_is_of_one_path_and_grows_old() -> None:
    secret, now_s = b"s" * 32, time.time()
    assert serving.is_valid(serving.make_code(secret, "/view"), secret, "/view")
    for code in (
        serving.make_code(secret, "/dump"),
        serving.make_code(b"o" * 32, "/view"),
        serving.make_code(secret, "/view", now_s - 2 * serving.VALID_S),
        "",
        "12.x",
        "é.x",
    ):
        assert not serving.is_valid(code, secret, "/view")


def test_a_place_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    (tmp_path / "file").touch()
    for place in ("99999", "a:b", str(tmp_path / "file")):
        monkeypatch.setenv("SYNCLINE_METRICS", place)
        with pytest.raises(ConfigurationError, match="SYNCLINE_METRICS"):
            metrics.publish(lambda: pytest.fail("nobody asks"), job(0))
