// A whole step of an EAGLE-3 head in one parallel region; greedy drafts go on to further steps without leaving it.
#include "head.h"

#include <cmath>

#include "crew.h"

namespace foredraft {
namespace {

// One text at one step of a call.
struct Part {
    HeadText* text;
    Segment seen;  // counts pending rows, too, since new rows may descend from them
    long first;    // its first new row
    long pending;
    long wanted;   // its first row of logits
};

// Memory of a step; the caller's thread keeps it for the next.
struct Workspace {
    std::vector<float> x, h, both, qkv, mixed, gates, inner, logits;
    std::vector<int64_t> tokens, positions, chosen, wanted;
    std::vector<Part> parts;
    long ghosts = 0;  // rows before the first one, so that rows of a text can be counted from its first pending one
    Rounded rounded;

    void reserve(const Head& m, long rows, long most_ghosts, long logit_rows) {
        const size_t n = static_cast<size_t>(rows), all = n + static_cast<size_t>(most_ghosts);
        grow(x, n * m.hidden);
        grow(h, n * m.hidden);
        grow(both, n * 2 * m.hidden);
        grow(qkv, all * (m.heads + 2 * m.kv_heads) * m.head_dim);
        grow(mixed, all * m.heads * m.head_dim);
        grow(gates, n * 2 * m.intermediate);
        grow(inner, n * m.intermediate);
        grow(logits, static_cast<size_t>(logit_rows) * m.vocab);
        rounded.reserve(m.activations, n, std::max({2 * m.hidden, m.intermediate, m.heads * m.head_dim, m.fc.in}));
    }
};

// Lays out the rows of a step: where each text's are, and their positions.
void arrange(Workspace& w) {
    w.ghosts = 0;
    w.positions.clear();
    w.wanted.clear();
    long first = 0;
    for (Part& p : w.parts) {
        const HeadText& t = *p.text;
        const long rows = p.seen.rows - p.pending;
        p.first = first;
        p.seen.first = static_cast<int64_t>(w.positions.size());
        p.wanted = static_cast<long>(w.wanted.size());
        w.ghosts = std::max(w.ghosts, p.pending);
        const size_t base = w.positions.size();
        for (long i = 0; i < p.seen.rows; ++i) {
            const int64_t* parent = nullptr;
            const long above = p.seen.parents ? p.seen.parents[i] : i - 1;
            if (above >= 0) parent = &w.positions[base + above];
            w.positions.push_back(parent ? *parent + 1 : t.position);
        }
        for (long i = t.logits_from; i < rows; ++i) w.wanted.push_back(first + i);
        first += rows;
    }
}

// The largest of n logits, the first of equals; -1 if one is NaN or the largest is no number.
long largest(const float* x, long n) {
    using V4 = float __attribute__((vector_size(16)));
    using I4 = int32_t __attribute__((vector_size(16)));
    constexpr int kWays = 4;
    const V4 low = V4{} - HUGE_VALF;
    V4 top[kWays] = {low, low, low, low};
    I4 odd[kWays] = {};
    long i = 0;
    for (; i + 4 * kWays <= n; i += 4 * kWays) {
        for (int w = 0; w < kWays; ++w) {
            const V4 v = load<V4>(x + i + 4 * w);
            odd[w] |= v != v;
            top[w] = v > top[w] ? v : top[w];
        }
    }
    float best = -HUGE_VALF;
    bool nan = false;
    const auto see = [&](float v, bool strange) {
        nan = nan || strange;
        best = v > best ? v : best;
    };
    for (int w = 0; w < kWays; ++w) {
        for (int j = 0; j < 4; ++j) see(top[w][j], odd[w][j] != 0);
    }
    for (; i < n; ++i) see(x[i], x[i] != x[i]);
    if (nan || !std::isfinite(best)) return -1;
    return std::find(x, x + n, best) - x;
}

// One thread's view of a step.
class Worker : Crew {
  public:
    Worker(const Head& m, const HeadStep& s, Workspace& w, Shares& shares, Barrier& barrier,
           int thread, int team)
        : Crew(s.isa, m.activations, w.rounded, shares, barrier, thread, team), m_(m), s_(s), w_(w) {}

    void run() {
        features();
        step(s_.rows, s_.tokens, s_.embedded, s_.logits);
        if (s_.hidden) each_row(s_.rows, [&](long r) { std::copy_n(x(r), m_.hidden, s_.hidden + r * m_.hidden); });
        for (bool on = draft(s_.logits); on; on = draft(nullptr)) {
            const long rows = static_cast<long>(w_.parts.size());
            step(rows, w_.tokens.data(), nullptr, nullptr);
        }
    }

