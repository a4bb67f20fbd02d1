"""Imported by the tests' fork server, so that processes forked from it find caches filled."""

from mingpt.config import GPTConfig
from mingpt.config_parser import read_config
from mingpt.parallel.strategies import estimate_memory
from model import GPT

for dropout in (0.0, 0.1):
    model_config = GPTConfig(n_layer=2, n_head=2, n_embd=16, dropout=dropout, vocab_size=13, block_size=16)
    estimate_memory(read_config(), GPT(model_config), world_size=1, precision="fp32", device="cpu")
