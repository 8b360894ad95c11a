"""The subcommands `atoll simulate` and `atoll plan`, which need neither a run nor a network."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from atoll_wire.cli.option_groups import STDOUT, count, figures, size, takes
from atoll_wire.cli.output import Figures
from atoll_wire.errors import UsageError, UserError, need
from rich.console import Console, Group

Plot = Annotated[
    Path | None, typer.Option(help="Write a plot to this file, SVG or PNG (needs matplotlib).", metavar="PATH")
]
MAX_PARAMETERS = 10**13
MAX_EVENTS = 1e7  # limit on the events in one simulation; a simulation of this size takes minutes
MAX_LEARNERS = 4096  # limit on the learners in one run
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
DEFAULT_REGIONS = ["eu:1:1000:30:0.09", "us:1:1000:90:0.09", "ap:1:1000:160:0.09"]


def _parameters(text: str | int) -> int:
    found = count(text)
    if not 1 <= found <= MAX_PARAMETERS:
        raise typer.BadParameter(f"give 1 to {MAX_PARAMETERS:,} parameters")
    return found


def _shard_memory(text: str | int) -> int:
    found = size(text)
    if not 1 << 30 <= found <= 1 << 50:
        raise typer.BadParameter("give 1GiB to 1024TiB")
    return found


def register(app: typer.Typer) -> None:
    """Adds this package's subcommands to `atoll`."""
    simulate = typer.Typer(
        no_args_is_help=True, help="Simulate fleets, and compare the results with the paper's tables."
    )
    simulate.command("goodput")(goodput_command)
    simulate.command("bandwidth")(bandwidth_command)
    simulate.command("scavenging")(scavenging_command)
    simulate.command("hardware")(hardware_command)
    app.add_typer(simulate, name="simulate")
    app.command("plan")(plan_command)


@takes(out=figures)
def goodput_command(
    out: Figures,
    chips: Annotated[
        int | None,
        typer.Option(min=1, max=100_000_000, help="Chips in one fleet. Default: 150,000 to 2,400,000 (Table 1)."),
    ] = None,
    learners: Annotated[
        int | None, typer.Option(min=1, max=4096, help="With --chips: M, the number of equal learners. Default: 8.")
    ] = None,
    failures_per_year: Annotated[float, typer.Option(min=1e-6, max=10_000, help="Failures per chip per year.")] = 1.0,
    slice_chips: Annotated[int, typer.Option(min=1, help="Chips that fail together.")] = 256,
    downscale_s: Annotated[
        float, typer.Option(min=0, max=1e6, help="Length of the pause when a slice fails, in seconds.")
    ] = 18.0,
    upscale_s: Annotated[
        float, typer.Option(min=0, max=1e6, help="Length of the pause when a slice returns, in seconds.")
    ] = 2.0,
    repair_s: Annotated[float, typer.Option(min=1, max=1e8, help="Mean seconds until a slice returns.")] = 3600.0,
    repair_shape: Annotated[
        float, typer.Option(min=0.2, max=10, help="Weibull shape of repair times. 1: exponential.")
    ] = 1.0,
    restart_s: Annotated[float, typer.Option(min=0, max=1e6, help="Seconds to restart an inelastic job.")] = 76.0,
    hours: Annotated[float, typer.Option(min=0.1, max=10_000, help="Simulated hours.")] = 30.0,
    plot: Plot = None,
) -> None:
    """Goodput under failures: Table 1 of the paper, or your own fleet."""
    from atoll_forecast.paper import figures, goodput
    from atoll_forecast.paper.claims import goodput_claims
    from atoll_forecast.paper.tables import goodput_table

    failures = goodput.Failures(
        failures_per_year, slice_chips, downscale_s, upscale_s, repair_s, repair_shape, restart_s
    )
    events = (chips or 20 * max(figures.CHIPS)) * failures_per_year * hours / 4383
    if events > MAX_EVENTS:
        raise UsageError(f"the simulation would have {events:,.0f} failures (limit {MAX_EVENTS:,}): lower --hours")
    if chips is None and learners is not None:
        raise UsageError("--learners needs --chips: give the number of chips in the fleet")
    if chips is not None:
        parts = learners or 8
        if parts * slice_chips > chips:
            raise UsageError(
                f"{chips} chips are too few for {parts} learners of at least {slice_chips} chips each: raise --chips"
            )
        if plot is not None:
            raise UsageError(
                "--plot draws the rows of the paper's Table 1, but --chips describes one fleet: omit one of them"
            )
        found = goodput.simulate(chips, parts, failures, hours=hours)
        text = f"goodput {found.goodput:.1%}; at least one learner trains {found.uptime:.3%} of the time"
        out.show({"goodput": found.goodput, "uptime": found.uptime}, lambda: text)
        return
    with Console(stderr=True).status("30 fleets ..."):
        ours = goodput_claims(failures, hours)
    difference = goodput.rmse(ours, figures.GOODPUT)
    found_figures = {"goodput": ours, "paper": figures.GOODPUT, "rmse": difference}
    out.show(found_figures, lambda: goodput_table(ours, failures_per_year, difference))
    if plot is not None:
        _draw(plot, lambda plots: plots.goodput(ours, plot))


