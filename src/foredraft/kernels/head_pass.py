"""A whole step of an EAGLE-3 head, or a whole draft, in one call of the library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.errors import ConfigError
from foredraft.kernels import library
from foredraft.kernels.decoder_pass import c_product
from foredraft.kernels.law import Draws
from foredraft.kernels.linear import PackedLinear
from foredraft.kernels.structs import CHead, CHeadStep, CHeadText, CMatrix


@dataclass(frozen=True, slots=True)
class HeadParts:
    """A head: norm weights ``[d]`` float32, packed products, all with the same activations.

    Attributes:
        fc: Hidden states of the target -> ``d``.
        q: ``2 d -> heads * head_dim``, for the normed embedding beside the normed feature; ``kv`` likewise, keys before
            values.
        gate_up: Gate before up; the activation is SiLU.
        lm_head: ``d -> D`` tokens that the head can propose.
        token_ids: ``[D]`` int64, the target's id of each.
        norm_before_residual: The residual sum starts from the normed feature.
        table: ``[V, d]`` packed, whose rows are the target's embeddings, or None where rows come embedded.
        table_scale: What its rows are multiplied with.
    """

    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    norm_before_residual: bool
    fc: PackedLinear
    input_norm: Tensor
    hidden_norm: Tensor
    q: PackedLinear
    kv: PackedLinear
    out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    final_norm: Tensor
    lm_head: PackedLinear
    token_ids: Tensor
    table: PackedLinear | None = None
    table_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of one text in a call.

    Attributes:
        tokens: ``n >= 1`` ids.
        committed: Rows of the cache that every row sees.
        pending: Rows of the cache behind them, of earlier calls.
        position: Of the row that follows the last committed one.
        cache: ``[2, kv_heads, capacity, head_dim]`` float32 contiguous, room for ``committed + pending + n`` rows and
            one more for every drafted token but the last.
        parents: ``[pending + n]``: for each row behind the committed ones the row that it follows, counted from the
            first pending one, ``-1`` for the last committed row. None if each follows the row before it.
        logits_from: Wanted are rows from this one on; the others only leave their keys and values.
        draws: How tokens are to be drafted behind the last row, and how many. Only without parents.
    """

    tokens: Sequence[int]
    committed: int
    pending: int
    position: int
    cache: Tensor
    parents: Sequence[int] | None = None
    logits_from: int = 0
    draws: Draws | None = None

    @property
    def drafts(self) -> int:
        """Tokens to draft."""
        return 0 if self.draws is None else self.draws.count


@dataclass(frozen=True, slots=True, eq=False)
class HeadDraft:
    """What was drafted behind one text.

    Attributes:
        tokens: The target's ids.
        laws: ``[n, V]`` float32 that they were drawn from; None for those that were not drawn.
        siblings: For each token the ``branch`` likeliest in its place, itself first, and their probabilities; only if
            more than one was asked for.
        chances: The head's probability of each token, if the draft might end early: in the law that it was drawn from.
    """

    tokens: list[int]
    laws: Tensor | None = None
    siblings: Sequence[tuple[list[int], list[float]]] = ()
    chances: Sequence[float] = ()


