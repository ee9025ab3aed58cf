"""The C++ kernel as a library: compiled once, tried before it is kept, and never in the way."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minikv.engine import LLM
from minikv.model.backends import choose_backend, why_not
from minikv.model.kernels import cpu, native
from minikv.request import SamplingParams

COMPILER = next(filter(None, map(shutil.which, native.COMPILERS)), None)
needs_compiler = pytest.mark.skipif(
    COMPILER is None or sys.platform == "win32", reason="no C++ compiler"
)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, and a process that has not tried yet; compiling is quick, the code slow."""
    monkeypatch.setenv("MINIKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "COMMON", (*native.COMMON, "-O0"))
    cpu._attempt.cache_clear()
    yield tmp_path
    cpu._attempt.cache_clear()


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """compiler(script): CXX is a shell script, whose "$@" are the compiler's arguments."""

    def use(script):
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return use


def backend_of(llm):
    outputs = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 2  # whatever runs, the engine answers
    return llm.attention_backend


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


# -- where there is a compiler --------------------------------------------------------------------


@needs_compiler
def test_with_a_compiler_the_engine_reads_k_and_v_in_place():
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_backend("cpu", dtype) == ("cpu", cpu.attend)
    assert backend_of(LLM("tiny")) == "cpu"


@needs_compiler
def test_it_is_compiled_once_and_announced_once(fresh, capsys):
    path = native.compiled()
    said = capsys.readouterr().err
    assert said.startswith("minikv: compiling its CPU kernel with") and said.count("\n") == 1
    left = ["compile.lock", path.with_suffix(".sha256").name, path.name]
    assert files_in(path.parent) == left  # nothing half-made
    before = path.stat()
    assert native.compiled() == path
    after = path.stat()  # but for the time of its last reading
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not capsys.readouterr().err


@needs_compiler
def test_another_source_compiler_or_flag_is_another_library(fresh, monkeypatch, compiler):
    keys = {native._key([COMPILER])}
    changed = fresh / "cpu.cpp"
    changed.write_text(native.SOURCE.read_text() + "// changed\n")
    with monkeypatch.context() as patch:
        patch.setattr(native, "SOURCE", changed)
        keys.add(native._key([COMPILER]))
    with monkeypatch.context() as patch:
        patch.setattr(native, "COMMON", ())
        keys.add(native._key([COMPILER]))
    # The same command after an upgrade, and on another CPU: it predefines other macros.
    path = compiler(f'"{COMPILER}" "$@"; echo "#define __VERSION__ $NEW"')
    for new in ("1", "2"):
        monkeypatch.setenv("NEW", new)
        keys.add(native._key([str(path)]))
    assert len(keys) == 5


@needs_compiler
def test_two_processes_at_once_compile_once(tmp_path, compiler):
    log = tmp_path / "log"
    script = compiler(f'case "$*" in *-shared*) echo x >> "{log}"; sleep 1;; esac\n'
                      f'exec "{COMPILER}" "$@" -O0')  # fmt: skip
    environment = os.environ | {"MINIKV_CACHE": str(tmp_path / "cache"), "CXX": str(script)}
    environment["PYTHONPATH"] = native._python_path()
    command = [sys.executable, "-m", "minikv.model.kernels.native"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, env=environment, **pipes) for _ in range(2)]
    said = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert said[0][0] == said[1][0] and Path(said[0][0].split(" is in ")[1].strip()).is_file()
    assert log.read_text() == "x\n"
    assert sorted(len(err.splitlines()) for _, err in said) == [0, 1]  # one says that it compiles


@needs_compiler
def test_a_compiler_without_openmp_gives_a_library_without_it(fresh, compiler):
    compiler(f"""for argument in "$@"; do
  if [ "$argument" = -fopenmp ]; then echo "error: unsupported option '-fopenmp'" >&2; exit 1; fi
done
exec "{COMPILER}" "$@" """)
    path = native.compiled()
    native.try_out(path)
    assert b"GOMP_parallel" not in path.read_bytes()


@needs_compiler
def test_the_library_leaves_small_numbers_alone():
    """Linked with -ffast-math it would set the process to flush them to zero."""
    cpu.library()
    assert float(torch.tensor(1e-40) * 0.5) > 0


# -- where something is missing, or wrong ---------------------------------------------------------


