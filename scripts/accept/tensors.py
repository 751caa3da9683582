"""safetensors files, read and written without any library, and hashes of them."""
import hashlib
import json
import os
import struct

import numpy as np


def read(path):
    """{name: float32 array} of an F32, F16 or BF16 file."""
    blob = open(path, "rb").read()
    (n,) = struct.unpack("<Q", blob[:8])
    out = {}
    for name, t in json.loads(blob[8:8 + n]).items():
        if name != "__metadata__":
            a, b = t["data_offsets"]
            raw = np.frombuffer(blob[8 + n + a:8 + n + b], {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[t["dtype"]])
            wide = (raw.astype(np.uint32) << 16).view(np.float32) if t["dtype"] == "BF16" else raw.astype(np.float32)
            out[name] = wide.reshape(t["shape"])
    return out


def read_folder(folder):
    """The tensors of a Hugging Face folder, in one file or in shards."""
    index = os.path.join(folder, "model.safetensors.index.json")
    files = ["model.safetensors"]
    if os.path.exists(index):
        files = sorted(set(json.load(open(index))["weight_map"].values()))
    out = {}
    for name in files:
        out.update(read(os.path.join(folder, name)))
    return out


def round_to(array, dtype):
    """float32 values rounded to nearest even in F16 or BF16, as float32."""
    if dtype == "F16":
        return array.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000).astype(np.uint32).view(np.float32)


def write(path, tensors, dtype="F32"):
    """{name: float32 array} as a safetensors file."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        if dtype == "F32":
            raw = array.astype("<f4").tobytes()
        elif dtype == "F16":
            raw = array.astype("<f2").tobytes()
        else:
            raw = (round_to(array, dtype).view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def relative_norm(found, expected, adam):
    """Largest relative norm of the difference over all tensors; under Adam without the key third of c_attn.bias, whose
    true gradient is zero."""
    worst = 0.0
    for name, want in expected.items():
        have = found[name[len("transformer."):] if name.startswith("transformer.") else name].astype(np.float64)
        want = want.astype(np.float64)
        if adam and name.endswith("attn.c_attn.bias"):
            third = len(want) // 3
            keep = np.r_[0:third, 2 * third:3 * third]
            have, want = have[keep], want[keep]
        diff = np.linalg.norm(have - want) / max(np.linalg.norm(want), 1e-30)
        worst = max(worst, diff) if np.isfinite(diff) else float("nan")
    return worst


def digest(path):
    """Of the tensors' names, shapes and bits."""
    h = hashlib.sha256()
    for name, t in sorted(read(path).items()):
        h.update(name.encode() + str(t.shape).encode() + t.tobytes())
    return h.hexdigest()[:16]
