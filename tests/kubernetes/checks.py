"""What has to fit together in a manifest, and what the API server refuses although the schema allows it.

`complaints` answers with sentences; none means that all is well. Nothing is read but the Dockerfile, and which
files there are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from inprocess.options import Options
from tests.kubernetes.reading import FOLDER, ROOT, container_of, pod_of, started, the_job

Kinds = Mapping[str, dict[str, Any]]


def complaints(kinds: Kinds) -> list[str]:
    """What is wrong with the objects of a manifest."""
    checks = (_refused, _names, _numbers, _times, _volumes, _files, _user)
    return [found for check in checks for found in check(kinds, the_job(kinds))]


def _refused(_: Kinds, job: dict[str, Any]) -> Iterator[str]:
    """The rules in the descriptions of the schema's fields, which its types do not say."""
    spec = job["spec"]
    if pod_of(job).get("restartPolicy") != "Never":
        for field in ("backoffLimitPerIndex", "podFailurePolicy"):
            if field in spec:
                yield f"{field} is refused where the restartPolicy is not Never"
    if pod_of(job).get("restartPolicy") not in ("Never", "OnFailure"):
        yield "the restartPolicy of a Job is Never or OnFailure"
    if spec.get("completionMode") != "Indexed":
        yield "without completionMode: Indexed a pod has no number"


def _names(kinds: Kinds, job: dict[str, Any]) -> Iterator[str]:
    """The pod of index 0 is where the others look for it."""
    if "JobSet" in kinds:
        network = kinds["JobSet"]["spec"]["network"]
        domain = network["subdomain"]
        published, ports = network["publishNotReadyAddresses"] and network["enableDNSHostnames"], None
    else:
        service, domain = kinds["Service"], pod_of(job).get("subdomain")
        ports = [port["port"] for port in service["spec"]["ports"]]
        published = service["spec"]["publishNotReadyAddresses"] and service["spec"]["clusterIP"] == "None"
        if service["metadata"]["name"] != domain:
            yield f"the Service is {service['metadata']['name']}, and the subdomain of the pods is {domain}"
        labels = job["spec"]["template"]["metadata"]["labels"]
        if not service["spec"]["selector"].items() <= labels.items():
            yield "the Service does not select the pods"
    if not published:
        yield "the names of the pods are not published before they are ready"
    host, port = _meeting(started(job, 0).environment)
    first = f"{job['metadata']['name']}-0.{domain}"
    if host != first:
        yield f"the ranks meet at {host}, and the pod of index 0 is {first}"
    named = [each["containerPort"] for each in container_of(job)["ports"]]
    if [port] != named or ports not in (None, named):
        yield f"the ranks meet at port {port}; the container has {named}, the Service {ports}"


def _meeting(environment: Mapping[str, str]) -> tuple[str, int]:
    if "RENDEZVOUS" in environment:
        host, _, port = environment["RENDEZVOUS"].rpartition(":")
        return host, int(port)
    return environment["MASTER_ADDR"], int(environment["MASTER_PORT"])


def _numbers(_: Kinds, job: dict[str, Any]) -> Iterator[str]:
    """There are as many pods as the ranks wait for, at the same time, and each is another one."""
    spec, first = job["spec"], started(job, 0)
    words = " ".join(first.arguments)
    launcher = re.search(r"--nnodes=(\d+) ", words)
    wanted = int(launcher[1] if launcher else first.environment["WORLD_SIZE"])
    if not spec["completions"] == spec["parallelism"] == wanted:
        yield f"completions {spec['completions']}, parallelism {spec['parallelism']}, and {wanted} are waited for"
    name = "JOB_COMPLETION_INDEX" if launcher else "RANK"
    numbers = [started(job, index).environment.get(name) for index in range(spec["completions"])]
    if numbers != [str(index) for index in range(spec["completions"])]:
        yield f"{name} of the pods is {numbers}"
    if not launcher and not first.environment.get("INPROCESS_JOB"):
        yield "nothing tells that a container that is started again is of this Job"
    if launcher and '--node-rank="$JOB_COMPLETION_INDEX"' not in words:
        yield "the node rank is not the index"


