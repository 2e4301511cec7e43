"""Writes the README's figures, docs/figures.md and the table of docs/kernels.md from the kept results: none is typed.

python benchmarks/figures.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from server_figures import attack, serving, soak

from foredraft.machine import vectors

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any] | None:
    """A results file, or None if that was not measured yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def machine(data: dict[str, Any]) -> str:
    found = data["provenance"]["machine"]
    return f"{found['cores']} cores of an {found['cpu']}, no accelerator, {data['provenance']['date'][:10]}"


def demo(data: dict[str, Any]) -> list[str]:
    """The demo's table over its kept runs: the middle speed-up, with the lowest and highest."""
    runs = data["runs"]
    lines = [
        f"**Speed.** `foredraft demo`, {len(runs)} runs: SmolLM2-135M-Instruct (4-bit GGUF), `{runs[0]['drafter']}`, "
        "draft length `auto`, greedy, one request at a time, plain and speculative alternating in each run "
        f"({machine(runs[0])}).",
        "",
        "| prompt | same text | speed-up: median (lowest–highest) | α | τ | target calls saved |",
        "|---|---|---|---|---|---|",
    ]
    for rows in zip(*([*run["prompts"], run["total"]] for run in runs), strict=True):
        speeds, spec = sorted(row["speed_up"] for row in rows), rows[0]["speculative"]
        same = all(row["same_text"] for row in rows)
        lines.append(
            f"| {rows[0].get('name', 'all')} | {'yes' if same else 'no'} | {statistics.median(speeds):.2f}x "
            f"({speeds[0]:.2f}–{speeds[-1]:.2f}) | {ratio(spec['draft_acceptance_rate'])} "
            f"| {ratio(spec['mean_acceptance_length'])} | {spec['target_calls_saved']} |"
        )
    lines += ["", "α, τ and calls saved are the first run's: `auto` follows measured costs, so they vary between runs."]
    return lines


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def identity(data: dict[str, Any]) -> list[str]:
    """How many texts were the same."""
    runs = {name: part for name, part in data["parts"].items() if "identical" in part}
    lines = [
        f"**Same text.** `make bench-identity`: {data['prompts']} prompts, {data['tokens']} tokens each, greedy, "
        "lookup and a truncated copy of the model as drafters, against plain decoding of each prompt alone.",
        "",
        "| dtype | requests together | drafter | draft lengths | texts | identical |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[tuple[str, dict[str, Any]]]] = {}
    for name, part in runs.items():
        dtype, batch, drafter, k = name.split("/")
        groups.setdefault((dtype, batch.removeprefix("batch "), drafter), []).append((k.removeprefix("k="), part))
    for (dtype, batch, drafter), parts in groups.items():
        texts = sum(part["identical"] + len(part["differences"]) for _, part in parts)
        same = sum(part["identical"] for _, part in parts)
        lengths = ", ".join(k for k, _ in parts)
        lines.append(f"| {dtype} | {batch} | `{drafter}` | {lengths} | {texts} | {same} |")
    return lines


def identity_qwen(data: dict[str, Any]) -> list[str]:
    """The larger pair of one family."""
    [(name, part)] = [(name, part) for name, part in data["parts"].items() if "identical" in part]
    dtype, batch, drafter, k = name.split("/")
    texts = part["identical"] + len(part["differences"])
    return [
        f"The larger pair, once: `{data['target']}` with `{drafter}`, {dtype}, {batch.replace('batch ', '')} requests "
        f"together, {k.replace('=', ' = ')}, {data['tokens']} tokens each: {part['identical']} of {texts} texts "
        f"identical, {part['accepted'] / part['drafted']:.0%} of the drafted tokens accepted."
    ]


def law(data: dict[str, Any]) -> list[str]:
    """Two-sample tests."""
    lines = [
        f"**Same law.** `make bench-law`: {data['target']}, T = {data['temperature']:g}, drafts of {data['k']} tokens; "
        "chi-square tests of the first drafted tokens against plain decoding (small p-values would mean another law).",
        "",
        "| rule | samples each | acceptance rate | p, second token | p, third token | p, pair |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in data["summary"].items():
        lines.append(
            f"| {name} | {row['samples']} | {row['acceptance_rate']:.2f} | {row['p_second']:.2f} "
            f"| {row['p_third']:.2f} | {row['p_pair']:.2f} |"
        )
    return lines


def overhead(data: dict[str, Any]) -> list[str]:
    """What a step costs outside the forward passes."""
    lines = [
        f"**Overhead.** `make bench-overhead`: time of a step at k = {data['k']} outside the models' passes, median.",
        "",
        "| drafter, sampling | step | outside passes | share |",
        "|---|---|---|---|",
    ]
    for name, part in data["parts"].items():
        lines.append(
            f"| {name} | {part['step_ms_median']:.1f} ms | {part['outside_ms_median']:.2f} ms "
            f"| {part['outside_share_median']:.1%} |"
        )
    for name in ("lookup, greedy", "lookup, T=1, block"):
        lines += ["", *profile(name, data["parts"][name]["profile"])]
    return lines


def kernels(data: dict[str, Any]) -> list[str]:
    """Products by rows, beside what memory and multipliers give."""
    most, weights = data["byte_products_per_s"], data["weights"]
    lines = [
        "| weights | inputs | MB | 1 | 2 | 4 | 8 | 16 | torch, 1 | torch, 8 | share | 8/1 | of multipliers |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in data["results"]:
        kind, _, inputs = result["format"].partition(":")
        cells = {cell["rows"]: cell for cell in result["passes"]}
        theirs = [cells[rows].get("torch_ms_min") for rows in (1, 8)]
        used = weights * 16 / cells[16]["ms_min"] * 1e3 / most if inputs == "int8" and most else None
        shown = [f"{result['bytes'] / 1e6:.0f}", *(f"{cell['ms_min']:.1f}" for cell in cells.values())]
        shown += ["–" if ms is None else f"{ms:.1f}" for ms in theirs]
        shown += [f"{result[name]:.2f}" for name in ("share_of_bandwidth", "cost8_over_cost1")]
        lines.append(f"| {' | '.join([kind, inputs or 'float32', *shown, ratio(used)])} |")
    speed = max(result["bandwidth_gb_s"] for result in data["results"])
    where = f"{data['threads']} threads on {machine(data)} (`{data['isa']}`)"
    gave = f"memory gave {speed:.0f} GB/s, the multipliers {most / 1e9:.0f} G byte products a second."
    lines += ["", f"Measured with {where}; {gave}"]
    return lines


def between(path: Path, name: str, lines: list[str]) -> None:
    """Puts lines between two marks of a page."""
    text, start, end = path.read_text(), f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    head, rest = text.split(start)
    _, tail = rest.split(end)
    path.write_text(f"{head}{start}\n" + "\n".join(lines) + f"\n{end}{tail}")


def profile(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Where a step's time goes, by function; a profiler's own cost is in it, so shares tell more than times."""
    steps = rows[0]["calls"]
    lines = [
        f"Profile of *{name}*, microseconds a step under a profiler, callees included and without them:",
        "",
        "| function | calls a step | with callees | alone |",
        "|---|---|---|---|",
    ]
    for row in rows:
        where, _, function = row["where"].rpartition(" ")
        lines.append(
            f"| `{function}` in {where.partition(':')[0]} | {row['calls'] / steps:.1f} "
            f"| {row['total_s'] / steps * 1e6:.0f} | {row['own_s'] / steps * 1e6:.0f} |"
        )
    return lines


def embedded_head(data: dict[str, Any]) -> list[str]:
    """The embedded head by kind of text and temperature, beside lookup."""
    settings, share = data["settings"], data["parts"]["costs of a step"]["share_of_target_pass"]
    packed = settings["dtype"] == "auto"
    inputs = f"4 bits with inputs {settings['activations']}" if packed else f"dequantised to {settings['dtype']}"
    rows = {name: part["methods"] for name, part in data["parts"].items() if "methods" in part}
    shown = [method for method in next(iter(rows.values())) if method != "plain"]
    lines = [
        "**The embedded head.** `python benchmarks/eagle.py`: SmolLM2-135M-Instruct, "
        f"{inputs}, {settings['prompts']} prompts a kind of text, {settings['tokens']} tokens each, "
        f"one request at a time, the methods in turn ({machine(data)}). *Tokens a pass / speed over plain decoding*; "
        f"α by position is that of chains of five. A step of the head alone took {share['step_alone']:.0%} of a pass, "
        f"a token of a draft of five {share['token_of_a_draft_of_5']:.0%}.",
        "",
        "| text | " + " | ".join(shown) + " | α by position |",
        "|---" * (len(shown) + 2) + "|",
    ]
    for name, found in rows.items():
        cells = [f"{ratio(found[m]['tokens_per_pass'])} / {ratio(found[m]['speedup'])}x" for m in shown]
        alpha = " ".join(ratio(a) for a in found["eagle3 k=5"]["alpha_by_position"])
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {alpha} |")
    return lines


def article(data: dict[str, Any]) -> list[str]:
    """The character-model study's exactness."""
    c = data["table_c"]
    low, high = c["noise_band"]
    lines = [
        "**The first reference study again.** `foredraft lab article`: two character models of our own, 60,000 samples "
        f"at the position where they differ most (total variation {c['tv_max']:.2f}). Total variation from the "
        f"target's law; 95 % of true samples lie between {low:.4f} and {high:.4f}.",
        "",
        "| drawn by | total variation |",
        "|---|---|",
    ]
    names = {"direct": "the target itself", "naive": "rejection without its residual (wrong on purpose)"}
    lines += [f"| {names.get(row['name'], row['name'])} | {row['tv']:.4f} |" for row in c["rows"]]
    b = data["table_b"]
    best = max(b["rows"], key=lambda row: row["measured"])
    lines += [
        "",
        f"Best draft length end to end: k = {b['best_k_measured']}, {best['measured']:.2f} times plain decoding "
        f"(Leviathan's formula from α and c: k = {b['best_k_predicted']}).",
    ]
    return lines


def brief() -> list[str]:
    """The README's few lines; the tables stand in docs/figures.md and docs/benchmarks.md."""
    lines = []
    if (runs := load("demo")) is not None:
        rows = list(zip(*([*run["prompts"], run["total"]] for run in runs["runs"]), strict=True))
        lines += [
            f"`foredraft demo`, {len(runs['runs'])} runs: SmolLM2-135M-Instruct (4-bit GGUF), greedy, one request at a "
            f"time, plain and speculative in turn ({machine(runs['runs'][0])}):",
            "",
            "| | " + " | ".join(row[0].get("name", "all") for row in rows) + " |",
            "|---" * (len(rows) + 1) + "|",
        ]
        speeds = [sorted(row["speed_up"] for row in each) for each in rows]
        middle = [f"{statistics.median(each):.2f}x ({each[0]:.2f}–{each[-1]:.2f})" for each in speeds]
        lines += ["| over plain decoding | " + " | ".join(middle) + " |", ""]
    if (data := load("identity")) is not None:
        parts = [part for part in data["parts"].values() if "identical" in part]
        texts = sum(part["identical"] + len(part["differences"]) for part in parts)
        same = sum(part["identical"] for part in parts)
        lines.append(
            f"- **Same text**: {same} of {texts} greedy texts are plain decoding's, token for token, over two dtypes, "
            "two drafters, draft lengths 1 to 8, alone and in batches."
        )
    if (data := load("law")) is not None:
        rules = ", ".join(f"{name} {row['p_pair']:.2f}" for name, row in data["summary"].items())
        samples = max(row["samples"] for row in data["summary"].values())
        lines.append(
            f"- **Same law**: up to {samples} samples a rule at T = 1 against plain decoding, p of the pair: {rules}."
        )
    if (data := load("overhead")) is not None:
        parts = data["parts"]
        shares = ", ".join(f"{name} {parts[name]['outside_share_median']:.1%}" for name in list(parts)[:3])
        lines.append(f"- **Overhead**: share of a step at k = {data['k']} outside the models' passes: {shares}.")
    for name in ("speed", "speed-smollm2-135m-avx512"):  # the same bench on two kinds of processor
        if (data := load(name)) is not None:
            lines += bench(data)
    return lines


def bench(data: dict[str, Any]) -> list[str]:
    """What the bench beside other engines found."""
    summary, said = data["summary"], []
    if (plain := summary.get("plain_vs_best_peer")) is not None:
        said.append(f"plain decoding is {plain:.2f} times the fastest peer's plain decoding")
    if (spec := summary.get("speculative_vs_best_peer")) is not None:
        said.append(f"speculative decoding {spec['geomean']:.2f} times each category's best peer (geometric mean)")
    if (worst := summary.get("worst_category_vs_plain")) is not None:
        said.append(f"the worst category is at {worst:.2f} of our own plain decoding")
    behind = data.get("summary_behind", {}).get("batch_vs_vllm", {})
    for size, value in (summary.get("batch_vs_vllm") or {}).items():
        if value is not None:
            peer = behind.get(size, {}).get("peer", "vLLM on a CPU")
            said.append(f"{size} requests together: {value:.2f} times the best row of vLLM that ran, {peer}")
    greedy = [cell for cell in data["cells"] if cell["part"] == "speed"]
    prompts = len({(cell["group"], *cell["prompts"]) for cell in greedy if cell["row"].startswith("openvino")})
    kind = vectors(data["provenance"]["machine"]["cpu_flags"])
    where = f"- **Beside other engines, {kind}** (`make bench`, {prompts} prompts, [all tables](docs/benchmarks.md)): "
    return [where + "; ".join(said) + "."] if said else []


def main() -> None:
    sections = []
    for name, write in (
        ("demo", demo),
        ("identity", identity),
        ("identity-qwen", identity_qwen),
        ("law", law),
        ("overhead", overhead),
        ("eagle", embedded_head),
        ("eagle-bf16", embedded_head),
        ("article", article),
        ("serving", serving),
        ("soak", soak),
        ("attack", attack),
    ):
        data = load(name)
        if data is not None:
            sections.append("\n".join(write(data)))
    page = ROOT / "docs" / "figures.md"
    page.write_text(
        "# Figures\nWritten by `make figures` from the results kept under `benchmarks/results`. Speed beside other "
        "engines is in [benchmarks.md](benchmarks.md).\n\n" + "\n\n".join(sections) + "\n"
    )
    between(ROOT / "README.md", "figures", brief())
    if (data := load("kernels")) is not None:
        between(ROOT / "docs" / "kernels.md", "kernels", kernels(data))


if __name__ == "__main__":
    main()
