"""What a run found: ``report.json`` for machines, ``report.html`` for people, one file with its plots inside."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from vlora_sgl.core import JsonDict

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Report = JsonDict

PAGE = """<!doctype html><html lang='en'><meta charset='utf-8'><title>Adapters</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
table{border-collapse:collapse;margin:1rem 0}
th,td{padding:.25rem .7rem;border-bottom:1px solid #d5dae0;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}.bad{color:#b3261e;font-weight:600}.ok{color:#1a6b35}
figure{margin:1.5rem 0}svg{max-width:100%;height:auto}figcaption,.note{color:#56606b}
</style><body>
{% macro table(columns) %}<table><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{{- caller() }}</table>{% endmacro %}
{% macro share(value, floor=0) -%}
<td class='n{{ " bad" if value < floor }}'>{{ "%.3f" % value }}</td>{% endmacro %}
<h1>{{ datasets|length }} data sets in {{ adapters|length }} adapters</h1>
{% if floors_broken %}<p class='bad'>{{ floors_broken }} of {{ datasets|length }} data sets lie below their floor on
test data.</p>{% else %}<p class='ok'>Every data set keeps its floor on test data.</p>{% endif %}
<p>Base model <code>{{ base }}</code>; order {{ order }}, seed {{ seed }}; heads {{ "on" if heads else "off" }};
rehearsal {{ "%g" % rehearsal }}; {{ trainings }} trainings ({{ trainings_resumed }} of them resumed),
{{ "%.0f" % seconds }} s on {{ device }}.</p>
<p>Bound: no packing with fewer than {{ bound }} adapters avoids every combination that was seen to break a floor (as
far as such a combination fails in larger ones too).</p>
<h2>Accuracy</h2><p class='note'>Validation decided: what it needs shows the floor with {{ "%.0f" % (100 * confidence)
}}% confidence. The other accuracies are on test data.</p>
{% call table(["data set", "task", "metric", "adapter", "needed", "validation", "floor", "base", "test", "teacher"]) %}
{% for row in datasets %}<tr><td>{{ row.name }}</td><td>{{ row.task }}</td><td>{{ row.metric }}</td>
<td>{{ row.adapter }}</td>{{ share(row.needed) }}{{ share(row.validation, row.needed) }}{{ share(row.floor) }}
{{- share(row.base) }}{{ share(row.accuracy, row.floor) }}
{{- "<td></td>"|safe if row.teacher is none else share(row.teacher) }}</tr>{% endfor %}{% endcall %}
<h2>Packing</h2>
{% call table(["adapter", "learnt, in order"]) %}
{% for one in adapters %}<tr><td>{{ one.name }}</td><td>{{ one.datasets|join(" + ") }}</td></tr>{% endfor %}
{% endcall %}
{% for svg, caption in plots %}<figure>{{ svg|safe }}<figcaption>{{ caption }}</figcaption></figure>{% endfor %}
<h2>Every training</h2><p class='note'>Accuracy on validation data, which decides.</p>
{% call table(["", "learnt, in order", "accuracy", "verdict"]) %}
{% for step in steps %}<tr><td class='n'>{{ loop.index }}</td><td>{{ step.datasets|join(" + ") }}</td>
<td>{% for name, value in step.accuracy.items() %}{{ name }} {{ "%.3f" % value }}{{ ", " if not loop.last }}
{%- endfor %}</td>
<td{% if step.broken %} class='bad'>floor not shown: {{ step.broken|join(", ") }}{% else %}>holds{% endif %}</td>
</tr>{% endfor %}{% endcall %}
</body></html>
"""


def write_report(report: Report, out: Path) -> None:
    """Write ``report.json`` and ``report.html`` into ``out``; without matplotlib the page has tables only."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.html").write_text(render(report))


def render(report: Report) -> str:
    """The report as one HTML page that loads nothing from elsewhere."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(report, plots=_plots(report)) + "\n"


def _plots(report: Report) -> list[tuple[str, str]]:
    """SVG and caption of each figure; one line of text instead where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return [("", "No plots: pip install matplotlib")]
    figures: list[tuple[Callable[[Axes], None], tuple[float, float], str]] = []
    for order in report["curves"]:
        caption = "Accuracy against the number of fused data sets (paper, figure 5); crosses do not show their floor."
        figures.append((partial(_draw_curve, report=report, order=order), (8, 4), caption))
    height = 0.8 + 0.5 * len(report["adapters"])
    figures.append((partial(_draw_packing, report=report), (8, height), "Packing (paper, figure 10)."))
    figures.append((partial(_draw_bars, report=report), (8, 3.4), "Base, adapter and teacher (paper, figure 15)."))
    drawn = []
    with matplotlib.rc_context({"svg.hashsalt": "report", "svg.fonttype": "none", "font.size": 9}):
        from matplotlib.figure import Figure

        for draw, size, caption in figures:
            figure = Figure(figsize=size, layout="constrained")
            draw(figure.add_subplot())
            stream = io.StringIO()
            figure.savefig(stream, format="svg", metadata={"Date": None})
            drawn.append((stream.getvalue()[stream.getvalue().index("<svg") :], caption))
    return drawn


def _draw_curve(ax: Axes, report: Report, order: Sequence[str]) -> None:
    steps = {tuple(step["datasets"]): step["accuracy"] for step in report["steps"]}
    needed = {row["name"]: row["needed"] for row in report["datasets"]}
    counts = range(1, len(order) + 1)
    for place, name in enumerate(order):
        values = [(n, steps[tuple(order[:n])][name]) for n in counts if n > place]
        (line,) = ax.plot(*zip(*values, strict=True), marker="o", markersize=4, label=name)
        below = [(n, value) for n, value in values if value < needed[name]]
        if below:
            ax.plot(*zip(*below, strict=True), "x", color=line.get_color(), markersize=9, markeredgewidth=2)
    ax.plot(
        counts, [sum(steps[tuple(order[:n])].values()) / n for n in counts], color="black", linewidth=2, label="mean"
    )
    ax.set_xticks(list(counts), [f"{n}\n+ {name}" for n, name in zip(counts, order, strict=True)])
    ax.set(xlabel="fused data sets", ylabel="validation accuracy", ylim=(None, 1.02))
    ax.legend(fontsize=7, ncols=2)


def _draw_packing(ax: Axes, report: Report) -> None:
    last = len(report["adapters"]) - 1
    slack = {row["name"]: row["accuracy"] - row["floor"] for row in report["datasets"]}
    for i, entry in enumerate(report["adapters"]):
        for place, name in enumerate(entry["datasets"]):
            held = slack[name] >= 0
            ax.barh(last - i, 0.94, left=place, height=0.7, color="#cfe3d6" if held else "#f3c9c5")
            ax.text(place + 0.47, last - i, f"{name}\n{slack[name]:+.3f}", ha="center", va="center", fontsize=8)
    ax.set_yticks(range(last + 1), [entry["name"] for entry in reversed(report["adapters"])])
    ax.set_xticks([])
    ax.set_xlabel("learnt, left to right; test accuracy above (+) or below (-) the floor")
    ax.spines[["top", "right", "bottom", "left"]].set_visible(False)


def _draw_bars(ax: Axes, report: Report) -> None:
    rows = report["datasets"]
    kinds = [("base", "base"), ("accuracy", "adapter"), ("teacher", "teacher")]
    if all(row["teacher"] is None for row in rows):
        kinds.pop()
    width = 0.8 / len(kinds)
    for k, (key, label) in enumerate(kinds):
        places = [i + (k - (len(kinds) - 1) / 2) * width for i, row in enumerate(rows) if row[key] is not None]
        ax.bar(places, [row[key] for row in rows if row[key] is not None], width * 0.92, label=label)
    for i, row in enumerate(rows):
        ax.plot(
            [i - 0.42, i + 0.42], [row["floor"]] * 2, color="black", linewidth=1, label="floor" if i == 0 else None
        )
    ax.set_xticks(range(len(rows)), [f"{row['name']}\n({row['metric']})" for row in rows])
    ax.set(ylabel="test accuracy", ylim=(0, 1.05))
    ax.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
