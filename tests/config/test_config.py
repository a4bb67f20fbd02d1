"""Reading of yaml and command line, and the one message that lists all mistakes."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from mingpt.config.parser import DEFAULT_CONFIG, build_parser, config_options, option_words, read_config
from mingpt.config.schema import KEYS, REMOVED_KEYS, SECTIONS, SHAPE_KEYS, Config, ModelConfig, config_to_dict
from mingpt.config.yaml_format import dump_config
from mingpt.errors import UserError
from tests.helpers import ROOT, newest_snapshot, run_program, write_text

PATHS = ("data.path", "trainer.init_from", "trainer.run_dir", "trainer.snapshot_path")
TEXT_KEYS = [name for name, field in KEYS.items() if field.annotation in (str, str | None)]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def error_of(*argv: object) -> str:
    with pytest.raises(UserError) as error:
        read_config([str(arg) for arg in argv])
    return str(error.value)


def options(values: dict[str, Any]) -> list[str]:
    """A command line of these values. Text for keys that are not text is quoted, so that yaml reads it as text."""
    words = []
    for name, value in values.items():
        is_text = isinstance(value, str) and name in TEXT_KEYS
        words += [f"--{name}", value if is_text else json.dumps(value)]
    return words


def write_yaml(file: Path, values: dict[str, Any]) -> None:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    file.write_text(yaml.safe_dump(sections, sort_keys=False))


# Reading


@pytest.mark.parametrize("content", ["# nothing\n", "model:\n  n_layer: 2\ndata:\n"])
def test_keys_that_are_not_given_have_their_defaults(content: str, config_file: Path) -> None:
    config_file.write_text(content)
    expected = Config(model=ModelConfig(n_layer=2)) if "n_layer" in content else Config()
    assert read_config(["--config", str(config_file)]) == expected


def test_without_config_the_shipped_yaml_is_read_and_none_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / DEFAULT_CONFIG.name).write_text("model: {n_layer: 2}")
    monkeypatch.chdir(tmp_path)
    assert read_config() == Config()


def test_the_command_line_overrides_the_yaml(config_file: Path) -> None:
    config_file.write_text("trainer: {max_steps: 5, batch_size: 6}\n")
    config = read_config(["--trainer.max_steps", "7", "--config", str(config_file), "--model.n_head=2"])
    assert (config.trainer.max_steps, config.trainer.batch_size, config.model.n_head) == (7, 6, 2)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("optimizer.learning_rate", ".5", 0.5),
        ("optimizer.learning_rate", "1", 1.0),
        ("trainer.max_epochs", "null", None),
        ("trainer.micro_batch_size", "~", None),
        ("model.bias", "false", False),
        ("optimizer.betas", "[8e-1, .95]", (0.8, 0.95)),
        ("trainer.threads", "auto", "auto"),
        ("data.path", "s3://bucket/some text.txt", "s3://bucket/some text.txt"),
        ("trainer.snapshot_path", "null", None),
        ("trainer.snapshot_path", "2024-01-31", "2024-01-31"),
        ("trainer.snapshot_path", "12:30", "12:30"),
        ("trainer.snapshot_path", "yes", "yes"),
        ("trainer.snapshot_path", "1_000", "1_000"),
    ],
)
def test_values_are_read_alike_from_yaml_and_command_line(
    name: str, text: str, value: object, config_file: Path
) -> None:
    section, key = name.split(".")
    config_file.write_text(f"{section}:\n  {key}: {text}\n")
    for argv in (["--config", str(config_file)], [f"--{name}", text], [f"--{name}={text}"]):
        found = getattr(getattr(read_config(argv), section), key)
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize("glob", ["*.txt", "[ab]*.txt", "{a,b}.txt", "!a", "@a"])
def test_a_glob_on_the_command_line_needs_no_yaml_quotes(glob: str) -> None:
    assert read_config(["--data.path", glob]).data.path == glob


def test_print_config_prints_yaml_that_reads_the_same(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--trainer.max_epochs", "2", "--trainer.max_steps", "null", "--optimizer.learning_rate", "3e-4"]
    argv += ["--optimizer.betas", "[0.8, 0.9]", "--data.path", "12"]
    with pytest.raises(SystemExit) as exit_:
        read_config([*argv, "--print_config"])
    assert exit_.value.code == 0
    config_file.write_text(capsys.readouterr().out)
    assert read_config(["--config", str(config_file)]) == read_config(argv)
    printed = yaml.safe_load(config_file.read_text())
    assert printed == config_to_dict(read_config(argv))
    assert [f"{section}.{key}" for section, keys in printed.items() for key in keys] == list(KEYS)


# Text that yaml would take for something else.
WORDS = r"""
1e3 -1e-3 010 1_000 0x1f 1:30 .5 .inf 12 2024-01-31 2024-01-31T12:30:00Z ~ null true yes = << --- - ? : a: #a 'a' "a \n
[a] [ {a: } {{a}} , &a *a !a ! | > %a @a `a` --config -a a=b $HOME %(prog)s ñ
"""
PHRASES = ("- a", "a: b", "a #b", "runs/try #2", "2024-01-31 12:30:00", "a  b", " a", "a ", "\ta", "a\nb", "a\n")
TEXTS = [*WORDS.split(), *PHRASES, "\U0001f600", "a " * 200]


def test_text_of_the_command_line_is_taken_as_it_is_and_reads_back_equal(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text reads back equal from --print_config, config.yaml and the command lines that programs show."""
    names = [name for name in TEXT_KEYS if name != "distributed.init_method"]  # its text must be an address
    for i in range(0, len(TEXTS), len(names)):
        given = dict(zip(names, TEXTS[i:], strict=False))
        argv = [word for name, text in given.items() for word in option_words(name, text)]
        config = read_config(argv)
        found = config_to_dict(config)
        expected = {
            name: re.sub("^-", "./-", os.path.expandvars(os.path.expanduser(text))) if name in PATHS else text
            for name, text in given.items()
        }
        assert {name: found[name.split(".")[0]][name.split(".")[1]] for name in given} == expected
        with pytest.raises(SystemExit):
            read_config([*argv, "--print_config"])
        printed = capsys.readouterr().out
        assert dump_config(found) == printed
        config_file.write_text(printed)
        assert read_config(["--config", str(config_file)]) == config
        assert read_config(config_options(build_parser().parse_args(argv))) == config
        assert read_config(shlex.split(shlex.join(argv))) == config


def test_numbers_read_back_equal(config_file: Path) -> None:
    for value in (1e-300, 5e-324, 1e-05, 0.1, 1 / 3, 1.0, 9.999999999999999):
        config = read_config(["--optimizer.learning_rate", repr(value)])
        config_file.write_text(dump_config(config_to_dict(config)))
        assert read_config(["--config", str(config_file)]).optimizer.learning_rate == value


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/*.yaml")), ids=lambda file: file.stem)
def test_a_configuration_in_configs_trains_with_its_shape_cut(file: Path, tmp_path: Path) -> None:
    cuts = {
        "data.path": str(write_text(tmp_path / "text.txt")),
        "data.block_size": 16,
        "model.n_layer": 2,
        "model.n_embd": 24,
        "trainer.batch_size": 12,
        "trainer.max_steps": 2,
        "trainer.compile": False,
        "trainer.run_dir": str(tmp_path / "run"),
    }
    done = run_program("main.py", "--config", str(file), *options(cuts))
    assert (done.returncode, done.stderr) == (0, "")
    assert newest_snapshot(tmp_path / "run")["step"] == 2


def test_the_shipped_yaml_is_the_printed_default(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_file.touch()
    with pytest.raises(SystemExit):
        read_config(["--config", str(config_file), "--print_config"])
    text = capsys.readouterr().out
    assert text == DEFAULT_CONFIG.read_text()
    comments = re.findall(r"^  \w+: .*? # (.*)$", text, re.MULTILINE)
    assert comments == [field.description for field in KEYS.values()]


def test_help_has_a_short_usage_line_and_every_description_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        read_config(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].endswith(" [--config FILE] [--SECTION.KEY VALUE ...]")
    assert text.splitlines()[1] == ""
    compact = "".join(text.split())  # lines may break anywhere
    for name, field in KEYS.items():
        option = "".join(f"--{name} X {field.description} (default: ".split())
        default = re.search(re.escape(option) + r"(.*?)\)", compact)
        section, key = name.split(".")
        assert default, name
        assert yaml.safe_load(default[1]) == config_to_dict(Config())[section][key]


@pytest.mark.parametrize("argv", [["--local_rank=1"], ["--local-rank", "1"]])
def test_the_local_rank_that_older_launchers_pass_is_ignored(argv: list[str]) -> None:
    assert read_config([*argv, "--model.n_layer", "2"]) == Config(model=ModelConfig(n_layer=2))


def test_all_keys_of_the_model_but_dropout_shape_the_weights() -> None:
    """With a new key that is missing in SHAPE_KEYS, runs would resume or start from weights of another shape."""
    assert {name for name in KEYS if name.startswith("model.")} - set(SHAPE_KEYS) == {"model.dropout"}


# Refusing


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"model: {n_layer: 2\n", ["not valid yaml", "line 2"]),
        (b"model: \xff\xfe\n", ["not valid yaml", "#x00ff", "position 7"]),
        (b"just words\n", ["'just words'", *SECTIONS]),
        (b"model: [n_layer]\n", ["model (in ", "found ['n_layer'], must hold keys"]),
        (b"modle:\n  n_layer: 2\n", ["modle (in ", "unknown section", "the nearest is model", *SECTIONS]),
        (b"trainer:\n  max_step: 2\n", ["trainer.max_step (in ", "unknown key", "the nearest is trainer.max_steps"]),
        (b"model:\n  n_layer: 2\n  n_head: 2\n  n_layer: 3\n", ["duplicate key", "n_layer", "line 4"]),
        (b"data:\n  path: {{ path }}\n", ["path"]),  # a template without its value
    ],
)
def test_invalid_yaml_is_refused_naming_file_and_place(content: bytes, parts: list[str], config_file: Path) -> None:
    config_file.write_bytes(content)
    message = error_of("--config", config_file)
    for part in (str(config_file), *parts):
        assert part in message


def test_a_key_of_an_earlier_version_is_refused_with_what_replaces_it(config_file: Path) -> None:
    config_file.write_text("distributed:\n  survive: true\n")
    advice = REMOVED_KEYS["distributed.survive"]
    message = error_of("--config", config_file)
    assert message == f"distributed.survive (in {config_file}) is no longer a key: {advice}"
    message = error_of("--distributed.survive", "true")
    assert message == f"command line: distributed.survive is no longer a key: {advice}"


def test_a_config_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        assert error_of("--config", path).startswith(f"--config: {path} can't be read: ")
    assert "--config" in error_of("--config", "")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--trainer.max_step", "3"], ["--trainer.max_step is not known", "the nearest is trainer.max_steps"]),
        (["stray"], ["stray is not known"]),
        (["--optimizer.lr", "3"], ["--optimizer.lr is not known; here it is optimizer.learning_rate"]),
        (["--eval_iters=3"], ["--eval_iters=3 is not known; here it is trainer.eval_windows"]),
        (["--trainer.max_steps"], ["--trainer.max_steps: expected one argument"]),
    ],
)
def test_unknown_and_incomplete_options_are_refused(argv: list[str], parts: list[str]) -> None:
    message = error_of(*argv)
    for part in ("command line: ", *parts, "--help lists all"):
        assert part in message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trainer.max_steps", "30"], "command line: trainer.max_steps is not known; write --trainer.max_steps"),
        (["--data.path", "README.md", "LICENSE.txt"], "quote it, like --data.path 'books/*.txt'"),
        (["--distributed.strategy", "zero3"], "must be 'ddp', 'zero1', 'zero2' or 'fsdp'; ZeRO-3 is fsdp"),
        (["--trainer.max_steps", "null"], "both null; set one, or training would not end (in the command line)"),
    ],
)
def test_what_shells_and_other_programs_suggest_is_answered_with_what_to_write(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("LICENSE.txt").touch()
    assert error_of(*argv).endswith(message)


def test_all_mistakes_are_in_one_message(config_file: Path) -> None:
    config_file.write_text(
        "modle: {}\ndata: {pth: a, block_size: 0}\nmodel: {n_layer: two, bias: 3}\noptimizer: {betas: [2.0, 0.9]}\n"
    )
    lines = error_of("--config", config_file, "--trainer.max_steps", "many").splitlines()
    wrong = [f"{name} (in {config_file}): found " for name in ("data.block_size", "model.n_layer", "model.bias")]
    wrong += [f"optimizer.betas (in {config_file}): found ", "trainer.max_steps (in the command line): found "]
    unknown = [f"{name} (in {config_file}): unknown " for name in ("data.pth", "modle")]
    assert len(lines) == len(unknown + wrong)
    assert all(line.strip().startswith(start) for line, start in zip(lines, unknown + wrong, strict=True)), lines


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("model.n_layer", ["two", 2.5, "2", True, None, [2], {"a": 2}], ["a valid integer"]),
        ("model.architecture", ["llama", 2, None], ["'gpt2' or 'nanochat'"]),
        ("model.bias", [1, "maybe", "true", None], ["true or false"]),
        ("trainer.max_steps", [True, 1.5, "auto"], ["null or a valid integer"]),
        ("trainer.threads", ["many", 1.5, True, None], ["a valid integer", "'auto'"]),
        ("distributed.strategy", ["dp"], ["'ddp'", "DataParallel", "torchrun"]),
        ("optimizer.betas", [0.9, [0.9], [0.8, 0.9, 0.99], ["a", "b"], [0.9, None], None], ["a list of two numbers"]),
    ],
)
def test_values_of_the_wrong_type_are_refused(
    name: str, values: list[Any], allowed: list[str], config_file: Path
) -> None:
    for value in values:
        write_yaml(config_file, {name: value})
        for origin, argv in ((config_file, ["--config", config_file]), ("the command line", options({name: value}))):
            message = error_of(*argv)
            assert message.startswith(f"{name} (in {origin}): found {value!r}, must be ")
            assert all(part in message for part in allowed), message
            assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "texts", "allowed"),
    [
        ("trainer.seed", ["010", "12:30", "1_000", "0x1f", "0o17", "2024-01-31"], "a valid integer"),
        ("optimizer.learning_rate", ["1:30.5", "1_0.5", "01.5", ".nan"], "a valid number"),
        ("trainer.compile", ["yes", "off", "y"], "true or false"),
    ],
)
def test_what_yaml_reads_as_another_number_or_as_a_boolean_is_refused(
    name: str, texts: list[str], allowed: str, config_file: Path
) -> None:
    section, key = name.split(".")
    for text in texts:
        config_file.write_text(f"{section}: {{{key}: {text}}}\n")
        for origin, argv in ((config_file, ["--config", config_file]), ("the command line", [f"--{name}", text])):
            assert error_of(*argv) == f"{name} (in {origin}): found {text!r}, must be {allowed}"


def test_values_out_of_range_are_refused_in_one_message(config_file: Path) -> None:
    numbers = [name for name, field in KEYS.items() if re.search(r"\b(int|float|Fraction)\b", str(field.annotation))]
    write_yaml(config_file, {name: [-1, -1] if name == "optimizer.betas" else -1 for name in numbers})
    lines = [line.strip() for line in error_of("--config", config_file).splitlines()]
    assert {line.split()[0] for line in lines} == set(numbers)
    assert all("must be " in line and "greater than " in line for line in lines), lines
    too_large = {"trainer.max_steps": 10**8, "trainer.threads": 1025, "model.dropout": 1.0, "trainer.seed": 2**63}
    lines = error_of(*options(too_large)).splitlines()
    assert all("less than " in line for line in lines)
    assert len(lines) == len(too_large)


def test_numbers_that_are_not_finite_are_refused_in_one_message() -> None:
    names = [name for name, field in KEYS.items() if "float" in str(field.annotation)]
    argv = [f"--{name}=[1e999, 0.9]" if name == "optimizer.betas" else f"--{name}=1e999" for name in names]
    lines = error_of(*argv).splitlines()
    assert [line.split()[0] for line in lines] == names
    for line in lines:
        assert re.search(r"found \[?inf.*, must be (null or )?a finite number$", line)


def test_paths_are_expanded_and_urls_are_refused_where_a_folder_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("B", "bucket")
    written = ("~/a b", "$HOME/a", "x/${B}/a$", "-a")
    read = ("/home/ada/a b", "/home/ada/a", "x/bucket/a$", "./-a")
    for text, path in zip(written, read, strict=True):
        found = config_to_dict(read_config([f"--{name}={text}" for name in PATHS]))
        assert [found[section][key] for section, key in (name.split(".") for name in PATHS)] == [path] * 4
    monkeypatch.delenv("B")
    for name, line in zip(PATHS, error_of(*(f"--{name}=s3://$B/a" for name in PATHS)).splitlines(), strict=True):
        null = "null or " if name in ("trainer.init_from", "trainer.snapshot_path") else ""
        assert line.strip() == (
            f"{name} (in the command line): found 's3://$B/a', must be {null}a path whose variables are set in the "
            "environment"
        )
    for name, path, allowed in (
        ("trainer.run_dir", "s3://bucket/run", "a folder of this machine; only trainer.snapshot_path may be a URL"),
        ("distributed.init_method", "http://a", "null or env://, tcp://host:port or file:///path"),
        ("distributed.init_method", "tcp://host", "null or env://, tcp://host:port or file:///path"),
        ("distributed.init_method", "tcp://host:abc", "null or env://, tcp://host:port or file:///path"),
        ("distributed.init_method", "file://a/b", "null or env://, tcp://host:port or file:///path"),
    ):
        error = error_of(f"--{name}={path}")
        assert error.startswith(f"{name} (in the command line): found {path!r}, must be {allowed}")
