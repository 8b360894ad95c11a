"""Regions and the WAN: traffic per region, its cost, and the traffic that fronts save."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from boards import parts
from boards.parts import GREEN, RED, YELLOW, Panel, bars, lines, states, steps, value

HERE = 'region=~"$region"'


def board() -> Dashboard:
    """Returns the dashboard of regions and the WAN."""
    region = parts.choice("region", "region", parts.scoped("atoll_wan_bytes_total"), several=True)
    return parts.page(
        "atoll-regions",
        "Atoll: regions and WAN",
        "WAN traffic between learners and the core, its cost, and the state of links and fronts.",
        {"": _numbers(), "Links": _links(), "As seen by the core": _core(), "Fronts": _fronts()},
        [parts.price(), region],
        [*parts.core_events(), parts.front_out()],
    )


def _numbers() -> list[Panel]:
    """Returns the panels with current values."""
    return [
        value("WAN now", "Payload bytes per second of the selected regions, both ways.", "Bps",
              f"sum(region:atoll_wan_bytes:rate_5m{{{HERE}}})", steps(GREEN)),
        value("WAN bytes per month", "Payload bytes of all regions in 30 days at the last day's rate.", "decbytes",
              "run:atoll_wan_bytes:month_1d", steps(GREEN)),
        value("WAN cost per month",
              "Cost of 30 days at the last day's rate and the price above. Red: above 1000 USD.", "currencyUSD",
              "run:atoll_wan_bytes:month_1d / 1e9 * $price", steps(GREEN, (300, YELLOW), (1000, RED)), decimals=2),
        value("WAN budget used", "Bytes in 30 days at the last day's rate, as a share of --wan-budget-gb.",
              "percentunit",
              "run:atoll_wan_bytes:month_1d / max without (instance, pod) (atoll_wan_budget_bytes)",
              steps(GREEN, (0.8, YELLOW), (1, RED)), none="no budget", decimals=0),
        value("Compression, up", "Size of contributions as float32, divided by their size on the wire.", "none",
              'atoll_compression_ratio{direction="up"}', steps(RED, (1, YELLOW), (4, GREEN)), decimals=1),
        value("Compression, down", "Size of published updates as float32, divided by their size on the wire.", "none",
              'atoll_compression_ratio{direction="down"}', steps(RED, (1, YELLOW), (4, GREEN)), decimals=1),
        parts.fronts_in_trouble(),
        value("Saved by fronts", "Share of the bytes to learners that did not cross the WAN, of the worst front.",
              "percentunit",
              'min(1 - sum by (instance) (rate(atoll_front_wan_bytes_total{direction="down"}[15m]))'
              ' / sum by (instance) (rate(atoll_front_learner_bytes_total{direction="down"}[15m])))',
              steps(YELLOW, (0.01, GREEN)), none="no fronts", decimals=0),
    ]  # fmt: skip


def _links() -> list[Panel]:
    """Returns the panels with the links of fronts, and of learners that call the core directly."""
    words = parts.words({1: ("connected", GREEN), 0: ("silent", RED)})
    link = "max by (region, link) ({}{{" + HERE + "}})"
    name = "{{region}} {{link}}"
    budget = f"min by (region, link) (atoll_outage_budget_seconds{{{HERE}}})"
    rate = f"sum by (region, link, direction) (rate(atoll_link_bytes_total{{{HERE}}}[$__rate_interval]))"
    heard, byte = (f"atoll_link_{each}_timestamp_seconds" for each in ("heard", "byte"))
    return [
        states("Links", "Whether the core received messages over each link, over time.",
               link.format("atoll_link_connected"), name, words, span=24, height=6),
        lines("Outage budget", "If a link's silence exceeds its budget, work of the learners behind it is discarded.",
              "s", {f"budget of {name}": budget, f"silence of {name}": f"time() - {link.format(heard)}"}),
        lines("Round trip", "Round trip of each link to the core.", "s",
              {name: link.format("atoll_link_round_trip_seconds")}),
        lines("Learners behind links", "Number of learners behind each link.", "none",
              {name: link.format("atoll_link_learners")}),
        lines("Link traffic", "Payload bytes per second of each link.", "Bps", {name + " {{direction}}": rate},
              span=12),
        lines("Last payload byte", "Time since the last byte of a payload on each link.", "s",
              {name: f"time() - {link.format(byte)}"}, span=12),
    ]  # fmt: skip


def _core() -> list[Panel]:
    """Returns the panels with traffic as the core counts it."""
    rate = 'sum by (region) (region:atoll_wan_bytes:rate_5m{{direction="{}", ' + HERE + "}})"
    codec = f"sum by (codec, direction) (rate(atoll_payload_bytes_total{{{HERE}}}[$__rate_interval]))"
    cost = f"sum by (region) (increase(atoll_wan_bytes_total{{{HERE}}}[$__range])) / 1e9 * $price"
    there = f"sum by (region, state) (atoll_learner_info{{{HERE}}})"
    return [
        lines("Up", "Contributions and initial parameters, in bytes per second from each region.", "Bps",
              {"{{region}}": rate.format("up")}),
        lines("Down", "Published updates and whole fragments, in bytes per second to each region.", "Bps",
              {"{{region}}": rate.format("down")}),
        bars("Cost in this time range", "Cost of each region's bytes at the price above.", "currencyUSD",
             {"{{region}}": cost}),
        lines("By codec", "Payload bytes per second by codec. Whole fragments are float32.", "Bps",
              {"{{codec}} {{direction}}": codec}, stacked=True),
        lines("Compression", "Size of payloads as float32, divided by their size on the wire. Whole fragments are "
              "excluded.", "none", {"{{direction}}": "atoll_compression_ratio"}),
        lines("Learners by region", "Number of learners in each region, by state.", "none",
              {"{{region}} {{state}}": there}, stacked=True),
    ]  # fmt: skip


def _fronts() -> list[Panel]:
    """Returns the panels with traffic and state as fronts report them."""
    up = parts.words({2: ("connected", GREEN), 1: ("cannot reach the core", RED), 0: ("does not answer", RED)})
    wan = f"sum by (region, direction, kind) (rate(atoll_front_wan_bytes_total{{{HERE}}}[$__rate_interval]))"
    learners = "sum by (instance, direction) (rate(atoll_front_learner_bytes_total[$__rate_interval]))"
    return [
        states("Fronts", "Whether each front answered and could reach the core, over time.",
               parts.fronts(), "{{region}} {{instance}}", up, span=24, height=6),
        lines("Between fronts and core", "Payload bytes per second over the WAN, by kind.", "Bps",
              {"{{region}} {{direction}} {{kind}}": wan}),
        lines("Between fronts and learners",
              "Payload bytes per second within regions. One copy of each update crosses the WAN.",
              "Bps", {"{{instance}} {{direction}}": learners}),
        lines("Refused calls", "Calls per second that a front refused, by status.", "none",
              {"{{status}}": "sum by (status) (rate(atoll_front_refused_total[$__rate_interval]))"}),
        lines("Cache", "Updates and whole fragments that each front caches for its learners.", "bytes",
              {"{{instance}}": "max by (instance) (atoll_front_cached_bytes)"}),
        lines("Memory", "Resident memory of each front process.", "bytes",
              {"{{instance}}": 'process_resident_memory_bytes{job="atoll-front"}'}),
        lines("CPUs", "Number of CPUs in use by each front.", "none",
              {"{{instance}}": 'rate(process_cpu_seconds_total{job="atoll-front"}[$__rate_interval])'}),
    ]  # fmt: skip
