"""What has it learned? Text from a snapshot, on stdout and nothing else there; it needs no training text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from mingpt.config_parser import default_snapshot_path
from mingpt.generation import NO_TOKEN, generate
from mingpt.snapshot.pretrained import Pretrained, load_pretrained
from mingpt.utils.errors import UserError
from mingpt.utils.progress import run_script


def options() -> argparse.ArgumentParser:
    """What to write, and after which words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--snapshot",
        metavar="PATH",
        help="file, folder of which the newest is taken, or export.py's; may be a URL (default: the default run)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        help="text to continue; -: stdin, without its last line break; several are continued at once "
        "(default: the vocabulary's first character, mostly a line break)",
    )
    parser.add_argument("--max_new_tokens", type=int, default=500, help="characters to write (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top_k", type=int, help="choose among the k likeliest only (default: all)")
    parser.add_argument("--top_p", type=float, help="choose among the fewest whose chances add up to p (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="another one, another text (default: %(default)s)")
    return parser


def prompts_of(asked: Sequence[str] | None, vocabulary: str) -> list[str]:
    """The prompts, of characters that the model knows.

    Raises:
        UserError: one is empty, or holds a character that the model has never seen.
    """
    if asked is None:
        return [vocabulary[0]]
    try:
        prompts = [prompt if prompt != "-" else sys.stdin.buffer.read().decode().removesuffix("\n") for prompt in asked]
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt: stdin is not UTF-8 text: {error}") from error
    for prompt in prompts:
        if not prompt:
            raise UserError("--prompt is empty; it must hold at least one character")
        if unknown := sorted(set(prompt) - set(vocabulary)):
            raise UserError(
                f"--prompt: {''.join(unknown)!r} not in the snapshot's vocabulary, which is {''.join(vocabulary)!r}"
            )
    return prompts


def write(pretrained: Pretrained, prompts: Sequence[str], asked: argparse.Namespace) -> None:
    """Writes each prompt and its continuation: one as it comes, several when all are done, with empty lines between."""
    vocabulary = pretrained.vocabulary
    tokens = [torch.tensor([vocabulary.index(character) for character in prompt]) for prompt in prompts]
    generator = torch.Generator().manual_seed(asked.seed)
    news = generate(
        pretrained.model(), tokens, asked.max_new_tokens, asked.temperature, asked.top_k, asked.top_p, generator
    )
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        for new in news:
            print(vocabulary[int(new)], end="", flush=True)
        return
    texts = list(prompts)
    for new in news:
        texts = [text + (vocabulary[n] if n != NO_TOKEN else "") for text, n in zip(texts, new.tolist(), strict=True)]
    print("\n\n".join(texts))


def run(argv: Sequence[str]) -> None:
    """Writes prompts and continuations.

    Raises:
        UserError: the command line, or the snapshot that it names, is at fault.
    """
    asked = options().parse_args(argv)
    for name, lowest in (("max_new_tokens", 0), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        if (value := getattr(asked, name)) is not None and not lowest <= value < 2**63:
            raise UserError(f"--{name} is {value}, must be at least {lowest} and below 2**63")
    if asked.top_p is not None and not 0 < asked.top_p <= 1:
        raise UserError(f"--top_p is {asked.top_p}, must be above 0 and at most 1")
    path = asked.snapshot or default_snapshot_path()
    pretrained = load_pretrained(path, "--snapshot", lambda line: print(line, file=sys.stderr))
    if not all(weight.isfinite().all() for weight in pretrained.weights.values()):
        raise UserError(f"--snapshot: {path} has weights that are not finite; take an older one")
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    write(pretrained, prompts_of(asked.prompt, pretrained.vocabulary), asked)


if __name__ == "__main__":
    sys.exit(run_script(run))
