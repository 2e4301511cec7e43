// The row-local parts of a decoder layer. Every function works on one row, or on rows that do not see each other.
#pragma once
#include "layout.h"

namespace foredraft {

enum CacheType : int { kCacheF32 = 0, kCacheBF16 = 1 };

// One request's rows in a pass, and its slot of the cache: [layers, 2, kv_heads, capacity, head_dim].
struct Segment {
    int64_t first;           // its first row in the pass
    int64_t rows;            // T >= 1
    int64_t start;           // committed tokens of the slot
    int64_t capacity;        // tokens that the slot's buffer holds
    void* cache;             // the whole slot's buffer
    const int32_t* parents;  // [T] indices within the segment, -1 the last committed token; null for a chain
};

struct AttentionShape {
    int64_t heads, kv_heads, head_dim;
    int64_t cache_type;
    int64_t window;  // a token sees so many tokens, itself included; 0 for all
    float scale;
    float softcap;  // 0 for none
};

// Where one layer's keys and values of one segment and kv head start.
struct View {
    const void* keys;
    const void* values;
};

constexpr long kKeyBlock = 256;  // places of a slot whose keys are summed over together

// What queries see of blocks of keys: largest scores and sums of weights [queries, count], weighed values [queries, count,
// head_dim].
struct Blocks {
    float *top, *sum, *mixed;
    long count, first;  // `first` is the number of the first block
};

struct Ops {
    void (*rms_norm)(const float* x, const float* weight, float eps, long n, float* y);
    // gate[i] becomes act(gate[i]) * up[i]; tanh_gelu chooses the tanh form of GELU instead of SiLU.
    void (*gate)(const float* gate, const float* up, long n, bool tanh_gelu, float* y);
    // Rotates `heads` heads in place by cos, sin [head_dim/2].
    void (*rope)(float* x, long heads, long head_dim, const float* cosine, const float* sine);
    void (*store)(const float* x, long n, int cache_type, void* target, long offset);
    // Queries [first, last) of a segment that read the keys of one kv head: i is query head i % group of row i / group, where
    // group = heads / kv_heads. q and out are its first row from the first of these heads on, rows `step` floats apart.
    void (*attend)(const AttentionShape&, const Segment&, const View&, const int64_t* positions, long first, long last,
                   const float* q, long q_step, float* out, long out_step);
    // The same in two steps: blocks [block, stop) of keys, into the queries' places of `to`; and all blocks of one query.
    void (*attend_blocks)(const AttentionShape&, const Segment&, const View&, const int64_t* positions, long first, long last,
                          const float* q, long q_step, long block, long stop, const Blocks& to);
    void (*merge)(const Blocks& from, long query, long dim, float* out);
    void (*softcap)(float* x, long n, float cap);
};

extern const Ops kOpsPortable;
extern const Ops kOpsAvx2;
extern const Ops kOpsAvx512;

}  // namespace foredraft