@takes(out=figures)
def bandwidth_command(out: Figures, plot: Plot = None) -> None:
    """Link rates by the paper's accounting, with the paper's bits per parameter and with Atoll's."""
    from atoll_forecast.paper.claims import bandwidth_claims

    finding = "Decoupled int4 training needs 0.4 % of the link of data-parallel training, Atoll 0.3 %"
    _claims("Link rates for 5B parameters and 1 s steps", finding, bandwidth_claims(), out, plot)


@takes(out=figures)
def scavenging_command(out: Figures, plot: Plot = None) -> None:
    """Extra compute for half of the training: training time relative to a run without extra compute."""
    from atoll_forecast.paper.claims import scavenging_claims

    title = "Training time with extra compute for half of the tokens, relative to no extra compute"
    finding = "Extra compute shortens a decoupled run; data-parallel training gains only from +300 %"
    _claims(title, finding, scavenging_claims(), out, plot)


@takes(out=figures)
def hardware_command(out: Figures, plot: Plot = None) -> None:
    """Mixed hardware: one of eight learners is 18 % slower, and step times have 10 % jitter."""
    from atoll_forecast.paper.claims import hardware_claims

    finding = "One slow learner of eight costs goodput only if the others wait for it"
    _claims("Goodput with mixed hardware", finding, hardware_claims(), out, plot)


Parameters = Annotated[
    int, typer.Option(parser=_parameters, metavar="<count>", help="Number of trained parameters, such as 12B.")
]
ShardMemory = Annotated[
    int,
    typer.Option(
        parser=_shard_memory,
        metavar="<bytes>",
        help="Memory of each shard's machine, such as 671GiB. Decides the number of shards.",
        show_default="512GiB",
    ),
]
Values = Annotated[
    Path | None,
    typer.Option(help="Write Helm values to this file. -: print them, and nothing else.", metavar="PATH"),
]
Compose = Annotated[
    Path | None,
    typer.Option(
        help="Write an override for docker/compose.yaml to this file. -: print it, and nothing else.",
        metavar="PATH",
    ),
]


