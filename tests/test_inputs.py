import ctypes
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

import export
import plot
import sample
from main import main
from mingpt.config.conflicts import find_start_conflicts
from mingpt.config.parser import read_config
from mingpt.config.schema import KEYS
from mingpt.program import run_program as exit_status_of
from mingpt.snapshot import __main__ as listing
from tests.helpers import SMALL_CONFIG, run_args, run_main, run_ranks, write_text
from tests.inside import assert_one_message

Refusal = Callable[..., str]  # the fixture `refusal`
STAGES = "--distributed.pipeline_stages 2 --trainer.micro_batch_size 2 --trainer.batch_size 8"
TREE = "--distributed.reduction tree --trainer.micro_batch_size 2 --trainer.threads 1"
OFFLOAD = "--distributed.strategy fsdp --distributed.cpu_offload true --optimizer.name adamw"
FP16 = "--trainer.precision fp16"

# yaml, and parts of the message
YAML = [
    (b"trainer:\n  max_steps: 5\nmodel: {n_layer: 1}\ntrainer:\n  log_every: 5\n", ["a key is there twice", "line 1"]),
    (b"trainer:\n  max_steps: 5\n  max_steps: 9\n", ["a key is there twice", "line 2"]),
    (b"model: {n_layer: 2\n", ["line 2"]),
    (b"model: \xff\xfe\n", ["#x00ff", "position 7"]),
    (b"just words\n", ["'just words'", "data, model"]),
    (b"data: {path: {{ path }}}\n", ["line 1"]),  # a template without its value
    (b"model: [n_layer]\n", ["model (in ", "is not known"]),
    (b"model: false\ntrainer: 0\n", ["model (in ", "trainer (in "]),
    (b"modle:\n  n_layer: 2\n", ["modle.n_layer (in ", "nearest is model.n_layer"]),
    (b"max_steps: 2\n", ["max_steps (in ", "nearest is trainer.max_steps"]),
]
# Options, and parts of the message
OPTIONS = [
    ("--config none.yaml", ["none.yaml", "No such file"]),
    ("--data.path a.txt text.txt", ["text.txt", "quote"]),
    ("--bias=3", ["bias", "nearest is model.bias"]),
    ("--trainer.max_steps", ["trainer.max_steps", "''"]),
    # Text and places
    ("--trainer.run_dir ''", ["trainer.run_dir", "''", "at least 1 character"]),
    ("--trainer.run_dir s3://bucket/run", ["trainer.run_dir", "'s3://bucket/run'", "a folder of this machine"]),
    ("--trainer.snapshot_path 's3://$UNSET/a'", ["trainer.snapshot_path", "$UNSET", "environment"]),
    ("--distributed.init_method http://a", ["'http://a'", "tcp://host:port"]),
    ("--distributed.init_method tcp://host:65536", ["tcp://host:port"]),
    ("--distributed.init_method file://a/b", ["file:///path"]),
    # Conflicts
    ("--model.n_embd 30 --model.n_head 4", ["model.n_embd is 30", "model.n_head, 4"]),
    ("--trainer.max_steps null", ["trainer.max_epochs", "trainer.max_steps", "null"]),
    ("--distributed.cpu_offload true --optimizer.name muon", ["must be fsdp", "optimizer.name is muon"]),
    (f"{OFFLOAD} {FP16}", ["precision is fp16", "fp32 or bf16 with distributed.cpu_offload"]),
    (f"{OFFLOAD} {STAGES}", ["cpu_offload", "pipeline_stages"]),
    (f"{TREE} --trainer.micro_batch_size null", ["micro_batch_size is null", "reduction tree"]),
    (f"{TREE} --trainer.threads 2", ["threads is 2", "auto or 1", "reduction tree"]),
    (f"{TREE} {FP16}", ["precision is fp16", "fp32 or bf16 with distributed.reduction tree"]),
    (f"{TREE} --distributed.strategy zero1", ["distributed.strategy", "ddp", "reduction tree"]),
    (f"{TREE} {STAGES}", ["reduction is tree", "fast", "pipeline_stages"]),
    (f"{STAGES} --trainer.micro_batch_size null", ["micro_batch_size is null", "pipeline_stages"]),
    (f"{STAGES} --distributed.pipeline_stages 5", ["pipeline_stages is 5", "model.n_layer, 2"]),
    # What the environment, the machine or the text lacks
    ("--data.path none.txt", ["data.path", "No such file", "none.txt"]),
    ("--trainer.sample_prompt 'anna? Yes'", ["sample_prompt: the tokens '?Y' (2 distinct) are not in the training"]),
    ("--data.path folder", ["data.path", "FOLDER/*.txt in quotes"]),
    ("--model.n_embd 4194304", ["out of memory: lower trainer.micro_batch_size"]),
    ("--optimizer.learning_rate 3e38", ["step 1", "not finite", "(3e+38)"]),
    (f"{STAGES} {FP16}", ["precision is fp16", "fp32 or bf16 with distributed.pipeline_stages"]),
    (FP16, ["precision is fp16", "cpu", "fp32", "bf16"]),
    (OFFLOAD, ["cpu_offload is true", "GPU"]),
    ("RANK=0 WORLD_SIZE=2 --distributed.init_method env://", ["MASTER_ADDR", "MASTER_PORT"]),
    ("RANK=0 WORLD_SIZE=1 LOCAL_RANK=3 --trainer.max_step 3", ["trainer.max_step "]),
]

