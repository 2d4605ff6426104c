"""The page as text: escaped, self-contained, within its cap, and whole at every edge."""

import json
import math
import re
from dataclasses import replace
from fractions import Fraction
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from curvcert.errors import InvalidInput
from curvcert.reporting import render, report, report_data, write_report
from curvcert.reporting.data import Required
from curvcert.reporting.decimals import ceil_to, floor_to, percent_ceil, percent_floor
from curvcert.reporting.page import CAP
from tests.reporting.cases import HOSTILE, Case, made_up


class Tags(HTMLParser):
    """Collects elements with their attributes, and checks that they nest."""

    VOID = frozenset({"meta", "link", "img", "input", "br", "path", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def payload(page: str) -> dict[str, object]:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_hostile_strings_stay_text(case: Case) -> None:
    evil = HOSTILE[0]
    cert = replace(case.certificate, notes=(evil,), assumes=(evil,), method=(evil,) * len(case.certificate))
    shown = {"title": evil, "command": evil, "seeds": {evil: 1}, "required": [Required(evil, True)], "check": evil}
    page = render(report_data(cert, case.network, case.x, class_names=HOSTILE, **shown))
    tags = Tags(page)
    assert [tag for tag, _ in tags.found].count("script") == 2
    assert all(not name.startswith("on") for _, attrs in tags.found for name in attrs)
    assert "window.hacked=1</script>" not in page
    assert "<img src=x" not in page
    assert "{{ 7 * 7 }}" in page and "49 &amp;" not in page
    assert payload(page)["classes"] == list(HOSTILE)


def test_the_conclusion_comes_first(case: Case) -> None:
    required = [Required("Required 0.1@0.01: met.", True), Required("Required 1@9: MISSED.", False)]
    facts = report_data(case.certificate, epsilons=[0.01, 9.0], required=required, check="curvcert check a b digits")
    page = render(facts)
    proven = percent_floor(facts.at_epsilons.certified.counts[0], 40)
    found = page.index(f"At least {proven} of 40 samples keep the right class at every point within 0.01 in l2.")
    assert found < page.index('<p class="verdict is-met">Required 0.1@0.01: met.</p>')
    assert found < page.index('<p class="verdict is-missed">Required 1@9: MISSED.</p>')
    assert found < page.index("<pre>curvcert check a b digits</pre>") < page.index('<dl class="headline">')
    assert json.loads(facts.to_json())["required"][1] == {"verdict": "Required 1@9: MISSED.", "met": False}
    plain = render(report_data(case.certificate))
    assert "proven again" not in plain and 'class="verdict' not in plain


def test_nothing_is_loaded_from_elsewhere(case: Case) -> None:
    page = render(report_data(case.certificate, case.network, case.x))
    for tag, attrs in Tags(page).found:
        for name in ("src", "href"):
            if name in attrs:
                assert attrs[name].startswith(("data:", "#")), (tag, attrs)
    assert "default-src 'none'" in page
    assert "url(" not in page and "@import" not in page


def test_pictures_and_controls_have_names(case: Case) -> None:
    tags = Tags(render(report_data(case.certificate, case.network, case.x, searches=case.searches))).found
    assert all(attrs.get("alt") for tag, attrs in tags if tag == "img")
    assert all(attrs.get("aria-label") or attrs.get("aria-hidden") for tag, attrs in tags if tag == "svg")
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = {attrs["href"][1:] for tag, attrs in tags if tag == "a"}
    assert targets <= set(ids)


EDGES = {
    "none correct": made_up(5, correct=False),
    "one sample": made_up(1),
    "two classes": made_up(4, classes=2),
    "infinite radii": made_up(6, radius=math.inf),
    "radii of zero": made_up(6, radius=0.0),
    "tiny radii": made_up(6, radius=1e-13),
    "huge radii": made_up(6, radius=1e9),
    "a local method": made_up(6, local=True),
    "all NaN but the best": replace(made_up(6), radii={}),
    "the maximum norm": replace(made_up(6), p=math.inf),
}


@pytest.mark.parametrize("name", EDGES)
def test_every_edge_gives_a_whole_page(name: str) -> None:
    cert = EDGES[name]
    page = render(report_data(cert, x=torch.rand(len(cert), 4, dtype=torch.float64)))
    Tags(page)
    text = re.sub(r"<script.*?</script>|<style.*?</style>|base64,[^\"]*", "", page, flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf|None|undefined)\b", text), "a number that is none reached the reader"
    assert len(payload(page)["label"]) == len(cert)


@pytest.mark.parametrize("shape", [(4,), (1, 6, 5), (3, 200, 100), (2, 3, 3), (6, 5), (1,), (3000,)])
def test_every_shape_of_input_has_a_picture(shape: tuple[int, ...]) -> None:
    data = report_data(made_up(3, shape=shape), x=torch.rand(3, *shape, dtype=torch.float64) * 4 - 2)
    assert len(data.gallery.weakest) == 3 and data.gallery.strongest == ()
    Tags(render(data))


def test_rounding_keeps_the_claim(case: Case) -> None:
    data = report_data(case.certificate)
    content = payload(render(data))
    shown, decimals = content["numbers"], content["decimals"]
    for k, radius in enumerate(data.samples.radius):
        assert shown["radius"][k] == floor_to(radius, decimals) <= radius
        found = data.samples.attack_radius[k]
        assert shown["attack_radius"][k] == ("inf" if math.isinf(found) else ceil_to(found, decimals))
        assert math.isinf(found) or shown["attack_radius"][k] >= found
    for k, eps in enumerate(data.epsilons):
        assert sum(to > k for to in content["certified_to"]) / len(data.samples) == case.certificate.certified_accuracy(
            eps
        )
        standing = sum(start > k for start in content["broken_from"]) / len(data.samples)
        assert standing == case.certificate.searched_accuracy(eps)


def test_ten_thousand_samples_fit_and_the_page_states_its_size() -> None:
    page = render(report_data(made_up(10_000, classes=10)))
    size = len(page.encode())
    stated = int(re.search(r"at most ([\d,]+) KB", page)[1].replace(",", ""))
    assert size <= 1024 * stated <= size + 2048
    assert size < 2 * 2**20 < CAP
    assert len(payload(page)["label"]) == 10_000


def test_a_table_is_shortened_to_the_cap_and_says_so() -> None:
    data = report_data(made_up(2_000))
    page = render(data, cap=140_000)
    assert len(page.encode()) <= 140_000
    rows = len(payload(page)["label"])
    assert 0 < rows < 2_000 and f"The first {rows:,} of 2,000 samples" in page
    with pytest.raises(InvalidInput, match="larger cap"):
        render(data, cap=1_000)


def test_the_files_lie_beside_the_page(case: Case, tmp_path: Path) -> None:
    path = report(case.certificate, tmp_path / "deep" / "out.html", case.network, case.x, case.y)
    names = {file.name for file in path.parent.iterdir()}
    figures = {f"out-{kind}.{ending}" for kind in ("accuracy", "radii", "layers") for ending in ("png", "svg")}
    assert names == {"out.html", "out.json", *figures}
    assert json.loads((path.parent / "out.json").read_text())["title"] == "Certificate report"
    assert (path.parent / "out-radii.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (path.parent / "out-layers.svg").read_text()


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    path = write_report(report_data(made_up(3, correct=False)), tmp_path / "none.html")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "none-accuracy.png",
        "none-accuracy.svg",
        path.name,
        "none.json",
    ]


def test_a_wrong_path_or_a_wrong_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"ends in \.html"):
        report(made_up(2), tmp_path / "out.pdf")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=r"Cannot write into .*/file"):
        report(made_up(2), tmp_path / "file" / "out.html")
    with pytest.raises(InvalidInput, match="expects a Certificate"):
        report("certificate", tmp_path / "out.html")


@pytest.mark.parametrize("total", [1, 3, 7, 1000])
def test_shares_are_rounded_to_the_side_that_keeps_the_claim(total: int) -> None:
    for count in range(total + 1):
        low, high = (Fraction(shown(count, total).rstrip("%")) for shown in (percent_floor, percent_ceil))
        assert low <= Fraction(100 * count, total) <= high <= low + Fraction(1, 10)
