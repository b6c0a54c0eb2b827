# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The objects of `titan-ft kubernetes`, against the schemas of Kubernetes and of JobSet, and the
commands that they start.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import tomli
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_failure_policy_rule import (
    JobsetV1alpha2FailurePolicyRule,
)
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from titan_ft.cli.command_line import parse
from titan_ft.cluster.kubernetes import render
from titan_ft.config import ConfigError, FaultTolerance
from titan_ft.launch.lighthouse import split_bind
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE, NO_RESTART_CODE
from titan_ft.live.metrics import split_address
from titan_ft.options import Lighthouse

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "kubernetes"
# The first release in which all that is used here is stable or on by default, and the newest that
# is known here.
VERSIONS = ("1.31", "1.37")

GIVEN = (
    "kubernetes",
    "llama3_8b",
    "--image=registry.example.com/titan-ft:1",
    "--replicas=8",
    "--ranks-per-node=8",
)


def documents(*options: str) -> dict[str, dict[str, Any]]:
    """Return the printed objects, by kind."""
    printed = render(parse([*GIVEN, *options]), ["--training.steps=7", "--job.description=$(x)"])
    found = list(yaml.safe_load_all(printed))
    assert len(found) == len({each["kind"] for each in found})
    return {each["kind"]: each for each in found}


@pytest.fixture
def job_set() -> dict[str, Any]:
    return documents()["JobSet"]


def child_job(job_set: dict[str, Any]) -> dict[str, Any]:
    (groups,) = job_set["spec"]["replicatedJobs"]
    return dict(groups["template"]["spec"])


def pod(job_set: dict[str, Any]) -> dict[str, Any]:
    return dict(child_job(job_set)["template"]["spec"])


def arguments(command: list[str]) -> dict[str, str]:
    """Return the options of a command by name."""
    return {name: value for name, value in pairwise(command) if name.startswith("--") and value}


def differences(given: Any, read: Any, path: str = "") -> Iterator[str]:
    """Yield the differences between the input of a model and the model: it leaves out a field that
    it does not know. Defaults may be added.
    """
    if isinstance(given, dict) and isinstance(read, dict):
        for name in given:
            yield from differences(given.get(name), read.get(name), f"{path}.{name}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for index, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif given != read:
        yield f"{path}: {given!r} is read as {read!r}"


def test_the_job_set_is_what_its_schema_says(job_set: dict[str, Any]) -> None:
    """The models that Kubeflow generates from JobSet's schema check it, down to the pod. Every
    field is known and has its type, and no required field is missing.
    """
    model = JobsetV1alpha2JobSet.from_dict(job_set)
    assert model is not None
    assert list(differences(job_set, model.to_dict())) == []


def test_a_field_that_the_schema_does_not_know_is_found(job_set: dict[str, Any]) -> None:
    """The check above can fail: for a field at the top, in the child Job, in a container, and for a
    wrong type.
    """
    pod(job_set)["containers"][0]["comand"] = ["x"]
    child = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    child["retries"] = 3
    job_set["spec"]["restartPolicy"] = "Never"
    model = JobsetV1alpha2JobSet.from_dict(job_set)
    assert model is not None
    assert {
        line.partition(":")[0].rpartition(".")[2] for line in differences(job_set, model.to_dict())
    } == {
        "comand",
        "retries",
        "restartPolicy",
    }
    child["backoffLimit"] = "many"
    with pytest.raises(ValueError, match="backoffLimit"):
        JobsetV1alpha2JobSet.from_dict(job_set)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_else_is_what_kubernetes_schemas_say(version: str, job_set: dict[str, Any]) -> None:
    """Strictly: Kubernetes knows every field. A child Job is checked as a Job."""
    objects = [each for kind, each in documents().items() if kind != "JobSet"]
    (groups,) = job_set["spec"]["replicatedJobs"]
    template = groups["template"]
    objects.append(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "titan-ft-groups-0"},
            **template,
        }
    )
    assert {each["kind"] for each in objects} >= {
        "Deployment",
        "Service",
        "PersistentVolumeClaim",
        "Job",
    }
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)
    objects[-1]["spec"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    with pytest.raises(kubernetes_validate.ValidationError, match="comand"):
        kubernetes_validate.validate(objects[-1], version, strict=True)


def test_a_group_is_brought_back_by_its_own_job(job_set: dict[str, Any]) -> None:
    """JobSet's own restart would restart all groups, so no object may use it. An end that no
    restart mends ends the job, and evictions do not count.
    """
    (groups,) = job_set["spec"]["replicatedJobs"]
    policy = job_set["spec"]["failurePolicy"]
    assert policy == {"maxRestarts": 0}
    # A newer way.
    assert "RestartJob," in str(JobsetV1alpha2FailurePolicyRule.model_fields["action"].description)
    job = child_job(job_set)
    assert groups["replicas"] > 1
    assert job["completionMode"] == "Indexed"
    assert job["backoffLimit"] >= 100
    # Kubernetes takes no other value beside a podFailurePolicy, and that only where pods are never
    # restarted.
    assert job["podReplacementPolicy"] == "Failed"
    assert pod(job_set)["restartPolicy"] == "Never"
    final, evicted = job["podFailurePolicy"]["rules"]
    assert final["action"] == "FailJob"
    assert final["onExitCodes"]["values"] == [CONFIG_ERROR_CODE, NO_RESTART_CODE]
    assert final["onExitCodes"]["containerName"] == pod(job_set)["containers"][0]["name"]
    assert evicted == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }


