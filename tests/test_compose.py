"""The Docker Compose deployment, without a Docker engine: what it names exists, and fits what a cluster of ours is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from fdg.runtime.flame_cluster import CONFIG

FOLDER = Path(__file__).parent.parent / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
CLUSTER = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
SERVERS = ("flame-session-manager", "flame-object-cache", "flame-executor-manager")


def keys(tree: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    if not isinstance(tree, dict):
        return {path}
    return {found for name, value in tree.items() for found in keys(value, (*path, name))}


def default(text: str) -> str:
    """A text with Compose's variables at their defaults."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)


def test_images_are_those_of_the_tested_version() -> None:
    images = {name: default(service["image"]) for name, service in SERVICES.items()}
    for name in ("flame-session-manager", "flame-object-cache", "flame-console"):
        assert images[name] == f"xflops/{name}:v0.6.0"
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    assert "ARG FLAME_TAG=v0.6.0" in lines and "FROM xflops/flame-executor-manager:${FLAME_TAG}" in lines
    assert images["fdg"] == images["flame-executor-manager"], (
        "driver and workers have the same Python, at the same place"
    )
    assert SERVICES["flame-executor-manager"]["deploy"]["replicas"] == 3


def test_the_cluster_is_told_the_same_things_as_one_of_ours() -> None:
    ours = yaml.safe_load(CONFIG.format(port=1, cache_port=2, executors=3, sessions="/s", storage="/c", memory="1G"))
    assert keys(CLUSTER) == keys(ours)
    assert CLUSTER["cluster"]["policies"] == ours["cluster"]["policies"] and CLUSTER["cluster"]["executors"] == {
        "shim": "host"
    }
    assert "cpu=0" not in CLUSTER["cluster"]["resreq"], "workers of other programs are not free"


def test_hosts_and_ports_fit_each_other() -> None:
    sessions, cache = CLUSTER["cluster"]["endpoint"], CLUSTER["cache"]["endpoint"]
    assert urlsplit(sessions).hostname in SERVICES and urlsplit(cache).hostname in SERVICES
    (context,) = yaml.safe_load((FOLDER / "flame.yaml").read_text())["contexts"]
    seen = SERVICES["fdg"]["environment"]
    assert seen["FLAME_ENDPOINT"] == context["cluster"]["endpoint"] == sessions
    assert seen["FLAME_CACHE_ENDPOINT"] == context["cache"]["endpoint"] == cache
    assert abs(urlsplit(sessions).port - urlsplit(cache).port) > 1, "the session manager takes the next port as well"


def test_nothing_is_open_to_others() -> None:
    assert not [name for name, service in SERVICES.items() if "ports" in service or "network_mode" in service]
    assert all(service["networks"] == ["flame"] for service in SERVICES.values())


def test_what_the_files_name_exists() -> None:
    for config in COMPOSE["configs"].values():
        assert (FOLDER / config["file"]).is_file()
    for name in SERVERS:
        assert SERVICES[name]["command"][1] == SERVICES[name]["configs"][0]["target"]
        assert SERVICES[name]["configs"][0]["source"] == "cluster"
    build = SERVICES["flame-executor-manager"]["build"]
    root = (FOLDER / build["context"]).resolve()
    assert (root / build["dockerfile"]).is_file() and (root / "constraints.txt").is_file()
    stored = CLUSTER["cluster"]["storage"].removeprefix("fs://")
    assert stored.startswith(SERVICES["flame-session-manager"]["tmpfs"][0])
    assert SERVICES["flame-object-cache"]["volumes"] == [f"cache:{CLUSTER['cache']['storage']}"]
    python = re.search(r"FDG_FLAME_PYTHON=(\S+)", (FOLDER / "Dockerfile").read_text())
    assert python and Path(python[1]).parent == Path(SERVICES["fdg"]["entrypoint"][0]).parent
