"""What a run found: ``report.json`` for machines, ``report.html`` for people, one file with its plots inside."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vlora_sgl.core import JsonDict

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Report = JsonDict
Cell = str | tuple[str, bool]
"""Text, and whether it is bad news."""

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
table{border-collapse:collapse;margin:1rem 0}
th,td{padding:.25rem .7rem;border-bottom:1px solid #d5dae0;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}.bad{color:#b3261e;font-weight:600}.ok{color:#1a6b35}
figure{margin:1.5rem 0}svg{max-width:100%;height:auto}figcaption,.note{color:#56606b}"""


def write_report(report: Report, out: Path) -> None:
    """Write ``report.json`` and ``report.html`` into ``out``; without matplotlib the page has tables only."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.html").write_text(render(report))


def render(report: Report) -> str:
    """The report as one HTML page that loads nothing from elsewhere."""
    broken = report["floors_broken"]
    verdict = (
        f"<p class='bad'>{broken} of {len(report['datasets'])} data sets lie below their floor on test data.</p>"
        if broken
        else "<p class='ok'>Every data set keeps its floor on test data.</p>"
    )
    head = (
        f"<h1>{len(report['datasets'])} data sets in {len(report['adapters'])} adapters</h1>{verdict}"
        f"<p>Base model <code>{html.escape(str(report['base']))}</code>; order {report['order']}, "
        f"seed {report['seed']}; heads {'on' if report['heads'] else 'off'}; rehearsal {report['rehearsal']:g}; "
        f"{report['trainings']} trainings ({report['trainings_resumed']} of them resumed), "
        f"{report['seconds']:.0f} s on {report['device']}.</p>"
        f"<p>Bound: no packing with fewer than {report['bound']} adapters avoids every combination that was seen to "
        "break a floor (as far as such a combination fails in larger ones too).</p>"
    )
    parts = [head, _datasets_table(report), _adapters_table(report)]
    parts += [f"<figure>{svg}<figcaption>{caption}</figcaption></figure>" for svg, caption in _plots(report)]
    parts.append(_steps_table(report))
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Adapters</title>"
        f"<style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _datasets_table(report: Report) -> str:
    rows: list[list[Cell]] = [
        [
            row["name"],
            row["task"],
            row["metric"],
            row["adapter"],
            f"{row['needed']:.3f}",
            (f"{row['validation']:.3f}", row["validation"] < row["needed"]),
            f"{row['floor']:.3f}",
            f"{row['base']:.3f}",
            (f"{row['accuracy']:.3f}", row["accuracy"] < row["floor"]),
            "" if row["teacher"] is None else f"{row['teacher']:.3f}",
        ]
        for row in report["datasets"]
    ]
    note = (
        f"Validation decided: what it needs shows the floor with {report['confidence']:.0%} confidence. The other "
        "accuracies are on test data."
    )
    columns = ["data set", "task", "metric", "adapter", "needed", "validation", "floor", "base", "test", "teacher"]
    return f"<h2>Accuracy</h2><p class='note'>{note}</p>" + _table(columns, rows)


def _adapters_table(report: Report) -> str:
    rows: list[list[Cell]] = [[entry["name"], " + ".join(entry["datasets"])] for entry in report["adapters"]]
    return "<h2>Packing</h2>" + _table(["adapter", "learnt, in order"], rows)


def _steps_table(report: Report) -> str:
    rows: list[list[Cell]] = []
    for number, step in enumerate(report["steps"], 1):
        accuracy = ", ".join(f"{name} {value:.3f}" for name, value in step["accuracy"].items())
        verdict = f"floor not shown: {', '.join(step['broken'])}" if step["broken"] else "holds"
        rows.append([str(number), " + ".join(step["datasets"]), accuracy, (verdict, bool(step["broken"]))])
    return "<h2>Every training</h2><p class='note'>Accuracy on validation data, which decides.</p>" + _table(
        ["", "learnt, in order", "accuracy", "verdict"], rows
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    def cell(value: Cell) -> str:
        text, bad = value if isinstance(value, tuple) else (value, False)
        number = text.replace(".", "", 1).isdecimal()
        kind = " ".join(name for name, on in (("n", number), ("bad", bad)) if on)
        return f"<td class='{kind}'>{html.escape(text)}</td>"

    top = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


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
