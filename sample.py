"""Generates text from a snapshot, or computes its loss on a text. Nothing else goes to stdout."""

import argparse
import sys
from collections.abc import Sequence

from mingpt.system.signals import start_program

if __name__ == "__main__":
    start_program()

import torch
from tqdm import tqdm

from char_dataset import ValidationDataset
from mingpt.config.parser import default_snapshot_path
from mingpt.errors import UserError
from mingpt.monitoring.logging import BAR_OPTIONS, configure_logging, logger
from mingpt.nn.layers import IGNORE_INDEX
from mingpt.program import run_program
from mingpt.snapshot.load import Pretrained, load_pretrained
from mingpt.system.threads import choose_threads
from mingpt.system.torch_versions import check_torch
from mingpt.text.corpus import bits_per_byte, read_text
from mingpt.text.tokenizer import stream_text
from model import GPT

# A GPU launches some 20 kernels per layer for each token, which takes longer than a small model on a CPU.
MIN_GPU_PARAMETERS = 20_000_000
EVALUATION_BATCH = 16  # windows in a forward pass
SEPARATOR = "\n---------------\n"  # between samples


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--snapshot",
        metavar="PATH",
        help="snapshot, or folder (loads its newest snapshot); may be a URL, or a folder of transformers "
        "(default: the run of gpt2_train_cfg.yaml)",
    )
    parser.add_argument(
        "--best", action="store_true", help="load the snapshot with the lowest validation loss of a folder"
    )
    parser.add_argument(
        "--prompt",
        help="text to continue; - reads stdin without its last line break "
        "(default: a line break, or the first character of the vocabulary)",
    )
    parser.add_argument("--num_samples", type=int, default=1, help="texts to generate (default: %(default)s)")
    parser.add_argument("--max_new_tokens", type=int, default=500, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: only the most likely (default: %(default)s)")
    parser.add_argument("--top_k", type=int, help="sample from the k most likely tokens (default: all)")
    parser.add_argument(
        "--top_p", type=float, help="sample from the fewest tokens whose probabilities sum to p (default: all)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random numbers (default: %(default)s)")
    parser.add_argument("--evaluate", metavar="TEXT", help="print the loss on a text instead: a file, a glob or a URL")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device (default: a GPU for large models)")
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Raises a UserError if a number is out of range or there is no GPU."""
    for name, lowest in (("num_samples", 1), ("max_new_tokens", 0), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        if (value := getattr(args, name)) is not None and not lowest <= value < 2**63:
            raise UserError(f"--{name} is {value}, must be at least {lowest} and below 2**63")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, but PyTorch sees no CUDA GPU here; leave it out, or set it to cpu")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise UserError(f"--top_p is {args.top_p}, must be greater than 0 and at most 1")


def read_prompt(option: str | None, default: str) -> str:
    """Returns the prompt; raises a UserError if it is empty or not UTF-8."""
    if option is None:
        return default
    prompt = option
    if option == "-":
        try:
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"--prompt: stdin is not UTF-8 text: {error}") from error
    if not prompt:
        raise UserError("--prompt is empty; it must hold at least one character")
    return prompt


def choose_device(num_parameters: int) -> str:
    """Returns cuda or cpu, and logs the choice if there is one."""
    if not torch.cuda.is_available():
        return "cpu"
    device = "cuda" if num_parameters >= MIN_GPU_PARAMETERS else "cpu"
    logger.info(f"{num_parameters:,} parameters: using {device}; --device sets another device")
    return device


def evaluate(pretrained: Pretrained, model: GPT, text: str, device: str) -> str:
    """Returns the mean loss over all windows of a text, in the run's precision, like an evaluation of main.py."""
    tokens = pretrained.tokenizer.encode(text, "--evaluate")
    if len(tokens) < 2:
        raise UserError(f"--evaluate: the text has {len(tokens)} token, but needs a second one as the first target")
    data = ValidationDataset(tokens, model.config.block_size)
    precision = pretrained.snapshot.get("choices", {}).get("precision")  # weights of transformers have none
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    model.eval()
    total = 0.0
    with torch.autocast(device, dtype, enabled=dtype is not None):
        for start in tqdm(range(0, len(data), EVALUATION_BATCH), desc="evaluating", **BAR_OPTIONS):
            idx, targets = data[range(start, min(start + EVALUATION_BATCH, len(data)))]
            _, loss = model(idx.to(device), targets.to(device))
            total += loss.item() * int((targets != IGNORE_INDEX).sum())
    nats = total / (len(tokens) - 1)
    bits = bits_per_byte(nats, len(tokens), len(text.encode()))
    return f"{nats:.4f} nats per token, {bits:.4f} bits per byte, {len(tokens):,} tokens"


@torch.inference_mode()  # a token takes 15% less time than with generate's no_grad
def run(argv: Sequence[str]) -> None:
    """Writes the prompt, then each token when it is generated; or the loss on a text."""
    configure_logging(info_stream="stderr")
    args = build_parser().parse_args(argv)
    check_args(args)
    check_torch()
    path = default_snapshot_path() if args.snapshot is None else args.snapshot
    pretrained = load_pretrained(path, "--snapshot", args.best)
    threads, _ = choose_threads("auto", 1, None)  # with more than idle cores, they wait for each other at each token
    torch.set_num_threads(threads)
    model = pretrained.build_model()
    device = args.device or choose_device(sum(parameter.numel() for parameter in model.parameters()))
    model.to(device)
    if args.evaluate is not None:
        print(evaluate(pretrained, model, read_text(args.evaluate, "--evaluate"), device))
        return
    tokenizer = pretrained.tokenizer
    prompt = read_prompt(args.prompt, tokenizer.default_prompt)
    prompt_tokens = tokenizer.encode(prompt, "--prompt").tolist()
    idx = torch.tensor([prompt_tokens], device=device)  # (1, T)
    generator = torch.Generator(device).manual_seed(args.seed)
    for number in range(args.num_samples):
        if number > 0:
            print(SEPARATOR, end="")
        print(prompt, end="", flush=True)
        tokens = model.generate(idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p, generator)
        for text in stream_text(tokenizer, prompt_tokens, map(int, tokens)):
            print(text, end="", flush=True)
    if sys.stdout.isatty():  # so that the shell's prompt starts on a new line
        print()


if __name__ == "__main__":
    sys.exit(run_program(run, sys.argv[1:], encoding="utf-8"))
