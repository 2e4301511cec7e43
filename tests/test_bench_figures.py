"""The bench's arithmetic on cells made by hand, its report, and what becomes of rows that cannot be had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.bench.ceiling import Traffic
from foredraft.bench.figures import acceptance, first_difference, identity, rate
from foredraft.bench.pages import findings, html, write_pages
from foredraft.bench.results import collect, latest_rows, with_bandwidth, write
from foredraft.bench.rows import Row
from foredraft.bench.store import Store
from foredraft.bench.summary import KEYS, ceiling_shares, summarise
from foredraft.bench.tables import View, tables
from foredraft.bench.weights import label

TRAFFIC = Traffic(packed=1_000_000, numbers=2_000_000, kv_numbers=1000)
RATES = {
    "foredraft plain (int8)": {"chat": 100.0, "copy": 100.0},
    "foredraft lookup (int8)": {"chat": 99.0, "copy": 400.0},
    "openvino plain": {"chat": 50.0, "copy": 40.0},
    "openvino prompt lookup": {"chat": 45.0, "copy": 100.0},
    "vllm plain": {"chat": 25.0, "copy": 25.0},
}


def row(name: str, activations: str = "int8", parts: tuple[str, ...] = ()) -> Row:
    engine, mode = name.split(" (")[0].split(" ", 1)
    return Row(name, engine, mode, "Q4", activations, engine, "", batches=True, parts=parts)


ROWS = [row(name) for name in RATES]


def cell(name: str, part: str, group: str, speed: float, prompts: int = 1, **more: Any) -> dict[str, Any]:
    """Eleven tokens alone, the first after a second; together all tokens of all prompts."""
    seconds = 10 / speed + 1 if prompts == 1 else 11 * prompts / speed
    made = {
        **{"kind": "cell", "part": part, "row": name, "group": group, "tokens": 11, "temperature": 0.0, "repeat": 0},
        **{"prompts": [f"{group}-{i}" for i in range(prompts)], "outputs": [list(range(11))] * prompts},
        **{"written": 11 * prompts, "wall": seconds, "ttft": 1.0, "first": 1, "stats": {}, "context": 100 - 5.5},
        **{"peak_memory": 10**9, "date": "2026-01-01T00:00:00", "commit": "c0ffee", "other_cores": 0.0},
    }
    return made | {"key": f"{part}/{name}/{group}"} | more


def cells() -> list[dict[str, Any]]:
    made = [cell(name, "speed", group, speed) for name, groups in RATES.items() for group, speed in groups.items()]
    for size, ours, theirs in ((8, 300.0, 120.0), (32, 300.0, 200.0)):
        made += [cell("foredraft plain (int8)", "batch", str(size), ours, size)]
        made += [cell("vllm plain", "batch", str(size), theirs, size)]
    for name, ms in (("foredraft plain (int8)", 12.0), ("foredraft plain (bfloat16)", 11.0), ("vllm plain", 40.0)):
        made.append(cell(name, "curve", "pass", 1.0, prompts=0) | {"ms": {"1": [9.0, 10.0, 30.0], "8": [ms] * 3}})
    return made


def test_a_rate_leaves_out_the_prompt() -> None:
    assert rate(cell("x plain", "speed", "chat", 50.0)) == pytest.approx(50.0)
    assert rate(cell("x plain", "batch", "8", 300.0, 8)) == pytest.approx(300.0)
    assert rate(cell("x plain", "speed", "chat", 50.0) | {"written": 8}) is None  # too short to say anything
    assert rate(cell("x plain", "speed", "chat", 50.0) | {"ttft": None}) == pytest.approx(11 / 1.2)


def test_each_window_is_held_against_its_own_memory() -> None:
    """A bench that went on when memory was twice as fast must not make what it measured before look slow."""
    runs = [
        {"date": "2026-01-01T10:00:00", "bandwidth": [1e8, 2e8]},
        {"date": "2026-01-01T12:00:00", "bandwidth": [4e8]},
    ]
    plain = "foredraft plain (int8)"
    early = cell(plain, "speed", "chat", 100.0, date="2026-01-01T10:30:00")
    late = cell(plain, "speed", "copy", 200.0, date="2026-01-01T12:00:00")
    first = cell(plain, "speed", "other", 100.0, date="2026-01-01T09:00:00")
    made = with_bandwidth([early, late, first], runs)
    assert [each["bandwidth"] for each in made] == [2e8, 4e8, None]
    shares = ceiling_shares(made, row(plain), TRAFFIC, 1e8)
    assert shares == pytest.approx([0.7, 0.7, 1.4])


def test_summary_by_hand() -> None:
    rows = [*ROWS, row("foredraft plain (bfloat16)", "bfloat16", ("curve",))]
    found = summarise(cells(), rows, TRAFFIC, bandwidth=2e8, overhead=0.02)
    assert list(found.values) == list(KEYS)
    assert found.values["plain_vs_best_peer"] == pytest.approx(2.25)  # median of 100/50 and 100/40
    speculative = found.values["speculative_vs_best_peer"]
    assert speculative["chat"] == pytest.approx(99 / 50)  # their plain decoding is the best they have there
    assert speculative["copy"] == pytest.approx(400 / 100)
    assert speculative["geomean"] == pytest.approx((99 / 50 * 4) ** 0.5)
    assert found.values["worst_category_vs_plain"] == pytest.approx(0.99)
    # A step reads 1 MB of weights and 100 tokens x 1000 numbers x 4 bytes: 200 MB/s allow 142.9 a second.
    assert found.values["share_of_bandwidth"] == pytest.approx(100 * 1.4e6 / 2e8)
    assert found.values["cost8_over_cost1"] == pytest.approx({"int4": 1.2, "bf16": 1.1})
    assert found.values["batch_vs_vllm"] == pytest.approx({"8": 2.5, "32": 1.5})
    assert found.values["overhead_share"] == 0.02
    assert found.reasons == {}


def test_what_was_not_measured_is_none_with_a_reason() -> None:
    ours = [c for c in cells() if c["row"].startswith("foredraft") and c["part"] == "speed"]
    found = summarise(ours, ROWS, None, None, None)
    assert found.values["worst_category_vs_plain"] == pytest.approx(0.99)
    absent = {key for key in KEYS if found.values[key] is None}
    assert absent == set(KEYS) - {"worst_category_vs_plain"}
    assert absent <= set(found.reasons)
    assert all(found.reasons.values())


def test_categories_that_were_not_reached_are_named() -> None:
    found = summarise(cells(), ROWS, TRAFFIC, 2e8, 0.02, ["chat", "copy", "maths"])
    assert found.values["speculative_vs_best_peer"]["maths"] is None
    assert found.values["speculative_vs_best_peer"]["copy"] == pytest.approx(4.0)
    assert "speculative_vs_best_peer, maths" in found.reasons


def test_one_row_of_ours_stands_for_all_categories() -> None:
    """A user runs one drafter; the best of each category would flatter."""
    rows = [*ROWS, row("foredraft model (int8)")]
    more = [
        cell("foredraft model (int8)", "speed", "chat", 500.0),
        cell("foredraft model (int8)", "speed", "copy", 60.0),
    ]
    found = summarise([*cells(), *more], rows, TRAFFIC, 2e8, None)
    assert found.behind["speculative_vs_best_peer"]["ours"] == "foredraft lookup (int8)"
    assert found.values["speculative_vs_best_peer"]["chat"] == pytest.approx(99 / 50)


def test_ratios_only_compare_the_same_prompt() -> None:
    """A peer that ran fewer prompts is compared on those alone."""
    other = cell("openvino plain", "speed", "chat", 1.0, repeat=1)
    found = summarise([*cells(), other], ROWS, TRAFFIC, 2e8, None)
    assert found.values["plain_vs_best_peer"] == pytest.approx(2.25)


def test_identity_names_the_first_difference() -> None:
    made = cells()
    made[3]["outputs"] = [[0, 1, 2, 99, *range(4, 11)]]  # lookup, copy
    found = identity(made, {r.name: r.baseline for r in [*ROWS, row("foredraft plain (bfloat16)", "bfloat16")]})
    assert found["foredraft lookup (int8)"] == {"texts": 2, "identical": 1, "first_difference": 3}
    assert found["openvino prompt lookup"] == {"texts": 2, "identical": 2, "first_difference": None}
    assert "openvino plain" not in found
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_acceptance_is_pooled() -> None:
    stats = [{"drafted": 10, "accepted": 5, "spec_steps": 5}, {"drafted": 30, "accepted": 3, "spec_steps": 11}]
    made = [cell("foredraft lookup (int8)", "speed", str(i), 1.0, stats=s) for i, s in enumerate(stats)]
    assert acceptance(made) == {"foredraft lookup (int8)": {"alpha": 8 / 40, "tau": 1 + 8 / 16}}


def facts(r: Row, ran: bool, note: str) -> dict[str, Any]:
    names = ("name", "engine", "mode", "weights", "activations", "batches")
    found = {name: getattr(r, name) for name in names}
    return found | {"parts": list(r.parts), "ran": ran, "note": note, "date": "2026-01-02T00:00:00"}


def filled(path: Path) -> Store:
    store = Store(path / "cells.jsonl")
    for r in [*ROWS, row("foredraft plain (bfloat16)", "bfloat16", ("curve",))]:
        store.add("row", facts(r, True, "ran with 1.0"))
    store.add("row", facts(row("llama.cpp plain"), False, "building it needs cc"))
    for made in cells():
        store.add("cell", made)
    store.add("run", {"date": "2026-01-02T00:00:00", "threads": 2, "bandwidth": [1e8, 2e8], "preset": "quick"})
    return store


def test_results_and_pages(tmp_path: Path) -> None:
    store = filled(tmp_path)
    results = collect("smollm2-135m", store, TRAFFIC, tmp_path)
    write(results, tmp_path)
    kept = tmp_path / "benchmarks" / "results"
    data = json.loads((kept / "speed.json").read_text())
    assert list(data["summary"]) == list(KEYS)
    assert data["bandwidth"] == 2e8
    assert "outputs" not in data["cells"][0]
    page = (kept / "speed.html").read_text()
    text = (tmp_path / "docs" / "benchmarks.md").read_text()
    for shown in (page, text):
        assert "not run: building it needs cc" in shown
        assert "2026-01-02" in shown
        assert "2.25 times the fastest peer" in shown
    assert data["cells"][0]["row"] == "foredraft plain (int8)"
    assert page.count("<svg") == 4  # of five pictures only that of contexts has nothing to show
    assert "<script" not in page
    assert "http" not in page.split("<svg")[0]
    assert (tmp_path / "docs" / "img" / "bench-batch.png").exists()
    assert "img/bench-context.png" not in text
    write_pages(tmp_path)
    assert (tmp_path / "docs" / "benchmarks.md").read_text() == text  # the same from the kept file alone


def test_tables_say_what_cells_say(tmp_path: Path) -> None:
    view = View.of(collect("smollm2-135m", filled(tmp_path), TRAFFIC, None).data)
    by_title = {table.title: table for table in tables(view)}
    speed = {line[0]: line[1:] for line in by_title["Speed by kind of text"].rows}
    assert speed["foredraft lookup (int8)"] == ["99", "400", "199"]
    gains = {line[0]: line[1:] for line in by_title["What speculation gains"].rows}
    assert gains["openvino prompt lookup"] == ["0.90", "2.50", "1.50"]
    passes = {line[0]: line[-1] for line in by_title["What verifying k+1 tokens costs"].rows}
    assert passes == {"foredraft plain (int8)": "1.20", "foredraft plain (bfloat16)": "1.10", "vllm plain": "4.00"}
    alone = {line[0]: line[1:] for line in by_title["Acceptance, identity, first token, ceiling, memory"].rows}
    assert alone["foredraft lookup (int8)"][2] == "2 of 2"
    assert alone["foredraft plain (int8)"][-3:] == ["143", "70%", "1000"]
    assert "Warm" not in by_title
    assert any("overhead_share" in line for line in findings(view))
    assert "<h1>" in html(view)


def test_a_row_that_ran_is_not_called_absent_later() -> None:
    made = [facts(ROWS[0], True, "ran with 1.0"), facts(ROWS[0], False, "no memory"), facts(ROWS[2], False, "no wheel")]
    found = {entry["name"]: entry for entry in latest_rows(made)}
    assert found[ROWS[0].name]["ran"]
    assert found[ROWS[2].name]["note"] == "no wheel"


def test_files_of_a_bench_keep_the_whole_name_of_its_target() -> None:
    assert label("qwen2.5-coder-1.5b") == "qwen2.5-coder-1.5b"
    assert label("/models/my-model.v1.gguf") == "my-model.v1"
