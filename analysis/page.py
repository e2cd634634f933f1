"""The report's page: plain HTML and CSS in one file. Every text that comes from the record is escaped here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from .checks import Check, Result
from .tables import Table

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1d2127; --soft: #5c6470; --line: #dfe3e8;
  --good: #0b7a4b; --bad: #b3261e; --unsure: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1d2127; --ink: #e8eaed; --soft: #a3abb6;
  --line: #343a43; --good: #57c796; --bad: #ff8a80; --unsure: #e6b450; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; }
h3 { font-size: 15px; margin: 0 0 8px; }
p.ending { margin: 0 0 18px; color: var(--soft); overflow-wrap: anywhere; }
.badge { display: inline-block; padding: 1px 10px; border-radius: 99px; border: 1px solid currentColor; font-size: 13px;
  font-weight: 600; vertical-align: 3px; margin-left: 8px; }
.good { color: var(--good); } .bad { color: var(--bad); } .unsure { color: var(--unsure); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; overflow-x: auto; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); align-items: start; }
dl { display: grid; gap: 10px 24px; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); margin: 0; }
dt { color: var(--soft); font-size: 13px; } dd { margin: 0; font-weight: 500; overflow-wrap: anywhere; }
.wide { grid-column: 1 / -1; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: right; padding: 5px 10px; border-top: 1px solid var(--line); font-variant-numeric: tabular-nums;
  vertical-align: top; }
th { color: var(--soft); font-weight: 500; border-top: 0; }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
ul { margin: 4px 0 0; padding-left: 18px; color: var(--soft); font-size: 13px; }
.note { color: var(--soft); font-size: 13px; margin: 8px 0 0; }
figure { margin: 0; background: #ffffff; border: 1px solid var(--line); border-radius: 10px; padding: 12px; }
figure img { display: block; width: 100%; height: auto; }
details { margin-top: 12px; } summary { cursor: pointer; }
pre { font-size: 12.5px; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
"""

GOOD_STATES = ("finished", "running")
UNSURE_STATES = ("stopped", "unknown")

TEXT_TABLES = ("reason", "what happened")
"""Headers of columns that hold sentences: their table is set flush left."""


def render(
    *,
    title: str,
    ending: str,
    state: str,
    summary: list[tuple[str, str]],
    checks: list[Check],
    warnings: list[str],
    figures: list[tuple[str, str]],
    tables: list[Table],
    unreadable: Sequence[tuple[str, str]],
    metadata: dict[str, str],
) -> str:
    """The page. `figures` are a title and a PNG in base 64 each."""
    colour = "good" if state in GOOD_STATES else "unsure" if state in UNSURE_STATES else "bad"
    parts = [
        f'<h1>{escape(title)}<span class="badge {colour}">{escape(state)}</span></h1>',
        f'<p class="ending">{escape(ending)}</p>',
        _summary(summary),
        "<h2>Checks</h2>",
        _checks(checks),
        *(f'<p class="unsure"><strong>warning: {escape(warning)}</strong></p>' for warning in warnings),
        "<h2>Figures</h2>",
        _figures(figures),
        "<h2>Tables</h2>",
        '<div class="grid">' + "".join(_table(table) for table in tables) + "</div>" if tables else _nothing("numbers"),
        _unreadable(unreadable),
        "<h2>Where it comes from</h2>",
        *(_metadata(key, metadata[key]) for key in sorted(metadata)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _summary(pairs: list[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<div class="card"><dl>{items}</dl></div>'


def _checks(checks: list[Check]) -> str:
    colours = {Result.HOLDS: "good", Result.VIOLATED: "bad", Result.NOTHING: "unsure"}
    rows = []
    for check in checks:
        details = "".join(f"<li>{escape(detail)}</li>" for detail in check.details)
        rows.append(
            f'<tr><td class="{colours[check.result]}"><strong>{escape(check.result.value)}</strong></td>'
            f"<td>{escape(check.rule)}{f'<ul>{details}</ul>' if details else ''}</td><td>{escape(check.figure)}</td></tr>"
        )
    header = "<tr><th>result</th><th>rule</th><th>on</th></tr>"
    return f'<div class="card text"><table>{header}{"".join(rows)}</table></div>'


def _figures(figures: list[tuple[str, str]]) -> str:
    if not figures:
        return _nothing("figures")
    shown = "".join(
        f'<figure><img alt="{escape(title)}" src="data:image/png;base64,{data}"></figure>' for title, data in figures
    )
    return f'<div class="grid">{shown}</div>'


def _table(table: Table) -> str:
    header = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    kind = "text" if set(TEXT_TABLES) & set(table.header) else "wide" if table.wide else ""
    return f'<div class="card {kind}"><h3>{escape(table.title)}</h3><table><tr>{header}</tr>{rows}</table>{note}</div>'


def _unreadable(files: Sequence[tuple[str, str]]) -> str:
    if not files:
        return ""
    items = "".join(f"<li>{escape(path)}: {escape(reason)}</li>" for path, reason in files)
    return f'<h2>Files left out</h2><div class="card"><ul>{items}</ul></div>'


def _metadata(key: str, value: str) -> str:
    try:
        shown = json.dumps(json.loads(value), indent=2, ensure_ascii=False)
    except ValueError:
        shown = value
    return f"<details><summary>{escape(key)}</summary><pre>{escape(shown)}</pre></details>"


def _nothing(what: str) -> str:
    return f'<p class="note">The record has no {what} yet.</p>'
