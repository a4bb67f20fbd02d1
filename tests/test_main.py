"""What a run is asked to do: yaml and command line in, a configuration or one message out."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import yaml
from helpers import run_args, run_program, run_ranks, train_main, write_text

import main
from mingpt.config import KEYS, SECTIONS, Config, ModelConfig, config_to_dict
from mingpt.config_parser import DEFAULT_CONFIG, read_config
from mingpt.utils import files as run_files


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a run says that ends with status 2: one message, on stderr, without a traceback."""
    status = main.run(argv)
    out, message = capsys.readouterr()
    assert status == 2, (status, out, message)
    assert_one_message(message)
    return message


def assert_one_message(message: str) -> None:
    first, *more = message.splitlines()
    assert first.startswith("error: ")
    assert len(first) > len("error: ")
    assert message.count("error: ") == 1, message
    assert "Traceback" not in message
    assert all(line.startswith("  ") for line in more), message  # a list of mistakes is indented under its title


def in_yaml(name: str, value: str) -> str:
    section, key = name.split(".")
    return f"{section}:\n  {key}: {value}\n"


# Reading


def test_without_a_word_all_keys_have_their_defaults() -> None:
    assert read_config() == Config()


def test_a_partial_yaml_falls_back_to_the_defaults(config_file: Path) -> None:
    config_file.write_text("model:\n  n_layer: 2\ndata:\n")
    assert read_config(["--config", str(config_file)]) == Config(model=ModelConfig(n_layer=2))


def test_an_empty_yaml_is_all_defaults(config_file: Path) -> None:
    config_file.write_text("# nothing yet\n")
    assert read_config(["--config", str(config_file)]) == Config()


def test_the_command_line_beats_the_yaml(config_file: Path) -> None:
    config_file.write_text("trainer: {max_steps: 5, batch_size: 6}\n")
    config = read_config(["--trainer.max_steps", "7", "--config", str(config_file), "--model.n_head=2"])
    assert (config.trainer.max_steps, config.trainer.batch_size, config.model.n_head) == (7, 6, 2)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("optimizer.learning_rate", "1e-3", 1e-3),
        ("optimizer.learning_rate", "1E-3", 1e-3),
        ("optimizer.learning_rate", "2.5e-3", 2.5e-3),
        ("optimizer.learning_rate", ".5", 0.5),
        ("optimizer.learning_rate", "1", 1.0),
        ("optimizer.weight_decay", "1e+1", 10.0),
        ("distributed.timeout_seconds", "1e2", 100.0),
        ("trainer.max_epochs", "3", 3),
        ("trainer.max_epochs", "null", None),
        ("trainer.micro_batch_size", "~", None),
        ("optimizer.grad_norm_clip", "null", None),
        ("optimizer.decay_steps", "40", 40),
        ("data.truncate", "1e-1", 0.1),
        ("model.bias", "false", False),
        ("model.bias", "true", True),
        ("optimizer.betas", "[0.8, 0.95]", (0.8, 0.95)),
        ("optimizer.betas", "[8e-1, .95]", (0.8, 0.95)),
        ("trainer.threads", "auto", "auto"),
        ("trainer.threads", "3", 3),
        ("trainer.precision", "bf16", "bf16"),
        ("data.path", "s3://bucket/some text.txt", "s3://bucket/some text.txt"),
        ("data.path", "'1984'", "1984"),
        ("trainer.snapshot_path", "3e4x", "3e4x"),
    ],
)
def test_values_mean_the_same_in_yaml_and_on_the_command_line(
    name: str, text: str, value: object, config_file: Path
) -> None:
    config_file.write_text(in_yaml(name, text))
    section, key = name.split(".")
    for argv in (["--config", str(config_file)], [f"--{name}", text], [f"--{name}={text}"]):
        found = getattr(getattr(read_config(argv), section), key)
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize("glob", ["*.txt", "**/*.txt", "[ab]*.txt", "texts/[ab]?.txt", "{a,b}.txt", "!a", "@a"])
def test_a_glob_on_the_command_line_stays_text(glob: str) -> None:
    assert read_config(["--data.path", glob]).data.path == glob


