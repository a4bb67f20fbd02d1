"""What ranks exchange: plain data and tensors, and nothing that could run code."""

import json
import math
import pickle
from typing import Any, NamedTuple

import pytest
import torch

from mingpt.distributed.plain_data import DTYPES, decode, encode


class Pair(NamedTuple):
    """A tuple with names."""

    first: int
    second: Any


@pytest.mark.parametrize(
    ("value", "decoded"),
    [
        (None, None),
        (True, True),
        ([1, -(2**70), 0.1, "ü\ud800\n", ""], [1, -(2**70), 0.1, "ü\ud800\n", ""]),
        ((1, (2,)), [1, [2]]),
        (Pair(1, {"a": ()}), [1, {"a": []}]),
        ({"dict": {"tensor": 1, "dtype": 2, "shape": 3}}, {"dict": {"tensor": 1, "dtype": 2, "shape": 3}}),
        ([math.inf, -math.inf, 5e-324], [math.inf, -math.inf, 5e-324]),
    ],
)
def test_plain_data_stays_the_same(value: Any, decoded: Any) -> None:
    assert decode(encode(value)) == decoded


def test_tensors_keep_their_bits() -> None:
    assert math.isnan(decode(encode(math.nan)))
    for dtype in DTYPES.values():
        for shape in ((), (0,), (2, 3), (2, 0, 3)):
            tensor = torch.randint(0, 2, shape).to(dtype)
            result, like = decode(encode([tensor, tensor.to("meta")]))
            assert result.dtype == like.dtype == dtype
            assert result.shape == like.shape == shape
            assert like.is_meta
            assert torch.equal(result, tensor)
    special = torch.tensor([math.nan, -0.0, math.inf, 1e-45]).view(2, 2).t()  # not contiguous
    assert torch.equal(decode(encode(special)).view(torch.int32), special.contiguous().view(torch.int32))


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {"a": {1}}, b"x", torch.float32, torch.zeros(1, dtype=torch.cfloat)]
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="is no plain data"):
        encode(value)


def tensor(content: Any, dtype: Any, shape: Any) -> bytes:
    return json.dumps({"tensor": content, "dtype": dtype, "shape": shape}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        pickle.dumps(1),
        b"{}",
        b'{"dict": 1}',
        b'{"dict": {}, "x": 1}',
        b"[" * 100_000,
        b"1" * 10_000,
        tensor("AAAA", "float32", [1]),  # three bytes
        tensor("AAAAAA==", "float32", [2]),
        tensor("AAAAAA==", "float32", [-1, -1]),
        tensor("AAAAAA==", "float32", [1.0]),
        tensor("AAAAAA==", "float32", [True]),
        tensor("AAAAAA==", "float32", 1),
        tensor("AAA", "float32", [1]),
        tensor("*", "uint8", [0]),
        tensor(1, "float32", [1]),
        tensor("AAAAAA==", "qint8", [1]),
        tensor("AAAAAA==", ["float32"], [1]),
        tensor(None, "float32", [2**60]),
        tensor(None, "float32", [2**40, 2**40]),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="what is no plain data"):
        decode(data)
