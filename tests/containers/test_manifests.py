"""The Kubernetes manifests have the fields that Kubeflow knows, of the right kinds, and no others.

The shapes below are written for the fields that the manifests use; Kubeflow's own definitions have many more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
NGC = ROOT / "examples" / "ngc"


class Maybe:
    """A field that may be left out."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


METADATA = {"name": str, "labels": Maybe({str: str})}
VARIABLES = [{"name": str, "value": str}]
RESOURCES = {"limits": {"nvidia.com/gpu": int}}
CONTAINER = {
    "name": str,
    "image": str,
    "securityContext": {"allowPrivilegeEscalation": bool},
    "command": Maybe([str]),
    "args": Maybe([str]),
    "env": Maybe(VARIABLES),
    "resources": Maybe(RESOURCES),
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {
    "spec": {
        "securityContext": {"runAsNonRoot": bool, "runAsUser": int},
        "volumes": [{"name": str, "emptyDir": {"medium": str}}],
        "containers": [CONTAINER],
    }
}
REPLICA = {"replicas": int, "restartPolicy": str, "template": POD}
JOB = {"metadata": {"labels": {str: str}}, "spec": {"template": POD}}
SHAPES = {
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "mlPolicy": {"numNodes": int, "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": str, "template": JOB}]}},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef": {"kind": str, "name": str},
        "trainer": {
            "image": str,
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": RESOURCES,
            "command": [str],
            "args": [str],
            "env": VARIABLES,
        },
    },
    ("kubeflow.org/v1", "PyTorchJob"): {
        "nprocPerNode": str,
        "runPolicy": {"cleanPodPolicy": str},
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
    },
}


def faults(value: Any, shape: Any, where: str) -> Iterator[str]:
    """What of a document is not of its shape."""
    if isinstance(shape, dict) and isinstance(value, dict):
        if set(shape) == {str}:
            shape = dict.fromkeys(value, shape[str])
        yield from (f"{where}.{key} is unknown" for key in value.keys() - shape.keys())
        for key, part in shape.items():
            if key in value:
                yield from faults(value[key], part.shape if isinstance(part, Maybe) else part, f"{where}.{key}")
            elif not isinstance(part, Maybe):
                yield f"{where}.{key} is missing"
    elif isinstance(shape, list) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from faults(item, shape[0], f"{where}[{index}]")
    elif not isinstance(shape, type) or type(value) is not shape:
        yield f"{where} is {value!r}"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((NGC / name).read_text(encoding="utf-8")))


def check(document: dict[str, Any]) -> list[str]:
    kind = (document["apiVersion"], document["kind"])
    whole = {"apiVersion": str, "kind": str, "metadata": METADATA, "spec": SHAPES[kind]}
    return list(faults(document, whole, document["kind"]))


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod specs of a runtime or a PyTorchJob."""
    if document["kind"] == "PyTorchJob":
        return [replica["template"]["spec"] for replica in document["spec"]["pytorchReplicaSpecs"].values()]
    jobs = document["spec"]["template"]["spec"]["replicatedJobs"]
    return [job["template"]["spec"]["template"]["spec"] for job in jobs]


@pytest.mark.parametrize("name", ["trainjob.yaml", "pytorchjob.yaml"])
def test_a_manifest_has_the_fields_that_kubeflow_knows(name: str) -> None:
    for document in documents(name):
        assert check(document) == []


def test_a_field_of_another_name_or_kind_is_found() -> None:
    job = documents("trainjob.yaml")[1]
    spoiled = copy.deepcopy(job)
    spoiled["spec"]["trainer"]["numProcPerNodes"] = 8
    spoiled["spec"]["trainer"]["env"][0]["value"] = 1
    del spoiled["spec"]["runtimeRef"]
    assert sorted(check(spoiled)) == [
        "TrainJob.spec.runtimeRef is missing",
        "TrainJob.spec.trainer.env[0].value is 1",
        "TrainJob.spec.trainer.numProcPerNodes is unknown",
    ]


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
