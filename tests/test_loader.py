"""Loading models, and the one-time fetch of the default one with everything that can go wrong."""

import json
import socket
import sys
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minikv.model import loader, tiny
from minikv.model.loader import load, spec_from_config

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


@pytest.mark.parametrize("field, value", [
    ("num_hidden_layers", 0), ("max_position_embeddings", 0), ("max_position_embeddings", -1),
    ("vocab_size", 0), ("num_hidden_layers", 2.5),
])  # fmt: skip
def test_a_number_that_no_model_has_is_named(field, value):
    config = transformers.LlamaConfig(**LLAMA)
    object.__setattr__(config, field, value)
    with pytest.raises(ValueError, match=f"LlamaConfig of model 'x' .* {field} is {value}, but"):
        spec_from_config(config, name="x", num_parameters=1, dtype="float32")


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
    monkeypatch.setattr(loader, "_why_hub_is_silent", lambda: None)
    with pytest.raises(ValueError, match=r"'some/model' is not a folder.*no such model") as caught:
        load("some/model")
    assert "advice" not in str(caught.value)


def test_without_a_network_the_hub_is_not_asked_again_and_again(monkeypatch, capfd):
    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"'some/model' is not.*does not answer.*no earlier down"):
        load("some/model")
    assert time.perf_counter() - start < 5
    assert "Retrying" not in capfd.readouterr().err


def test_without_a_network_an_earlier_download_is_taken(monkeypatch):
    def stored(name, *, local_files_only, **options):
        assert local_files_only
        model = tiny.tiny_model()
        told = {"missing_keys": set(), "mismatched_keys": set()}
        return (model, told) if "output_loading_info" in options else tiny.tiny_tokenizer()

    monkeypatch.setattr(loader, "_why_hub_is_silent", lambda: "no network")
    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", stored)
    monkeypatch.setattr(loader.AutoTokenizer, "from_pretrained", stored)
    assert load("some/model").spec.name == "some/model"


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


def drop_weight(folder, name):
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("damage, message", [
    (lambda f: drop_weight(f, "model.layers.0.self_attn.q_proj.weight"),
     r"it lacks model\.layers\.0\.self_attn\.q_proj\.weight$"),
    (lambda f: set_config(f, num_hidden_layers=6), r"lacks model\.layers\.4\..* \(and 17 more\)"),
    (lambda f: drop_weight(f, "lm_head.weight"), "it lacks lm_head.weight"),
    (lambda f: set_config(f, intermediate_size=256),
     r"its model\.layers\.0\..* is \[128, 384\], but by the configuration \[128, 256\] \(and 11"),
])  # fmt: skip
def test_a_folder_without_all_weights_is_refused(tmp_path, capfd, damage, message):
    """They would stay random."""
    tiny.tiny_model().save_pretrained(tmp_path)
    damage(tmp_path)
    verbosity = transformers.logging.get_verbosity()
    with pytest.raises(ValueError, match=f"cannot load the folder '{tmp_path}': .*{message}"):
        load(tmp_path)
    assert transformers.logging.get_verbosity() == verbosity
    assert "LOAD REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_what_transformers_saved_lacks_nothing(tmp_path, config):
    """Tied weights are stored once, and buffers not at all."""
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loader._load_folder(tmp_path, torch.float32)


@pytest.mark.parametrize("content, reason", [("{}", "KeyError 'added_tokens'"), ("{", "Expecting")])
def test_a_damaged_tokenizer_is_named(tmp_path, content, reason):
    tiny.tiny_model().save_pretrained(tmp_path)
    tiny.tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=f"its tokenizer.json or tokenizer_config.json: {reason}"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model"])
def test_a_sentencepiece_model_alone_names_what_is_missing(tmp_path, name, monkeypatch):
    """As Llama 2 and Mistral 7B v0.1 came first; transformers would ask for tiktoken."""
    monkeypatch.setattr(transformers.utils, "is_protobuf_available", lambda: False)
    tiny.tiny_model().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(ValueError, match=f"its {name}: .*SentencePiece.*tokenizer.json.*pip") as e:
        load(tmp_path)
    assert "tiktoken" not in str(e.value)
    (tmp_path / name).write_bytes(b"IQ== 0\nIg== 1\n")  # tiktoken's, as Llama 3 came first
    with pytest.raises(ValueError, match=f"its {name}: ") as e:
        load(tmp_path)
    assert "SentencePiece" not in str(e.value)


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
