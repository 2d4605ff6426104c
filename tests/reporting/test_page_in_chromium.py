"""The page in a real browser: its controls work, it fits a phone and paper, and no request leaves the file."""

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from curvcert.certificates import certify
from curvcert.reporting import ReportData, compare, render, report_data
from tests.browser import chromium, needs_chromium, sync_api
from tests.reporting.cases import HOSTILE, Case, made_up

pytestmark = [pytest.mark.slow, needs_chromium]


class Opened:
    """A page that was opened, with every request, error and message it caused."""

    def __init__(self, page: "sync_api.Page", path: Path) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(path.as_uri())

    def column(self, k: int) -> list[str]:
        return self.page.locator(f"#sample-table tbody tr td:nth-child({k})").all_inner_texts()

    def heading(self, key: str) -> "sync_api.Locator":
        return self.page.locator(f'#sample-table th[data-key="{key}"]')

    def overflow(self) -> int:
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def background(self) -> str:
        return self.page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def data(case: Case) -> ReportData:
    return report_data(
        case.certificate,
        case.network,
        case.x,
        case.y,
        class_names=HOSTILE,
        title=HOSTILE[0],
        command=HOSTILE[1],
        epsilons=[0.05, 0.1],
        searches=case.searches,
    )


@pytest.fixture(scope="module")
def path(data: ReportData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "out.html"
    path.write_text(render(data), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: "sync_api.Browser", path: Path) -> Iterator[Opened]:
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light")
    yield Opened(context.new_page(), path)
    context.close()


def test_it_opens_silently_and_asks_for_nothing(opened: Opened, path: Path) -> None:
    page = opened.page
    page.evaluate("document.querySelectorAll('button:enabled:not([id^=save])').forEach(button => button.click())")
    assert opened.complaints == []
    assert opened.requests == [path.as_uri()]
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.title() == HOSTILE[0]


def test_a_click_on_a_heading_sorts(opened: Opened, data: ReportData) -> None:
    opened.page.locator("#page-size").select_option("100")
    radius = opened.heading("radius")
    radius.locator("button").click()
    shown = [float(text) for text in opened.column(4)]
    assert radius.get_attribute("aria-sort") == "ascending"
    assert len(shown) == len(data.samples) and shown == sorted(shown)
    radius.locator("button").click()
    assert [float(text) for text in opened.column(4)] == shown[::-1]
    assert radius.get_attribute("aria-sort") == "descending"
    assert opened.heading("index").get_attribute("aria-sort") == "none"


def test_infinite_distances_sort_last(opened: Opened, data: ReportData) -> None:
    opened.page.locator("#page-size").select_option("100")
    opened.heading("search_radius").locator("button").click()
    place = 4 + opened.page.locator("#sample-table th.number[data-key]").all_inner_texts().index("Search") - 1
    shown = [float(text.replace("∞", "inf")) for text in opened.column(place)]
    assert shown == sorted(shown) and len(shown) == len(data.samples)


def test_filters_narrow_the_table_to_the_exact_counts(opened: Opened, data: ReportData) -> None:
    page, total = opened.page, len(data.samples)
    matches = page.locator("#matches")
    assert page.locator("#filter-epsilon").is_disabled()
    for status, counts in (
        ("correct", [data.correct] * 2),
        ("misclassified", [total - data.correct] * 2),
        ("certified", data.at_epsilons.certified.counts),
        ("broken", [total - standing for standing in data.at_epsilons.falsified.counts]),
        (
            "undecided",
            [
                high - low
                for high, low in zip(data.at_epsilons.falsified.counts, data.at_epsilons.certified.counts, strict=True)
            ],
        ),
    ):
        page.locator("#filter-status").select_option(status)
        for k, count in enumerate(counts):
            if page.locator("#filter-epsilon").is_enabled():
                page.locator("#filter-epsilon").select_option(str(k))
            assert matches.inner_text() == f"{count} of {total} samples", (status, k)
    page.get_by_role("button", name="Clear").click()
    page.locator("#filter-class").select_option("1")
    sync_api.expect(matches).to_have_text(f"{data.samples.label.count(1)} of {total} samples")
    page.locator("#filter-text").fill("no such thing")
    assert "No sample matches" in page.locator("#sample-table tbody").inner_text()


def test_the_text_filter_finds_a_sample_by_its_number(opened: Opened) -> None:
    opened.page.locator("#filter-text").fill("17")
    assert opened.column(1) == ["17"]


def test_pages_turn_by_keyboard(opened: Opened, data: ReportData) -> None:
    page = opened.page
    page.locator("#page-size").select_option("10")
    last = -(-len(data.samples) // 10)
    assert page.locator("#page").inner_text() == f"Page 1 of {last}"
    assert page.locator("#previous").is_disabled()
    page.locator("#next").focus()
    page.keyboard.press("Enter")
    assert opened.column(1)[0] == "10"
    page.locator("#last").focus()
    page.keyboard.press("Space")
    assert page.locator("#page").inner_text() == f"Page {last} of {last}"
    assert page.locator("#next").is_disabled()


def test_every_control_is_reached_by_the_tab_key(opened: Opened) -> None:
    page = opened.page
    page.locator(".skip").focus()
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {
        "theme",
        "epsilon",
        "filter-text",
        "filter-class",
        "filter-status",
        "page-size",
        "next",
        "Certified",
    } <= reached


def test_the_legend_hides_a_curve_and_its_reading(opened: Opened) -> None:
    page = opened.page
    button = page.locator('.legend [data-series="lipschitz_radius"]')
    line = page.locator('[data-chart="0"] path[data-series="lipschitz_radius"]')
    assert line.evaluate("e => getComputedStyle(e).display") != "none"
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert line.evaluate("e => getComputedStyle(e).display") == "none"
    assert page.locator('#readout [data-series="lipschitz_radius"]').count() == 0
    button.click()
    assert line.evaluate("e => getComputedStyle(e).display") != "none"


def test_a_value_is_read_by_slider_and_by_pointer(opened: Opened, data: ReportData) -> None:
    page, curves = opened.page, data.ranges[0]
    slider = page.locator("#epsilon")
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator("#epsilon-value").inner_text() == "0"
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert float(page.locator("#epsilon-value").inner_text()) == curves.epsilons[3]
    tenths = 1000 * curves.certified.counts[3] // len(data.samples)
    assert page.locator('#readout [data-series="radius"] dd').inner_text() == f"≥ {tenths // 10}.{tenths % 10}%"
    page.locator('[data-chart="0"] svg').hover()
    assert slider.input_value() == str(len(curves.epsilons) // 2)


def test_bars_tell_their_count(opened: Opened) -> None:
    figure = opened.page.locator("#radii figure").first
    bar = figure.locator("rect:not([height='0.0'])").first
    bar.hover()
    assert re.fullmatch(r"\[.*[\])]: [1-9]\d*", figure.locator(".hover").inner_text())


def test_light_and_dark_follow_the_system_and_the_button(browser: "sync_api.Browser", path: Path) -> None:
    context = browser.new_context(color_scheme="dark")
    opened = Opened(context.new_page(), path)
    dark = opened.background()
    opened.page.locator("#theme").click()
    light = opened.background()
    assert dark == "rgb(18, 22, 27)" and light == "rgb(255, 255, 255)"
    opened.page.locator("#theme").click()
    assert opened.background() == dark
    context.close()


def test_nothing_runs_over_the_edge(browser: "sync_api.Browser", path: Path) -> None:
    for width, scheme in ((320, "light"), *itertools.product((390, 768, 1280), ("light", "dark"))):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        opened = Opened(context.new_page(), path)
        opened.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        opened.page.locator("#sample-table .open").first.click()
        assert opened.overflow() <= 0, (width, scheme)
        wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        assert width < 1280 or opened.page.evaluate(wide) == 0, "a column is clipped"
        context.close()


def test_a_sample_is_shown_when_it_is_chosen(opened: Opened, data: ReportData) -> None:
    page, chosen = opened.page, data.gallery.first[3]
    panel = page.locator("#sample")
    assert not panel.is_visible()
    page.locator("#sample-table tbody tr").nth(3).click()
    assert page.locator("#sample-title").inner_text() == "Sample 3"
    assert page.evaluate("document.activeElement.id") == "sample"
    facts = dict(zip(panel.locator("dt").all_inner_texts(), panel.locator("dd").all_inner_texts(), strict=True))
    for name, radii in data.samples.radii.items():
        shown = facts[f"by {name}"]
        assert shown == "not for every class" if math.isnan(radii[3]) else float(shown) <= radii[3], name
    assert float(facts["Picture shows a point at"]) >= chosen.distance
    assert panel.locator("img").count() == 3
    assert panel.locator("img").first.get_attribute("src") == chosen.picture
    assert all(panel.locator("img").evaluate_all("all => all.map(image => image.naturalWidth > 0)"))
    page.locator("#sample-table .open").nth(5).press("Enter")
    assert page.locator("#sample-title").inner_text() == "Sample 5"
    page.locator("#sample-close").click()
    assert not panel.is_visible() and page.evaluate("typeof window.hacked") == "undefined"


def test_the_address_holds_what_is_chosen(opened: Opened, path: Path) -> None:
    page = opened.page
    page.locator("#filter-status").select_option("certified")
    page.locator("#filter-epsilon").select_option("1")
    page.locator("#page-size").select_option("10")
    opened.heading("radius").locator("button").click()
    opened.heading("radius").locator("button").click()
    page.locator("#next").click()
    page.locator("#sample-table .open").first.click()
    matches, shown, title = page.locator("#matches").inner_text(), opened.column(1), page.title()
    address = page.evaluate("location.href")
    assert address.startswith(path.as_uri() + "#samples?")
    page.goto("about:blank")
    page.goto(address)
    assert (page.locator("#matches").inner_text(), opened.column(1), page.title()) == (matches, shown, title)
    assert opened.heading("radius").get_attribute("aria-sort") == "descending"
    assert page.locator("#sample-title").inner_text() == f"Sample {shown[0]}"
    for wrong in ("#samples?sort=nothing&page=x&sample=9999&status=no&eps=7", "#samples?page=-3&sample=", "#samples?%"):
        page.goto(path.as_uri() + wrong)
        assert opened.column(1)[0] == "0" and not page.locator("#sample").is_visible(), wrong
    assert opened.complaints == []


def test_what_the_filters_leave_is_saved(opened: Opened, data: ReportData) -> None:
    page = opened.page
    page.locator("#filter-class").select_option("1")
    wanted = [k for k, label in enumerate(data.samples.label) if label == 1]
    files = {}
    for kind in ("csv", "json"):
        with page.expect_download() as download:
            page.locator(f"#save-{kind}").click()
        assert download.value.suggested_filename == f"samples.{kind}"
        files[kind] = Path(download.value.path()).read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(files["csv"])))
    held = json.loads(files["json"])
    assert [int(row["sample"]) for row in rows] == [one["sample"] for one in held] == wanted
    for row, one, k in zip(rows, held, wanted, strict=True):
        assert float(row["radius"]) == one["radius"] <= data.samples.radius[k]
        assert float(row["attack_radius"]) == float(one["attack_radius"]) >= data.samples.attack_radius[k]
        assert row["class"] == HOSTILE[1] == one["class"]
    assert set(rows[0]) >= {f"radius by {name}" for name in data.samples.radii}


def test_every_sample_is_printed(opened: Opened, data: ReportData) -> None:
    page, total = opened.page, len(data.samples)
    assert page.locator("#range").inner_text() == ", the first 25 of these"
    page.set_viewport_size({"width": 718, "height": 1000})  # what A4 leaves between its margins
    page.emulate_media(media="print")
    sync_api.expect(page.locator("#sample-table tbody tr")).to_have_count(total)
    assert page.locator("#range").inner_text() == ""
    assert opened.overflow() <= 0
    page.emulate_media(media="screen")
    sync_api.expect(page.locator("#sample-table tbody tr")).to_have_count(25)


def test_paper_is_white_and_without_controls(opened: Opened) -> None:
    opened.page.locator("#theme").click()
    opened.page.emulate_media(media="print")
    assert opened.background() == "rgb(255, 255, 255)"
    for part in ("nav", "#theme", ".filters", ".pager", ".reader"):
        assert not opened.page.locator(part).first.is_visible(), part
    assert opened.page.locator('[data-chart="0"] svg').is_visible()
    assert opened.page.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.parametrize(
    "certificate",
    [made_up(1), made_up(5, correct=False), made_up(4, radius=float("inf")), made_up(10_000, classes=10)],
    ids=["one sample", "none correct", "infinite", "ten thousand"],
)
def test_edges_open_silently(browser: "sync_api.Browser", tmp_path: Path, certificate) -> None:
    path = tmp_path / "edge.html"
    x = torch.zeros(len(certificate), *certificate.in_shape)
    path.write_text(render(report_data(certificate, x=x)), encoding="utf-8")
    context = browser.new_context()
    opened = Opened(context.new_page(), path)
    opened.heading("attack_radius").locator("button").click()
    assert opened.complaints == []
    assert opened.page.locator("#matches").inner_text() == f"{len(certificate):,} of {len(certificate):,} samples"
    context.close()


def test_without_scripts_the_numbers_are_still_there(browser: "sync_api.Browser", path: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator('[data-chart="0"] svg').is_visible()
    assert page.locator("noscript p").is_visible()
    assert not page.locator("#theme").is_visible()
    context.close()


def test_two_certificates_side_by_side(browser: "sync_api.Browser", case: Case, tmp_path: Path) -> None:
    weaker = certify(case.network, case.x, case.y, method="product", box=(0, 1))
    path = tmp_path / "compare.html"
    path.write_text(compare(case.certificate, weaker, HOSTILE[:2], [0.05]).page(), encoding="utf-8")
    for width, scheme in itertools.product((390, 1280), ("light", "dark")):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        opened = Opened(context.new_page(), path)
        assert opened.overflow() <= 0 and opened.complaints == [] and opened.requests == [path.as_uri()]
        assert opened.page.locator("figure svg").count() == 2
        assert opened.page.evaluate("typeof window.hacked") == "undefined"
        context.close()
