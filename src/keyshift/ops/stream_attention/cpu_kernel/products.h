// The two products of attention over a block: queries with keys, shifted where there is a shift, and weights with
// values. A tile of rows and tokens keeps its sums in registers.
#pragma once

#include "streams.h"

namespace {

// Rows of queries in a tile, and vectors of sums: as many as the registers hold beside what is multiplied.
constexpr int ROWS = LANES == 16 ? 8 : 4;
constexpr int SUMS = LANES == 16 ? 16 : 8;
template <int M>
constexpr int WIDE = M > 4 ? SUMS / 8 : SUMS / 4;

// Query rows times token rows over one stretch of channels, added to vectors of partial sums.
template <int M, int N>
INLINED void multiply(Floats (&sums)[M][N], Rows<float> q, Rows<float> k, int64_t width) {
#pragma GCC unroll 2
    for (int64_t i = 0; i < width; i += LANES) {
        Floats keys[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) keys[n] = load(k.data + n * k.stride + i);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Floats query = load(q.data + m * q.stride + i);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[m][n] += query * keys[n];
        }
    }
}

// Weights times token rows, added to the outputs of N vectors' width.
template <int M, int N>
INLINED void accumulate(Floats (&sums)[M][N], const float *weights, int64_t stride, Rows<float> v, int64_t tokens) {
#pragma GCC unroll 2
    for (int64_t t = 0; t < tokens; t++) {
        Floats values[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) values[n] = load(v.data + t * v.stride + n * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Floats weight = all(weights[m * stride + t]);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[m][n] += weight * values[n];
        }
    }
}

#if defined(__AVX512BF16__)
INLINED Floats dot(Floats sums, __m512i a, __m512i b) {
    return Floats(_mm512_dpbf16_ps(__m512(sums), (__m512bh)a, (__m512bh)b));
}

template <int M, int N>
INLINED void multiply(Floats (&sums)[M][N], Rows<Brain> q, Rows<Brain> k, int64_t width) {
#pragma GCC unroll 2
    for (int64_t i = 0; i < width; i += 32) {
        __m512i keys[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) keys[n] = _mm512_loadu_si512(k.data + n * k.stride + i);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const __m512i query = _mm512_loadu_si512(q.data + m * q.stride + i);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[m][n] = dot(sums[m][n], query, keys[n]);
        }
    }
}

// Two tokens at a time: channel by channel their values side by side, as the pairs of weights are.
template <int M, int N>
INLINED void accumulate(Floats (&sums)[M][N], const Brain *weights, int64_t stride, Rows<Brain> v, int64_t tokens) {
    alignas(64) static const uint16_t PAIRS[2][32] = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14,
         46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60,
         29, 61, 30, 62, 31, 63}};
    const __m512i low = _mm512_load_si512(PAIRS[0]), high = _mm512_load_si512(PAIRS[1]);
#pragma GCC unroll 2
    for (int64_t t = 0; t < tokens; t += 2) {
        const Brain *first = v.data + t * v.stride;
        const Brain *second = t + 1 < tokens ? first + v.stride : first;  // its weight is 0
        __m512i values[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n += 2) {
            const __m512i a = _mm512_loadu_si512(first + n * 16), b = _mm512_loadu_si512(second + n * 16);
            values[n] = _mm512_permutex2var_epi16(a, low, b);
            values[n + 1] = _mm512_permutex2var_epi16(a, high, b);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            int pair;
            std::memcpy(&pair, weights + m * stride + t, 4);
            const __m512i weight = _mm512_set1_epi32(pair);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[m][n] = dot(sums[m][n], weight, values[n]);
        }
    }
}
#endif

// The rows of a tile and the keys of a block, token 0 being the first whose score is wanted; those that the shift
// looks back on lie before it.
template <typename E>
struct Scoring {
    Rows<E> query;
    Tokens<E> keys;
    int64_t width, query_step;  // from the queries of one step of the window to those of the next
    Rows<E> rope_query;
    Tokens<E> rope_keys;
    int64_t rotary;
    const float *scales;  // of the keys, one per token, or null
    float factor;
    int64_t steps, window;
    const float *mixes[4];  // per row, the weights of the keys' shift; null where there is none
    int64_t starts[4];      // per row, the token from which on it may look
    int64_t earliest;       // the first token that there is
    int64_t settled;        // from this token on, a shift needs no regard to starts
};

