// The fused CPU kernel of stream_attention: one sweep over the cache, scores and output from the same block.
//
// Compiled once per instruction set, with KEYSHIFT_ISA naming it; dispatch.cpp picks one at run time.
//
// A task is a range of slots of one sequence, for a block of its queries and all heads: a token's stream heads
// lie side by side in the cache, so tasks read memory in order. A task walks its range in blocks of tokens that
// fit the first-level cache, group by group, and keeps a running maximum, sum and output per row (a query of one
// head). The tasks depend on shapes and lengths only, so the result does not depend on the number of threads.
// Pages are read in place too, where whole tiles of tokens lie in one: a block over several is a list of places.
//
// Products are of floats, or of pairs of bfloat16 with float sums where the processor has them (AVX512_BF16) and
// queries and streams can be held so exactly.

#include <vector>

#include "products.h"

#define CONCATENATE(a, b) a##b
#define NAMED(name, isa) CONCATENATE(name, isa)

namespace {

// The memory that a thread works in, kept from call to call.
class Scratch {
  public:
    template <typename T>
    void want(T *&place, int64_t count) {
        wanted.push_back({reinterpret_cast<void **>(&place), (count * int64_t(sizeof(T)) + 63) / 64 * 64});
    }
    void take() {
        static thread_local std::vector<char> kept;
        int64_t total = 64;
        for (auto &each : wanted) total += each.bytes;
        if (int64_t(kept.size()) < total) kept.resize(total);
        auto next = (reinterpret_cast<uintptr_t>(kept.data()) + 63) / 64 * 64;
        for (auto &each : wanted) {
            *each.place = reinterpret_cast<void *>(next);
            next += each.bytes;
        }
    }

  private:
    struct Wanted {
        void **place;
        int64_t bytes;
    };
    std::vector<Wanted> wanted;
};

constexpr int64_t BLOCK_BYTES = 32 << 10;

// A range of slots for a block of one sequence's queries. A row is a query of a head; the rows of a stream head
// follow each other, a tile is up to ROWS of them. E is what is multiplied: float, or Brain.
template <typename E>
class Task {
  public:
    Task(const Call &call, int64_t index);
    void run();

  private:
    const Call &call;
    const int64_t per_group, width, rotary, value_width, halo, block, share, early_reach, reach;
    int64_t b, first_query, queries, lowest, from, to;
    float *out, *maxima, *sums;
    // Scratch. Tokens start at e0 in keys, values and early, at j0 in the others.
    E *query, *rope_query, *key_rows, *value_rows, *rope_rows, *narrow, *narrow_early;
    int64_t *key_places, *value_places, *rope_places;
    float *flowed, *early, *weights, *key_scales, *value_scales;
    Floats *before;

    // A block of tokens j0 … j1 - 1 of a stream head; e0 is as far back as a shift reaches.
    struct Block {
        int64_t g, e0, j0, j1;
        Tokens<E> k, v, r;
    };

    const Stream &values() const { return call.values.data ? call.values : call.keys; }
    int64_t rows() const { return per_group * queries; }
    int64_t start_of(int64_t row) const {
        return call.starts ? std::max<int64_t>(call.starts[b * call.queries + first_query + row % queries], 0) : 0;
    }
    int64_t own_of(int64_t row) const {
        return (call.lengths ? call.lengths[b] : call.page) - call.queries + first_query + row % queries;
    }
    int64_t head_of(int64_t g, int64_t row) const { return g * per_group + row / queries; }

    // What the next block needs, and how much of it is asked for per token and vector of channels, in 1/256 lines.
    Ahead next_keys, next_values, next_rope;
    int64_t rate, due;
    void look_ahead(const Block &at);
    INLINED void turn() {
        next_keys.turn();
        if (call.values.data) next_values.turn();
        if (rotary) next_rope.turn();
    }
    INLINED void fetch(int64_t vectors) {
        due += vectors * rate;
        next_keys.fetch(due >> 8);
        if (call.values.data) next_values.fetch(due >> 8);
        if (rotary) next_rope.fetch(due >> 8);
        due &= 255;
    }

