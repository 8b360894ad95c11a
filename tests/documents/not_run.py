"""The fences and commands that the pages' tests do not run, and why.

Every other bash and python fence of README.md and docs/ runs. Fences and commands that are named here are still parsed:
test_fences.py checks their options, files, services and imports. `python -m tests.documents.not_run` prints the list.
"""

from __future__ import annotations

DOCKER = "needs Docker; runs if DOCKER_HOST names an engine"
DOCKER_ALONE = "needs Docker and a run that is deployed with it"
CLUSTER = "needs a Kubernetes cluster"
ROOT = "needs root and systemd"
PROMETHEUS = "needs two machines; tests/observing/test_remote_write.py starts both servers"
MACHINES = "needs Docker and a second machine"

# The first word of a command -> why this command is not run on any page.
COMMANDS = {
    "docker": DOCKER_ALONE,
    "kubectl": CLUSTER,
    "helm": CLUSTER,
    "sudo": ROOT,
    "journalctl": ROOT,
    "grpcurl": "needs grpcurl, which is not among the tests' packages",
}

# A page -> a line of a fence -> why this whole fence is not run.
FENCES = {
    "docs/benchmarks/paper.md": {
        'make bench-wan ARGS="--alone 0.5 --json out.json --plot out.svg"': "needs root, and takes hours",
    },
    "docs/guides/plan.md": {
        "docker compose -f docker/compose.yaml -f plan-compose.yaml up --build": "needs Docker and runs until Ctrl-C",
    },
    "docs/guides/trainers.md": {
        "from transformers import Trainer": "needs transformers; make test-integrations runs the callback",
        "import lightning": "needs lightning; make test-integrations runs the callback",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)": (
            "needs accelerate; make test-integrations runs the helper"
        ),
        "model = peft.get_peft_model(base, peft.LoraConfig(r=8))": "needs peft; make test-integrations runs LoRA",
    },
    "docs/guides/training-loops.md": {
        "    --server 127.0.0.1:7070 --name eu-west": "needs four CPUs; test_examples.py runs it on two ranks",
        "masters = lambda: zip(optimizer.model_params, optimizer.master_params)": "needs an optimizer with masters",
    },
    "docs/operate/backups.md": {
        "until docker compose exec -T backup ls /var/lib/backups/core | grep Z; do sleep 5; done": DOCKER,
        "kubectl delete statefulset atoll-core --namespace atoll --cascade=orphan": CLUSTER,
    },
    "docs/operate/deploy.md": {
        "docker compose up --build --detach --wait": DOCKER,
        "for part in core front learner dashboard; do": DOCKER,
        "docker network create eu": MACHINES,
        "docker buildx build --sbom=true --provenance=mode=max --push --file docker/Dockerfile --target core \\": (
            "needs a registry"
        ),
        "docker logs --tail 50 core                                  # on the core's machine": MACHINES,
        "docker compose --file docker/compose.yaml --profile gpu up --detach   # one more learner, on this "
        "machine's GPU": "needs Docker and a GPU",
        "learner = atoll.Learner(": "a part of a script for an image of yours",
        "helm rollback atoll --namespace atoll": "needs Docker and a cluster, and a newer version",
    },
    "docs/operate/kubernetes.md": {
        "for part in core front learner dashboard; do": "needs Docker and a registry",
        "kubectl port-forward --namespace atoll service/atoll-core 7070 &": CLUSTER,
    },
    "docs/operate/monitoring.md": {
        "prometheus --config.file=docker/prometheus/prometheus.yaml \\": PROMETHEUS,
        "prometheus --agent --config.file=docker/prometheus/region.yaml": PROMETHEUS,
    },
    "docs/operate/runbooks.md": {
        "atoll evict eu-west --gone": "needs a learner whose process has ended; test_runbook_actions.py runs it",
        "atoll checkpoint verify run": "needs a run that failed; backups.md runs these commands",
        "atoll doctor --server front.eu.example.com:7071 --tls certs/learner-eu-west --name eu-west": (
            "needs a region with certificates; deploy.md runs such a region"
        ),
        "atoll doctor --server front.eu.example.com:7071 --tls certs/learner-eu-west": (
            "needs a region with certificates; deploy.md runs such a region"
        ),
        "atoll doctor --server core.example.com:7070 --tls certs/front-eu": (
            "needs a region with certificates; deploy.md runs such a region"
        ),
        "atoll certs show certs/learner-eu-west": "needs a region with certificates; security.md runs this command",
        "atoll certs show certs/front-eu": "needs a region with certificates; security.md runs this command",
        "atoll certs show certs/core-home": "needs a region with certificates; security.md runs this command",
    },
    "docs/operate/security.md": {
        "docker compose run --rm certs --renew                 # the Compose demo: renews all of them": (
            "needs a cluster and Docker"
        ),
        "docker compose run --rm certs --revoke NUMBER               # the Compose demo": "needs Docker",
    },
    "docs/reference/python.md": {
        "from atoll.doctor import LearnerToCheck, check_connection, of_model, print_findings": (
            "needs a model and an optimizer of yours"
        ),
    },
}


def reason(page: str, text: str) -> str:
    """Why a whole fence is not run; empty if it runs."""
    named = FENCES.get(page, {})
    return next((named[line] for line in text.splitlines() if line in named), "")


def split(script: str) -> tuple[str, list[tuple[str, str]]]:
    """Returns the part of a script that runs, and its other commands with their reasons."""
    kept, left = list[str](), list[tuple[str, str]]()
    for command in script.replace("\\\n", "\\\0").splitlines(keepends=True):
        word = command.split(maxsplit=1)[0] if command.strip() else ""
        if word in COMMANDS:
            left.append((command.replace("\0", "\n"), COMMANDS[word]))
        else:
            kept.append(command.replace("\0", "\n"))
    return "".join(kept), left


if __name__ == "__main__":
    from tests.documents.fences import all_fences

    for fence in all_fences("bash", "python"):
        if fence.reason:
            print(f"{fence}: {fence.reason}")
        for command, why in fence.commands_left:
            print(f"{fence}: `{command.strip()}`: {why}")
