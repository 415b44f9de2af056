"""The look of a page: one style for phone and desktop, with colours for light and dark."""

from __future__ import annotations

# Exactly zero; seven levels up to the tolerance; five beyond it; what is not finite.
LIGHT = (
    "#e4e7eb", "#d3e5f5", "#b5d3ec", "#93bfe1", "#6ea8d5", "#4a8fc6", "#2f75b2", "#1d5a97",
    "#fdcb85", "#fbb055", "#f59330", "#e97818", "#da5c14", "#e64fb8",
)  # fmt: skip
DARK = (
    "#2c3239", "#17324c", "#1d4468", "#255785", "#316ca2", "#4283bd", "#629fd3", "#90c1e8",
    "#a85f14", "#c4751c", "#dc8f2d", "#f2b04e", "#ffdc82", "#ff62cc",
)  # fmt: skip


def _levels(colours: tuple[str, ...]) -> str:
    return " ".join(f"--l{i}: {colour};" for i, colour in enumerate(colours))


_PAINT = "\n".join(
    f".l{i} {{ stroke: var(--l{i}); }} i.l{i} {{ background: var(--l{i}); }}"
    for i in range(len(LIGHT))
)

STYLE = f"""\
:root {{
  color-scheme: light dark;
  --back: #ffffff; --fore: #1b1f24; --soft: #57606a; --line: #c9d0d7; --panel: #f4f6f8;
  --good: #116329; --bad: #a40e26; --bad-back: #fdeeee; --none: #57606a;
  --q0: #0550ae; --q1: #0b6b7d; --q2: #57606a; --q3: #116329; --q4: #8a4600; --q5: #6e3bbf;
  {_levels(LIGHT)}
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --back: #12161b; --fore: #e8ebee; --soft: #a3adb8; --line: #3a434d; --panel: #1b2128;
    --good: #7ddc97; --bad: #ff9a94; --bad-back: #351b1e; --none: #a3adb8;
    --q0: #79b8ff; --q1: #63d6e0; --q2: #a3adb8; --q3: #7ddc97; --q4: #ffb366; --q5: #c9a6ff;
    {_levels(DARK)}
  }}
}}
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; }}
body {{
  margin: 0; background: var(--back); color: var(--fore);
  font: 16px/1.5 system-ui, sans-serif;
}}
main {{ max-width: 76rem; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1rem; margin: 0; color: var(--soft); font-weight: 600; }}
h2 {{ font-size: 1.25rem; margin: 2.25rem 0 .5rem; line-height: 1.25; }}
h3 {{ font-size: 1rem; margin: 1.5rem 0 .25rem; line-height: 1.25; }}
p, li, dd, summary, figcaption {{ overflow-wrap: anywhere; }}
p {{ margin: .5rem 0; max-width: 48rem; }}
ul {{ margin: .5rem 0; padding-left: 1.25rem; max-width: 48rem; }}
li {{ margin: .25rem 0; }}
code, .name {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }}
code {{ font-size: .9em; unicode-bidi: isolate; }}
.verdict {{
  font-size: 1.3rem; line-height: 1.35; font-weight: 600; margin: .5rem 0 1rem;
  padding-left: .75rem; border-left: .375rem solid var(--good);
}}
.verdict.fail {{ border-color: var(--bad); }}
.soft {{ color: var(--soft); }}
dl {{ display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .125rem 1rem; }}
dt {{ color: var(--soft); }}
dd {{ margin: 0; }}
.scroll {{ overflow-x: auto; margin: .75rem 0; }}
:focus-visible {{ outline: 3px solid var(--q0); outline-offset: 2px; }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; color: var(--soft); padding-bottom: .375rem; }}
th, td {{ text-align: left; padding: .25rem .75rem .25rem 0; vertical-align: top; }}
td {{ white-space: nowrap; }}
td.status {{ white-space: normal; min-width: 5.25rem; }}
td.words {{ white-space: normal; min-width: 15rem; }}
th[scope=row] {{ font-weight: 400; min-width: 10.5rem; }}
th[scope=row].short {{ min-width: 0; white-space: nowrap; }}
@media (min-width: 50rem) {{ th[scope=row] {{ min-width: 22rem; }} }}
thead th {{ border-bottom: 2px solid var(--line); vertical-align: bottom; }}
tbody tr {{ border-bottom: 1px solid var(--line); }}
.number {{ text-align: right; min-width: 0 !important; }}
tr.bad td, tr.bad th {{ background: var(--bad-back); }}
tr.bad .status, .bad-word {{ color: var(--bad); font-weight: 600; }}
details details {{ margin-left: .75rem; }}
details {{ border-top: 1px solid var(--line); }}
details[open] {{ padding-bottom: .75rem; }}
summary {{ cursor: pointer; padding: .5rem 0; }}
figure {{ margin: .75rem 0 1.25rem; }}
figcaption {{ font-size: .875rem; color: var(--soft); max-width: 48rem; }}
svg {{ display: block; max-width: 100%; height: auto; }}
svg text {{ fill: var(--fore); font-size: 12px; }}
svg .soft {{ fill: var(--soft); font-size: 11px; }}
.heat path {{ fill: none; stroke-width: 1; shape-rendering: crispEdges; }}
.heat {{ margin-bottom: .375rem; }}
.heat path.over {{
  stroke: #000; stroke-width: .16; stroke-dasharray: .6 .4; stroke-dashoffset: -.2;
}}
.legend {{ display: flex; flex-wrap: wrap; gap: .25rem .875rem; padding: 0; list-style: none; }}
.legend li {{ white-space: nowrap; font-size: .875rem; margin: 0; }}
.legend i {{
  display: inline-block; width: 1rem; height: 1rem; margin-right: .375rem;
  vertical-align: -.125rem; position: relative;
}}
.legend i.over::after {{
  content: ""; position: absolute; left: 20%; width: 60%; top: 43%; height: 14%;
  background: #000;
}}
{_PAINT}
.flow .edge {{ fill: none; stroke: var(--soft); stroke-width: 1.5; }}
.flow .name {{ font-size: 12px; }}
.flow .head {{ font-weight: 600; font-size: 13px; }}
.flow .mark {{ stroke-width: 2; fill: var(--back); stroke: var(--good); }}
.flow .mark.none {{ stroke: var(--none); stroke-dasharray: 2 2; }}
.flow .mark.wrong {{ stroke: var(--bad); }}
.flow .mark.first {{ stroke: var(--bad); fill: var(--bad); }}
.flow .row.wrong text.words {{ fill: var(--bad); }}
.flow .row.first text.words {{ fill: var(--bad); font-weight: 700; }}
.flow rect.first {{ fill: var(--bad-back); stroke: var(--bad); }}
.curve .grid {{ stroke: var(--line); stroke-width: 1; }}
.curve .limit {{ stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 6 4; }}
.curve .line {{ fill: none; stroke-width: 1.75; }}
.curve .lead {{ fill: none; stroke-width: .75; }}
"""
