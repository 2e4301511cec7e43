// A suffix automaton over token ids with counts of what followed, and the best copy from it: what
// drafters/suffix_automaton.py says in Python, which is the reference, state by state.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <queue>
#include <vector>

namespace foredraft {
namespace {

constexpr int32_t kRoot = 0, kNone = -1;
constexpr int kWide = 64;  // a context that so many tokens followed foretells little

// A string inside an automaton: the one of `length` tokens that state `state` stands for.
struct Place {
    int32_t state, length;
};

// Ways on from a state beside its first one. They are found by (state, token) in a table, and by state in a list.
class Ways {
  public:
    struct Way {
        int32_t state, token, to, next;
    };

    int32_t find(int32_t state, int32_t token) const {
        if (table_.empty()) return kNone;
        for (size_t i = slot(state, token);; i = (i + 1) & (table_.size() - 1)) {
            const int32_t at = table_[i];
            if (at == kNone || ((*this)[at].state == state && (*this)[at].token == token)) return at;
        }
    }

    void lead(int32_t at, int32_t to) { ways_[static_cast<size_t>(at)].to = to; }

    // Adds one that is not there; `first` is the head of the state's list.
    void add(int32_t state, int32_t token, int32_t to, int32_t& first) {
        if (2 * (ways_.size() + 1) > table_.size()) widen();
        ways_.push_back({state, token, to, first});
        first = static_cast<int32_t>(ways_.size()) - 1;
        enter(first);
    }

    const Way& operator[](int32_t at) const { return ways_[static_cast<size_t>(at)]; }
    size_t bytes() const { return ways_.capacity() * sizeof(Way) + table_.capacity() * sizeof(int32_t); }

  private:
    std::vector<Way> ways_;
    std::vector<int32_t> table_;  // a power of two, at most half full

    size_t slot(int32_t state, int32_t token) const {
        const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | static_cast<uint32_t>(token);
        return static_cast<size_t>(key * 0x9E3779B97F4A7C15u >> 20) & (table_.size() - 1);
    }
    void enter(int32_t at) {
        size_t i = slot(ways_[static_cast<size_t>(at)].state, ways_[static_cast<size_t>(at)].token);
        while (table_[i] != kNone) i = (i + 1) & (table_.size() - 1);
        table_[i] = at;
    }
    void widen() {
        table_.assign(std::max<size_t>(16, 2 * table_.size()), kNone);
        for (size_t at = 0; at < ways_.size(); ++at) enter(static_cast<int32_t>(at));
    }
};

// Tokens to copy, the share of its context's occurrences that each followed, and parents where they form a tree.
struct Copy {
    double worth = 0.0;  // sum of the products of shares: the tokens that are expected to be accepted
    std::vector<int32_t> tokens, parents;
    std::vector<double> shares;

    void clear() {
        worth = 0.0;
        tokens.clear(), parents.clear(), shares.clear();
    }
    void add(int32_t token, double share, double product) {
        tokens.push_back(token), shares.push_back(share);
        worth += product;
    }
};

class Automaton {
  public:
    Place end{kRoot, 0};  // of the last `depth` tokens of the text that was added to last
    bool broken = false;  // memory ran out while it grew

    explicit Automaton(int32_t depth) : depth_(depth) { make(0, kNone); }

    void begin() { last_ = kRoot, end = {kRoot, 0}; }

    void add(int32_t token) {
        grow(token);
        tally(token);
    }

    // Moves to the longest suffix of the place's string and `token` that occurs here.
    void advance(Place& place, int32_t token) const {
        settle(place);
        int32_t found;
        while ((found = next(place.state, token)) == kNone) {
            if (place.state == kRoot) {
                place.length = 0;
                return;
            }
            shorten(place);
        }
        place = {found, place.length + 1};
        settle(place);
    }

    // The copy that is worth most, if more than `worth`, of all that follow the place's string or one of its suffixes.
    // Returns the length of that context, or 0.
    long copy(Place& place, long limit, double factor, double min_prob, bool tree, double worth, Copy& best) const {
        static thread_local Copy trial;
        long match = 0;
        settle(place);
        for (Place at = place; at.state != kRoot; shorten(at)) {
            if (state(at).best == kNone) continue;
            const long budget = std::min(limit, static_cast<long>(factor * at.length));
            if (static_cast<double>(budget) <= worth) break;
            trial.clear();
            tree ? branch_out(at, budget, min_prob, trial) : follow(at, budget, min_prob, trial);
            if (trial.worth > worth) {
                worth = trial.worth, match = at.length;
                std::swap(best, trial);
            }
        }
        return match;
    }

