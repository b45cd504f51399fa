"""Checks a cluster file for `ray up` offline: by Ray's own schema, and what that leaves open."""

import copy
from collections.abc import Iterator
from typing import Any

from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

# Ray hands node_config to the cloud as it is, and only the cloud would see a mistake in it.
_NODE_KEYS = {
    "aws": {
        "BlockDeviceMappings",
        "CapacityReservationSpecification",
        "CpuOptions",
        "EbsOptimized",
        "IamInstanceProfile",
        "ImageId",
        "InstanceMarketOptions",
        "InstanceType",
        "KeyName",
        "LicenseSpecifications",
        "MetadataOptions",
        "NetworkInterfaces",
        "Placement",
        "SecurityGroupIds",
        "SubnetIds",
        "TagSpecifications",
        "UserData",
    },
    "gcp": {
        "canIpForward",
        "disks",
        "guestAccelerators",
        "labels",
        "machineType",
        "metadata",
        "minCpuPlatform",
        "networkInterfaces",
        "scheduling",
        "serviceAccounts",
        "shieldedInstanceConfig",
        "sourceMachineImage",
        "tags",
    },
}


def find_cluster_mistakes(document: dict[str, Any]) -> list[str]:
    try:
        validate_config(prepare_config(copy.deepcopy(document)))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.absolute_path)
        return [f"{where}: {error.message}" if where else error.message]
    # It reads parts before it checks their types, and asserts what it needs of others.
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        AssertionError,
        RuntimeError,
    ) as error:
        return [f"Ray refuses it: {error}"]
    return list(_node_mistakes(document))


def _node_mistakes(document: dict[str, Any]) -> Iterator[str]:
    provider = document["provider"]["type"]
    known = _NODE_KEYS.get(provider)
    if known is None:
        return
    for name, node_type in document["available_node_types"].items():
        where = f"available_node_types.{name}"
        node_config = node_type.get("node_config") or {}
        for key in node_config:
            if key not in known:
                yield f"{where}.node_config.{key}: {provider} does not know this key"
        is_gpu = "guestAccelerators" in node_config
        if provider == "gcp" and is_gpu and "GPU" not in (node_type.get("resources") or {}):
            yield f"{where}.resources: state GPU; Ray does not find it out on gcp, and never scales"
