"""What has it learned: text on stdout and nothing else there, and one message where there is none."""

from __future__ import annotations

import io
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import ROOT, clean_env, run_args, run_ranks, train_main, write_text

import sample
from mingpt.config import GPTConfig
from mingpt.snapshot.storage import SnapshotStorage, load_snapshot
from mingpt.utils.progress import run_script
from model import GPT

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 40  # characters to write: more than a window of 16
Sampled = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of six steps on a text that is not ASCII, and is gone."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    text.write_text(text.read_text().replace("figs", "ñandú—🙂"), encoding="utf-8")
    argv = run_args(folder / "run", text, trainer__max_steps=6)
    assert run_ranks(1, train_main, *argv, tmp_path=folder) == [0]
    text.unlink()
    shutil.rmtree(folder / "run/cache")
    return folder / "run"


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Sampled:
    """Runs sample.py in this process: status, stdout, stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, argv)])
        try:
            status = run_script(sample.run)
        except SystemExit as end:  # of argparse
            status = end.code
        return (status, *capfd.readouterr())

    return run


def newest(run_dir: Path) -> Path:
    return run_dir / "snapshots/step_00000006.pt"


@pytest.mark.parametrize(
    "knobs",
    [
        ["--max_new_tokens", NEW],
        ["--max_new_tokens", 0],
        ["--max_new_tokens", 1],
        ["--max_new_tokens", NEW, "--temperature", 0],
        ["--max_new_tokens", NEW, "--top_k", 3],
        ["--max_new_tokens", NEW, "--top_k", 1000],
        ["--max_new_tokens", NEW, "--top_p", 0.6],
        ["--max_new_tokens", NEW, "--top_p", 1],
    ],
)
@pytest.mark.parametrize("prompt", ["a", "anna does eat ñandú—🙂 eat anna"])
def test_stdout_is_the_prompt_and_so_many_characters(
    prompt: str, knobs: list[object], trained: Path, sampled: Sampled
) -> None:
    status, out, err = sampled("--snapshot", trained, "--prompt", prompt, *knobs)
    assert (status, err) == (0, "")
    assert out.startswith(prompt)
    assert len(out) == len(prompt) + int(knobs[1])
    assert set(out) <= set(load_snapshot(str(newest(trained)))["vocabulary"])


def test_without_a_prompt_it_starts_with_the_first_character_of_the_vocabulary(trained: Path, sampled: Sampled) -> None:
    status, out, _ = sampled("--snapshot", trained)
    assert (status, len(out), out[0]) == (0, 501, "\n")


def test_a_seed_decides_the_text(trained: Path, sampled: Sampled) -> None:
    one, again, other = (
        sampled("--snapshot", trained, "--seed", seed, "--max_new_tokens", NEW)[1] for seed in (1, 1, 2)
    )
    assert one == again != other


def test_at_temperature_zero_the_likeliest_is_taken_whatever_the_seed(trained: Path, sampled: Sampled) -> None:
    knobs = ("--snapshot", trained, "--prompt", "anna", "--max_new_tokens", NEW)
    texts = {sampled(*knobs, "--temperature", 0, "--seed", seed)[1] for seed in (1, 2)}
    assert texts == {sampled(*knobs, "--top_k", 1)[1]}


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_each_character_follows_from_the_window_before_it(
    temperature: float, trained: Path, tmp_path: Path, sampled: Sampled
) -> None:
    snapshot = load_snapshot(str(newest(trained)))
    torch.manual_seed(0)  # weights after six steps hardly look at what was before; random ones do
    snapshot["model"] = {name: 0.3 * torch.randn_like(weight) for name, weight in snapshot["model"].items()}
    file = SnapshotStorage(str(tmp_path), keep=1).write(snapshot, None)
    knobs = ("--prompt", "anna does", "--max_new_tokens", NEW, "--temperature", temperature, "--seed", 3)
    _, out, _ = sampled("--snapshot", file, *knobs)

    vocabulary, config = snapshot["vocabulary"], snapshot["config"]
    model = GPT(GPTConfig(**config["model"], vocab_size=len(vocabulary), block_size=16)).eval()
    model.load_state_dict(snapshot["model"])
    text, generator = "anna does", torch.Generator().manual_seed(3)
    for _ in range(NEW):  # one whole window at a time
        idx = torch.tensor([[vocabulary.index(character) for character in text[-16:]]])
        logits = model(idx)[0][0, -1]
        if temperature:
            text += vocabulary[torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)]
        else:
            text += vocabulary[logits.argmax()]
    assert out == text


def test_the_newest_is_found_wherever_one_points(trained: Path, sampled: Sampled) -> None:
    places = [trained, trained / "snapshots", f"{trained}/", newest(trained), f"file://{newest(trained)}"]
    results = {sampled("--snapshot", place, "--max_new_tokens", NEW) for place in places}
    assert len(results) == 1
    [(status, _, err)] = results
    assert (status, err) == (0, "")
    assert sampled("--snapshot", trained / "snapshots/step_00000003.pt", "--max_new_tokens", NEW) not in results


def test_a_damaged_newest_is_named_and_the_one_before_speaks(trained: Path, tmp_path: Path, sampled: Sampled) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    content = bytearray(newest(run).read_bytes())
    content[5000] ^= 4
    newest(run).write_bytes(content)
    status, out, err = sampled("--snapshot", run, "--max_new_tokens", NEW)
    older = run / "snapshots/step_00000003.pt"
    assert status == 0
    assert out == sampled("--snapshot", older, "--max_new_tokens", NEW)[1]
    damaged, used = err.splitlines()
    assert damaged.startswith(f"{newest(run)} is damaged")
    assert used == f"{older} is used instead"

    status, out, err = sampled("--snapshot", newest(run))
    assert (status, out) == (2, "")
    assert_one_message(err, str(newest(run)), "damaged")
    older.unlink()
    status, out, err = sampled("--snapshot", run)
    assert (status, out) == (2, "")
    assert "damaged" in err.splitlines()[-1]


def assert_one_message(err: str, *said: str) -> None:
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1, err
    for words in said:
        assert words in err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--prompt", "anna z€", "'z€'"),
        ("--prompt", "", "empty"),
        ("--max_new_tokens", "-1", "-1"),
        ("--temperature", "-0.5", "-0.5"),
        ("--temperature", "nan", "nan"),
        ("--temperature", "inf", "below 2**63"),
        ("--temperature", "1e30", "below 2**63"),
        ("--top_k", "0", "0"),
        ("--top_k", "-3", "-3"),
        ("--top_p", "0", "0"),
        ("--top_p", "1.1", "1.1"),
        ("--top_p", "nan", "nan"),
        ("--seed", str(1 << 70), str(1 << 70)),
        ("--snapshot", "{tmp}/none", "{tmp}/none"),
        ("--snapshot", "{tmp}", "{tmp}"),
        ("--snapshot", "{tmp}/words.txt", "{tmp}/words.txt"),
        ("--snapshot", "{tmp}/words.txt/below", "{tmp}/words.txt/below"),
        ("--snapshot", "nosuch://place", "nosuch://place"),
    ],
)
def test_what_cannot_be_is_said_in_one_message(
    option: str, value: str, said: str, trained: Path, tmp_path: Path, sampled: Sampled
) -> None:
    (tmp_path / "words.txt").write_text("no snapshot " * 100)
    value, said = value.replace("{tmp}", str(tmp_path)), said.replace("{tmp}", str(tmp_path))
    status, out, err = sampled("--snapshot", trained, option, value)
    assert (status, out) == (2, "")
    assert_one_message(err, option, said)


def test_a_number_that_is_none_is_refused(trained: Path, sampled: Sampled) -> None:
    for option in ("--max_new_tokens", "--temperature", "--top_k", "--top_p", "--seed"):
        status, out, err = sampled("--snapshot", trained, option, "many")
        assert (status, out) == (2, "")
        assert option in err
        assert "'many'" in err
        assert "Traceback" not in err


def test_an_unknown_character_is_told_with_the_known_ones(trained: Path, sampled: Sampled) -> None:
    err = sampled("--snapshot", trained, "--prompt", "what?")[2]
    assert "'?hw'" in err
    assert repr(load_snapshot(str(newest(trained)))["vocabulary"]) in err


def test_without_a_path_the_default_run_is_looked_for(
    tmp_path: Path, sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = sampled()
    assert (status, out) == (2, "")
    assert_one_message(err, "--snapshot", "runs/default", str(tmp_path), "main.py")
    assert list(tmp_path.iterdir()) == []


def test_several_prompts_are_continued_at_once(trained: Path, sampled: Sampled) -> None:
    knobs = ("--snapshot", trained, "--temperature", 0, "--max_new_tokens", NEW)
    prompts = ("anna", "bob does eat", "ñ")
    alone = [sampled(*knobs, "--prompt", prompt)[1] for prompt in prompts]
    together = sampled(*knobs, *(word for prompt in prompts for word in ("--prompt", prompt)))
    assert together == (0, "\n\n".join(alone) + "\n", "")


def test_weights_that_are_not_finite_write_nothing(trained: Path, tmp_path: Path, sampled: Sampled) -> None:
    snapshot = load_snapshot(str(newest(trained)))
    snapshot["model"] = {name: weight / 0 for name, weight in snapshot["model"].items()}
    file = SnapshotStorage(str(tmp_path), keep=1).write(snapshot, None)
    status, out, err = sampled("--snapshot", file)
    assert (status, out) == (2, "")
    assert_one_message(err, file, "not finite", "older")


@pytest.mark.parametrize(
    ("stdin", "expected"), [("anna ñ".encode(), "anna ñ"), (b"bob\n\n", "bob\n"), (b"b\xff", None)]
)
def test_a_prompt_may_come_from_stdin(
    stdin: bytes, expected: str | None, trained: Path, sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="ascii"))  # as after LC_ALL=C
    status, out, err = sampled("--snapshot", trained, "--prompt", "-", "--max_new_tokens", 9)
    if expected is None:
        assert (status, out) == (2, "")
        assert_one_message(err, "--prompt", "stdin", "0xff")
    else:
        assert (status, err) == (0, "")
        assert out.startswith(expected)
        assert len(out) == len(expected) + 9


# Real processes


def test_ctrl_c_ends_it_without_a_traceback(trained: Path) -> None:
    command = [sys.executable, ROOT / "sample.py", "--snapshot", trained, "--max_new_tokens", "9999999"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_env()) as process:
        try:
            assert process.stdout.read(5)
            process.send_signal(signal.SIGINT)
            process.stdout.close()
            assert process.wait(30) == 130
            assert process.stderr.read() == b""
        finally:
            process.kill()


def test_a_terminal_that_is_ascii_gets_utf_8(trained: Path) -> None:
    command = [
        sys.executable,
        ROOT / "sample.py",
        "--snapshot",
        trained,
        "--prompt",
        "ñandú—🙂",
        "--top_k",
        "5",
        "--max_new_tokens",
        "100",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        env=clean_env(LC_ALL="C", PYTHONIOENCODING="ascii", OMP_NUM_THREADS="1"),
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode("utf-8")
    assert text.startswith("ñandú—🙂")
    assert len(text) == len("ñandú—🙂") + 100
    assert not text.isascii()


def test_a_reader_that_has_seen_enough_ends_it(trained: Path) -> None:
    """As `sample.py | head -c 5` does."""
    command = [
        sys.executable,
        ROOT / "sample.py",
        "--snapshot",
        trained,
        "--prompt",
        "anna",
        "--max_new_tokens",
        "9999999",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_env()) as process:
        assert process.stdout.read(5)[:4] == b"anna"
        process.stdout.close()
        try:
            assert process.wait(30) == 0
            assert process.stderr.read() == b""
        finally:
            process.kill()


def test_what_was_learned_is_worth_sampling(trained: Path) -> None:
    """Guards the tests above: six steps are enough to differ from the start, so that texts can differ."""
    model = load_snapshot(str(newest(trained)))
    assert model["val_loss"] < math.log(len(model["vocabulary"]))
