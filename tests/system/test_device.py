"""Rules on hardware flags and limits: device, precision and threads. The hardware is simulated."""

import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mingpt.system.device import choose_device, choose_precision, gpu_metrics, has_bf16, tune_malloc, use_cuda
from mingpt.system.threads import choose_threads
from tests.helpers import run_ranks

CPU, GPU, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")
INTEL = "this CPU has AVX512-BF16, but no AMX, without which Intel's fp32 is faster"
AMX, T4 = {"amx_tile": True}, {"gpus": 1, "capability": (7, 5)}
SetHardware = Callable[..., None]


@pytest.fixture
def set_hardware(monkeypatch: pytest.MonkeyPatch) -> SetHardware:
    """Simulates hardware; without arguments, only eight cores."""

    def set_flags(
        gpus: int = 0,
        bf16: bool = False,
        capability: tuple[int, int] = (6, 1),
        mps: bool = False,
        **cpu_flags: bool | str,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        # By default, PyTorch counts emulation as support.
        has_bf16 = lambda including_emulation=True: bf16 or including_emulation  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", has_bf16)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu_flags, raising=False)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    set_flags()
    return set_flags


def test_the_device_follows_backend_hardware_and_local_rank(set_hardware: SetHardware) -> None:
    second_gpu = torch.device("cuda", 1)
    for hardware, backend, local_rank, world_size, device in (
        ({"gpus": 2}, "auto", 0, 4, GPU),
        ({"gpus": 2}, "nccl", 1, 4, second_gpu),
        ({"gpus": 1, "mps": True}, "gloo", 3, 4, CPU),
        ({"gpus": 1, "mps": True}, "gloo", 0, 1, CPU),
        ({}, "auto", 1, 2, CPU),
        ({"mps": True}, "auto", 0, 1, MPS),
        ({"mps": True}, "auto", 0, 2, CPU),
    ):
        set_hardware(**hardware)
        assert choose_device(backend, local_rank, world_size) == device
        assert use_cuda(backend) == (device.type == "cuda")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs have other flags")
def test_the_flags_that_the_rules_read_exist_in_this_pytorch() -> None:
    if hasattr(torch.cpu, "get_capabilities"):
        assert {"avx512_bf16", "amx_tile", "cpu_name"} <= set(torch.cpu.get_capabilities())
    assert isinstance(has_bf16(CPU)[0], bool)
    assert has_bf16(GPU)[0] in {False, torch.cuda.is_available()}


@pytest.mark.parametrize(
    ("device", "flags", "saved", "expected", "reason"),
    [
        (CPU, {}, None, "fp32", "this CPU has neither AVX512-BF16 nor AMX"),
        (CPU, {"avx512_bf16": True, "cpu_name": "AMD Zen 5"}, None, "bf16", "this CPU has AVX512-BF16"),
        (CPU, {"avx512_bf16": True, "cpu_name": "Intel Xeon"}, None, "fp32", INTEL),
        (CPU, AMX, None, "bf16", "this CPU has AMX"),
        (GPU, {"gpus": 1, "bf16": True}, None, "bf16", "this GPU has bf16 hardware"),
        (GPU, {"gpus": 1, "amx_tile": True}, None, "fp32", "this GPU has no bf16 hardware"),
        (GPU, T4, None, "fp16", "this GPU has no bf16 hardware, but for fp16"),
        (MPS, {"mps": True, "amx_tile": True}, None, "fp32", "mps trains in fp32"),
        (CPU, AMX, "fp32", "fp32", "kept from the snapshot"),
        (CPU, AMX, "bf16", "bf16", "kept from the snapshot"),
        (GPU, T4, "fp16", "fp16", "kept from the snapshot"),
        (CPU, AMX, "fp16", "bf16", "this CPU has AMX; the snapshot was made in fp16, so the last bits will differ"),
    ],
)
def test_auto_selects_the_precision_that_hardware_multiplies_or_keeps_the_snapshots(
    device: torch.device, flags: dict, saved: str | None, expected: str, reason: str, set_hardware: SetHardware
) -> None:
    set_hardware(**flags)
    assert choose_precision("auto", device, saved) == (expected, f"auto: {reason}")


def test_another_key_excludes_fp16_and_emulation_is_named(set_hardware: SetHardware) -> None:
    set_hardware(**T4)
    for saved in (None, "fp16"):
        precision, reason = choose_precision("auto", GPU, saved, "distributed.reduction tree")
        assert precision == "fp32"
        assert "hardware, and distributed.reduction tree excludes fp16" in reason
    slow = "as configured, but slow, because this GPU has no bf16 hardware"
    assert choose_precision("bf16", GPU, "fp32") == ("bf16", slow)
    set_hardware(**AMX)
    assert choose_precision("bf16", CPU, "fp32") == ("bf16", "as configured")


def test_threads(set_hardware: SetHardware, monkeypatch: pytest.MonkeyPatch) -> None:
    for requested, ranks, busy, saved, omp, expected, reason in [
        ("auto", 1, 0.0, None, None, 8, "auto: 8 idle cores / 1 ranks"),
        ("auto", 9, 0.0, None, "", 1, "auto: 8 idle cores / 9 ranks"),
        ("auto", 2, 25.0, None, "two", 3, "auto: 6 idle cores / 2 ranks"),
        ("auto", 2, 99.0, None, None, 1, "auto: 0 idle cores / 2 ranks"),
        ("auto", 2, 0.0, None, "16", 16, "auto: OMP_NUM_THREADS"),
        ("auto", 2, 0.0, 3, "1", 3, "auto: kept from the snapshot"),
        (5, 2, 0.0, 3, "1", 5, "as configured"),
    ]:
        set_hardware()
        monkeypatch.setattr("psutil.cpu_percent", lambda seconds, percpu, busy=busy: [busy] * 99)
        if omp is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", omp)
        threads, found = choose_threads(requested, ranks, saved)
        assert threads == expected
        assert found.startswith(reason), found


def test_mfu_is_given_where_the_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**29)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert gpu_metrics(GPU, "fp16", 65e12 / 4) == {"memory": 1.5, "mfu": pytest.approx(0.25)}
    assert gpu_metrics(GPU, "fp32", 8.1e12)["mfu"] == pytest.approx(1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert gpu_metrics(GPU, "fp16", 65e12) == {"memory": 1.5}
    assert gpu_metrics(CPU, "fp32", 65e12) == {}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_freed_memory_is_reused_without_page_faults(tmp_path: Path) -> None:
    [(before, after)] = run_ranks(1, page_faults_before_and_after_tuning, tmp_path=tmp_path)
    assert before > 10_000
    assert after < 100


def page_faults_before_and_after_tuning() -> list[int]:
    """Returns page faults of a step. For `run_ranks`, because the setting lasts until the process ends."""
    faults = []
    for tune in (lambda: None, tune_malloc):
        tune()
        for _ in range(10):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            tensors = [torch.ones(10_000_000) for _ in range(2)]
            del tensors
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return faults
