"""The image, the pod and the unit fit each other, the package and kvtier's own limits."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.config import KvtierConfig, NvmeTierConfig, parse_config
from tests.docs.pages import DOCS, ROOT, prose_of

CONTAINERFILE = (ROOT / "Containerfile").read_text()
SERVE = ROOT / "configs/serve.sh"
MANIFESTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((ROOT / "configs/kubernetes/vllm-kvtier.yaml").read_text())
)
UNIT = configparser.ConfigParser(strict=False, interpolation=None)
UNIT.optionxform = str  # type: ignore[method-assign,assignment] # keys keep their case
UNIT.read_string((ROOT / "configs/systemd/vllm-kvtier.service").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
INSTRUCTIONS = {
    "ARG", "FROM", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT",
}  # fmt: skip
UNITS = {"Gi": 1 << 30, "G": 10**9}


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (each for each in MANIFESTS if each["kind"] == kind)
    return found


POD: dict[str, Any] = of_kind("StatefulSet")["spec"]["template"]["spec"]
(ENGINE,) = POD["containers"]


def nbytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]+)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile, with their arguments."""
    text = re.sub(r"\\\n", " ", CONTAINERFILE)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def shutdown_timeout_s() -> int:
    (seconds,) = re.findall(r"--shutdown-timeout (\d+)", SERVE.read_text())
    return int(seconds)


@pytest.fixture
def config() -> KvtierConfig:
    return parse_config(of_kind("ConfigMap")["data"]["kvtier.yaml"], source="the ConfigMap")


class TestImage:
    def test_the_image_copies_existing_files(self) -> None:
        found = instructions()
        assert {word for word, _ in found} <= INSTRUCTIONS
        for word, rest in found:
            if word == "COPY":
                *sources, _ = [each for each in rest.split() if not each.startswith("--")]
                assert all((ROOT / source).exists() for source in sources), rest

    def test_the_image_installs_existing_extras_and_neither_vllm_nor_torch(self) -> None:
        (extras,) = re.findall(r'"/src\[([\w,]+)\]"', CONTAINERFILE)
        known = PROJECT["project"]["optional-dependencies"]
        chosen = extras.split(",")
        assert set(chosen) <= set(known)
        needs = [need for extra in chosen for need in known[extra]]
        assert not [need for need in needs if need.startswith(("kvtier[", "torch", "vllm"))]

    def test_the_pod_runs_as_the_user_of_the_image(self) -> None:
        (user,) = (rest for word, rest in instructions() if word == "USER")
        assert POD["securityContext"]["runAsUser"] == int(user)
        (owner,) = POD["initContainers"]
        assert f"-o {user} " in owner["args"][0]


class TestPod:
    def test_its_configuration_fits_its_memory_and_its_volume(
        self, config: KvtierConfig
    ) -> None:
        nvme = config.tiers[1]
        assert isinstance(nvme, NvmeTierConfig)
        limits, requests = ENGINE["resources"]["limits"], ENGINE["resources"]["requests"]
        assert nbytes(limits["memory"]) > 1.25 * config.ram.capacity_bytes
        assert limits["memory"] == requests["memory"]
        mounts = {each["name"]: each["mountPath"] for each in ENGINE["volumeMounts"]}
        assert nvme.path.is_relative_to(mounts["store"])
        (claim,) = of_kind("StatefulSet")["spec"]["volumeClaimTemplates"]
        asked = claim["spec"]["resources"]["requests"]["storage"]
        volume = of_kind("PersistentVolume")["spec"]
        assert nbytes(asked) > 1.02 * nvme.capacity_bytes
        assert volume["capacity"]["storage"] == asked
        assert volume["storageClassName"] == claim["spec"]["storageClassName"]
        (variable,) = ENGINE["env"]
        assert variable["value"] == f"{mounts['config']}/kvtier.yaml"

    def test_the_init_container_makes_the_directory_of_the_store(
        self, config: KvtierConfig
    ) -> None:
        (owner,) = POD["initContainers"]
        assert owner["args"][0].endswith(str(config.tiers[1].path))  # type: ignore[attr-defined]

    def test_each_time_to_stop_is_longer_than_the_one_within_it(
        self, config: KvtierConfig
    ) -> None:
        stop_s = shutdown_timeout_s()
        assert config.transfer.close_timeout_s < stop_s < POD["terminationGracePeriodSeconds"]

    def test_its_probes_ask_the_port_that_is_open_and_a_slow_start_is_allowed(self) -> None:
        (port,) = ENGINE["ports"]
        probes = [ENGINE[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
        assert {probe["httpGet"]["port"] for probe in probes} == {port["name"]}
        startup = probes[0]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
        assert ("EXPOSE", str(port["containerPort"])) in instructions()

    def test_names_that_refer_to_each_other_agree(self) -> None:
        spec = of_kind("StatefulSet")["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        names = {each["name"] for each in POD["volumes"]}
        names |= {each["metadata"]["name"] for each in spec["volumeClaimTemplates"]}
        assert {each["name"] for each in ENGINE["volumeMounts"]} <= names
        (volume,) = POD["volumes"]
        assert volume["configMap"]["name"] == of_kind("ConfigMap")["metadata"]["name"]


class TestUnit:
    def test_a_unit_stops_later_than_its_engine(self) -> None:
        service = UNIT["Service"]
        assert int(service["TimeoutStopSec"]) > shutdown_timeout_s()
        assert int(service["TimeoutStartSec"]) >= 600
        assert (service["KillMode"], service["StateDirectoryMode"]) == ("mixed", "0700")

    def test_the_store_is_the_directory_that_it_creates(self) -> None:
        directory = f"/var/lib/{UNIT['Service']['StateDirectory']}"
        assert UNIT["Unit"]["RequiresMountsFor"] == directory
        example = (ROOT / "configs/ram_nvme.yaml").read_text()
        assert f"path: {directory}\n" in example
        assert nbytes(UNIT["Service"]["MemoryMax"]) > 80 * 10**9


class TestScript:
    def run(self, tmp_path: Path, *arguments: str, check: int = 0) -> list[str]:
        """Run the script with a vLLM that prints its arguments, one per line."""
        refusal = f"exit {check}" if check else ""
        fakes = {
            "vllm": 'for each; do echo "$each"; done',
            "kvtier": f'echo "--kv-transfer-config \'{{\\"a b\\": 1}}\'"; {refusal}',
        }
        for name, body in fakes.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.defpath}", "KVTIER_CONFIG": "some.yaml"}
        done = subprocess.run(
            [SERVE, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == check, done.stderr
        return done.stdout.splitlines()

    def test_the_script_gives_vllm_its_arguments_and_those_of_kvtier(
        self, tmp_path: Path
    ) -> None:
        said = self.run(tmp_path, "a model", "--port", "1")
        assert said[:4] == ["serve", "a model", "--port", "1"]
        assert said[-2:] == ["--kv-transfer-config", '{"a b": 1}']

    def test_the_script_does_not_start_vllm_if_kvtier_refuses(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, "model", check=2) == []


def test_the_page_on_deployment_names_every_one_of_these_files() -> None:
    page = prose_of(DOCS / "howto/deploy.md")
    for file in ("Containerfile", "configs/serve.sh", "configs/kubernetes/vllm-kvtier.yaml"):
        assert f"`{file}`" in page
    assert "`configs/systemd/vllm-kvtier.service`" in page
