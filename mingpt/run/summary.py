"""Messages about a run as a whole: at its start, at its end, and where there is nothing to do."""

import math
import platform
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mingpt.config.schema import config_to_dict, keys_without_places
from mingpt.config.yaml_format import format_value
from mingpt.distributed.agreement import reduce_object
from mingpt.monitoring.live_line import format_duration
from mingpt.optim.optimizer import learning_rate
from mingpt.parallel.memory import MemoryUsage, format_bytes, measure_memory
from mingpt.parallel.strategy import Strategy
from mingpt.snapshot.manager import new_run_advice
from mingpt.system.device import device_kind
from model import GPT

if TYPE_CHECKING:
    from trainer import Trainer

MAX_MEMBERS = 16  # ranks that have a line each at the start


def start(trainer: "Trainer") -> str:
    """Ranks, choices, text and length of a run, its model, and what has changed since its newest snapshot."""
    context = trainer.context
    member = f"{platform.node()} {context.device} ({device_kind(context.device)})"
    members = reduce_object(context, member, member_lines)
    config = trainer.config
    cfg = config.trainer
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
    rows["length"] = f"{trainer.last_step:,} steps = {trainer.last_step * cfg.batch_size / windows:.2f} epochs"
    frequent = "" if cfg.save_overhead is None else " and frequent ones between"
    rows["run"] = (
        f"{cfg.run_dir}, a snapshot every {cfg.save_every} steps{frequent}: kill it at any time, the same command "
        "resumes"
    )
    lines = members + [f"{name:<10} {value}" for name, value in rows.items()]
    with torch.device("meta"):
        lines.append(model_summary(GPT(trainer.model_config)))
    lines += _resume_lines(trainer)
    return "\n".join(lines)


def member_lines(devices: Sequence[str]) -> list[str]:
    """A line for each of the first ranks, and one with the number of the others."""
    members = enumerate(devices[:MAX_MEMBERS])
    lines = [f"GLOBAL_RANK: {i}, MEMBER: {i + 1}/{len(devices)}  {device}" for i, device in members]
    if len(devices) > MAX_MEMBERS:
        lines.append(f"and {len(devices) - MAX_MEMBERS:,} others")
    return lines


def _resume_lines(trainer: "Trainer") -> Iterator[str]:
    """Lines that name the snapshot's file, and what has changed in this run since it was saved."""
    header = trainer.resumed
    if header is None:
        return
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
        yield f"the learning rate of step {step} was {then:.3g}, by the yaml it is now {lr:.3g}"


def already_trained(trainer: "Trainer") -> str:
    step = trainer.progress.step
    file = trainer.resumed_from
    advice = new_run_advice(config_to_dict(trainer.config))
    end = f"training ends at step {trainer.last_step}"
    keys = "trainer.max_steps or trainer.max_epochs"
    if reason := early_end(trainer):
        end = reason
        keys = "trainer.patience, or set it to null"
    return (
        f"already trained: {file} is at step {step}, and {end}. To continue, raise {keys}; to start a new run, "
        f"{advice}.\n{next_commands(file, trainer.config.trainer.run_dir)}"
    )


def early_end(trainer: "Trainer") -> str | None:
    """Says why the run ends before max_steps and max_epochs; None: it does not, or a signal stops it."""
    if trainer.last_step >= trainer.step_limit:
        return None
    progress = trainer.progress
    return (
        f"no evaluation since step {progress.lowest_step} has had a lower validation loss than "
        f"{progress.lowest_val_loss:.4f} (trainer.patience is {trainer.config.trainer.patience})"
    )


def done(trainer: "Trainer") -> str:
    """Duration, validation loss and snapshot of a run that has ended, the best snapshot, and commands to try."""
    progress = trainer.progress
    file = trainer.snapshots.storage.file(progress.step)
    duration = format_duration(trainer.timer.elapsed)
    lines = [f"done in {duration}: validation loss {progress.val_loss:.4f}, snapshot {file}"]
    if reason := early_end(trainer):
        lines.append(f"ended early: {reason}")
        optimizer = trainer.config.optimizer
        end = optimizer.decay_steps or trainer.step_limit
        if progress.step < end:
            lr = trainer.strategy.optimizer.param_groups[0]["lr"]
            lines.append(
                f"            the decay of the learning rate is cut short: it is {lr:.2e}, and would be "
                f"{optimizer.min_learning_rate:.2e} at step {end:,}"
            )
    if progress.best_step not in (None, progress.step):
        folder = shlex.quote(file.rpartition("/")[0])
        lines.append(
            f"best:       validation loss {progress.best_val_loss:.4f} at step {progress.best_step}: "
            f"python sample.py --snapshot {folder} --best"
        )
    lines.append(next_commands(file, trainer.config.trainer.run_dir))
    return "\n".join(lines)


def measured_memory(strategy: Strategy) -> str:
    """What the rank with most holds between backward and the end of a step; all ranks call it."""
    largest = partial(max, key=lambda each: sum(each.values()))
    usage = MemoryUsage(**reduce_object(strategy.context, asdict(measure_memory(strategy)), largest))
    peak = ""
    if strategy.context.device.type == "cuda":
        peak = f"; at the peak {format_bytes(torch.cuda.max_memory_allocated())}, activations included"
    return f"memory measured, on the rank with most: {usage}{peak}"


def model_summary(model: nn.Module) -> str:
    """The layers of a model with their parameters, and the total in parameters and bytes."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        path, _, _ = name.rpartition(".")
        for layer in (re.sub(r"\.\d+", ".*", path), "total"):
            counts[layer] += parameter.numel()
            sizes[layer] += parameter.nbytes
    counts["total"] = counts.pop("total")  # the last line
    lines = [f"  {'layer':<28}{'parameters':>14}{'bytes':>16}"]
    lines += [f"  {layer:<28}{count:>14,}{sizes[layer]:>16,}" for layer, count in counts.items()]
    return "\n".join(lines)


def changed_keys(then: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """Each key of the configuration, except for places, whose value has changed: `trainer.batch_size 12 -> 8`."""
    changes = []
    values = keys_without_places(then)
    for key, value in keys_without_places(now).items():
        before = values.get(key, value)  # an older snapshot may lack a key
        if before != value:
            changes.append(f"{key} {format_value(before)} -> {format_value(value)}")
    return changes


def next_commands(snapshot: str, run_dir: str) -> str:
    """Commands to try on a finished run."""
    snapshot = shlex.quote(snapshot)
    return (
        f"to sample:  python sample.py --snapshot {snapshot}\n"
        f"to plot:    python plot.py {shlex.quote(run_dir)}\n"
        f"to export:  python export.py --snapshot {snapshot} --out FOLDER"
    )
