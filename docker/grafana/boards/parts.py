"""Parts of dashboards: panels with a title, a unit and a description.

All panels use the data source, the namespace and the run that the variables of each dashboard select.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = kinds.DataSourceRef(type_val="prometheus", uid="${datasource}")
SCOPE = 'run="$run", namespace=~"$namespace"'
SERIES = re.compile(r"(?<![\w:\"])((?:[a-z]+:)?atoll_\w+(?::\w+)?|process_\w+|up|ALERTS)(?![\w:\"])(?:\{([^}]*)\})?")
GREEN, YELLOW, RED, BLUE, GREY = "green", "yellow", "red", "blue", "text"

# State -> its number and colour. Tables sort by the number, with trouble first.
STATES = {
    "silent": (6, RED),
    "cut_off": (5, RED),
    "joining": (4, YELLOW),
    "paused": (3, BLUE),
    "live": (2, GREEN),
    "left": (1, GREY),
    "evicted": (0, GREY),
}

Panel = stat.Panel | timeseries.Panel | table.Panel | statetimeline.Panel | bargauge.Panel


def scoped(expr: str) -> str:
    """Returns an expression whose series are those of the selected run and namespace."""
    return SERIES.sub(lambda found: f"{found[1]}{{{', '.join(filter(None, (SCOPE, found[2])))}}}", expr)


def rank(labels: str, only: str = "") -> str:
    """Returns an expression for each learner's state, as a number from STATES. only: further label matchers."""
    parts = (
        f'{number} * max by ({labels}) (atoll_learner_info{{state="{state}"{only}}})'
        for state, (number, _) in STATES.items()
    )
    return " or ".join(parts)


def words(of: Mapping[float, tuple[str, str]]) -> list[Any]:
    """Returns value mappings. of: number -> text and colour."""
    options = {
        f"{value:g}": models.ValueMappingResult(text=text, color=color, index=index)
        for index, (value, (text, color)) in enumerate(of.items())
    }
    return [models.ValueMap(options=options)]


def state_words() -> list[Any]:
    """Returns the value mappings of learner states."""
    return words({number: (state, color) for state, (number, color) in STATES.items()})


def steps(first: str, *more: tuple[float, str]) -> dashboard.ThresholdsConfig:
    """Returns thresholds.

    first: the colour of the lowest values. more: (value, colour), used from that value upwards.
    """
    found = [models.Threshold(None, first), *(models.Threshold(value, color) for value, color in more)]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(found)


def query(expr: str, legend: str, ref: str, *, instant: bool = False, columns: bool = False) -> prometheus.Dataquery:
    """Returns one query. instant: whether to return only the current value. columns: whether to return a table."""
    made = prometheus.Dataquery().datasource(SOURCE).expr(scoped(expr)).legend_format(legend).ref_id(ref)
    made = made.instant() if instant else made.range()
    return made.format(PromQueryFormat.TABLE if columns else PromQueryFormat.TIME_SERIES)


def _queries(of: Mapping[str, str], **options: bool) -> list[Any]:
    """Returns queries with Grafana's reference letters. of: legend -> expression."""
    return [query(expr, legend, chr(ord("A") + at), **options) for at, (legend, expr) in enumerate(of.items())]


def value(
    title: str,
    text: str,
    unit: str,
    expr: str,
    limits: dashboard.ThresholdsConfig,
    *,
    span: int = 3,
    none: str = "-",
    mappings: Sequence[Any] = (),
    decimals: int | None = None,
) -> stat.Panel:
    """Returns a panel with one current number."""
    made = stat.Panel().title(title).description(text).unit(unit).thresholds(limits).span(span).height(4)
    made = made.targets([query(expr, "", "A", instant=True)]).no_value(none).mappings(list(mappings))
    made = made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    made = made.color_mode(kinds.BigValueColorMode.BACKGROUND).graph_mode(kinds.BigValueGraphMode.NONE)
    return made if decimals is None else made.decimals(decimals)