    void take_scratch();
    void read_queries();
    const float *read_scales(const Stream &stream, const Block &at, float *into) const;
    template <int M> void attend(const Block &at, int64_t row, const float *k_scales, const float *v_scales);
    template <int M> void score(const Block &at, int64_t row, const float *k_scales, float *into);
    void hide(const Block &at, int64_t row, float *scores) const;
    template <int M> void soften(const Block &at, int64_t row, float *corrections);
    void flow(const Block &at, int64_t row, const float *p, float *flowed, float *early) const;
    const E *narrowed(const float *from, int64_t rows, int64_t tokens, int64_t stride, E *into);
};

// Whose task this is.
inline int64_t sequence_of(const Call &call, int64_t index) {
    return std::upper_bound(call.splits, call.splits + call.batch, index / query_blocks(call)) - call.splits - 1;
}

template <typename E>
Task<E>::Task(const Call &call, int64_t index)
    : call(call), per_group(call.heads / call.groups), width(padded<E>(call.keys.width)),
      rotary(call.rope_keys.data ? padded<E>(call.rope_keys.width) : 0), value_width(padded<E>(values().width)),
      halo(std::max({call.steps, call.key_window, call.value_window}) - 1),
      block(std::clamp<int64_t>(BLOCK_BYTES / (int64_t(sizeof(E)) * width) / 16 * 16, 2 * PER_VECTOR<E>, 128)),
      share((block + call.groups - 1) / call.groups), early_reach((EARLY_STEP * halo + 31) / 32 * 32),
      reach(block + early_reach + 32) {
    b = sequence_of(call, index);
    const int64_t splits = call.splits[b + 1] - call.splits[b], rest = index - call.splits[b] * query_blocks(call);
    const int64_t split = rest % splits;
    first_query = rest / splits * call.query_block;
    queries = std::min(call.query_block, call.queries - first_query);
    const int64_t all_rows = call.heads * call.query_block;
    out = call.partials + index * all_rows * row_width(call);
    maxima = call.partials + tasks(call) * all_rows * row_width(call) + index * all_rows;
    sums = maxima + tasks(call) * all_rows;
    lowest = start_of(0);
    for (int64_t q = 1; q < queries; q++) lowest = std::min(lowest, start_of(q));
    const int64_t end = own_of(queries - 1) + 1, length = std::max<int64_t>(end - lowest, 0);
    // Splits are whole blocks, so that no task has a small rest.
    const int64_t blocks = (length + block - 1) / block;
    from = lowest + blocks * split / splits * block;
    to = std::min(lowest + blocks * (split + 1) / splits * block, end);
}

template <typename E>
void Task<E>::take_scratch() {
    const int64_t all_rows = call.heads * queries, tokens = block + halo;
    Scratch scratch;
    scratch.want(query, call.steps * all_rows * width);
    scratch.want(rope_query, all_rows * rotary);
    scratch.want(key_rows, tokens * width);
    scratch.want(value_rows, call.values.data ? tokens * value_width : 0);
    scratch.want(rope_rows, tokens * rotary);
    scratch.want(key_places, tokens);
    scratch.want(value_places, call.values.data ? tokens : 0);
    scratch.want(rope_places, rotary ? block : 0);
    scratch.want(narrow, ROWS * reach);
    scratch.want(narrow_early, ROWS * early_reach);
    scratch.want(flowed, ROWS * reach);
    scratch.want(early, ROWS * early_reach);
    scratch.want(weights, ROWS * reach);
    scratch.want(before, 4 * (call.key_window - 1));
    scratch.want(key_scales, tokens);
    scratch.want(value_scales, tokens);
    scratch.take();
    // Zeros behind the weights of a block, for what is read past its end.
    std::fill_n(weights, ROWS * reach, 0.0f);
    std::fill_n(early, ROWS * early_reach, 0.0f);
}

// The queries: [steps, H · queries, S padded] and [H · queries, R padded].
template <typename E>
void Task<E>::read_queries() {
    const int64_t bytes = size_of(call.query_kind), all_rows = call.heads * queries;
    for (int64_t row = 0; row < all_rows; row++) {
        const int64_t h = row / queries, q = first_query + row % queries;
        for (int64_t step = 0; step < call.steps; step++) {
            const int64_t at = ((b * call.heads + h) * call.steps + step) * call.queries + q;
            read_row(static_cast<const char *>(call.query) + at * call.keys.width * bytes, call.query_kind,
                     call.keys.width, query + (step * all_rows + row) * width);
        }
        if (rotary) {
            const int64_t at = (b * call.heads + h) * call.queries + q;
            read_row(static_cast<const char *>(call.rope_query) + at * call.rope_keys.width * bytes,
                     call.query_kind, call.rope_keys.width, rope_query + row * rotary);
        }
    }
}

// The scale of every token from e0 on; null where scales are not by token.
template <typename E>
const float *Task<E>::read_scales(const Stream &stream, const Block &at, float *into) const {
    if (!scales_tokens(stream)) return nullptr;
    const Scales &scales = stream.scales;
    stretches(call, b, at.e0, at.j1, [&](int64_t page, int64_t place, int64_t t, int64_t count) {
        for (int64_t i = 0; i < count; i++) into[t - at.e0 + i] = scale_of(scales, page, at.g, place + i, 0);
    });
    return into;
}

// A group's share of the next block, spread evenly over the work on this one: half of that is scores, half output.
template <typename E>
void Task<E>::look_ahead(const Block &at) {
    const int64_t begin = at.j0 + block, end = std::min(begin + block, to);
    next_keys = Ahead(call, call.keys, b, call.groups, at.g, begin, end, share);
    if (call.values.data) next_values = Ahead(call, call.values, b, call.groups, at.g, begin, end, share);
    if (rotary && at.g == 0) next_rope = Ahead(call, call.rope_keys, b, 1, 0, begin, end, block);
    const int64_t tiles = (rows() + ROWS - 1) / ROWS, vectors = value_width / LANES;
    rate = (256 * next_keys.lines_per_row() + 2 * tiles * vectors - 1) / (2 * tiles * vectors);
    due = 0;
}

template <typename E>
void Task<E>::run() {
    const int64_t all_rows = call.heads * queries;
    take_scratch();
    read_queries();
    std::fill(maxima, maxima + all_rows, -INFINITE);
    std::fill(sums, sums + all_rows, 0.0f);
    std::fill(out, out + all_rows * row_width(call), 0.0f);
    for (int64_t j0 = from; j0 < to; j0 += block) {
        Block at = {0, std::max(j0 - halo, lowest), j0, std::min(j0 + block, to), {}, {}, {}};
        if (rotary) at.r = rows_of(call, call.rope_keys, b, 0, lowest, j0, at.j1, rope_rows, rope_places);
        for (at.g = 0; at.g < call.groups; at.g++) {
            at.k = rows_of(call, call.keys, b, at.g, lowest, at.e0, at.j1, key_rows, key_places);
            at.v = at.k;
            if (call.values.data)
                at.v = rows_of(call, call.values, b, at.g, lowest, at.e0, at.j1, value_rows, value_places);
            look_ahead(at);
            const float *k_scales = read_scales(call.keys, at, key_scales);
            const float *v_scales = call.values.data ? read_scales(call.values, at, value_scales) : k_scales;
            int64_t row = 0;
            for (; row + ROWS <= rows(); row += ROWS) attend<ROWS>(at, row, k_scales, v_scales);
            for (; row + 4 <= rows(); row += 4) attend<4>(at, row, k_scales, v_scales);
            if (rows() - row == 3) attend<3>(at, row, k_scales, v_scales);
            if (rows() - row == 2) attend<2>(at, row, k_scales, v_scales);
            if (rows() - row == 1) attend<1>(at, row, k_scales, v_scales);
        }
    }
}

template <typename E>
template <int M>
void Task<E>::attend(const Block &at, int64_t row, const float *k_scales, const float *v_scales) {
    float corrections[M];
    turn();
    score<M>(at, row, k_scales, weights);
    soften<M>(at, row, corrections);
    float *arriving = weights;
    int64_t behind = 0;
    if (call.value_weights) {
        behind = at.j0 - at.e0;
        for (int m = 0; m < M; m++)
            flow(at, row + m, weights + m * reach, flowed + m * reach, early + m * early_reach);
        arriving = flowed;
    }
    if (v_scales) {
        const float *own = v_scales + (at.j0 - at.e0);
        for (int m = 0; m < M; m++) {
            for (int64_t t = 0; t < behind; t++) early[m * early_reach + t * EARLY_STEP] *= v_scales[t];
            for (int64_t t = 0; t < at.j1 - at.j0; t++) arriving[m * reach + t] *= own[t];
        }
    }
    const E *narrow_halo = narrowed(early, M, behind * EARLY_STEP, early_reach, narrow_early);
    const Weighted<E> halo = {narrow_halo, early_reach, at.v, behind};
    const Weighted<E> block = {narrowed(arriving, M, at.j1 - at.j0, reach, narrow), reach,
                               at.v.from(at.j0 - at.e0), at.j1 - at.j0};
    turn();
    outputs<M>(out + (at.g * rows() + row) * row_width(call), row_width(call), corrections, halo, block,
               value_width, [this](int64_t vectors) __attribute__((always_inline)) { fetch(vectors); });
}

// Weights in the numbers that are multiplied; zeros are behind them.
template <typename E>
const E *Task<E>::narrowed(const float *from, [[maybe_unused]] int64_t rows, [[maybe_unused]] int64_t tokens,
                           [[maybe_unused]] int64_t stride, [[maybe_unused]] E *into) {
    if constexpr (std::is_same_v<E, float>) {
        return from;
    } else {
#if defined(__AVX512BF16__)
        for (int64_t m = 0; m < rows; m++)
            for (int64_t t = 0; t < tokens; t += 16) {
                const __m256bh sixteen = _mm512_cvtneps_pbh(__m512(load(from + m * stride + t)));
                std::memcpy(into + m * stride + t, &sixteen, 32);
            }
#endif
        return into;
    }
}

// Scores, shifted where there is a shift: four rows at a time, since squares of rows and tokens load least.
template <typename E>
template <int M>
void Task<E>::score(const Block &at, int64_t row, const float *k_scales, float *into) {
    constexpr int FIRST = std::min(M, 4);
    const int64_t index = at.g * rows() + row, behind = at.j0 - at.e0;
    Scoring<E> s = {{query + index * width, width},
                    at.k.from(behind),
                    width,
                    call.heads * queries * width,
                    {rope_query + index * rotary, rotary},
                    at.r,
                    rotary,
                    k_scales ? k_scales + behind : nullptr,
                    float(call.scale),
                    call.steps,
                    call.key_window,
                    {},
                    {},
                    -behind,
                    0};
    for (int m = 0; m < FIRST; m++) {
        if (call.key_weights) s.mixes[m] = call.key_weights + head_of(at.g, row + m) * call.key_window;
        s.starts[m] = start_of(row + m) - at.j0;
        s.settled = std::max(s.settled, s.starts[m] + halo);
    }
    auto ahead = [this, vectors = value_width / LANES](int64_t tokens) __attribute__((always_inline)) {
        fetch(tokens * vectors);
    };
    const int64_t tokens = at.j1 - at.j0;
    if (call.steps == 1 && !call.key_weights)
        scores<FIRST, PLAIN>(s, tokens, before, into, reach, ahead);
    else if (call.steps > 1 && !k_scales)
        scores<FIRST, STEPS>(s, tokens, before, into, reach, ahead);
    else if (call.steps == 1 && call.key_window == 2)
        scores<FIRST, PAIRS>(s, tokens, before, into, reach, ahead);
    else
        scores<FIRST, GENERAL>(s, tokens, before, into, reach, ahead);
    if constexpr (M > 4) score<M - 4>(at, row + 4, k_scales, into + 4 * reach);
}

// What a row may not see, and the rest of the last vector, becomes -inf; ALiBi's slope is taken off.
template <typename E>
void Task<E>::hide(const Block &at, int64_t row, float *scores) const {
    const int64_t own = own_of(row), count = at.j1 - at.j0;
    if (call.slopes) {
        const float slope = call.slopes[head_of(at.g, row)];
        for (int64_t j = 0; j < count; j++) scores[j] -= slope * float(own - at.j0 - j);
    }
    for (int64_t j = 0; j < std::min(start_of(row) - at.j0, count); j++) scores[j] = -INFINITE;
    for (int64_t j = std::max<int64_t>(own + 1 - at.j0, 0); j < padded<float>(count); j++) scores[j] = -INFINITE;
    std::fill(scores + padded<float>(count), scores + reach, 0.0f);
}

// Scores to weights against the rows' running maxima; by how much what they had so far shrinks.
template <typename E>
template <int M>
void Task<E>::soften(const Block &at, int64_t row, float *corrections) {
    const int64_t count = at.j1 - at.j0, index = at.g * rows() + row;
    Floats most[M], added[M] = {};
    for (int m = 0; m < M; m++) {
        if (call.slopes || count < block || start_of(row + m) > at.j0 || own_of(row + m) < at.j1 - 1)
            hide(at, row + m, weights + m * reach);
        most[m] = all(maxima[index + m]);
    }
    for (int64_t j = 0; j < count; j += LANES)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Floats s = load(weights + m * reach + j);
            most[m] = s > most[m] ? s : most[m];
        }
    float shifts[M], changes[ROWS < LANES ? LANES : ROWS] = {};
    for (int m = 0; m < M; m++) {
        const float maximum = largest(most[m]);
        // While nothing but -inf was seen any finite number serves, and -inf would make NaN of it.
        shifts[m] = maximum == -INFINITE ? 0 : maximum;
        changes[m] = maxima[index + m] - shifts[m];
        maxima[index + m] = maximum;
    }
    store(changes, exponential(load(changes)));
    for (int64_t j = 0; j < count; j += LANES)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Floats p = exponential(load(weights + m * reach + j) - shifts[m]);
            store(weights + m * reach + j, p);
            added[m] += p;
        }
    for (int m = 0; m < M; m++) {
        corrections[m] = changes[m];
        sums[index + m] = sums[index + m] * changes[m] + sum(added[m]);
    }
}

