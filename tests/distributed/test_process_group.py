"""The process group: its start, collectives, errors and devices."""

import io
import math
import os
import platform
from concurrent import futures
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from mingpt.config.schema import DistributedConfig
from mingpt.distributed.agreement import all_gather_object, broadcast_object, check_equal, shared_errors
from mingpt.distributed.context import DistributedContext
from mingpt.distributed.launcher import RankInfo
from mingpt.distributed.rendezvous import rendezvous
from mingpt.errors import UserError
from tests.helpers import free_port, run_args, run_captured, run_main, run_ranks
from tests.inside import assert_one_message, open_process_group


@pytest.mark.parametrize("world_size", [1, 3, 7])
@pytest.mark.parametrize("count", [1, 7, 100])
def test_shards_cover_the_batch_and_differ_by_at_most_one(world_size: int, count: int) -> None:
    context = DistributedContext(RankInfo(), DistributedConfig())
    context.world_size = world_size
    shards = [context.shard(range(1000, 1000 + count), rank) for rank in range(world_size)]
    assert [number for shard in shards for number in shard] == list(range(1000, 1000 + count))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == math.ceil(count / world_size)


def test_ranks_share_values_and_errors(tmp_path: Path) -> None:
    run_ranks(3, _collectives, tmp_path=tmp_path)


def _collectives() -> None:
    with pytest.raises(ZeroDivisionError), open_process_group() as context:
        _check_collectives(context)
    assert dist.is_initialized()  # NCCL would wait for other ranks
    with open_process_group() as context:
        assert all_gather_object(context, None) == [None] * 3
    assert not dist.is_initialized()


def _check_collectives(context: DistributedContext) -> None:
    rank = context.rank
    assert all_gather_object(context, rank * 10) == [0, 10, 20]
    assert broadcast_object(context, rank, source=1) == 1
    with pytest.raises(UserError, match=r"^rank 1: disk full$"):
        _fail_on_rank1(context)
    advice = "start all of them with the same code, text, yaml and options"
    with pytest.raises(UserError, match=f"^key differs between ranks: a on rank 0, b on rank 2; {advice}$"):
        check_equal(context, {"same": 1, "key": "b" if rank == 2 else "a"})
    with pytest.raises(UserError, match=r"^key differs between ranks: 0 on rank 0, 1 on rank 1; set it$"):
        check_equal(context, {"key": rank}, advice="set it")
    signals, saves = context.begin_step(15 if rank == 2 else 0, rank == 1)
    [counts] = context.begin_step(10 * rank)
    assert [each.wait() for each in (signals, saves, counts, signals)] == [
        [0, 0, 15],
        [0, 1, 0],
        [0, 10, 20],
        [0, 0, 15],
    ]
    raise ZeroDivisionError


def _fail_on_rank1(context: DistributedContext) -> None:
    with shared_errors(context):
        if context.rank == 1:
            raise UserError("disk full")


def test_a_rank_without_gpu_among_others_is_named_by_one_message(text: Path, tmp_path: Path) -> None:
    (status, _, err), *others = run_ranks(3, _run_with_gpu, run_args(tmp_path / "run", text), tmp_path=tmp_path)
    assert (status, others) == (2, [(2, "", ""), (2, "", "")])
    assert_one_message(err, "the kind of device differs between ranks: cpu on rank 0, cuda on rank 1", "nvidia-smi")


def _run_with_gpu(argv: list[str]) -> tuple[int, str, str]:
    """Only rank 1 has a GPU."""
    if os.environ["RANK"] == "1":
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 1
        torch.cuda.set_device = lambda device: None
        # NCCL connects ranks in their first collective on a GPU.
        init = dist.init_process_group
        dist.init_process_group = lambda backend, **options: init("gloo", **options)
    return run_captured(*argv)