def fails_once(capsys, reason):
    """The engine runs on gather, and says the reason in one line, once."""
    for count in (1, 0):
        assert backend_of(LLM("tiny")) == "gather"
        said = [line for line in capsys.readouterr().err.splitlines() if "minikv: " in line]
        said = [line for line in said if "compiling" not in line]
        assert len(said) == count and all(reason in line for line in said), said
    with pytest.raises(ValueError, match="attention_backend 'cpu' cannot run here: ") as refusal:
        LLM("tiny", attention_backend="cpu")
    assert reason in str(refusal.value)


def test_without_a_compiler(fresh, monkeypatch, capsys):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    fails_once(capsys, "there is no C++ compiler (c++, g++, clang++, or one named by CXX)")


def test_a_compiler_that_is_not_there(fresh, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    fails_once(capsys, "CXX is 'no-such-compiler -m64', and there is no such program")


def test_a_compiler_whose_name_cannot_be_read(fresh, monkeypatch, capsys):
    monkeypatch.setenv("CXX", 'g++ "')
    fails_once(capsys, "No closing quotation")


def test_on_windows(fresh, monkeypatch, capsys):
    monkeypatch.setattr(native.sys, "platform", "win32")
    fails_once(capsys, "not made for Windows")


def test_a_compiler_that_fails(fresh, compiler, capsys):
    compiler("echo 'note: in file'; echo 'fatal error: cmath: No such file' >&2; exit 1")
    fails_once(capsys, "made no working library of cpu.cpp: fatal error: cmath: No such file")
    assert files_in(fresh / "cache" / "kernels") == ["compile.lock"]


WRONG = {  # a library's source -> what is said of it
    "nothing": ("{}", "it computes 0.0 and 0.0 where 1.5 and 3 are right"),
    "crash": ("{ __builtin_trap(); }", "exit status -4"),  # as an instruction this CPU lacks
    "no function": (None, "undefined symbol: minikv_attend"),
}


@needs_compiler
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signal numbers, loader's words")
@pytest.mark.parametrize("case", WRONG)
def test_a_library_that_does_not_work_is_not_kept(fresh, compiler, capsys, case):
    body, reason = WRONG[case]
    source = fresh / "wrong.cpp"
    functions = ("minikv_attend", "minikv_write_kv") if body else ()
    source.write_text("".join(f'extern "C" void {name}() {body}\n' for name in functions))
    # The source is the argument before -o; the macros are asked for without it.
    compiler(f"""case "$*" in *-shared*)
  for argument in "$@"; do last="$argument"; done
  exec "{COMPILER}" -shared -fPIC "{source}" -o "$last";; esac
exec "{COMPILER}" "$@" """)
    fails_once(capsys, reason)
    assert files_in(fresh / "cache" / "kernels") == ["compile.lock"]


def test_a_cache_that_takes_nothing(fresh, monkeypatch, capsys):
    file = fresh / "file"
    file.write_text("")
    monkeypatch.setenv("MINIKV_CACHE", str(file))
    monkeypatch.setattr(native, "_compiler", lambda: ["c++"])
    monkeypatch.setattr(native, "_key", lambda compiler: "key")
    fails_once(capsys, "the cache does not take or give the library")


@needs_compiler
@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_damaged_library_is_made_anew(fresh, capsys, size):
    path = native.compiled()
    whole = path.read_bytes()
    path.write_bytes(whole[:size])  # loaded, it would end the process
    cpu._attempt.cache_clear()
    capsys.readouterr()
    assert backend_of(LLM("tiny")) == "cpu"
    assert path.stat().st_size == len(whole) and "compiling" in capsys.readouterr().err
    path.with_suffix(".sha256").unlink()
    assert native.compiled() == path and "compiling" in capsys.readouterr().err


def test_a_library_without_its_functions_is_no_end(fresh, monkeypatch, capsys):
    path = fresh / "cpu.so"
    path.write_bytes(b"half a library")
    monkeypatch.setattr(native, "compiled", lambda: path)
    fails_once(capsys, "the cache does not take or give the library")


def test_it_can_be_turned_off(monkeypatch, capsys):
    monkeypatch.setenv("MINIKV_CPU_KERNELS", "0")
    assert backend_of(LLM("tiny")) == "gather"
    assert "minikv" not in capsys.readouterr().err  # whoever turned it off knows
    with pytest.raises(ValueError, match="cannot run here: MINIKV_CPU_KERNELS is 0"):
        LLM("tiny", attention_backend="cpu")


def test_what_it_does_not_compute_is_gathered():
    assert choose_backend("cpu", torch.float16)[0] == "gather"
    assert "takes float32 and bfloat16, not float16" in why_not("cpu", "cpu", torch.float16)
    assert "the model is on meta" in why_not("cpu", "meta", torch.float32)