    size_t bytes() const { return sizeof *this + states_.capacity() * sizeof(State) + ways_.bytes(); }

  private:
    struct State {
        int32_t length;   // tokens of its longest string
        int32_t link;     // state of the longest proper suffix that ends at more places
        int32_t count;    // occurrences
        int32_t follows;  // occurrences that something follows
        int32_t best;     // token that followed most often, the latest of equals
        int32_t token, to;
        int32_t more;  // further ways on
    };

    const int32_t depth_;
    int32_t last_ = kRoot;  // state of the whole text
    std::vector<State> states_;
    Ways ways_;

    State& state(int32_t at) { return states_[static_cast<size_t>(at)]; }
    const State& state(int32_t at) const { return states_[static_cast<size_t>(at)]; }
    const State& state(const Place& place) const { return state(place.state); }

    int32_t next(int32_t from, int32_t token) const {
        const State& s = state(from);
        if (s.token == token) return s.to;
        if (s.more == kNone) return kNone;
        const int32_t at = ways_.find(from, token);
        return at == kNone ? kNone : ways_[at].to;
    }

    void shorten(Place& place) const {
        place.state = state(place).link;
        place.length = state(place).length;
    }

    void settle(Place& place) const {
        place.length = std::min(place.length, depth_);
        while (place.state != kRoot && state(state(place).link).length >= place.length) place.state = state(place).link;
    }

    // --- reading

    double share(int32_t from, int32_t to) const { return static_cast<double>(state(to).count) / state(from).follows; }

    // The most frequent token, again and again. Where nothing followed, the context is shortened.
    void follow(Place place, long limit, double min_prob, Copy& out) const {
        double product = 1.0;
        while (static_cast<long>(out.tokens.size()) < limit) {
            const int32_t from = place.state, token = state(from).best;
            if (token == kNone) {
                shorten(place);
                if (place.state == kRoot) break;
                continue;
            }
            const int32_t to = next(from, token);
            product *= share(from, to);
            if (product < min_prob) break;
            out.add(token, share(from, to), product);
            place = {to, place.length + 1};
            settle(place);
        }
    }

    struct Twig {
        double product, share;
        int32_t parent, token, to, length;
        bool operator<(const Twig& o) const {  // of those that are worth most the earliest parent's, then the lowest token
            if (product != o.product) return product < o.product;
            return parent != o.parent ? parent > o.parent : token > o.token;
        }
    };

    // The continuations with the largest products of shares.
    void branch_out(Place place, long limit, double min_prob, Copy& out) const {
        std::priority_queue<Twig> waiting;
        branch(place, kNone, 1.0, min_prob, waiting);
        while (!waiting.empty() && static_cast<long>(out.tokens.size()) < limit) {
            const Twig twig = waiting.top();
            waiting.pop();
            out.add(twig.token, twig.share, twig.product);
            out.parents.push_back(twig.parent);
            Place on{twig.to, twig.length};
            settle(on);
            branch(on, static_cast<int32_t>(out.tokens.size()) - 1, twig.product, min_prob, waiting);
        }
    }

    void branch(Place place, int32_t parent, double product, double min_prob, std::priority_queue<Twig>& waiting) const {
        while (state(place).best == kNone && place.state != kRoot) shorten(place);
        if (place.state == kRoot) return;
        const State& from = state(place);
        const auto way = [&](int32_t token, int32_t to) {
            const double part = share(place.state, to);
            if (product * part >= min_prob) waiting.push({product * part, part, parent, token, to, place.length + 1});
        };
        if (wide(from)) return way(from.best, next(place.state, from.best));
        way(from.token, from.to);
        for (int32_t at = from.more; at != kNone; at = ways_[at].next) way(ways_[at].token, ways_[at].to);
    }

    bool wide(const State& s) const {
        int n = 0;
        for (int32_t at = s.more; at != kNone && n <= kWide; at = ways_[at].next) ++n;
        return n > kWide;
    }

    // --- building (Blumer 1985; generalised to several texts: the state may be there already)

    int32_t make(int32_t length, int32_t link) {
        states_.push_back({length, link, 0, 0, kNone, kNone, kNone, kNone});
        return static_cast<int32_t>(states_.size()) - 1;
    }

    void lead(int32_t from, int32_t token, int32_t to) {
        State& s = state(from);
        if (s.token == kNone || s.token == token) {
            s.token = token, s.to = to;
        } else if (const int32_t known = ways_.find(from, token); known != kNone) {
            ways_.lead(known, to);
        } else {
            ways_.add(from, token, to, s.more);
        }
    }

