// A whole step of an EAGLE-3 head in one parallel region; drafts go on to further steps without leaving it.
#include "head.h"

#include <cmath>

#include "crew.h"
#include "law_passes.h"

// law.cpp, draws.cpp, race.cpp
extern "C" long fd_law(const void* controls, const void* logits, int wide, long count, long n, const int64_t* tokens,
                       const int64_t* starts, void* out, const int64_t* wanted, double* chances, int threads, int isa);
extern "C" long fd_draw(const void* p, const void* q, int wide, long n, double wp, double wq, long without, double u,
                        double* total, int isa);
extern "C" long fd_race(const void* p, int wide, long n, uint64_t seed, uint64_t position, int threads, int isa);

namespace foredraft {
namespace {

// One text at one step of a call.
struct Part {
    HeadText* text;
    Segment seen;  // counts pending rows, too, since new rows may descend from them
    long first;    // its first new row
    long pending;
    long wanted;   // its first wanted row, counted among those of all texts
    double sure = 1.0;  // the chance that all that was drafted is accepted
};

// Memory of a step; the caller's thread keeps it for the next.
struct Workspace {
    std::vector<float> feature, both, kv;                              // of all rows
    std::vector<float> picked, x, h, q, mixed, gates, inner, logits;  // of wanted rows
    std::vector<float> law, spread;                                   // of the head's tokens, of all the target's
    std::vector<int64_t> tokens, positions, wanted;
    std::vector<Part> parts;
    long ghosts = 0;  // rows before the first one, so that rows of a text can be counted from its first pending one
    Rounded rounded;