def lines(
    title: str,
    text: str,
    unit: str,
    of: Mapping[str, str],
    *,
    span: int = 8,
    height: int = 8,
    stacked: bool = False,
    least: float | None = 0,
    most: float | None = None,
    limits: dashboard.ThresholdsConfig | None = None,
) -> timeseries.Panel:
    """Returns a chart over time. of: legend -> expression."""
    made = timeseries.Panel().title(title).description(text).unit(unit).span(span).height(height)
    made = made.targets(_queries(of)).line_width(1).fill_opacity(40 if stacked else 5)
    made = made.show_points(kinds.VisibilityMode.NEVER)
    made = made.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(kinds.LegendDisplayMode.LIST)
        .placement(kinds.LegendPlacement.BOTTOM)
    )
    made = made.tooltip(
        common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING)
    )
    if stacked:
        made = made.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    if least is not None:
        made = made.min(least)
    if most is not None:
        made = made.max(most)
    if limits is not None:
        made = made.thresholds(limits).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(kinds.GraphThresholdsStyleMode.DASHED)
        )
    return made


def bars(title: str, text: str, unit: str, of: Mapping[str, str], *, span: int = 8, height: int = 8) -> bargauge.Panel:
    """Returns a bar per series with its current value. of: legend -> expression."""
    made = bargauge.Panel().title(title).description(text).unit(unit).span(span).height(height).min(0)
    made = made.targets(_queries(of, instant=True)).orientation(kinds.VizOrientation.HORIZONTAL)
    return made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))


def states(
    title: str, text: str, expr: str, legend: str, mappings: Sequence[Any], *, span: int = 12, height: int = 8
) -> statetimeline.Panel:
    """Returns a timeline of states, with a row per series."""
    made = statetimeline.Panel().title(title).description(text).unit("none").span(span).height(height)
    made = made.targets([query(expr, legend, "A")]).mappings(list(mappings)).merge_values(True)
    return made.show_value(kinds.VisibilityMode.AUTO).legend(common.VizLegendOptions().show_legend(False))


class Column:
    """A column of a table: name, expression and display options."""

    def __init__(self, name: str, expr: str, unit: str = "none", *, colored: bool = False, **options: Any) -> None:  # noqa: ANN401
        self.name, self.expr = name, expr
        if colored:
            options["custom.cellOptions"] = {"type": "color-background", "mode": "basic"}
        self.properties = [models.DynamicConfigValue("unit", unit)]
        self.properties += [models.DynamicConfigValue(key, option) for key, option in options.items()]


def rows(
    title: str,
    text: str,
    key: str,
    labels: Sequence[str],
    columns: Sequence[Column],
    *,
    links: str = "",
    by: Sequence[str] = (),
    span: int = 16,
    height: int = 8,
) -> table.Panel:
    """Returns a table with a row per value of the label `key`.

    labels: shown labels of the first column's series. by: columns to sort by.
    """
    made = table.Panel().title(title).description(text).unit("none").span(span).height(height)
    letters = [chr(ord("A") + at) for at in range(len(columns))]
    made = made.targets(
        [query(each.expr, "", ref, instant=True, columns=True) for each, ref in zip(columns, letters, strict=True)]
    )
    # Grafana names the column of a single query Value, and those of several queries Value #A, Value #B, ...
    values = ["Value"] if len(columns) == 1 else [f"Value #{letter}" for letter in letters]
    order = {name: at for at, name in enumerate([*labels, *values])}
    renamed = {value: column.name for value, column in zip(values, columns, strict=True)}
    pattern = "^(" + "|".join(order) + ")$"
    if len(columns) > 1:
        made = made.with_transformation(_step("joinByField", byField=key, mode="outer"))
    made = made.with_transformation(_step("filterFieldsByName", include={"pattern": pattern}))
    made = made.with_transformation(_step("organize", indexByName=order, renameByName=renamed, excludeByName={}))
    for column in columns:
        made = made.override_by_name(column.name, column.properties)
    if links:
        link = {"title": f"this {key}", "url": links, "targetBlank": False}
        made = made.override_by_name(key, [models.DynamicConfigValue("links", [link])])
    return made.sort_by([common.TableSortByFieldState().display_name(name).desc(True) for name in by])


def _step(name: str, **options: Any) -> models.DataTransformerConfig:  # noqa: ANN401
    """Returns a transformation of a table."""
    return models.DataTransformerConfig(id_val=name, options=options)


def event(name: str, expr: str, text: str, color: str) -> dashboard.AnnotationQuery:
    """Returns an annotation that marks all charts while the expression has a value."""
    made = dashboard.AnnotationQuery().name(name).datasource(SOURCE).expr(scoped(expr)).step("30s").icon_color(color)
    return made.title_format(name).text_format(text).enable(True)


