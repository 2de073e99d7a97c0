"""The page in a real browser: it draws, sorts, zooms and fits on a phone, without a single error.

A script of ours works the page as a reader would and writes what it saw into the document, which the browser prints.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: one of {', '.join(BROWSERS)}")

WORK = """
const seen = {errors: []};
const cells = (page, id, column) =>
  [...page.querySelectorAll(`#${id} tbody tr`)].map((row) => row.cells[column].textContent);
const inked = (canvas) => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
  return count;
};
const frame = document.createElement("iframe");
frame.style = "width:390px;height:844px;border:0";
const watch = "<script>window.onerror = (message) => parent.seen.errors.push(String(message));</scr" + "ipt>";
frame.srcdoc = PAGE.replace("<head>", "<head>" + watch);
window.seen = seen;
frame.onload = () => {
  const page = frame.contentDocument, heading = (id, text) =>
    [...page.querySelectorAll(`#${id} th button`)].find((b) => b.textContent === text).click();
  seen.width = page.documentElement.scrollWidth;
  seen.order = cells(page, "classes", 0);
  heading("classes", "ms");
  seen.falling = cells(page, "classes", 1).map(Number);
  seen.sort = [...page.querySelectorAll("#classes th")].map((th) => th.getAttribute("aria-sort"));
  heading("classes", "ms");
  seen.rising = cells(page, "classes", 1).map(Number);
  heading("classes", "class");
  seen.names = cells(page, "classes", 0);
  heading("classes", "of roof");
  seen.roofs = cells(page, "classes", 3);
  seen.gains = cells(page, "help", 3).map(Number);
  seen.changes = page.querySelectorAll("#changes li").length;
  seen.points = page.querySelectorAll("#roofline circle").length;
  seen.labels = [...page.querySelectorAll("#roofline text")].map((t) => t.textContent);
  const boxes = [...page.querySelectorAll("#roofline text")].map((t) => t.getBoundingClientRect());
  seen.outside = boxes.filter((b) => b.left < 0 || b.right > 390).length;
  seen.summary = page.getElementById("summary").textContent;
  const canvas = page.getElementById("timeline");
  seen.ink = inked(canvas);
  const zoom = page.getElementById("zoom");
  zoom.value = 4;
  zoom.dispatchEvent(new Event("input"));
  seen.zoomed = page.getElementById("spacer").clientWidth;
  seen.inkZoomed = inked(canvas);
  zoom.value = 0;
  zoom.dispatchEvent(new Event("input"));
  const box = canvas.getBoundingClientRect();
  for (let x = 78; x < 380 && !page.getElementById("kernel").textContent; x++) {
    canvas.dispatchEvent(new PointerEvent("pointerdown", {clientX: box.left + x, clientY: box.top + 10}));
  }
  seen.kernel = page.getElementById("kernel").textContent;
  const provider = page.getElementById("provider");
  provider.value = "bf16";
  provider.dispatchEvent(new Event("change"));
  seen.other = page.getElementById("summary").textContent;
  const told = document.createElement("pre");
  told.id = "seen";
  told.textContent = JSON.stringify(seen);
  document.body.append(told);
};
document.body.append(frame);
"""


def browse(page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    profile = f"--user-data-dir={page.parent / 'browser'}"
    command = [BROWSER, *flags, profile, *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def seen(report: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    text = (report / "profile.html").read_text(encoding="utf-8")
    quoted = json.dumps(text).replace("</", "<\\/")
    page = tmp_path_factory.mktemp("browser") / "work.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><body><script>const PAGE = {quoted};{WORK}</script>", encoding="utf-8"
    )
    done = browse(page, "--dump-dom")
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return told


def test_no_errors(seen: dict[str, Any]) -> None:
    assert seen["errors"] == []


def test_it_fits_on_a_phone(seen: dict[str, Any]) -> None:
    assert seen["width"] == 390
    assert seen["outside"] == 0


def test_the_table_sorts(seen: dict[str, Any]) -> None:
    assert seen["order"][:3] == ["q", "k", "v"]
    assert seen["falling"] == sorted(seen["falling"], reverse=True)
    assert seen["rising"] == sorted(seen["rising"])
    assert seen["sort"].count("descending") == 1
    assert seen["names"] == sorted(seen["names"])
    values = [float(text.removesuffix(" %")) for text in seen["roofs"] if text]
    assert values == sorted(values, reverse=True)
    assert "" not in seen["roofs"][: len(values)]  # what has no roof stays below


def test_the_roofline_is_drawn(seen: dict[str, Any]) -> None:
    assert seen["points"] >= 12
    assert {"q", "lm_head", "attention"} <= set(seen["labels"])
    assert any(label.endswith("TFLOP/s") for label in seen["labels"])


def test_what_would_help(seen: dict[str, Any]) -> None:
    assert seen["gains"] == sorted(seen["gains"], reverse=True)
    assert seen["changes"] >= 6


def test_the_timeline(seen: dict[str, Any]) -> None:
    assert seen["ink"] > 1000
    assert seen["inkZoomed"] > 500
    assert seen["zoomed"] > 4000
    assert re.fullmatch(r"(q|k|v|o|gate|up|down|lm_head): .*, [\d.,]+ µs", seen["kernel"])


def test_another_run_can_be_chosen(seen: dict[str, Any]) -> None:
    assert seen["summary"] != seen["other"]
    assert "a step, as it runs" in seen["other"]


def test_screenshot(report: Path, tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    shutil.copy(report / "profile.html", page)
    done = browse(page, f"--screenshot={picture}", "--window-size=500,1200")
    assert picture.exists(), done.stderr[-2000:]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000  # an empty page is a few kilobytes