    void reserve(const Head& m, long rows, long wanted_rows, long most_ghosts, bool own_logits) {
        const size_t all = static_cast<size_t>(rows), n = static_cast<size_t>(wanted_rows);
        const size_t counted = n + static_cast<size_t>(most_ghosts), most = std::max(all, n);
        grow(feature, most * m.hidden);
        grow(both, most * 2 * m.hidden);
        grow(kv, most * 2 * m.kv_heads * m.head_dim);
        grow(picked, n * 2 * m.hidden);
        grow(x, n * m.hidden);
        grow(h, n * m.hidden);
        grow(q, counted * m.heads * m.head_dim);
        grow(mixed, counted * m.heads * m.head_dim);
        grow(gates, n * 2 * m.intermediate);
        grow(inner, n * m.intermediate);
        if (own_logits) grow(logits, n * m.vocab);
        rounded.reserve(m.activations, most, std::max({2 * m.hidden, m.intermediate, m.heads * m.head_dim, m.fc.in}));
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
        w.ghosts = std::max<long>(w.ghosts, p.pending + t.logits_from);
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

// One thread's view of a step.
class Worker : Crew {
  public:
    Worker(const Head& m, const HeadStep& s, Workspace& w, Shares& shares, Barrier& barrier,
           int thread, int team)
        : Crew(s.isa, m.activations, w.rounded, shares, barrier, thread, team), m_(m), s_(s), w_(w) {}

    void run() {
        features();
        step(s_.rows, s_.tokens, s_.embedded, s_.logits);
        if (s_.hidden) each_row(wanted(), [&](long i) { std::copy_n(x(i), m_.hidden, s_.hidden + i * m_.hidden); });
        for (bool on = draft(s_.logits); on; on = draft(nullptr)) {
            const long rows = static_cast<long>(w_.parts.size());
            step(rows, w_.tokens.data(), nullptr, nullptr);
        }
    }

  private:
    const Head& m_;
    const HeadStep& s_;
    Workspace& w_;

    long wanted() const { return static_cast<long>(w_.wanted.size()); }
    float* feature(long row) { return w_.feature.data() + row * m_.hidden; }
    float* x(long wanted) { return w_.x.data() + wanted * m_.hidden; }
    float* q() { return w_.q.data() + w_.ghosts * m_.heads * m_.head_dim; }
    float* mixed() { return w_.mixed.data() + w_.ghosts * m_.heads * m_.head_dim; }

    void features() {
        if (!s_.fuse) return each_row(s_.rows, [&](long r) { std::copy_n(s_.features + r * m_.hidden, m_.hidden, feature(r)); });
        each_row(s_.rows, [&](long r) { round(m_.fc, s_.features, s_.rows, r, 0, m_.fc.in); });
        product(m_.fc, s_.features, s_.rows, w_.feature.data(), m_.hidden, false);
    }

    // Keys and values of all rows; of the wanted ones what the layer makes of them, left in x, and logits. Nobody asks a
    // row of committed text for more than its keys and values, unless it is the last: the layer is the head's only one.
    void step(long rows, const int64_t* tokens, const float* embedded, float* logits) {
        const long n = wanted();
        join(rows, tokens, embedded);
        prepare();
        if (n == 0) return;
        attend();
        product(m_.out, mixed(), n, w_.x.data(), m_.hidden, true);
        each_row(n, [&](long i) { normed(i, m_.mlp_norm, m_.gate_up); });
        product(m_.gate_up, w_.h.data(), n, w_.gates.data(), 2 * m_.intermediate, false);
        gated(m_.down, w_.gates.data(), n, m_.intermediate, false, w_.inner.data());
        product(m_.down, w_.inner.data(), n, w_.x.data(), m_.hidden, true);
        each_row(n, [&](long i) { normed(i, m_.final_norm, m_.lm_head); });
        product(m_.lm_head, w_.h.data(), n, logits ? logits : w_.logits.data(), m_.vocab, false);
    }

    void normed(long i, const float* weight, const Product& next) {
        ops_.rms_norm(x(i), weight, m_.norm_eps, m_.hidden, w_.h.data() + i * m_.hidden);
        round(next, w_.h.data(), wanted(), i, 0, m_.hidden);
    }

    // From the normed embedding beside the normed feature: keys and values of all rows, queries of the wanted ones and,
    // in x, where their residual sums start.
    void join(long rows, const int64_t* tokens, const float* embedded) {
        const long d = m_.hidden, n = wanted(), wide = m_.heads * m_.head_dim;
        const bool all = n == rows;
        float* joined = w_.both.data();
        each_row(rows, [&](long r) {
            float *left = joined + r * 2 * d, *right = left + d;
            if (embedded) {
                std::copy_n(embedded + r * d, d, left);
            } else {
                fd_rows(static_cast<int>(m_.table.format), m_.table.weights, d, tokens + r, 1, left);
                if (m_.table_scale != 1.0f) std::for_each(left, right, [&](float& v) { v *= m_.table_scale; });
            }
            ops_.rms_norm(left, m_.input_norm, m_.norm_eps, d, left);
            ops_.rms_norm(feature(r), m_.hidden_norm, m_.norm_eps, d, right);
            if (all) start(r, r);
            round(m_.kv, joined, rows, r, 0, 2 * d);
        });
        if (all) outputs(m_.q, joined, rows, q(), wide, false);
        product(m_.kv, joined, rows, w_.kv.data(), m_.kv.out, false);
        if (all || n == 0) return;
        each_row(n, [&](long i) {
            std::copy_n(joined + w_.wanted[i] * 2 * d, 2 * d, w_.picked.data() + i * 2 * d);
            start(i, w_.wanted[i]);
            round(m_.q, w_.picked.data(), n, i, 0, 2 * d);
        });
        product(m_.q, w_.picked.data(), n, q(), wide, false);
    }

    void start(long i, long row) {
        const float* right = w_.both.data() + row * 2 * m_.hidden + m_.hidden;
        std::copy_n(m_.norm_before_residual ? right : feature(row), m_.hidden, x(i));
    }

    View view(const Part& p, long kv_head) const {
        const float* keys = p.text->cache + kv_head * p.text->capacity * m_.head_dim;
        return {keys, keys + m_.kv_heads * p.text->capacity * m_.head_dim};
    }

    // Turns q and k of the new rows, and writes k and v behind the others'.
    void prepare() {
        const long dim = m_.head_dim, half = m_.kv_heads * dim;
        for (const Part& p : w_.parts) {
            const long rows = p.seen.rows - p.pending;
            for (long i = rows * thread_ / team_; i < rows * (thread_ + 1) / team_; ++i) {
                const long at = w_.positions[p.seen.first + p.pending + i] * (dim / 2), place = p.seen.start + p.pending + i;
                float* k = w_.kv.data() + (p.first + i) * 2 * half;
                ops_.rope(k, m_.kv_heads, dim, s_.cosine + at, s_.sine + at);
                for (long h = 0; h < m_.kv_heads; ++h) {
                    const View to = view(p, h);
                    ops_.store(k + h * dim, dim, kCacheF32, const_cast<void*>(to.keys), place * dim);
                    ops_.store(k + half + h * dim, dim, kCacheF32, const_cast<void*>(to.values), place * dim);
                }
                const long mine = i - p.text->logits_from;
                if (mine >= 0) ops_.rope(q() + (p.wanted + mine) * m_.heads * dim, m_.heads, dim, s_.cosine + at, s_.sine + at);
            }
        }
        meet();
    }

    // Tiles of (text, kv head, wanted rows and query heads), taken by whichever thread is free.
    void attend() {
        const long dim = m_.head_dim, width = m_.heads * dim, group = m_.heads / m_.kv_heads;
        const AttentionShape a{m_.heads, m_.kv_heads, dim, kCacheF32, 0, m_.attention_scale, 0.0f};
        std::atomic<long>& next = shares_.counter(stage_++);
        long item = 0, mine = next.fetch_add(1);
        for (const Part& p : w_.parts) {
            const long passed = p.pending + p.text->logits_from, before = p.wanted - passed;  // row 0 as `seen` counts them
            const long start = passed * group, queries = (p.seen.rows - passed) * group;
            const long cuts = tiles(queries, static_cast<long>(w_.parts.size()) * m_.kv_heads, team_);
            for (long h = 0; h < m_.kv_heads; ++h) {
                for (long tile = 0; tile < cuts; ++tile, ++item) {
                    if (item != mine) continue;
                    mine = next.fetch_add(1);
                    const long first = start + queries * tile / cuts, last = start + queries * (tile + 1) / cuts;
                    const long column = before * width + h * group * dim;
                    ops_.attend(a, p.seen, view(p, h), w_.positions.data(), first, last, q() + column, width, mixed() + column,
                                width);
                }
            }
        }
        meet();
        each_row(wanted(), [&](long i) { round(m_.out, mixed(), wanted(), i, 0, width); });
    }

    // Draws the next token of a text from a row of logits; -1 if there is no law, or the reference must be asked for it.
    long drawn(const HeadText& t, const float* logits) {
        const long n = m_.vocab, all = m_.table.out;
        grow(w_.law, n);
        float* p = w_.law.data();
        if (fd_law(t.controls, logits, 0, 1, n, nullptr, nullptr, p, nullptr, nullptr, 1, isa_) != 1) return -1;
        if (!t.uniforms) return race(t, p);
        double mass;
        const long drawn = fd_draw(p, nullptr, 0, n, 1.0, 0.0, -1, t.uniforms[t.written], &mass, isa_);
        if (drawn >= 0 && t.laws) {
            float* law = t.laws + t.written * all;
            std::fill_n(law, all, 0.0f);
            for (long i = 0; i < n; ++i) law[m_.token_ids[i]] = p[i];
        }
        return drawn;
    }

    // The likeliest tokens of a row of logits, of which `top` is the largest; the lowest of equals first.
    void tell_siblings(const HeadText& t, const float* logits, float top) {
        const long n = m_.vocab, most = std::min<long>(t.branch, n);
        const RowKernels& k = rows(isa_);
        const float by = static_cast<float>(1.0 / k.weigh(logits, n, top, 1.0f, nullptr));
        int64_t* ids = t.siblings + t.written * t.branch;
        float* values = t.weights + t.written * t.branch;
        std::fill_n(ids, t.branch, -1);
        std::fill_n(values, t.branch, -HUGE_VALF);
        float least = -HUGE_VALF;
        for (long i = 0; i < n; ++i) {
            if (!(logits[i] > least)) continue;
            long at = most - 1;
            for (; at > 0 && logits[i] > values[at - 1]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
            values[at] = logits[i], ids[at] = m_.token_ids[i];
            least = values[most - 1];
        }
        for (long i = 0; i < t.branch; ++i) values[i] = ids[i] < 0 ? 0.0f : k.weight(values[i], top, 1.0f) * by;
    }

    // Whether what was drafted is likely enough for the draft to go on behind token `best` of a row of logits.
    bool sure_enough(Part& p, const float* logits, long best) const {
        const HeadText& t = *p.text;
        if (!t.chances) return true;
        const double chance =
            t.controls ? w_.law[best] : 1.0 / rows(isa_).weigh(logits, m_.vocab, logits[best], 1.0f, nullptr);
        t.chances[t.written - 1] = chance;
        p.sure *= t.trust[std::min(static_cast<int>(10 * chance), 9)];
        return p.sure >= t.least;
    }

    // The noise of a position belongs to the target's tokens, so these run.
    long race(const HeadText& t, const float* p) {
        const long n = m_.vocab, all = m_.table.out;
        w_.spread.assign(static_cast<size_t>(all), 0.0f);
        for (long i = 0; i < n; ++i) w_.spread[m_.token_ids[i]] = p[i];
        const long token = fd_race(w_.spread.data(), 0, all, t.seed, t.position_of_race + t.written, 1, isa_);
        return token < 0 ? -1 : std::lower_bound(m_.token_ids, m_.token_ids + n, token) - m_.token_ids;
    }

    // Takes the next token behind each text's last row; whether a draft goes on, its rows then being laid out.
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
            const long last = p.wanted + p.seen.rows - p.pending - t.logits_from - 1;
            const float* row = logits + last * m_.vocab;
            const long best = t.controls ? drawn(t, row) : rows(isa_).argmax(row, m_.vocab);
            if (best < 0) continue;
            if (t.branch > 1) tell_siblings(t, row, row[best]);
            const int64_t token = t.drafted[t.written++] = m_.token_ids[best];
            if (!sure_enough(p, row, best) || t.written == t.drafts) continue;
            std::copy_n(x(last), m_.hidden, feature(static_cast<long>(kept)));
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
    w.reserve(*m, s.rows, std::max<long>(wanted, drafts > 1 ? s.texts : 0), reach, !s.logits || drafts > 1);
    arrange(w);
    Shares shares(s.threads, static_cast<size_t>(3 + 19 * std::max(1L, drafts)));
    Barrier barrier;
    with_team(s.threads, [&](int thread, int team) { Worker(*m, s, w, shares, barrier, thread, team).run(); });
}

}  // extern "C"
