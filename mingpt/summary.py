"""Messages about a whole run: at its start, at its end, and if it has already ended."""

import math
import shlex
from collections.abc import Mapping
from typing import Any

from mingpt.config.schema import Config, keys_without_places
from mingpt.config.yaml_format import format_value
from mingpt.monitoring.run_log import duration
from mingpt.snapshot.format import Best, Header
from mingpt.snapshot.load import NEW_RUN
from mingpt.text.corpus import Corpus


def start(devices: list[str], rows: Mapping[str, str]) -> str:
    """Returns a line for each rank and a line for each row.

    Args:
        devices: the device of each rank
        rows: name -> value
    """
    lines = [f"GLOBAL_RANK: {i}, MEMBER: {i + 1}/{len(devices)}  {device}" for i, device in enumerate(devices)]
    lines += [f"{name:<10} {value}" for name, value in rows.items()]
    return "\n".join(lines)


def data_rows(config: Config, corpus: Corpus, train_windows: int, val_windows: int) -> dict[str, str]:
    """Returns the rows of the text and of the batch."""
    tokens = len(corpus.training) + len(corpus.validation)
    data = config.data
    return {
        "text": f"{data.path}: {tokens:,} tokens, {corpus.tokenizer.vocab_size:,} distinct; {train_windows:,} training "
        f"windows, {val_windows:,} for validation",
        "batch": f"{config.trainer.batch_size} sequences x {data.block_size} tokens, over all ranks",
    }


def resumed(path: str, then: Header, now: Header) -> str:
    """Returns the snapshot's file, and what has changed since it was saved.

    Args:
        path: file of the snapshot
        then: the snapshot without its tensors
        now: the same entries of this run
    """
    lines = [f"resuming from {path}"]
    if changes := changed_values(then, now):
        lines.append(f"changed since the snapshot: {', '.join(changes)}")
    if not math.isclose(then["learning_rate"], now["learning_rate"], rel_tol=1e-6):
        lines.append(
            f"the learning rate of step {now['step']} was {then['learning_rate']:.3g}, and is "
            f"{now['learning_rate']:.3g} with this configuration"
        )
    return "\n".join(lines)


def changed_values(then: Header, now: Header) -> list[str]:
    """Returns each key (except for places), file of code, text, hardware and PyTorch that two snapshots differ in."""
    before = _comparable(then)
    return [
        f"{name} {format_value(before[name])} -> {format_value(value)}"
        for name, value in _comparable(now).items()
        if before.get(name, value) != value  # the code may have new keys and files
    ]


def _comparable(header: Header) -> dict[str, Any]:
    choices = {name: header["choices"][name] for name in ("hardware", "pytorch")}
    text = {"the text's SHA-256": header["text_sha256"], "the training part": header["train_split"]}
    return keys_without_places(header["config"]) | header["code"] | text | choices


def already_trained(file: str, step: int, config: Config, last_step: int) -> str:
    """Returns why there is nothing to do, and commands.

    Args:
        file: the newest snapshot
        step: its step
    """
    return (
        f"already trained: {file} is at step {step}, and training ends at step {last_step}. To continue, raise "
        f"trainer.max_steps or trainer.max_epochs; to start a new run, {NEW_RUN}.\n"
        f"{next_commands(file, config.trainer.run_dir)}"
    )


def stopped(signal_name: str, step: int) -> str:
    """Returns why the run has stopped, and how to continue it."""
    return f"stopped by {signal_name} at step {step} after saving a snapshot; run the same command to resume"


def done(config: Config, seconds: float, val_loss: float, bits_per_byte: float, file: str, best: Best) -> str:
    """Returns the result of the run, and commands.

    Args:
        file: the last snapshot
        best: the best evaluation whose snapshot is in the same folder
    """
    lines = [
        f"done in {duration(seconds)}: validation loss {val_loss:.4f} ({bits_per_byte:.4f} bits per byte), "
        f"snapshot {file}"
    ]
    if best.val_loss < val_loss:
        folder = shlex.quote(file.rpartition("/")[0])
        lines.append(
            f"best:       validation loss {best.val_loss:.4f} at step {best.step}: "
            f"python sample.py --snapshot {folder} --best"
        )
    lines.append(next_commands(file, config.trainer.run_dir))
    return "\n".join(lines)


def next_commands(snapshot: str, run_dir: str) -> str:
    """Returns commands to try on a finished run."""
    snapshot = shlex.quote(snapshot)
    return (
        f"to sample:  python sample.py --snapshot {snapshot}\n"
        f"to plot:    python plot.py {shlex.quote(run_dir)}\n"
        f"to export:  python export.py --snapshot {snapshot} --out FOLDER"
    )