def test_a_pod_has_the_time_to_leave_in_order(job_set: dict[str, Any]) -> None:
    """The grace period is longer than the drain timeout of the config, for which the agent
    waits.
    """
    table = tomli.loads(documents()["ConfigMap"]["data"]["config.toml"])["fault_tolerance"]
    drain = table.get("drain_timeout_seconds", FaultTolerance.drain_timeout_seconds)
    assert pod(job_set)["terminationGracePeriodSeconds"] >= drain + 15


def test_the_numbers_are_those_that_were_given() -> None:
    """Groups, hosts and GPUs. Without a request for GPUs, the pods have none."""
    job_set = documents(
        "--nodes=2", "--replicas=5", "--ranks-per-group=16", "--gpu-resource=amd.com/gpu"
    )["JobSet"]
    job, container = child_job(job_set), pod(job_set)["containers"][0]
    options = arguments(container["command"])
    assert job_set["spec"]["replicatedJobs"][0]["replicas"] == int(options["--replicas"]) == 5
    assert job["completions"] == job["parallelism"] == int(options["--nodes"]) == 2
    assert (
        container["resources"]["limits"]
        == {"amd.com/gpu": int(options["--ranks-per-node"])}
        == {"amd.com/gpu": 8}
    )
    assert "resources" not in pod(documents("--gpu-resource=")["JobSet"])["containers"][0]


def test_the_config_is_the_file(tmp_path: Path) -> None:
    """The pod has each byte of the config, and nothing else of this host. The lighthouse gets the
    lighthouse's settings.
    """
    config = tmp_path / "mine.toml"
    config.write_text(
        "  # one\n\n[fault_tolerance]\n\theartbeat_timeout_ms = 900 # \"two\": 'three'\n"
    )
    printed = render(parse([GIVEN[0], str(config), *GIVEN[2:]]), [])
    found = {each["kind"]: each for each in yaml.safe_load_all(printed)}
    assert found["ConfigMap"]["data"]["config.toml"] == config.read_text()
    server = found["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert server["command"][-2:] == ["--heartbeat-timeout-ms", "900"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--name=Mine", "--name must be of lower-case letters"),
        ("--replicas=0", "--replicas must be >= 1, got 0"),
        ("--nodes=0", "--nodes must be >= 1, got 0"),
    ],
)
def test_mistakes_are_refused(option: str, message: str) -> None:
    """Each mistake is one line, before anything is printed."""
    with pytest.raises(ConfigError, match=message):
        documents(option)


