"""launch/kubernetes.yaml fits the training operator's schema, and its command and image train."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.helpers import ROOT, clean_env, free_port, read_rows, run_args

TEXT = (ROOT / "launch/kubernetes.yaml").read_text()
WITH_GPUS = TEXT.replace("## ", "")
DOCKERFILE = (ROOT / "launch/Dockerfile").read_text()
KINDS = {"PersistentVolumeClaim": "V1PersistentVolumeClaim", "PyTorchJob": "KubeflowOrgV1PyTorchJob"}
_, JOB = yaml.safe_load_all(TEXT)
WORKER = JOB["spec"]["pytorchReplicaSpecs"]["Worker"]
POD = WORKER["template"]["spec"]
CONTAINER = POD["containers"][0]
ENV = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}


def check_schema(text: str) -> None:
    """Converts documents to the operator's published models, which drop unknown keys, and back."""
    pytest.importorskip("kubeflow.training", reason="kubeflow-training is not installed")
    from kubeflow.training.api_client import ApiClient

    client = ApiClient()
    for document in yaml.safe_load_all(text):
        model = client.deserialize(SimpleNamespace(data=json.dumps(document)), KINDS[document["kind"]])
        assert client.sanitize_for_serialization(model) == document


def test_all_keys_are_in_the_schema_also_those_for_gpus() -> None:
    check_schema(TEXT)
    check_schema(WITH_GPUS)


@pytest.mark.slow
def test_two_pods_train(text: Path, tmp_path: Path) -> None:
    """The container's command with the variables that the operator sets (1.9, pkg/controller.v1/pytorch)."""
    policy = JOB["spec"]["elasticPolicy"]
    env = ENV | {
        "PET_NPROC_PER_NODE": JOB["spec"]["nprocPerNode"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_RDZV_CONF": "last_call_timeout=5",  # by default torchrun waits 30 seconds for more pods
    }
    assert CONTAINER["command"] == ["torchrun", "main.py"]
    command = [sys.executable, "-m", "torch.distributed.run", str(ROOT / "main.py"), *CONTAINER["args"]]
    command += run_args(tmp_path / "run", text)
    pods = [
        subprocess.Popen(command, env=clean_env(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(WORKER["replicas"])
    ]
    try:
        outputs = [pod.communicate(timeout=120)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert [row["world_size"] for row in read_rows(tmp_path / "run")] == [2] * 12


@pytest.mark.slow
def test_the_image_has_all_files_that_its_programs_need(tmp_path: Path) -> None:
    instructions = re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE)
    for *sources, target in (instruction.split() for instruction in instructions):
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (tmp_path / target).mkdir(exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / target)
    scripts = ",".join(file.stem for file in tmp_path.glob("*.py"))
    for program in (["main.py", "--trainer.max_steps=1"], ["-c", f"import {scripts}"]):
        command, env = [sys.executable, *program], clean_env(PYTHONPATH="")
        result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