// Products of rows and tokens t … t + N - 1, whose keys these are, not summed yet.
template <int M, int N, typename E>
INLINED void content(Floats (&sums)[M][N], const Scoring<E> &s, int64_t t, Rows<E> keys) {
    multiply<M, N>(sums, s.query, keys, s.width);
    if (s.scales)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[m][n] *= s.scales[t + n];
}

// Five-dimensional queries: those of step m meet the keys m tokens back. The usual case adds in registers.
template <int M, int N, typename E>
INLINED void add_settled_steps(Floats (&sums)[M][N], const Scoring<E> &s, int64_t t) {
    for (int64_t step = 1; step < s.steps; step++) {
        const Rows<E> query = {s.query.data + step * s.query_step, s.query.stride};
        if (s.keys.are_even(t - step, N)) {
            multiply<M, N>(sums, query, s.keys.rows(t - step), s.width);
            continue;
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {  // across the border of a page
            Floats one[M][1];
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) one[m][0] = sums[m][n];
            multiply<M, 1>(one, query, s.keys.rows(t + n - step), s.width);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[m][n] = one[m][0];
        }
    }
}

// The same near a document's start, or with scales.
template <typename E>
__attribute__((noinline)) void add_steps(Floats *sums, int M, int N, const Scoring<E> &s, int64_t t) {
    for (int64_t step = 1; step < s.steps; step++)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) {
                if (t + n - step < s.starts[m]) continue;
                const Rows<E> query = {s.query.data + step * s.query_step + m * s.query.stride, 0};
                Floats one[1][1] = {};
                multiply<1, 1>(one, query, s.keys.rows(t + n - step), s.width);
                sums[m * N + n] += s.scales ? one[0][0] * s.scales[t + n - step] : one[0][0];
            }
}

// A shift of the keys: products become Σ_m a_m of those m tokens back; `before` has the last ones of each row. The
// usual case, a window of 2, mixes in registers.
template <int M, int N, typename E>
INLINED void mix_settled_pairs(Floats (&sums)[M][N], const Scoring<E> &s, Floats *before) {
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        const Floats own = all(s.mixes[m][0]), back = all(s.mixes[m][1]), last = sums[m][N - 1];
#pragma GCC unroll 8
        for (int n = N - 1; n > 0; n--) sums[m][n] = sums[m][n] * own + sums[m][n - 1] * back;
        sums[m][0] = sums[m][0] * own + before[m] * back;
        before[m] = last;
    }
}

// Any window, near a document's start too.
template <typename E>
__attribute__((noinline)) void mix(Floats *sums, int M, int N, const Scoring<E> &s, int64_t t, Floats *before) {
    const int64_t kept = s.window - 1;
    for (int m = 0; m < M; m++) {
        Floats *row = sums + m * N, *behind = before + m * kept, mixed[SUMS];
        for (int n = 0; n < N; n++) {
            mixed[n] = row[n] * s.mixes[m][0];
            for (int64_t back = 1; back <= kept && t + n - back >= s.starts[m]; back++)
                mixed[n] += (n >= back ? row[n - back] : behind[kept + n - back]) * s.mixes[m][back];
        }
        for (int64_t k = 0; k < kept; k++) behind[k] = N - kept + k >= 0 ? row[N - kept + k] : behind[k + N];
        std::copy_n(mixed, N, row);
    }
}

// Lets a function that is called work on sums in memory, while they stay in registers otherwise.
template <int M, int N, typename Change>
INLINED void in_memory(Floats (&sums)[M][N], Change change) {
    Floats copy[M * N];
#pragma GCC unroll 16
    for (int i = 0; i < M * N; i++) copy[i] = sums[i / N][i % N];
    change(copy);
#pragma GCC unroll 16
    for (int i = 0; i < M * N; i++) sums[i / N][i % N] = copy[i];
}

// What a tile of scores has to do beside products: nothing; add those of the window's other queries; mix with those
// of the token before; or anything there can be, also near a document's start.
enum Mode { PLAIN, STEPS, PAIRS, GENERAL };

template <int M, int N, Mode MODE, typename E>
inline void scores_tile(const Scoring<E> &s, int64_t t, Rows<E> keys, Rows<E> rope_keys, Floats *before, float *out,
                        int64_t stride) {
    Floats sums[M][N] = {};
    content<M, N>(sums, s, t, keys);
    if constexpr (MODE == STEPS) add_settled_steps<M, N>(sums, s, t);
    if constexpr (MODE == PAIRS) mix_settled_pairs<M, N>(sums, s, before);
    if constexpr (MODE == GENERAL)
        in_memory(sums, [&](Floats *copy) {
            if (s.steps > 1) add_steps(copy, M, N, s, t);
            if (s.mixes[0]) mix(copy, M, N, s, t, before);
        });
    if (s.rotary) multiply<M, N>(sums, s.rope_query, rope_keys, s.rotary);
    float totals[M * N];
    sums_of<M * N>(&sums[0][0], s.factor, totals);
    for (int m = 0; m < M; m++) std::memcpy(out + m * stride + t, totals + m * N, N * 4);
}

