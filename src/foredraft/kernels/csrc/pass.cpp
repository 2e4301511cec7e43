// A whole decoder pass in one parallel region. Rows are shared out where they are independent, outputs in the products;
// no sum is ever split, so neither threads nor company change a bit.
#include "pass.h"

#include <algorithm>
#include <deque>

#include "barrier.h"
#include "linear.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace foredraft {
namespace {

constexpr long kRowTile = 16;  // rows of one head that share a reading of keys and values

// Memory of one pass; the caller's thread keeps it for the next.
struct Workspace {
    std::vector<float> x, h, qkv, mixed, gates, inner;
    Scratch wide, narrow;

    void reserve(const Model& m, const Pass& p) {
        const size_t n = static_cast<size_t>(p.rows), width = m.heads * m.head_dim;
        grow(x, n * m.hidden);
        grow(h, n * m.hidden);
        grow(qkv, n * (m.heads + 2 * m.kv_heads) * m.head_dim);
        grow(mixed, n * width);
        grow(gates, n * 2 * m.intermediate);
        grow(inner, n * m.intermediate);
        if (m.activations == kFloat) return;
        const size_t blocks = n * (std::max({m.hidden, m.intermediate, static_cast<int64_t>(width)}) / 32);
        wide.reserve(blocks);
        if (m.activations == kInt8) narrow.reserve(blocks);
    }

    static void grow(std::vector<float>& v, size_t size) {
        if (v.size() < size) v.resize(size);
    }
};

// One thread's view of the pass.
class Worker {
  public:
    Worker(const Model& m, const Pass& p, Workspace& w, std::deque<std::atomic<long>>& counters, Barrier& barrier,
           int thread, int team)
        : m_(m), p_(p), w_(w), counters_(counters), barrier_(barrier), ops_(p.isa == kIsaAvx2 || p.isa == kIsaAvx512 ? kOpsAvx2 : kOpsPortable), thread_(thread), team_(team) {}

    void run() {
        embed();
        for (long i = 0; i < m_.layers; ++i) layer(i);
        logits();
    }

  private:
    const Model& m_;
    const Pass& p_;
    Workspace& w_;
    std::deque<std::atomic<long>>& counters_;
    Barrier& barrier_;
    const Ops& ops_;
    int thread_, team_;
    size_t stage_ = 0;

    void meet() {
        if (team_ > 1) barrier_.meet(team_);
    }

    template <class F>
    void each_row(long rows, F f) {
        for (long r = rows * thread_ / team_; r < rows * (thread_ + 1) / team_; ++r) f(r);
        meet();
    }

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

    // Which kinds of rounded activations the parts of a product read, as bits.
    unsigned kinds(const Product& p) const {
        unsigned found = 0;
        for (long i = 0; i < p.parts; ++i) {
            found |= 1u << usable(static_cast<int>(p.part[i].format), static_cast<int>(m_.activations));
        }
        return found & ~(1u << kFloat);
    }

    Scratch& scratch(int kind) { return kind == kInt8 ? w_.narrow : w_.wide; }

    // Rounds inputs [column, column + count) of one of n rows for `next`, by the thread that has just made them.
    void round(const Product& next, const float* x, long n, long row, long column, long count) {
        const unsigned wanted = kinds(next);
        for (const int kind : {kInt16, kInt8}) {
            if (wanted & (1u << kind)) {
                const float* from = x + row * next.in + column;
                quantise_blocks(static_cast<int>(p_.isa), kind, from, column / 32, count / 32, row, n, scratch(kind));
            }
        }
    }

    // y (+)= x W^T for all parts; x must be complete and rounded, y is complete when this returns.
    void product(const Product& product, const float* x, long n, float* y, long ldy, bool add) {
        for (long i = 0; i < product.parts; ++i) {
            const Matrix& a = product.part[i];
            const int format = static_cast<int>(a.format), kind = usable(format, static_cast<int>(m_.activations));
            const Linear l{format, a.weights, a.out, product.in, x, product.in, n, a.bias, y, ldy, static_cast<int>(p_.isa), kind, add};
            linear_units(l, scratch(kind).view(product.in, n), counters_[stage_++], team_);
            y += a.out;
        }
        meet();
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

    // Tiles of (segment, rows, query head), taken by whichever thread is free.
    void attend(long i, const Layer& l) {
        const long dim = m_.head_dim, width = (m_.heads + 2 * m_.kv_heads) * dim, out = m_.heads * dim;
        const AttentionShape a{m_.heads, m_.kv_heads, dim, m_.cache_type, l.window, m_.attention_scale, m_.attention_softcap};
        std::atomic<long>& next = counters_[stage_++];
        long item = 0, mine = next.fetch_add(1);
        for (const Segment* s = p_.segment; s < p_.segment + p_.segments; ++s) {
            for (long first = 0; first < s->rows; first += kRowTile) {
                for (long h = 0; h < m_.heads; ++h, ++item) {
                    if (item != mine) continue;
                    mine = next.fetch_add(1);
                    const View v = view(i, *s, h / (m_.heads / m_.kv_heads));
                    const float* q = w_.qkv.data() + s->first * width + h * dim;
                    float* y = w_.mixed.data() + s->first * out + h * dim;
                    const long last = std::min<long>(s->rows, first + kRowTile);
                    ops_.attend(a, *s, v, p_.positions, first, last, q, width, y, out);
                    if (dim % 32 != 0) continue;
                    for (long r = s->first + first; r < s->first + last; ++r) round(l.out, w_.mixed.data(), p_.rows, r, h * dim, dim);
                }
            }
        }
        meet();
        if (dim % 32 != 0) each_row(p_.rows, [&](long r) { round(l.out, w_.mixed.data(), p_.rows, r, 0, out); });
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
        gate(l.down, inner);
        residual(l.down, w_.inner.data(), l.post_mlp_norm);
        if (p_.taps) each_row(p_.rows, [&](long r) { tap(i + 1, r); });
    }

    // Slices of 64 numbers (two blocks of activations), so that one row keeps all threads busy.
    void gate(const Product& next, long inner) {
        const long slices = (inner + 63) / 64, total = p_.rows * slices;
        each_row(total, [&](long item) {
            const long r = item / slices, from = item % slices * 64, n = std::min(64L, inner - from);
            const float* g = w_.gates.data() + 2 * r * inner + from;
            ops_.gate(g, g + inner, n, m_.tanh_gelu != 0, w_.inner.data() + r * inner + from);
            round(next, w_.inner.data(), p_.rows, r, from, n);
        });
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
    }
};

}  // namespace
}  // namespace foredraft

using namespace foredraft;

extern "C" {

size_t fd_struct_size(int which) {
    const size_t sizes[] = {sizeof(Matrix), sizeof(Product), sizeof(Layer), sizeof(Model), sizeof(Segment), sizeof(Pass)};
    return which >= 0 && which < 6 ? sizes[which] : 0;
}

void fd_pass(const Model* m, const Pass* pass) {
    static thread_local Workspace workspace;
    Workspace& w = workspace;  // the caller's, also when another thread of the team names it
    Pass p = *pass;
    p.isa = usable_isa(static_cast<int>(p.isa));
    w.reserve(*m, p);
    std::deque<std::atomic<long>> counters(static_cast<size_t>(9 * m->layers + 3));
    Barrier barrier;
    const auto body = [&](int thread, int team) { Worker(*m, p, w, counters, barrier, thread, team).run(); };
#ifdef _OPENMP
    if (p.threads > 1) {
#pragma omp parallel num_threads(static_cast<int>(p.threads))
        body(omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    body(0, 1);
}

}  // extern "C"
