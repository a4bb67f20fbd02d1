"""Trains nanoGPT's model like its train.py, with the text, the sizes and the length of a run of main.py.

    python -m benchmarks.nanogpt FOLDER [options of main.py]

FOLDER contains nanoGPT's model.py. The precision is nanoGPT's default: fp32 on a CPU, and bf16, compiled, on a GPU.
"""

import json
import runpy
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from mingpt.config.parser import read_config
from mingpt.config.schema import GPTConfig
from mingpt.system.threads import choose_threads
from mingpt.text.corpus import read_corpus
from mingpt.text.tokenizer import TextTokenizer


def main(folder: str, *options: str) -> None:
    config = read_config(options)
    cfg = config.trainer
    T = config.data.block_size
    threads, _ = choose_threads(cfg.threads, 1, None)
    torch.set_num_threads(threads)
    corpus = read_corpus(config, TextTokenizer())
    data = np.array(corpus.training[:], dtype=np.uint16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nanogpt = runpy.run_path(f"{folder}/model.py")
    shape = GPTConfig(**asdict(config.model), vocab_size=corpus.tokenizer.vocab_size, block_size=T)
    model = nanogpt["GPT"](shape).to(device)  # the sizes have the same names
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device)
    autocast: Any = nullcontext()
    if device == "cuda":
        autocast = torch.autocast(device, torch.bfloat16)
        model.compile()
    assert cfg.max_steps is not None
    began = time.perf_counter()
    for step in range(cfg.max_steps):
        if step == cfg.max_steps // 2:
            began = time.perf_counter()
        ix = torch.randint(len(data) - T, (cfg.batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in ix]).to(device)
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in ix]).to(device)
        with autocast:
            _, loss = model(x, y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loss.item()  # waits for a GPU
    speed = cfg.max_steps // 2 * cfg.batch_size * T / (time.perf_counter() - began)
    row = {"event": "train", "step": cfg.max_steps, "tokens_per_second": speed}
    Path(cfg.run_dir, "metrics.jsonl").write_text(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