# Values that no key of this type allows, in yaml and on the command line, and what is allowed
WRONG_VALUES = [
    ("model.n_layer", "two 2.5 true 12:30 0x1f 1e3 null [2] -1", ["a valid integer", "greater than 0"]),
    ("model.dropout", "true .nan 1:30.5 1 nan", ["a valid number", "less than 1", "a finite number"]),
    ("optimizer.name", "sgd 2 null", ["'muon' or 'adamw'"]),
    ("model.bias", "2 maybe null 1.0", ["a valid boolean"]),
    ("trainer.max_steps", "true 1.5 auto 100000000 0", ["a valid integer", "less than", "greater than"]),
    ("trainer.threads", "many 1.5 true null 0", ["a valid integer", "'auto'", "greater than 0"]),
    ("trainer.seed", "9223372036854775808 -1", ["less than 9223372036854775808", "greater than or equal to 0"]),
    ("optimizer.betas", "0.9 [0.9] [a,b] [0.9,] [2.0,0.9] null", ["tuple", "number", "item", "less", "Field"]),
]
# Options, ranks, device, and parts of the message
STARTS = [
    ("--trainer.batch_size 2", 3, "cpu", ["batch_size is 2", "the 3 ranks"]),
    (STAGES, 1, "cpu", ["pipeline_stages is 2", "the 1 processes"]),
    (STAGES, 3, "cpu", ["pipeline_stages is 2", "the 3 processes"]),
    (f"{STAGES} --trainer.micro_batch_size 3", 2, "cpu", ["batch_size is 8", "a multiple of 3 "]),
    (f"{TREE} --trainer.batch_size 3", 3, "cpu", ["micro_batch_size is 2", "the 3 ranks"]),
    (TREE, 2, "cuda", ["trainer.deterministic is false", "true", "reduction tree"]),
    (FP16, 1, "mps", ["precision is fp16", "on mps"]),
    (TREE, 6, "cpu", []),
    (OFFLOAD, 2, "cuda", []),
    (STAGES, 4, "cpu", []),
    (f"{FP16} --trainer.deterministic true", 12, "cuda", []),
]


