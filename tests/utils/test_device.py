"""Which device, precision and number of threads follow from which flags. No test needs the hardware it speaks of."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import run_ranks

from mingpt.utils.device import (
    check_compiler,
    choose_device,
    choose_precision,
    choose_threads,
    device_name,
    has_bf16,
    seed_device,
    tune_malloc,
    use_cuda,
)
from mingpt.utils.errors import UserError

CPU, GPU, APPLE = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this machine look like another one."""

    def make(
        gpus: int = 0, bf16: bool = False, avx512: bool = False, amx: bool = False, apple: bool = False, cores: int = 8
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        # PyTorch counts emulation as support unless told not to.
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation
        )
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: apple)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    make()
    return make


# Device.


def test_each_rank_of_a_gpu_machine_has_a_gpu_of_its_own(machine: Machine) -> None:
    machine(gpus=2)
    for backend in ("auto", "nccl"):
        assert use_cuda(backend)
        assert [choose_device(backend, rank, 2, 4) for rank in range(2)] == [torch.device("cuda", n) for n in range(2)]


@pytest.mark.parametrize(("local_rank", "local_size", "processes"), [(0, 3, 3), (2, 3, 3), (4, 1, 5)])
def test_more_processes_than_gpus_are_refused(
    local_rank: int, local_size: int, processes: int, machine: Machine
) -> None:
    machine(gpus=2)
    with pytest.raises(UserError, match=rf"^{processes} processes .* 2 GPU.*nproc_per_node=2.*gloo"):
        choose_device("auto", local_rank, local_size, 8)


def test_nccl_without_a_gpu_is_refused(machine: Machine) -> None:
    for ask in (lambda: use_cuda("nccl"), lambda: choose_device("nccl", 0, 1, 1)):
        with pytest.raises(UserError, match=r"distributed\.backend is nccl.*no CUDA GPU"):
            ask()


def test_gloo_means_the_cpu_even_where_there_are_gpus(machine: Machine) -> None:
    machine(gpus=1, apple=True)
    assert not use_cuda("gloo")
    assert choose_device("gloo", 3, 4, 4) == choose_device("gloo", 0, 1, 1) == CPU


def test_without_a_gpu_auto_is_the_cpu(machine: Machine) -> None:
    assert not use_cuda("auto")
    assert choose_device("auto", 1, 2, 2) == choose_device("auto", 0, 1, 1) == CPU


def test_apples_gpu_trains_one_process_alone(machine: Machine) -> None:
    machine(apple=True)
    assert choose_device("auto", 0, 1, 1) == APPLE
    assert choose_device("auto", 0, 1, 2) == choose_device("auto", 0, 2, 2) == CPU


def test_the_banner_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Model {device.index + 5}")
    assert device_name(torch.device("cuda", 1)) == "cuda:1 (Model 6)"
    assert device_name(CPU).startswith("cpu (")


# Precision.


def test_the_flags_that_the_rules_read_exist_in_this_pytorch() -> None:
    assert has_bf16(CPU)[0] in (True, False)
    if not torch.cuda.is_available():
        assert has_bf16(GPU)[0] is False


@pytest.mark.parametrize(
    ("device", "flags", "precision", "words"),
    [
        (CPU, {}, "fp32", "neither AVX512-BF16 nor AMX"),
        (CPU, {"avx512": True}, "bf16", "has AVX512-BF16 or AMX"),
        (CPU, {"amx": True}, "bf16", "has AVX512-BF16 or AMX"),
        (CPU, {"gpus": 1, "bf16": True}, "fp32", "neither"),
        (GPU, {"gpus": 1, "bf16": True}, "bf16", "has bf16 hardware"),
        (GPU, {"gpus": 1, "bf16": False, "amx": True}, "fp32", "has no bf16 hardware"),
        (APPLE, {"apple": True, "amx": True}, "fp32", "mps trains in fp32"),
    ],
)
def test_auto_is_bf16_where_hardware_multiplies_it(
    device: torch.device, flags: dict, precision: str, words: str, machine: Machine
) -> None:
    machine(**flags)
    chosen, why = choose_precision("auto", device, None)
    assert chosen == precision
    assert why.startswith("auto: ")
    assert words in why
    assert "snapshot" not in why


@pytest.mark.parametrize(
    ("device", "flags", "kept"),
    [
        (CPU, {}, "fp32"),
        (CPU, {"avx512": True}, "fp32"),
        (CPU, {"amx": True}, "bf16"),
        (GPU, {"bf16": True}, "fp32"),
        (GPU, {"bf16": True}, "bf16"),
        (GPU, {"bf16": True}, "fp16"),
        (GPU, {}, "fp16"),
    ],
)
def test_auto_keeps_the_precision_of_the_snapshot(
    device: torch.device, flags: dict, kept: str, machine: Machine
) -> None:
    machine(**flags)
    assert choose_precision("auto", device, kept) == (kept, "auto: kept from the snapshot")


