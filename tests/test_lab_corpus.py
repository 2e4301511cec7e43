"""The study's text: deterministic, read and never run, and refused with a remedy when it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.errors import ConfigError
from foredraft.lab import corpus as module
from foredraft.lab.corpus import BLOCK, Corpus, load_corpus, make_corpus

WORDS = "the quick brown fox jumps over the lazy dog and runs away from all of it"


def prose(n: int) -> list[str]:
    return [f"{WORDS} {i}" for i in range(n)]


def test_python_prose_is_deterministic_and_named() -> None:
    first, second = load_corpus("english", max_chars=60_000), load_corpus("english", max_chars=60_000)
    assert first.sha256 == second.sha256
    assert len(first.text) > 55_000
    assert first.licence == "PSF-2.0"
    assert "Python" in first.source
    assert "assert" in first.text


def test_paragraphs_are_kept_once_and_rare_characters_dropped() -> None:
    text = make_corpus("x", "x", "x", [*prose(400), *prose(400), "☃ snow"])
    paragraphs = text.text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    assert "☃" not in text.alphabet
    assert text.dropped == 1
    assert text.decode(text.encode(text.text)) == text.text


def test_held_out_blocks_are_not_trained_on() -> None:
    text = make_corpus("x", "x", "x", prose(2_000))
    training, held_out = text.split()
    assert len(training) + sum(map(len, held_out)) == len(text.text)
    assert held_out[0] == text.encode(text.text)[9 * BLOCK : 10 * BLOCK]
    joined = text.decode(training)
    assert text.decode(held_out[0])[:200] not in joined


def test_reading_python_never_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    bomb = f"open({str(marker)!r}, 'w')\n"
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text(bomb + f"topics = {{'a': {chr(10).join(prose(400))!r}}}")
    (tmp_path / "module.py").write_text(f"'''a docstring that is read'''\n{bomb}")
    (tmp_path / "broken.py").write_text("def (")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _name: str(tmp_path))
    text = load_corpus("english").text
    assert "a docstring that is read" in text
    assert WORDS in text
    assert not marker.exists()


def test_korean_is_spelt_in_jamo_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "".join(f"<p>데비안은 자유 운영체제입니다 {i}</p>" for i in range(900))
    (tmp_path / "a.ko.html").write_text(f"<head><title>x</title></head>{page}<p>navigation</p>", encoding="utf-8")
    monkeypatch.setattr(module, "KOREAN_FILES", (("some-package", tmp_path, "GPL"),))
    text = load_corpus("korean")
    assert text.vocab_size < 60
    assert "데비안은 자유" in text.decode(text.encode(text.text)[:400])
    assert "navigation" not in text.text
    assert text.source == "Debian packages some-package"


def test_missing_korean_names_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "KOREAN_FILES", (("debian-faq-ko", tmp_path / "none", "GPL"),))
    with pytest.raises(ConfigError, match="install the Debian package debian-faq-ko"):
        load_corpus("korean")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("absent.txt", None, "cannot read"),
        ("binary.txt", b"\xff\xfe\x00" * 10_000, "not UTF-8"),
        ("short.txt", b"too short", "fewer than"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_corpus(str(tmp_path / name))
    assert caught.value.field == "corpus"


def test_a_text_file_is_a_corpus(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("\n\n".join(prose(400)), encoding="utf-8")
    text = load_corpus(str(path))
    assert isinstance(text, Corpus)
    assert (text.name, text.licence) == ("own.txt", "unknown")