def test_print_config_prints_yaml_that_means_the_same(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--trainer.max_epochs", "2", "--trainer.max_steps", "null", "--optimizer.learning_rate", "3e-4"]
    asked += ["--optimizer.betas", "[0.8, 0.9]", "--data.path", "'12'", "--optimizer.grad_norm_clip", "null"]
    with pytest.raises(SystemExit) as end:
        read_config([*asked, "--print_config"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    config_file.write_text(printed)
    assert read_config(["--config", str(config_file)]) == read_config(asked)
    assert yaml.safe_load(printed) == config_to_dict(read_config(asked))


def test_print_config_prints_keys_in_the_order_of_the_shipped_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_config(["--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert [f"{section}.{key}" for section, keys in printed.items() for key in keys] == list(KEYS)


def test_the_shipped_yaml_repeats_the_defaults() -> None:
    assert yaml.safe_load(DEFAULT_CONFIG.read_text()) == config_to_dict(
        Config()
    )  # a config_to_dict loader, which takes 3e-3 for a string


def test_the_shipped_yaml_explains_every_key() -> None:
    lines = [line for line in DEFAULT_CONFIG.read_text().splitlines() if re.match(r" +\w+:", line)]
    assert len(lines) == len(KEYS)
    for line in lines:
        assert re.fullmatch(r"  \w+: \S.* # \S.{3,}", line), line


def test_help_explains_every_key_and_names_its_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        read_config(["--help"])
    assert end.value.code == 0
    words = " ".join(capsys.readouterr().out.partition("options:")[2].split())
    for name in KEYS:
        told = re.search(rf"--{re.escape(name)} X (?!--)(.*?)\(default: (.*?)\)", words)
        assert told, name
        assert len(told[1].split()) > 1, name
        section, key = name.split(".")
        assert yaml.safe_load(told[2]) == config_to_dict(Config())[section][key]
    assert set(SECTIONS) == set(config_to_dict(Config()))


@pytest.mark.parametrize("argv", [["--local_rank=1"], ["--local-rank", "1"], ["--local-rank=0"], ["--local_rank", "3"]])
def test_what_old_launchers_pass_is_ignored(argv: list[str]) -> None:
    assert read_config([*argv, "--model.n_layer", "2"]) == Config(model=ModelConfig(n_layer=2))


def test_a_yaml_of_the_same_name_in_the_working_directory_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / DEFAULT_CONFIG.name).write_text("model: {n_layer: 2}")
    monkeypatch.chdir(tmp_path)
    assert read_config() == Config()


# Refusing what is asked


def test_the_program_ends_with_status_2_and_one_message(tmp_path: Path) -> None:
    done = run_program("main.py", "--trainer.max_steps", "many", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_message(done.stderr)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"model: {n_layer: 2\n", ["not valid yaml", "line 2"]),
        (b"model:\n\tn_layer: 2\n", ["not valid yaml", "line 2"]),
        (b"model: \xff\xfe\n", ["not valid yaml", "0xff"]),
        (b"- model\n- data\n", ["['model', 'data']", *SECTIONS]),
        (b"just words\n", ["'just words'", *SECTIONS]),
        (b"model: 3\n", ["model", "3"]),
        (b"model: [n_layer]\n", ["model", "['n_layer']"]),
        (b"modle:\n  n_layer: 2\n", ["modle", "unknown section", "the nearest is model", *SECTIONS]),
        (b"trainer:\n  max_step: 2\n", ["trainer.max_step", "unknown key", "the nearest is trainer.max_steps"]),
        (b"optimizer:\n  lerning_rate: 1\n", ["optimizer.lerning_rate", "the nearest is optimizer.learning_rate"]),
        (b"1: 2\n", ["1", "unknown section"]),
        (b"model:\n  2: 3\n", ["model.2", "unknown key"]),
        (b"model:\n  n_layer: 2\n  n_head: 2\n  n_layer: 3\n", ["duplicate key", "n_layer", "line 4"]),
        (b"model:\n  n_layer: 2\ndata:\n  block_size: 8\nmodel:\n  n_head: 2\n", ["duplicate", "model", "line 5"]),
        (b"model: &model\n  n_layer: *model\n", ["n_layer"]),
        (b"data:\n  path: {{ path }}\n", ["path"]),  # of a template that nobody filled in
    ],
)
def test_yaml_that_is_no_configuration(
    content: bytes, said: list[str], config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file.write_bytes(content)
    message = refused(capsys, "--config", str(config_file))
    for words in (str(config_file), *said):
        assert words in message


def test_yaml_runs_no_code(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bait = tmp_path / "made by yaml"
    config_file.write_text(in_yaml("data.path", f"!!python/object/apply:os.mkdir ['{bait}']"))
    assert "python/object" in refused(capsys, "--config", str(config_file))
    assert not bait.exists()


def test_a_config_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        message = refused(capsys, "--config", str(path))
        assert "--config" in message
        assert str(path) in message


def test_an_option_that_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    for option, nearest in (
        ("--trainer.max_step", "trainer.max_steps"),
        ("--learning_rate", "optimizer.learning_rate"),
    ):
        for argv in ((option, "3"), (f"{option}=3",)):
            message = refused(capsys, *argv)
            assert option in message
            assert nearest in message
    assert "stray" in refused(capsys, "stray")


def test_all_mistakes_are_told_at_once(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_file.write_text("modle: {}\ndata: {pth: a}\nmodel: {n_leyer: 2}\noptimizer: 3\n")
    message = refused(capsys, "--config", str(config_file))
    for words in ("modle", "data.pth", "model.n_leyer", "optimizer"):
        assert message.count(f"\n  {words}:") == 1

    config_file.write_text("model: {n_layer: two, bias: 3}\ndata: {block_size: 0}\noptimizer: {betas: [0.9, 2.0]}\n")
    message = refused(capsys, "--config", str(config_file), "--trainer.max_steps", "many")
    for words in ("model.n_layer", "model.bias", "data.block_size", "optimizer.betas", "trainer.max_steps"):
        assert message.count(words) == 1
    assert len(message.splitlines()) == 5


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("model.n_layer", "two", "'two'"),
        ("model.n_layer", "2.5", "2.5"),
        ("model.n_layer", "'2'", "'2'"),
        ("model.n_layer", "true", "True"),
        ("model.n_layer", "null", "None"),
        ("model.n_layer", "[2]", "[2]"),
        ("model.dropout", "much", "'much'"),
        ("model.dropout", "true", "True"),
        ("model.dropout", "null", "None"),
        ("optimizer.learning_rate", "'3e-4'", "'3e-4'"),
        ("model.bias", "1", "1"),
        ("model.bias", "maybe", "'maybe'"),
        ("model.bias", "'true'", "'true'"),
        ("model.bias", "null", "None"),
        ("data.path", "12", "12"),
        ("data.path", "true", "True"),
        ("data.path", "null", "None"),
        ("data.path", "[a.txt, b.txt]", "['a.txt', 'b.txt']"),
        ("data.truncate", "half", "'half'"),
        ("data.truncate", "true", "True"),
        ("trainer.max_steps", "true", "True"),
        ("trainer.max_steps", "1.5", "1.5"),
        ("trainer.max_steps", "auto", "'auto'"),
        ("trainer.threads", "many", "'many'"),
        ("trainer.threads", "1.5", "1.5"),
        ("trainer.threads", "true", "True"),
        ("trainer.threads", "null", "None"),
        ("trainer.precision", "fp8", "'fp8'"),
        ("trainer.precision", "16", "16"),
        ("trainer.precision", "null", "None"),
        ("distributed.backend", "mpi", "'mpi'"),
        ("distributed.init_method", "5", "5"),
        ("optimizer.betas", "0.9", "0.9"),
        ("optimizer.betas", "[0.9]", "[0.9]"),
        ("optimizer.betas", "[0.8, 0.9, 0.99]", "[0.8, 0.9, 0.99]"),
        ("optimizer.betas", "[a, b]", "['a', 'b']"),
        ("optimizer.betas", "[0.9, null]", "[0.9, None]"),
        ("optimizer.betas", "null", "None"),
    ],
)
def test_a_value_of_the_wrong_type(
    name: str, text: str, found: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file.write_text(in_yaml(name, text))
    for origin, argv in ((str(config_file), ["--config", str(config_file)]), ("command line", [f"--{name}", text])):
        message = refused(capsys, *argv)
        for words in (name, f"found {found}, must be ", origin):
            assert words in message
        assert len(message.splitlines()) == 1


def test_what_is_allowed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, allowed in (
        (("--trainer.precision", "fp8"), ("auto", "fp32", "bf16", "fp16")),
        (("--trainer.threads", "many"), ("integer", "auto")),
        (("--distributed.backend", "mpi"), ("auto", "nccl", "gloo")),
        (("--distributed.strategy", "zero3"), ("ddp", "zero1", "zero2", "fsdp")),
        (("--distributed.strategy", "dp"), ("ddp", "torchrun", "DataParallel")),
    ):
        told = refused(capsys, *argv).partition("must be")[2]
        assert all(word in told for word in allowed), told


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["--trainer.compile", "true"], {"CXX": "no-such-compiler"}, "no C++ compiler: found no no-such-compiler"),
        (
            ["--distributed.strategy", "fsdp", "--distributed.cpu_offload", "true", "--optimizer.name", "adamw"],
            {},
            "needs a GPU to offload from",
        ),
        (
            ["--distributed.strategy", "fsdp", "--distributed.cpu_offload", "true", "--optimizer.name", "muon"],
            {},
            "optimizer.name is muon, must be adamw",
        ),
        (["--distributed.cpu_offload", "true"], {}, "needs distributed.strategy fsdp, not ddp"),
        (["--trainer.precision", "fp16"], {}, "trainer.precision is fp16, which needs a CUDA GPU"),
    ],
)
def test_what_this_machine_cannot_do(
    words: list[str], env: dict, said: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    argv = [*run_args(tmp_path / "run", text, distributed__backend="gloo"), *words]
    [(status, message)] = run_ranks(1, told, [argv], tmp_path=tmp_path)
    assert status == 2
    assert said in message
    assert len(message.splitlines()) == 1
    assert not list((tmp_path / "run").glob("snapshots/*"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("trainer.micro_batch_size", "null"), ("trainer.threads", "2"), ("trainer.precision", "fp16")]
    + [("distributed.strategy", strategy) for strategy in ("zero1", "zero2", "fsdp")],
)
def test_what_the_tree_cannot_do(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    good = ["--distributed.reduction", "tree", "--trainer.micro_batch_size", "2", "--trainer.threads", "1"]
    read_config(good)
    message = refused(capsys, *good, f"--{name}", value)
    assert f"{name} is {value}" in message
    assert "distributed.reduction tree" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data.block_size", "0"),
        ("data.train_split", "0"),
        ("data.train_split", "1"),
        ("data.train_split", "-0.5"),
        ("data.truncate", "0"),
        ("data.truncate", "1.5"),
        ("model.n_layer", "0"),
        ("model.n_head", "0"),
        ("model.n_embd", "-4"),
        ("model.dropout", "1"),
        ("model.dropout", "-0.1"),
        ("optimizer.learning_rate", "0"),
        ("optimizer.learning_rate", "-1"),
        ("optimizer.learning_rate", ".nan"),
        ("optimizer.learning_rate", ".inf"),
        ("optimizer.min_learning_rate", "-1"),
        ("optimizer.min_learning_rate", "5"),
        ("optimizer.warmup_steps", "-1"),
        ("optimizer.decay_steps", "0"),
        ("optimizer.weight_decay", "-1"),
        ("optimizer.weight_decay", ".nan"),
        ("optimizer.betas", "[1, 0.9]"),
        ("optimizer.betas", "[0.9, -0.1]"),
        ("optimizer.grad_norm_clip", "0"),
        ("optimizer.grad_norm_clip", ".nan"),
        ("trainer.max_epochs", "0"),
        ("trainer.max_steps", "0"),
        ("trainer.max_steps", "null"),
        ("trainer.batch_size", "0"),
        ("trainer.micro_batch_size", "0"),
        ("trainer.threads", "0"),
        ("trainer.seed", "-1"),
        ("trainer.seed", "36893488147419103232"),
        ("trainer.log_every", "0"),
        ("trainer.eval_every", "0"),
        ("trainer.save_every", "0"),
        ("trainer.save_minutes", "0"),
        ("trainer.keep_snapshots", "0"),
        ("distributed.init_method", "http://somewhere"),
        ("distributed.timeout_seconds", "0"),
        ("distributed.timeout_seconds", ".nan"),
        ("distributed.timeout_seconds", ".inf"),
        ("distributed.bucket_cap_mb", "-1"),
    ],
)
def test_a_value_out_of_range(
    name: str, value: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Text and run folder are good, so that a value which slips through is seen to do so, in one step.
    rest = run_args(tmp_path / "run", write_text(tmp_path / "text.txt"), trainer__max_steps=1)
    at = rest.index(f"--{name}") if f"--{name}" in rest else len(rest)
    config_file.write_text(in_yaml(name, value))
    message = refused(capsys, "--config", str(config_file), *rest[:at], *rest[at + 2 :])
    assert name in message
    assert f"(in {config_file})" in message or value == "null" or "found" in message
    shown = {"null": "null", ".nan": "nan", ".inf": "inf"}.get(value, value.strip("[]").split(",")[-1].strip())
    assert shown in message.lower()
    assert not (tmp_path / "run").exists()


def test_a_width_that_heads_do_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "--model.n_embd", "30", "--model.n_head", "4")
    for words in ("model.n_embd", "30", "model.n_head", "4"):
        assert words in message


# Refusing what is there


def test_a_text_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    for path in ("none.txt", "folder", "*.md"):
        message = refused(capsys, *run_args(tmp_path / "run", tmp_path / path))
        assert "data.path" in message
        assert str(tmp_path / path) in message
        assert "`python data/prepare.py`" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", ["data.path", "is empty"]),
        (b"good, then \xff", ["data.path", "UTF-8", "byte 11", "0xff"]),
        (b"a word\n" * 6, ["data.block_size", "block_size + 1 = 17", "5 characters"]),
        (b"a", ["data.block_size", "0 characters"]),
    ],
)
def test_a_text_that_cannot_be_learned(
    content: bytes, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    message = refused(capsys, *run_args(tmp_path / "run", tmp_path / "text.txt"))
    for words in (str(tmp_path / "text.txt"), *said):
        assert words in message


@pytest.mark.parametrize("key", ["data.path", "trainer.snapshot_path"])
def test_a_url_of_a_kind_that_nobody_knows(
    key: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, *run_args(tmp_path / "run", text), f"--{key}", "nosuch://place")
    assert key in message
    assert "nosuch" in message


@pytest.mark.parametrize("key", ["trainer.run_dir", "trainer.snapshot_path"])
def test_a_folder_that_cannot_be_made(key: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = text / "below a file"
    message = refused(capsys, *run_args(tmp_path / "run", text), f"--{key}", str(place))
    assert str(place) in message
    assert key in message


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_run_folder_with_something_in_the_way(
    name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    message = refused(capsys, *run_args(tmp_path / "run", text))
    for words in ("trainer.run_dir", str(tmp_path / "run" / name), "directory", "set another"):
        assert words in message


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere two runs in one folder are not noticed")
def test_a_run_folder_that_another_run_has(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    (tmp_path / "run").mkdir()
    run_files.lock_run_dir(tmp_path / "run", run := type("Run", (), {})())
    message = refused(capsys, *run_args(tmp_path / "run", text))
    for words in ("trainer.run_dir", str(tmp_path / "run"), "wait for it, stop it, or set another"):
        assert words in message
    del run


def test_half_precision_on_a_cpu(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu = ["--distributed.backend", "gloo", "--trainer.precision", "fp16"]
    message = refused(capsys, *run_args(tmp_path / "run", text), *on_cpu)
    for words in ("trainer.precision", "fp16", "bf16", "fp32", "cpu"):
        assert words in message


def told(argvs: list[list[str]], *, gpus: bool = True) -> tuple[int, str]:
    """For `ranks`: exit status and stderr of a run with this rank's own command line."""
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with redirect_stderr(io.StringIO()) as stderr:
        status = train_main(*argvs[int(os.environ.get("RANK", "0"))])
    return status, stderr.getvalue()


def told_without_gpus(argvs: list[list[str]]) -> tuple[int, str]:
    return told(argvs, gpus=False)


def refused_by_both(argvs: list[list[str]], tmp_path: Path) -> str:
    """The message of two ranks that both end with status 2: one of them says it."""
    results = run_ranks(2, told, argvs, tmp_path=tmp_path)
    assert [status for status, _ in results] == [2, 2], results
    message, silence = sorted((stderr for _, stderr in results), reverse=True)
    assert silence == ""
    assert_one_message(message)
    return message


def test_nccl_without_a_gpu(text: Path, tmp_path: Path) -> None:
    argv = [*run_args(tmp_path / "run", text), "--distributed.backend", "nccl"]
    [(status, message)] = run_ranks(1, told_without_gpus, [argv], tmp_path=tmp_path)
    assert status == 2
    assert_one_message(message)
    for words in ("distributed.backend", "nccl", "gloo"):
        assert words in message


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0"},
        {"RANK": "1"},
        {"WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "first", "WORLD_SIZE": "2"},
    ],
)
def test_an_environment_that_is_half_a_launchers(
    environment: dict[str, str],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    message = refused(capsys, *run_args(tmp_path / "run", text))
    for words in ("RANK", "WORLD_SIZE", *environment.values()):
        assert words in message
    assert not (tmp_path / "run").exists()


def test_fewer_sequences_than_ranks(text: Path, tmp_path: Path) -> None:
    message = refused_by_both([run_args(tmp_path / "run", text, trainer__batch_size=1)] * 2, tmp_path)
    for words in ("trainer.batch_size is 1", "2 ranks"):
        assert words in message


# Refusing to go on with another model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and a run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    argv = run_args(folder / "run", write_text(folder / "text.txt"), trainer__max_steps=1)
    assert run_ranks(1, train_main, *argv, tmp_path=folder) == [0]
    return folder


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of all files."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


@pytest.mark.parametrize(
    ("name", "now", "then"),
    [("model.n_embd", "32", "16"), ("model.bias", "false", "true"), ("data.block_size", "8", "16")],
)
def test_a_snapshot_of_another_shape(
    name: str, now: str, then: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(trained / "run")
    argv = run_args(trained / "run", trained / "text.txt", trainer__max_steps=2)
    message = refused(capsys, *argv, f"--{name}", now)
    assert re.search(rf"{name} is {now}\b.*\b{then}\b.*snapshot", message, re.IGNORECASE), message
    assert files(trained / "run") == before


def test_a_snapshot_of_other_characters(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run")
    other = tmp_path / "other.txt"
    other.write_text((trained / "text.txt").read_text().replace("figs", "kiwi"))
    before = files(run)
    message = refused(capsys, *run_args(run, other, trainer__max_steps=2))
    for words in ("data.path", "13 distinct", "'kw'", "'fg'", "step 1"):
        assert words in message
    after = files(run)
    for made in (before, after):  # the other text had to be encoded to know its characters
        for name in [name for name in made if name.startswith("cache/")]:
            del made[name]
    assert after == before
    assert "snapshots/step_00000001.pt" in after


# Ranks that were told different things


def test_ranks_with_different_values_are_refused(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text)
    message = refused_by_both([argv, [*argv, "--optimizer.learning_rate", "1e-2"]], tmp_path)
    for words in ("optimizer.learning_rate", "0.003 on rank 0", "0.01 on rank 1"):
        assert words in message
    assert not (tmp_path / "run").exists()


def test_ranks_with_different_texts_are_refused(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    argvs = [run_args(tmp_path / f"{i}", path) for i, path in enumerate((text, other))]
    message = refused_by_both(argvs, tmp_path)
    for words in ("text", "on rank 0", "on rank 1"):
        assert words in message
    assert len(set(re.findall(r"\b[0-9a-f]{64}\b", message))) == 2


def test_ranks_may_have_their_own_places(text: Path, tmp_path: Path) -> None:
    other = shutil.copy(text, tmp_path / "other.txt")
    argvs = [run_args(tmp_path / f"{i}", path, trainer__max_steps=1) for i, path in enumerate((text, other))]
    assert run_ranks(2, told, argvs, tmp_path=tmp_path) == [(0, ""), (0, "")]
    assert (tmp_path / "0/snapshots/step_00000001.pt").exists()


def test_an_option_without_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--trainer.max_steps: expected one argument" in refused(capsys, "--trainer.max_steps")


def test_an_empty_name_of_a_config_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config" in refused(capsys, "--config", "")
