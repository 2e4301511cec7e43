// A whole decoder pass in one parallel region.
#include "crew.h"
#include "head.h"
#include "law_passes.h"

namespace foredraft {
namespace {

// How the queries of one segment and kv head are cut into items of work: tiles of queries, and where those are too few for
// all threads, parts of the blocks of keys as well. `at` is where their sums begin among all that are put together later.
struct Cut {
    const Segment* segment;
    long queries, tiles, parts, first, blocks, at;
};

// Calls f for each segment; returns how many sums there are to put together.
template <class F>
long each_cut(const Model& m, const Pass& p, long team, long window, F f) {
    const long lists = p.segments * m.kv_heads;
    long at = 0;
    for (const Segment* s = p.segment; s < p.segment + p.segments; ++s) {
        const long queries = s->rows * (m.heads / m.kv_heads), few = (queries + kQueryTile - 1) / kQueryTile;
        const long low = window > 0 ? std::max<long>(0, p.positions[s->first] + 1 - window) : 0;
        const long first = std::min<long>(low, s->start) / kKeyBlock;
        const long blocks = (s->start + s->rows + kKeyBlock - 1) / kKeyBlock - first;
        const long parts = team > 1 ? std::min(blocks, (items(team) + lists * few - 1) / (lists * few)) : 1;
        f(Cut{s, queries, parts > 1 ? few : tiles(queries, lists, team), parts, first, blocks, at});
        if (parts > 1) at += m.kv_heads * queries * blocks;
    }
    return at;
}

// Memory of one pass; the caller's thread keeps it for the next.
struct Workspace {
    std::vector<float> x, h, qkv, mixed, gates, inner;
    std::vector<float> top, sum, parts;  // of attention that was cut along the keys
    std::vector<int64_t> best;           // of each logit row, the likeliest token in every thread's stretch of the vocabulary
    Rounded rounded;

    void reserve(const Model& m, const Pass& p) {
        const size_t n = static_cast<size_t>(p.rows), width = m.heads * m.head_dim;
        grow(x, n * m.hidden);
        grow(h, n * m.hidden);
        grow(qkv, n * (m.heads + 2 * m.kv_heads) * m.head_dim);
        grow(mixed, n * width);
        grow(gates, n * 2 * m.intermediate);
        grow(inner, n * m.intermediate);
        best.resize(static_cast<size_t>(p.logit_rows * p.threads));
        const long sums = each_cut(m, p, static_cast<long>(p.threads), 0, [](const Cut&) {});
        grow(top, static_cast<size_t>(sums));
        grow(sum, static_cast<size_t>(sums));
        grow(parts, static_cast<size_t>(sums * m.head_dim));
        rounded.reserve(m.activations, n, std::max({m.hidden, m.intermediate, static_cast<int64_t>(width)}));
    }
};

// One thread's view of the pass.
class Worker : Crew {
  public:
    Worker(const Model& m, const Pass& p, Workspace& w, Shares& shares, Barrier& barrier,
           int thread, int team)
        : Crew(p.isa, m.activations, w.rounded, shares, barrier, thread, team), m_(m), p_(p), w_(w) {}

    void run() {
        embed();
        for (long i = 0; i < m_.layers; ++i) layer(i);
        logits();
    }

  private:
    const Model& m_;
    const Pass& p_;
    Workspace& w_;

    void embed() {
        const long d = m_.hidden;
        each_row(p_.rows, [&](long r) {
            float* x = w_.x.data() + r * d;
            fd_rows(static_cast<int>(m_.embedding.format), m_.embedding.weights, d, p_.tokens + r, 1, x);
            if (m_.embedding_scale != 1.0f) {
                for (long i = 0; i < d; ++i) x[i] *= m_.embedding_scale;
            }
            tap(0, r);
        });
    }

    void tap(long layer, long row) {
        const size_t bytes = m_.hidden * sizeof(float);
        for (long t = 0; t < p_.taps; ++t) {
            if (p_.tap[t] == layer) std::memcpy(p_.tapped + (row * p_.taps + t) * m_.hidden, w_.x.data() + row * m_.hidden, bytes);
        }
    }

    // The norm of every row, rounded for the product that reads it.
    void norm(const float* weight, const float* x, const Product& next, float* y) {
        each_row(p_.rows, [&](long r) {
            ops_.rms_norm(x + r * m_.hidden, weight, m_.norm_eps, m_.hidden, y + r * m_.hidden);
            round(next, y, p_.rows, r, 0, m_.hidden);
        });
    }

