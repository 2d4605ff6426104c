"""The screenshots of the report in the documentation, light and dark: parts of a real report in a real browser.

Needs Chromium and the extra `dev` (playwright).  The report is that of the embedded digits and their network.

    python -m benchmarks.report_pictures
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from playwright.sync_api import sync_playwright

from curvcert import certify, report, trace
from curvcert.attacks import pgd
from curvcert.certificates import with_search
from curvcert.data import load_demo_network, load_digits
from curvcert.whole_files import write_whole

IMAGES = Path(__file__).parents[1] / "docs/images"
WIDTH = 1200
SAMPLES = 120
EPSILONS = (0.02, 0.05, 0.1, 0.2)
SEED = 0
VIEWS: tuple[tuple[Literal["light", "dark"], str, int], ...] = (("light", "body", 1400), ("dark", "#looseness", 1630))
"""Theme, what stands at the top, and the height of each picture."""


def write_page(folder: Path) -> Path:
    """Certify the digits and write their report."""
    network, digits = trace(load_demo_network(), torch.zeros(1, 1, 8, 8)), load_digits("test")
    x, y = digits.as_float64()[:SAMPLES], digits.labels[:SAMPLES]
    certificate = certify(network, x, y, box=(0.0, 1.0))
    attacks = [pgd(network, x, y, eps, steps=20, restarts=2, box=(0.0, 1.0), seed=SEED) for eps in EPSILONS]
    for attack in attacks:
        certificate = with_search(certificate, network, x, attack)
    return report(
        certificate,
        folder / "report.html",
        network=network,
        x=x,
        y=y,
        title="The embedded digits",
        command="python -m benchmarks.report_pictures",
        epsilons=EPSILONS,
        searches=attacks,
        seeds={"pgd": SEED},
    )


def main() -> None:
    """Write the page, look at it, and keep the pictures."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("This needs Chromium, and there is none here.")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = write_page(Path(folder))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for theme, top, height in VIEWS:
            page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=theme)
            page.goto(page_file.as_uri())
            page.locator(top).evaluate("element => element.scrollIntoView({behavior: 'instant'})")
            write_whole(IMAGES / f"report-{theme}.png", page.screenshot())
        browser.close()


if __name__ == "__main__":
    main()
