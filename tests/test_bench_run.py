"""The bench's machinery with a real worker process and, where the small model is here, real decoding."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from foredraft.bench import session
from foredraft.bench.client import Worker, WorkerError, thread_settings
from foredraft.bench.environments import ENVIRONMENTS, Environment, UnavailableError, ensure
from foredraft.bench.plan import PRESETS, Preset, plan
from foredraft.bench.rows import ENGINES, Row, Setting, all_rows
from foredraft.bench.runner import SOURCE, Bench
from foredraft.bench.store import Store
from foredraft.bench.workloads import Prompt, categories, long_prompt, mix, of_category, prompts
from foredraft.cli.main import run
from foredraft.errors import ConfigError
from foredraft.models import catalog

TARGET = "smollm2-135m"
needs_model = pytest.mark.skipif(catalog.resolve(TARGET) is None, reason="the small real model is not here")
TINY = Preset(None, 12, 1, 1, (2,), (64,))

ECHO = """
import time
from foredraft.bench.workers.serve import Generation, Request, serve

class Echo:
    def load(self, row, options):
        print("engines print what they like")
        if options.get("missing"):
            raise OSError("no such library")
        return {"version": "1"}

    def generate(self, row, request):
        if request.prompts[0][0] == 666:
            raise SystemExit(3)
        return Generation([p * 9 for p in request.prompts], 9 * len(request.prompts), 1.0, 0.1, 1)

    def cost(self, row, rows, context, repeats):
        raise NotImplementedError("closed")

serve(Echo())
"""


class Said:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def status(self, text: str) -> None:
        """Not kept."""


class EchoBench(Bench):
    """A bench whose engine is a real process with an engine of ten lines."""

    script: Path

    def _start(self, row: Row) -> Worker:
        return Worker([sys.executable, str(self.script)], self.script.with_suffix(".log"), thread_settings(1))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "echo.py"
    path.write_text(ECHO)
    return path


def some_rows() -> list[Row]:
    plain = Row("echo plain", "echo", "plain", "w", "a", "echo", "", batches=True)
    return [
        plain,
        Row("echo lookup", "echo", "lookup", "w", "a", "echo", ""),
        Row("echo broken", "echo", "broken", "w", "a", "other", "", {"missing": True}),
        Row("echo gone", "echo", "gone", "w", "a", "echo", "", absent="no wheel"),
    ]


def ids(poison: str = "") -> dict[str, tuple[Prompt, list[int]]]:
    every = [session.WARM_UP, *prompts(), Prompt("context-64", "context 64", "", "", [])]
    return {p.id: (p, [666 if p.id == poison else n]) for n, p in enumerate(every)}


def bench(script: Path, store: Store, poison: str = "") -> tuple[EchoBench, Said]:
    said = Said()
    made = EchoBench(some_rows(), ids(poison), store, said, threads=1, pause=0.0)
    made.script = script
    made.prepare(lambda row: 0)
    return made, said


def test_everything_is_run_once_and_resumed(script: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "cells.jsonl")
    first, said = bench(script, store)
    blocks = plan(some_rows(), TINY)
    assert first.run(blocks[:2], None)
    first.close()
    half = len(store.cells)
    rows = {entry["name"]: entry for entry in store.of_kind("row")}
    assert rows["echo gone"]["note"] == "no wheel"
    assert "no such library" in rows["echo broken"]["note"]
    assert not rows["echo broken"]["ran"]
    assert rows["echo plain"]["ran"]
    assert any("not run: no wheel" in line for line in said.lines)

    with store.path.open("a") as file:
        file.write('{"kind": "cell", "key": "cut in the mid')  # the power went off
    store = Store(tmp_path / "cells.jsonl")
    second, _ = bench(script, store)
    assert second.run(blocks, None)
    second.close()
    counts = Counter(cell["key"] for cell in store.cells)
    assert set(counts.values()) == {1}
    assert half < len(counts)
    speed = [cell["row"] for cell in store.cells if cell["part"] == "speed"]
    assert speed[:4] == ["echo plain", "echo lookup", "echo lookup", "echo plain"]  # in turn, another one first
    assert {cell["part"] for cell in store.cells} == {"curve", "speed", "batch", "context", "sampled", "warm"}
    assert all("refused" in cell for cell in store.cells if cell["part"] == "curve")
    assert Store(tmp_path / "cells.jsonl").forget("echo l*") == sum("lookup" in key for key in counts)
    assert {c["row"] for c in Store(tmp_path / "cells.jsonl").cells} == {"echo plain"}


def test_nothing_is_begun_after_the_deadline(script: Path, tmp_path: Path) -> None:
    made, _ = bench(script, Store(tmp_path / "cells.jsonl"))
    assert not made.run(plan(some_rows(), TINY), time.monotonic() - 1)
    made.close()
    assert made.total == 0


def test_a_process_that_dies_takes_only_its_rows_along(script: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "cells.jsonl")
    poison = of_category(categories()[2])[0].id
    made, said = bench(script, store, poison)
    assert made.run(plan(some_rows(), TINY), None)
    made.close()
    assert {cell["group"] for cell in store.cells if cell["part"] == "speed"} == set(categories()[:2])
    assert [entry["row"] for entry in store.of_kind("failure")] == ["echo plain"]
    assert any("its process ended" in line for line in said.lines)


def test_slow_rows_rest(script: Path, tmp_path: Path) -> None:
    made, said = bench(script, Store(tmp_path / "cells.jsonl"))
    made.spent = {"echo plain": 1.0, "x": 1.0, "echo lookup": 9.0}
    made.run([block for block in plan(some_rows(), PRESETS["standard"]) if "prompt 2" in block.name][:1], None)
    made.close()
    assert {cell["row"] for cell in made.store.cells} == {"echo plain"}
    assert any("resting: echo lookup" in line for line in said.lines)


def test_a_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "hang.py"
    path.write_text("import time; time.sleep(60)")
    worker = Worker([sys.executable, str(path)], tmp_path / "log", {})
    with pytest.raises(WorkerError, match="no answer"):
        worker.ask({"op": "load"}, timeout=0.2)
    assert not worker.alive


def test_workers_start_without_foredraft(tmp_path: Path) -> None:
    """As in a peer's environment: isolated, so that only the start script leads to the package."""
    command = [sys.executable, "-I", str(SOURCE / "start.py"), "url_worker"]
    worker = Worker(command, tmp_path / "log", {})
    with pytest.raises(WorkerError, match="URLError"):
        worker.ask({"op": "load", "row": "x", "options": {"url": "http://127.0.0.1:9"}}, timeout=60)
    worker.close()


