// What fd_pass reads; kernels/structs.py mirrors these structs field by field.
#pragma once
#include "layout.h"
#include "ops.h"

namespace foredraft {

struct Matrix {
    int64_t format;
    const uint8_t* weights;
    int64_t out;
    const float* bias;  // may be null
};

// Up to three matrices stacked along their outputs (q, k, v; gate, up).
struct Product {
    int64_t in;
    int64_t out;  // of all parts
    int64_t parts;
    Matrix part[3];
};

struct Layer {
    const float* attn_norm;
    const float* qk_norm;         // [heads + kv_heads, head_dim], may be null
    const float* post_attn_norm;  // may be null
    const float* mlp_norm;
    const float* post_mlp_norm;   // may be null
    Product qkv, out, gate_up, down;
    int64_t window;  // 0 for all
    int64_t rope;    // which of the pass's tables
};

struct Model {
    int64_t hidden, heads, kv_heads, head_dim, intermediate, layers, vocab;
    int64_t tanh_gelu, cache_type, activations;
    float norm_eps, attention_scale, attention_softcap, logit_softcap, embedding_scale;
    float unused;
    const Layer* layer;
    const float* final_norm;
    Matrix embedding;
    Product head;
};

struct Pass {
    int64_t rows;
    const int64_t* tokens;     // [rows]
    const int64_t* positions;  // [rows]
    const float* cosine[2];    // [positions, head_dim/2]
    const float* sine[2];
    int64_t segments;
    const Segment* segment;
    int64_t logit_rows;
    const int64_t* logit_row;  // [logit_rows]
    float* logits;             // [logit_rows, vocab]
    int64_t* likeliest;        // [logit_rows] the first index of the largest logit; -1 if one is NaN or that is not finite
    int64_t taps;
    const int64_t* tap;        // [taps] ascending or not: 0 = embedding output, i = output of layer i
    float* tapped;             // [rows, taps, hidden]
    int64_t threads, isa;
};

}  // namespace foredraft

extern "C" void fd_rows(int format, const uint8_t* packed, long in, const int64_t* ids, long n, float* y);