// p + back, of which `now` and `next` are the vectors at p and behind it. Together they can be shuffled; a load across
// two stores that are still on their way would wait for both.
INLINED Floats moved(const float *p, [[maybe_unused]] Floats now, [[maybe_unused]] Floats next, int64_t back) {
#if LANES == 16
    if (back < LANES) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i lanes = _mm512_add_epi32(first, _mm512_set1_epi32(int(back)));
        return Floats(_mm512_permutex2var_ps(__m512(now), lanes, __m512(next)));
    }
#endif
    return load(p + back);
}

// How much of every slot's raw value arrives: Σ_m b_m p_{e+m}, of this block's p only. Zeros lie behind them.
// `early` is of the slots e0 … j0 - 1, `flowed` of the block's own.
template <typename E>
void Task<E>::flow(const Block &at, int64_t row, const float *p, float *flowed, float *early) const {
    const float *mix = call.value_weights + head_of(at.g, row) * call.value_window;
    const int64_t count = at.j1 - at.j0, behind = at.j0 - at.e0, start = start_of(row);
    Floats now = load(p);
    for (int64_t j = 0; j < count; j += LANES) {
        const Floats next = load(p + j + LANES);
        Floats arriving = now * mix[0];
        for (int64_t back = 1; back < call.value_window; back++)
            arriving += moved(p + j, now, next, back) * mix[back];
        store(flowed + j, arriving);
        now = next;
    }
    for (int64_t j = 0; j < std::min(start - at.j0, count); j++) flowed[j] = 0;
    for (int64_t e = 0; e < behind; e++) {
        float &arriving = early[e * EARLY_STEP];
        arriving = 0;
        for (int64_t back = behind - e; back < call.value_window && at.e0 + e >= start; back++)
            arriving += p[e + back - behind] * mix[back];
    }
}