def core_events() -> list[dashboard.AnnotationQuery]:
    """Returns annotations while the core is down, and at each start of the core."""
    last = "last_over_time(run:atoll_core_epoch:max[1d] offset 1m)"
    return [
        event("the core is down", "core:atoll_core_state:max == 0", "{{pod}}", RED),
        event("the core started", f"run:atoll_core_epoch:max != {last}", "", "purple"),
    ]


def fronts() -> str:
    """Returns an expression for each front's state: 2 if it reaches the core, 1 if not, and 0 if it does not answer."""
    known = "max by (instance, region) (last_over_time(atoll_front_core_up[1d]))"
    answers = 'max by (instance) (up{job="atoll-front"})'
    down = f"0 * ({answers} == 0)"
    named = f"0 * ({known} and on (instance) {answers} == 0)"
    return f"1 + max by (instance, region) (atoll_front_core_up) or on (instance) ({named}) or on (instance) ({down})"


def fronts_in_trouble() -> Panel:
    """Returns the panel with the number of fronts that do not answer or cannot reach the core."""
    text = "Fronts that do not answer or cannot reach the core, of all regions."
    expr = f"sum(({fronts()}) < bool 2)"
    return value("Fronts in trouble", text, "none", expr, steps(GREEN, (1, RED)), none="no fronts", decimals=0)


def front_out() -> dashboard.AnnotationQuery:
    """Returns an annotation while a front does not answer or cannot reach the core."""
    return event("a front is down or cut off", f"({fronts()}) < 2", "{{instance}} in {{region}}", "orange")


def learner_silent(only: str = "") -> dashboard.AnnotationQuery:
    """Returns an annotation while a learner is silent. only: further label matchers."""
    expr = f'atoll_learner_info{{state="silent"{only}}}'
    return event("a learner is silent", expr, "{{learner}} in {{region}}", RED)


def price() -> dashboard.TextBoxVariable:
    """Returns a text box for the price of a gigabyte on the WAN."""
    return dashboard.TextBoxVariable("price").label("USD per GB over the WAN").default_value("0.09")


def choice(name: str, label: str, of: str, *, several: bool) -> dashboard.QueryVariable:
    """Returns a variable with the values of a label. of: the series that have the label."""
    made = dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(f"label_values({of}, {label})")
    made = made.multi(several).sort(models.VariableSort.ALPHABETICAL_ASC)
    made = made.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return made.include_all(True).all_value(".*") if several else made


def scope() -> list[Any]:
    """Returns the variables that each dashboard begins with: data source, namespace and run.

    Without a label `run`, Grafana sets $run to an empty text, which matches series without that label.
    """
    targets = 'up{job=~"atoll-.+"%s}'
    return [
        dashboard.DatasourceVariable("datasource").label("data source").type("prometheus"),
        choice("namespace", "namespace", targets % "", several=True),
        choice("run", "run", targets % ', namespace=~"$namespace"', several=False),
    ]


def page(
    uid: str,
    title: str,
    text: str,
    sections: Mapping[str, Sequence[Panel]],
    variables: Iterable[Any] = (),
    events: Iterable[dashboard.AnnotationQuery] = (),
) -> models.Dashboard:
    """Returns a dashboard with panels in sections. A section with an empty name has no heading."""
    made = dashboard.Dashboard(title).uid(uid).description(text).tags(["atoll"]).editable().refresh("10s")
    made = made.time("now-3h", "now").timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
    links = dashboard.DashboardLink("Atoll").type(models.DashboardLinkType.DASHBOARDS).tags(["atoll"])
    made = made.link(links.keep_time(True).include_vars(True))
    for variable in [*scope(), *variables]:
        made = made.with_variable(variable)
    for each in events:
        made = made.annotation(each)
    numbers = count(1)
    for heading, panels in sections.items():
        if heading:
            made = made.with_row(dashboard.Row(heading).id(next(numbers)))
        for panel in panels:
            made = made.with_panel(panel.datasource(SOURCE).id(next(numbers)))
    built = made.build()
    # With the library's default, newer versions of Grafana hide links and annotations in a menu.
    for shown in [*(built.links or []), *(built.annotations.list_val or [])]:
        shown.placement = None  # type: ignore[attr-defined]
    return built