def set_variables(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("scheme", "rank"), [("env://", 0), ("tcp://", 1)])
def test_a_rank_says_that_it_waits(
    scheme: str, rank: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """It waits in its own store, or while it connects to rank 0's store."""
    monkeypatch.setattr("mingpt.distributed.process_group.WAIT_SECONDS", 0.2)
    port = free_port()
    set_variables(monkeypatch, RANK=rank, WORLD_SIZE=2, MASTER_ADDR="localhost", MASTER_PORT=port)
    init_method = "env://" if scheme == "env://" else f"tcp://localhost:{port}"
    options = {"distributed__init_method": init_method, "distributed__timeout_seconds": 1}
    assert run_main(run_args(tmp_path / "run", text, **options)) == 2
    waits, error = capsys.readouterr().err.splitlines()
    assert waits == f"warning: rank {rank} is waiting for all 2 ranks to connect to {init_method}"
    assert f"rank {rank} of 2 on {platform.node()} could not join a process group at {init_method} " in error
    assert "distributed.timeout_seconds is 1" in error
    assert "check that all processes have started" in error
    assert not (tmp_path / "run").exists()


def test_ranks_of_three_launchers_meet(text: Path, tmp_path: Path) -> None:
    """All other tests use file://."""
    ports = [free_port() for _ in range(3)]
    slurm = {"SLURM_PROCID": "{rank}", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    slurm |= {"SLURM_JOB_ID": f"{ports[2] - 10000}", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "unknown1"}
    by_hand = {"RANK": "{rank}", "WORLD_SIZE": "2"}
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(ports[1])}
    argv = run_args(tmp_path / "run", text, trainer__max_steps=1)
    runs = [
        (by_hand, [*argv, "--distributed.init_method", f"tcp://localhost:{ports[0]}"]),
        (by_hand | master, argv),
        (slurm, argv),
    ]
    rank0, rank1 = run_ranks(2, _run_with_variables, runs, tmp_path=tmp_path)
    assert rank0 == rank1 == [(0, "")] * 3


def _run_with_variables(runs: list[tuple[dict[str, str], list[str]]]) -> list[tuple[int, str]]:
    rank, results = os.environ.pop("RANK"), []
    del os.environ["WORLD_SIZE"]
    for env, argv in runs:
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as err:
            set_variables(patch, **{name: value.format(rank=rank) for name, value in env.items()})
            results.append((run_main(argv), err.getvalue()))
    return results


@pytest.mark.parametrize("lasting_store", ["torchrun's agent", "a file"])
def test_generations_of_ranks_do_not_see_each_other(
    lasting_store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three ranks, then three others, then two, at a store that outlives them. All of them leave NCCL's key there."""
    raw: dist.Store
    if lasting_store == "a file":
        init_method, raw = f"file://{tmp_path}/store", dist.FileStore(f"{tmp_path}/store")
    else:
        init_method, raw = "env://", (server := dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        agent = {"MASTER_ADDR": "localhost", "MASTER_PORT": server.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        set_variables(monkeypatch, **agent)
    generations: list[list[dist.Store]] = []  # a file is removed with its last store, so all are kept
    for world_size in (3, 3, 2):

        def join(rank: int, world_size: int = world_size) -> dist.Store:
            store, is_one_host = rendezvous(init_method, rank, world_size, timedelta(seconds=30))
            assert is_one_host
            return store

        with futures.ThreadPoolExecutor(world_size) as pool:
            stores = list(pool.map(join, reversed(range(world_size))))
        assert not any(store.check(["address"]) for store in stores)
        assert not raw.check(["exception_dump"])
        raw.set("exception_dump", "rank")
        stores[0].set("address", str(len(generations)))
        assert {store.get("address") for store in stores} == {str(len(generations)).encode()}
        generations.append(stores)


def test_one_machine_listens_at_the_loopback_and_machines_of_one_host_name_are_told_apart(tmp_path: Path) -> None:
    run_ranks(2, _check_hosts, tmp_path=tmp_path)


def _check_hosts() -> None:
    with open_process_group() as context:
        all_gather_object(context, "all ranks are connected")
        sockets = psutil.Process().net_connections("tcp")
        hosts = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
        all_gather_object(context, "all ranks have looked")
    assert hosts
    assert not hosts & {"0.0.0.0", "::"}
    psutil.boot_time = lambda: float(os.environ["RANK"])  # like two containers
    with open_process_group() as context:  # started by hand without LOCAL_RANK
        assert (context.local_rank, context.local_world_size) == (0, 1)
