"""Real text for the character-level study, taken from what the system already holds: nothing is downloaded.

English is Python's own documentation: the language reference as ``pydoc`` ships it, then the docstrings of the
standard library. Korean is the Debian FAQ or the LibreOffice help, if their packages are installed.
Both are only read, never imported.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import html
import re
import sys
import sysconfig
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import ConfigError

MAX_CHARS = 1_200_000
MIN_CHARS = 20_000
MAX_VOCAB = 192
RARE = 5
"""Characters seen fewer times than this are dropped: a model cannot learn them."""
BLOCK = 4096
HELD_OUT_EVERY = 10
SKIPPED_PACKAGES = {
    "test",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "tests",
}
KOREAN_FILES = (
    ("debian-faq-ko", Path("/usr/share/doc/debian/FAQ/ko"), "copyleft of the Debian FAQ"),
    ("libreoffice-help-ko", Path("/usr/share/libreoffice/help/ko"), "MPL-2.0"),
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text, its alphabet, and where it came from.

    Attributes:
        name: ``english``, ``korean`` or the name of the file.
        source: What the text is and where it was read, in words.
        licence: Its licence.
        text: The characters, rare ones already dropped. Korean is in Unicode NFD: syllables are spelt as jamo, so
            that the alphabet stays small; :func:`Corpus.decode` composes them again.
        alphabet: Its distinct characters, sorted; a token id is an index into it.
        dropped: How many characters were left out as rare.
    """

    name: str
    source: str
    licence: str
    text: str
    alphabet: str
    dropped: int

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; characters outside the alphabet are dropped."""
        index = {character: i for i, character in enumerate(self.alphabet)}
        return [index[character] for character in text if character in index]

    def decode(self, ids: Iterable[int]) -> str:
        return unicodedata.normalize("NFC", "".join(self.alphabet[i] for i in ids))

    def split(self) -> tuple[list[int], list[list[int]]]:
        """Training ids, and the held-out blocks: every tenth block of 4,096 characters, never trained on."""
        ids = self.encode(self.text)
        blocks = [ids[start : start + BLOCK] for start in range(0, len(ids), BLOCK)]
        held_out = [block for i, block in enumerate(blocks) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
        training = [t for i, block in enumerate(blocks) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1 for t in block]
        return training, held_out


def load_corpus(name: str, *, max_chars: int = MAX_CHARS) -> Corpus:
    """Reads a corpus.

    Args:
        name: ``english``, ``korean``, or the path of a UTF-8 text file.
        max_chars: Longest text; what follows is cut off.

    Raises:
        ConfigError: The text is not on this system, not UTF-8, or too short to learn from.
    """
    if name == "english":
        version = ".".join(map(str, sys.version_info[:3]))
        source = f"Python {version}: language reference (pydoc_data/topics.py) and standard library docstrings"
        return make_corpus(name, source, "PSF-2.0", _python_prose(), max_chars)
    if name == "korean":
        return _korean(max_chars)
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error})", field="corpus", remedy="convert it to UTF-8") from None
    except OSError as error:
        remedy = "give 'english', 'korean' or the path of a text file"
        raise ConfigError(f"cannot read {name!r} ({error.strerror})", field="corpus", remedy=remedy) from None
    return make_corpus(path.name, f"the file {path.name}", "unknown", text.split("\n\n"), max_chars)


def make_corpus(name: str, source: str, licence: str, paragraphs: Iterable[str], max_chars: int = MAX_CHARS) -> Corpus:
    """Joins paragraphs, each kept once, until ``max_chars``; then drops rare characters."""
    seen: set[str] = set()
    kept: list[str] = []
    size = 0
    for paragraph in paragraphs:
        paragraph = unicodedata.normalize("NFD" if name == "korean" else "NFC", paragraph.strip("\n"))
        if not paragraph.strip() or paragraph in seen:
            continue
        seen.add(paragraph)
        kept.append(paragraph)
        size += len(paragraph) + 2
        if size >= max_chars:
            break
    raw = "\n\n".join(kept)[:max_chars]
    common = Counter(raw).most_common(MAX_VOCAB)
    alphabet = "".join(sorted(character for character, count in common if count >= RARE))
    text = raw.translate({ord(character): None for character in set(raw) - set(alphabet)})
    if len(text) < MIN_CHARS:
        problem = f"{source} has {len(text)} usable characters, fewer than {MIN_CHARS}"
        raise ConfigError(problem, field="corpus", remedy="give a longer text")
    return Corpus(name, source, licence, text, alphabet, len(raw) - len(text))


def _python_prose() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    topics = library / "pydoc_data" / "topics.py"
    if topics.is_file():
        entries = next(_string_dicts(topics.read_text(encoding="utf-8")), {})
        for key in sorted(entries):
            yield from entries[key].split("\n\n")
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_PACKAGES.isdisjoint(path.relative_to(library).parts):
            yield from _docstrings(path)


def _string_dicts(source: str) -> Iterator[dict[str, str]]:
    """The dictionaries of literals that a module assigns, read without running it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            yield ast.literal_eval(node.value)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # a few files hold another encoding or a template
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (ast.get_docstring(node) or "").split("\n\n")


def _korean(max_chars: int) -> Corpus:
    found = [(package, licence, files) for package, folder, licence in KOREAN_FILES if (files := _pages(folder))]
    if not found:
        packages = " or ".join(package for package, _, _ in KOREAN_FILES)
        problem = "no Korean text is installed on this system"
        raise ConfigError(problem, field="corpus", remedy=f"install the Debian package {packages}, or give a text file")
    paragraphs = (paragraph for _, _, files in found for path in files for paragraph in _page(path))
    source = "Debian packages " + ", ".join(package for package, _, _ in found)
    return make_corpus("korean", source, ", ".join(licence for _, licence, _ in found), paragraphs, max_chars)


def _pages(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if re.search(r"\.(txt|html)(\.gz)?$", path.name))


def _page(path: Path) -> Iterator[str]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = raw.decode("utf-8", errors="replace")
    if ".html" in path.name:
        text = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", "", text)
        text = re.sub(r"</(p|h\d|li|tr|div)>", "\n\n", text)
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
    for paragraph in text.split("\n\n"):
        if re.search("[가-힣]", paragraph):  # the pages' navigation is not Korean text
            yield re.sub(r"[ \t]*\n[ \t]*", " ", paragraph.strip())
