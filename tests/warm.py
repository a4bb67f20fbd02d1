"""What processes that tests fork find done: a reader of yaml, and the memory that small models need, on paper."""

from __future__ import annotations

from mingpt.config import GPTConfig
from mingpt.config_parser import read_config
from mingpt.parallel.memory import estimate_memory

for dropout in (0.0, 0.1):
    shape = GPTConfig(n_layer=2, n_head=2, n_embd=16, dropout=dropout, vocab_size=13, block_size=16)
    estimate_memory(read_config(), shape, ranks=1, precision="fp32", device="cpu")
