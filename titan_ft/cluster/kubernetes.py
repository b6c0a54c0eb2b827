# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the objects that run a job on Kubernetes: `titan-ft kubernetes`.

The objects are YAML from the templates in `manifests`. Nothing here talks to a cluster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from titan_ft.cluster.group import (
    check_at_least,
    check_worker_flags,
    find_drain_seconds,
    find_ranks_per_node,
    find_toml,
)
from titan_ft.config import TABLE, ConfigError, load_toml
from titan_ft.launch.lighthouse import changed_settings, split_bind
from titan_ft.launch.shared_settings import lighthouse_settings, table_overrides
from titan_ft.options import Kubernetes, Lighthouse

MANIFESTS = Path(__file__).parent / "manifests"
DOCUMENTS = ("config.yaml", "volume.yaml", "lighthouse.yaml", "jobset.yaml")
"""Templates of the objects, in the order of the output."""
# Folders in the containers.
VOLUME = "/run/titan_ft"
CONFIG_FOLDER = "/etc/titan_ft"
TOKEN_FOLDER = "/etc/titan_ft_token"
METRICS_PORT = 9464
RENDEZVOUS_PORT = 29400
_TITAN_FT = ("tini", "--", "titan-ft")
"""Beginning of each command: tini is the container's first process, and passes signals on."""
_END_SECONDS = 20.0
"""Time for the end of the agent and of the container, after the workers have left.

Kubernetes kills the container after the drain timeout and this time.
"""


def render(options: Kubernetes, flags: Sequence[str]) -> str:
    """Return the objects as YAML.

    Args:
        options: options of `titan-ft kubernetes`.
        flags: torchtitan's flags for the workers.

    Raises:
        ConfigError: an option is wrong.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    check_at_least("--replicas", options.replicas, 1)
    check_at_least("--nodes", options.nodes, 1)
    check_worker_flags(flags)
    ranks = find_ranks_per_node(options.ranks_per_node, options.ranks_per_replica, options.nodes)
    if ranks is None:
        raise ConfigError(
            "--ranks-per-node must be given, got nothing; give as many as a pod has GPUs, for "
            "example 8"
        )
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?", options.name):
        rule = "lower-case letters, digits and -, at most 32, from a letter on"
        raise ConfigError(f"--name must be of {rule}, got {options.name!r}; correct it")
    config = find_toml(options.config)
    table = {**load_toml(config).get(TABLE, {}), **table_overrides(flags)}
    drain_seconds = find_drain_seconds(table)
    environment = Environment(
        loader=FileSystemLoader(MANIFESTS),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=False,
    )
    values = {
        "name": options.name,
        "image": options.image,
        "config": config.read_text(encoding="utf-8"),
        "config_folder": CONFIG_FOLDER,
        "volume": VOLUME,
        "token_folder": TOKEN_FOLDER,
        "token_file": f"{TOKEN_FOLDER}/token",
        "replicas": options.replicas,
        "nodes": options.nodes,
        "ranks_per_node": ranks,
        "storage": options.storage,
        "storage_class": options.storage_class,
        "gpu_resource": options.gpu_resource,
        "drain_seconds": f"{drain_seconds:g}",
        "grace_seconds": math.ceil(drain_seconds + _END_SECONDS),
        "lighthouse_command": [
            *_TITAN_FT,
            "lighthouse",
            "--bind",
            Lighthouse.bind,
            *changed_settings(lighthouse_settings(table)),
        ],
        "group_command": _group_command(options, ranks, flags),
    }
    documents = [environment.get_template(name).render(values) + "\n" for name in DOCUMENTS]
    return "---\n".join(documents).rstrip()


def _group_command(options: Kubernetes, ranks_per_node: int, flags: Sequence[str]) -> list[str]:
    """Return the command of a group's pods; Kubernetes replaces $(GROUP) by the group's slot."""
    name = options.name
    _, port = split_bind(Lighthouse.bind)
    command = [*_TITAN_FT, "group", f"{CONFIG_FOLDER}/config.toml"]
    command += ["--run-dir", f"{VOLUME}/{name}"]
    command += ["--replica", "$(GROUP)"]
    command += ["--replicas", str(options.replicas)]
    command += ["--lighthouse", f"http://{name}-lighthouse:{port}"]
    command += ["--ranks-per-node", str(ranks_per_node)]
    command += ["--nodes", str(options.nodes)]
    # Name of the group's first pod: JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN. The subdomain is the
    # name of the JobSet.
    first_pod = f"{name}-groups-$(GROUP)-0.{name}"
    command += ["--rendezvous", f"{first_pod}:{RENDEZVOUS_PORT}"]
    command += ["--metrics-port", f"[::]:{METRICS_PORT}"]
    if flags:
        # Escaped: Kubernetes would replace $(NAME) in a flag of the user.
        command += ["--", *(flag.replace("$(", "$$(") for flag in flags)]
    return command