def test_the_command_takes_what_a_pod_gives_it(tmp_path: Path) -> None:
    """The exact command of a pod of group 3 of 8 with two hosts, after Kubernetes has replaced
    $(NAME).
    """
    found = documents("--nodes=2")
    container = pod(found["JobSet"])["containers"][0]
    known = {"GROUP": "3"}
    assert set(known) | {"TITAN_FT_TOKEN_FILE", "HOME"} == {
        each["name"] for each in container["env"]
    }
    command = [
        re.sub(r"(?<!\$)\$\((\w+)\)", lambda name: known[name[1]], word)
        for word in container["command"]
    ]
    assert command[:4] == ["tini", "--", "titan-ft", "group"]
    (tmp_path / "config.toml").write_text(found["ConfigMap"]["data"]["config.toml"])
    assert command[4] == "/etc/titan_ft/config.toml"
    end = command.index("--", 4)
    words = ["group", str(tmp_path / "config.toml"), *command[5:end], "--dry-run", *command[end:]]
    dry_run = subprocess.run(
        [sys.executable, "-m", "titan_ft", *words],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "TITAN_FT_TOKEN": "a secret of this run"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert dry_run.returncode == 0, dry_run.stderr
    words = shlex.split(dry_run.stdout)
    assert {"--hosts=2", "--ranks=8", "--rendezvous=titan-ft-groups-3-0.titan-ft:29400"} <= set(
        words
    )
    assert {"--fault_tolerance.replica_id=3", "--fault_tolerance.group_size=8"} <= set(words)
    assert "TITAN_FT_METRICS_PORT=[::]:9464" in words
    assert words[-2:] == ["--training.steps=7", "--job.description=$$(x)"]  # $$( is $( to a pod


def test_pods_find_each_other_and_the_lighthouse(job_set: dict[str, Any]) -> None:
    """Names, ports, labels, Secret and volume agree between the documents."""
    found = documents()
    container, service, deployment = (
        pod(job_set)["containers"][0],
        found["Service"],
        found["Deployment"],
    )
    (port,) = service["spec"]["ports"]
    options = arguments(container["command"])
    assert options["--lighthouse"] == f"http://{service['metadata']['name']}:{port['port']}"
    selector = service["spec"]["selector"].items()
    lighthouse = deployment["spec"]["template"]
    assert selector <= lighthouse["metadata"]["labels"].items()
    assert not selector <= child_job(job_set)["template"]["metadata"]["labels"].items()
    (server,) = lighthouse["spec"]["containers"]
    assert split_bind(arguments(server["command"])["--bind"]) == (
        "::",
        server["ports"][0]["containerPort"],
    )
    assert split_bind(Lighthouse().bind)[1] == port["port"]
    assert port["targetPort"] == server["ports"][0]["name"]
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]["type"]) == (
        1,
        "Recreate",
    )
    allowed = found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items()
    for template in (lighthouse, child_job(job_set)["template"]):
        assert allowed <= template["metadata"]["labels"].items()
    # Where a JobSet puts the first pod of a child Job: JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN, the
    # JobSet's name.
    (groups,), job = job_set["spec"]["replicatedJobs"], job_set["metadata"]["name"]
    assert options["--rendezvous"].startswith(f"{job}-{groups['name']}-$(GROUP)-0.{job}:")
    assert job_set["spec"]["network"]["enableDNSHostnames"]
    _, metrics = split_address(options["--metrics-port"])
    annotations = child_job(job_set)["template"]["metadata"]["annotations"]
    assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": str(metrics)}
    volumes, mounts = (
        pod(job_set)["volumes"],
        {each["name"]: each["mountPath"] for each in container["volumeMounts"]},
    )
    assert mounts.keys() == {each["name"] for each in volumes}
    sources = {each["name"]: each for each in volumes}
    assert (
        sources["run"]["persistentVolumeClaim"]["claimName"]
        == found["PersistentVolumeClaim"]["metadata"]["name"]
    )
    assert sources["config"]["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    assert container["command"][4].startswith(f"{mounts['config']}/")
    assert options["--run-dir"].startswith(f"{mounts['run']}/")
    environment = {each["name"]: each.get("value", "") for each in container["env"]}
    secret = sources["token"]["secret"]
    (item,) = secret["items"]
    made = "kubectl create secret generic titan-ft-token --from-literal=token="
    assert made in (FOLDER / "README.md").read_text()
    assert (secret["secretName"], item["key"]) == ("titan-ft-token", "token")
    assert environment["TITAN_FT_TOKEN_FILE"] == f"{mounts['token']}/{item['path']}"
    assert {container["image"], server["image"]} == {"registry.example.com/titan-ft:1"}


def test_pods_have_no_right_that_they_need_not() -> None:
    """They meet Pod Security's level "restricted", with a root file system that is read-only."""
    found = documents()
    for spec in (found["Deployment"]["spec"]["template"]["spec"], pod(found["JobSet"])):
        assert spec["automountServiceAccountToken"] is False
        assert not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
        rights = spec["securityContext"]
        assert rights["runAsNonRoot"] is True
        assert rights["runAsUser"] > 0
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_the_token_is_a_file_that_one_user_reads(job_set: dict[str, Any]) -> None:
    """A user who may describe a pod sees its variables, but not its files."""
    container = pod(job_set)["containers"][0]
    assert not any("secretKeyRef" in str(each) for each in container["env"])
    secret = next(each["secret"] for each in pod(job_set)["volumes"] if each["name"] == "token")
    assert secret["defaultMode"] == 0o400
    assert (
        next(each for each in container["volumeMounts"] if each["name"] == "token")["readOnly"]
        is True
    )


def test_other_pods_reach_nothing_but_figures_and_those_prometheus_alone() -> None:
    """Each allowed way into a pod names its users."""
    policy = documents()["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    own, figures = policy["ingress"]
    assert own == {"from": [{"podSelector": policy["podSelector"]}]}
    assert figures["ports"] == [{"port": 9464}]
    (prometheus,) = figures["from"]
    assert prometheus["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}


def test_the_image_comes_from_one_index_a_package() -> None:
    """With an extra index, either index could serve any name, and the higher version would win."""
    text = (FOLDER / "Dockerfile").read_text()
    assert "--extra-index-url" not in text
    assert "--no-deps" in text.partition('--index-url "$TORCH_INDEX"')[0].rpartition("RUN")[2]


def test_two_jobs_fit_in_one_namespace() -> None:
    """The jobs share no object and no selector."""
    one, other = documents("--name=one"), documents("--name=other")
    assert all(one[kind]["metadata"]["name"] != other[kind]["metadata"]["name"] for kind in one)
    labels = other["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert not one["Service"]["spec"]["selector"].items() <= labels
    assert not one["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels


def test_the_image_has_what_the_pods_start() -> None:
    """The base image and torch's index are arguments. The image contains each file that it copies
    and each program that the manifests run.
    """
    text = (FOLDER / "Dockerfile").read_text()
    instructions = [
        line.split(maxsplit=1)
        for line in text.replace("\\\n", " ").splitlines()
        if line[:1].isupper()
    ]
    assert instructions[:2] == [["ARG", "BASE=python:3.11-slim-bookworm"], ["FROM", "${BASE}"]]
    assert ["ARG", 'TORCH_INDEX=""'] in instructions
    for name, rest in instructions:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
    assert ["WORKDIR", "/opt/titan_ft"] in instructions
    # Where the pods' command finds titan-ft.
    assert 'ENV PATH="/opt/titan_ft/.venv/bin:$PATH"' in text
    assert "tini" in text
    (uid,) = re.findall(r"^USER (\d+)$", text, re.M)
    for each in (documents()["Deployment"]["spec"]["template"]["spec"], pod(documents()["JobSet"])):
        assert each["securityContext"]["runAsUser"] == int(uid)
    left_out = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert {".git", ".venv", "outputs", "kubernetes"} <= set(left_out)
    assert not {"scripts", "configs", "titan_ft"} & set(left_out)
