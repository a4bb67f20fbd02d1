"""What has it learned? Text from a snapshot, on stdout and nothing else there; it needs no training text."""

from __future__ import annotations

import argparse
import os
import sys

import fsspec
import torch

from errors import UserError
from main import read_config
from model import GPT, GPTConfig
from snapshot import DamagedError, SnapshotFolder, read


def load(path: str | None) -> tuple[GPT, str]:
    """The model of a snapshot, and its vocabulary.

    Args:
        path: a file, or a folder of snapshots or run folder, of which the newest counts; None: the default run

    Raises:
        UserError: there is no whole snapshot.
    """
    if path is None:
        knobs = read_config().trainer
        path = knobs.snapshot_path or knobs.run_dir
    snapshot = None
    try:
        fs, name = fsspec.url_to_fs(path)
        if fs.isdir(name):
            for place in (f"{path.rstrip('/')}/snapshots", path):
                snapshot = snapshot or SnapshotFolder(place, keep=1).newest(lambda line: print(line, file=sys.stderr))
        else:
            snapshot = read(path)
    except DamagedError as error:
        raise UserError(f"--snapshot: {path} is damaged: {error}") from error
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"--snapshot: {path} can't be read: {error}") from error
    if snapshot is None:
        raise UserError(f"--snapshot: no snapshot at {path} (working directory {os.getcwd()}); main.py makes them")
    vocabulary, config = snapshot["vocabulary"], snapshot["config"]
    model = GPT(GPTConfig(**config["model"], vocab_size=len(vocabulary), block_size=config["data"]["block_size"]))
    model.load_state_dict(snapshot["model"])
    return model, vocabulary


def run() -> int:
    """Writes prompt and continuation; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshot", metavar="PATH", help="file, or folder of which the newest is taken; may be a URL")
    parser.add_argument(
        "--prompt", help="text to continue (default: the vocabulary's first character, mostly a line break)"
    )
    parser.add_argument("--max_new_tokens", type=int, default=500, help="characters to write (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top_k", type=int, help="choose among the k likeliest only (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="another one, another text (default: %(default)s)")
    args = parser.parse_args()
    try:
        for name, lowest in (("max_new_tokens", 0), ("temperature", 0), ("top_k", 1), ("seed", 0)):
            if (value := getattr(args, name)) is not None and not lowest <= value < 2**63:
                raise UserError(f"--{name} is {value}, must be at least {lowest} and below 2**63")
        model, vocabulary = load(args.snapshot)
        prompt = vocabulary[0] if args.prompt is None else args.prompt
        if not prompt:
            raise UserError("--prompt is empty; it must hold at least one character")
        if unknown := sorted(set(prompt) - set(vocabulary)):
            raise UserError(
                f"--prompt: {''.join(unknown)!r} not in the snapshot's vocabulary, which is {''.join(vocabulary)!r}"
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    idx = torch.tensor([[vocabulary.index(character) for character in prompt]])
    generator = torch.Generator().manual_seed(args.seed)
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        print(prompt, end="", flush=True)
        for new in model.stream(idx, args.max_new_tokens, args.temperature, args.top_k, generator):
            print(vocabulary[int(new)], end="", flush=True)
    except BrokenPipeError:  # whoever read it has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(run())
