"""What does the person watching see? A live line on a terminal, dated lines elsewhere, and how a program ends."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from mingpt.utils.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from char_dataset import CharDataset
    from mingpt.config import Config
    from mingpt.corpus import Corpus

Say = Callable[[str], None]

# Of work that may be long: a bar on a terminal, once it has taken a second, and until it is done.
BAR_OPTIONS: dict[str, Any] = {"unit_scale": True, "delay": 1, "disable": None, "leave": False}


def say(words: str) -> None:
    """Prints words at once: on a terminal above the live line, where there is one, and elsewhere with date and time."""
    tqdm.write(words if sys.stdout.isatty() else f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {words}", file=sys.stdout)
    sys.stdout.flush()


def complain(words: str) -> None:
    """Prints what is wrong to stderr at once, above the live line where there is one."""
    # Another rank's live line may stand here: it is written over, and comes again below.
    lead = "\r\x1b[K" if sys.stderr.isatty() and not ProgressLine.alive else ""
    tqdm.write(f"{lead}error: {words}", file=sys.stderr)
    sys.stderr.flush()


def run_script(run: Callable[[Sequence[str]], None]) -> int:
    """Runs a program with its command line.

    Returns:
        exit status: 0, also where its reader has seen enough, as `head` has; 2, with one message, where the user can
        fix it; 130 after Ctrl-C
    """
    try:
        run(sys.argv[1:])
        sys.stdout.flush()
    except UserError as error:
        complain(str(error))
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


def nothing(line: str) -> None:
    """What the other ranks say."""


def model_summary(model: nn.Module) -> str:
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


def format_duration(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ProgressLine(tqdm):
    """The live line: steps, a bar that takes what room is left, losses, speed, time left and the last snapshot's age.

    It fits the terminal as it is at each moment. Where there is none, nothing is shown.

    Args:
        step: the step that training goes on from
        last_step: the step that it ends with
    """

    alive = False  # whether this process shows one

    def __init__(self, step: int, last_step: int) -> None:
        self.step, self.first, self.last = step, step, last_step
        self.told: dict[str, str] = {}
        self.began, self.saved_at = time.monotonic(), math.inf
        ProgressLine.alive = sys.stdout.isatty()
        form = "{n_fmt}/{total_fmt} {bar} {words}"
        super().__init__(
            total=last_step,
            initial=step,
            dynamic_ncols=True,
            bar_format=form,
            file=sys.stdout,
            disable=not ProgressLine.alive,
        )

    def advance(self, step: int) -> None:
        """Moves to a finished step."""
        self.step = step
        self.update(step - self.n)

    def left(self) -> str:
        """Time until the last step, at the pace so far with all its pauses."""
        done = self.step - self.first
        return format_duration((time.monotonic() - self.began) / max(1, done) * (self.last - self.step))

    @property
    def format_dict(self) -> dict[str, Any]:
        """What tqdm's format may name; asked for at each refresh."""
        words = [self.told[name] for name in ("loss", "val", "speed") if name in self.told]
        if self.step > self.first:
            words.append(f"{self.left()} left")
        if (age := time.monotonic() - self.saved_at) >= 0:
            words.append(f"saved {format_duration(age)} ago")
        return {**super().format_dict, "words": " ".join(words)}

    def close(self) -> None:
        """Leaves the line as it is."""
        ProgressLine.alive = False
        super().close()
