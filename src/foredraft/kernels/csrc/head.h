// What fd_head reads; kernels/structs.py mirrors these structs field by field.
#pragma once
#include "pass.h"

namespace foredraft {

// An EAGLE-3 head: one decoder layer over the embedding of a token beside the feature of the position before it.
struct Head {
    int64_t hidden, heads, kv_heads, head_dim, intermediate, vocab;  // vocab: tokens that it can propose
    int64_t activations;
    int64_t norm_before_residual;
    float norm_eps, attention_scale, table_scale, unused;
    const float *input_norm, *hidden_norm, *mlp_norm, *final_norm;
    Product fc, q, kv, out, gate_up, down, lm_head;
    Matrix table;              // the target's embedding; without weights rows come embedded
    const int64_t* token_ids;  // [vocab] the target's id of each of its tokens
};

// One text in a step: rows that follow its committed and its pending ones.
struct HeadText {
    int64_t rows;            // n >= 1
    int64_t committed;       // rows whose keys stay
    int64_t pending;         // rows behind them, of earlier steps
    int64_t position;        // of the row that follows the last committed one
    int64_t capacity;        // rows that the buffer holds; a draft writes up to `drafts` - 1 behind the new ones
    int64_t logits_from;     // wanted are rows from this one on; the others only leave their keys and values
    int64_t drafts;          // tokens to draft behind the last row
    double least;            // with `chances`: a draft ends with the token that makes the chance of all of it less than this
    float* cache;            // [2, kv_heads, capacity, head_dim]
    const int32_t* parents;  // [pending + n] counted from the first pending row, -1 the last committed; null for a chain
    int64_t* drafted;        // [drafts] the target's ids
    int64_t written;         // out: how many there are; fewer where logits are no numbers or law.cpp asks the reference
    const void* controls;    // temperature and filters (law.cpp) that drafted tokens are drawn with; null for the likeliest
    const double* uniforms;  // [drafts] in [0, 1), one a draw; null to run races (race.cpp) instead
    uint64_t seed, position_of_race;  // the races' noise, that of the first drafted token
    float* laws;             // [drafts, table.out] gets what each token was drawn from; null if nobody asks
    int64_t branch;          // of the likeliest tokens in each one's place, itself first, so many are told
    int64_t* siblings;       // [drafts, branch] the target's ids
    float* weights;          // [drafts, branch] their probabilities
    double* chances;         // [drafts] the head's probability of each token; null if nobody asks
    const double* trust;     // [10] the chance of a token by its probability's first decimal; with `chances`
};

struct HeadStep {
    int64_t rows;           // of all texts
    const int64_t* tokens;  // [rows] the target's ids
    const float* embedded;  // [rows, hidden]; may be null if the head has a table
    const float* features;  // [rows, hidden], or [rows, fc.in] hidden states of the target if `fuse`
    int64_t fuse;
    const float *cosine, *sine;  // [positions, head_dim / 2]
    int64_t texts;
    HeadText* text;
    float* logits;  // [wanted rows, vocab]; may be null where texts only draft
    float* hidden;  // [wanted rows, hidden]: features of the rows' children; may be null
    int64_t threads, isa;
};

}  // namespace foredraft