    // x += product, through a norm of its own where the family has one.
    void residual(const Product& from, const float* x, const float* post_norm) {
        const long d = m_.hidden;
        if (!post_norm) return product(from, x, p_.rows, w_.x.data(), d, true);
        product(from, x, p_.rows, w_.h.data(), d, false);
        each_row(p_.rows, [&](long r) {
            float *h = w_.h.data() + r * d, *target = w_.x.data() + r * d;
            ops_.rms_norm(h, post_norm, m_.norm_eps, d, h);
            for (long i = 0; i < d; ++i) target[i] += h[i];
        });
    }

    View view(long layer, const Segment& s, long kv_head) const {
        const size_t size = m_.cache_type == kCacheF32 ? 4 : 2, head = s.capacity * m_.head_dim * size;
        const char* base = static_cast<const char*>(s.cache) + (2 * layer * m_.kv_heads + kv_head) * head;
        return {base, base + m_.kv_heads * head};
    }

    // Normalises and turns q and k of every row, and writes k and v behind the committed ones.
    void prepare(long i, const Layer& l) {
        const long dim = m_.head_dim, heads = m_.heads + m_.kv_heads, width = (m_.heads + 2 * m_.kv_heads) * dim;
        each_row(p_.rows, [&](long r) {
            float* q = w_.qkv.data() + r * width;
            if (l.qk_norm) {
                for (long h = 0; h < heads; ++h) ops_.rms_norm(q + h * dim, l.qk_norm + h * dim, m_.norm_eps, dim, q + h * dim);
            }
            const long at = p_.positions[r] * (dim / 2);
            ops_.rope(q, heads, dim, p_.cosine[l.rope] + at, p_.sine[l.rope] + at);
            const Segment* s = p_.segment;
            while (r >= s->first + s->rows) ++s;
            const long place = (s->start + r - s->first) * dim;
            for (long h = 0; h < m_.kv_heads; ++h) {
                const View to = view(i, *s, h);
                const float* k = q + (m_.heads + h) * dim;
                ops_.store(k, dim, static_cast<int>(m_.cache_type), const_cast<void*>(to.keys), place);
                ops_.store(k + m_.kv_heads * dim, dim, static_cast<int>(m_.cache_type), const_cast<void*>(to.values), place);
            }
        });
    }

    // Sums over blocks of keys of one segment and kv head, in the memory that threads share.
    Blocks sums(const Cut& c, long kv_head) const {
        const long at = c.at + kv_head * c.queries * c.blocks;
        return {w_.top.data() + at, w_.sum.data() + at, w_.parts.data() + at * m_.head_dim, c.blocks, c.first};
    }

    // Items, taken by whichever thread is free; then what was cut along the keys is put together.
    void attend(long i, const Layer& l) {
        const long dim = m_.head_dim, width = (m_.heads + 2 * m_.kv_heads) * dim, out = m_.heads * dim;
        const long group = m_.heads / m_.kv_heads;
        const AttentionShape a{m_.heads, m_.kv_heads, dim, m_.cache_type, l.window, m_.attention_scale, m_.attention_softcap};
        std::atomic<long>& next = shares_.counter(stage_++);
        long item = 0, mine = next.fetch_add(1);
        const long window = l.window;
        const auto rounded = [&](const Segment& s, long h, long query) {
            if (dim % 32 == 0) round(l.out, w_.mixed.data(), p_.rows, s.first + query / group, (h * group + query % group) * dim, dim);
        };
        bool cut = false;
        each_cut(m_, p_, team_, window, [&](const Cut& c) {
            const Segment& s = *c.segment;
            cut |= c.parts > 1;
            for (long h = 0; h < m_.kv_heads; ++h) {
                for (long tile = 0; tile < c.tiles * c.parts; ++tile, ++item) {
                    if (item != mine) continue;
                    mine = next.fetch_add(1);
                    const long q = tile / c.parts, part = tile % c.parts;
                    const long first = c.queries * q / c.tiles, last = c.queries * (q + 1) / c.tiles;
                    const float* query = w_.qkv.data() + s.first * width + h * group * dim;
                    if (c.parts > 1) {
                        const long block = c.first + c.blocks * part / c.parts, stop = c.first + c.blocks * (part + 1) / c.parts;
                        ops_.attend_blocks(a, s, view(i, s, h), p_.positions, first, last, query, width, block, stop, sums(c, h));
                        continue;
                    }
                    float* y = w_.mixed.data() + s.first * out + h * group * dim;
                    ops_.attend(a, s, view(i, s, h), p_.positions, first, last, query, width, y, out);
                    for (long k = first; k < last; ++k) rounded(s, h, k);
                }
            }
        });
        meet();
        if (cut) put_together(window, rounded);
        if (dim % 32 != 0) each_row(p_.rows, [&](long r) { round(l.out, w_.mixed.data(), p_.rows, r, 0, out); });
    }

