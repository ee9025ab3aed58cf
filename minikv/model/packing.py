"""Linear layers whose weights lie in memory the way this CPU's matrix kernels read them.

A decode step multiplies a few rows by every weight of the model. In bf16, PyTorch's plain linear
streams weights at about a third of the memory's bandwidth for 1 to 32 rows; oneDNN, given the
weights in its own blocked order, comes close to all of it. transformers' modules stay as they
are, only their linears are swapped.
"""

import torch
from torch import nn

from minikv.model.threads import while_loading

MAX_ROWS = 512  # to tune and to test for: more rows take longer to try and change nothing


class PackedLinear(nn.Module):
    """y = x W^T + b in bf16, W in oneDNN's order. num_rows: the batch it is tuned for; others
    work as well. Holds the only copy of W unless the plain layer's weight is used elsewhere."""

    def __init__(self, linear: nn.Linear, num_rows: int):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
        self.bias = linear.bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


@while_loading()
def pack_linears(model, num_rows: int) -> int:
    """Swaps every plain bf16 nn.Linear on the CPU for a PackedLinear; returns how many.

    Each must first give what the plain layer gives, to bf16's rounding, on a random batch. Where
    the operations do not exist (they are PyTorch's internals) or differ, the layer stays as it is.
    """
    if not _can_pack():
        return 0
    num_rows = min(num_rows, MAX_ROWS)
    num_packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or not _is_plain_bf16(child.weight):
                continue
            packed = PackedLinear(child, num_rows)
            if _same(child, packed, num_rows):
                setattr(module, name, packed)
                num_packed += 1
    return num_packed


def _is_plain_bf16(weight) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _can_pack() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        layer = nn.Linear(8, 8, dtype=torch.bfloat16)
        PackedLinear(layer, 4)(torch.zeros(1, 4, 8, dtype=torch.bfloat16))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


@torch.no_grad()
def _same(linear, packed, num_rows) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, linear.in_features, generator=generator).bfloat16()
    expected, got = linear(x).float(), packed(x).float()
    # Both accumulate in fp32 in some order and round once: one unit of bf16 apart at most.
    return torch.allclose(got, expected, rtol=2**-7, atol=2**-7 * float(expected.abs().mean()))
