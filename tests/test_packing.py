"""Packed linears give what the plain ones give; where they cannot, nothing is swapped."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from minikv.model import packing
from minikv.model.packing import PackedLinear, pack_linears
from minikv.model.tiny import tiny_config, tiny_model

can_pack = packing._can_pack()  # False on Macs and where PyTorch lacks oneDNN


def linears(model, kind=nn.Linear):
    return [module for module in model.modules() if type(module) is kind]


def tied_model():
    model = tiny_model(dtype=torch.bfloat16)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


@pytest.mark.parametrize("num_rows", [1, 4, 16, 32])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_equals_plain_within_bf16(num_rows, bias):
    if not can_pack:
        assert pack_linears(nn.Sequential(nn.Linear(64, 96, bias=bias).bfloat16()), num_rows) == 0
        return
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, bias=bias).bfloat16().requires_grad_(False)
    packed = PackedLinear(plain, num_rows)
    for rows in (1, num_rows, 100):  # any batch, not only the one that it is tuned for
        x = torch.randn(1, rows, 64).bfloat16()
        expected, got = plain(x).float(), packed(x).float()
        assert got.shape == expected.shape
        assert (got - expected).norm() <= 2**-8 * expected.norm()
        exact = nn.functional.linear(x.double(), plain.weight.double(), None)
        exact += 0 if plain.bias is None else plain.bias.double()
        assert (got - exact).norm() <= 2**-8 * exact.norm()


def test_all_linears_of_a_bf16_model_are_packed_and_its_logits_stay():
    model, tokens = tiny_model(dtype=torch.bfloat16), torch.arange(3, 40)[None]
    expected, num_linears = model(tokens).logits.float(), len(linears(model))
    assert pack_linears(model, num_rows=16) == (num_linears if can_pack else 0)
    assert len(linears(model, PackedLinear)) == (num_linears if can_pack else 0)
    got = model(tokens).logits.float()
    assert (got - expected).norm() < 0.05 * expected.norm()


def test_a_huge_batch_is_not_tried_whole(monkeypatch):
    """num_rows only tunes the packing: 10**7 random rows would take 10 GB."""
    tried, same = [], packing._same
    monkeypatch.setattr(
        packing, "_same", lambda a, b, num_rows: tried.append(num_rows) or same(a, b, num_rows)
    )
    model = tiny_model(dtype=torch.bfloat16)
    assert pack_linears(model, num_rows=10**7) == (4 * 7 + 1 if can_pack else 0)
    assert set(tried) == ({packing.MAX_ROWS} if can_pack else set())


def test_packing_twice_packs_nothing_more():
    model = tiny_model(dtype=torch.bfloat16)
    pack_linears(model, num_rows=16)
    assert pack_linears(model, num_rows=4) == 0


def test_a_tied_head_is_packed_and_the_embedding_stays():
    model, tokens = tied_model(), torch.arange(3, 40)[None]
    expected, embedding = model(tokens).logits.float(), model.model.embed_tokens.weight.clone()
    pack_linears(model, num_rows=16)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert type(model.lm_head) is (PackedLinear if can_pack else nn.Linear)
    got = model(tokens).logits.float()
    assert (got - expected).norm() < 0.05 * expected.norm()


def test_float32_is_left_alone():
    model = tiny_model()
    assert pack_linears(model, num_rows=16) == 0
    assert not linears(model, PackedLinear)


def test_gpt2s_conv1d_is_left_alone():
    config = GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    model = GPT2LMHeadModel(config).bfloat16().eval()
    num_conv1d = len(linears(model, Conv1D))
    assert pack_linears(model, num_rows=4) == (1 if can_pack else 0)  # the head
    assert len(linears(model, Conv1D)) == num_conv1d > 0


def test_a_subclass_of_linear_is_left_alone():
    """What it adds, if only a name, would be lost."""

    class Mine(nn.Linear):
        pass

    model = nn.Sequential(Mine(8, 8).bfloat16())
    assert pack_linears(model, num_rows=4) == 0


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, NotImplementedError])
def test_without_the_operations_nothing_is_swapped(monkeypatch, error):
    def missing(*args, **kwargs):
        raise error("no such operation")

    monkeypatch.setattr(packing.PackedLinear, "__init__", missing)
    model = tiny_model(dtype=torch.bfloat16)
    assert pack_linears(model, num_rows=16) == 0
    assert len(linears(model)) == 4 * 7 + 1


def test_without_onednn_nothing_is_swapped(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pack_linears(tiny_model(dtype=torch.bfloat16), num_rows=16) == 0


def test_a_layer_that_differs_when_packed_stays_plain(monkeypatch):
    """As on a machine whose kernel is wrong for one shape."""
    forward = PackedLinear.forward

    def wrong_for_some(self, x):
        return forward(self, x) * (1.1 if self.out_features == 384 else 1)

    monkeypatch.setattr(PackedLinear, "forward", wrong_for_some)
    model = tiny_model(dtype=torch.bfloat16)
    pack_linears(model, num_rows=16)
    plain = linears(model)
    assert len(plain) == (2 * tiny_config().num_hidden_layers if can_pack else 4 * 7 + 1)
    assert not can_pack or {layer.out_features for layer in plain} == {384}
