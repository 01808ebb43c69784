"""The files in ``deploy/``: what they start is there, with flags that it takes."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlora_sgl.cli.commands import COMMANDS
from vlora_sgl.launch_cluster import parse
from vlora_sgl.server_args import split_argv

DEPLOY = Path(__file__).parents[1] / "deploy"
MANIFESTS = {path.name: [*yaml.safe_load_all(path.read_text())] for path in (DEPLOY / "kubernetes").glob("*.yaml")}
KEYS = {"$(API_KEY)", "$(ADMIN_API_KEY)"}


def pods() -> list[Any]:
    """Name and pod of everything that runs."""
    found = []
    for file, things in MANIFESTS.items():
        for thing in things:
            if "template" in thing.get("spec", {}):
                name = f"{file}:{thing['metadata']['name']}"
                found.append(pytest.param(thing["spec"]["template"]["spec"], thing, id=name))
    return found


@pytest.mark.parametrize(("pod", "thing"), pods())
def test_a_pod_serves_with_flags_that_there_are(pod: Any, thing: Any) -> None:
    (container,) = pod["containers"]
    command, model, *flags = container["args"]
    assert command in {one.name for one in COMMANDS} and not model.startswith("-")
    given = {env["name"]: env["valueFrom"]["secretKeyRef"] for env in container["env"]}
    assert {part for flag in flags for part in re.findall(r"\$\(\w+\)", flag)} == KEYS
    secret = MANIFESTS["server.yaml"][0]
    for ref in given.values():
        assert ref["name"] == secret["metadata"]["name"] and ref["key"] in secret["stringData"]
    assert pod["terminationGracePeriodSeconds"] > split_argv([])[0].drain_seconds
    if any(flag.startswith("--replicas") for flag in flags):
        args = parse(["--model-path", model, *flags])
        (servers,) = (one["spec"] for one in MANIFESTS["router.yaml"] if one["kind"] == "StatefulSet")
        replicas, service = servers["replicas"], servers["serviceName"]
        assert args.replicas == 0
        assert args.join == [f"http://vlora-replica-{n}.{service}:30000" for n in range(replicas)]
    else:
        from vlora_sgl import _sgl

        _, rest = split_argv(["--model-path", model, *flags])
        parser = argparse.ArgumentParser()
        _sgl.ServerArgs.add_cli_args(parser)
        args = parser.parse_args(rest)
        assert args.enable_metrics and args.enable_lora and args.host == "0.0.0.0"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container.get(probe, {}).get("httpGet", {}).get("path", "/health") == "/health"
    labels = thing["spec"]["template"]["metadata"]["labels"]
    assert thing["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_every_service_finds_its_pods() -> None:
    things = [thing for file in MANIFESTS.values() for thing in file]
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in things if "template" in one.get("spec", {})]
    for service in (one for one in things if one["kind"] == "Service"):
        assert any(service["spec"]["selector"].items() <= one.items() for one in labels), service["metadata"]["name"]


def test_the_container_copies_what_there_is_and_starts_the_command() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((DEPLOY.parent / part).exists() for part in line.split())
    assert json.loads(re.search(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)[1]) == ["vlora"]
    assert json.loads(re.search(r"^CMD (.+)$", text, re.MULTILINE)[1])[0] == "serve"


def test_prometheus_gives_a_scrape_the_time_that_it_may_take() -> None:
    from vlora_sgl.entrypoints.metrics import PATIENCE_S

    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert int(config["global"]["scrape_timeout"].removesuffix("s")) > PATIENCE_S
    assert config["scrape_configs"][0]["static_configs"][0]["targets"]


RAY = [
    ("serve.yaml", yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text())),
    *(
        ("kuberay.yaml", yaml.safe_load(one["spec"]["serveConfigV2"]))
        for one in yaml.safe_load_all((DEPLOY / "ray" / "kuberay.yaml").read_text())
        if one["kind"] == "RayService"
    ),
]


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in RAY])
def test_a_fleet_s_flags_are_those_that_there_are(config: Any) -> None:
    from vlora_sgl import _sgl

    (app,) = config["applications"]
    assert config["proxy_location"] == "Disabled" and app["route_prefix"] is None
    args = parse(["--ray", *app["args"]["flags"].split()])
    parser = argparse.ArgumentParser()
    _sgl.ServerArgs.add_cli_args(parser)
    server = parser.parse_args(split_argv(args.server)[1])
    assert server.enable_metrics and server.enable_lora and args.host == "0.0.0.0"
    assert {server.api_key, server.admin_api_key} == {"$API_KEY", "$ADMIN_API_KEY"}
    module, _, name = app["import_path"].partition(":")
    assert f"def {name}(" in (DEPLOY.parent / (module.replace(".", "/") + ".py")).read_text()


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in RAY])
def test_ray_takes_a_fleet_s_configuration(config: Any) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed: pip install 'vlora-sgl[cluster]'")
    (app,) = schema.ServeDeploySchema.model_validate(config).applications
    assert app.args == config["applications"][0]["args"]


def test_a_fleet_on_kubernetes_is_served_by_its_hosts() -> None:
    fleet, service = yaml.safe_load_all((DEPLOY / "ray" / "kuberay.yaml").read_text())
    (workers,) = fleet["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    args = parse(["--ray", *RAY[1][1]["applications"][0]["args"]["flags"].split()])
    assert args.port == container["ports"][0]["containerPort"]
    gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert args.max_replicas * args.replica_gpus == gpus
    given = {
        env["name"]
        for env in fleet["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert given == {"API_KEY", "ADMIN_API_KEY"}
