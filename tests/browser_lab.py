"""The course in a real browser: JupyterLab as `python -m minikv lab` starts it, and Chromium.

Not collected by name (it takes a minute, a browser and Playwright, which the course does not need):

    pip install playwright; apt-get install chromium
    python -m pytest tests/browser_lab.py     # MINIKV_SHOTS=FOLDER keeps screenshots
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

from minikv.classroom.files import NOTEBOOK_METADATA, read_notebook, to_bytes
from minikv.commands.lab import jupyter_command

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]  # fmt: skip
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")
SHOTS = os.environ.get("MINIKV_SHOTS")  # a folder for screenshots


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy that may be saved over: three chapters, and a notebook with nothing but the lab."""
    folder = tmp_path_factory.mktemp("course")
    for name in ("00_welcome", "03_fragmentation", "05_paged_attention"):
        shutil.copy(ROOT / "notebooks" / f"{name}.ipynb", folder)
    cells = ["from minikv import experiments, viz", "viz.fragmentation_lab(experiments.lab_run)"]
    notebook = nbformat.v4.new_notebook(metadata=NOTEBOOK_METADATA | {"minikv": {}})
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in cells]
    (folder / "lab.ipynb").write_bytes(to_bytes(notebook))
    return folder


@contextlib.contextmanager
def served(course, home, theme):
    """The address of a server with settings of its own."""
    settings = home / "lab/user-settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
    (settings / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false"}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = jupyter_command(sys.executable, [], {}, is_root=True)
    command = [part for part in command if "root_dir" not in part]  # it takes one alone
    command += [f"--ServerApp.root_dir={course}", f"--ServerApp.port={port}"]
    command += ["--IdentityProvider.token=", "--LabApp.extension_manager=readonly"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    environ = dict(os.environ, JUPYTER_CONFIG_DIR=str(home), PYTHONPATH=str(ROOT))
    environ |= {"JUPYTER_DATA_DIR": str(home / "data"), "JUPYTER_RUNTIME_DIR": str(home / "run")}
    with open(home / "log", "w") as log:
        server = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api").read()
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module", params=["JupyterLab Dark", "JupyterLab Light"])
def lab(request, course, tmp_path_factory):
    """opens(name, size) -> a page with this notebook, its kernel idle."""
    with (
        served(course, tmp_path_factory.mktemp("home"), request.param) as url,
        playwright.sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)

        def opens(name, size=(1280, 720)):
            page = browser.new_page(viewport={"width": size[0], "height": size[1]})
            page.goto(f"{url}/lab/tree/{name}.ipynb?reset")
            page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
            idle = '.jp-Notebook-ExecutionIndicator[data-status="idle"]'
            page.wait_for_selector(idle, timeout=60_000)
            page.wait_for_timeout(3000)  # what JupyterLab writes, it writes late
            return page

        def shot(page, name):
            if SHOTS:
                page.screenshot(path=f"{SHOTS}/{request.param.split()[1]}_{name}.png")

        opens.shot = shot
        yield opens
        browser.close()


def saved(page):
    page.locator('.jp-Toolbar [data-jp-item-name="save"] jp-button').first.click()
    page.wait_for_timeout(2000)


def scrolled(page):
    """The page's notebook, part by part: JupyterLab keeps no more than what is seen."""
    panel = page.locator(".jp-WindowedPanel-outer")
    height = panel.evaluate("n => n.clientHeight")
    at = 0
    while True:
        panel.evaluate("(n, at) => n.scrollTop = at", at)
        page.wait_for_timeout(250)
        yield at
        at += height // 2
        if at > panel.evaluate("n => n.scrollHeight"):
            return


# Of every piece of text in an output of show, excerpt or beside: the contrast with what is behind
# it, by the formula of WCAG 2; and the first words, to tell how many such outputs there are.
CONTRASTS = """() => [...document.querySelectorAll(
  '.jp-RenderedHTMLCommon > div[style*="248, 248, 248"], .jp-RenderedHTMLCommon > ' +
  'div[style*="#f8f8f8"]')].map(box => {
  const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
  const lum = (c) => rgb(c).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => { const c = getComputedStyle(e).backgroundColor;
    return (rgb(c)[3] ?? 1) === 0 ? ground(e.parentElement) : c; };
  const texts = document.createTreeWalker(box, NodeFilter.SHOW_TEXT), found = [];
  for (let t; t = texts.nextNode();) if (t.textContent.trim()) {
    const [a, b] = [getComputedStyle(t.parentElement).color, ground(t.parentElement)].map(lum);
    found.push((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return [box.textContent.slice(0, 200), Math.min(...found)];
})"""


@pytest.mark.parametrize("size", [(1280, 720), (1366, 768)], ids=str)
@pytest.mark.parametrize("name", ["00_welcome", "03_fragmentation", "05_paged_attention"])
def test_opening_a_chapter_changes_nothing_and_its_sources_can_be_read(lab, course, name, size):
    before = (course / f"{name}.ipynb").read_bytes()
    page = lab(name, size)
    assert page.locator(".jp-mod-dirty").count() == 0
    saved(page)
    assert (course / f"{name}.ipynb").read_bytes() == before
    sources, alts = {}, []
    for at in scrolled(page):
        lab.shot(page, f"{name}_{size[0]}_{at:05}")
        sources |= dict(page.evaluate(CONTRASTS))
        alts += page.evaluate(
            "() => [...document.querySelectorAll('.jp-Notebook img')].map(i => i.alt)"
        )
    cells = read_notebook(course / f"{name}.ipynb").cells
    outputs = [out.get("data", {}) for cell in cells for out in cell.get("outputs", [])]
    stored = sum("background:#f8f8f8" in data.get("text/html", "") for data in outputs)
    assert len(sources) == stored > 0
    assert min(sources.values()) >= 3, sources
    assert alts and all(len(alt) > 20 for alt in alts)
    page.close()


@pytest.mark.parametrize("size", [(1280, 720), (1366, 768)], ids=str)
def test_the_lab_is_played_with_the_keyboard_beside_its_picture(lab, size):
    page = lab("lab", size)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_selector(".widget-html img", timeout=60_000)
    picture = page.locator(".widget-html img")
    num_cells, alt = page.locator(".jp-Notebook .jp-Cell").count(), picture.get_attribute("alt")
    handles = page.locator(".widget-slider .noUi-handle")
    assert handles.count() == 6
    for index in (3, 4):  # fit and reserve, no dropdowns
        handles.nth(index).focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "alt => document.querySelector('.widget-html img').alt !== alt", arg=alt, timeout=30_000
        )
        alt = picture.get_attribute("alt")
    for key in ("b", "a"):  # each inserts a cell, elsewhere
        page.keyboard.press(key)
    page.wait_for_timeout(300)
    assert "The run before" in alt and num_cells == page.locator(".jp-Notebook .jp-Cell").count()
    tracks = page.locator(".widget-slider .noUi-target")
    assert min(tracks.nth(i).bounding_box()["width"] for i in range(6)) >= 140
    control, image = page.locator(".widget-slider").first.bounding_box(), picture.bounding_box()
    assert control["x"] + control["width"] <= image["x"]  # beside, not above
    assert image["x"] + image["width"] <= size[0]
    lab.shot(page, f"lab_{size[0]}")
    saved(page)
    page.close()


def test_a_lab_whose_kernel_is_gone_says_what_to_run(lab):
    page = lab("lab")
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_role("menuitem", name="Shut Down Kernel", exact=True).click()
    page.wait_for_timeout(2000)
    page.close()
    page = lab("lab")
    assert "Run All Above Selected Cell" in page.locator(".jp-Notebook").inner_text()
    lab.shot(page, "lab_reopened")
    page.close()
