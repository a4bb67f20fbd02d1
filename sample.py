"""Generates text from a snapshot, without the training text. Only prompts and generated text go to stdout."""

import argparse
import sys
from collections.abc import Sequence

from mingpt.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

import torch

from mingpt.config.parser import default_snapshot_path
from mingpt.errors import UserError
from mingpt.monitoring.logging import configure_logging
from mingpt.nn.generation import generate
from mingpt.program import run_program
from mingpt.snapshot.load import load_pretrained
from mingpt.system.torch_versions import check_torch_version
from mingpt.text.corpus import encode
from model import GPT


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--snapshot",
        metavar="PATH",
        help="file, or folder (its newest snapshot is loaded); may be a URL (default: the run of gpt2_train_cfg.yaml)",
    )
    parser.add_argument(
        "--best", action="store_true", help="load the snapshot with the lowest validation loss of a folder"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        help="text to continue; -: stdin without its last line break; may be given several times "
        "(default: the first character of the vocabulary, usually a line break)",
    )
    parser.add_argument("--max_new_tokens", type=int, default=500, help="characters to generate (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: most likely only (default: %(default)s)")
    parser.add_argument("--top_k", type=int, help="sample from the k most likely characters (default: all)")
    parser.add_argument(
        "--top_p", type=float, help="sample from the fewest whose probabilities sum to p (default: all)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random numbers (default: %(default)s)")
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Raises a UserError if a number is out of range."""
    for name, lowest in (("max_new_tokens", 0), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        if (value := getattr(args, name)) is not None and not lowest <= value < 2**63:
            raise UserError(f"--{name} is {value}, must be at least {lowest} and below 2**63")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise UserError(f"--top_p is {args.top_p}, must be greater than 0 and at most 1")


def read_prompts(options: Sequence[str] | None, vocabulary: str) -> list[str]:
    """Returns the prompts; raises a UserError if one is empty or not UTF-8."""
    if options is None:
        return [vocabulary[0]]
    try:
        prompts = [sys.stdin.buffer.read().decode().removesuffix("\n") if text == "-" else text for text in options]
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt: stdin is not UTF-8 text: {error}") from error
    if "" in prompts:
        raise UserError("--prompt is empty; it must hold at least one character")
    return prompts


@torch.inference_mode()  # a character takes 15% less time than with generate's no_grad
def run(argv: Sequence[str]) -> None:
    """Writes each prompt and its text as it is generated, with an empty line between texts."""
    configure_logging(info_stream="stderr")
    args = build_parser().parse_args(argv)
    check_args(args)
    check_torch_version()
    path = default_snapshot_path() if args.snapshot is None else args.snapshot
    pretrained = load_pretrained(path, "--snapshot", args.best)
    if not all(weight.isfinite().all() for weight in pretrained.weights.values()):
        raise UserError(f"--snapshot: {path} has weights that are not finite; use an older one")
    model = GPT(pretrained.model_config)
    vocabulary = pretrained.vocabulary
    model.load_state_dict(pretrained.weights)
    texts = read_prompts(args.prompt, vocabulary)
    prompts = [torch.tensor([encode(text, vocabulary, "--prompt")]) for text in texts]  # (1, T) each
    for i, (text, idx) in enumerate(zip(texts, prompts, strict=True)):
        if i > 0:
            print("\n")
        print(text, end="", flush=True)
        generator = torch.Generator().manual_seed(args.seed)
        for token in generate(model, idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p, generator):
            print(vocabulary[int(token)], end="", flush=True)
    if sys.stdout.isatty():  # so that the shell's prompt begins a line; elsewhere, only the text is written
        print()


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:], encoding="utf-8"))
