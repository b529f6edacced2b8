"""The style of a report: readable on a telephone and on a wide screen, in light and dark, and on paper."""

from __future__ import annotations

# The classes f0 to f6 fill with a colour and s0 to s6 draw with it; f7 is for what is free.
NUM_COLORS = 7
# Dashes, so that lines differ without colour too.
_DASHES = (None, "8 4", "2 3", "10 3 2 3", "5 5", "1 3", "12 6")


def stroke(number: int) -> dict[str, object]:
    """The attributes of the line with this number."""
    return {"class_": f"line s{number % NUM_COLORS}", "stroke_dasharray": _DASHES[number % len(_DASHES)]}


# The colours of series are those of Okabe and Ito (Color universal design, 2008), which colour-blind readers can tell
# apart, made lighter for dark screens. Lines also differ in their dashes.
STYLE = """
:root {
  --page: #ffffff; --text: #1b1f24; --quiet: #57606a; --rule: #d0d7de; --panel: #f6f8fa;
  --good: #116329; --bad: #a40e26;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #9c4f7c; --c4: #8a6d00;
  --c5: #3b7dbd; --c6: #6e7781; --c7: #d8dee4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0d1117; --text: #e6edf3; --quiet: #9da7b3; --rule: #30363d; --panel: #161b22;
    --good: #56d364; --bad: #ff8c82;
    --c0: #56b4e9; --c1: #f0883e; --c2: #3ecf9e; --c3: #dd9cc4; --c4: #e3c948;
    --c5: #8ab8ff; --c6: #8b949e; --c7: #30363d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--rule); padding-bottom: .2rem; }
p { overflow-wrap: anywhere; }
.subtitle { color: var(--quiet); margin: 0; }
.verdict { font-size: 1.2rem; font-weight: 600; margin: 1rem 0 0; }
.verdict.good { color: var(--good); }
.verdict.bad { color: var(--bad); }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .2rem 1.2rem; margin: .5rem 0; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
svg { width: 100%; height: auto; max-width: 48rem; display: block; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
svg .quiet { fill: var(--quiet); }
svg .axis { stroke: var(--rule); fill: none; }
svg .line { fill: none; stroke-width: 2; }
.legend { list-style: none; padding: 0; margin: .4rem 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
.legend svg { display: inline-block; width: 3rem; height: .8rem; margin-right: .5em; }
@media (max-width: 40rem) { svg text { font-size: 17px; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--quiet); padding-bottom: .3rem; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid var(--rule); white-space: nowrap; }
td:first-child { white-space: normal; overflow-wrap: anywhere; }
.number { text-align: right; }
tr.marked td { font-weight: 600; }
pre { background: var(--panel); padding: .8rem; overflow-x: auto; border-radius: 6px; }
code { font: 14px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .5em; border: 1px solid var(--rule); }
.f0 { fill: var(--c0); background: var(--c0); } .f1 { fill: var(--c1); background: var(--c1); }
.f2 { fill: var(--c2); background: var(--c2); } .f3 { fill: var(--c3); background: var(--c3); }
.f4 { fill: var(--c4); background: var(--c4); } .f5 { fill: var(--c5); background: var(--c5); }
.f6 { fill: var(--c6); background: var(--c6); } .f7 { fill: var(--c7); background: var(--c7); }
.s0 { stroke: var(--c0); } .s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); } .s3 { stroke: var(--c3); }
.s4 { stroke: var(--c4); } .s5 { stroke: var(--c5); } .s6 { stroke: var(--c6); }
footer { margin-top: 2.5rem; color: var(--quiet); }
@media print {
  :root {
    --page: #ffffff; --text: #000000; --quiet: #444444; --rule: #bbbbbb;
    --panel: #ffffff; --good: #000000; --bad: #000000;
  }
  main { max-width: none; padding: 0; }
  .scroll { overflow: visible; }
  pre { white-space: pre-wrap; border: 1px solid var(--rule); }
  section, figure, table, pre { break-inside: avoid; }
  * { print-color-adjust: exact; }
}
"""
