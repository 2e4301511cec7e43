"""What is measured: a row is one engine in one mode at one precision. The rows of every known engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foredraft.bench.weights import dense_folder, gguf_path
from foredraft.drafters import registry

OURS = "foredraft"
ENGINES = (OURS, "openvino", "llama.cpp", "vllm", "transformers")
EAGLE = "eagle3"
NO_BFLOAT16 = "the processor lacks AVX-512: products in bfloat16 would be reference code, float32 is faster"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report.

    Attributes:
        name: Unique.
        engine: One of :data:`ENGINES`, or the name given to a URL.
        mode: ``plain``, or the speculation.
        weights: Format of the weights as the engine holds them, in words.
        activations: Precision of what enters the products, in words.
        process: Rows with the same value share a worker process.
        worker: Module under ``workers``.
        options: What the worker's ``load`` gets.
        batches: Whether the engine decodes several prompts together.
        absent: Why it cannot be had, if that is known beforehand.
        parts: Parts of the bench that it takes part in; empty for all that it can.
    """

    name: str
    engine: str
    mode: str
    weights: str
    activations: str
    process: str
    worker: str
    options: dict[str, Any] = field(default_factory=dict)
    batches: bool = False
    absent: str | None = None
    parts: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        return self.engine == OURS

    @property
    def plain(self) -> bool:
        return self.mode == "plain"

    @property
    def baseline(self) -> str:
        """Name of the row of the same engine and precision that decodes plainly.

        Where an engine has several precisions, all names but those of its usual one tell which.
        """
        named = self.ours or self.name == row_name(self.engine, self.mode, self.activations)
        return self.name if self.plain else row_name(self.engine, "plain", self.activations if named else "")


@dataclass(frozen=True, slots=True)
class Setting:
    """What all rows have in common."""

    target: str
    draft: str | None
    threads: int
    max_context: int
    say: Callable[[str], None]
    head: str | None = None
    drafters: tuple[str, ...] = ()
    bfloat16: bool = True  # whether the processor has instructions for it that vLLM's products use


def row_name(engine: str, mode: str, activations: str = "") -> str:
    return f"{engine} {mode}{f' ({activations})' if activations else ''}"


def all_rows(setting: Setting, engines: Sequence[str], urls: Sequence[tuple[str, str]] = ()) -> list[Row]:
    """Every row of the named engines; those that cannot be had carry the reason."""
    makers = {
        OURS: _ours,
        "transformers": _transformers,
        "llama.cpp": _llamacpp,
        "openvino": _openvino,
        "vllm": _vllm,
    }
    rows = [row for engine in engines for row in makers[engine](setting)]
    for name, url in urls:
        options = {"url": url}
        rows.append(
            Row(f"{name} plain", name, "plain", "the server's", "the server's", name, "url_worker", options, True)
        )
    return rows


def own_drafters(setting: Setting) -> list[tuple[str, str]]:
    """Drafter specs and the activations that they run with: the main ones with both, the others with the faster."""
    if setting.draft is None:
        trained = [("eagle3", "int8"), ("tree:eagle3", "int8"), ("combined:suffix+eagle3", "both")]
    else:
        trained = [(f"model:{setting.draft}", "both"), (f"combined:suffix+model:{setting.draft}", "int8")]
    copying = [("lookup", "both"), ("suffix", "int8"), ("lookup-tree", "int8")]
    known = {entry.name for entry in registry.entries()}
    asked = [(spec, "int8") for spec in setting.drafters]
    return [(spec, which) for spec, which in [*copying, *trained, *asked] if spec.split(":")[0] in known]


def _ours(setting: Setting) -> list[Row]:
    rows = []
    for activations in ("int8", "float32"):
        wanted = [spec for spec, which in own_drafters(setting) if which in (activations, "both")]
        for drafter in [None, *dict.fromkeys(wanted)]:
            options = {
                "target": setting.target,
                "dtype": "float32",
                "activations": activations,
                "drafter": drafter,
                "max_context": setting.max_context,
            }
            mode = drafter or "plain"
            name = row_name(OURS, mode, activations)
            rows.append(
                Row(name, OURS, mode, "as in the GGUF", activations, OURS, "foredraft_worker", options, batches=True)
            )
    return [*rows, _ours_dense(setting)]


def _ours_dense(setting: Setting) -> Row:
    """The dequantised weights in bfloat16, for the cost of a pass only."""
    return Row(
        row_name(OURS, "plain", "bfloat16"),
        OURS,
        "plain",
        "bfloat16, dequantised from the same GGUF",
        "bfloat16",
        OURS,
        "foredraft_worker",
        {"dtype": "bfloat16", "activations": "float32", "drafter": None, "max_context": setting.max_context},
        parts=("curve",),
    )


def _transformers(setting: Setting) -> list[Row]:
    modes: list[tuple[str, dict[str, Any]]] = [
        ("plain", {}),
        ("prompt lookup", {"generate": {"prompt_lookup_num_tokens": 10}}),
    ]
    if setting.draft is None:
        modes.append(("assistant: own first 4 layers", {"generate": {"assistant_early_exit": 4}}))
    else:
        modes.append(("assistant model", {"assistant": setting.draft}))
    return [
        _row(
            setting, "transformers", mode, "transformers_worker", {"dtype": "bfloat16"} | extra, batches=mode == "plain"
        )
        for mode, extra in modes
    ]


