"""What does the person watching see? Lines or a bar, and metrics.jsonl for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from torch import nn
from tqdm import tqdm

from char_dataset import CharDataset
from corpus import Corpus
from errors import UserError

if TYPE_CHECKING:
    from main import Config


Say = Callable[[str], None]


def say(line: str) -> None:
    """Prints a line at once, above the bar where there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def complain(line: str) -> None:
    """Prints what is wrong to stderr at once, above the bar where there is one."""
    tqdm.write(f"error: {line}", file=sys.stderr)
    sys.stderr.flush()


def status_of(run: Callable[[Sequence[str]], None]) -> int:
    """Runs a program with its command line; exit status 0, or 2 with one message where the command line is at fault."""
    try:
        run(sys.argv[1:])
    except UserError as error:
        complain(str(error))
        return 2
    return 0


def nothing(line: str) -> None:
    """What the other ranks say."""


def summary(model: nn.Module) -> str:
    """The model's layers with their parameters, and the sum in parameters and bytes."""
    rows: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        layer = ".".join("*" if part.isdigit() else part for part in parts[:-1])
        rows.setdefault(layer, [0, 0])
        rows[layer][0] += parameter.numel()
        rows[layer][1] += parameter.numel() * parameter.element_size()
    rows["total"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [f"  {'layer':<28}{'parameters':>14}{'bytes':>16}"]
    lines += [f"  {layer:<28}{parameters:>14,}{size:>16,}" for layer, (parameters, size) in rows.items()]
    return "\n".join(lines)


def banner(
    config: Config,
    members: Sequence[str],
    backend: str,
    reasons: Mapping[str, str],
    corpus: Corpus,
    training: CharDataset,
    last_step: int,
) -> str:
    """Who trains what, where and how long.

    Args:
        config: all sections
        members: host and device of each rank
        backend: what carries gradients
        reasons: what the machine chose, and why
        corpus: the text
        training: its windows
        last_step: the step that training ends with
    """
    knobs, T = config.trainer, config.data.block_size
    epochs = last_step * knobs.batch_size / len(training)
    ranks = [f"GLOBAL_RANK: {i}, MEMBER: {i + 1}/{len(members)}  {member}" for i, member in enumerate(members)]
    rows = {
        "backend": backend,
        **reasons,
        "text": f"{config.data.path}: {len(corpus.tokens):,} characters, {len(corpus.vocabulary)} distinct, "
        f"{len(training.tokens):,} of them to train on",
        "batch": f"{knobs.batch_size} sequences x {T} characters, all ranks together",
        "length": f"{last_step:,} steps = {epochs:.2f} epochs",
        "run": f"{knobs.run_dir}, a snapshot every {knobs.save_every} steps: kill it at any time, "
        "the same command goes on from the newest",
    }
    return "\n".join(ranks + [f"{name:<10} {words}" for name, words in rows.items()])


def duration(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Metrics:
    """The run's record in metrics.jsonl, and its progress on the screen.

    Args:
        file: metrics.jsonl
        step: the step that training goes on from; rows of later ones, and a torn last row, are removed
        last_step: the step that it ends with

    Raises:
        UserError: the file can't be written.
    """

    def __init__(self, file: Path, step: int, last_step: int) -> None:
        self.last_step = last_step
        try:
            _forget_after(file, step)
            self.descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise UserError(
                f"trainer.run_dir: {file} can't be written: {error.strerror}; make it writable, or set another"
            ) from error
        terminal = sys.stdout.isatty()
        self.bar = tqdm(
            total=last_step, initial=step, unit="step", dynamic_ncols=True, file=sys.stdout, disable=not terminal
        )
        self.val_loss: float | None = None

    def row(self, event: str, step: int, **values: Any) -> None:
        """Appends one row; it is one write, so that a kill leaves at most one torn row, the last."""
        line = json.dumps({"event": event, "step": step, "time": time.time(), **values})
        os.write(self.descriptor, line.encode() + b"\n")

    def advance(self, step: int) -> None:
        """Moves the bar to a finished step."""
        self.bar.update(step - self.bar.n)

    def train(self, step: int, seconds_per_step: float, **values: float | int) -> None:
        """Records and shows a step's loss and speed."""
        self.row("train", step, **values)
        left = duration(seconds_per_step * (self.last_step - step))
        if self.bar.disable:
            say(
                f"step {step:>{len(str(self.last_step))}}/{self.last_step}  loss {values['loss']:.4f}  "
                f"lr {values['learning_rate']:.2e}  grad_norm {values['grad_norm']:.2f}  "
                f"{values['tokens_per_second']:,.0f} tokens/s  {left} left"
            )
        else:
            shown = {"loss": f"{values['loss']:.3f}", "tok/s": f"{values['tokens_per_second']:,.0f}"}
            if self.val_loss is not None:
                shown["val"] = f"{self.val_loss:.3f}"
            self.bar.set_postfix(shown)

    def evaluation(self, step: int, val_loss: float, seconds: float) -> None:
        """Records and shows a validation loss."""
        self.val_loss = val_loss
        self.row("eval", step, val_loss=val_loss)
        say(f"step {step}: validation loss {val_loss:.4f} nats per character ({seconds:.1f} s)")

    def sample(self, step: int, text: str) -> None:
        """Records and shows what the model writes; what would move the cursor is left out."""
        self.row("sample", step, text=text)
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        say(f"step {step} writes:\n{indent(shown.strip(), '    ')}")

    def close(self) -> None:
        """Leaves the bar as it is and closes the file."""
        self.bar.close()
        os.close(self.descriptor)


class NoMetrics(Metrics):
    """What ranks other than the first have: the same methods, and nothing happens."""

    def __init__(self) -> None:
        quiet: Callable[..., None] = lambda *arguments, **values: None  # noqa: E731
        self.row = self.advance = self.train = self.evaluation = quiet  # type: ignore[method-assign]
        self.sample = self.close = quiet  # type: ignore[method-assign]


def _forget_after(file: Path, step: int) -> None:
    """Rewrites metrics.jsonl without rows of later steps and without a torn one, beside it and renamed."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(errors="replace").splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and row["step"] <= step:
            kept.append(line)
    beside = file.with_name(f"{file.name}.tmp")
    beside.write_text("".join(kept))
    os.replace(beside, file)
