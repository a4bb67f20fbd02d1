"""Random input to the programs that people start: yaml, command lines, a launcher's variables, paths.

    python -m tests.faults.fuzz --runs 500 --seed 1

Each input must end in time, with status 0 and no error, or with status 2 and one message, without a traceback, and
leave nothing in the temporary folder. An input is a function of its seed: `--seed 17 --runs 1` repeats one.

An input that is accepted trains one step of a small model, on a machine that seems to have 1 GiB of memory.
"""

import argparse
import os
import random
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import export
import main
import plot
import sample
from mingpt.config import KEYS, Config
from mingpt.config_parser import read_config
from mingpt.monitoring.logging import run_script
from mingpt.snapshot import __main__ as listing
from mingpt.yaml_format import dump_yaml
from tests.helpers import SMALL_CONFIG, clean_env, write_text

LIMIT = 60.0  # seconds that an input may take
MEMORY = 2**30
SCRIPTS = {"sample.py": sample.run, "export.py": export.run, "plot.py": plot.run, "mingpt.snapshot": listing.run}
NUMBERS = [
    *("0", "-1", "1", "2", "3", "7", "64", "1.5", "0.5", "1e-3", "1e3", "-0.0", ".nan", ".inf", "-.inf", "nan"),
    *("inf", "1e-300", "5e-324", "1e-40", "1e-7", "3e38", "1e40", "1e300", "1e400", "1e15", "0.9999999999"),
    *("1e-17", "2.0", str(2**31 - 1), str(2**31), str(2**32), str(2**53 + 1), str(2**63 - 1), str(2**63)),
    *(str(10**30), "9" * 5000, "0x10", "0b11", "010", "1_000", "1:30", "+3", " 3", "3 ", "３", "1e", "--1"),
    *("0x" + "f" * 5000,),
]
WORDS = [
    *("", " ", "null", "~", "true", "False", "yes", "auto", "tree", "fsdp", "gpt2", "fp16", "nccl", "gloo", "="),
    *("<<", "a" * 300, "a" * 1000, "é", "\U0001f600", "\u2028", "\ufeff", "\x00", "\x07", "\x1b[31m", "\r", "\n"),
    *("a\nb", "\t", "\udcff", "a\udc80b", "%s", "%(x)s", "{}", "{0}", "$HOME", "`id`", "a;b", "#", "a #b", "'"),
    *('"', "\\", "-", "-a", "[", "]", "[1, 2]", "[0.9, 0.95]", "{a: b}", "[" * 2000),
    *("!!python/object:os.system x", "!!binary aGk=", "&a [*a]", "2024-01-31", "2024-01-31 12:00:00", "*a"),
    *("| \n a", "? a", "- a", "a: b", "..", ".", "None", "1,2"),
]
PATHS = [
    *("text.txt", "./text.txt", "text*.txt", "[t]ext.txt", "{text}.txt", "**", "folder", "folder/", "empty.txt"),
    *("fifo", "short.txt", "latin1.txt", "list.json", "null.json", "none", "none/none", "text.txt/below", "loop"),
    *("dangling", "run", "run/", "run/snapshots", "run/snapshots/step_00000001.pt", "run/metrics.jsonl"),
    *("run/config.yaml", "cut.pt", "export", "export/config.json", "read-only", "read-only/new", "new"),
    *("new/a/b", "try #2", "try?", "~", "~/runs", "~nobody-here/x", "$HOME", "a" * 300, "a/" * 500, "\udcff.txt"),
    *("é.txt", "a\nb", " ", ".", "..", "/dev/null", "/dev/null/x", "/dev/full", "/dev/zero", "/proc/self/mem"),
    *("/proc/none", "/sys/none", "", "-", "--", "file:", "file:text.txt", "file:run", "::", "a::b", "memory://"),
    *("memory://none", "memory://text.txt", "simplecache::", "zip://a", "x:", "zip://a::text.txt"),
    *("http://127.0.0.1:9/x", "https://[::1", "nosuch://a", "://", "data:,hello", "filecache::memory://none"),
    *("tar://x::none", "s3:", "abfs", "reference://", "github:x"),
]
# Not for what is written, since they may lead out of the temporary folder.
READ_PATHS = [
    *PATHS,
    "/",
    "//",
    "file://",
    "file:///",
    "file://text.txt",
    "dir://",
    "dir::x",
    "simplecache::file://text.txt",
    "local://text.txt",
    "simplecache::file:///none",
]
ADDRESSES = [
    *("tcp://127.0.0.1:29", "tcp://[::1", "tcp://[::1]:1", "tcp://:80", "tcp://a..b:80", "tcp://127.0.0.1"),
    *("tcp://", "tcp://127.0.0.1:abc", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:0", "tcp://127.0.0.1:-1"),
    *("tcp://a b:80", "tcp:", "file://", "file:///", "file://x", "file:///none/none/x", "file:///dev/null/x"),
    *("file:///proc/x", "env://", "env:", "env://?rank=0", "tcp://127.0.0.1:80?rank=5", "http://a", "null", ""),
    *("x" * 300, "tcp://" + "x" * 300 + ":80"),
]
VARIABLES = {
    "RANK": ["0", "1", "2"],
    "WORLD_SIZE": ["1", "2", "3"],
    "LOCAL_RANK": ["0", "1"],
    "LOCAL_WORLD_SIZE": ["1", "2"],
    "MASTER_ADDR": ["127.0.0.1", "localhost", "a..b", "x" * 300, "::1", "[::1]", "tcp://127.0.0.1", "127.0.0.1:80"],
    "MASTER_PORT": ["29", "0", "65535", "65536", "99999"],
    "OMPI_COMM_WORLD_RANK": ["0", "1"],
    "OMPI_COMM_WORLD_SIZE": ["1", "2"],
    "OMPI_COMM_WORLD_LOCAL_RANK": ["0"],
    "OMPI_COMM_WORLD_LOCAL_SIZE": ["1", "2"],
    "PMIX_SERVER_TMPDIR": ["folder", "none", "\udcff"],
    "PMIX_NAMESPACE": ["job", "a/b", "\udcff"],
    "SLURM_PROCID": ["0", "1"],
    "SLURM_STEP_NUM_TASKS": ["1", "2"],
    "SLURM_JOB_ID": ["7"],
    "SLURM_STEP_ID": ["0", "1"],
    "SLURM_LOCALID": ["0"],
    "SLURM_STEP_NODELIST": ["node[01-03", "a..b", "node1", "[", ",", "\udcff"],
    "SLURM_STEP_NUM_NODES": ["1", "2"],
    "SLURM_RESTART_COUNT": ["0", "../x"],
    "TORCHELASTIC_RESTART_COUNT": ["0", "3"],
    "TORCHELASTIC_MAX_RESTARTS": ["0", "3"],
    "OMP_NUM_THREADS": ["1", "2,3", "1000000", "99999999999999999999", "0", ",", " "],
    "COLUMNS": ["0", "1", "-5", "100000"],
    "LANG": ["C", "xx"],
    "NO_COLOR": ["1"],
    "CUDA_VISIBLE_DEVICES": ["-1", "x"],
}
LAUNCHERS = [
    {"RANK": "0", "WORLD_SIZE": "1"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29"},
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
]
PATH_KEYS = ("data.path", "trainer.run_dir", "trainer.snapshot_path", "trainer.init_from")
WRITTEN_KEYS = ("trainer.run_dir", "trainer.snapshot_path")
OPTIONS = {
    "sample.py": ("--snapshot", "--prompt", "--max_new_tokens", "--temperature", "--top_k", "--top_p", "--seed"),
    "export.py": ("--snapshot", "--out"),
    "plot.py": ("--out",),
    "mingpt.snapshot": (),
}


@dataclass
class Input:
    """What a program is started with."""

    seed: int
    program: str
    argv: list[str]
    env: dict[str, str]
    yaml: bytes | None  # of --config my.yaml

    def __str__(self) -> str:
        env = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.env.items())
        yaml = "" if self.yaml is None else f"\n    my.yaml: {self.yaml[:300]!r}"
        return f"seed {self.seed}: {env} {self.program} {ascii(shlex.join(self.argv))[:1500]}{yaml}"


def random_input(seed: int) -> Input:
    rng = random.Random(seed)
    if rng.random() < 0.25:
        return random_script_input(seed, rng)
    env: dict[str, str] = {}
    values: dict[str, Any] = {**SMALL_CONFIG, "distributed.timeout_seconds": 1, "data.path": "text.txt"}
    values |= {"trainer.run_dir": "new run", "trainer.sample_every": None}
    argv: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind = rng.choice(["key", "key", "path", "path", "address", "environment", "word"])
        if kind == "key":
            argv += [f"--{rng.choice(list(KEYS))}={rng.choice(NUMBERS + WORDS)}"]
        elif kind == "path":
            name = rng.choice(PATH_KEYS)
            argv += [f"--{name}={rng.choice(PATHS if name in WRITTEN_KEYS else READ_PATHS)}"]
        elif kind == "address":
            env |= rng.choice(LAUNCHERS)
            argv += [f"--distributed.init_method={rng.choice(ADDRESSES)}"]
        elif kind == "environment":
            env |= random_environment(rng)
        else:
            argv += [rng.choice(["--config", "--print_config", "--x", "-x", "--trainer", "", *WORDS, *PATHS])]
    if rng.random() < 0.1:
        values |= {"distributed.reduction": "tree", "distributed.survive": True}
    yaml = random_yaml(values, rng) if rng.random() < 0.3 else dump_sections(values).encode()
    argv = [word.replace("\0", "") for word in argv]  # which no command line can hold
    return Input(seed, "main.py", ["--config", "my.yaml", *argv], env, yaml)


def random_environment(rng: random.Random) -> dict[str, str]:
    env = dict(rng.choice([{}, *LAUNCHERS]))
    for name in rng.sample(list(VARIABLES), rng.randrange(1, 4)):
        others = [value for value in NUMBERS[:30] + WORDS if "\0" not in value]
        env[name] = rng.choice(VARIABLES[name] if rng.random() < 0.6 else others)
    return env


def dump_sections(values: dict[str, Any]) -> str:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = None if value == "null" else value
    return dump_yaml(sections)


def random_yaml(values: dict[str, Any], rng: random.Random) -> bytes:
    """A file with values of any kind, or with damaged bytes."""
    lines = dump_sections(values).splitlines()
    for _ in range(rng.randrange(1, 4)):
        i = rng.randrange(len(lines))
        kind = rng.choice(["value", "value", "value", "line", "twice", "indent", "remove"])
        name = lines[i].partition(":")[0]
        if kind == "value":
            lines[i] = f"{name}: {rng.choice(NUMBERS + WORDS + PATHS)}"
        elif kind == "line":
            lines[i] = rng.choice(WORDS)
        elif kind == "twice":
            lines.insert(i, lines[i])
        elif kind == "indent":
            lines[i] = " " * rng.randrange(5) + lines[i].strip()
        else:
            del lines[i]
    content = bytearray("\n".join(lines).encode(errors="surrogateescape"))
    for _ in range(rng.choice([0, 0, 0, 1, 5])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def random_script_input(seed: int, rng: random.Random) -> Input:
    program = rng.choice(list(SCRIPTS))
    options = {"--snapshot": "run", "--out": rng.choice(["out.png", "out"])}
    options = {name: value for name, value in options.items() if name in OPTIONS[program]}
    for _ in range(rng.choice([0, 1, 1, 2])):
        if OPTIONS[program]:
            name = rng.choice(OPTIONS[program])
            values = {"--snapshot": READ_PATHS, "--out": PATHS}
            options[name] = rng.choice(values.get(name, NUMBERS + WORDS))
    argv = [f"{name}={value}" for name, value in options.items()]
    if program in ("plot.py", "mingpt.snapshot"):
        argv += [rng.choice(["run", *READ_PATHS, *WORDS])]
    if rng.random() < 0.1:
        argv += [rng.choice(WORDS + PATHS)]
    if program == "sample.py":
        argv.insert(0, "--max_new_tokens=5")
    env = random_environment(rng) if rng.random() < 0.2 else {}
    return Input(seed, program, [word.replace("\0", "") for word in argv], env, None)


def small(config: Config) -> Config:
    """The configuration, with a short run of a small model."""
    trainer = replace(
        config.trainer,
        max_steps=1,
        max_epochs=None,
        compile=False,
        batch_size=min(config.trainer.batch_size, 2**10),
        threads=config.trainer.threads if config.trainer.threads == "auto" else min(config.trainer.threads, 64),
    )
    distributed = replace(config.distributed, timeout_seconds=min(config.distributed.timeout_seconds, 2))
    n_layer = max(config.distributed.pipeline_stages, min(config.model.n_layer, 4))
    return replace(config, model=replace(config.model, n_layer=n_layer), trainer=trainer, distributed=distributed)


def write_template(folder: Path) -> None:
    """Writes what inputs refer to, with a run of one step and its export."""
    write_text(folder / "text.txt")
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("a few words")
    (folder / "latin1.txt").write_bytes("é".encode("latin-1") * 1000)
    (folder / "list.json").write_text("[1, 2]")
    (folder / "null.json").write_text("null")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nothing")
    given = {**SMALL_CONFIG, "data.path": str(folder / "text.txt"), "trainer.run_dir": str(folder / "run")}
    argv = [word for name, value in (given | {"trainer.max_steps": 1}).items() for word in (f"--{name}", str(value))]
    assert wait_for(start(folder, lambda: main.run(argv))) == 0
    assert wait_for(start(folder, lambda: export.run(["--snapshot", "run", "--out", "export"]))) == 0
    newest = (folder / "run/snapshots/step_00000001.pt").read_bytes()
    (folder / "cut.pt").write_bytes(newest[: len(newest) // 2])


def start(folder: Path, body: Callable[[], Any], env: dict[str, str] | None = None) -> int:
    """Runs `body` in a fork, in `folder`, with output in stdout and stderr there. Returns the process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.chdir(folder)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # As in an interpreter that has just started; the one of pytest captures these.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", errors="backslashreplace") for number in (1, 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        tempfile.tempdir = None
        weakref.finalize._registry.clear()  # or this fork would remove the temporary folders of its parent
        status = body() or 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for(pid: int) -> int | None:
    """Returns the exit status of a fork; None if it took too long, and is killed. Ends all that it has started."""
    deadline = time.monotonic() + LIMIT
    status = None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


def run_input(given: Input) -> None:
    """In a fork: starts the program as its command line does."""
    sys.argv = [given.program, *given.argv]
    sys.orig_argv = [sys.executable, str(Path(main.__file__).parent / "main.py"), *given.argv]
    sysconf = os.sysconf
    os.sysconf = lambda name: MEMORY // sysconf("SC_PAGE_SIZE") if name == "SC_PHYS_PAGES" else sysconf(name)
    if given.program == "main.py":
        main.read_config = lambda argv: small(read_config(argv))
        main.main()
    status = run_script(SCRIPTS[given.program])
    weakref.finalize._exitfunc()  # as at the end of the interpreter, for which main.py does not wait
    sys.exit(status)


@contextmanager
def sandbox(template: Path, given: Input) -> Iterator[Path]:
    """A copy of the template with a folder for temporary files, and the home."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "work")
        shutil.copytree(template, folder, symlinks=True)
        os.mkfifo(folder / "fifo")
        (folder / "read-only").mkdir(mode=0o555)
        (folder / "temporary").mkdir()
        (folder / "home").mkdir()
        if given.yaml is not None:
            (folder / "my.yaml").write_bytes(given.yaml)
        yield folder


def failure_of(given: Input, template: Path) -> str:
    """Runs an input; returns what is wrong, or an empty string."""
    with sandbox(template, given) as folder:
        env = clean_env(TMPDIR=str(folder / "temporary"), HOME=str(folder / "home"), **given.env)
        status = wait_for(start(folder, lambda: run_input(given), env))
        out = (folder / "stdout").read_text(errors="replace")
        err = (folder / "stderr").read_text(errors="replace")
        # PyTorch has a cache for each user there.
        left = [name for name in os.listdir(folder / "temporary") if not name.startswith("torchinductor_")]
    errors = [line for line in err.splitlines() if "error: " in line]
    shown = f"\n    stderr: {err[-1500:]}"
    if status is None:
        return f"it takes more than {LIMIT:g} seconds{shown}\n    stdout: {out[-300:]}"
    if "Traceback" in err or "Traceback" in out:
        return f"traceback, status {status}{shown}"
    if given.program == "mingpt.snapshot" and status == 1 and "DAMAGED" in out:
        return ""
    if status not in (0, 2):
        return f"status {status}{shown}\n    stdout: {out[-300:]}"
    if len(errors) != (status == 2) or len(err) > 5000:
        return f"status {status} with {len(errors)} errors in {len(err)} characters{shown}"
    if "Warning: " in err:
        return f"a warning of Python{shown}"
    return f"left in the temporary folder: {left}" if left else ""


def run_all(seed: int, runs: int) -> Iterator[tuple[Input, str]]:
    """Runs inputs one after the other; yields each that fails, with what is wrong."""
    with tempfile.TemporaryDirectory() as template:
        write_template(Path(template))
        for i in range(runs):
            given = random_input(seed + i)
            if failure := failure_of(given, Path(template)):
                yield given, failure


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, help="inputs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first input (default: %(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    args = parse_args(sys.argv[1:])
    failed = 0
    began = time.monotonic()
    for failing, problem in run_all(args.seed, args.runs):
        failed += 1
        print(f"{failing}\n    {problem}\n", flush=True)
    print(f"{failed} of {args.runs} inputs failed, in {time.monotonic() - began:.0f} s")
    sys.exit(bool(failed))
