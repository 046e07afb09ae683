"""The manifests are what Kubernetes takes: its own schemas, strictly, then what has to fit together in them.

Each check is also shown something wrong, so that it can fail. The schemas are those that Kubernetes publishes, as
`kubernetes-validate` bundles them; those of JobSet are the types that `kubeflow_trainer_api` is generated from.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.checks import complaints
from tests.kubernetes.reading import (
    FOLDER,
    MANIFESTS,
    as_jobs,
    container_of,
    entry_point,
    manifest,
    objects,
    pod_of,
    started,
    the_job,
)

validator = pytest.importorskip("kubernetes_validate", reason="no validator: nox -s kubernetes installs it")
jobset = pytest.importorskip("kubeflow_trainer_api.models", reason="no types of JobSet: nox -s kubernetes")

#: all that are bundled, from the first one on in which every field of the manifests is there without a feature gate
VERSIONS = [f"1.{minor}" for minor in range(34, int(validator.latest_version().split(".")[1]) + 1)]
BUILT_IN = [(name, kind) for name in MANIFESTS for kind in manifest(name) if kind != "JobSet"]


def schema_errors(thing: dict[str, Any], version: str) -> str:
    """What Kubernetes' schema says against an object; empty: nothing."""
    try:
        validator.validate(thing, version, strict=True)
    except validator.ValidationError as error:
        return str(error.message)
    return ""


def unknown_to_jobset(thing: dict[str, Any]) -> list[str]:
    """Fields that JobSet's types do not know, and leave out. A wrong type is a ValueError; what is missing is not."""
    return left_out(thing, jobset.JobsetV1alpha2JobSet.from_dict(thing).to_dict(), "")


def left_out(given: Any, known: Any, path: str) -> list[str]:
    """What is in one and not in the other, which may have more: defaults."""
    if isinstance(given, dict) and isinstance(known, dict):
        return [each for key in given for each in left_out(given[key], known.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        pairs = zip(given, known, strict=True)
        return [each for at, pair in enumerate(pairs) for each in left_out(*pair, f"{path}[{at}]")]
    return [] if given == known else [path]


# --- schemas ----------------------------------------------------------------------------------------------------------


def test_there_are_schemas() -> None:
    assert len(VERSIONS) >= 2 and schema_errors({"apiVersion": "v1", "kind": "Service", "spec": 1}, VERSIONS[0])


def test_every_manifest_is_checked() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.y*ml")) == sorted(MANIFESTS)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "kind"), BUILT_IN)
def test_schema(name: str, kind: str, version: str) -> None:
    assert schema_errors(manifest(name)[kind], version) == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_schema_of_the_job_in_a_jobset(version: str) -> None:
    (job,) = as_jobs(manifest("jobset.yaml"))
    assert schema_errors(job, version) == ""


def test_types_of_jobset() -> None:
    thing = manifest("jobset.yaml")["JobSet"]
    assert thing["apiVersion"] == "jobset.x-k8s.io/v1alpha2"  # the types say nothing about it
    assert unknown_to_jobset(thing) == []


#: in the manifests' text: right, and wrong
MISSPELT = [
    ("job.yaml", "completionMode: Indexed", "completionsMode: Indexed"),
    ("job.yaml", "publishNotReadyAddresses: true", "publishNotReadyAdresses: true"),
    ("job.yaml", "publishNotReadyAddresses: true", 'publishNotReadyAddresses: "yes"'),
    ("job.yaml", "accessModes: [ReadWriteMany]", "accessMode: [ReadWriteMany]"),
    ("job.yaml", "terminationGracePeriodSeconds: 60", "terminationGracePeriod: 60"),
    ("job.yaml", "readinessProbe:", "readynessProbe:"),
    ("job.yaml", "preStop:", "prestop:"),
    ("job.yaml", "restartPolicy: OnFailure", "restartPolicy: [OnFailure]"),
    ("job.yaml", "backoffLimit: 24", "backoffLimit: many"),
    ("job.yaml", "fieldPath:", "path:"),
    ("job-launcher.yaml", "fieldPath: status.podIP", "field: status.podIP"),
    ("job-launcher.yaml", "claimName:", "claim:"),
    ("jobset.yaml", "podReplacementPolicy:", "podReplacement:"),
    ("jobset.yaml", "mountPath: /dev/shm", "path: /dev/shm"),
]


@pytest.mark.parametrize(("name", "right", "wrong"), MISSPELT)
def test_a_misspelt_field_is_refused(name: str, right: str, wrong: str) -> None:
    text = (FOLDER / name).read_text()
    assert right in text
    things = {each["kind"]: each for each in objects(text.replace(right, wrong))}
    built_in = [each for kind, each in things.items() if kind != "JobSet"]
    found = "".join(schema_errors(each, VERSIONS[-1]) for each in [*built_in, *as_jobs(things)])
    assert re.search(rf"{re.split(r'[: ]', wrong)[0]}|required|not of type|not valid", found), found


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("maxRestarts: 3", "maxRestart: 3"),
        ("subdomain: train-set\n", "domain: train-set\n"),
        ("onJobFailureReasons:", "onFailureReasons:"),
        ("operator:", "op:"),
        ("readinessProbe:", "readynessProbe:"),
    ],
)
def test_a_misspelt_field_of_a_jobset_is_refused(right: str, wrong: str) -> None:
    text = (FOLDER / "jobset.yaml").read_text()
    assert right in text
    (found,) = unknown_to_jobset(objects(text.replace(right, wrong))[-1])
    assert found.endswith(wrong.partition(":")[0])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("maxRestarts: 3", "maxRestarts: three"), ("enableDNSHostnames: true", "enableDNSHostnames: all")],
)
def test_a_wrong_type_in_a_jobset_is_refused(right: str, wrong: str) -> None:
    text = (FOLDER / "jobset.yaml").read_text()
    assert right in text
    with pytest.raises(ValueError, match=right.partition(":")[0]):
        unknown_to_jobset(objects(text.replace(right, wrong))[-1])


