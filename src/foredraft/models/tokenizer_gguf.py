"""A tokenizer from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from foredraft.errors import ModelLoadError, UnsupportedModelError
from foredraft.models.tokenizer import _BYTE_OF, Tokenizer

_CONTROL, _USER, _UNUSED = 3, 4, 5

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_SPLITS = dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe"), _LLAMA3) | {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_GPT2 = {"gpt-2", "default", "olmo", "phi-2"}
_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
_NFC = {"qwen2", "deepseek-r1-qwen"}
_IGNORE_MERGES = {"llama3", "llama-v3", "llama-bpe"}


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: str) -> Tokenizer | None:
    """Builds the tokenizer that the metadata describes; None if it describes none.

    Byte-level BPE (``gpt2``) with the pre-tokenizers of GPT-2, SmolLM, Llama 3 and Qwen 2, and SentencePiece BPE
    (``llama``) are built directly; anything else is left to transformers.

    Raises:
        ModelLoadError: The metadata contradict themselves, or nobody knows this kind of tokenizer.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    pre = metadata.get("tokenizer.ggml.pre", "default")
    build: Callable[[Mapping[str, Any]], Backend] | None = None
    if kind == "llama":
        build = _sentencepiece
    elif kind == "gpt2" and pre in _GPT2 | _DIGITS | set(_SPLITS):
        build = _byte_level
    try:
        backend = build(metadata) if build else _by_transformers(path, f"{kind}/{pre}")
        return _finish(backend, metadata, kind)
    except (KeyError, IndexError, TypeError) as error:
        raise ModelLoadError(
            f"its tokenizer metadata are damaged ({error})", field=path, remedy="download the file again"
        ) from None


def _byte_level(metadata: Mapping[str, Any]) -> Backend:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    backend = _bpe(vocab, merges, ignore_merges=pre in _IGNORE_MERGES)
    backend.decoder = decoders.ByteLevel()
    if pre in _SPLITS:
        parts: list[PreTokenizer] = [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        parts = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if pre in _DIGITS:
            parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(metadata: Mapping[str, Any]) -> Backend:
    """SentencePiece BPE has no merge list: two pieces merge if the result is a piece, the likeliest first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    if gemma:  # runs of spaces are stored as they look, not as the piece is spelled
        tokens = ["\u2581" * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    # Gemma's scores do not follow its merge order; its ids do.
    scores = [-float(i) for i in range(len(tokens))] if gemma else metadata["tokenizer.ggml.scores"]
    backend = _bpe(
        vocab, _merges(tokens, vocab, scores), byte_fallback=True, fuse_unk=True, unk_token=_unknown(metadata)
    )
    replace: list[Normalizer] = [normalizers.Replace(" ", "\u2581")]
    finish = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif metadata.get("tokenizer.ggml.add_space_prefix", True):
        replace.insert(0, normalizers.Prepend("\u2581"))
        finish.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(replace)
    backend.decoder = decoders.Sequence(finish)
    return backend


def _merges(tokens: list[str], vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to build a piece from two, best piece first; among equals the shortest left part's id order."""
    found = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-score, vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _unknown(metadata: Mapping[str, Any]) -> str | None:
    token = metadata.get("tokenizer.ggml.unknown_token_id")
    return None if token is None else metadata["tokenizer.ggml.tokens"][token]


def _bpe(vocab: dict[str, int], merges: list[Any], **options: Any) -> Backend:
    try:
        return Backend(BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"its merges do not fit its tokens ({error})", field="tokenizer.ggml.merges") from None


def _by_transformers(path: str, kind: str) -> Backend:
    from transformers import AutoTokenizer  # slow to import, hence only here

    try:
        folder, _, name = path.rpartition("/")
        backend: Backend = AutoTokenizer.from_pretrained(folder or ".", gguf_file=name).backend_tokenizer
    except Exception as error:
        raise UnsupportedModelError(
            f"tokenizer {kind!r} is not known ({error})", field=path, remedy="use the model's safetensors folder"
        ) from None
    return backend


def _finish(backend: Backend, metadata: Mapping[str, Any], kind: str) -> Tokenizer:
    """Adds special tokens, BOS and EOS, and the chat template."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    # A special token that the vocabulary spells otherwise (runs of spaces, a converter's mislabels) stays ordinary.
    whole = [i for i, t in enumerate(types) if t in (_CONTROL, _USER) and _is_whole(backend, kind, tokens[i], i)]
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in whole if types[i] == _CONTROL])
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in whole if types[i] == _USER])
    roles = {
        role: metadata[f"tokenizer.ggml.{key}_token_id"]
        for role, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("eot", "eot"),
            ("eom", "eom"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    template = []
    if "bos" in roles and metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        template.append("bos")
    before = [tokens[roles[role]] for role in template]
    after = [tokens[roles["eos"]]] if "eos" in roles and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if before or after:
        around = {token: backend.token_to_id(token) for token in before + after}
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=list(around.items())
        )
    return Tokenizer(
        backend,
        bos_id=roles.get("bos"),
        eos_ids=[roles[role] for role in ("eos", "eot", "eom") if role in roles],
        chat_template=metadata.get("tokenizer.chat_template"),
        tokens={f"{role}_token": tokens[i] for role, i in roles.items()},
        unused=[i for i, t in enumerate(types) if t == _UNUSED],
    )


def _is_whole(backend: Backend, kind: str, token: str, i: int) -> bool:
    return backend.token_to_id(token) == i and (kind != "gpt2" or all(char in _BYTE_OF for char in token))
