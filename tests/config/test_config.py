"""Reading of yaml and command line, and the yaml that is written. tests/test_inputs.py has the mistakes."""

import os
import re
import shlex
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from mingpt.config.parser import DEFAULT_CONFIG, read_config
from mingpt.config.schema import HEADINGS, KEYS, SHAPE_KEYS, Config, ModelConfig, config_to_dict
from mingpt.config.yaml_format import dump_config, format_value
from tests.helpers import ROOT, run_each_captured, run_ranks
from tests.inside import newest_snapshot

PATHS = ("data.path", "trainer.init_from", "trainer.run_dir", "trainer.snapshot_path")
TEXT_KEYS = (*PATHS, "trainer.sample_prompt", "trainer.wandb_project")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def read(file: Path, content: str) -> Config:
    file.write_text(content)
    return read_config(["--config", str(file)])


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What main.py prints instead of training."""
    with pytest.raises(SystemExit, match="0"):
        read_config(argv)
    return capsys.readouterr().out


def test_keys_that_are_not_given_have_their_defaults(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No yaml in the working directory is read."""
    assert read(config_file, "# nothing\n") == Config()
    for content in ("model:\n  n_layer: 2\ndata:\n", "model.n_layer: 2\n"):
        assert read(config_file, content) == Config(model=ModelConfig(n_layer=2))
    config_file.rename(config_file.parent / DEFAULT_CONFIG.name)
    monkeypatch.chdir(config_file.parent)
    assert read_config() == Config()


def test_the_command_line_overrides_files_and_a_later_file_an_earlier_one(tmp_path: Path) -> None:
    """Older launchers pass the local rank, which is ignored."""
    (tmp_path / "one.yaml").write_text("trainer: {max_steps: 5, batch_size: 6, seed: 7}\n")
    (tmp_path / "two.yaml").write_text("trainer: {max_steps: 8, batch_size: 9}\nmodel: {n_layer: 3}\n")
    files = [f"--config={tmp_path}/one.yaml", "--config", f"{tmp_path}/two.yaml"]
    ignored = ("--local_rank=1", "--local-rank", "1")
    config = read_config(["--trainer.max_steps", "7", *files, "--model.n_head=2", *ignored])
    assert (config.trainer.max_steps, config.trainer.batch_size, config.trainer.seed) == (7, 9, 7)
    assert (config.model.n_layer, config.model.n_head) == (3, 2)


def test_the_default_of_max_steps_does_not_limit_max_epochs(config_file: Path) -> None:
    """Wherever the key is: in a copy of the shipped yaml, whose other keys are the defaults, or on the command line."""
    shipped = DEFAULT_CONFIG.read_text().replace("max_epochs: null", "max_epochs: 30")
    for content, options, expected in (
        ("", "--trainer.max_epochs 30", (30, None)),
        ("trainer.max_epochs: 30", "", (30, None)),
        (shipped, "", (30, None)),
        (shipped, "--trainer.max_steps 1600", (30, 1600)),
        (shipped, "--trainer.max_epochs null", (None, 1600)),
        ("trainer: {max_epochs: 30, max_steps: 5}", "", (30, 5)),
        ("trainer.max_steps: 5", "--trainer.max_epochs 30", (30, 5)),
        ("", "", (None, 1600)),
    ):
        config_file.write_text(content)
        config = read_config(["--config", str(config_file), *options.split()])
        assert (config.trainer.max_epochs, config.trainer.max_steps) == expected


def test_a_configuration_knows_the_keys_of_the_command_line_which_are_not_part_of_it(config_file: Path) -> None:
    config_file.touch()
    config = read_config(["--config", str(config_file), "--model.n_head", "4"])
    assert (config.given, config) == ({"model.n_head"}, Config())
    assert "given" not in config_to_dict(config)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("optimizer.learning_rate", "1", 1.0),
        ("trainer.seed", "010", 10),  # 8 in yaml 1.1
        ("model.bias", "false", False),
        ("trainer.compile", "yes", True),
        ("optimizer.betas", "[8e-1, .95]", (0.8, 0.95)),
        ("trainer.threads", "auto", "auto"),
        ("data.path", "s3://bucket/some text.txt", "s3://bucket/some text.txt"),
        ("trainer.run_dir", "2024", "2024"),
        ("trainer.snapshot_path", "null", None),
        ("trainer.snapshot_path", "2024-01-31", "2024-01-31"),
        ("trainer.snapshot_path", "12:30", "12:30"),
        ("trainer.snapshot_path", "yes", "yes"),
        ("trainer.snapshot_path", "1e3", "1e3"),
    ],
)
def test_values_are_read_alike_from_yaml_and_options(name: str, text: str, value: object, config_file: Path) -> None:
    section, key = name.split(".")
    of_yaml = read(config_file, f"{section}:\n  {key}: {text}\n")
    for config in (of_yaml, read_config([f"--{name}", text]), read_config([f"--{name}={text}"])):
        found = attrgetter(name)(config)
        assert found == value
        assert type(found) is type(value)


