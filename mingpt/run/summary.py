"""Messages about a whole run: at its start, at its end, and if it has already ended."""

import math
import platform
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mingpt.config.schema import config_to_dict, keys_without_places
from mingpt.config.yaml_format import format_value
from mingpt.distributed.agreement import all_gather_object, reduce_object
from mingpt.monitoring.live_line import format_duration
from mingpt.optim.optimizer import learning_rate
from mingpt.parallel.memory import MemoryUsage, format_bytes, measure_memory
from mingpt.parallel.strategy import Strategy
from mingpt.snapshot.load import new_run_advice
from mingpt.system.device import device_kind
from model import GPT

if TYPE_CHECKING:
    from trainer import Trainer


def start(trainer: "Trainer") -> str:
    """Returns ranks, choices, text and length of a run, its model, and the changes since its newest snapshot."""
    context = trainer.context
    member = f"{platform.node()} {context.device} ({device_kind(context.device)})"
    devices = all_gather_object(context, member)
    config = trainer.config
    cfg = config.trainer
    progress = trainer.progress
    T = config.data.block_size
    windows = len(trainer.train_data)
    val_windows = len(trainer.val_data)
    rows = {"backend": context.backend, **trainer.numerics.reasons, **trainer.strategy.description}
    windows_in_text = trainer.val_data.num_windows_in_text
    if val_windows < windows_in_text:
        rows["evaluation"] = f"{val_windows:,} of the {windows_in_text:,} windows of the validation text, evenly spread"
    rows["text"] = (
        f"{config.data.path}: {len(trainer.corpus.tokens):,} characters, {len(trainer.corpus.vocabulary)} distinct; "
        f"{windows:,} training windows"
    )
    rows["batch"] = f"{cfg.batch_size} sequences x {T} characters, over all ranks"
    # Finished steps may have had another batch size.
    samples = progress.samples + (trainer.last_step - progress.step) * cfg.batch_size
    if cfg.max_epochs is not None:
        samples = min(samples, cfg.max_epochs * windows)  # the last batch may be short
    rows["length"] = f"{trainer.last_step:,} steps = {samples / windows:.2f} epochs"
    rows["run"] = f"{cfg.run_dir}: kill it at any time, the same command resumes"
    lines = [f"GLOBAL_RANK: {i}, MEMBER: {i + 1}/{len(devices)}  {device}" for i, device in enumerate(devices)]
    lines += [f"{name:<10} {value}" for name, value in rows.items()]
    with torch.device("meta"):
        lines.append(model_summary(GPT(trainer.model_config)))
    if trainer.resumed is not None:
        lines += _resume_lines(trainer, trainer.resumed)
    return "\n".join(lines)


def _resume_lines(trainer: "Trainer", header: dict[str, Any]) -> Iterator[str]:
    """Yields lines with the snapshot's file and with the changes in this run since that snapshot was saved."""
    yield f"resuming from {trainer.resumed_from}"
    changes = changed_keys(header["config"], config_to_dict(trainer.config))
    if changes:
        yield f"changed since the snapshot: {', '.join(changes)}"
    if (then := header["text_sha256"]) != (now := trainer.corpus.sha256):
        yield (
            f"the text has changed: its SHA-256 is {then} in the snapshot, {now} now. Validation losses do not compare "
            "with those before, and may be of text that was trained on: best snapshot and trainer.patience start again"
        )
    for key, name in (("hardware", "hardware"), ("pytorch", "version of PyTorch")):
        now = trainer.numerics.choices[key]
        then = header["choices"].get(key, now)  # an older snapshot may lack it
        if then != now:
            yield f"the {name} has changed: {then} made the snapshot, {now} resumes it, and last bits may differ"
    step = trainer.progress.step
    lr = learning_rate(step, trainer.last_step, trainer.config.optimizer)
    if not math.isclose(then := header["learning_rate"], lr, rel_tol=1e-6):
        yield f"the learning rate of step {step} was {then:.3g}, and is {lr:.3g} with this configuration"


def already_trained(trainer: "Trainer") -> str:
    step = trainer.progress.step
    file = trainer.resumed_from
    end = f"training ends at step {trainer.last_step}"
    keys = "trainer.max_steps or trainer.max_epochs"
    if reason := early_end(trainer):
        end = reason
        keys = "trainer.patience, or set it to null"
    return (
        f"already trained: {file} is at step {step}, and {end}. To continue, raise {keys}; to start a new run, "
        f"{new_run_advice(trainer.config)}.\n{next_commands(file, trainer.config.trainer.run_dir)}"
    )


def early_end(trainer: "Trainer") -> str | None:
    """Returns why trainer.patience ends the run before max_steps and max_epochs; None: it does not."""
    progress = trainer.progress
    if progress.step >= trainer.last_step or not trainer.is_patience_over():
        return None
    return (
        f"no evaluation since step {progress.lowest['step']} has had a lower validation loss than "
        f"{progress.lowest['val_loss']:.4f} (trainer.patience is {trainer.config.trainer.patience})"
    )


def done(trainer: "Trainer") -> str:
    """Returns duration, validation loss and snapshot of a run that has ended, its best snapshot, and commands."""
    progress = trainer.progress
    file = trainer.snapshots.storage.file(progress.step)
    duration = format_duration(trainer.timer.elapsed)
    lines = [f"done in {duration}: validation loss {progress.val_loss:.4f}, snapshot {file}"]
    if reason := early_end(trainer):
        lines.append(f"ended early: {reason}")
    if progress.best["step"] not in (None, progress.step):
        folder = shlex.quote(file.rpartition("/")[0])
        lines.append(
            f"best:       validation loss {progress.best['val_loss']:.4f} at step {progress.best['step']}: "
            f"python sample.py --snapshot {folder} --best"
        )
    lines.append(next_commands(file, trainer.config.trainer.run_dir))
    return "\n".join(lines)


def measured_memory(strategy: Strategy) -> str:
    """Returns the memory between backward and the end of a step on the rank that holds most; all ranks call it."""
    largest = partial(max, key=lambda each: sum(each.values()))
    usage = MemoryUsage(**reduce_object(strategy.context, asdict(measure_memory(strategy)), largest))
    peak = ""
    if strategy.context.device.type == "cuda":
        peak = f"; at the peak {format_bytes(torch.cuda.max_memory_allocated())}, activations included"
    return f"memory measured, on the rank with most: {usage}{peak}"


def model_summary(model: nn.Module) -> str:
    """Returns a table of the model's layers with their parameters, and the totals."""
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


def next_commands(snapshot: str, run_dir: str) -> str:
    """Returns commands to try on a finished run."""
    snapshot = shlex.quote(snapshot)
    return (
        f"to sample:  python sample.py --snapshot {snapshot}\n"
        f"to plot:    python plot.py {shlex.quote(run_dir)}\n"
        f"to export:  python export.py --snapshot {snapshot} --out FOLDER"
    )
