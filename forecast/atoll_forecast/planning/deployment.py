"""Writes a plan as deployment files: Helm values, and an override for docker/compose.yaml."""

from __future__ import annotations

from atoll_forecast.planning.job import Job
from atoll_forecast.planning.planner import Plan
from atoll_forecast.planning.shards import backup_memory

FRONT_BYTES = 1792 << 20  # memory of a front without its cache: the process, and 64 uploads in transit
LEARNER_BYTES = 8 << 30  # host memory of a learner apart from Atoll: torch, CUDA's libraries, and a data loader
TRAINED_BYTES = 16  # memory per parameter on a CPU: the parameter, its gradient, and AdamW's two moments
REGIONS = ("eu", "us", "ap")  # as in docker/compose.yaml


def helm_values(job: Job, plan: Plan) -> str:
    """Returns Helm values for every region: `helm install atoll k8s/atoll -f k8s/atoll/values-home.yaml -f FILE`.

    Regions without the core use values-remote.yaml.
    """
    memory, disk = gib(1.15 * plan.sharding.memory_bytes), gib(plan.sharding.disk_bytes)
    cache, backup = _cache_mib(job, plan), gib(backup_memory(job.parameters, plan.settings.fragments))
    front, learner = gib((cache << 20) + FRONT_BYTES), gib(1.15 * plan.learner_bytes + LEARNER_BYTES)
    gigabytes, price = plan.atoll.month_gb, plan.atoll.month_price
    return "\n".join(
        [
            f"# {job.parameters:.3g} parameters, {job.learners} learners, steps of {job.step_s:g} s: by `atoll plan`",
            "core:",
            *([f"  shards: {plan.sharding.shards}"] if plan.sharding.shards > 1 else []),
            "  settings:",
            f"    innerSteps: {plan.settings.inner_steps}",
            f"    fragments: {plan.settings.fragments}",
            f"    overlap: {plan.settings.overlap_steps:g}",
            f"    codec: {plan.settings.codec.name.lower()}",
            "    # totalTokens: target of the whole run; its last outer steps become plain means",
            f"  storage: {{size: {disk}Gi}}",
            "  backup:",
            f"    storage: {{size: {gib(plan.sharding.backup_bytes)}Gi}}",
            "    resources:",
            f"      requests: {{cpu: 100m, memory: {backup}Gi}}",
            f"      limits: {{memory: {backup}Gi}}",
            "  resources:",
            f'    requests: {{cpu: "{cpus(job, plan)}", memory: {memory}Gi}}',
            f"    limits: {{memory: {memory}Gi}}",
            "front:",
            f"  cacheMib: {cache}",
            "  resources:",
            f'    requests: {{cpu: "1", memory: {front}Gi}}',
            f"    limits: {{memory: {front}Gi}}",
            "learner:  # add the host resources that your training loop needs",
            "  resources:",
            f'    requests: {{cpu: "4", memory: {learner}Gi}}',
            f"    limits: {{memory: {learner}Gi}}",
            *([] if price is None else ["dashboard:", f"  pricePerGb: {price / gigabytes:.3g}"]),
            "",
        ]
    )


def compose_override(job: Job, plan: Plan) -> str:
    """Returns an override for learners without a GPU: `docker compose -f docker/compose.yaml -f FILE up`.

    All processes share one machine, so the run has one core.
    """
    settings, cache = plan.settings, _cache_mib(job, plan)
    core = {
        "INNER_STEPS": settings.inner_steps,
        "FRAGMENTS": settings.fragments,
        "OVERLAP": f"{settings.overlap_steps:g}",
        "CODEC": settings.codec.name.lower(),
    }
    said = ", ".join(f'ATOLL_CORE_{name}: "{value}"' for name, value in core.items())
    learner = plan.learner_bytes + TRAINED_BYTES * job.parameters + (1 << 30)
    lines = ["services:", "  core:", f"    environment: {{{said}}}", f"    mem_limit: {_mib(1.15 * plan.core_bytes)}m"]
    for region in REGIONS:
        lines += [
            f"  front-{region}:",
            f'    environment: {{ATOLL_FRONT_CACHE: "{cache}MiB"}}',
            f"    mem_limit: {_mib((cache << 20) + FRONT_BYTES)}m",
            f"  learner-{region}:",
            f"    mem_limit: {_mib(1.15 * learner)}m",
        ]
    return "\n".join([*lines, ""])


def _cache_mib(job: Job, plan: Plan) -> int:
    """Returns a front's cache size in MiB: the updates of all fragments, and one whole fragment."""
    return max(48, round((0.4 + 4 / plan.settings.fragments) * job.parameters / 2**20))


def cpus(job: Job, plan: Plan) -> int:
    """Returns the number of CPUs that each core needs for its syncs, plus one spare CPU.

    The CPU seconds per sync of the model are from docs/benchmarks/sync-cost.md.
    """
    each_s = (3.9e-9 + 1.7e-9 * job.learners) * job.parameters * plan.sharding.share
    return 1 + max(1, -int(-each_s // (plan.settings.inner_steps * job.step_s)))


def gib(size: float) -> int:
    return max(1, -int(-size // 2**30))


def _mib(size: float) -> int:
    return -int(-size // 2**20)
