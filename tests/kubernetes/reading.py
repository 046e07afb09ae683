"""What the manifests say: objects, and the one container of a pod as Kubernetes would start it.

No process is started here, and nothing is checked but that what is read is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = ("job.yaml", "job-launcher.yaml", "jobset.yaml")
INDEX = "batch.kubernetes.io/job-completion-index"
#: a label that the Job controller gives to all pods of a Job, and to no other ones
CONTROLLER = "batch.kubernetes.io/controller-uid"


class _OneOfEach(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML readers silently take the last one."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is there twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


_OneOfEach.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def objects(text: str) -> list[dict[str, Any]]:
    """The objects of a file."""
    return [each for each in yaml.load_all(text, _OneOfEach) if each is not None]


def manifest(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a manifest of the examples, by kind, of which each has one at most."""
    found = objects((FOLDER / name).read_text())
    kinds = [each["kind"] for each in found]
    assert len(kinds) == len(set(kinds)), kinds
    return dict(zip(kinds, found, strict=True))


def as_jobs(kinds: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The Jobs of a manifest: those that are there, and those that the JobSet controller would make."""
    found = [kinds["Job"]] if "Job" in kinds else []
    if "JobSet" in kinds:
        owner = kinds["JobSet"]
        for each in owner["spec"]["replicatedJobs"]:
            for number in range(each.get("replicas", 1)):
                name = f"{owner['metadata']['name']}-{each['name']}-{number}"
                found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **each["template"]})
                found[-1]["metadata"] = {**each["template"].get("metadata", {}), "name": name}
    return found


def the_job(kinds: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    (job,) = as_jobs(kinds)
    return job


def pod_of(job: Mapping[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


def container_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Its one container."""
    (container,) = pod_of(job)["containers"]
    found: dict[str, Any] = container
    return found


def entry_point(instruction: str = "ENTRYPOINT") -> list[str]:
    """ENTRYPOINT of the Dockerfile, which has to be in the form with brackets."""
    (line,) = re.findall(rf"^{instruction} (.*)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    words: list[str] = json.loads(line)
    return words


@dataclass(frozen=True)
class Started:
    """What the kubelet would start, and how often it may."""

    arguments: list[str]
    environment: dict[str, str]
    grace: float
    pre_stop: list[str]
    ready: list[str]


def started(job: Mapping[str, Any], index: int, address: str = "10.0.0.1") -> Started:
    """The container of the pod with this index, with all references resolved."""
    container, pod = container_of(job), pod_of(job)
    environment: dict[str, str] = {}
    for variable in container["env"]:
        text = variable["value"] if "value" in variable else _field(variable["valueFrom"], index, address)
        environment[variable["name"]] = _expanded(text, environment)  # by those that come before it
    environment["JOB_COMPLETION_INDEX"] = str(index)  # the Job controller adds it to every container
    command = [*container.get("command", entry_point()), *container.get("args", [])]
    return Started(
        [_expanded(word, environment) for word in command],
        environment,
        pod["terminationGracePeriodSeconds"],
        container["lifecycle"]["preStop"]["exec"]["command"],
        container["readinessProbe"]["exec"]["command"],
    )


def _field(source: Mapping[str, Any], index: int, address: str) -> str:
    path = source["fieldRef"]["fieldPath"]
    known = {
        f"metadata.annotations['{INDEX}']": str(index),
        f"metadata.labels['{CONTROLLER}']": "0a1b2c3d-the-uid-of-the-job",
        "status.podIP": address,
    }
    return known[path]


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """As Kubernetes does: ``$(NAME)`` where NAME is known; ``$$`` is a dollar sign."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environment.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)", value, text)
