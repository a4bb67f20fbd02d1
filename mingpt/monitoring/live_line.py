"""Shows a run on a terminal or in a pipe, and has the options of progress bars."""

import shutil
import sys
import time
from collections.abc import Mapping
from textwrap import indent
from threading import RLock
from typing import Any

from tqdm import tqdm

from mingpt.monitoring.logging import logger

# Arguments of tqdm for a bar that appears on a terminal after a second and is removed at the end.
BAR_OPTIONS: dict[str, Any] = {"unit_scale": True, "delay": 1, "disable": None, "leave": False}

# The default lock includes a semaphore of multiprocessing. Python 3.14 reports it as leaked after `exit_process`.
tqdm.set_lock(RLock())


class Terminal:
    """Log lines, and below them a live line if stdout is a terminal. Train rows are shown in one of the two.

    Args:
        step: the step at which this process starts
    """

    name = "the terminal"

    def __init__(self, step: int, last_step: int) -> None:
        self.first_step = step
        self.last_step = last_step
        self.started = time.monotonic()
        self.shown: dict[str, str] = {}  # the newest values of the rows, by their name in the live line
        self.bar = tqdm(
            total=last_step,
            initial=step,
            bar_format="{n_fmt}/{total_fmt} {bar} {remaining} left{postfix}",
            smoothing=0,  # the time left is at the average pace so far, including pauses
            miniters=1,
            mininterval=0.5,  # a notebook's cell keeps all output
            nrows=20,  # tqdm would show nothing on a terminal that reports 0 rows, as under `docker exec -t`
            disable=None,  # if stdout is not a terminal
            file=sys.stdout,
        )

    def advance(self, step: int) -> None:
        """Moves the bar to a finished step, at most twice a second."""
        if self.bar.disable:
            return
        self.bar.ncols = shutil.get_terminal_size().columns - 1  # unlike dynamic_ncols, it replaces a width of 0 by 80
        self.bar.update(step - self.bar.n)

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if event == "train":
            loss = values["loss"]
            speed = values["tokens_per_second"]
            self.shown |= {"loss": f"{loss:.3f}", "tok/s": tqdm.format_sizeof(speed)}
            if self.bar.disable:
                pace = (time.monotonic() - self.started) / (step - self.first_step)
                logger.info(
                    f"step {step:>{len(str(self.last_step))}}/{self.last_step}  loss {loss:.4f}  "
                    f"lr {values['learning_rate']:.2e}  grad_norm {values['grad_norm']:.2f}  "
                    f"{speed:,.0f} tokens/s  {tqdm.format_interval(pace * (self.last_step - step))} left"
                )
        elif event == "eval":
            val_loss = values["val_loss"]
            self.shown["val"] = f"{val_loss:.3f}"
            logger.info(
                f"step {step}: validation loss {val_loss:.4f} nats per token, {values['val_bpb']:.4f} bits per byte "
                f"({values['seconds']:.1f} s)"
            )
        elif event == "sample":
            # Some characters would move the cursor.
            shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in values["text"])
            logger.info(f"step {step} continues {values['prompt']!r}:\n{indent(shown.strip(), '    ')}")
        self.bar.set_postfix(self.shown, refresh=False)

    def close(self) -> None:
        """Ends the live line and leaves it on the terminal."""
        self.bar.close()
