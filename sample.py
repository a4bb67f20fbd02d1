"""Generates text from a snapshot. Only prompts and text are written to stdout. The training text is not needed."""

import argparse
import sys
from collections.abc import Sequence

import torch

from mingpt.config.parser import default_snapshot_path
from mingpt.errors import UserError
from mingpt.monitoring.logging import configure_logging
from mingpt.nn.generation import NO_TOKEN, generate
from mingpt.program import run_program
from mingpt.snapshot.load import load_pretrained
from mingpt.system.torch_versions import check_torch_version
from mingpt.text.corpus import encode
from model import GPT

LOWEST = 1e-3  # of temperatures other than 0 and of top_p, where either hardly differs from the most likely character


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--snapshot",
        metavar="PATH",
        default=default_snapshot_path(),
        help="file, or folder (its newest snapshot is loaded); may be a URL (default: %(default)s)",
    )
    parser.add_argument("--best", action="store_true", help="of a folder, load the snapshot of lowest validation loss")
    parser.add_argument(
        "--prompt",
        action="append",
        help="text to continue; -: stdin, without its last line break; may be given several times "
        "(default: the vocabulary's first character, usually a line break)",
    )
    parser.add_argument("--max_new_tokens", type=int, default=500, help="characters to generate (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: most likely only (default: %(default)s)")
    parser.add_argument("--top_k", type=int, help="sample from the k most likely characters (default: all)")
    parser.add_argument("--top_p", type=float, help="sample from the fewest with probabilities of sum p (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default: %(default)s)")
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Raises a UserError if a number is out of range."""
    for name, lowest in (("max_new_tokens", 0), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        if (value := getattr(args, name)) is not None and not lowest <= value < 2**63:
            raise UserError(f"--{name} is {value}, must be at least {lowest} and below 2**63")
    # Below, logits would overflow, and no character would be left.
    if 0 < args.temperature < LOWEST:
        raise UserError(f"--temperature is {args.temperature}, must be 0 or at least {LOWEST}")
    if args.top_p is not None and not LOWEST <= args.top_p <= 1:
        raise UserError(f"--top_p is {args.top_p}, must be at least {LOWEST} and at most 1")


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
    """Writes one prompt's text as it is generated; those of several when all are complete, with empty lines between."""
    configure_logging(info_stream="stderr")
    args = build_parser().parse_args(argv)
    check_args(args)
    check_torch_version()
    pretrained = load_pretrained(args.snapshot, "--snapshot", args.best)
    if not all(weight.isfinite().all() for weight in pretrained.weights.values()):
        raise UserError(f"--snapshot: {args.snapshot} has weights that are not finite; take an older one")
    model = GPT(pretrained.model_config)
    vocabulary = pretrained.vocabulary
    model.load_state_dict(pretrained.weights)
    texts = read_prompts(args.prompt, vocabulary)
    prompts = [torch.tensor(encode(text, vocabulary, "--prompt")) for text in texts]
    generator = torch.Generator().manual_seed(args.seed)
    steps = generate(model, prompts, args.max_new_tokens, args.temperature, args.top_k, args.top_p, generator)
    if len(texts) == 1:
        print(texts[0], end="", flush=True)
        for tokens in steps:
            print(vocabulary[int(tokens)], end="", flush=True)
        if sys.stdout.isatty():  # the shell's prompt begins a line; elsewhere there is nothing but the text
            print()
        return
    for tokens in steps:
        for i, token in enumerate(tokens.tolist()):
            texts[i] += vocabulary[token] if token != NO_TOKEN else ""
    print("\n\n".join(texts))


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:], encoding="utf-8"))