  private:
    const Head& m_;
    const HeadStep& s_;
    Workspace& w_;

    float* x(long row) { return w_.x.data() + row * m_.hidden; }
    float* qkv() { return w_.qkv.data() + w_.ghosts * (m_.heads + 2 * m_.kv_heads) * m_.head_dim; }
    float* mixed() { return w_.mixed.data() + w_.ghosts * m_.heads * m_.head_dim; }

    // Leaves the feature of each row in x.
    void features() {
        if (!s_.fuse) return each_row(s_.rows, [&](long r) { std::copy_n(s_.features + r * m_.hidden, m_.hidden, x(r)); });
        each_row(s_.rows, [&](long r) { round(m_.fc, s_.features, s_.rows, r, 0, m_.fc.in); });
        product(m_.fc, s_.features, s_.rows, w_.x.data(), m_.hidden, false);
    }

    // The layer over rows whose features are in x; leaves what it makes of them in x.
    void step(long rows, const int64_t* tokens, const float* embedded, float* logits) {
        join(rows, tokens, embedded);
        prepare();
        attend();
        product(m_.out, mixed(), rows, w_.x.data(), m_.hidden, true);
        each_row(rows, [&](long r) { normed(x(r), m_.mlp_norm, m_.gate_up, rows, r); });
        product(m_.gate_up, w_.h.data(), rows, w_.gates.data(), 2 * m_.intermediate, false);
        gated(m_.down, w_.gates.data(), rows, m_.intermediate, false, w_.inner.data());
        product(m_.down, w_.inner.data(), rows, w_.x.data(), m_.hidden, true);
        const long n = static_cast<long>(w_.wanted.size());
        if (n == 0) return;
        each_row(n, [&](long i) { normed(x(w_.wanted[i]), m_.final_norm, m_.lm_head, n, i); });
        product(m_.lm_head, w_.h.data(), n, logits ? logits : w_.logits.data(), m_.vocab, false);
    }

    void normed(const float* from, const float* weight, const Product& next, long n, long row) {
        ops_.rms_norm(from, weight, m_.norm_eps, m_.hidden, w_.h.data() + row * m_.hidden);
        round(next, w_.h.data(), n, row, 0, m_.hidden);
    }

    // Queries, keys and values of the normed embedding beside the normed feature.
    void join(long rows, const int64_t* tokens, const float* embedded) {
        const long d = m_.hidden;
        each_row(rows, [&](long r) {
            float *left = w_.both.data() + r * 2 * d, *right = left + d;
            if (embedded) {
                std::copy_n(embedded + r * d, d, left);
            } else {
                fd_rows(static_cast<int>(m_.table.format), m_.table.weights, d, tokens + r, 1, left);
                if (m_.table_scale != 1.0f) std::for_each(left, right, [&](float& v) { v *= m_.table_scale; });
            }
            ops_.rms_norm(left, m_.input_norm, m_.norm_eps, d, left);
            ops_.rms_norm(x(r), m_.hidden_norm, m_.norm_eps, d, right);
            if (m_.norm_before_residual) std::copy_n(right, d, x(r));
            round(m_.qkv, w_.both.data(), rows, r, 0, 2 * d);
        });
        product(m_.qkv, w_.both.data(), rows, qkv(), m_.qkv.out, false);
    }

    View view(const Part& p, long kv_head) const {
        const float* keys = p.text->cache + kv_head * p.text->capacity * m_.head_dim;
        return {keys, keys + m_.kv_heads * p.text->capacity * m_.head_dim};
    }

    // Turns q and k of the new rows, and writes k and v behind the others'.
    void prepare() {
        const long dim = m_.head_dim, heads = m_.heads + m_.kv_heads, width = (heads + m_.kv_heads) * dim;
        for (const Part& p : w_.parts) {
            const long rows = p.seen.rows - p.pending;
            for (long i = rows * thread_ / team_; i < rows * (thread_ + 1) / team_; ++i) {
                float* q = qkv() + (p.first + i) * width;
                const long at = w_.positions[p.seen.first + p.pending + i] * (dim / 2), place = p.seen.start + p.pending + i;
                ops_.rope(q, heads, dim, s_.cosine + at, s_.sine + at);
                for (long h = 0; h < m_.kv_heads; ++h) {
                    const View to = view(p, h);
                    const float* k = q + (m_.heads + h) * dim;
                    ops_.store(k, dim, kCacheF32, const_cast<void*>(to.keys), place * dim);
                    ops_.store(k + m_.kv_heads * dim, dim, kCacheF32, const_cast<void*>(to.values), place * dim);
                }
            }
        }
        meet();
    }