def test_a_key_that_is_there_twice_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="there twice"):
        objects("spec: {a: 1, a: 2}")


# --- what has to fit together -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MANIFESTS)
def test_all_fits_together(name: str) -> None:
    assert complaints(manifest(name)) == []


Change = Callable[[dict[str, dict[str, Any]], dict[str, Any], dict[str, Any]], Any]


def env(**values: str) -> Change:
    """Other values of variables of the container."""

    def change(_: Any, __: Any, container: dict[str, Any]) -> None:
        names = [each["name"] for each in container["env"]]
        for name, value in values.items():
            container["env"][names.index(name)] = {"name": name, "value": value}

    return change


def arguments(right: str, wrong: str) -> Change:
    """Another command."""

    def change(_: Any, __: Any, container: dict[str, Any]) -> None:
        assert any(right in word for word in container["args"])
        container["args"] = [word.replace(right, wrong) for word in container["args"]]

    return change


#: a manifest, what is changed in it (kinds, job, container), and what the complaint has to say
WRONG: list[tuple[str, Change, str]] = [
    ("job.yaml", lambda k, j, c: j["spec"].update(backoffLimitPerIndex=3), "backoffLimitPerIndex is refused"),
    ("jobset.yaml", lambda k, j, c: j["spec"].update(podFailurePolicy={"rules": []}), "podFailurePolicy is refused"),
    ("job.yaml", lambda k, j, c: pod_of(j).update(restartPolicy="Always"), "is Never or OnFailure"),
    ("job.yaml", lambda k, j, c: j["spec"].update(completionMode="NonIndexed"), "has no number"),
    ("job.yaml", lambda k, j, c: k["Service"]["metadata"].update(name="other"), "the Service is other"),
    ("job.yaml", lambda k, j, c: pod_of(j).pop("subdomain"), "subdomain of the pods is None"),
    ("job-launcher.yaml", lambda k, j, c: k["Service"]["spec"]["selector"].update(a="b"), "does not select"),
    ("job.yaml", lambda k, j, c: k["Service"]["spec"].update(publishNotReadyAddresses=False), "not published"),
    ("jobset.yaml", lambda k, j, c: k["JobSet"]["spec"]["network"].update(subdomain="x"), "index 0 is train-set-ranks"),
    ("jobset.yaml", lambda k, j, c: k["JobSet"]["metadata"].update(name="x"), "index 0 is x-ranks-0-0.train-set"),
    ("job.yaml", env(MASTER_ADDR="train-1.train"), "meet at train-1.train"),
    ("job.yaml", env(MASTER_PORT="29501"), "meet at port 29501"),
    ("job-launcher.yaml", env(RENDEZVOUS="train-nodes-0:29400"), "meet at train-nodes-0,"),
    ("job.yaml", lambda k, j, c: j["spec"].update(parallelism=3), "parallelism 3"),
    ("job.yaml", env(WORLD_SIZE="5"), "and 5 are waited for"),
    ("job-launcher.yaml", arguments("--nnodes=2", "--nnodes=3"), "and 3 are waited for"),
    ("job.yaml", env(RANK="0"), "RANK of the pods is"),
    ("jobset.yaml", env(INPROCESS_JOB=""), "is of this Job"),
    ("job-launcher.yaml", arguments("--node-rank=", "--local-rank="), "node rank is not the index"),
    ("job.yaml", lambda k, j, c: pod_of(j).update(terminationGracePeriodSeconds=30), "is killed after 30 s"),
    ("job-launcher.yaml", env(SHUTDOWN="20"), "the launcher kills after 20 s"),
    ("job-launcher.yaml", env(SHUTDOWN="50"), "and then the rank 50 s"),
    ("job.yaml", lambda k, j, c: pod_of(j)["volumes"].pop(), "volumes ['checkpoints', 'shm'], mounted"),
    ("job.yaml", lambda k, j, c: k["PersistentVolumeClaim"]["metadata"].update(name="x"), "and the claim is x"),
    (
        "job.yaml",
        lambda k, j, c: k["PersistentVolumeClaim"]["spec"].update(accessModes=["ReadWriteOnce"]),
        "cannot mount the claim",
    ),
    ("job.yaml", lambda k, j, c: pod_of(j)["volumes"][1].update(emptyDir={}), "/dev/shm is not in memory"),
    ("job.yaml", arguments("--checkpoint-dir=/checkpoints", "--checkpoint-dir=/tmp"), "/tmp is lost with its pod"),
    ("job-launcher.yaml", arguments("--checkpoint-dir=/checkpoints", ""), "no folder for its checkpoints"),
    ("job.yaml", env(INPROCESS_RUN_DIR="/run"), "/run is lost with its pod"),
    ("job.yaml", lambda k, j, c: c.update(command=["python"]), "replaces the entry point"),
    ("job.yaml", arguments("digits_ddp.py", "digits.py"), "no examples/digits.py in the repository"),
    ("job-launcher.yaml", arguments("/app/examples/digits_ddp.py", "/app/tests/tiers.py"), "image has no tests/tiers"),
    ("job-launcher.yaml", arguments("exec inprocess", "inprocess"), "no `exec` before the program"),
    ("job.yaml", lambda k, j, c: pod_of(j)["securityContext"].update(runAsUser=1001), "made for user 1000"),
    ("job.yaml", lambda k, j, c: c["securityContext"].update(allowPrivilegeEscalation=True), "the pod is refused"),
]


