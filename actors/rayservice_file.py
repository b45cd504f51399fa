"""Checks a RayService manifest of KubeRay offline; Kubernetes drops keys that it does not know.

The models name the fields of the `ray.io/v1` definition; deep inside a pod anything goes.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fmoe_ray.actors.serve_file import find_serve_mistakes
from fmoe_ray.config import describe, parse_yaml
from fmoe_ray.errors import ConfigError

Anything = dict[str, Any]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Container(_Closed):
    name: str
    image: str
    resources: Anything
    args: list[str] = []
    command: list[str] = []
    env: list[Anything] = []
    envFrom: list[Anything] = []
    imagePullPolicy: str = ""
    lifecycle: Anything = {}
    livenessProbe: Anything = {}
    ports: list[Anything] = []
    readinessProbe: Anything = {}
    securityContext: Anything = {}
    startupProbe: Anything = {}
    volumeDevices: list[Anything] = []
    volumeMounts: list[Anything] = []
    workingDir: str = ""


class _PodSpec(_Closed):
    containers: Annotated[list[_Container], Field(min_length=1)]
    affinity: Anything = {}
    hostIPC: bool = False
    imagePullSecrets: list[Anything] = []
    initContainers: list[Anything] = []
    nodeSelector: dict[str, str] = {}
    priorityClassName: str = ""
    runtimeClassName: str = ""
    schedulerName: str = ""
    securityContext: Anything = {}
    serviceAccountName: str = ""
    terminationGracePeriodSeconds: int = 30
    tolerations: list[Anything] = []
    topologySpreadConstraints: list[Anything] = []
    volumes: list[Anything] = []


class _Template(_Closed):
    spec: _PodSpec
    metadata: Anything = {}


class _HeadGroup(_Closed):
    template: _Template
    rayStartParams: dict[str, str] = {}
    enableIngress: bool = False
    headService: Anything = {}
    labels: dict[str, str] = {}
    resources: dict[str, str] = {}
    serviceType: str = ""


class _WorkerGroup(_Closed):
    groupName: str
    template: _Template
    minReplicas: Annotated[int, Field(ge=0)]
    maxReplicas: Annotated[int, Field(ge=0)]
    replicas: Annotated[int, Field(ge=0)] = 0
    rayStartParams: dict[str, str] = {}
    idleTimeoutSeconds: int = 60
    labels: dict[str, str] = {}
    numOfHosts: Annotated[int, Field(ge=1)] = 1
    resources: dict[str, str] = {}
    scaleStrategy: Anything = {}
    suspend: bool = False


class _AutoscalerOptions(_Closed):
    env: list[Anything] = []
    envFrom: list[Anything] = []
    idleTimeoutSeconds: int = 60
    image: str = ""
    imagePullPolicy: str = ""
    resources: Anything = {}
    securityContext: Anything = {}
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] = "Default"
    version: Literal["v1", "v2"] = "v2"
    volumeMounts: list[Anything] = []


class _AuthOptions(_Closed):
    mode: Literal["disabled", "token"]


class _RayCluster(_Closed):
    rayVersion: str
    headGroupSpec: _HeadGroup
    workerGroupSpecs: list[_WorkerGroup]
    authOptions: _AuthOptions | None = None
    autoscalerOptions: _AutoscalerOptions | None = None
    enableInTreeAutoscaling: bool = False
    gcsFaultToleranceOptions: Anything = {}
    headServiceAnnotations: dict[str, str] = {}
    managedBy: str = ""
    suspend: bool = False


class _UpgradeStrategy(_Closed):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]
    clusterUpgradeOptions: Anything = {}


class _Spec(_Closed):
    serveConfigV2: str
    rayClusterConfig: _RayCluster
    excludeHeadPodFromServeSvc: bool = False
    rayClusterDeletionDelaySeconds: int = 60
    serveService: Anything = {}
    suspend: bool = False
    upgradeStrategy: _UpgradeStrategy | None = None


class _RayService(_Closed):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Anything
    spec: _Spec


def find_rayservice_mistakes(document: dict[str, Any]) -> list[str]:
    try:
        manifest = _RayService.model_validate(document, strict=True)
    except ValidationError as error:
        return [describe(error)]
    return list(_content_mistakes(manifest.spec))


def _content_mistakes(spec: _Spec) -> Iterator[str]:
    try:
        serve = parse_yaml(spec.serveConfigV2)
    except ConfigError as error:
        yield f"spec.serveConfigV2: {error}"
    else:
        for mistake in find_serve_mistakes(serve):
            yield f"spec.serveConfigV2: {mistake}"
    cluster = spec.rayClusterConfig
    for group in cluster.workerGroupSpecs:
        if not group.minReplicas <= group.replicas <= group.maxReplicas:
            yield (
                f"worker group {group.groupName}: replicas {group.replicas} lies outside "
                f"{group.minReplicas} to {group.maxReplicas}"
            )
    for template in (
        cluster.headGroupSpec.template,
        *(g.template for g in cluster.workerGroupSpecs),
    ):
        for container in template.spec.containers:
            _, _, tag = container.image.rpartition(":")
            if cluster.rayVersion not in tag.split("-"):
                yield (
                    f"container {container.name}: image {container.image} is not tagged with "
                    f"rayVersion {cluster.rayVersion}"
                )