// `ahead(tokens)` is called on the way.
template <int M, Mode MODE, typename E, typename Step>
void scores(const Scoring<E> &s, int64_t tokens, Floats *before, float *out, int64_t stride, Step ahead) {
    constexpr int N = SUMS / 4;
    int64_t t = 0;
    if constexpr (MODE == PAIRS || MODE == GENERAL)
        for (int64_t back = s.window - 1; back > 0; back--) {
            Floats one[M][1] = {};
            if (-back >= s.earliest) content<M, 1>(one, s, -back, s.keys.rows(-back));
            for (int m = 0; m < M; m++) before[m * (s.window - 1) + s.window - 1 - back] = one[m][0];
        }
    if constexpr (MODE != PLAIN)
        for (; t < s.settled && t + N <= tokens; t += N)
            scores_tile<M, N, GENERAL>(s, t, s.keys.rows(t), s.rope_keys.rows(t), before, out, stride);
    auto sweep = [&](auto keys, auto rope_keys) __attribute__((always_inline)) {
        for (; t + N <= tokens; t += N) {
            ahead(N);
            scores_tile<M, N, MODE>(s, t, keys(t), rope_keys(t), before, out, stride);
        }
    };
    const Tokens<E> k = s.keys, r = s.rope_keys;
    if (k.places || r.places)
        sweep([&](int64_t at) { return k.rows(at); }, [&](int64_t at) { return r.rows(at); });
    else  // without asking every time
        sweep([&](int64_t at) { return k.evenly().from(at); }, [&](int64_t at) { return r.evenly().from(at); });
    constexpr Mode REST = MODE == PLAIN ? PLAIN : GENERAL;
    for (; t < tokens; t++) scores_tile<M, 1, REST>(s, t, k.rows(t), r.rows(t), before, out, stride);
}

// From the weight of a token before the block to the next one's: in between are zeros, for those tokens are taken one
// by one where those of the block are taken in pairs.
constexpr int64_t EARLY_STEP = 2;

// Token rows and the weights with which they enter the output of each row of a tile.
template <typename E>
struct Weighted {
    const E *weights;
    int64_t stride;
    Tokens<E> v;
    int64_t tokens;
    Weighted channel(int64_t i) const { return {weights, stride, v.channel(i), tokens}; }
};

// `ahead(vectors)` is called on the way.
template <int M, int N, typename E, typename Step>
inline void outputs_tile(float *out, int64_t stride, const float *corrections, Weighted<E> halo, Weighted<E> block,
                         Step ahead) {
    Floats sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[m][n] = load(out + m * stride + n * LANES) * corrections[m];
    for (int64_t t = 0; t < halo.tokens; t++)
        accumulate<M, N>(sums, halo.weights + t * EARLY_STEP, halo.stride, halo.v.rows(t), 1);
    auto sweep = [&](auto rows) __attribute__((always_inline)) {
        for (int64_t t = 0; t < block.tokens; t += TOGETHER) {
            ahead(TOGETHER * N);
            const int64_t tokens = std::min(block.tokens - t, TOGETHER);
            accumulate<M, N>(sums, block.weights + t, block.stride, rows(t), tokens);
        }
    };
    if (block.v.places)
        sweep([&](int64_t t) { return block.v.rows(t); });
    else  // without asking every time
        sweep([&](int64_t t) { return block.v.evenly().from(t); });
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(out + m * stride + n * LANES, sums[m][n]);
}

template <int M, typename E, typename Step>
void outputs(float *out, int64_t stride, const float *corrections, Weighted<E> halo, Weighted<E> block,
             int64_t width, Step ahead) {
    constexpr int N = WIDE<M>, LEAST = PER_VECTOR<E> / LANES;
    int64_t i = 0;
    for (; i + N * LANES <= width; i += N * LANES)
        outputs_tile<M, N>(out + i, stride, corrections, halo.channel(i), block.channel(i), ahead);
    for (; i < width; i += PER_VECTOR<E>)
        outputs_tile<M, LEAST>(out + i, stride, corrections, halo.channel(i), block.channel(i), ahead);
}

}  // namespace