    void grow(int32_t token) {
        const int32_t known = next(last_, token);
        if (known != kNone) {
            last_ = divided(last_, token, known);
            return;
        }
        const int32_t fresh = make(state(last_).length + 1, kRoot);
        int32_t at = last_, found = kNone;
        for (; at != kNone && (found = next(at, token)) == kNone; at = state(at).link) lead(at, token, fresh);
        if (at != kNone) {
            const int32_t link = divided(at, token, found);
            state(fresh).link = link;
        }
        last_ = fresh;
    }

    // The state of exactly `from`'s strings and `token`, cut out of `found` if need be.
    int32_t divided(int32_t from, int32_t token, int32_t found) {
        const int32_t length = state(from).length + 1;
        if (state(found).length == length) return found;
        const int32_t clone = make(length, kNone);
        State& s = state(clone);
        s = state(found);
        s.length = length, s.more = kNone;
        for (int32_t at = state(found).more; at != kNone; at = ways_[at].next) ways_.add(clone, ways_[at].token, ways_[at].to, s.more);
        state(found).link = clone;
        for (; from != kNone && next(from, token) == found; from = state(from).link) lead(from, token, clone);
        return clone;
    }

    // Counts the token after every suffix of what stood before it, and moves the text's own place on.
    void tally(int32_t token) {
        settle(end);
        int32_t seen = kNone;
        for (int32_t at = end.state; at != kNone; at = state(at).link) {
            const int32_t to = next(at, token);
            State& s = state(at);
            if (to != seen) ++state(to).count, seen = to;
            ++s.follows;
            if (s.best != token && (s.best == kNone || state(to).count >= state(next(at, s.best)).count)) s.best = token;
        }
        end = {next(end.state, token), end.length + 1};
        settle(end);
    }
};

}  // namespace
}  // namespace foredraft

using namespace foredraft;

extern "C" {

// Null where there is no memory.
void* fd_suffix_new(long depth) {
    try {
        return new Automaton(static_cast<int32_t>(depth));
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void fd_suffix_free(void* automaton) { delete static_cast<Automaton*>(automaton); }

// Begins another text: nothing runs across the border.
void fd_suffix_begin(void* automaton) { static_cast<Automaton*>(automaton)->begin(); }

size_t fd_suffix_bytes(const void* automaton) { return static_cast<const Automaton*>(automaton)->bytes(); }

// Adds tokens (>= 0) to the current text. False if memory ran out: the automaton then finds nothing any more.
int fd_suffix_extend(void* automaton, const int32_t* tokens, long n) {
    Automaton& a = *static_cast<Automaton*>(automaton);
    try {
        for (long i = 0; i < n && !a.broken; ++i) a.add(tokens[i]);
    } catch (const std::bad_alloc&) {
        a.broken = true;
    }
    return !a.broken;
}

// Moves a place (state, length), at first (0, 0), along n tokens of any text.
void fd_suffix_follow(const void* automaton, int32_t* place, const int32_t* tokens, long n) {
    const Automaton& a = *static_cast<const Automaton*>(automaton);
    Place at{place[0], place[1]};
    for (long i = 0; i < n && !a.broken; ++i) a.advance(at, tokens[i]);
    place[0] = at.state, place[1] = at.length;
}

// The copy that is worth most after a place, or after the end of the text where `place` is null: at most `limit` tokens, and
// `factor` for each token of the context. `worth` holds what it must exceed, and receives what it is worth; `match` receives
// the length of its context; tokens, shares and, of a tree, parents have room for `limit`. Returns how many, 0 if there is none.
long fd_suffix_copy(void* automaton, int32_t* place, long limit, double factor, double min_prob, int tree, double* worth,
                    int64_t* match, int32_t* tokens, double* shares, int32_t* parents) {
    Automaton& a = *static_cast<Automaton*>(automaton);
    if (a.broken) return 0;
    static thread_local Copy best;
    try {
        Place at = place ? Place{place[0], place[1]} : a.end;
        *match = a.copy(at, limit, factor, min_prob, tree != 0, *worth, best);
        if (place) place[0] = at.state, place[1] = at.length;
    } catch (const std::bad_alloc&) {
        return 0;
    }
    if (*match == 0) return 0;
    *worth = best.worth;
    std::copy(best.tokens.begin(), best.tokens.end(), tokens);
    std::copy(best.shares.begin(), best.shares.end(), shares);
    std::copy(best.parents.begin(), best.parents.end(), parents);
    return static_cast<long>(best.tokens.size());
}

}  // extern "C"
