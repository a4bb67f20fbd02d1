import json
import math
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch

import sample
from mingpt.program import run_program as exit_status_of
from mingpt.snapshot.folder import SnapshotFolder, load_snapshot
from tests.helpers import ROOT, clean_env, read_rows, run_on_terminal, train_run, write_text
from tests.inside import assert_one_message

LENGTH = 40  # characters to generate: more than a window of 16
NEWEST = "snapshots/step_00000006.pt"
RunSample = Callable[..., tuple[int, str, str]]  # exit status, stdout, stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of six steps on a text with characters beyond ASCII, and the part of the text that validates."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    characters = text.read_text().replace("figs", "ñandú—🙂")
    text.write_text(characters, encoding="utf-8")
    train_run(folder / "run", text, trainer__max_steps=6, optimizer__learning_rate=3e-2)
    text.unlink()
    (folder / "validation.txt").write_text(characters[int(0.9 * len(characters)) :], encoding="utf-8")
    snapshot = load_snapshot(str(folder / "run" / NEWEST))
    assert snapshot["val_loss"] < math.log(len(snapshot["vocabulary"]))  # it differs from an untrained model
    return folder / "run"


@pytest.fixture
def run_sample(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunSample:
    """Runs sample.py in this process, without its measurement of idle cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, argv)])
        return (exit_status_of(sample.run, sys.argv[1:]), *capfd.readouterr())

    return run


def assert_refused(result: tuple[int, str, str], *parts: str) -> None:
    status, out, err = result
    assert (status, out) == (2, "")
    assert_one_message(err, *parts)


@pytest.mark.parametrize("choice", ["", "--temperature 0", "--top_k 1000", "--top_p 0.6", "--top_p 1e-300"])
def test_stdout_is_the_prompt_and_as_many_characters(choice: str, trained: Path, run_sample: RunSample) -> None:
    vocabulary = load_snapshot(str(trained / NEWEST))["vocabulary"]
    for prompt, length in product(["a", "anna does eat ñandú—🙂 eat anna"], [0, 1, LENGTH]):
        options = ("--snapshot", trained, "--max_new_tokens", length, *choice.split())
        status, out, err = run_sample("--prompt", prompt, *options)
        assert (status, err) == (0, "")
        assert out.startswith(prompt)
        assert len(out) == len(prompt) + length
        assert set(out) <= set(vocabulary)
    assert run_sample(*options)[1].startswith(vocabulary[0])  # without a prompt


def test_the_seed_selects_the_text_unless_temperature_is_zero(trained: Path, run_sample: RunSample) -> None:
    options = ("--snapshot", trained, "--max_new_tokens", LENGTH)
    one, again, other = (run_sample(*options, "--seed", seed)[1] for seed in (1, 1, 2))
    assert one == again != other
    greedy = {run_sample(*options, "--temperature", t, "--seed", 1)[1] for t in (0, 1e-320, 1e-45)}
    assert greedy == {run_sample(*options, "--top_k", 1)[1]}


def test_the_newest_snapshot_is_found_from_each_path_and_best_is_that_of_lowest_validation_loss(
    trained: Path, tmp_path: Path, run_sample: RunSample
) -> None:
    paths = [trained, trained / "snapshots", f"{trained}/", trained / NEWEST, f"file://{trained}/{NEWEST}"]
    [newest] = {run_sample("--snapshot", path, "--max_new_tokens", LENGTH) for path in paths}
    assert (newest[0], newest[2]) == (0, "")
    run = shutil.copytree(trained, tmp_path / "run")
    best_is_3 = load_snapshot(str(run / NEWEST)) | {"best": {"step": 3, "val_loss": 0.1}}
    SnapshotFolder(f"{run}/snapshots", keep=9).write(best_is_3, flush=True)
    best = run_sample("--snapshot", run, "--best", "--max_new_tokens", LENGTH)
    assert best == run_sample("--snapshot", run / "snapshots/step_00000003.pt", "--max_new_tokens", LENGTH) != newest
    (run / "snapshots/step_00000003.pt").unlink()
    assert_refused(run_sample("--snapshot", run, "--best"), f"--snapshot: {run} can't be loaded", "step_00000003.pt")


def test_several_samples_differ_and_are_separated(trained: Path, run_sample: RunSample) -> None:
    """The first one is the same as without the others."""
    options = ("--snapshot", trained, "--prompt", "anna", "--max_new_tokens", LENGTH)
    _, one, _ = run_sample(*options)
    status, out, err = run_sample(*options, "--num_samples", 3)
    assert (status, err) == (0, "")
    samples = out.split(sample.SEPARATOR)
    assert samples[0] == one
    assert len(set(samples)) == 3
    assert all(each.startswith("anna") and len(each) == 4 + LENGTH for each in samples)


def test_evaluate_prints_the_loss_that_training_has_had_on_the_same_text(trained: Path, run_sample: RunSample) -> None:
    text = trained.parent / "validation.txt"
    [*_, row] = read_rows(trained, "eval")
    status, out, _ = run_sample("--snapshot", trained, "--evaluate", text)
    assert status == 0
    expected = f"{row['val_loss']:.4f} nats per token, {row['val_bpb']:.4f} bits per byte"
    assert out == f"{expected}, {len(text.read_text()):,} tokens\n"
    text.write_text("a")
    assert_refused(
        run_sample("--snapshot", trained, "--evaluate", text), "--evaluate: the text has 1 tokens, but needs 2"
    )


@pytest.fixture(scope="module")
def trained_on_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contains a run on short names, text.jsonl with these documents, and the same as text with line breaks."""
    folder = tmp_path_factory.mktemp("documents")
    names = ["anna", "bob", "eve"] * 200
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": name}) + "\n" for name in names))
    (folder / "lines.txt").write_text("".join(f"{name}\n" for name in names))
    train_run(folder / "run", folder / "text.jsonl", trainer__max_steps=60, optimizer__learning_rate=3e-2)
    return folder


def test_a_sample_begins_and_ends_with_a_document(trained_on_documents: Path, run_sample: RunSample) -> None:
    options = ("--snapshot", trained_on_documents / "run", "--max_new_tokens", LENGTH)
    status, out, _ = run_sample(*options)
    assert status == 0
    assert re.fullmatch(r"\n\w{3,4}", out)
    more = run_sample(*options, "--ignore_end")[1]
    assert len(more) == 1 + LENGTH
    assert more.startswith(f"{out}\n")


def test_evaluate_measures_the_same_documents_in_every_form(trained_on_documents: Path, run_sample: RunSample) -> None:
    [*_, row] = read_rows(trained_on_documents / "run", "eval")
    files = ("text.jsonl", "lines.txt", "run/data")
    losses = []
    for file in files:
        status, out, _ = run_sample(
            "--snapshot", trained_on_documents / "run", "--evaluate", trained_on_documents / file
        )
        assert status == 0
        losses.append(out.split(" nats")[0])
    assert losses[0] == losses[1]
    assert losses[2] == f"{row['val_loss']:.4f}"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_samples", "0", " is 0, must be at least 1"),
        ("prompt", "what?", ": the tokens '?hw' (3 distinct) are not in the training text's vocabulary, '\\n abdeno"),
        ("prompt", "", " '' has no tokens; give another one"),
        ("max_new_tokens", "-1", " is -1, must be at least 0"),
        ("temperature", "-0.5", " is -0.5, must be at least 0"),
        ("top_k", "0", " is 0, must be at least 1"),
        ("top_p", "0", " is 0.0, must be greater than 0 and at most 1"),
        ("device", "cuda", " is cuda, but PyTorch sees no CUDA GPU here; set it to cpu"),
        ("snapshot", "none", ": none can't be loaded: [Errno 2] No such file or directory"),
        ("snapshot", "words.txt", ": words.txt can't be loaded: cut short, or not a file of torch.save"),
    ],
)
def test_each_mistake_is_one_message(
    option: str, value: str, message: str, trained: Path, tmp_path: Path, run_sample: RunSample, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("no snapshot " * 100)  # like model.safetensors
    assert_refused(run_sample("--snapshot", trained, f"--{option}", value), f"error: --{option}{message}")


def test_neither_a_file_of_another_program_nor_a_missing_default_run_is_a_snapshot(
    tmp_path: Path, run_sample: RunSample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(run_sample(), "--snapshot", "runs/default", str(tmp_path), "No such file")
    assert list(tmp_path.iterdir()) == []
    for content in ({"model": {}, "model_args": {}}, [torch.ones(2)], torch.ones(2)):
        torch.save(content, "ckpt.pt")
        refused = run_sample("--snapshot", "ckpt.pt")
        assert_refused(refused, "error: ckpt.pt is not a snapshot that this version can read", "docs/export.md")


def test_on_a_terminal_the_text_ends_with_a_newline(trained: Path, run_sample: RunSample) -> None:
    options = ("--snapshot", trained, "--prompt", "anna", "--max_new_tokens", "3", "--temperature", "0")
    status, raw = run_on_terminal("sample.py", *options, OMP_NUM_THREADS="1")
    _, captured, _ = run_sample(*options)
    assert (status, len(captured)) == (0, len("anna") + 3)
    assert raw == captured.replace("\n", "\r\n") + "\r\n"


@pytest.mark.parametrize(("ending", "status"), [("Ctrl-C", 130), ("its reader", 0)])
def test_output_is_utf_8_in_any_locale_and_ends_silently_with_ctrl_c_and_its_reader(
    ending: str, status: int, trained: Path
) -> None:
    """`| head` is such a reader."""
    prompt = "ñandú—🙂"
    argv = ["--snapshot", trained, "--prompt", prompt, "--max_new_tokens", "9999999"]
    env = clean_env(OMP_NUM_THREADS="1", LC_ALL="C", PYTHONIOENCODING="ascii")
    with subprocess.Popen([sys.executable, ROOT / "sample.py", *argv], stdout=PIPE, stderr=PIPE, env=env) as process:
        try:
            text = process.stdout.read(200).decode("utf-8", errors="ignore")
            if ending == "Ctrl-C":
                process.send_signal(signal.SIGINT)
                process.stdout.read()  # to its end: closing the pipe first would end the process too
            process.stdout.close()
            assert process.wait(30) == status
            assert process.stderr.read() == b""
        finally:
            process.kill()
    assert text.startswith(prompt)
    assert not text.removeprefix(prompt).isascii()
