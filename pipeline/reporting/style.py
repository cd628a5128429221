"""The style sheet of the pages. It follows the reader's colour scheme on screen; print is always light."""

LIGHT = """
  --paper: #ffffff; --panel: #f6f7f9; --ink: #1c2128; --muted: #59636e; --grid: #d5dae0;
  --bad: #b3261e; --good: #1a7340;
"""
DARK = """
  --paper: #10141a; --panel: #191f27; --ink: #e6eaef; --muted: #9aa4b0; --grid: #343c47;
  --bad: #ff8a80; --good: #62d08f;
"""
STYLE = f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
* {{ box-sizing: border-box; }}
body {{
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}}
main {{ max-width: 76rem; margin: 0 auto; padding: 1.25rem; }}
h1 {{ font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }}
h2 {{
  font-size: 1.15rem; margin: 2.25rem 0 .75rem; padding-bottom: .25rem; border-bottom: 1px solid var(--grid);
  break-after: avoid;
}}
p {{ margin: .25rem 0; overflow-wrap: anywhere; }}
code, pre {{ font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .85em; }}
pre {{ background: var(--panel); padding: .75rem; overflow-x: auto; border-radius: 6px; }}
.state {{ font-weight: 600; }}
.state.done {{ color: var(--good); }}
.state.failed, .state.stopped, .error {{ color: var(--bad); }}
dl {{ display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0 0; }}
dl div {{ background: var(--panel); border-radius: 6px; padding: .5rem .9rem; flex: 1 1 8rem; }}
dt {{ color: var(--muted); font-size: .8rem; }}
dd {{ margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1.25rem; }}
figure {{ margin: 0; max-width: 34rem; break-inside: avoid; }}
figure svg {{ display: block; width: 100%; height: auto; }}
figure svg text {{ font-family: inherit !important; fill: var(--ink) !important; }}
figcaption {{ color: var(--muted); font-size: .82rem; }}
.wide {{ overflow-x: auto; margin: .75rem 0; }}
.beside {{ display: flex; flex-wrap: wrap; gap: 0 2.5rem; align-items: start; margin-top: 1rem; }}
.beside .wide {{ max-width: 100%; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }}
th, td {{ padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }}
th {{ color: var(--muted); font-weight: 600; }}
td:first-child {{ white-space: nowrap; }}
.number {{ text-align: right; white-space: nowrap; }}
details {{ margin: .75rem 0; }}
summary {{ cursor: pointer; color: var(--muted); }}
@media screen and (max-width: 60rem) {{
  table {{ font-size: .8rem; }}
  th, td {{ padding-right: .5rem; }}
  th.number {{ white-space: normal; }}
}}
@media screen and (max-width: 40rem) {{
  main {{ padding: .9rem; }}
  pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
  td:first-child, #digests td {{ white-space: normal; }}
  th:last-child, td:last-child {{ padding-right: 0; }}
  #digests td {{ overflow-wrap: anywhere; }}
  .stack thead {{ display: none; }}
  .stack, .stack tbody, .stack tr {{ display: block; }}
  .stack tr {{ border-bottom: 1px solid var(--grid); padding: .4rem 0; }}
  .stack td {{ display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: 0; text-align: right; }}
  .stack td::before {{ content: attr(data-label); color: var(--muted); text-align: left; flex: none; }}
  .stack td[data-label=""] {{ gap: 0; justify-content: flex-start; text-align: left; font-weight: 600; }}
  .stack td:empty {{ display: none; }}
}}
@media print {{
  :root {{ color-scheme: light; {LIGHT} }}
  main {{ max-width: none; padding: 0; }}
  details::details-content {{ content-visibility: visible; block-size: auto; }}
  .plots {{ grid-template-columns: 1fr 1fr; }}
  .wide, pre {{ overflow: visible; }}
  pre {{ white-space: pre-wrap; }}
  table {{ font-size: .68rem; }}
  th, td {{ padding-right: .5rem; overflow-wrap: anywhere; }}
  td:first-child {{ white-space: normal; }}
}}
"""