    // Tiles of (text, kv head, rows and query heads), taken by whichever thread is free.
    void attend() {
        const long dim = m_.head_dim, width = (m_.heads + 2 * m_.kv_heads) * dim, out = m_.heads * dim;
        const long group = m_.heads / m_.kv_heads;
        const AttentionShape a{m_.heads, m_.kv_heads, dim, kCacheF32, 0, m_.attention_scale, 0.0f};
        std::atomic<long>& next = shares_.counter(stage_++);
        long item = 0, mine = next.fetch_add(1), rows = 0;
        for (const Part& p : w_.parts) {
            const long before = p.first - p.pending;  // row 0 of the text as `seen` counts them
            rows = p.first + p.seen.rows - p.pending;
            const long start = p.pending * group, queries = (p.seen.rows - p.pending) * group;
            const long cuts = tiles(queries, static_cast<long>(w_.parts.size()) * m_.kv_heads);
            for (long h = 0; h < m_.kv_heads; ++h) {
                for (long tile = 0; tile < cuts; ++tile, ++item) {
                    if (item != mine) continue;
                    mine = next.fetch_add(1);
                    const long first = start + queries * tile / cuts, last = start + queries * (tile + 1) / cuts;
                    const long column = h * group * dim;
                    ops_.attend(a, p.seen, view(p, h), w_.positions.data(), first, last, qkv() + before * width + column, width,
                                mixed() + before * out + column, out);
                }
            }
        }
        meet();
        each_row(rows, [&](long r) { round(m_.out, mixed(), rows, r, 0, out); });
    }

    // Takes the likeliest token behind each text's last row; whether a draft goes on, its rows then being laid out.
    bool draft(const float* logits) {
        if (thread_ == 0) choose(logits ? logits : w_.logits.data());
        meet();
        return !w_.parts.empty();
    }

    void choose(const float* logits) {
        size_t kept = 0;
        for (Part& p : w_.parts) {
            HeadText& t = *p.text;
            if (t.drafts == 0) continue;
            const long rows = p.seen.rows - p.pending, row = p.wanted + rows - 1 - t.logits_from;
            const long best = largest(logits + row * m_.vocab, m_.vocab);
            if (best < 0) continue;
            const int64_t token = t.drafted[t.written++] = m_.token_ids[best];
            if (t.written == t.drafts) continue;
            std::memmove(x(static_cast<long>(kept)), x(p.first + rows - 1), m_.hidden * sizeof(float));
            w_.tokens[kept] = token;
            Part& to = w_.parts[kept++] = p;
            t.logits_from = 0;
            to.pending = p.seen.rows;
            to.seen.rows = p.seen.rows + 1;
        }
        w_.parts.resize(kept);
        if (kept) arrange(w_);
    }
};

}  // namespace
}  // namespace foredraft

using namespace foredraft;

extern "C" {

void fd_head(const Head* m, HeadStep* step) {
    static thread_local Workspace workspace;
    Workspace& w = workspace;  // the caller's, also when another thread of the team names it
    HeadStep s = *step;
    s.isa = usable_isa(static_cast<int>(s.isa));
    long drafts = 0, wanted = 0, reach = 0;
    w.parts.clear();
    for (HeadText* t = s.text; t < s.text + s.texts; ++t) {
        t->written = 0;
        w.parts.push_back({t, {0, t->pending + t->rows, t->committed, t->capacity, t->cache, t->parents}, 0, t->pending, 0});
        drafts = std::max<long>(drafts, t->drafts);
        wanted += t->rows - t->logits_from;
        reach = std::max<long>(reach, t->pending + t->rows + t->drafts);
    }
    w.tokens.resize(static_cast<size_t>(s.texts));
    w.reserve(*m, s.rows, reach, std::max<long>(s.logits ? 0 : wanted, drafts > 1 ? s.texts : 0));
    arrange(w);
    Shares shares(s.threads, static_cast<size_t>(3 + 16 * std::max(1L, drafts)));
    Barrier barrier;
    with_team(s.threads, [&](int thread, int team) { Worker(*m, s, w, shares, barrier, thread, team).run(); });
}

}  // extern "C"
