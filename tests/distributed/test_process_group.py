"""How ranks meet and agree."""

from __future__ import annotations

import io
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import free_port, run_args, run_ranks, train_main

import main
from mingpt.config import DistributedConfig
from mingpt.distributed.health import generation_store, rendezvous
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.process_group import DistributedContext, init_distributed
from mingpt.utils.errors import UserError


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 7, 8, 100])
def test_shares_cover_the_batch_and_differ_by_at_most_one(size: int, count: int) -> None:
    context = DistributedContext(RankInfo())
    shares = []
    for rank in range(size):
        context.rank, context.world_size = rank, size
        shares.append(context.shard_range(1000, count))
    assert [number for share in shares for number in share] == list(range(1000, 1000 + count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert max(map(len, shares)) == context.max_shard_size(count)


def test_agreement_between_real_ranks(tmp_path: Path) -> None:
    first, second, third = run_ranks(3, _agree, tmp_path, tmp_path=tmp_path)
    assert first["gathered"] == second["gathered"] == third["gathered"] == [0, 10, 20]
    assert {facts["said"] for facts in (first, second, third)} == {"rank 1: disk full"}
    assert {facts["differs"] for facts in (first, second, third)} == {
        "key differs between ranks: a on rank 0, b on rank 2; start all of them with the same code, text, yaml and "
        "options"
    }
    assert [facts["from first"] for facts in (first, second, third)] == ["made by 0"] * 3
    assert [facts["votes"] for facts in (first, second, third)] == [[[0, 2], [15]]] * 3
    assert sorted(path.name for path in tmp_path.glob("built-*")) == ["built-0"]


def _agree(folder: Path) -> dict[str, Any]:
    config = DistributedConfig(init_method=os.environ["TEST_INIT_METHOD"], timeout_seconds=60)
    with init_distributed(config) as context:
        facts: dict[str, Any] = {"gathered": context.all_gather_object(context.rank * 10)}
        for name, action in (
            ("said", lambda: context.raise_on_all_ranks(lambda: _fail("disk full") if context.rank == 1 else 1)),
            ("differs", lambda: context.check_equal({"same": 1, "key": "b" if context.rank == 2 else "a"})),
        ):
            try:
                action()
            except UserError as error:
                facts[name] = str(error)
        facts["from first"] = context.run_on_rank0(lambda: f"made by {context.rank}")
        facts["votes"] = [
            context.all_reduce_max_async(0, context.rank)(),
            context.all_reduce_max_async(15 if context.rank == 2 else 0)(),
        ]
        context.local_rank0_first(
            lambda: None if list(folder.glob("built-*")) else (folder / f"built-{context.rank}").touch()
        )
    assert not dist.is_initialized()
    return facts


def _fail(words: str) -> None:
    raise UserError(words)


def test_the_group_is_taken_down_after_an_error(tmp_path: Path) -> None:
    assert run_ranks(2, _fail_inside, tmp_path=tmp_path) == [False, False]


def _fail_inside() -> bool:
    config = DistributedConfig(init_method=os.environ["TEST_INIT_METHOD"], timeout_seconds=60)
    with pytest.raises(RuntimeError, match="any"), init_distributed(config):
        raise RuntimeError("any")
    return dist.is_initialized()


def test_a_rank_that_waits_in_vain_says_for_whom_and_how_long(text: Path, tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/nobody"
    argv = run_args(tmp_path / "run", text, distributed__init_method=meeting, distributed__timeout_seconds=1)
    [(status, err)] = run_ranks(1, _started_by_hand, *argv, tmp_path=tmp_path)
    assert status == 2
    assert "rank 0 of 2" in err
    assert meeting in err
    assert "timeout_seconds is 1" in err
    assert "are all 2 processes started" in err
    assert not (tmp_path / "run").exists()


def _started_by_hand(*argv: str) -> tuple[int, str]:
    os.environ |= {"RANK": os.environ.get("RANK", "0"), "WORLD_SIZE": "2"}
    with redirect_stderr(io.StringIO()) as err:
        return main.run(argv), err.getvalue()


@pytest.mark.parametrize("method", ["env://", "tcp://"])
def test_a_port_that_is_taken(
    method: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        meeting = method if method == "env://" else f"tcp://localhost:{port}"
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        argv = run_args(tmp_path / "run", text, distributed__init_method=meeting, distributed__timeout_seconds=5)
        assert main.run(argv) == 2
    err = capsys.readouterr().err
    assert f"localhost:{port}" in err
    assert err.endswith("another program has this port: take a free one, or let `torchrun --standalone` find one\n")


def test_processes_started_by_hand_meet_at_a_tcp_address(text: Path, tmp_path: Path) -> None:
    meeting = f"tcp://localhost:{free_port()}"
    argv = run_args(tmp_path / "run", text, distributed__init_method=meeting, trainer__max_steps=1)
    assert run_ranks(2, _started_by_hand, *argv, tmp_path=tmp_path) == [(0, "")] * 2


@pytest.fixture(params=["torchrun's store", "a file"])
def lasting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The init_method of a store that outlives the ranks that met there."""
    if request.param == "a file":
        keeper = dist.FileStore(str(tmp_path / "meeting"), 99)
        yield f"file://{tmp_path}/meeting"
    else:
        keeper = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(keeper.port))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        yield "env://"
    del keeper


def test_generations_do_not_meet_the_dead(lasting: str) -> None:
    """Three ranks, then three others, then two, at one store: each generation sees its own keys alone."""
    for generation, size in enumerate((3, 3, 2)):
        stores: dict[int, dist.Store] = {}

        def come(rank: int, size: int = size, stores: dict = stores) -> None:
            stores[rank] = rendezvous(lasting, rank, size, timedelta(seconds=30))

        threads = [threading.Thread(target=come, args=(rank,)) for rank in reversed(range(size))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not any(store.check(["address"]) for store in stores.values())
        stores[size - 1].set("address", str(generation))
        assert {store.get("address") for store in stores.values()} == {str(generation).encode()}


def test_a_generation_that_stays_incomplete_gives_up() -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    server.set("greeting/1", "left by the dead")
    with pytest.raises(TimeoutError, match="not all 2 ranks"):
        generation_store(server, 0, 2, timedelta(seconds=0.5))


def test_a_run_is_refused_when_ranks_outnumber_sequences(text: Path, tmp_path: Path) -> None:
    argv = run_args(tmp_path / "run", text, trainer__batch_size=1)
    assert run_ranks(2, train_main, *argv, tmp_path=tmp_path) == [2, 2]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("visible", "taken"), [(["ab", "ab"], [0, 1]), (["a", "b"], [0, 0]), (["a", "a"], None)])
def test_a_rank_takes_the_gpu_that_it_was_dealt(visible: list[str], taken: list[int] | None, tmp_path: Path) -> None:
    """Both ranks of a machine see both GPUs, or each its own as number 0, as srun may have it, or both the same one."""
    found = run_ranks(2, _take, visible, tmp_path=tmp_path)
    if taken is None:
        assert all("2 processes" in words and "1 GPU" in words for words in found)
    else:
        assert found == [f"cuda:{number}" for number in taken]


def _take(visible: list[str]) -> str:
    config = DistributedConfig(backend="gloo", init_method=os.environ["TEST_INIT_METHOD"], timeout_seconds=60)
    mine = visible[int(os.environ["RANK"])]
    with init_distributed(config) as context:
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: len(mine)
        torch.cuda.get_device_properties = lambda number: SimpleNamespace(uuid=mine[number])  # type: ignore[assignment]
        torch.cuda.set_device = lambda device: None
        try:
            context.init_device("auto")
        except UserError as error:
            return str(error)
        finally:
            torch.cuda.is_available = lambda: False
        return str(context.device)
