"""Generates text from a snapshot, or computes its loss on a text. Nothing else goes to stdout."""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from mingpt.system.signals import start_program

if __name__ == "__main__":
    start_program()

import numpy as np
import torch
from tqdm import tqdm

from char_dataset import ValidationDataset
from mingpt.config.parser import default_snapshot_path
from mingpt.config.schema import DataConfig
from mingpt.errors import UserError
from mingpt.monitoring.logging import BAR_OPTIONS, configure_logging
from mingpt.nn.layers import IGNORE_INDEX
from mingpt.parallel.strategy import DTYPES
from mingpt.program import run_program
from mingpt.snapshot.load import Pretrained, load_pretrained
from mingpt.system.threads import choose_threads
from mingpt.system.torch_versions import check_torch
from mingpt.text.corpus import is_token_folder, open_folder
from mingpt.text.documents import Texts
from mingpt.text.files import find_files
from mingpt.text.prepare import encode_pieces
from mingpt.text.tokenizer import stream_text
from model import GPT

EVALUATION_BATCH = 16  # windows in a forward pass
SEPARATOR = "\n---------------\n"  # between samples


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--snapshot",
        metavar="PATH",
        help="snapshot, run folder (its newest snapshot), URL of one, or a folder of transformers; default: the run of "
        "gpt2_train_cfg.yaml",
    )
    parser.add_argument("--best", action="store_true", help="the snapshot with the lowest validation loss of a folder")
    parser.add_argument("--prompt", help="text to continue; default: the end of a document, or the first character")
    parser.add_argument("--num_samples", type=int, default=1, help="texts to generate")
    parser.add_argument("--max_new_tokens", type=int, default=500, help="tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: only the most likely token")
    parser.add_argument("--top_k", type=int, help="sample from the k most likely tokens")
    parser.add_argument("--top_p", type=float, help="sample from the fewest tokens whose probabilities sum to p")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random numbers")
    parser.add_argument("--ignore_end", action="store_true", help="generate other documents after the end of one")
    parser.add_argument(
        "--evaluate",
        metavar="TEXT",
        help="print the loss on a text, or on val.bin of a folder, instead",
    )
    parser.add_argument("--field", default="text", help="field of JSON lines and rows of --evaluate")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Raises a UserError if a number is out of range, or there is no GPU."""
    for name, lowest in (("num_samples", 1), ("max_new_tokens", 0), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        if (value := getattr(args, name)) is not None and not value >= lowest:
            raise UserError(f"--{name} is {value}, must be at least {lowest}")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise UserError(f"--top_p is {args.top_p}, must be greater than 0 and at most 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, but PyTorch sees no CUDA GPU here; set it to cpu")


def read_tokens(pretrained: Pretrained, path: str, field: str) -> tuple[np.ndarray, float]:
    """Returns the tokens of a text or of a folder's validation part, and its length in UTF-8.

    Raises:
        UserError: it can't be read, or it has other tokens than the model.
    """
    tokenizer = pretrained.tokenizer
    if is_token_folder(path):
        corpus = open_folder(Path(path), DataConfig(block_size=1))
        if corpus.tokenizer.vocabulary != tokenizer.vocabulary:
            raise UserError(f"--evaluate: {path} has the tokens of another tokenizer than the snapshot; name its text")
        return corpus.validation, corpus.validation_bytes
    texts = Texts(find_files(path, "--evaluate"), "--evaluate", field)
    encoded = list(encode_pieces(texts.pieces(), tokenizer, texts.key))
    length = sum(len(tokens) for _, tokens in encoded)
    if length < 2:
        raise UserError(f"--evaluate: the text has {length} tokens, but needs 2, since the second is a target")
    return np.concatenate([tokens for _, tokens in encoded]), sum(len(piece.encode()) for piece, _ in encoded)


def evaluate(pretrained: Pretrained, model: GPT, tokens: np.ndarray, num_bytes: float, device: str) -> str:
    """Returns the mean loss over all windows of a text, in the run's precision, like an evaluation of main.py."""
    data = ValidationDataset(tokens, model.config.block_size)
    dtype = DTYPES[pretrained.snapshot.get("choices", {}).get("precision", "fp32")]  # transformers' weights have none
    total, count = 0.0, 0
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        for start in tqdm(range(0, len(data), EVALUATION_BATCH), desc="evaluating", **BAR_OPTIONS):
            idx, targets = data[range(start, start + EVALUATION_BATCH)]
            number = int((targets != IGNORE_INDEX).sum())
            total += model.eval()(idx.to(device), targets.to(device))[1].item() * number
            count += number
    nats = total / count
    bits = nats / math.log(2) * len(tokens) / num_bytes
    return f"{nats:.4f} nats per token, {bits:.4f} bits per byte, {len(tokens):,} tokens"


@torch.inference_mode()
def run(argv: Sequence[str]) -> None:
    """Writes the prompt, then each token when it is generated; or the loss on a text."""
    configure_logging(info_stream="stderr")
    args = build_parser().parse_args(argv)
    check_args(args)
    check_torch()
    pretrained = load_pretrained(args.snapshot or default_snapshot_path(), "--snapshot", args.best)
    threads, _ = choose_threads("auto", 1, None)  # with more than idle cores, they wait for each other at each token
    torch.set_num_threads(threads)
    model = pretrained.build_model().to(args.device)
    if args.evaluate is not None:
        print(evaluate(pretrained, model, *read_tokens(pretrained, args.evaluate, args.field), args.device))
        return
    tokenizer = pretrained.tokenizer
    prompt = tokenizer.default_prompt if args.prompt is None else args.prompt
    prompt_tokens = tokenizer.encode(prompt, "--prompt").tolist()
    if not prompt_tokens:
        raise UserError(f"--prompt {prompt!r} has no tokens; give another one")
    end = None
    if tokenizer.end_of_text and not args.ignore_end:
        end = tokenizer.vocabulary.index(tokenizer.end_of_text)
    idx = torch.tensor([prompt_tokens], device=args.device)  # (1, T)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    for number in range(args.num_samples):
        print(SEPARATOR if number > 0 else "", prompt, sep="", end="", flush=True)
        tokens = model.generate(idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p, generator)
        for text in stream_text(tokenizer, prompt_tokens, takewhile(lambda token: token != end, map(int, tokens))):
            print(text, end="", flush=True)
    if sys.stdout.isatty():  # so that the shell's prompt starts on a new line
        print()


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:], encoding="utf-8"))
