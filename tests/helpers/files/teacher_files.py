"""Files of a teacher's head, written as the format of safetensors says."""

import json
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


def write_head(path: Path, weight: Tensor, name: str = "weight", **entry: object) -> None:
    """One tensor after another that nobody asks for; `entry` changes what the header says of it."""
    other, content = bytes(12), weight.contiguous().view(torch.uint8).numpy().tobytes()
    places = [0, len(other)], [len(other), len(other) + len(content)]
    header = {
        "__metadata__": {"format": "pt"},
        "model.norm.weight": {"dtype": "F32", "shape": [3], "data_offsets": places[0]},
        name: {"dtype": DTYPES[weight.dtype], "shape": [*weight.shape], "data_offsets": places[1]} | entry,
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + other + content)
