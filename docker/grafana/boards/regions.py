"""Regions and the WAN: who moves how much, what it costs, and what fronts save."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from boards import parts
from boards.parts import GREEN, RED, YELLOW, Panel, bars, lines, states, steps, value

HERE = 'region=~"$region"'


def board() -> Dashboard:
    """The dashboard."""
    region = parts.choice("region", "label_values(atoll_wan_bytes_total, region)", "region", several=True)
    return parts.page(
        "atoll-regions",
        "Atoll: regions and WAN",
        "What crosses the WAN between learners and the core, what it costs, and how fronts do.",
        {"": _numbers(), "The core's side": _core(), "Fronts": _fronts()},
        [parts.price(), region],
        [parts.core_started()],
    )


def _numbers() -> list[Panel]:
    """Of now."""
    return [
        value("WAN now", "Payload bytes a second, both ways, of the chosen regions.", "Bps",
              f"sum(region:atoll_wan_bytes:rate_5m{{{HERE}}})", steps(GREEN)),
        value("WAN, a month like the last day", "Payload bytes of all regions in thirty such days.", "decbytes",
              "run:atoll_wan_bytes:month_1d", steps(GREEN)),
        value("... and its cost", "At the price above; red beyond 1000 USD.", "currencyUSD",
              "run:atoll_wan_bytes:month_1d / 1e9 * $price", steps(GREEN, (300, YELLOW), (1000, RED)), decimals=2),
        value("Of the WAN's budget", "A month like the last day, as a share of --wan-budget-gb.", "percentunit",
              "run:atoll_wan_bytes:month_1d / max without (instance, pod) (atoll_wan_budget_bytes)",
              steps(GREEN, (0.8, YELLOW), (1, RED)), none="no budget", decimals=0),
        value("Compression, up", "How many times smaller than float32 contributions are on the wire.", "none",
              'atoll_compression_ratio{direction="up"}', steps(RED, (1, YELLOW), (4, GREEN)), decimals=1),
        value("Compression, down", "How many times smaller than float32 published updates are on the wire.", "none",
              'atoll_compression_ratio{direction="down"}', steps(RED, (1, YELLOW), (4, GREEN)), decimals=1),
        value("Fronts with a core", "Share of the fronts that reach the core.", "percentunit",
              "avg(atoll_front_core_up)", steps(RED, (0.01, YELLOW), (1, GREEN)), none="no fronts", decimals=0),
        value("Saved by fronts", "Share of the bytes to learners that did not have to cross the WAN.", "percentunit",
              '1 - sum(rate(atoll_front_wan_bytes_total{direction="down"}[15m]))'
              ' / sum(rate(atoll_front_learner_bytes_total{direction="down"}[15m]))',
              steps(YELLOW, (0.01, GREEN)), none="no fronts", decimals=0),
    ]  # fmt: skip


def _core() -> list[Panel]:
    """As the core counts it."""
    rate = 'sum by (region) (region:atoll_wan_bytes:rate_5m{{direction="{}", ' + HERE + "}})"
    codec = f"sum by (codec, direction) (rate(atoll_payload_bytes_total{{{HERE}}}[$__rate_interval]))"
    cost = f"sum by (region) (increase(atoll_wan_bytes_total{{{HERE}}}[$__range])) / 1e9 * $price"
    there = f"sum by (region, state) (atoll_learner_info{{{HERE}}})"
    return [
        lines("Up", "Contributions and first parameters, bytes a second from each region.", "Bps",
              {"{{region}}": rate.format("up")}),
        lines("Down", "Published updates and whole fragments, bytes a second to each region.", "Bps",
              {"{{region}}": rate.format("down")}),
        bars("Cost in this time range", "What each region's bytes cost at the price above.", "currencyUSD",
             {"{{region}}": cost}),
        lines("By codec", "Payload bytes a second by codec; float32 are whole fragments.", "Bps",
              {"{{codec}} {{direction}}": codec}, stacked=True),
        lines("Compression", "Bytes as float32 beside bytes on the wire, whole fragments left out.", "none",
              {"{{direction}}": "atoll_compression_ratio"}),
        lines("Learners by region", "How many learners of each region are in which state.", "none",
              {"{{region}} {{state}}": there}, stacked=True),
    ]  # fmt: skip


def _fronts() -> list[Panel]:
    """As fronts count it."""
    up = parts.words({1: ("reaches it", GREEN), 0: ("does not", RED)})
    wan = f"sum by (region, direction, kind) (rate(atoll_front_wan_bytes_total{{{HERE}}}[$__rate_interval]))"
    learners = "sum by (instance, direction) (rate(atoll_front_learner_bytes_total[$__rate_interval]))"
    return [
        states("Fronts that reach the core", "When each front had the core, and when not.",
               "max by (instance) (atoll_front_core_up)", "{{instance}}", up, span=24, height=6),
        lines("Between fronts and core", "Payload bytes a second over the WAN, by kind.", "Bps",
              {"{{region}} {{direction}} {{kind}}": wan}),
        lines("Between fronts and learners", "Payload bytes a second within regions; more than over the WAN is saved.",
              "Bps", {"{{instance}} {{direction}}": learners}),
        lines("Refused calls", "Calls a second that ended at a front, by status.", "none",
              {"{{status}}": "sum by (status) (rate(atoll_front_refused_total[$__rate_interval]))"}),
        lines("Kept in memory", "Updates and whole fragments that each front keeps for its learners.", "bytes",
              {"{{instance}}": "max by (instance) (atoll_front_cached_bytes)"}),
        lines("Memory", "Resident memory of each front's process.", "bytes",
              {"{{instance}}": 'process_resident_memory_bytes{job="front"}'}),
        lines("Processors", "Processors that each front keeps busy.", "none",
              {"{{instance}}": 'rate(process_cpu_seconds_total{job="front"}[$__rate_interval])'}),
    ]  # fmt: skip