def test_an_environment_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path))
    monkeypatch.setitem(ENVIRONMENTS, "llama.cpp", Environment((str(tmp_path / "nothing.whl"),), "xllamacpp"))
    with pytest.raises(UnavailableError, match=r"cannot be made: .*nothing\.whl"):
        ensure("llama.cpp", lambda text: None)
    assert set(ENVIRONMENTS) == set(ENGINES) - {"foredraft"}


def test_prompts_are_complete_and_licensed() -> None:
    counts = Counter(prompt.category for prompt in prompts())
    assert len(counts) == 8
    assert min(counts.values()) >= 8
    assert {prompt.licence for prompt in prompts()} <= {"Apache-2.0", "MIT"}
    assert all(prompt.source and prompt.messages[-1]["role"] == "user" for prompt in prompts())
    assert len({prompt.id for prompt in prompts()}) == len(prompts())
    assert [prompt.category for prompt in mix(9)] == [*categories(), categories()[0]]


@needs_model
def test_rows_that_cannot_be_had_say_why() -> None:
    rows = all_rows(Setting(TARGET, None, 2, 512, lambda text: None), ("openvino", "llama.cpp"))
    absent = {row.name: row.absent for row in rows if row.absent}
    assert list(absent) == ["openvino draft model", "llama.cpp draft model"]
    assert "vocabulary" in absent["openvino draft model"]
    assert all(row.baseline in {other.name for other in rows} for row in rows)


@pytest.mark.parametrize("bfloat16", [True, False])
def test_vllm_speculates_in_its_best_precision(bfloat16: bool) -> None:
    rows = all_rows(Setting(TARGET, None, 2, 512, lambda text: None, bfloat16=bfloat16), ("vllm",))
    by_name = {row.name: row for row in rows}
    suffix = by_name["vllm suffix" if bfloat16 else "vllm suffix (float32)"]
    assert (
        suffix.options["dtype"] == by_name[suffix.baseline].options["dtype"] == ("bfloat16" if bfloat16 else "float32")
    )
    assert (by_name["vllm plain"].absent is None) == bfloat16
    assert by_name["vllm plain (float32)"].absent is None
    assert len({row.process for row in rows}) == len(rows)


@needs_model
@pytest.mark.real_model
def test_foredraft_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real decoding through real worker processes, from the command to the page."""
    gguf = catalog.resolve(TARGET)
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(session, "PRESETS", session.PRESETS | {"quick": TINY})
    argv = ["bench", "--target", str(gguf), "--engines", "foredraft", "--rows", "foredraft lookup (int8)"]
    argv += [
        "--preset",
        "quick",
        "--parts",
        "curve,speed",
        "--max-tokens",
        "10",
        "--out",
        str(tmp_path),
        "--threads",
        "1",
    ]
    with pytest.raises(SystemExit) as stop:
        run(argv)
    assert stop.value.code in (0, None)
    [path] = (tmp_path / "benchmarks" / "results").glob("speed*.json")
    data = json.loads(path.read_text())
    assert data["identity"]["foredraft lookup (int8)"] == {"texts": 8, "identical": 8, "first_difference": None}
    assert {entry["name"] for entry in data["rows"] if entry["ran"]} == {
        "foredraft plain (int8)",
        "foredraft lookup (int8)",
    }
    assert data["summary"]["plain_vs_best_peer"] is None
    assert data["summary"]["cost8_over_cost1"]["int4"] > 0.5
    assert 0 < data["summary"]["share_of_bandwidth"] < 2
    assert all(cell["peak_memory"] > 1e7 for cell in data["cells"] if cell["part"] == "speed")


@needs_model
def test_long_prompts_have_their_length() -> None:
    from foredraft.models.gguf_file import GGUFFile
    from foredraft.models.tokenizer_gguf import tokenizer_from_gguf

    path = catalog.resolve(TARGET)
    assert path is not None
    tokenizer = tokenizer_from_gguf(GGUFFile(path).metadata, str(path))
    assert tokenizer is not None
    for size in (128, 1024, 8192):
        assert abs(len(tokenizer.chat(long_prompt(size, tokenizer).messages)) - size) < 8


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--preset", "huge"], "--preset"),
        (["--parts", "speed,dance"], "--parts"),
        (["--engines", "ollama"], "--engines"),
        (["--url", "ollama"], "--url"),
        (["--minutes", "0"], "--minutes"),
    ],
)
def test_wrong_options_are_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(["bench", *argv])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_patterns_of_rows() -> None:
    rows = some_rows()
    assert [row.name for row in session._chosen(rows, ["*lookup"])] == ["echo plain", "echo lookup"]
    with pytest.raises(ConfigError, match="no row matches"):
        session._chosen(rows, ["nobody*"])
