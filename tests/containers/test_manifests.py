"""The Kubernetes manifests name what refers to each other, start as many ranks as GPUs, and are not root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
NGC = ROOT / "examples" / "ngc"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((NGC / name).read_text(encoding="utf-8")))


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod specs of a runtime or a PyTorchJob."""
    if document["kind"] == "PyTorchJob":
        return [replica["template"]["spec"] for replica in document["spec"]["pytorchReplicaSpecs"].values()]
    jobs = document["spec"]["template"]["spec"]["replicatedJobs"]
    return [job["template"]["spec"]["template"]["spec"] for job in jobs]


def test_the_names_that_kubeflow_looks_for_are_there_and_refer_to_each_other() -> None:
    runtime, job = documents("trainjob.yaml")
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [container["name"] for container in pods(runtime)[0]["containers"]] == ["node"]
    for pod in pods(documents("pytorchjob.yaml")[0]):
        assert [container["name"] for container in pod["containers"]] == ["pytorch"]


def test_pods_are_not_root_and_share_memory_between_their_ranks() -> None:
    image = (ROOT / "containers" / "Dockerfile").read_text()
    for document in (documents("trainjob.yaml")[0], documents("pytorchjob.yaml")[0]):
        for pod in pods(document):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert f"USER_ID={pod['securityContext']['runAsUser']}\n" in image
            (container,) = pod["containers"]
            assert container["volumeMounts"] == [{"name": pod["volumes"][0]["name"], "mountPath": "/dev/shm"}]  # noqa: S108


def test_as_many_ranks_are_started_as_gpus_are_asked_for() -> None:
    trainer = documents("trainjob.yaml")[1]["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    spec = documents("pytorchjob.yaml")[0]["spec"]
    for pod in pods(documents("pytorchjob.yaml")[0]):
        assert int(spec["nprocPerNode"]) == pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
