"""The C structs of ``csrc/pass.h``, ``csrc/ops.h`` and ``csrc/head.h``, field by field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_uint64, c_void_p


class CMatrix(Structure):
    _fields_ = [("format", c_int64), ("weights", c_void_p), ("out", c_int64), ("bias", c_void_p)]


class CProduct(Structure):
    _fields_ = [("in_", c_int64), ("out", c_int64), ("parts", c_int64), ("part", CMatrix * 3)]


class CLayer(Structure):
    _fields_ = [
        ("attn_norm", c_void_p),
        ("qk_norm", c_void_p),
        ("post_attn_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("qkv", CProduct),
        ("out", CProduct),
        ("gate_up", CProduct),
        ("down", CProduct),
        ("window", c_int64),
        ("rope", c_int64),
    ]


class CModel(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "layers", "vocab")),
        *((name, c_int64) for name in ("tanh_gelu", "cache_type", "activations")),
        *((name, c_float) for name in ("norm_eps", "attention_scale", "attention_softcap")),
        *((name, c_float) for name in ("logit_softcap", "embedding_scale", "unused")),
        ("layer", POINTER(CLayer)),
        ("final_norm", c_void_p),
        ("embedding", CMatrix),
        ("head", CProduct),
    ]


class CSegment(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("first", "rows", "start", "capacity")),
        ("cache", c_void_p),
        ("parents", c_void_p),
    ]


class CPass(Structure):
    _fields_ = [
        ("rows", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("cosine", c_void_p * 2),
        ("sine", c_void_p * 2),
        ("segments", c_int64),
        ("segment", POINTER(CSegment)),
        ("logit_rows", c_int64),
        ("logit_row", c_void_p),
        ("logits", c_void_p),
        ("likeliest", c_void_p),
        ("taps", c_int64),
        ("tap", c_void_p),
        ("tapped", c_void_p),
        ("threads", c_int64),
        ("isa", c_int64),
    ]


class CHead(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")),
        *((name, c_int64) for name in ("activations", "norm_before_residual")),
        *((name, c_float) for name in ("norm_eps", "attention_scale", "table_scale", "unused")),
        *((name, c_void_p) for name in ("input_norm", "hidden_norm", "mlp_norm", "final_norm")),
        *((name, CProduct) for name in ("fc", "q", "kv", "out", "gate_up", "down", "lm_head")),
        ("table", CMatrix),
        ("token_ids", c_void_p),
    ]


class CHeadText(Structure):
    _fields_ = [
        *(
            (name, c_int64)
            for name in ("rows", "committed", "pending", "position", "capacity", "logits_from", "drafts")
        ),
        ("least", c_double),
        ("cache", c_void_p),
        ("parents", c_void_p),
        ("drafted", c_void_p),
        ("written", c_int64),
        ("controls", c_void_p),
        ("uniforms", c_void_p),
        ("seed", c_uint64),
        ("position_of_race", c_uint64),
        ("laws", c_void_p),
        ("branch", c_int64),
        ("siblings", c_void_p),
        ("weights", c_void_p),
        ("chances", c_void_p),
        ("trust", c_void_p),
    ]


class CHeadStep(Structure):
    _fields_ = [
        ("rows", c_int64),
        ("tokens", c_void_p),
        ("embedded", c_void_p),
        ("features", c_void_p),
        ("fuse", c_int64),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("texts", c_int64),
        ("text", POINTER(CHeadText)),
        ("logits", c_void_p),
        ("hidden", c_void_p),
        ("threads", c_int64),
        ("isa", c_int64),
    ]


STRUCTS: tuple[type[Structure], ...] = (
    *(CMatrix, CProduct, CLayer, CModel, CSegment, CPass),
    *(CHead, CHeadText, CHeadStep),
)
"""In the order of ``fd_struct_size``, by which the library's idea of each is checked when it is loaded."""