class HeadPass:
    """A head whose steps run inside the library.

    A row's numbers do not depend, to the bit, on the other texts of the call, on the size of the steps by which its
    text was read, or on threads. A tree's row gets the bits of its path drafted alone.

    Raises:
        ConfigError: A size does not fit another, or there is no compiled library.
    """

    def __init__(self, parts: HeadParts) -> None:
        self._call, self._isa = library.library().fd_head, library.isa()
        _check(parts)
        self.parts = parts
        self.hidden = parts.fc.out_features
        self.vocab = parts.lm_head.out_features
        vectors = [
            values.detach().to("cpu", torch.float32).contiguous()
            for values in (parts.input_norm, parts.hidden_norm, parts.mlp_norm, parts.final_norm)
        ]
        ids = parts.token_ids.to("cpu", torch.int64).contiguous()
        self._alive = (vectors, ids)  # what the struct points to, besides the parts
        self._head = CHead(
            hidden=self.hidden,
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            head_dim=parts.head_dim,
            intermediate=parts.down.in_features,
            vocab=self.vocab,
            activations=parts.fc.mode,
            norm_before_residual=int(parts.norm_before_residual),
            norm_eps=parts.norm_eps,
            attention_scale=parts.head_dim**-0.5,
            table_scale=parts.table_scale,
            **dict(
                zip(("input_norm", "hidden_norm", "mlp_norm", "final_norm"), map(Tensor.data_ptr, vectors), strict=True)
            ),
            **{name: c_product(getattr(parts, name)) for name in _PRODUCTS},
            table=CMatrix() if parts.table is None else c_product(parts.table).part[0],
            token_ids=ids.data_ptr(),
        )

    def __call__(
        self,
        texts: Sequence[HeadRows],
        features: Tensor,
        angles: tuple[Tensor, Tensor],
        embedded: Tensor | None = None,
        threads: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Runs one step and writes the new rows' keys and values.

        Args:
            texts: Their rows follow each other.
            features: ``[N, d]`` float32, or ``[N, taps, target_hidden]`` hidden states of the target.
            angles: Cosines and sines ``[positions, head_dim / 2]`` float32.
            embedded: ``[N, d]`` float32; needed where the parts have no table.
            threads: That share the work.

        Returns:
            Logits ``[wanted rows, D]``, and hidden ``[wanted rows, d]``: the feature of each row's children.
        """
        wanted = sum(len(text.tokens) - text.logits_from for text in texts)
        logits, hidden = torch.empty(wanted, self.vocab), torch.empty(wanted, self.hidden)
        views, keep, _ = self._texts(texts)
        self._run(texts, views, features, angles, embedded, threads, logits.data_ptr(), hidden.data_ptr())
        del keep
        return logits, hidden

    def draft(
        self,
        texts: Sequence[HeadRows],
        features: Tensor,
        angles: tuple[Tensor, Tensor],
        threads: int = 1,
        branch: int = 1,
    ) -> list[HeadDraft]:
        """The step of the given rows and those of a draft after it; needs a table. Arguments as in a call.

        Args:
            branch: Siblings to tell of each token that is the likeliest, itself counted.

        Returns:
            For each text up to ``drafts`` tokens, ended early as its draws say. A draft ends before the first token
            whose logits hold NaN or no finite largest number, or for which the reference must be asked
            (:func:`foredraft.kernels.law.law`).
        """
        table = self.parts.table
        if table is None:
            raise ConfigError("a whole draft needs the target's embedding", field="table")
        if branch > 1 and any(text.draws is not None and text.draws.controls is not None for text in texts):
            raise ConfigError("siblings are told of the likeliest tokens only", field="branch")
        views, keep, drafted = self._texts(texts)
        laws: list[Tensor | None] = []
        for text, view in zip(texts, views, strict=True):
            drawn = text.draws is not None and text.draws.uniforms is not None
            laws.append(made := torch.empty(text.drafts, table.out_features) if drawn else None)
            view.laws = None if made is None else made.data_ptr()
        told = [_ask_siblings(view, branch) for view in views] if branch > 1 else []
        chances = [_ask_chances(view, text.draws) for text, view in zip(texts, views, strict=True)]
        self._run(texts, views, features, angles, None, threads, None, None)
        del keep
        tokens = [out[: view.written] for out, view in zip(drafted, views, strict=True)]
        laws = [law if law is None else law[: len(own)] for law, own in zip(laws, tokens, strict=True)]
        drafts = [
            HeadDraft(own, law, chances=sure[: len(own)]) for own, law, sure in zip(tokens, laws, chances, strict=True)
        ]
        if not told:
            return drafts
        return [
            replace(draft, siblings=_siblings(room, branch, len(draft.tokens)))
            for draft, room in zip(drafts, told, strict=True)
        ]

    def _run(
        self,
        texts: Sequence[HeadRows],
        views: ctypes.Array[CHeadText],
        features: Tensor,
        angles: tuple[Tensor, Tensor],
        embedded: Tensor | None,
        threads: int,
        logits: int | None,
        hidden: int | None,
    ) -> None:
        tokens = texts[0].tokens if len(texts) == 1 else [token for text in texts for token in text.tokens]
        n = len(tokens)
        fuse = features.dim() == 3
        wanted = self.parts.fc.in_features if fuse else self.hidden
        if features.dtype != torch.float32 or features.shape[0] != n or features.numel() != n * wanted:
            raise ConfigError(f"must be float32 [{n}, {wanted}] (got {list(features.shape)})", field="features")
        table = self.parts.table
        if embedded is None:
            if table is None:
                raise ConfigError("are needed, since the head has no table", field="embedded")
            if min(tokens) < 0 or max(tokens) >= table.out_features:
                raise ConfigError(f"an id lies outside 0 … {table.out_features - 1}", field="tokens")
        elif embedded.dtype != torch.float32 or embedded.shape != (n, self.hidden):
            raise ConfigError(f"must be float32 [{n}, {self.hidden}] (got {list(embedded.shape)})", field="embedded")
        else:
            embedded = embedded.contiguous()
        longest = max(text.position + text.pending + len(text.tokens) + text.drafts for text in texts)
        if any(
            t.dtype != torch.float32 or t.shape != (max(longest, t.shape[0]), self.parts.head_dim // 2) for t in angles
        ):
            raise ConfigError(f"must be float32 [{longest} or more, {self.parts.head_dim // 2}]", field="angles")
        features = features.contiguous()
        step = CHeadStep(
            rows=n,
            tokens=ctypes.addressof(ids := (ctypes.c_int64 * n)(*tokens)),
            embedded=None if embedded is None else embedded.data_ptr(),
            features=features.data_ptr(),
            fuse=fuse,
            cosine=angles[0].data_ptr(),
            sine=angles[1].data_ptr(),
            texts=len(texts),
            text=views,
            logits=logits,
            hidden=hidden,
            threads=threads,
            isa=self._isa,
        )
        self._call(ctypes.byref(self._head), ctypes.byref(step))
        del ids

    def _texts(
        self, texts: Sequence[HeadRows]
    ) -> tuple[ctypes.Array[CHeadText], list[object], list[ctypes.Array[ctypes.c_int64]]]:
        """The library's view of the texts, what must live as long, and where each one's drafted tokens will be."""
        views = (CHeadText * len(texts))()
        keep: list[object] = []
        drafted: list[ctypes.Array[ctypes.c_int64]] = []
        wanted = (2, self.parts.kv_heads, self.parts.head_dim)
        for view, text in zip(views, texts, strict=True):
            n, size = len(text.tokens), text.cache.shape
            if (*size[:2], size[3]) != wanted or text.cache.dtype != torch.float32 or not text.cache.is_contiguous():
                raise ConfigError(f"has shape {list(size)} {text.cache.dtype}", field="cache")
            used = text.committed + text.pending + n
            if (
                n < 1
                or min(text.committed, text.pending, text.position) < 0
                or used + max(text.drafts - 1, 0) > size[2]
            ):
                raise ConfigError(f"{used} rows and {text.drafts} drafts do not fit into {size[2]}", field="cache")
            if not 0 <= text.logits_from <= n - (text.drafts > 0) or (text.drafts and text.parents is not None):
                raise ConfigError("a draft follows the last row of a chain, with logits", field="drafts")
            if text.parents is not None:
                parents = text.parents
                if len(parents) != text.pending + n or any(not -1 <= p < i for i, p in enumerate(parents)):
                    raise ConfigError("name an earlier row or -1 for each row", field="parents")
                above = (ctypes.c_int32 * len(parents))(*parents)
                keep.append(above)
                view.parents = ctypes.addressof(above)
            out = (ctypes.c_int64 * text.drafts)()
            drafted.append(out)
            view.rows, view.committed, view.pending, view.position = n, text.committed, text.pending, text.position
            view.capacity, view.logits_from, view.drafts = size[2], text.logits_from, text.drafts
            view.cache, view.drafted = text.cache.data_ptr(), ctypes.addressof(out)
            if text.draws is not None and text.draws.controls is not None:
                keep.append(_chosen(view, text.draws))
        return views, keep, drafted


def _ask_chances(view: CHeadText, draws: Draws | None) -> ctypes.Array[ctypes.c_double] | tuple[float, ...]:
    """Lets a draft end early; gives the library room for the tokens' probabilities."""
    if draws is None or draws.trust is None:
        return ()
    out = (ctypes.c_double * draws.count)()
    view.least, view.chances, view.trust = draws.least, ctypes.addressof(out), draws.trust.buffer_info()[0]
    return out


_Told = tuple["ctypes.Array[ctypes.c_int64]", "ctypes.Array[ctypes.c_float]"]


def _ask_siblings(view: CHeadText, branch: int) -> _Told:
    """Gives the library room for ids and probabilities of siblings."""
    n = view.drafts * branch
    ids, weights = (ctypes.c_int64 * n)(), (ctypes.c_float * n)()
    view.branch, view.siblings, view.weights = branch, ctypes.addressof(ids), ctypes.addressof(weights)
    return ids, weights


def _siblings(told: _Told, branch: int, tokens: int) -> list[tuple[list[int], list[float]]]:
    """Those of the first ``tokens`` tokens."""
    ids, weights = told
    levels = [slice(branch * i, branch * i + branch) for i in range(tokens)]
    return [(ids[level], weights[level]) for level in levels]


def _chosen(view: CHeadText, draws: Draws) -> object:
    """Tells the library how to draw; returns what must live as long as it does so."""
    view.controls = ctypes.addressof(draws.controls)  # type: ignore[arg-type]
    view.seed, view.position_of_race = draws.seed, draws.position
    if draws.uniforms is None:
        return draws
    if len(draws.uniforms) < draws.count:
        raise ConfigError(f"{draws.count} draws need as many numbers", field="uniforms")
    uniforms = (ctypes.c_double * draws.count)(*draws.uniforms)
    view.uniforms = ctypes.addressof(uniforms)
    return draws, uniforms


_PRODUCTS = ("fc", "q", "kv", "out", "gate_up", "down", "lm_head")


def _check(parts: HeadParts) -> None:
    d, dim, inner = parts.fc.out_features, parts.head_dim, parts.down.in_features
    if dim % 8 or parts.kv_heads < 1 or parts.heads % parts.kv_heads:
        raise ConfigError("heads must be multiples of 8 wide and of kv_heads in number", field="head_dim")
    width, vocab = parts.heads * dim, parts.lm_head.out_features
    sizes = {
        "fc": (parts.fc.in_features, d),
        "q": (2 * d, width),
        "kv": (2 * d, 2 * parts.kv_heads * dim),
        "out": (width, d),
        "gate_up": (d, 2 * inner),
        "down": (inner, d),
        "lm_head": (d, vocab),
    }
    for name, size in sizes.items():
        linear = getattr(parts, name)
        if (linear.in_features, linear.out_features) != size:
            got = f"{linear.in_features} -> {linear.out_features}"
            raise ConfigError(f"is {got}, {size[0]} -> {size[1]} is wanted", field=name)
        if len(linear.matrices) > 3 or not linear.matrices[0].packed or linear.mode != parts.fc.mode:
            raise ConfigError("must be up to 3 packed matrices, all products with the same activations", field=name)
    if {m.source.number for m in parts.q.matrices} != {m.source.number for m in parts.kv.matrices}:
        raise ConfigError("must be packed as kv is", field="q")
    table = parts.table
    if table is not None and (table.in_features != d or len(table.matrices) != 1 or not table.matrices[0].packed):
        raise ConfigError(f"must be one packed matrix [V, {d}]", field="table")
    for name in ("input_norm", "hidden_norm", "mlp_norm", "final_norm"):
        if tuple(getattr(parts, name).shape) != (d,):
            raise ConfigError(f"has shape {list(getattr(parts, name).shape)}, [{d}] is wanted", field=name)
    if tuple(parts.token_ids.shape) != (vocab,):
        raise ConfigError(f"has shape {list(parts.token_ids.shape)}, [{vocab}] is wanted", field="token_ids")
    if table is not None and (int(parts.token_ids.min()) < 0 or int(parts.token_ids.max()) >= table.out_features):
        raise ConfigError(f"an id lies outside 0 … {table.out_features - 1}", field="token_ids")
