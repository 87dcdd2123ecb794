"""The report as a browser gets it: one file, whole, small, and for everybody."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from made_traces import TOPOLOGY, make_job, synchronous
from syncline.errors import ConfigurationError
from syncline.observe import Trace
from syncline.report.explanation import explain
from syncline.report.job_trace import JobTrace
from syncline.report.page import STYLE, build_page, write_report
from syncline.topology import Topology


def main_of(page: str) -> ElementTree.Element:
    """Parse what the page shows; XML is stricter than a browser."""
    body = re.search("<main>.*</main>", page, re.DOTALL)
    assert body
    return ElementTree.fromstring(body[0].replace("&emsp;", "\u2003"))


def text_of(page: str) -> str:
    return " ".join("".join(main_of(page).itertext()).split())


@pytest.mark.parametrize("num_ranks", [1, 8, 64])
def test_a_page_is_whole_says_its_pictures_in_words_and_fetches_nothing(tmp_path: Path, num_ranks: int) -> None:
    page = build_page(explain(make_job(tmp_path, num_ranks, synchronous(20, slow={0: 12}))), title="train.py")
    main = main_of(page)
    assert not re.search(r"(src|href)=|https?:|url\(|@import|<script", page), "nothing is fetched"
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    for picture in main.iter("svg"):
        assert picture.get("aria-hidden") or (picture.get("role") == "img" and picture.get("aria-label"))
    regions = [one for one in main.iter("div") if one.get("class") == "wide"]
    assert regions
    assert all(one.get("tabindex") == "0" and one.get("role") == "region" and one.get("aria-label") for one in regions)
    for table in main.iter("table"):
        assert table.find("caption") is not None
        assert all(cell.get("scope") in {"col", "row"} for cell in table.iter("th"))
    waits = next(table for table in main.iter("table") if "waited for" in "".join(table.itertext()))
    assert len(list(waits.iter("tr"))) == num_ranks + 1
    assert len(list(main.iter("li"))) >= 3


def test_eight_ranks_and_a_thousand_steps_make_a_small_file(tmp_path: Path) -> None:
    page = build_page(explain(make_job(tmp_path, 8, synchronous(1000))))
    assert len(page.encode()) < 200_000


def test_a_page_of_nothing_says_so() -> None:
    shown = text_of(build_page(explain(JobTrace(ranks=(), topology=None))))
    assert "No step was finished" in shown
    assert "0 ranks" in shown


def test_a_failed_job_shows_why_and_who_left_no_totals(tmp_path: Path) -> None:
    def fill(rank: int, trace: Trace, begin_ns: int) -> None:
        synchronous(5)(rank, trace, begin_ns)
        if rank == 0:
            trace.instant("failed: peer_lost", "communication", text="rank 1 is lost <b>")
            trace.about("totals", steps=5.0, reconnects=2.0, overlapped_num_dropped=3.0, goodput=0.5)

    shown = text_of(build_page(explain(make_job(tmp_path, 2, fill)), title="<i>"))
    assert "The job failed: rank 0 (host h0): rank 1 is lost <b>" in shown
    assert shown.startswith("<i>"), "names are text and no markup"
    assert "overlapped num dropped" in shown
    assert "Without totals, as they did not come to their end: rank 1 (host h1)" in shown


def test_the_network_is_a_tree_with_its_bottleneck_marked_and_plans_stand_beside_the_bound(tmp_path: Path) -> None:
    def fill(rank: int, trace: Trace, begin_ns: int) -> None:
        synchronous(20)(rank, trace, begin_ns)
        if rank:
            return
        trace.about("job", rank=0, members=[0, 1], topology=Topology.parse(TOPOLOGY).to_yaml())
        trace.about("plan", collective="all_reduce", bytes=1 << 20, planner="tree", predicted_s=0.3, bound_s=0.2)
        trace.counter("loss", 2.5)
        trace.counter("loss", 1.5)
        for part in (0, 1):
            at = begin_ns + part * 300_000_000
            trace._record("C", "bytes on links", "", {"a up": 1e6 * part, "b down": 1e6 * part}, (at, at))

    main = main_of(build_page(explain(make_job(tmp_path, 2, fill))))
    (marked,) = [row for row in main.iter("tr") if row.get("class") == "full"]
    assert "".join(marked.itertext()).startswith("a80 Mbit/s")
    shown = " ".join("".join(main.itertext()).split())
    assert "1.50" in shown
    assert "Loss, mean of 1 rank" in shown


def test_a_course_that_hardly_changes_is_flat_and_its_ends_are_told_apart(tmp_path: Path) -> None:
    main = main_of(build_page(explain(make_job(tmp_path, 1, synchronous(20)))))
    (curve,) = [one for one in main.iter("svg") if (one.get("aria-label") or "").startswith("Time of each step")]
    marks = [text.text for text in curve.iter("text")]
    assert marks[:2] == ["15 ms", "0"]
    heights = {point.split(",")[1] for line in curve.iter("polyline") for point in (line.get("points") or "").split()}
    assert max(map(float, heights)) - min(map(float, heights)) < 1
    many = text_of(build_page(explain(make_job(tmp_path / "many", 1, synchronous(1000)))))
    assert "Time of each step (means of 3 in a row)" in many
    assert "step 999" in many


def contrast(first: str, second: str) -> float:
    """The ratio of WCAG 2, of two colours as CSS has them."""

    def light(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    less, more = sorted((light(first), light(second)))
    return (more + 0.05) / (less + 0.05)


@pytest.mark.parametrize("is_dark", [False, True])
def test_text_and_pictures_stand_out_from_the_paper_in_light_and_dark(*, is_dark: bool) -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--(\w+): (#\w+);", light))
    if is_dark:
        colours |= dict(re.findall(r"--(\w+): (#\w+);", dark))
    for name in ("ink", "faint", "full"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
    for name in ("forward", "backward", "step", "elsewhere", "network", "late", "unknown"):
        assert contrast(colours[name], colours["paper"]) >= 3, name
    assert contrast(colours["wait"], colours["backward"]) >= 1.5, "waits are drawn beside it"


def test_what_happened_is_told_in_sentences_and_an_empty_job_has_no_length(tmp_path: Path) -> None:
    def fill(rank: int, trace: Trace, begin_ns: int) -> None:
        del rank, begin_ns
        trace.instant("failed: peer_lost", "communication", text="rank 1 is lost", epoch=2)
        trace.about("totals", resent_bytes=1234567.0)

    shown = text_of(build_page(explain(make_job(tmp_path, 1, fill))))
    assert "failed: peer_lost (epoch 2): rank 1 is lost" in shown
    assert "1,234,567" in shown
    assert "in all" not in text_of(build_page(explain(JobTrace(ranks=(), topology=None))))


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    make_job(tmp_path / "parts", 1, synchronous(3))
    with pytest.raises(ConfigurationError, match="can be written to"):
        write_report(tmp_path / "parts", tmp_path / "none" / "run.html", title="x")