def test_yaml_has_its_own_forms_of_null_text_and_lists(config_file: Path) -> None:
    config = read(
        config_file,
        "trainer: {max_epochs: , micro_batch_size: ~, profile_steps: null}\n"
        "optimizer:\n  betas:\n  - 0.5\n  - &half 0.5\n  weight_decay: *half\n",
    )
    assert [config.trainer.max_epochs, config.trainer.micro_batch_size, config.trainer.profile_steps] == [None] * 3
    assert (config.optimizer.betas, config.optimizer.weight_decay) == ((0.5, 0.5), 0.5)


# Text that yaml would take for something else.
WORDS = r"""
1e3 -1e-3 010 1_000 0x1f 1:30 .5 .inf 12 2024-01-31 2024-01-31T12:30:00Z true yes = << --- - ? : a: #a 'a' "a \n
[a] [ {a: } {{a}} , &a *a *.txt [ab]*.txt {a,b}.txt !a ! | > %a @a `a` --config -a a=b ~/a x/${HOME}/a$ %(prog)s ñ
"""
PHRASES = ("- a", "a: b", "a #b", "runs/try #2", "2024-01-31 12:30:00", "a  b", " a", "a ", "\ta", "a\nb", "a\n")
TEXTS = [*WORDS.split(), *PHRASES, "\U0001f600", "a " * 200]


def test_text_of_the_command_line_is_taken_as_it_is_and_reads_back_equal(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does from --print_config, config.yaml and the command lines that programs show."""
    for i in range(0, len(TEXTS), len(TEXT_KEYS)):
        given = dict(zip(TEXT_KEYS, TEXTS[i:], strict=False))
        argv = [f"--{name}={text}" for name, text in given.items()]
        config = read_config(argv)
        for name, text in given.items():
            path = os.path.expandvars(os.path.expanduser(text))
            assert attrgetter(name)(config) == (path if name in PATHS else text)
        text = printed(capsys, *argv, "--print_config")
        assert text == dump_config(config_to_dict(config))
        assert read(config_file, text) == config
        shown = shlex.join(f"--{name}={format_value(attrgetter(name)(config))}" for name in KEYS)
        assert read_config(shlex.split(shown)) == config


def test_each_configuration_in_configs_trains_with_its_shape_cut(text: Path, tmp_path: Path) -> None:
    options = (
        f"--data.path={text} --data.block_size=16 --model.n_layer=2 --model.n_embd=24 --trainer.batch_size=12 "
        "--trainer.max_steps=2 --trainer.compile=false --trainer.init_from=null"
    )
    files = list(ROOT.glob("configs/*.yaml"))
    argvs = [["--config", str(file), *options.split(), f"--trainer.run_dir={tmp_path / file.stem}"] for file in files]
    [results] = run_ranks(1, run_each_captured, argvs, tmp_path=tmp_path)
    assert [(status, err) for status, _, err in results] == [(0, "")] * len(files)
    assert [newest_snapshot(tmp_path / file.stem)["step"] for file in files] == [2] * len(files)


def test_the_shipped_yaml_is_the_printed_default_and_ends_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--config", os.devnull, "--print_config")
    assert text == DEFAULT_CONFIG.read_text()
    comments = re.findall(r"^  \w+: .*? # (.*)$", text, re.MULTILINE)
    assert comments == [field.description for field in KEYS.values()]
    headings = re.findall(r"\n\n  # (.*)\n  (\w+): ", text)
    assert headings == [(heading, name.removeprefix("trainer.")) for name, heading in HEADINGS.items()]
    assert yaml.safe_load(text) == config_to_dict(Config())
    usage = printed(capsys, "--help")
    assert usage.startswith("usage: main.py [--config FILE] [--section.key VALUE ...]\n\n")
    assert usage.endswith(f"\n\n{text}")


def test_all_keys_of_the_model_but_dropout_shape_the_weights() -> None:
    """With a new key that is missing in SHAPE_KEYS, runs would resume or start from weights of another shape."""
    assert {name for name in KEYS if name.startswith("model.")} - set(SHAPE_KEYS) == {"model.dropout"}