def _llamacpp(setting: Setting) -> list[Row]:
    draft: dict[str, Any] = {"speculation": "DRAFT_SIMPLE", "draft": setting.draft}
    modes: list[tuple[str, dict[str, Any]]] = [
        ("plain", {"batches": True}),
        ("ngram-simple", {"speculation": "NGRAM_SIMPLE"}),
        ("ngram-simple 4,8", {"speculation": "NGRAM_SIMPLE", "ngram_simple": [4, 8]}),
        ("ngram-map-k", {"speculation": "NGRAM_MAP_K"}),
        ("ngram-mod", {"speculation": "NGRAM_MOD", "remembers": True}),
        ("draft model", draft),
    ]
    return [
        _row(
            setting,
            "llama.cpp",
            mode,
            "llamacpp_worker",
            extra,
            batches=extra.get("batches", False),
            needs_draft=extra is draft,
        )
        for mode, extra in modes
    ]


def _openvino(setting: Setting) -> list[Row]:
    lookup = {"prompt_lookup": True, "generate": {"num_assistant_tokens": 5, "max_ngram_size": 3}}
    rows = [
        _row(setting, "openvino", "plain", "openvino_worker", {}, batches=True),
        _row(setting, "openvino", "prompt lookup", "openvino_worker", lookup),
    ]
    draft = {"draft": setting.draft, "generate": {"num_assistant_tokens": 4}}
    rows.append(_row(setting, "openvino", "draft model", "openvino_worker", draft, needs_draft=True))
    return rows


def _vllm(setting: Setting) -> list[Row]:
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    suffix = {"method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_max_cached_requests": 0}
    draft = {"method": "draft_model", "model": setting.draft, "num_speculative_tokens": 4}
    eagle = {"method": "eagle3", "model": setting.head, "num_speculative_tokens": 3}
    speculative: dict[str, dict[str, Any]] = {"ngram": ngram, "suffix": suffix, "draft model": draft, EAGLE: eagle}
    best, other = ("", "float32") if setting.bfloat16 else ("float32", "")
    rows = [_vllm_row(setting, mode, best, speculative.get(mode)) for mode in ("plain", *speculative)]
    return [*rows, _vllm_row(setting, "plain", other)]


def _vllm_row(setting: Setting, mode: str, precision: str, speculative: dict[str, Any] | None = None) -> Row:
    """In bfloat16, or in the precision that is named."""
    options = {"dtype": precision or "bfloat16", "speculative": speculative}
    needs_draft = mode == "draft model"
    row = _row(setting, "vllm", mode, "vllm_worker", options, batches=True, needs_draft=needs_draft)
    if mode == EAGLE and setting.head is None:
        row = replace(row, absent="no exported head was given (--head)")
    if not precision and not setting.bfloat16:
        row = replace(row, absent=NO_BFLOAT16)
    if precision:
        weights = f"{precision}, dequantised from the same GGUF"
        row = replace(row, name=row_name("vllm", mode, precision), weights=weights, activations=precision)
    return replace(row, process=row.name)  # each loads a model of its own


_PRECISION = {
    "transformers": ("bfloat16, dequantised from the same GGUF", "bfloat16"),
    "vllm": ("bfloat16, dequantised from the same GGUF", "bfloat16"),
    "llama.cpp": ("as in the GGUF", "int8 (its kernels round)"),
    "openvino": ("from the same GGUF, repacked by the engine", "the engine's default"),
}


def _row(
    setting: Setting,
    engine: str,
    mode: str,
    worker: str,
    extra: dict[str, Any],
    *,
    batches: bool = False,
    needs_draft: bool = False,
) -> Row:
    """A peer's row, with the paths of its weights; absent if they cannot be had."""
    weights, activations = _PRECISION[engine]
    name = row_name(engine, mode)
    options = {"threads": setting.threads, "max_context": setting.max_context} | extra
    row = Row(name, engine, mode, weights, activations, engine, worker, options, batches)
    if needs_draft and setting.draft is None:
        return replace(row, absent="no smaller model shares the target's vocabulary; see the larger pair")
    return row


def with_paths(row: Row, setting: Setting) -> Row:
    """Fills in where the weights of target and draft lie, in the form that the engine reads; converts them if need be.

    Raises:
        UnavailableError: They are not on this machine.
    """
    options = dict(row.options)
    if row.engine in ("llama.cpp", "openvino"):
        options["gguf"] = str(gguf_path(setting.target))
        if options.get("draft"):
            options["draft"] = str(gguf_path(str(options["draft"])))
    elif row.engine in ("transformers", "vllm"):
        options["folder"] = str(dense_folder(setting.target, setting.say))
        if options.get("assistant"):
            options["assistant"] = str(dense_folder(str(options["assistant"]), setting.say))
        speculative = options.get("speculative")
        if speculative and speculative["method"] == "draft_model":
            options["speculative"] = speculative | {"model": str(dense_folder(speculative["model"], setting.say))}
    elif row.ours and row.activations == "bfloat16":
        options["target"] = str(dense_folder(setting.target, setting.say))
    return replace(row, options=options)
