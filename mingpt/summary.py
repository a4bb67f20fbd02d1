"""Messages about a whole run: at its start, at its end, and if it has already ended."""

import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn
from tqdm import tqdm

from char_dataset import CharDataset, ValidationDataset
from mingpt.config.schema import Config, keys_without_places
from mingpt.config.yaml_format import format_value
from mingpt.parallel.memory import format_bytes
from mingpt.snapshot.format import Best, is_comparable
from mingpt.snapshot.load import NEW_RUN
from mingpt.text.corpus import Corpus

MAX_FILES = 5  # in a message


def start(devices: list[str], rows: Mapping[str, str]) -> str:
    """Returns a line for each rank and a line for each row.

    Args:
        devices: the device of each rank
        rows: name -> value
    """
    lines = [f"GLOBAL_RANK: {i}, MEMBER: {i + 1}/{len(devices)}  {device}" for i, device in enumerate(devices)]
    lines += [f"{name:<10} {value}" for name, value in rows.items()]
    return "\n".join(lines)


def data_rows(path: str, corpus: Corpus, training: CharDataset, validation: ValidationDataset) -> dict[str, str]:
    """Returns rows about the text and its windows."""
    length = len(corpus.training) + len(corpus.validation)
    tokens = f"{length:,} tokens, {corpus.tokenizer.vocab_size:,} distinct"
    rows = {"text": f"{path}: {tokens}; {len(training):,} training windows"}
    count = len(validation)
    in_text = validation.num_windows_in_text
    if count < in_text:
        rows["evaluation"] = f"{count:,} of the {in_text:,} windows of the validation text, evenly spread"
    return rows


def length_rows(config: Config, progress: dict[str, Any], last_step: int, num_windows: int) -> dict[str, str]:
    """Returns rows about the batch and the length of a run.

    Args:
        progress: the fields of its Progress
        num_windows: number of windows in an epoch
    """
    cfg = config.trainer
    # Finished steps may have had another batch size.
    samples = progress["samples"] + (last_step - progress["step"]) * cfg.batch_size
    if cfg.max_epochs is not None:
        samples = min(samples, cfg.max_epochs * num_windows)  # the last batch may be short
    rows = {
        "batch": f"{cfg.batch_size} sequences x {config.data.block_size} tokens, over all ranks",
        "length": f"{last_step:,} steps = {samples / num_windows:.2f} epochs",
        "run": f"{cfg.run_dir}: kill it at any time; the same command resumes it",
    }
    if config.optimizer.warmup_steps >= last_step:
        steps = config.optimizer.warmup_steps
        rows["warm-up"] = f"{steps:,} steps, so the learning rate only rises: lower optimizer.warmup_steps"
    return rows


def resumed(path: str, then: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns lines with the snapshot's file and with the changes in this run since that snapshot was saved.

    Args:
        path: file of the snapshot
        then: the snapshot without its tensors
        now: the same entries of this run
    """
    lines = [f"resuming from {path}"]
    changes = changed_keys(then["config"], now["config"])
    if changes:
        lines.append(f"changed since the snapshot: {', '.join(changes)}")
    if then["code"] != now["code"]:
        lines.append(f"the code has changed since the snapshot: {changed_files(then['code'], now['code'])}")
    if then["text_sha256"] != now["text_sha256"]:
        lines.append(
            f"the text has changed: its SHA-256 is {then['text_sha256']} in the snapshot, {now['text_sha256']} now; "
            "validation may include text that was trained on"
        )
    if not is_comparable(then, now["text_sha256"], now["config"]["trainer"]["eval_windows"]):
        lines.append("validation losses are not comparable with earlier ones, so the best snapshot is chosen anew")
    for key, name in (("hardware", "hardware"), ("pytorch", "version of PyTorch")):
        old = then["choices"][key]
        new = now["choices"][key]
        if old != new:
            lines.append(f"the {name} has changed from {old} to {new}, so the last bits may differ")
    old = then["learning_rate"]
    new = now["learning_rate"]
    if not math.isclose(old, new, rel_tol=1e-6):
        lines.append(f"the learning rate of step {now['step']} was {old:.3g}, and is {new:.3g} with this configuration")
    return "\n".join(lines)


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


def duration(seconds: float, began: float | None) -> str:
    """Returns the duration of this start, and the time since the first one, `began`, in seconds since 1970."""
    text = tqdm.format_interval(seconds)
    if began is not None:
        text += f", {tqdm.format_interval(time.time() - began)} since the first start"
    return text


def done(file: str, run_dir: str, val_loss: float, val_bpb: float, duration: str, best: Best | None) -> str:
    """Returns duration, validation loss and snapshot of a run that has ended, its best snapshot, and commands.

    Args:
        file: the last snapshot
        val_loss: its validation loss, in nats per token
        val_bpb: the same in bits per byte
        duration: see `duration`
        best: the best evaluation, if there is a snapshot of its step
    """
    lines = [f"done in {duration}: validation loss {val_loss:.4f} ({val_bpb:.4f} bits per byte), snapshot {file}"]
    if best is not None and best.val_loss != val_loss:
        folder = shlex.quote(file.rpartition("/")[0])
        lines.append(
            f"best:       validation loss {best.val_loss:.4f} at step {best.step}: "
            f"python sample.py --snapshot {folder} --best"
        )
    lines.append(next_commands(file, run_dir))
    return "\n".join(lines)


def memory(usage: Mapping[str, int]) -> str:
    """Returns the memory that a step has measured.

    Args:
        usage: bytes by kind
    """
    parts = ", ".join(f"{kind} {format_bytes(number)}" for kind, number in usage.items())
    total = format_bytes(sum(usage.values()))
    return f"measured memory of the rank that uses the most, without activations: {total} ({parts})"


def layers(model: nn.Module) -> str:
    """Returns a table of the layers of a model with their numbers of parameters, and the total."""
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        path, _, _ = name.rpartition(".")
        counts[re.sub(r"\.\d+", ".*", path)] += parameter.numel()
    total = counts.total()
    lines = [f"  {'layer':<28}{'parameters':>14}"]
    lines += [f"  {layer:<28}{count:>14,}" for layer, count in counts.items()]
    return "\n".join([*lines, f"  {'total':<28}{total:>14,}"])


def changed_keys(then: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """Returns each key, except for places, whose value has changed: `trainer.batch_size 12 -> 8`."""
    changes = []
    values = keys_without_places(then)
    for key, value in keys_without_places(now).items():
        before = values.get(key, value)  # an older snapshot may lack a key
        if before != value:
            changes.append(f"{key} {format_value(before)} -> {format_value(value)}")
    return changes


def changed_files(then: dict[str, str], now: dict[str, str]) -> str:
    """Returns the first files that were changed, added or removed, and the number of others. Digests are by file."""
    files = [file for file in now | then if now.get(file) != then.get(file)]
    names = ", ".join(files[:MAX_FILES])
    return names if len(files) <= MAX_FILES else f"{names} and {len(files) - MAX_FILES} more"


def next_commands(snapshot: str, run_dir: str) -> str:
    """Returns commands to try on a finished run."""
    snapshot = shlex.quote(snapshot)
    return (
        f"to sample:  python sample.py --snapshot {snapshot}\n"
        f"to plot:    python plot.py {shlex.quote(run_dir)}\n"
        f"to export:  python export.py --snapshot {snapshot} --out FOLDER"
    )
