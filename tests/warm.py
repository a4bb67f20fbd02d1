"""What processes that tests fork find done: a reader of yaml, and the memory that small models need, on paper."""

from __future__ import annotations

from main import read_config
from memory import expected
from model import GPTConfig

for dropout in (0.0, 0.1):
    shape = GPTConfig(n_layer=2, n_head=2, n_embd=16, dropout=dropout, vocab_size=13, block_size=16)
    expected(read_config(), shape, ranks=1, precision="fp32", device="cpu")