@pytest.mark.parametrize(
    ("device", "flags", "kept", "instead"),
    [
        (CPU, {}, "bf16", "fp32"),
        (CPU, {}, "fp16", "fp32"),
        (CPU, {"amx": True}, "fp16", "bf16"),
        (GPU, {}, "bf16", "fp32"),
    ],
)
def test_auto_says_when_it_cannot_keep_the_precision(
    device: torch.device, flags: dict, kept: str, instead: str, machine: Machine
) -> None:
    machine(**flags)
    chosen, why = choose_precision("auto", device, kept)
    assert chosen == instead
    assert f"the snapshot was made in {kept}, so the last bits will differ" in why


@pytest.mark.parametrize("kept", [None, "fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("wanted", "device"), [("fp32", CPU), ("fp32", GPU), ("bf16", CPU), ("bf16", GPU), ("fp16", GPU)]
)
def test_what_was_asked_for_beats_the_snapshot(
    wanted: str, device: torch.device, kept: str | None, machine: Machine
) -> None:
    machine(bf16=True, amx=True)
    assert choose_precision(wanted, device, kept) == (wanted, "as asked")


@pytest.mark.parametrize("device", [CPU, GPU, APPLE])
def test_bf16_as_asked_says_where_it_is_emulated(device: torch.device, machine: Machine) -> None:
    chosen, why = choose_precision("bf16", device, None)
    assert chosen == "bf16"
    assert why == f"as asked, and {has_bf16(device)[1]}: emulated, slow"
    assert choose_precision("fp32", device, None) == ("fp32", "as asked")


@pytest.mark.parametrize("device", [CPU, APPLE])
def test_fp16_without_a_cuda_gpu_is_refused(device: torch.device, machine: Machine) -> None:
    with pytest.raises(UserError, match=rf"trainer\.precision is fp16.*CUDA.*on {device.type} set it to auto, fp32"):
        choose_precision("fp16", device, "fp16")


def test_compiling_for_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else name)
    with pytest.raises(UserError, match=r"trainer\.compile is true, but Triton is not here: pip install triton"):
        check_compiler(GPU)


# Threads.


@pytest.mark.parametrize(
    ("wanted", "ranks", "kept", "omp", "threads", "words"),
    [
        ("auto", 1, None, None, 8, "8 cores / 1 ranks"),
        ("auto", 2, None, None, 4, "8 cores / 2 ranks"),
        ("auto", 3, None, None, 2, "8 cores / 3 ranks"),
        ("auto", 9, None, None, 1, "8 cores / 9 ranks"),
        ("auto", 2, None, "", 4, "8 cores / 2 ranks"),
        ("auto", 2, None, "1", 1, "OMP_NUM_THREADS"),
        ("auto", 2, None, "16", 16, "OMP_NUM_THREADS"),
        ("auto", 2, None, "3,2", 3, "OMP_NUM_THREADS"),
        ("auto", 2, None, "0", 4, "8 cores / 2 ranks"),
        ("auto", 2, 3, None, 3, "kept from the snapshot"),
        ("auto", 2, 3, "1", 3, "kept from the snapshot"),
        (5, 2, 3, "1", 5, "as asked"),
        (5, 2, None, None, 5, "as asked"),
    ],
)
def test_threads(
    wanted: int | str,
    ranks: int,
    kept: int | None,
    omp: str | None,
    threads: int,
    words: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    chosen, why = choose_threads(wanted, ranks, kept)
    assert chosen == threads
    assert words in why


@pytest.mark.parametrize(("count", "threads"), [(6, 3), (None, 1)])
def test_threads_where_the_system_tells_no_affinity(
    count: int | None, threads: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert choose_threads("auto", 2, None)[0] == threads


# Memory.


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's way with memory is its own")
def test_freed_memory_is_used_again_without_asking_linux_for_pages(tmp_path: Path) -> None:
    """In a process of its own, which the setting ends with."""
    [without], [kept] = (run_ranks(1, _faults, kept, tmp_path=tmp_path) for kept in (False, True))
    assert without > 10_000
    assert kept < 100


def _faults(kept: bool) -> int:
    """How many pages a step asks for that uses what the steps before it freed."""
    if kept:
        tune_malloc()
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        made = [torch.ones(10_000_000) for _ in range(4)]
        del made
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_seed_decides_the_devices_random_numbers_as_pytorchs_own_does() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    for seed, same in ((7, True), (2**64 - 1, False), (7, True)):
        seed_device(torch.device("cpu"), seed)
        assert torch.equal(torch.rand(3), expected) == same
