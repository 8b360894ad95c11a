"""The overview: the state of the run, learners in trouble, their lost time, and the cost of the WAN."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from boards import parts
from boards.parts import BLUE, GREEN, RED, YELLOW, Column, Panel, lines, rows, states, steps, value

LEARNER = "/d/atoll-learner?${__all_variables}&var-learner=${__value.text}&${__url_time_range}"
FIRING = 'ALERTS{alertname=~"Atoll.*", alertname!="AtollWatchdog", alertstate="firing"}'


def board() -> Dashboard:
    """Returns the overview dashboard."""
    return parts.page(
        "atoll-overview",
        "Atoll: overview",
        "The state of the run, learners in trouble, their lost time, and the cost of the WAN.",
        {"": [*_at_a_glance(), _learners(), _alerts(), *_why(), *_over_time()]},
        [parts.price()],
        [*parts.core_events(), parts.front_out(), parts.learner_silent()],
    )


def _at_a_glance() -> list[Panel]:
    """Returns the panels with current values, coloured by thresholds."""
    return [
        value("Core",
              "State of the core, or of its worst shard. Learners keep training while it is down.", "none",
              "0 * (min(core:atoll_core_state:max) < 2) or 1 + max(atoll_paused) or vector(0)", steps(RED, (1, GREEN)),
              mappings=parts.words({0: ("down", RED), 1: ("up", GREEN), 2: ("paused", BLUE)})),
        value("Live learners", "Learners that take inner steps.", "none",
              'sum(atoll_learners{state="live"})', steps(RED, (1, GREEN))),
        value("Silent learners", "Learners that take no steps but did not leave, or that are cut off with their front.",
              "none",
              'sum(atoll_learners{state=~"silent|cut_off"})', steps(GREEN, (1, RED))),
        parts.fronts_in_trouble(),
        value("Goodput, 15 minutes", "Useful share of the provisioned learner-seconds in the last 15 minutes.",
              "percentunit", "run:atoll_goodput:ratio_15m", steps(RED, (0.8, YELLOW), (0.9, GREEN)), decimals=1),
        value("Goodput of the run", "Useful share of the provisioned learner-seconds since the run began.",
              "percentunit", "max(atoll_goodput_ratio)", steps(RED, (0.8, YELLOW), (0.9, GREEN)), decimals=1),
        value("WAN cost per month",
              "Cost of 30 days at the last day's rate and the price above. Red: above 1000 USD.",
              "currencyUSD", "run:atoll_wan_bytes:month_1d / 1e9 * $price",
              steps(GREEN, (300, YELLOW), (1000, RED)), decimals=2),
        value("WAN budget used", "Bytes in 30 days at the last day's rate, as a share of --wan-budget-gb.",
              "percentunit",
              "run:atoll_wan_bytes:month_1d / max without (instance, pod) (atoll_wan_budget_bytes)",
              steps(GREEN, (0.8, YELLOW), (1, RED)), none="no budget", decimals=0),
    ]  # fmt: skip


def _learners() -> Panel:
    """Returns the table of learners, with state, last message, lost time, loss and step time."""
    heard = "max by (learner) (atoll_learner_heard_timestamp_seconds)"
    lost = "atoll_learner_lost_seconds"
    columns = [
        Column("state", parts.rank("learner, region"), colored=True, mappings=parts.state_words()),
        Column("last heard", f"1000 * {heard}", "dateTimeAsIso"),
        Column("age of last message", f"time() - {heard}", "s"),
        Column("lost in this time range", f"clamp_min(max by (learner) (delta({lost}[$__range])), 0)", "s"),
        Column("lost in the run", f"max by (learner) ({lost})", "s"),
        Column("loss", "max by (learner) (atoll_learner_loss)", "none", decimals=3),
        Column("step time", "max by (learner) (atoll_learner_step_seconds)", "s"),
    ]
    text = "Learners in trouble first, with their lost learner-seconds. Click a name to open the learner's dashboard."
    return rows("Learners, trouble first", text, "learner", ["learner", "region"], columns,
                links=LEARNER, by=["state", "lost in this time range"], span=16, height=9)  # fmt: skip


def _alerts() -> Panel:
    """Returns the table of firing alerts."""
    text = "Alerts that are firing. The runbook_url of an alert opens the alert's runbook on the Atoll dashboard."
    labels = ["alertname", "severity", "region", "learner", "instance"]
    fires = Column("firing", f"count by ({', '.join(labels)}) ({FIRING})")
    return rows("Alerts", text, "alertname", labels, [fires], span=8, height=9)


def _why() -> list[Panel]:
    """Returns the panels with lost time by cause, and with the time of rounds."""
    lost = {"{{cause}}": "clamp_min(sum by (cause) (deriv(atoll_lost_seconds[5m])), 0)"}
    stages = {
        "quorum": "atoll_quorum_wait_seconds",
        "grace window": "atoll_grace_wait_seconds",
        "merge": "atoll_merge_seconds",
        "publish": "atoll_publish_seconds",
        "adopt": "atoll_adopt_seconds",
    }
    worst = {
        stage: f"max(histogram_quantile(1, sum by (le, instance) (rate({name}_bucket[$__rate_interval]))))"
        for stage, name in stages.items()
    }
    closed = {"{{cause}}": "60 * sum by (cause) (rate(atoll_rounds_closed_total[$__rate_interval]))"}
    return [
        lines("Lost learner time, by cause", "Learner-seconds lost per second. After 10 s of silence, a learner's "
              "time counts as down.", "none", lost, stacked=True),
        lines("Slowest stages of rounds", "Longest time of each stage, of the slowest learner and shard, rounded up "
              "to a histogram bucket.", "s", worst),
        lines("Why rounds close", "Rounds per minute, by cause. all_silent: every learner fell silent. "
              "late: late work was merged without a round.", "none", closed, stacked=True),
    ]  # fmt: skip


def _over_time() -> list[Panel]:
    """Returns the charts of the same values over time."""
    tokens = {
        word: f"sum(rate(atoll_tokens_{word}_total[$__rate_interval]))" for word in ("trained", "merged")
    }  # merged tokens follow trained tokens, unless work is lost
    lost = "clamp_min(max by (learner) (deriv(atoll_learner_lost_seconds[5m])), 0)"
    return [
        states("Learner states", "State of each learner over time.",
               parts.rank("learner"), "{{learner}}", parts.state_words()),
        lines("Goodput", "Useful share of the provisioned learner-seconds, over 15 minutes and over the whole run.",
              "percentunit", {"15 minutes": "run:atoll_goodput:ratio_15m", "the run": "max(atoll_goodput_ratio)"},
              span=12, most=1, limits=steps(RED, (0.8, GREEN))),
        lines("Loss", "The latest training loss of each learner, and the median of live learners.", "none",
              {"{{learner}}": "max by (learner) (atoll_learner_loss)", "median": "run:atoll_loss:median"}, least=None),
        lines("Tokens per second", "Trained tokens and merged tokens per second.", "none", tokens),
        lines("WAN", "Payload bytes per second between learners and the core.", "Bps",
              {"{{region}} {{direction}}": "sum by (region, direction) (region:atoll_wan_bytes:rate_5m)"},
              stacked=True),
        lines("Data units", "Units of all epochs, for runs that lease units. Consumed: half of the "
              "parameters' fragments or more merged.", "none",
              {"{{dataset}} {{state}}": "max by (dataset, state) (atoll_data_units)",
               "{{dataset}} repeated": "max by (dataset) (atoll_data_repeated_units)"}),
        lines("Lost time of the worst learners", "Share of its time that a learner loses, of the five worst.",
              "percentunit", {"{{learner}}": f"topk(5, {lost})"}, most=1),
        lines("Step time of the slowest learners", "Smoothed duration of an inner step, of the five slowest.", "s",
              {"{{learner}}": "topk(5, max by (learner) (atoll_learner_step_seconds))"}),
    ]  # fmt: skip
