"""In a real browser: log in, see the DAGs, fill in the form, be refused, trigger, wait, read the leaderboard and the report.

Chromium is Debian's, driven by Playwright; skipped where either is absent. CRAW4LLM_SCREENSHOTS=docs/images keeps the pictures of the docs.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import airflow_env
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install 'craw4llm[dev]'")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SIZE = {"width": 1280, "height": 800}
PATIENCE = float(os.environ.get("CRAW4LLM_PATIENCE", "1"))  # of all time-outs; raise it on a busy machine
PATIENCE_MS = 30_000 * PATIENCE
VALUES = {
    "corpus": "synthetic", "synthetic_pages": 500, "budget": 40, "batch_pages": 10, "seed_count": 5, "vocab_size": 512,
    "token_multiple": 0.003, "replicates": 2,
}  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium, or set CHROMIUM to its path"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def site(place: Path) -> Iterator[tuple[str, str]]:
    """(address, password) of a server with the shipped experiments and an artifact root of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {name: value for name, value in os.environ.items() if "AIRFLOW" not in name and name != "CRAW4LLM_EXPERIMENTS"}
    command = [sys.executable, str(airflow_env.PROJECT / "scripts" / "airflow_server.py"), "start"]
    with (place / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--home", str(place / "home"), "--port", str(port)], env=environment | {"CRAW4LLM_ROOT": str(place / "artifacts")},
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + 240 * PATIENCE
        while "is ready" not in (said := (place / "log").read_text()):
            assert process.poll() is None and time.monotonic() < until, said
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", json.loads((place / "home" / "passwords.json").read_text())["admin"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.wait(90)


@pytest.fixture(scope="module")
def page(site: tuple[str, str]) -> Iterator[Any]:
    """A page of somebody who has logged in by hand."""
    address, password = site
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.set_default_timeout(PATIENCE_MS)
        page.goto(address)
        page.fill("input[name=username]", "admin")
        page.fill("input[type=password]", "wrong")
        page.keyboard.press("Enter")
        page.get_by_text("Invalid credentials").first.wait_for()
        page.fill("input[type=password]", password)
        page.keyboard.press("Enter")
        page.wait_for_url(lambda url: "login" not in url)
        yield page
        browser.close()


def keep(page: Any, name: str) -> None:
    """A picture for the docs, when asked for."""
    if folder := os.environ.get("CRAW4LLM_SCREENSHOTS"):
        page.wait_for_timeout(1500)
        page.screenshot(path=str(Path(folder) / f"airflow_{name}.png"))


def api(page: Any, site: tuple[str, str], path: str) -> Any:
    """An answer of the API, with the browser's own login."""
    return page.request.get(site[0] + path).json()


@pytest.fixture(scope="module")
def run(page: Any, site: tuple[str, str]) -> str:
    """Id of a run that was triggered by the form, after the form has refused a batch that cannot be."""
    page.goto(f"{site[0]}/dags/crawl_arms")
    page.click("button:has-text('Trigger')")
    form = page.get_by_role("dialog")
    form.locator("[name=element_corpus]").wait_for()
    keep(page, "form")
    for name in ("predicted", "breadth_first", "equal_fetches"):
        form.get_by_label(re.compile(f"remove {name}$", re.I)).click()
    for name, value in VALUES.items():
        form.locator(f"[name=element_{name}]").fill(str(value))
        form.locator(f"[name=element_{name}]").press("Tab")
    form.locator("[name=element_batch_tokens]").fill("300")
    form.locator("[name=element_batch_tokens]").press("Tab")
    start = form.get_by_role("button", name="Trigger")
    start.last.click()
    refused = page.get_by_text("batch_tokens is 300; expected a multiple of the context length, 256").first
    refused.wait_for()
    refused.scroll_into_view_if_needed()
    keep(page, "refused")
    assert api(page, site, "/api/v2/dags/crawl_arms/dagRuns")["total_entries"] == 0, "nothing has begun"
    form.locator("[name=element_batch_tokens]").fill("512")
    form.locator("[name=element_batch_tokens]").press("Tab")
    start.last.evaluate("button => button.click()")  # the word of refusal lies over it for a while
    until = time.monotonic() + 400 * PATIENCE
    while True:
        runs = api(page, site, "/api/v2/dags/crawl_arms/dagRuns")["dag_runs"]
        if runs and runs[0]["state"] in ("success", "failed"):
            break
        assert time.monotonic() < until, runs
        time.sleep(1)
    assert runs[0]["state"] == "success"
    assert runs[0]["conf"]["policies"] == ["quality", "random"] and runs[0]["conf"]["replicates"] == 2
    return str(runs[0]["dag_run_id"])


def test_the_dags_are_there(page: Any, site: tuple[str, str]) -> None:
    page.goto(f"{site[0]}/dags")
    for name in ("tiny", "tiny_reruns", "crawl_arms", "crawl_policies", "live_feasible", "size_ladder"):
        page.get_by_role("link", name=name, exact=True).first.wait_for()
    keep(page, "dags")


def test_arms_are_shown_by_name(page: Any, site: tuple[str, str], run: str) -> None:
    page.goto(f"{site[0]}/dags/crawl_arms/runs/{run}/tasks/arm.train/mapped")
    for name in ("quality/equal_pages #0", "random/equal_pages #1", "oracle #0"):
        page.get_by_text(name, exact=True).first.wait_for()
    keep(page, "arms")


def test_the_results_page_shows_leaderboard_and_report(page: Any, site: tuple[str, str], run: str) -> None:
    page.goto(f"{site[0]}/dags")
    page.locator("a[href$='/plugin/crawl-to-quality']").first.click()
    frame = page.frame_locator("iframe").first
    frame.get_by_role("link", name=re.compile("^crawl_arms_")).click()
    frame.get_by_role("heading", name="Leaderboard").wait_for()
    rows = frame.locator("table").first.locator("tr")
    arms = {rows.nth(i).locator("td").nth(1).inner_text().splitlines()[0] for i in range(1, rows.count())}
    assert arms == {"quality/equal_pages", "random/equal_pages", "oracle"}
    keep(page, "results")
    report = frame.frame_locator("iframe")
    report.get_by_text("Which of these crawl policies gives the better language model").first.wait_for()
    frame.locator("iframe").scroll_into_view_if_needed()
    keep(page, "report")
    page.evaluate("document.documentElement.className = 'dark'")  # as Airflow's own switch does
    frame.locator("html[data-theme=dark]").wait_for(state="attached")
    page.evaluate("document.documentElement.className = 'light'")
    frame.locator("html[data-theme=light]").wait_for(state="attached")


def test_the_results_page_fits_a_phone(page: Any, site: tuple[str, str], run: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    try:
        page.goto(f"{site[0]}/craw4llm/")
        page.get_by_role("link", name=re.compile("^crawl_arms_")).click()
        page.get_by_role("heading", name="Leaderboard").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "tables scroll, the page does not"
        keep(page, "phone")
    finally:
        page.set_viewport_size(SIZE)


def test_what_the_form_has_run_is_known_to_the_command_line(page: Any, site: tuple[str, str], run: str, place: Path) -> None:
    (kept,) = (place / "artifacts" / "index").glob("crawl_arms_*.json")
    for command, said in (("run", "nothing to do, all"), ("show", "finished"), ("report", "report: ")):
        done = subprocess.run(
            [sys.executable, "-m", "craw4llm", command, kept.stem, f"--root={place / 'artifacts'}"],
            cwd=airflow_env.PROJECT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0 and said in done.stdout, (command, done.stdout[-500:], done.stderr[-500:])


def test_links_of_run_and_task_lead_to_report_and_curves(page: Any, site: tuple[str, str], run: str) -> None:
    page.goto(f"{site[0]}/dags/crawl_arms/runs/{run}/plugin/crawl-to-quality-run")
    page.frame_locator("iframe").first.get_by_role("heading", name="Leaderboard").wait_for()
    links = api(page, site, f"/api/v2/dags/crawl_arms/dagRuns/{run}/taskInstances/arm.train/links?map_index=0")
    link = links["extra_links"]["Manifest and curves"]
    page.goto(site[0] + link)
    page.get_by_role("heading", name="training loss").wait_for()
    assert page.locator("svg polyline").count() >= 1
    keep(page, "curves")


def test_strangers_see_nothing(site: tuple[str, str], run: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as caught:
        opener.open(f"{site[0]}/craw4llm/", timeout=30)
    assert caught.value.code == 401
    caught.value.close()