    template <class F>
    void put_together(long window, F rounded) {
        const long dim = m_.head_dim, group = m_.heads / m_.kv_heads;
        each_cut(m_, p_, team_, window, [&](const Cut& c) {
            if (c.parts == 1) return;
            const long all = m_.kv_heads * c.queries;
            for (long k = all * thread_ / team_; k < all * (thread_ + 1) / team_; ++k) {
                const long h = k / c.queries, query = k % c.queries;
                const long row = c.segment->first + query / group, head = h * group + query % group;
                ops_.merge(sums(c, h), query, dim, w_.mixed.data() + (row * m_.heads + head) * dim);
                rounded(*c.segment, h, query);
            }
        });
        meet();
    }

    void layer(long i) {
        const Layer& l = m_.layer[i];
        const long inner = m_.intermediate;
        norm(l.attn_norm, w_.x.data(), l.qkv, w_.h.data());
        product(l.qkv, w_.h.data(), p_.rows, w_.qkv.data(), l.qkv.out, false);
        prepare(i, l);
        attend(i, l);
        residual(l.out, w_.mixed.data(), l.post_attn_norm);
        norm(l.mlp_norm, w_.x.data(), l.gate_up, w_.h.data());
        product(l.gate_up, w_.h.data(), p_.rows, w_.gates.data(), 2 * inner, false);
        gated(l.down, w_.gates.data(), p_.rows, inner, m_.tanh_gelu != 0, w_.inner.data());
        residual(l.down, w_.inner.data(), l.post_mlp_norm);
        if (p_.taps) each_row(p_.rows, [&](long r) { tap(i + 1, r); });
    }

    // While the logits are in the caches: each thread looks at about the tokens whose logits it has just made.
    void likeliest(long n) {
        const long first = m_.vocab * thread_ / team_, last = m_.vocab * (thread_ + 1) / team_;
        for (long r = 0; r < n; ++r) {
            const long at = rows(isa_).argmax(p_.logits + r * m_.vocab + first, last - first);
            w_.best[r * team_ + thread_] = at < 0 ? -1 : first + at;
        }
        meet();
        for (long r = n * thread_ / team_; r < n * (thread_ + 1) / team_; ++r) {
            const float* row = p_.logits + r * m_.vocab;
            const int64_t* found = w_.best.data() + r * team_;
            int64_t best = found[0];
            for (int i = 1; i < team_ && best >= 0; ++i) best = found[i] < 0 ? -1 : row[found[i]] > row[best] ? found[i] : best;
            p_.likeliest[r] = best;
        }
    }

    void logits() {
        const long d = m_.hidden, n = p_.logit_rows;
        if (n == 0) return;
        each_row(n, [&](long r) {
            ops_.rms_norm(w_.x.data() + p_.logit_row[r] * d, m_.final_norm, m_.norm_eps, d, w_.h.data() + r * d);
            round(m_.head, w_.h.data(), n, r, 0, d);
        });
        product(m_.head, w_.h.data(), n, p_.logits, m_.vocab, false);
        if (m_.logit_softcap > 0) {
            each_row(n, [&](long r) { ops_.softcap(p_.logits + r * m_.vocab, m_.vocab, m_.logit_softcap); });
        }
        likeliest(n);
    }
};

}  // namespace
}  // namespace foredraft

using namespace foredraft;

extern "C" {

size_t fd_struct_size(int which) {
    const size_t sizes[] = {sizeof(Matrix), sizeof(Product), sizeof(Layer), sizeof(Model), sizeof(Segment), sizeof(Pass),
                            sizeof(Head), sizeof(HeadText), sizeof(HeadStep)};
    return which >= 0 && which < static_cast<int>(sizeof sizes / sizeof *sizes) ? sizes[which] : 0;
}

void fd_pass(const Model* m, const Pass* pass) {
    static thread_local Workspace workspace;
    Workspace& w = workspace;  // the caller's, also when another thread of the team names it
    Pass p = *pass;
    p.isa = usable_isa(static_cast<int>(p.isa));
    w.reserve(*m, p);
    Shares shares(p.threads, static_cast<size_t>(9 * m->layers + 3));
    Barrier barrier;
    with_team(p.threads, [&](int thread, int team) { Worker(*m, p, w, shares, barrier, thread, team).run(); });
}

}  // extern "C"
