"""The page's style sheet; the colours named here are the variables of the pictures too."""

CSS = """
:root { --ink: #1d2430; --faint: #6b7482; --blue: #2563b0; --orange: #c2570c; --green: #1f8a4c; --red: #b3261e;
  --grid: #dfe3ea; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --faint: #9aa4b5; --blue: #7fb2f5; --orange: #f0a05f; --green: #63cf91; --red: #f28b82;
    --grid: #333b48; --paper: #14181f; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif; }
main { max-width: 54rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
p, dl, ul { max-width: 44rem; }
.lead { padding: .8rem 1rem .8rem 2rem; border-left: 4px solid var(--blue);
  background: color-mix(in srgb, var(--blue) 8%, transparent); }
.warn { color: var(--red); font-weight: 600; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .35rem .8rem .35rem 0; text-align: right; border-bottom: 1px solid var(--grid); vertical-align: top; }
th[scope=row], th[scope=col]:first-child { text-align: left; }
thead th { font-weight: 500; color: var(--faint); vertical-align: bottom; max-width: 8rem; }
tbody th { font-weight: 600; }
small { display: block; color: var(--faint); white-space: nowrap; }
.seed { color: var(--faint); }
code { font-size: .9em; white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; }
figure svg { width: 100%; min-width: 26rem; max-width: 44rem; height: auto; }
figcaption { color: var(--faint); font-size: .9rem; max-width: 44rem; }
@media (min-width: 40rem) { caption { white-space: nowrap; } }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; }
dt { color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; }
"""
