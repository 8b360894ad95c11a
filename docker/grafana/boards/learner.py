"""One learner: its state, pace and loss as seen by the core, and its own metrics if Prometheus scrapes it."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from boards import parts
from boards.parts import BLUE, GREEN, RED, YELLOW, Panel, lines, states, steps, value

WHO = 'learner=~"$learner"'


def board() -> Dashboard:
    """Returns the dashboard of one learner."""
    choice = parts.choice("learner", "learner", parts.scoped("atoll_learner_info"), several=False)
    return parts.page(
        "atoll-learner",
        "Atoll: one learner",
        "One learner: its state, pace and loss as seen by the core, and its own metrics.",
        {"": _numbers(), "As seen by the core": _seen(), "As reported by the learner": _told()},
        [choice],
        [*parts.core_events(), parts.front_out(), parts.learner_silent(f", {WHO}")],
    )


def _numbers() -> list[Panel]:
    """Returns the panels with current values."""
    heard = f"max(atoll_learner_heard_timestamp_seconds{{{WHO}}})"
    here = f"max(atoll_learner_inner_steps_total{{{WHO}}})"
    return [
        value("State", "The learner's state, as seen by the core.", "none", parts.rank("learner", f", {WHO}"),
              steps(GREEN), mappings=parts.state_words()),
        value("Last heard", "Time of the learner's last message to the core.", "dateTimeFromNow", f"1000 * {heard}",
              steps(BLUE)),
        value("Lost in this time range", "The learner's lost time in seconds, summed over all causes.", "s",
              f"clamp_min(max(delta(atoll_learner_lost_seconds{{{WHO}}}[$__range])), 0)",
              steps(GREEN, (300, YELLOW), (1800, RED))),
        value("Lost in the run", "The learner's lost time in seconds since it first joined.", "s",
              f"max(atoll_learner_lost_seconds{{{WHO}}})", steps(GREEN, (600, YELLOW), (3600, RED))),
        value("Loss", "The learner's latest training loss.", "none", f"max(atoll_learner_loss{{{WHO}}})", steps(BLUE),
              decimals=3),
        value("Step time", "Smoothed duration of an inner step.", "s", f"max(atoll_learner_step_seconds{{{WHO}}})",
              steps(BLUE)),
        value("Inner steps", "Inner steps, summed over all incarnations of the learner.", "none", here, steps(BLUE)),
        value("Blocked in step()", "Share of the last 15 minutes spent in Learner.step().", "percentunit",
              f"max(rate(atoll_learner_blocked_seconds_total{{{WHO}}}[15m]))",
              steps(GREEN, (0.02, YELLOW), (0.1, RED)), decimals=2),
    ]  # fmt: skip


def _seen() -> list[Panel]:
    """Returns the panels with the core's metrics."""
    rate = "max by (learner) (rate(atoll_learner_{}_total{{" + WHO + "}}[$__rate_interval]))"
    lost = f"clamp_min(max by (learner) (deriv(atoll_learner_lost_seconds{{{WHO}}}[5m])), 0)"
    return [
        states("State", "The learner's state over time.", parts.rank("learner", f", {WHO}"), "{{learner}}",
               parts.state_words(), span=24, height=4),
        lines("Loss", "The learner's latest training loss vs. the median of live learners.", "none",
              {"{{learner}}": f"max by (learner) (atoll_learner_loss{{{WHO}}})", "median": "run:atoll_loss:median"},
              least=None),
        lines("Inner steps per second", "Inner steps that the learner takes per second.", "none",
              {"{{learner}}": rate.format("inner_steps")}),
        lines("Tokens per second", "Tokens that the learner trains on per second.", "none",
              {"{{learner}}": rate.format("tokens")}),
        lines("Lost time", "Share of the learner's time that is lost.", "percentunit",
              {"{{learner}}": lost}, most=1),
        lines("Blocked in step()", "Share of the learner's time inside Learner.step().", "percentunit",
              {"{{learner}}": rate.format("blocked_seconds")}),
        lines("Step time", "Smoothed duration of an inner step.", "s",
              {"{{learner}}": f"max by (learner) (atoll_learner_step_seconds{{{WHO}}})"}),
    ]  # fmt: skip


def _told() -> list[Panel]:
    """Returns the panels with the learner's own metrics, which are empty unless Prometheus scrapes them."""
    rate = "sum by (learner) (rate(atoll_local_{}_total{{" + WHO + "}}[$__rate_interval]))"
    spent = {word: rate.format(f"{word}_seconds") for word in ("stepping", "blocked", "paused")}
    fates = {word: "60 * " + rate.format(word) for word in ("merged", "refused")}
    wire = f"sum by (direction) (rate(atoll_local_payload_bytes_total{{{WHO}}}[$__rate_interval]))"
    front = f"sum by (direction) (rate(atoll_front_learner_bytes_total{{{WHO}}}[$__rate_interval]))"
    its = f"and on (instance) atoll_local_connected{{{WHO}}}"
    connected = parts.words({1: ("connected", GREEN), 0: ("not connected", RED)})
    return [
        states("Connection", "Whether the learner was connected to its front or core, over time.",
               f"max by (learner) (atoll_local_connected{{{WHO}}})", "{{learner}}", connected, span=24, height=4),
        lines("Where the learner's time goes", "Share of the learner's time in inner steps, in step(), and in pauses.",
              "percentunit", spent, stacked=True),
        lines("Contributions", "Merged and refused contributions per minute.", "none", fates, stacked=True),
        lines("In flight", "Contributions that are neither merged nor refused yet, and the number of reconnects.",
              "none", {"in flight": f"max(atoll_local_pending{{{WHO}}})",
                       "reconnects": f"max(atoll_local_reconnects_total{{{WHO}}})"}),
        lines("Payloads", "Payload bytes per second, as the learner and its front count them. whole: whole fragments.",
              "Bps", {"{{direction}}": wire, "front: {{direction}}": front}),
        lines("Memory", "Resident memory of the learner process.", "bytes",
              {"memory": f'process_resident_memory_bytes{{job="atoll-learner"}} {its}'}),
        lines("CPUs", "Number of CPUs in use by the learner.", "none",
              {"CPUs": f'rate(process_cpu_seconds_total{{job="atoll-learner"}}[$__rate_interval]) {its}'}),
    ]  # fmt: skip