@pytest.mark.parametrize(("name", "change", "says"), WRONG, ids=[says for _, _, says in WRONG])
def test_what_does_not_fit_is_noticed(name: str, change: Change, says: str) -> None:
    kinds = copy.deepcopy(manifest(name))
    job = kinds["Job"] if "Job" in kinds else kinds["JobSet"]["spec"]["replicatedJobs"][0]["template"]
    change(kinds, job, container_of(job))
    found = complaints(kinds)
    assert any(says in each for each in found), found


def test_the_same_pods_in_a_jobset() -> None:
    """What the manifests say about one process per pod is the same in both, but for names."""
    ranks, of_set = the_job(manifest("job.yaml")), the_job(manifest("jobset.yaml"))
    of_set = yaml.safe_load(
        yaml.safe_dump(of_set).replace("train-set-ranks-0-0.train-set", "train-0.train").replace("train-set", "train")
    )
    pods = [dict(pod_of(job)) for job in (ranks, of_set)]
    assert pods[0].pop("subdomain") == "train"  # the other one's is that of the set
    assert pods[0] == pods[1]


# --- the image, hooks and probes --------------------------------------------------------------------------------------


def test_the_image_is_that_of_the_manifests() -> None:
    (named,) = re.findall(r"docker build .* -t (\S+) \.$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    assert {container_of(the_job(manifest(name)))["image"] for name in MANIFESTS} == {named}
    version = re.search(r'^version = "(.*)"$', (FOLDER.parents[1] / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None and named.endswith(f":{version[1]}")


def test_the_files_that_the_image_takes_are_there() -> None:
    for line in re.findall(r"^COPY (.*)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE):
        *sources, _ = line.split()
        assert [name for name in sources if not (FOLDER.parents[1] / name).exists()] == []


def test_the_entry_point_is_pinned_as_here() -> None:
    pins = (Path(__file__).parent / "constraints.txt").read_text().splitlines()
    (pin,) = re.findall(r"dumb-init==\S+", (FOLDER / "Dockerfile").read_text())
    assert entry_point()[0] == "dumb-init" and pin in pins


def lint(text: str) -> str:
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("no hadolint: nox -s kubernetes installs it")
    done = subprocess.run([program, "--no-color", "-"], input=text, check=False, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_the_linter_has_nothing_to_say() -> None:
    assert lint((FOLDER / "Dockerfile").read_text()) == ""


@pytest.mark.parametrize(
    ("right", "wrong", "rule"),
    [
        ("python:3.13-slim-bookworm", "python:latest", "DL3007"),
        ('ENTRYPOINT ["dumb-init", "--"]', "ENTRYPOINT dumb-init --", "DL3025"),
        ("USER 1000:1000", "USER root", "DL3002"),
        ("USER 1000:1000", "USR 1000:1000", "unexpected 'U'"),
    ],
)
def test_the_linter_has_something_to_say(right: str, wrong: str, rule: str) -> None:
    text = (FOLDER / "Dockerfile").read_text()
    assert right in text
    assert rule in lint(text.replace(right, wrong))


@pytest.mark.parametrize("name", MANIFESTS)
def test_who_is_ready(name: str, tmp_path: Path) -> None:
    """A live file that is renewed, of this rank or host: not that of another one, and not one of an earlier job."""
    what = started(the_job(manifest(name)), 2)
    live = tmp_path / "live"

    def ready() -> bool:
        variables = {**os.environ, **what.environment, "INPROCESS_RUN_DIR": str(tmp_path)}
        return subprocess.run(what.ready, env=variables, check=False, capture_output=True).returncode == 0

    here = os.uname().nodename
    assert not ready()
    live.mkdir()
    (live / "monitor-3-elsewhere-7.json").touch()
    assert not ready()
    own = live / f"monitor-2-{here}-7.json"
    own.touch()
    assert ready()
    long_ago = time.time() - 600
    os.utime(own, (long_ago, long_ago))
    assert not ready()
