"""Deployment files: that each parses, agrees with the code, and keeps what the daemon relies on."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from milepostd.ops.config import FLAGS, load_settings
from milepostd.ops.faults import ACTIONS, POINTS
from milepostd.ops.http import make_app
from milepostd.ops.logs import FIELDS
from milepostd.ops.metrics import SPECS

REPOSITORY = Path(__file__).parents[3]
DEPLOY = REPOSITORY / "deploy"
OPERATIONS = (REPOSITORY / "docs/operations.md").read_text()
UNIT = DEPLOY / "systemd/milepostd@.service"
DRAIN_S = load_settings({"embedded": True}, {}, None).drain_s
KUBERNETES_VERSION = "1.29"
"""The first where a native sidecar is on by default."""


def test_the_readme_names_every_file_and_every_file_it_names_is_there() -> None:
    readme = (DEPLOY / "README.md").read_text()
    files = {
        str(path.relative_to(DEPLOY))
        for path in DEPLOY.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    table = set(re.findall(r"^\| `([a-z]+/[^`]+)` \|", readme, re.MULTILINE))
    assert table == files


# --- systemd


@pytest.fixture(scope="module")
def unit() -> dict[str, list[tuple[str, str]]]:
    """Sections of the unit file; a key may stand several times."""
    sections: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in UNIT.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), [])
            continue
        key, equals, value = line.partition("=")
        assert equals, line
        assert key.isidentifier(), line
        current.append((key, value))
    return sections


def test_the_unit_parses_and_has_its_three_sections(
    unit: dict[str, list[tuple[str, str]]],
) -> None:
    assert list(unit) == ["Unit", "Service", "Install"]
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    assert set(parser["Service"]) == {key for key, _ in unit["Service"]}


def test_the_unit_is_notified_watched_unprivileged_and_leaves_time_to_drain(
    unit: dict[str, list[tuple[str, str]]],
) -> None:
    service = dict(unit["Service"])
    assert service["Type"] == "notify"
    assert 0 < int(service["WatchdogSec"]) <= 120
    assert int(service["TimeoutStopSec"]) > DRAIN_S
    assert service["User"] not in ("", "root", "0")
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    environment_files = [value for key, value in unit["Service"] if key == "EnvironmentFile"]
    assert environment_files
    assert all(value.startswith("-") for value in environment_files), "they are optional"
    for hides_the_arenas in ("PrivateIPC", "PrivateDevices", "TemporaryFileSystem"):
        assert hides_the_arenas not in service


def test_the_unit_may_write_the_roots_of_the_config_file_and_starts_what_there_is(
    unit: dict[str, list[tuple[str, str]]],
) -> None:
    service = dict(unit["Service"])
    config = tomllib.loads((DEPLOY / "config/milepostd.toml").read_text())
    assert set(config["roots"]) <= set(service["ReadWritePaths"].split())
    program, *arguments = service["ExecStart"].split()
    assert program.endswith("/milepostd")
    flags = [argument for argument in arguments if argument.startswith("--")]
    assert set(flags) <= {*FLAGS.values(), "--config"}
    run_dir = arguments[arguments.index("--run-dir") + 1]
    assert run_dir == f"/run/{service['RuntimeDirectory']}"


# --- Kubernetes


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    text = (DEPLOY / "kubernetes/training.yaml").read_text()
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def pod(manifests: dict[str, Any]) -> Any:
    return manifests["Job"]["spec"]["template"]["spec"]


def test_every_manifest_follows_kubernetes_own_schema(manifests: dict[str, Any]) -> None:
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_the_daemon_is_a_native_sidecar_that_shares_memory_and_run_directory(pod: Any) -> None:
    (sidecar,), (trainer,) = pod["initContainers"], pod["containers"]
    assert sidecar["restartPolicy"] == "Always"
    mounts = [
        {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        for container in (sidecar, trainer)
    ]
    for path in ("/dev/shm", "/run/milepost", "/checkpoints"):
        assert mounts[0][path] == mounts[1][path]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(volumes) == {name for mount in mounts for name in mount.values()}
    shm = volumes[mounts[0]["/dev/shm"]]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert shm["sizeLimit"]


def test_the_pod_shares_processes_and_user_and_leaves_time_to_drain(pod: Any) -> None:
    assert pod["shareProcessNamespace"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    for container in (*pod["initContainers"], *pod["containers"]):
        assert "runAsUser" not in container["securityContext"]
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S


def test_the_sidecar_s_environment_is_a_valid_set_of_settings(pod: Any) -> None:
    (sidecar,), (trainer,) = pod["initContainers"], pod["containers"]
    environment = {
        entry["name"]: entry.get("value", "0123456789abcdef").replace("$(POD_IP)", "10.1.2.3")
        for entry in sidecar["env"]
    }
    settings = load_settings({}, environment, None)
    ports = {port["name"]: port["containerPort"] for port in sidecar["ports"]}
    assert settings.http_address == f"0.0.0.0:{ports['http']}"
    assert settings.advertise == f"tcp://10.1.2.3:{ports['peer']}"
    assert {entry["name"]: entry["value"] for entry in trainer["env"]}["MILEPOST_RUN_DIR"] == str(
        settings.run_dir
    )


def test_the_probes_ask_for_paths_that_need_no_token(pod: Any) -> None:
    (sidecar,) = pod["initContainers"]
    paths = {
        sidecar[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    app = make_app(dict, lambda: True, lambda: b"", "")
    assert paths == {"/healthz", "/readyz"} & {route.path for route in app.routes}  # type: ignore[attr-defined]


# --- Slurm


def test_the_batch_script_is_a_shell_script_that_starts_what_there_is() -> None:
    path = DEPLOY / "slurm/train.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    started = re.search(r"exec (milepostd .*?)' ", text.replace("\\\n", " "))
    assert started is not None
    assert set(re.findall(r"--[a-z-]+", started[1])) <= set(FLAGS.values())
    assert text.startswith("#!/usr/bin/env bash\n")
    directives = re.findall(r"^#SBATCH (--[a-z-]+)", text, re.MULTILINE)
    assert {"--nodes", "--signal", "--ntasks-per-node"} <= set(directives)
    notice_s = int(re.search(r"--signal=B:TERM@(\d+)", text)[1])  # type: ignore[index]
    assert notice_s > DRAIN_S


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """An environment with stand-ins for Slurm; $TRAINERS is what the trainers do."""
    tools = tmp_path / "bin"
    tools.mkdir()
    stand_ins = {
        "srun": """
            case "$*" in
              *torchrun*) until [ -e "$LOG.up" ]; do sleep 0.01; done; eval "$TRAINERS";;
              *) trap 'echo daemons-drained >> "$LOG"; exit 0' TERM; touch "$LOG.up"
                 while kill -0 $PPID; do sleep 0.01; done;;
            esac
        """,
        "scontrol": "echo node-1; echo node-2",
    }
    for name, body in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "USER": "someone",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "LOG": str(tmp_path / "log"),
    }


BATCH = ["bash", str(DEPLOY / "slurm/train.sbatch")]


def test_the_batch_script_drains_the_daemons_and_ends_as_the_trainers_did(
    job: dict[str, str],
) -> None:
    job["TRAINERS"] = "exit 3"
    found = subprocess.run(BATCH, check=False, timeout=30, env=job)
    assert found.returncode == 3
    assert Path(job["LOG"]).read_text().split() == ["daemons-drained"]


def test_the_batch_script_passes_a_notice_on_to_the_trainers_first(job: dict[str, str]) -> None:
    job["TRAINERS"] = (
        "trap 'echo trainers-saved >> \"$LOG\"; exit 0' TERM\n"
        "kill -TERM $PPID; while kill -0 $PPID; do sleep 0.01; done"
    )
    # The trainers' parent is the batch script, which is thus told as Slurm would tell it.
    found = subprocess.run(BATCH, check=False, timeout=30, env=job)
    assert found.returncode == 0
    assert Path(job["LOG"]).read_text().split() == ["trainers-saved", "daemons-drained"]


# --- Prometheus


def test_the_alerts_use_metrics_and_label_values_that_exist() -> None:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    names = {spec.name for spec in SPECS} | {
        f"{spec.name}_bucket" for spec in SPECS if spec.kind == "histogram"
    }
    values = {label: set(known) for spec in SPECS for label, known in spec.labels.items()}
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(re.findall(r"milepostd_[a-z_]+", rule["expr"])) <= names, rule["alert"]
        for label, text in re.findall(r'(\w+)=~?"([^"]+)"', rule["expr"]):
            if label != "job":
                assert set(text.split("|")) <= values[label], rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


# --- the page for operators


def test_operations_names_every_log_field_fault_point_and_action() -> None:
    for field in FIELDS:
        assert re.search(rf"^\| `{field}` \|", OPERATIONS, re.MULTILINE), field
    for name in (*POINTS, *ACTIONS):
        assert re.search(rf"`{name}(:S|:FILE)?`", OPERATIONS), name
