"""`cpu.cpp` as a library: compiled on first use with this machine's compiler, tried, and kept.

It lies in the user's cache, under a name made of the source and of all that the compiler says about
itself and this CPU: a change of any of them compiles anew. Nothing here needs torch, so that a
fresh library can be tried in a process of its own: one that was compiled for another CPU ends that
process, not the engine.

`python -m minikv.model.kernels.native` compiles it now.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from minikv.model.fetch import ModelFetchError, cache_dir

SOURCE = Path(__file__).with_name("cpu.cpp")
COMPILERS = ("c++", "g++", "clang++")  # after the one that CXX names
# Never -ffast-math: it assumes that there are no infinities and NaN, and gcc before 13 then makes a
# library that switches the whole process to flushing small numbers to zero.
COMMON = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
VARIANTS = (  # the first that the compiler takes, and whose library computes rightly, is kept
    # gcc 12 takes a Zen 5 for a Zen 3, for which vectors of 256 bits were best.
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-march=native", "-fopenmp-simd"),  # Apple's clang has no OpenMP: one thread
    ("-fopenmp",),
    ("-fopenmp-simd",),
    (),
)
SECONDS = 300  # it takes four, but machines may be busy


class CannotCompile(RuntimeError):
    """There is no library to be had; the message says why."""


class Shape(ctypes.Structure):
    """Of one layer's call; the fields are cpu.cpp's."""

    _fields_ = (
        ("num_kv_heads", ctypes.c_int64),
        ("per_kv", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("pool_blocks", ctypes.c_int64),
        ("query_token_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class Step(ctypes.Structure):
    """Of one step, for all layers."""

    _fields_ = (
        ("block_tables", ctypes.c_void_p),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("first_visible", ctypes.c_void_p),
        ("num_seqs", ctypes.c_int64),
        ("max_blocks", ctypes.c_int64),
    )


def wanted() -> bool:
    return os.environ.get("MINIKV_CPU_KERNELS") != "0"


def load():
    """The library, compiled first if need be. Raises CannotCompile."""
    try:
        return _open(compiled())
    except ModelFetchError as error:  # MINIKV_CACHE is no folder
        raise CannotCompile(str(error)) from error
    except (OSError, NotImplementedError) as error:  # the latter: a disk without locks
        raise CannotCompile(f"the cache does not take or give the library: {error}") from error


def compiled() -> Path:
    """The library's file. One process compiles, others wait for it; the file appears by a rename,
    so that no reader sees half of it. Raises CannotCompile, OSError and ModelFetchError."""
    compiler = _compiler()
    folder = cache_dir() / "kernels"
    path = folder / f"cpu-{_key(compiler)}.so"
    if not _is_whole(path):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "compile.lock"):
            if not _is_whole(path):  # whoever held the lock may have just made it
                _compile(compiler, path)
    return path


def _is_whole(path) -> bool:
    """Whether the library is as it was made: to load a damaged one ends the process."""
    try:
        return _digest(path) == _digest_file(path).read_text()
    except OSError:
        return False


def _digest(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_file(path) -> Path:
    return path.with_suffix(".sha256")


def _compiler() -> list[str]:
    """The command, as CXX may hold options, too."""
    if sys.platform == "win32":
        raise CannotCompile("the kernel is not made for Windows")
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise CannotCompile(f"CXX is {os.environ['CXX']!r}: {error}") from error
    if named:
        if shutil.which(named[0]) is None:
            raise CannotCompile(f"CXX is {os.environ['CXX']!r}, and there is no such program")
        return named
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise CannotCompile(f"there is no C++ compiler ({', '.join(COMPILERS)}, or one named by CXX)")


def _key(compiler) -> str:
    """All macros that the compiler predefines for this machine: its version, and what the CPU
    has."""
    macros = ["-dM", "-E", "-x", "c++", os.devnull]
    said = _run([*compiler, "-march=native", *macros])
    if said.returncode != 0:
        said = _run([*compiler, *macros])
    parts = (SOURCE.read_text(encoding="utf-8"), repr((compiler, COMMON, VARIANTS)), said.stdout)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _compile(compiler, path):
    print(
        f"minikv: compiling its CPU kernel with {compiler[0]}; this happens once, and takes "
        "seconds",
        file=sys.stderr,
        flush=True,
    )
    reason = ""
    with tempfile.TemporaryDirectory(prefix="partial-", dir=path.parent) as work:
        made = Path(work) / "cpu.so"
        for variant in VARIANTS:
            said = _run([*compiler, *COMMON, *variant, str(SOURCE), "-o", str(made)])
            if said.returncode == 0:
                said = _run(
                    [sys.executable, "-m", "minikv.model.kernels.native", str(made)],
                    env=os.environ | {"PYTHONPATH": _python_path()},
                )
                if said.returncode == 0:
                    digest = Path(work) / "cpu.sha256"
                    digest.write_text(_digest(made))
                    os.replace(digest, _digest_file(path))
                    os.replace(made, path)
                    return
            reason = _first_complaint(said) or reason
    raise CannotCompile(f"{compiler[0]} made no working library of {SOURCE.name}: {reason}")


def _run(command, **options):
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=SECONDS, **options,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CannotCompile(f"{command[0]} took longer than {SECONDS} seconds") from error


def _python_path():
    """The package is importable in a child, however it was here."""
    here = str(Path(__file__).parents[3])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))


def _first_complaint(said) -> str:
    lines = [line.strip() for line in said.stderr.splitlines() if line.strip()]
    complaints = [line for line in lines if "error" in line.lower()]
    return (complaints or lines or [f"exit status {said.returncode}"])[0]


def _open(path):
    library = ctypes.CDLL(str(path))
    address = ctypes.c_void_p
    library.minikv_attend.argtypes = (
        *(ctypes.POINTER(Shape), ctypes.POINTER(Step), address, address, address),
        *(ctypes.c_int, ctypes.c_int),
    )
    library.minikv_attend.restype = None
    library.minikv_write_kv.argtypes = (*[address] * 4, *[ctypes.c_int64] * 7, ctypes.c_int)
    library.minikv_write_kv.restype = None
    return library


def try_out(path):
    """Two queries over three slots in scattered blocks: keys 0, so that weights are equal; values
    1, 2, 6. Raises CannotCompile where the answers aren't their means, 1.5 and 3."""
    head_dim, num_blocks, tables = 20, 4, (2, 0, 1)
    values = [0.0] * num_blocks * head_dim
    for block_id, value in zip(tables, (1.0, 2.0, 6.0), strict=True):
        values[block_id * head_dim : (block_id + 1) * head_dim] = [value] * head_dim

    def array(kind, numbers):
        return (kind * len(numbers))(*numbers)

    pool = array(ctypes.c_float, [0.0] * num_blocks * head_dim + values)
    query = array(ctypes.c_float, [1.0] * 2 * head_dim)
    out = array(ctypes.c_float, [0.0] * 2 * head_dim)
    ints = [array(ctypes.c_int32, numbers) for numbers in (tables, (0, 2), (3,))]
    step = Step(*(ctypes.addressof(numbers) for numbers in ints), None, 1, 3)
    shape = Shape(1, 1, head_dim, 1, num_blocks, head_dim, head_dim, 0, 1.0, 0.0)
    _open(path).minikv_attend(shape, step, query, pool, out, 0, 2)
    expected = [1.5] * head_dim + [3.0] * head_dim
    if any(abs(got - want) > 1e-5 for got, want in zip(out, expected, strict=True)):
        raise CannotCompile(f"error: it computes {out[0]} and {out[-1]} where 1.5 and 3 are right")


def main(argv) -> int:
    """Tries the library that is named, or makes this machine's."""
    try:
        if argv:
            try_out(argv[0])
        elif wanted():
            print(f"the CPU kernel is in {compiled()}")
    except (CannotCompile, ModelFetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