@pytest.fixture
def refusal(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs main.py with a small configuration, a yaml, and options after variables. Returns its one message."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    values = SMALL_CONFIG | {"data.path": text, "trainer.run_dir": "run", "trainer.max_steps": 1}
    Path("small.yaml").write_text("\n".join(f"{name}: {value}" for name, value in values.items()))
    names = {path.name for path in tmp_path.iterdir()} | {"case.yaml"}

    def refuse(options: str = "", yaml: bytes = b"", parts: Sequence[str] = ()) -> str:
        Path("case.yaml").write_bytes(yaml)
        argv = ["--config", "small.yaml", "--config", "case.yaml", *shlex.split(options)]
        while re.match(r"[A-Z_]+=", argv[4] if len(argv) > 4 else ""):
            monkeypatch.setenv(*argv.pop(4).split("="))
        assert run_main(argv) == 2
        _, err = capsys.readouterr()
        assert_one_message(err, *parts)
        assert len(err) < 3000
        assert {path.name for path in tmp_path.iterdir()} - names <= {"run"}
        assert not list(tmp_path.glob("run/snapshots/step_*"))
        return err

    return refuse


def test_mistakes_in_a_yaml_are_named_with_the_file(refusal: Refusal) -> None:
    for yaml, parts in YAML:
        refusal(yaml=yaml, parts=["case.yaml", *parts])


@pytest.mark.parametrize(("options", "parts"), OPTIONS)
def test_bad_input_of_a_run_is_refused_in_one_message(options: str, parts: list[str], refusal: Refusal) -> None:
    refusal(options, parts=parts)


@pytest.mark.parametrize(("name", "values", "allowed"), WRONG_VALUES)
def test_values_of_the_wrong_type_are_refused(name: str, values: str, allowed: list[str], refusal: Refusal) -> None:
    for value in values.split():
        section, key = name.split(".")
        of_option = refusal(f"--{name}={value}")
        of_yaml = refusal(yaml=f"{section}:\n  {key}: {value}\n".encode())
        for message, place in ((of_option, "the command line"), (of_yaml, "case.yaml")):
            assert message.startswith(f"error: {name} (in {place}): found ")
            assert len(message.splitlines()) == 1
            assert re.sub(r"\W", "", value).replace("null", "None") in re.sub(r"\W", "", message)
            assert any(part in message for part in allowed), message


def test_all_mistakes_are_in_one_message(refusal: Refusal) -> None:
    yaml = b"data: {pth: a, block_size: 0}\nmodel: {n_layer: two, bias: 3}\noptimizer: {betas: [2.0, 0.9]}\n"
    message = refusal("--trainer.max_steps many --trainer.max_step 3", yaml)
    places = [
        "data.pth (in case.yaml)",
        "trainer.max_step (in the command line)",
        "data.block_size (in case.yaml)",
        "model.n_layer (in case.yaml)",
        "model.bias (in case.yaml)",
        "optimizer.betas (in case.yaml)",
        "trainer.max_steps (in the command line)",
    ]
    assert re.findall(r"^(?:error: |  )(\S+ \(.*?\))", message, re.MULTILINE) == places
    conflicts = refusal("--trainer.max_steps null", b"model: {n_embd: 33}")
    found = re.findall(r"^(?:error: |  )(\S+) .*\(in (.*)\)$", conflicts, re.MULTILINE)
    assert found == [("model.n_embd", "case.yaml"), ("trainer.max_epochs", "the command line")]


def test_numbers_out_of_range_are_refused_in_every_key(refusal: Refusal) -> None:
    numbers = [name for name, field in KEYS.items() if re.search(r"\b(int|float|Fraction)\b", str(field.annotation))]
    floats = [name for name in numbers if "float" in str(KEYS[name].annotation)]
    for names, value in ((numbers, "-1"), (floats, "1e999"), (floats, "nan")):
        lines = refusal(" ".join(f"--{name}={value}" for name in names)).removeprefix("error:").splitlines()
        assert [line.split()[0] for line in lines] == names
        assert all(re.search("greater than|a finite number|a valid tuple", line) for line in lines), lines


@pytest.mark.parametrize(("options", "world_size", "device", "parts"), STARTS)
def test_conflicts_with_ranks_and_device(options: str, world_size: int, device: str, parts: list[str]) -> None:
    conflicts = list(find_start_conflicts(read_config(options.split()), world_size, device))
    assert len(conflicts) == bool(parts)
    assert all(part in conflicts[0] for part in parts), conflicts


PROGRAMS = {"sample.py": sample.run, "export.py": export.run, "mingpt.snapshot": listing.run, "plot.py": plot.run}
COMMANDS = {
    "train": ["main.py", *run_args(Path("runs/new"), "books/text.txt", trainer__max_steps=1)],
    "resume": ["main.py", *run_args(Path("runs/old"), "books/text.txt", trainer__max_steps=2)],
    "sample": ["sample.py", "--snapshot", "runs/old", "--max_new_tokens", "1"],
    "export": ["export.py", "--snapshot", "runs/old", "--out", "runs/exported"],
    "list": ["mingpt.snapshot", "runs/old"],
    "plot": ["plot.py", "runs/old"],
}
# A place, its mode, the commands that are refused, and some of those that work
MODES = [
    ("books/text.txt", 0o000, "train", "resume sample"),
    ("runs/old/data", 0o000, "resume", "sample"),
    ("runs", 0o555, "train export", "resume list"),
    ("runs/old", 0o000, "resume sample export list plot", ""),
    ("runs/old", 0o555, "resume", "sample export list"),
    ("runs/old/metrics.jsonl", 0o000, "resume plot", "sample"),
    ("runs/old/snapshots", 0o000, "resume sample export list", ""),
    ("runs/old/snapshots", 0o555, "resume", "sample export list"),
    ("runs/old/snapshots/step_00000001.pt", 0o000, "resume sample export", ""),
]


@pytest.mark.skipif(sys.platform != "linux", reason="root gives up its capabilities by a system call of Linux")
def test_files_of_any_mode_work_or_are_named_in_one_message(tmp_path: Path) -> None:
    run_ranks(1, _run_with_modes, tmp_path, tmp_path=tmp_path)


def _run_with_modes(folder: Path) -> None:
    """Runs the commands without the capabilities of root, which ignore modes."""
    os.environ["OMP_NUM_THREADS"] = "1"  # sample.py does not measure idle cores
    os.chdir(folder)
    os.mkdir("books")
    write_text(Path("books/text.txt"))
    assert run_main(run_args(Path("runs/old"), "books/text.txt", trainer__max_steps=1)) == 0
    shutil.copytree("runs", "kept")
    no_capabilities = (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), no_capabilities) == 0
    for place, mode, refused, working in MODES:
        for command in (*refused.split(), *working.split()):
            if command == "export" and find_spec("transformers") is None:
                continue
            before = os.stat(place).st_mode
            os.chmod(place, mode)
            program, *argv = COMMANDS[command]
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as stderr:
                status, case = exit_status_of(PROGRAMS.get(program, main), argv), (place, mode, command)
            with suppress(FileNotFoundError):
                os.chmod(place, before)
            shutil.rmtree("runs")
            shutil.copytree("kept", "runs")
            err = stderr.getvalue()
            if command in refused.split():
                assert status == 2, (case, err)
                assert_one_message(err, place)
            else:
                assert (status, "error" in err) == (0, False), (case, err)  # transformers shows a progress bar
