"""The server's parts of docs/figures.md: soak.py, attack.py and serving.py."""

from __future__ import annotations

from typing import Any

NAMES = {"plain": "foredraft, plain", "speculative": "foredraft, speculative"}


def soak(data: dict[str, Any]) -> list[str]:
    """What minutes under load left behind, and how long clients waited."""
    settings, summary = data["settings"], data["summary"]
    minutes = sum(part["seconds"] for part in data["parts"].values()) / 60
    drafters = ", ".join(f"`{name}`" for name in settings["drafters"])
    note = f"Note: {data['note']}." if "note" in data else ""
    lines = [
        f"**Soak.** `python benchmarks/soak.py`: {minutes:.0f} minutes, {settings['clients']} clients of mixed kinds "
        f"with random aborts, {settings['batch']} slots, {settings['target']}; plain and speculative servers "
        f"({drafters}, chosen by request) in turn. *Wrong* is a greedy answer that is not, token for token, what plain "
        f"decoding of that prompt alone writes. {note}".rstrip(),
        "",
        "| server | requests | aborted | compared | wrong | failed | left behind: requests, slots, bytes | tokens/s "
        "| first token, ms: p50, p99 | next tokens, ms: p50, p99 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, row in summary.items():
        left = ", ".join(str(row[f"leaked_{what}"]) for what in ("requests", "slots", "bytes"))
        lines.append(
            f"| {mode} | {row['requests']} | {row['aborted']} | {row['compared']} | {row['wrong']} | {row['failed']} "
            f"| {left} | {row['tokens_per_second']:.0f} | {pair(row['first_token_ms'])} "
            f"| {pair(row['inter_token_ms'])} |"
        )
    return lines


def attack(data: dict[str, Any]) -> list[str]:
    """What is left under drafts that are never right."""
    settings = data["settings"]
    lines = [
        f"**Attack.** `python benchmarks/attack.py`: {settings['requests']} requests of {settings['tokens']} tokens, "
        f"drafts of {settings['k']}, {settings['target']}; medians over rounds. The texts stayed the same.",
        "",
        "| | throughput over plain decoding, everybody attacked | time of an honest token over no attack "
        "| drafted for attackers | rounds |",
        "|---|---|---|---|---|",
    ]
    for name, row in data["summary"].items():
        lines.append(
            f"| {name} | {row['throughput_over_plain']:.3f} | {row['honest_time_per_token_over_no_attack']:.3f} "
            f"| {row['positions_drafted_by_attackers']:.0f} | {row['rounds']} |"
        )
    return lines


def serving(data: dict[str, Any]) -> list[str]:
    """Throughput and waits by the number of clients."""
    settings, best = data["settings"], data["summary"]["best"]
    modes = list(dict.fromkeys(mode for row in best.values() for mode in row))
    lines = [
        f"**Serving.** `python benchmarks/serving.py`: greedy streams of {settings['tokens']} tokens, "
        f"{settings['target']}, at most {settings['batch']} decoded "
        f"together; servers in turn, the others held; best of its repeats. Ours: "
        f"{settings['activations']} activations, drafter `{settings['drafter']}`. vLLM's CPU build: the same weights "
        f"dequantised, in {settings['vllm_dtype']}.",
        "",
        "Tokens a second:",
        "",
        "| clients | " + " | ".join(NAMES.get(mode, mode) for mode in modes) + " |",
        "|---" * (len(modes) + 1) + "|",
    ]
    for clients, row in best.items():
        cells = [f"{row[mode]['tokens_per_second']:.0f}" if mode in row else "–" for mode in modes]
        lines.append(f"| {clients} | " + " | ".join(cells) + " |")
    lines += ["", "Milliseconds to the first token, median and 99th percentile:", "", *lines[4:6]]
    for clients, row in best.items():
        lines.append(
            f"| {clients} | " + " | ".join(pair(row[m]["first_token_ms"]) if m in row else "–" for m in modes) + " |"
        )
    for name, reason in data.get("absent", {}).items():
        lines += ["", f"{name} is absent: {reason}."]
    return lines


def pair(quantiles: dict[str, int | None]) -> str:
    return ", ".join("–" if quantiles[name] is None else str(quantiles[name]) for name in ("p50", "p99"))