def _times(_: Kinds, job: dict[str, Any]) -> Iterator[str]:
    """Nobody is killed who would have left in time."""
    first = started(job, 0)
    hook = int(re.search(r"timeout (\d+) ", " ".join(first.pre_stop))[1])  # type: ignore[index]
    needs = Options().leave_grace  # neither the manifests nor the example change it
    if "SHUTDOWN" in first.environment:
        patience = float(first.environment["SHUTDOWN"])
        if patience <= needs:
            yield f"the launcher kills after {patience:g} s, and a rank may take {needs:g} s"
        needs = patience
    if first.grace <= hook + needs:
        yield f"the pod is killed after {first.grace:g} s; the hook may take {hook} s, and then the rank {needs:g} s"


def _volumes(kinds: Kinds, job: dict[str, Any]) -> Iterator[str]:
    """What is mounted is there, and what has to outlive a pod is on the claim."""
    volumes = {each["name"]: each for each in pod_of(job)["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in container_of(job)["volumeMounts"]}
    if sorted(mounts.values()) != sorted(volumes):
        yield f"volumes {sorted(volumes)}, mounted {sorted(mounts.values())}"
        return
    claim = kinds["PersistentVolumeClaim"]
    claims = {each["persistentVolumeClaim"]["claimName"] for each in volumes.values() if "emptyDir" not in each}
    if claims != {claim["metadata"]["name"]}:
        yield f"the pods claim {claims}, and the claim is {claim['metadata']['name']}"
    if claim["spec"]["accessModes"] != ["ReadWriteMany"]:
        yield "pods on several nodes cannot mount the claim"
    if volumes[mounts.get("/dev/shm", "tmp")].get("emptyDir", {}).get("medium") != "Memory":
        yield "/dev/shm is not in memory"
    durable = [path for path, name in mounts.items() if "persistentVolumeClaim" in volumes[name]]
    first = started(job, 0)
    kept = [first.environment["INPROCESS_RUN_DIR"], *re.findall(r"--checkpoint-dir=(\S+)", " ".join(first.arguments))]
    for path in kept:
        if not any(f"{path}/".startswith(f"{place}/") for place in durable):
            yield f"{path} is lost with its pod"
    if len(kept) != 2:
        yield "the program is given no folder for its checkpoints"


def _files(_: Kinds, job: dict[str, Any]) -> Iterator[str]:
    """The command names files of the repository, which the image has, and the entry point stays what it is."""
    if "command" in container_of(job):
        yield "`command` replaces the entry point of the image"
    words = [part for word in started(job, 0).arguments for part in shlex.split(word, comments=True)]
    files = [word for word in words if word.startswith("/app/")]
    if not files:
        yield "the command names no file of the image"
    copied = re.findall(r"^COPY (?:\S+ )*(\S+) /app/\S*$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    for file in files:
        name = file.removeprefix("/app/")
        if not (ROOT / name).is_file():
            yield f"there is no {name} in the repository"
        elif not any(f"{name}/".startswith(f"{each}/") for each in copied):
            yield f"the image has no {name}"
    if "sh" in words[:4] and not re.search(r"^exec ", started(job, 0).arguments[-1], re.MULTILINE):
        yield "the shell keeps SIGTERM to itself: no `exec` before the program"


def _user(_: Kinds, job: dict[str, Any]) -> Iterator[str]:
    """The image's user, without rights that it does not need; the library's files are for it alone."""
    pod, own = pod_of(job)["securityContext"], container_of(job)["securityContext"]
    user, group = re.findall(r"^USER (\d+):(\d+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)[-1]
    if (pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"]) != (int(user), int(group), int(group)):
        yield f"the image is made for user {user} of group {group}"
    restricted = (pod["runAsNonRoot"], own["allowPrivilegeEscalation"], own["capabilities"]["drop"])
    if restricted != (True, False, ["ALL"]):
        yield "the pod is refused where the restricted standard for pods is enforced"
