"""Plain data and tensors as bytes, for other ranks.

It is JSON, with the bytes of tensors in base64. PyTorch's own object collectives use pickle, with which whoever reaches
a rank's port could run code in it. Decoding creates nothing but None, bool, int, float, str, list, dict and tensors.
"""

import base64
import binascii
import json
import math
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
MAX_ELEMENTS = 1 << 48  # of a tensor; those on the meta device have no bytes that would limit them


def encode(value: Any) -> bytes:
    """Returns the bytes of plain data; tuples, named ones too, become lists.

    Raises:
        TypeError: it contains something else.
    """
    return json.dumps(_to_json(value)).encode()


def decode(data: bytes) -> Any:
    """Returns what `encode` was given, with tensors on the CPU or the meta device.

    Raises:
        ValueError: these are not the bytes of plain data.
    """
    try:
        return _from_json(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # JSON's and Unicode's are ValueErrors
        raise ValueError(f"what is no plain data: {type(error).__name__}: {error}, in {data[:40]!r}") from error


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _to_json(item) for key, item in value.items()}}
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        content = None if value.is_meta else base64.b64encode(_tensor_bytes(value)).decode()
        if name in DTYPES:
            return {"tensor": content, "dtype": name, "shape": list(value.shape)}
    raise TypeError(f"{type(value).__name__} is no plain data: {value!r:.100}")


def _tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dict"} and isinstance(value["dict"], dict):
        return {key: _from_json(item) for key, item in value["dict"].items()}
    if value.keys() == {"tensor", "dtype", "shape"}:
        return _decode_tensor(value["tensor"], DTYPES[value["dtype"]], value["shape"])
    raise ValueError(f"an object with the keys {sorted(value)}")


def _decode_tensor(content: str | None, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if not all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in shape):
        raise ValueError(f"a tensor of shape {shape}")
    count = math.prod(shape)
    if count > MAX_ELEMENTS:
        raise ValueError(f"a tensor of shape {shape}")
    if content is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    try:
        data = base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a tensor that is no base64: {error}") from None
    if len(data) != count * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a tensor of shape {shape} and dtype {dtype}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
