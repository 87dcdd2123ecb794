"""The manifests of Kubernetes have the fields that their definitions know, and say of a job what each rank needs.

The models below are what the manifests use of the definitions' OpenAPI schemas, with the same names, types and required
fields: TrainJob v1alpha1 (kubeflow/trainer, manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml), JobSet v1alpha2
(kubernetes-sigs/jobset, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml), and of Kubernetes batch/v1 and v1.
"""

# ruff: noqa: N815 - the fields have the names that Kubernetes gives them
from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from syncline.pytorch.launchers import find_place

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
NAME = Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)
FIELDS = ("metadata.name", "metadata.namespace", "spec.nodeName", "spec.serviceAccountName", "status.podIP")


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class FieldRef(Schema):
    fieldPath: str

    @model_validator(mode="after")
    def check_path(self) -> FieldRef:
        assert self.fieldPath in FIELDS or self.fieldPath.startswith(("metadata.annotations['", "metadata.labels['"))
        return self


class SecretKeyRef(Schema):
    name: str
    key: str
    optional: bool = False


class EnvVarSource(Schema):
    fieldRef: FieldRef | None = None
    secretKeyRef: SecretKeyRef | None = None


class EnvVar(Schema):
    name: str = Field(pattern=r"^[^=]+$")
    value: str | None = None
    valueFrom: EnvVarSource | None = None

    @model_validator(mode="after")
    def check_one(self) -> EnvVar:
        assert (self.value is None) != (self.valueFrom is None), f"{self.name} has one of value and valueFrom"
        return self


class Resources(Schema):
    limits: dict[str, str | int] = {}
    requests: dict[str, str | int] = {}


class Metadata(Schema):
    name: str = NAME
    namespace: str | None = None


class RuntimeRef(Schema):
    name: str
    apiGroup: str = "trainer.kubeflow.org"
    kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = "ClusterTrainingRuntime"


class Trainer(Schema):
    image: str | None = None
    command: list[str] = []
    args: list[str] = []
    env: list[EnvVar] = []
    numNodes: int = Field(default=1, ge=1)
    numProcPerNode: int | Literal["auto", "cpu", "gpu"] | None = None
    resourcesPerNode: Resources | None = None


class TrainJobSpec(Schema):
    runtimeRef: RuntimeRef
    trainer: Trainer | None = None


class TrainJob(Schema):
    apiVersion: Literal["trainer.kubeflow.org/v1alpha1"]
    kind: Literal["TrainJob"]
    metadata: Metadata
    spec: TrainJobSpec


class Container(Schema):
    name: str = NAME
    image: str
    command: list[str] = []
    args: list[str] = []
    env: list[EnvVar] = []
    resources: Resources | None = None


class PodSpec(Schema):
    containers: list[Container] = Field(min_length=1)
    restartPolicy: Literal["Never", "OnFailure"]


class PodTemplate(Schema):
    spec: PodSpec


class JobSpec(Schema):
    template: PodTemplate
    completionMode: Literal["Indexed", "NonIndexed"] = "NonIndexed"
    completions: int | None = None
    parallelism: int | None = None
    backoffLimit: int = 6


class JobTemplate(Schema):
    spec: JobSpec


class ReplicatedJob(Schema):
    name: str
    template: JobTemplate
    replicas: int = 1


class FailurePolicy(Schema):
    maxRestarts: int = 0
    restartStrategy: Literal["Recreate", "BlockingRecreate"] = "Recreate"


class JobSetSpec(Schema):
    replicatedJobs: list[ReplicatedJob]
    failurePolicy: FailurePolicy | None = None


class JobSet(Schema):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec


KINDS: dict[str, type[TrainJob | JobSet]] = {"trainjob.yaml": TrainJob, "jobset.yaml": JobSet}


def loaded(name: str) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return manifest


def variables_in_pod(env: list[EnvVar], index: int) -> dict[str, str]:
    """What a container finds in the pod of that number."""
    fields = {INDEX: str(index), "spec.nodeName": f"node{index}"}
    found = {}
    for variable in env:
        source = variable.valueFrom
        assert source is None or source.fieldRef is not None or source.secretKeyRef is not None
        of_field = fields[source.fieldRef.fieldPath] if source and source.fieldRef else "a secret"
        found[variable.name] = variable.value if variable.value is not None else of_field
    return found | {"JOB_COMPLETION_INDEX": str(index)}


def test_every_manifest_is_checked() -> None:
    assert {path.name for path in FOLDER.iterdir()} == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_a_manifest_fits_its_definition(name: str) -> None:
    KINDS[name].model_validate(loaded(name))


@pytest.mark.parametrize("name", KINDS)
def test_a_wrong_field_is_noticed(name: str) -> None:
    manifest = loaded(name)
    manifest["spec"]["numNodes"] = 4
    with pytest.raises(ValidationError, match="numNodes"):
        KINDS[name].model_validate(manifest)


def test_each_pod_of_the_jobset_is_a_rank_of_one_job() -> None:
    jobset = JobSet.model_validate(loaded("jobset.yaml"))
    (workers,) = jobset.spec.replicatedJobs
    job = workers.template.spec
    (container,) = job.template.spec.containers
    assert (workers.replicas, job.completionMode, job.parallelism) == (1, "Indexed", job.completions)
    assert job.completions is not None
    places = [find_place(variables_in_pod(container.env, index)) for index in range(job.completions)]
    assert [place.rank for place in places] == list(range(job.completions))
    first = f"{jobset.metadata.name}-{workers.name}-0-0.{jobset.metadata.name}"
    assert {(place.world_size, place.master_address) for place in places} == {(job.completions, first)}


def test_each_pod_of_the_trainjob_is_a_rank_of_one_job() -> None:
    trainjob = TrainJob.model_validate(loaded("trainjob.yaml"))
    trainer = trainjob.spec.trainer
    assert trainer is not None
    assert not [variable.name for variable in trainer.env if variable.name.startswith("PET_")], "the Trainer sets them"
    name = trainjob.metadata.name
    of_trainer = {
        "PET_NNODES": str(trainer.numNodes),
        "PET_NPROC_PER_NODE": str(trainer.numProcPerNode),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29400",
    }
    for index in range(trainer.numNodes):
        place = find_place(variables_in_pod(trainer.env, index) | of_trainer | {"PET_NODE_RANK": str(index)})
        assert (place.rank, place.world_size, place.master_port) == (index, trainer.numNodes, 29400)


@pytest.mark.parametrize("name", KINDS)
def test_ranks_are_told_the_names_of_nodes_and_a_secret(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert "SYNCLINE_HOST" in text
    assert "spec.nodeName" in text
    assert "SYNCLINE_SECRET" in text


@pytest.mark.parametrize("name", KINDS)
def test_a_manifest_starts_an_example(name: str) -> None:
    def commands(value: Any) -> list[list[str]]:
        if isinstance(value, dict):
            own = [value["command"] + value.get("args", [])] if "command" in value else []
            return own + [each for part in value.values() for each in commands(part)]
        return [each for part in value for each in commands(part)] if isinstance(value, list) else []

    (command,) = commands(loaded(name))
    script = (ROOT / "examples" / command[1]).read_text()
    assert command[0] == "python"
    assert all(f'"{word}"' in script for word in command if word.startswith("--"))
