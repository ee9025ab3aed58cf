"""Players in a real browser: python tests/browser_players.py [notebook.ipynb ...]

Opens each notebook (unless given, a small one of its own) in JupyterLab, in light and in dark: as
somebody else's, whose scripts do not run; run, by mouse and keys; closed and opened again without a
kernel; and exported to HTML. Needs Playwright (in this Python) and Chromium (CHROMIUM, or
/usr/bin/chromium); without them it says so and does nothing. COURSE_PYTHON: the interpreter that
has JupyterLab, this one unless given. SHOTS: a folder for screenshots.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
PYTHON = os.environ.get("COURSE_PYTHON", sys.executable)
SHOTS = Path(os.environ.get("SHOTS", tempfile.gettempdir()))
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
TOKEN = secrets.token_hex(8)
LAB = [
    *(
        "--allow-root",
        "--no-browser",
        f"--IdentityProvider.token={TOKEN}",
        "--ServerApp.port_retries=0",
    ),
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
]
CELLS = (
    "import minikv.viz as viz\nfrom minikv import LLM, SamplingParams",
    "llm = LLM('tiny', max_model_len=48, num_gpu_blocks_override=9)\n"
    "llm.add_request([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), 'a')\n"
    "snapshots = []\n"
    "while llm.has_unfinished_requests():\n    llm.step()\n"
    "    snapshots.append(viz.snapshot(llm))\n"
    "viz.pool_player(snapshots)",
    "viz.softmax_player([[2.0, 0.0], [1.0, 4.0], [3.0]])",
)


def small_notebook(folder):
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None,
         "outputs": [], "source": source}
        for i, source in enumerate(CELLS)
    ]  # fmt: skip
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    path = folder / "players.ipynb"
    path.write_text(
        json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})
    )
    command = ["-m", "jupyter", "nbconvert", "--to", "notebook", "--execute", "--inplace"]
    subprocess.run([PYTHON, *command, path.name], cwd=folder, env=environment(folder), check=True)


def environment(folder, theme="JupyterLab Light"):
    """Settings, trust and start-up files of nobody."""
    settings = folder / ".settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
    own = {
        "JUPYTERLAB_SETTINGS_DIR": folder / ".settings",
        "JUPYTER_CONFIG_DIR": folder / ".config",
        "JUPYTER_DATA_DIR": folder / ".data",  # and with it the signatures of trusted notebooks
        "JUPYTER_RUNTIME_DIR": folder / ".runtime",
        "IPYTHONDIR": folder / ".ipython",
        "PYTHONPATH": ROOT,
    }
    return os.environ | {name: str(path) for name, path in own.items()}


class Lab:
    """A JupyterLab over a folder."""

    def __init__(self, folder, theme):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        port = self.url.rpartition(":")[2]
        self.process = subprocess.Popen(
            [PYTHON, "-m", "jupyterlab", *LAB, f"--port={port}"],
            cwd=folder, env=environment(folder, theme),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def api(self, path, method="GET"):
        request = urllib.request.Request(f"{self.url}/api/{path}", method=method)
        request.add_header("Authorization", f"token {TOKEN}")
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.loads(answer.read() or "null")

    def __enter__(self):
        for _ in range(240):
            try:
                self.api("status")
                return self
            except OSError:
                time.sleep(0.5)
        raise SystemExit("JupyterLab did not start")

    def __exit__(self, *_):
        for kernel in self.api("kernels"):
            self.api(f"kernels/{kernel['id']}", "DELETE")
        self.process.kill()  # a polite end may take minutes
        self.process.wait()


def open_notebook(page, lab, name, kernel=True):
    page.goto(f"{lab.url}/lab/tree/{name}?reset&token={TOKEN}")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=120_000)
    dialog = page.locator(".jp-Dialog button.jp-mod-accept")
    if kernel:
        idle = page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]')
        idle.wait_for(timeout=120_000)
    if dialog.count():
        dialog.first.click()


def label(player):
    return player.locator("output").inner_text()


def players_work(page, shot):
    """Every player by mouse and keys. Returns how many there are."""
    players = page.locator(".mk-player")
    for index in range(players.count()):
        player = players.nth(index)
        player.scroll_into_view_if_needed()
        player.locator(".mk-frame").click()  # focus by mouse
        count = int(player.locator("input").get_attribute("max")) + 1
        assert label(player).endswith(f"(1 of {count})"), label(player)
        for key, place in (("ArrowRight", 2), ("ArrowDown", 1), ("End", count), ("Home", 1)):
            page.keyboard.press(key)
            assert label(player).endswith(f"({place} of {count})"), (key, label(player))
        player.locator("button[aria-label=next]").click()
        player.locator("input").press("ArrowUp")
        assert label(player).endswith(f"({min(3, count)} of {count})"), label(player)
        page.keyboard.press(" ")
        page.wait_for_timeout(4000)
        assert not label(player).endswith(f"({min(3, count)} of {count})") or count <= 3
        if player.locator("button[aria-label=pause]").count():
            page.keyboard.press(" ")
        assert player.locator("button[aria-label=play]").count() == 1
        # A frame has its own alt text, the player a name, the focus a ring.
        player.focus()
        page.keyboard.press("ArrowLeft")
        said = player.locator(".mk-said").inner_text()
        assert said and said == player.locator("img").first.get_attribute("alt")
        assert player.get_attribute("aria-label") and player.get_attribute("role") == "group"
        assert player.evaluate("e => getComputedStyle(e).outlineWidth") == "3px"
        page.screenshot(path=SHOTS / f"{shot}-{index}.png")
        page.keyboard.press("Home")
        player.evaluate("e => e.blur()")
    return players.count()


def keys_stay_inside(page):
    """What JupyterLab would take as a command does nothing in a player, and saving still works."""
    cells, player = page.locator(".jp-Notebook .jp-Cell"), page.locator(".mk-player").first
    player.locator(".mk-frame").click()
    active = (
        "[...document.querySelectorAll('.jp-Cell')].findIndex(c => c.matches('.jp-mod-active'))"
    )
    before = (cells.count(), page.evaluate(active))
    for inside in (player, player.locator("input"), player.locator("button").nth(1)):
        inside.focus()
        for key in ("ArrowDown", "ArrowUp", "b", "a", "x", "m", "j", "k", "Enter", "PageDown"):
            page.keyboard.press(key)
        page.keyboard.press("d")
        page.keyboard.press("d")
    page.wait_for_timeout(300)
    assert (cells.count(), page.evaluate(active)) == before, "a key reached JupyterLab"
    player.focus()
    page.keyboard.press("Escape")  # back to the cell: here keys are JupyterLab's again
    assert page.evaluate("!document.activeElement.closest('.mk-player')")
    page.keyboard.press("b")
    page.wait_for_timeout(300)
    assert cells.count() == before[0] + 1, "Escape did not lead back to the cell"
    page.keyboard.press("d")
    page.keyboard.press("d")
    page.wait_for_timeout(300)
    assert cells.count() == before[0]


def try_notebook(browser, folder, path, theme):
    name = f"{path.stem}-{theme.split()[1].lower()}"
    with Lab(folder, theme) as lab:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.on("dialog", lambda dialog: dialog.accept())
        open_notebook(page, lab, path.name)
        foreign = page.locator(".mk-player")
        foreign.first.wait_for(timeout=60_000)
        page.wait_for_timeout(2000)
        count = foreign.count()
        assert not page.locator(".mk-bar").count(), "scripts of somebody else ran"
        for index in range(count):
            image = foreign.nth(index).locator("img")
            assert image.count() == 1 and image.get_attribute("alt")
            assert image.evaluate("e => e.naturalWidth") > 100
        foreign.first.scroll_into_view_if_needed()
        page.screenshot(path=SHOTS / f"{name}-foreign.png")

        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.locator(".mk-bar").nth(count - 1).wait_for(timeout=600_000)
        idle = page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]')
        idle.wait_for(timeout=600_000)
        assert players_work(page, f"{name}-run") == count
        keys_stay_inside(page)
        page.locator(".mk-player").first.focus()
        page.keyboard.press("Control+s")
        page.wait_for_timeout(3000)
        page.close()

        for session in lab.api("sessions"):
            lab.api(f"sessions/{session['id']}", "DELETE")
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        open_notebook(page, lab, path.name)  # a new kernel, in which nothing has run
        page.locator(".mk-bar").nth(count - 1).wait_for(timeout=60_000)
        assert players_work(page, f"{name}-again") == count
        page.close()
    print(f"{name}: {count} players: foreign, run, and opened again", flush=True)
    return count


def try_export(browser, folder, path, theme, count):
    """Of the notebook that was just run and saved."""
    name = f"{path.stem}-{theme}-export"
    command = ["-m", "jupyter", "nbconvert", "--to", "html", f"--theme={theme}"]
    subprocess.run(
        [PYTHON, *command, path.name, "--output", name], cwd=folder, env=environment(folder),
        check=True,
    )  # fmt: skip
    assert "VBox(children" not in (folder / f"{name}.html").read_text("utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto((folder / f"{name}.html").as_uri(), wait_until="domcontentloaded")
    page.locator(".mk-bar").nth(count - 1).wait_for(timeout=60_000)
    assert players_work(page, name) == count
    page.close()
    print(f"{name}: {count} players", flush=True)


def main(paths):
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return "skipped: no Playwright in this Python, so no browser can be driven"
    if not Path(CHROMIUM).exists():
        return f"skipped: there is no browser at {CHROMIUM}"
    SHOTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for number, theme in enumerate(("JupyterLab Light", "JupyterLab Dark")):
            folder = Path(scratch, str(number))
            folder.mkdir()
            for path in paths:
                shutil.copy(path, folder)
            if not paths:
                small_notebook(folder)
            for path in sorted(folder.glob("*.ipynb")):
                count = try_notebook(browser, folder, path, theme)
                try_export(browser, folder, path, theme.split()[1].lower(), count)
        browser.close()
    return f"all players work; pictures in {SHOTS}"


if __name__ == "__main__":
    print(main([Path(path) for path in sys.argv[1:]]))
