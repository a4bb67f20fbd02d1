"""launch/kubernetes.yaml: what the operator's schema knows, and a command that trains."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers import ROOT, clean_env, free_port, read_rows, run_args

from mingpt.config_parser import read_config

TEXT = (ROOT / "launch/kubernetes.yaml").read_text()
GPU = TEXT.replace("## ", "")
KINDS = {"PersistentVolumeClaim": "V1PersistentVolumeClaim", "PyTorchJob": "KubeflowOrgV1PyTorchJob"}
CLAIM, JOB = yaml.safe_load_all(TEXT)
POD = JOB["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
CONTAINER = POD["containers"][0]
ENV = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}


def check(text: str) -> None:
    """Sends documents through the published models, which drop keys that they don't know, and change a wrong type."""
    pytest.importorskip("kubeflow.training", reason="kubeflow-training is not installed")
    from kubeflow.training.api_client import ApiClient

    client = ApiClient()
    for document in yaml.safe_load_all(text):
        model = client.deserialize(SimpleNamespace(data=json.dumps(document)), KINDS[document["kind"]])
        assert client.sanitize_for_serialization(model) == document


def test_the_schema_knows_every_key() -> None:
    check(TEXT)
    check(GPU)
    assert "nvidia.com/gpu" in yaml.safe_dump_all(yaml.safe_load_all(GPU))


@pytest.mark.parametrize(
    ("found", "mistaken"),
    [("minReplicas", "minNodes"), ("mountPath:", "path:"), ('value: "4"', "value: 4"), ("accessModes", "accessMode")],
)
def test_a_mistake_would_be_seen(found: str, mistaken: str) -> None:
    assert found in TEXT
    with pytest.raises((AssertionError, ValueError)):
        check(TEXT.replace(found, mistaken))


def test_what_belongs_together() -> None:
    assert POD["volumes"][0]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    run_dir = read_config(CONTAINER["args"]).trainer.run_dir
    assert Path(run_dir).is_relative_to(CONTAINER["volumeMounts"][0]["mountPath"]), "on the claim"
    assert int(ENV["PET_SHUTDOWN_TIMEOUT"]) < POD["terminationGracePeriodSeconds"]


@pytest.mark.slow
def test_two_pods_train(text: Path, tmp_path: Path) -> None:
    """Its command, with the variables that the operator sets (training-operator 1.9, pkg/controller.v1/pytorch)."""
    policy = JOB["spec"]["elasticPolicy"]
    env = ENV | {
        "PET_NPROC_PER_NODE": JOB["spec"]["nprocPerNode"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_RDZV_CONF": "last_call_timeout=5",  # not from the yaml: for a test, 30 seconds are long to wait for more
    }
    assert CONTAINER["command"] == ["torchrun", "main.py"]
    command = [sys.executable, "-m", "torch.distributed.run", str(ROOT / "main.py"), *CONTAINER["args"]]
    command += run_args(tmp_path / "run", text)
    pods = [
        subprocess.Popen(command, env=clean_env(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(JOB["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"])
    ]
    try:
        said = [pod.communicate(timeout=120)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert [row["world_size"] for row in read_rows(tmp_path / "run")] == [2] * 12


@pytest.mark.slow
def test_the_image_has_all_that_runs(tmp_path: Path) -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "launch/Dockerfile").read_text(), re.MULTILINE)
    for pattern in " ".join(copied).split():
        for file in ROOT.glob(pattern):
            target = tmp_path / file.relative_to(ROOT)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    for words in (["data/prepare.py"], ["main.py", "--trainer.max_steps=1"]):
        command, env = [sys.executable, *words], clean_env(PYTHONPATH="")
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