[[maybe_unused]] bool fits_brain(const Stream &stream) {
    if (!stream.data || stream.kind == BFLOAT16) return true;
    return (stream.kind == INT8 || stream.kind == INT4) && scales_tokens(stream);
}

void run(const Call &call, int64_t index) {
#if defined(__AVX512BF16__)
    if (call.query_kind == BFLOAT16 && fits_brain(call.keys) && fits_brain(call.values) &&
        fits_brain(call.rope_keys))
        return Task<Brain>(call, index).run();
#endif
    Task<float>(call, index).run();
}

void write_row(void *out, Kind kind, int64_t at, const float *row, int64_t width) {
    if (kind == FLOAT32) {
        std::memcpy(static_cast<float *>(out) + at, row, width * 4);
        return;
    }
    auto *to = static_cast<uint16_t *>(out) + at;
    for (int64_t i = 0; i < width; i++) {
        if (kind == FLOAT16) {
            const _Float16 half = _Float16(row[i]);
            std::memcpy(to + i, &half, 2);
        } else {
            uint32_t bits;
            std::memcpy(&bits, row + i, 4);
            const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
            to[i] = uint16_t((row[i] == row[i] ? rounded : 0x7fc00000) >> 16);
        }
    }
}

// The rows of one head in one block of queries, put together from its splits.
void combine(const Call &call, int64_t index) {
    const int64_t head = index % call.heads, all_blocks = index / call.heads;
    const int64_t b = all_blocks / query_blocks(call), block = all_blocks % query_blocks(call);
    const int64_t first_query = block * call.query_block, splits = call.splits[b + 1] - call.splits[b];
    const int64_t queries = std::min(call.query_block, call.queries - first_query), width = row_width(call);
    const int64_t all_rows = call.heads * call.query_block;
    const int64_t task = call.splits[b] * query_blocks(call) + block * splits;
    const float *outputs = call.partials + task * all_rows * width;
    const float *maxima = call.partials + tasks(call) * all_rows * width + task * all_rows;
    const float *sums = maxima + tasks(call) * all_rows;
    const int64_t value_width = call.values.data ? call.values.width : call.keys.width;
    std::vector<float> row_out(width);
    for (int64_t row = head * queries; row < (head + 1) * queries; row++) {
        float maximum = -INFINITE, total = 0;
        for (int64_t s = 0; s < splits; s++) maximum = std::max(maximum, maxima[s * all_rows + row]);
        const float shift = maximum == -INFINITE ? 0 : maximum;
        std::fill(row_out.begin(), row_out.end(), 0.0f);
        for (int64_t s = 0; s < splits; s++) {
            const float factor = exponential(all(maxima[s * all_rows + row] - shift))[0];
            total += factor * sums[s * all_rows + row];
            const float *part = outputs + (s * all_rows + row) * width;
            for (int64_t i = 0; i < width; i++) row_out[i] += factor * part[i];
        }
        const int64_t at = (b * call.heads + head) * call.queries + first_query + row % queries;
        for (int64_t i = 0; i < value_width; i++) row_out[i] /= total;
        write_row(call.out, call.query_kind, at * value_width, row_out.data(), value_width);
    }
}

}  // namespace

extern "C" void NAMED(keyshift_task_, KEYSHIFT_ISA)(const Call &call, int64_t index) { run(call, index); }
extern "C" void NAMED(keyshift_combine_, KEYSHIFT_ISA)(const Call &call, int64_t index) { combine(call, index); }
