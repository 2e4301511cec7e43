"""Tokenizers built from tokenizer.json and from GGUF metadata, and incremental detokenisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from foredraft.errors import ConfigError, ModelLoadError, VocabularyMismatchError
from foredraft.models.tokenizer import Tokenizer
from foredraft.models.tokenizer_folder import tokenizer_from_folder
from foredraft.models.tokenizer_gguf import tokenizer_from_gguf

TEXTS = [
    "Hello, world! It's 2026 — don't panic.",
    "  leading and trailing spaces   ",
    "안녕하세요, 세계! 한국어 문장입니다. 😀👩‍👩‍👧‍👦🇰🇷",
    "def f(x):\n\tif x > 10:\r\n        return x ** 2  # comment\n\n\n",
    "naïve café e\u0301 ﬁ ½ ² Ⅷ ٣٤ 123456789 3.14",
    "日本語とtext混在 <|im_end|> <tag> &amp; \u200b\u00a0 x",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
    " ",
    "\n\n \n",
    "I'LL we'Ve THEY'RE 'tis o'clock",
    "𐍈 𝔘𝔫𝔦 \U0010ffff",
]
CORPUS = [text * 3 for text in TEXTS] + [Path(__file__).read_text("utf-8")]

# As published with each model; written out here so that a slip in the product's own copy shows.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pre_tokenizer(pre: str) -> Any:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre in {"qwen2", "llama-bpe"}:
        pattern = _LLAMA3 if pre == "llama-bpe" else _LLAMA3.replace("{1,3}", "")
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), plain])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words


def trained(pre: str, size: int = 700) -> Backend:
    """A byte-level BPE like those of real models."""
    backend = Backend(models.BPE(ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def metadata_of(backend: Backend, pre: str) -> dict[str, Any]:
    """GGUF metadata of a byte-level tokenizer."""
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_gguf_byte_level_equals_the_original(pre: str) -> None:
    original = trained(pre)
    mine = from_gguf(metadata_of(original, pre))
    for text in [*TEXTS, *CORPUS]:
        ids = original.encode(text, add_special_tokens=False).ids
        assert mine.encode(text) == ids
        assert mine.decode(ids) == original.decode(ids)
    assert mine.eos_ids == {0, 2}
    assert (mine.bos_id, mine.vocab_size) == (1, original.get_vocab_size())


def test_bos_is_added_once_and_only_on_request() -> None:
    mine = from_gguf(metadata_of(trained("gpt-2"), "gpt-2") | {"tokenizer.ggml.add_bos_token": True})
    plain = mine.encode("Hello", special=False)
    assert mine.encode("Hello") == [1, *plain]
    assert mine.decode([1, *plain, 2]) == "Hello"
    assert mine.decode([1, *plain, 2], skip_special=False) == "<|im_start|>Hello<|im_end|>"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real SentencePiece BPE model with byte fallback."""
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text.txt").write_text("\n".join(CORPUS).replace("<|", "< |"), "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def sentencepiece_metadata(path: Path) -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(model.get_piece_size())
    return model, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [3 if model.is_control(i) else 2 if model.is_unknown(i) else 1 for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_gguf_sentencepiece_equals_the_library(pieces: Path) -> None:
    model, metadata = sentencepiece_metadata(pieces)
    mine = from_gguf(metadata)
    for text in TEXTS:
        ids = model.encode(text)
        assert mine.encode(text, special=False) == ids
        assert mine.decode(ids) == model.decode(ids)
    assert mine.encode("Hello") == [1, *model.encode("Hello")]
    assert mine.token_bytes(model.piece_to_id("<0xE3>")) == b"\xe3"
    assert mine.token_bytes(model.encode("Hello")[0]).startswith(b" ")


def test_gemma_stores_runs_of_spaces_as_they_look(pieces: Path) -> None:
    """Its files call them user-defined tokens; they must not become new ones past the model's vocabulary."""
    _, metadata = sentencepiece_metadata(pieces)
    tokens, types = [*metadata["tokenizer.ggml.tokens"], "  ", "   "], [*metadata["tokenizer.ggml.token_type"], 4, 4]
    mine = from_gguf(
        metadata
        | {"general.architecture": "gemma3", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    )
    assert mine.vocab_size == len(tokens)
    for text in TEXTS:
        assert mine.decode(mine.encode(text)) == text  # no space is added in front
    assert mine.encode("  ", special=False) == [len(tokens) - 2]
    assert mine.encode("   ", special=False) == [len(tokens) - 1]


def test_unknown_kinds_and_damage_are_errors() -> None:
    metadata = metadata_of(trained("gpt-2"), "gpt-2")
    assert tokenizer_from_gguf({}, "x.gguf") is None
    with pytest.raises(ModelLoadError, match=r"x\.gguf: tokenizer 'rwkv/gpt-2' is not known"):
        tokenizer_from_gguf(metadata | {"tokenizer.ggml.model": "rwkv"}, "x.gguf")
    with pytest.raises(ModelLoadError, match="merges"):
        tokenizer_from_gguf(metadata | {"tokenizer.ggml.merges": ["no such"]}, "x.gguf")
    with pytest.raises(ModelLoadError, match=r"x\.gguf: its tokenizer metadata are damaged"):
        tokenizer_from_gguf(
            metadata | {"tokenizer.ggml.bos_token_id": 10**6, "tokenizer.ggml.add_bos_token": 1}, "x.gguf"
        )


def streamed(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    decoder = tokenizer.stream_decoder(**options)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


BYTE_LEVEL = from_gguf(metadata_of(trained("gpt-2", 300), "gpt-2"))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=30), st.booleans())
def test_stream_of_any_tokens_equals_decode(ids: list[int], skip: bool) -> None:
    assert "".join(streamed(BYTE_LEVEL, ids, skip_special=skip)) == BYTE_LEVEL.decode(ids, skip_special=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_no_replacement_character_within_text(text: str) -> None:
    """Fault 23: characters split across tokens come out whole."""
    ids = BYTE_LEVEL.encode(text)
    parts = streamed(BYTE_LEVEL, ids, skip_special=False)
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)
    if "😀" in text:
        assert any(part == "" for part in parts)  # some token really ends inside a character


def test_stream_over_sentencepiece(pieces: Path) -> None:
    mine = from_gguf(sentencepiece_metadata(pieces)[1])
    for text in TEXTS:
        parts = streamed(mine, mine.encode(text))
        assert "".join(parts) == mine.decode(mine.encode(text)) == text
        assert all("\ufffd" not in part for part in parts)
    assert any(len(mine.encode(text)) > len(text) for text in TEXTS)  # byte fallback happened


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stream_of_any_pieces_equals_decode(pieces: Path, data: st.DataObject) -> None:
    mine = from_gguf(sentencepiece_metadata(pieces)[1])
    byte = st.integers(3, 258)
    ids = data.draw(st.lists(st.one_of(byte, st.integers(0, mine.vocab_size - 1)), max_size=12))
    assert "".join(streamed(mine, ids)) == mine.decode(ids)


def test_one_swapped_pair_is_named() -> None:
    """Fault 16: same size, two ids swapped."""
    metadata = metadata_of(trained("gpt-2"), "gpt-2")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[400], tokens[500] = tokens[500], tokens[400]
    one, other = from_gguf(metadata), from_gguf(metadata | {"tokenizer.ggml.tokens": tokens})
    one.same_vocabulary(from_gguf(metadata))
    with pytest.raises(VocabularyMismatchError, match=r"token 400 is '.*' for the one and '.*' for the other"):
        one.same_vocabulary(other)


def test_padding_is_no_mismatch_but_a_missing_token_is() -> None:
    metadata = metadata_of(trained("gpt-2"), "gpt-2")
    size = len(metadata["tokenizer.ggml.tokens"])

    def longer(kind: int) -> Tokenizer:
        return from_gguf(
            metadata
            | {
                "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "[PAD]"],
                "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], kind],
            }
        )

    from_gguf(metadata).same_vocabulary(longer(5))
    longer(5).same_vocabulary(from_gguf(metadata))
    with pytest.raises(VocabularyMismatchError, match=rf"token {size} is None for the one and '\[PAD\]'"):
        from_gguf(metadata).same_vocabulary(longer(1))


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def with_template(template: str) -> Tokenizer:
    return from_gguf(metadata_of(trained("gpt-2"), "gpt-2") | {"tokenizer.chat_template": template})


def test_chat() -> None:
    tokenizer = with_template(TEMPLATE)
    ids = tokenizer.chat([{"role": "user", "content": "안녕"}])
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user\n안녕<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1
    assert tokenizer.is_special(ids[0])
    no_prompt = tokenizer.chat([{"role": "user", "content": "안녕"}], add_generation_prompt=False)
    assert ids[: len(no_prompt)] == no_prompt
    assert with_template("{{ bos_token }}{{ tools is none }}{{ flag }}").chat([], flag="x") == tokenizer.encode(
        "<|im_start|>Truex"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses them .roles must alternate"),
        ("{{ messages[0].content.nothing.here }}", "refuses them"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses them"),
        ("{{ messages.append(1) }}", "refuses them"),
        ("{% for i in range(10**9) %}x{% endfor %}", "refuses them"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "wrote more than"),
    ],
)
def test_hostile_templates_end_in_one_clear_error(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"messages: .*{message}"):
        with_template(template).chat([{"role": "user", "content": "x"}])


def test_text_that_is_none() -> None:
    for text in ("\ud83d", None, 5):
        with pytest.raises(ConfigError, match="prompt: is not valid text"):
            BYTE_LEVEL.encode(text)  # type: ignore[arg-type]


def test_no_template_and_a_broken_one() -> None:
    plain = from_gguf(metadata_of(trained("gpt-2"), "gpt-2"))
    assert not plain.has_chat_template
    with pytest.raises(ConfigError, match="no chat template; give a plain prompt"):
        plain.chat([{"role": "user", "content": "x"}])
    with pytest.raises(ModelLoadError, match="chat_template: is not valid Jinja"):
        with_template("{% for %}").chat([])


def test_folder_equals_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=trained("qwen2"), eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    theirs.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    mine = tokenizer_from_folder(tmp_path)
    assert mine is not None
    for text in TEXTS:
        assert mine.encode(text) == theirs.encode(text)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "안녕 😀"}]
    assert mine.chat(talk) == theirs.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    assert mine.eos_ids == {0, 2, 5}
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: cannot be read"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert tokenizer_from_folder(tmp_path) is None