@takes(out=figures)
def plan_command(
    out: Figures,
    parameters: Parameters,
    step_s: Annotated[float, typer.Option(min=1e-4, max=1e5, help="Duration of one learner's inner step, in seconds.")],
    region: Annotated[
        list[str], typer.Option(help="A region (see above). You may repeat this option.", metavar="REGION")
    ] = DEFAULT_REGIONS,
    between_failures_h: Annotated[
        float, typer.Option(min=0, max=1e6, help="Mean hours between failures of one learner. 0: no failures.")
    ] = 0.0,
    repair_min: Annotated[
        float, typer.Option(min=0, max=1e6, help="Minutes from a failure to the learner's next step.")
    ] = 10.0,
    core_mbit: Annotated[
        float, typer.Option(min=0, max=1e9, help="Rate of the core's own link each way, in Mbit/s. 0: unlimited.")
    ] = 0.0,
    fragments: Annotated[int, typer.Option(min=0, max=256, help="P: number of fragments. 0 means 24.")] = 0,
    shard_memory: ShardMemory = 512 << 30,
    values: Values = None,
    compose: Compose = None,
) -> None:
    """Plan a run: settings, expected link load, cost, goodput and memory, and the effect of losing a region.

    A REGION is NAME:LEARNERS:MBIT:ROUND_TRIP_MS[:PRICE]. MBIT is the rate of the region's link to the core
    in Mbit/s, each way. PRICE is in US dollars per gigabyte.
    """
    import math

    if math.isnan(step_s + between_failures_h + repair_min + core_mbit):
        raise UsageError("--step-s, --between-failures-h, --repair-min or --core-mbit is nan: give a number")
    if [values, compose].count(STDOUT) + out.form.is_json > 1:
        raise UsageError("--values -, --compose - and JSON need standard output for themselves: give only one of them")

    from atoll_forecast.planning.deployment import compose_override, helm_values
    from atoll_forecast.planning.job import Job
    from atoll_forecast.planning.planner import plan
    from atoll_forecast.planning.tables import plan_json, plan_tables

    for path in (values, compose):
        _check_folder(path)
    between_failures_s = between_failures_h * 3600 or math.inf
    regions = _regions(region)
    job = Job(parameters, step_s, regions, between_failures_s, 60 * repair_min, core_bits_s=core_mbit * 1e6 or math.inf)
    with Console(stderr=True).status("simulating the plan ..."):
        made = plan(job, fragments, shard_memory)
    warnings = [f"[yellow]{warning}[/]" for warning in made.warnings]
    tables = Group(*(part for table in plan_tables(job, made) for part in (table, "")), *warnings)
    if STDOUT not in {values, compose}:
        out.show(plan_json(job, made), lambda: tables)
    else:
        out.write(plan_json(job, made))
        Console(stderr=True).print(*warnings if made.works else [tables], sep="\n")
    if not made.works:
        raise UserError("the plan is infeasible: the warnings above say what to change")
    _write_text(values, helm_values(job, made))
    _write_text(compose, compose_override(job, made))


def _regions(texts: list[str]) -> tuple[Any, ...]:
    regions = tuple(map(_region, texts))
    if sum(each.learners for each in regions) > MAX_LEARNERS:
        raise UsageError(f"--region: a run has at most {MAX_LEARNERS} learners: give fewer")
    if len({each.name for each in regions}) < len(regions):
        raise UsageError("--region: two regions have the same name: give each region its own name")
    return regions


def _region(text: str) -> Any:  # noqa: ANN401 - a Region, imported when a command runs
    from atoll_forecast.planning.job import Region

    name, *rest = text.split(":")
    try:
        learners, mbit, trip_ms, *price = rest
        made = Region(name, int(learners), float(mbit) * 1e6, float(trip_ms) / 1e3, *map(float, price))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f'--region "{text}" is invalid: give NAME:LEARNERS:MBIT:ROUND_TRIP_MS[:PRICE], such as eu:2:1000:30:0.09'
        ) from error
    if not NAME.fullmatch(name):
        raise UsageError(f'--region "{text}": use only letters, digits, - and _ in the name')
    if not (0 < made.learners <= MAX_LEARNERS and 1e3 <= made.bits_s <= 1e15):
        raise UsageError(f'--region "{text}": give 1 to {MAX_LEARNERS} learners, and a rate of 0.001 to 1e9 Mbit/s')
    if not (0 <= made.round_trip_s <= 3600 and 0 <= (made.price_gb or 0.0) <= 1e6):
        raise UsageError(f'--region "{text}": give a round-trip time of 0 to 3.6e6 ms, and a price of 0 to 1e6 per GB')
    return made


def _claims(title: str, finding: str, claims: Any, out: Figures, plot: Path | None) -> None:  # noqa: ANN401
    from atoll_forecast.paper.tables import claims_json, claims_table

    out.show({title: claims_json(claims)}, lambda: claims_table(title, claims))
    if plot is not None:
        _draw(plot, lambda plots: plots.claims(finding, claims, plot))


def _draw(path: Path, draw: Callable[[Any], None]) -> None:
    need("simulate --plot", "plots", "matplotlib")
    from atoll_forecast.paper import plots

    try:
        draw(plots)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): give another path") from error
    except ValueError as error:  # matplotlib raises it for an unknown suffix
        raise UserError(f"{path}: {error}: give a path that ends in .svg or .png") from error


def _check_folder(path: Path | None) -> None:
    """Raises UserError if the file's folder does not exist. Call this before the work that yields the text."""
    if path not in {None, STDOUT} and not path.parent.is_dir():
        raise UserError(f"{path} cannot be written (No such file or directory): give another path")


def _write_text(path: Path | None, text: str) -> None:
    if path is None:
        return
    if path == STDOUT:
        print(text, end="")
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): give another path") from error
