"""The page for a browser at the port of a job: whole by itself, for screen readers too, and of what a view has."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from syncline.cli.launcher.scratch import reserved_port
from syncline.fabric.progress import Progress
from syncline.pytorch import serving
from syncline.pytorch.serving import LIVE_PAGE, serve
from syncline.runtime import communicators_in_memory
from syncline.runtime.lookout import Lookout, take_pace
from syncline.runtime.whereabouts import ThreadWatch
from syncline.topology import Topology

PAGE = LIVE_PAGE.read_text()
FETCHES = {"src", "srcset", "action", "poster", "data"}


class Elements(HTMLParser):
    """All elements with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(PAGE)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_it_fetches_nothing_but_the_view_and_tells_what_its_parts_are() -> None:
    elements = Elements().found
    tags = [tag for tag, _ in elements]
    assert not [attributes for _, attributes in elements if FETCHES & attributes.keys()]
    assert [attributes.get("href") for tag, attributes in elements if tag in {"a", "link"}] == ["data:,"]
    assert re.findall(r"fetch\((\".*?\")", PAGE) == ['"view"']
    assert "http" not in PAGE.replace("http-equiv", "")
    assert "color-scheme: light dark" in PAGE
    assert dict(elements)["html"] == {"lang": "en"}
    assert tags.count("caption") == tags.count("table") == 2
    assert all(attributes.get("scope") == "col" for tag, attributes in elements if tag == "th")
    ids = {attributes["id"] for _, attributes in elements if "id" in attributes}
    assert set(re.findall(r'at\("(\w+)"\)', PAGE)) <= ids


def test_it_can_be_read_aloud_and_moved_by_keyboard_and_begins_with_what_matters() -> None:
    elements = Elements().found
    regions = [attributes for tag, attributes in elements if tag == "div" and attributes.get("class") == "wide"]
    assert len(regions) == 2
    assert all(one["role"] == "region" and one["tabindex"] == "0" and one["aria-label"] for one in regions)
    assert all(text.strip() for text in re.findall(r'<th scope="col">([^<]*)', PAGE)), "each column says what it has"
    spoken = [attributes["id"] for _, attributes in elements if {"aria-live", "role"} & attributes.keys() - {"class"}
              and "id" in attributes]  # fmt: skip
    assert spoken == ["lost", "said"], "what changes every two seconds is not read aloud"
    assert PAGE.index('id="said"') < PAGE.index("<table>")


def test_it_shows_what_a_view_has() -> None:
    topology = Topology.load("demo-1-3")
    lookout = Lookout(topology, str, lambda _rank, _pid: "", behind_s=60.0, now_s=0.0)
    communicators = communicators_in_memory(4, topology)
    try:
        for number, one in enumerate(communicators):
            lookout.hear(number, take_pace(Progress(), one.statistics(), ThreadWatch(Progress())), 1.0)
    finally:
        for one in communicators:
            one.abort()
    view = lookout.view(2.0)
    assert set(re.findall(r"\brank\.(\w+)", PAGE)) <= view["ranks"][0].keys()
    assert set(re.findall(r"\blink\.(\w+)", PAGE)) <= view["links"][0].keys()
    assert set(re.findall(r"\bview\.(\w+)", PAGE)) <= view.keys()


def test_it_is_served_and_a_browser_elsewhere_is_told_how_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        stop = serve("127.0.0.1", port, {"/": lambda _: (200, "text/html", LIVE_PAGE.read_bytes())}, None, is_open="-")
        try:
            with urlopen(f"http://127.0.0.1:{port}/") as answer:
                assert answer.read().decode() == PAGE
            named = Request(f"http://127.0.0.1:{port}/", headers={"Host": f"evil.example:{port}"})
            with pytest.raises(HTTPError, match="403") as refused:
                urlopen(named)
            refused.value.close()
            monkeypatch.setattr(serving, "is_near", lambda _: False)
            with pytest.raises(HTTPError) as refused:
                urlopen(f"http://127.0.0.1:{port}/")
            assert b"ssh -L" in refused.value.read()
            refused.value.close()
        finally:
            stop()
