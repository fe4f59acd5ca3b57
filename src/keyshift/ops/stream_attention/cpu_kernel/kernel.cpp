// The fused CPU kernel of stream_attention: one sweep over the cache, scores and output from the same block.
//
// Compiled once per instruction set, with KEYSHIFT_ISA naming it; dispatch.cpp picks one at run time. Vectors
// are those of GCC and Clang, so that the same source serves AVX-512, AVX2 and what a compiler has elsewhere.
//
// A task is a range of slots of one sequence, for a block of its queries and all heads: a token's stream heads
// lie side by side in the cache, so tasks read memory in order. A task walks its range in blocks of tokens that
// fit the first-level cache, group by group, and keeps a running maximum, sum and output per row (a query of one
// head). The tasks depend on the shapes only, so the result does not depend on the number of threads.
//
// Products are of floats, or of pairs of bfloat16 with float sums where the processor has them (AVX512_BF16) and
// queries and streams can be held so exactly.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "call.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#endif

// What works on sums in registers must be inlined, whatever a compiler thinks of its size.
#define INLINED __attribute__((always_inline)) inline

#define CONCATENATE(a, b) a##b
#define NAMED(name, isa) CONCATENATE(name, isa)

namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
// As they lie in memory: aligned to nothing.
typedef float LooseFloats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t LooseWord __attribute__((may_alias));

INLINED Floats load(const float *from) { return *reinterpret_cast<const LooseFloats *>(from); }
INLINED void store(float *to, Floats x) { *reinterpret_cast<LooseFloats *>(to) = x; }
INLINED Floats all(float x) { return x - Floats{}; }

// ---- vectors to numbers, and e^x -----------------------------------------------------------------------------

// Half by half, until the combination of all lanes is in the first.
template <typename Combine>
inline float folded(Floats x, Combine combine) {
    float lanes[LANES];
    for (int half = LANES / 2; half > 0; half /= 2) {
        store(lanes, x);
        Floats y = {};
        for (int lane = 0; lane < half; lane++) y[lane] = lanes[lane + half];
        x = combine(x, y);
    }
    return x[0];
}

inline float sum(Floats x) {
#if LANES == 16
    return _mm512_reduce_add_ps(__m512(x));
#else
    return folded(x, [](Floats a, Floats b) { return a + b; });
#endif
}

inline float largest(Floats x) {
#if LANES == 16
    return _mm512_reduce_max_ps(__m512(x));
#else
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
#endif
}

// Four vectors to one that has, in each stretch of four lanes, one partial sum of each.
INLINED Floats quad(Floats a, Floats b, Floats c, Floats d) {
#if LANES == 16
    auto low = [](Floats x, Floats y) { return Floats(_mm512_unpacklo_ps(__m512(x), __m512(y))); };
    auto high = [](Floats x, Floats y) { return Floats(_mm512_unpackhi_ps(__m512(x), __m512(y))); };
#elif LANES == 8
    auto low = [](Floats x, Floats y) { return Floats(_mm256_unpacklo_ps(__m256(x), __m256(y))); };
    auto high = [](Floats x, Floats y) { return Floats(_mm256_unpackhi_ps(__m256(x), __m256(y))); };
#else
    auto low = [](Floats x, Floats y) { return Floats{x[0], y[0], x[1], y[1]}; };
    auto high = [](Floats x, Floats y) { return Floats{x[2], y[2], x[3], y[3]}; };
#endif
    const Floats ac = low(a, c) + high(a, c), bd = low(b, d) + high(b, d);  // a c a c, b d b d
    return low(ac, bd) + high(ac, bd);                                      // a b c d
}

// The sums of K vectors times a factor.
template <int K>
INLINED void sums_of(const Floats *x, float factor, float *out) {
#if LANES == 16
    if constexpr (K == 16) {
        auto fold = [](Floats a, Floats b) {
            return Floats(_mm512_shuffle_f32x4(__m512(a), __m512(b), 0x88)) +
                   Floats(_mm512_shuffle_f32x4(__m512(a), __m512(b), 0xdd));
        };
        const Floats ab = fold(quad(x[0], x[1], x[2], x[3]), quad(x[4], x[5], x[6], x[7]));
        const Floats cd = fold(quad(x[8], x[9], x[10], x[11]), quad(x[12], x[13], x[14], x[15]));
        store(out, fold(ab, cd) * factor);
        return;
    }
#endif
#pragma GCC unroll 8
    for (int i = 0; i + 4 <= K; i += 4) {
        float lanes[LANES];
        store(lanes, quad(x[i], x[i + 1], x[i + 2], x[i + 3]) * factor);
        for (int k = 0; k < 4; k++) {
            out[i + k] = lanes[k];
            for (int lane = 4; lane < LANES; lane += 4) out[i + k] += lanes[lane + k];
        }
    }
    for (int i = K / 4 * 4; i < K; i++) out[i] = sum(x[i]) * factor;
}

// e^x for x <= 0, to 1 ulp or so; 0 below -87; NaN stays NaN.
inline Floats exponential(Floats x) {
    const Floats magic = all(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
    const Floats n = (x * 1.44269504088896341f + magic) - magic;
    const Floats f = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    const Floats clamped = n < -126.0f ? all(-126.0f) : n;
    const Ints exponent = (__builtin_convertvector(clamped, Ints) + 127) << 23;
    Floats power;
    std::memcpy(&power, &exponent, sizeof power);
    return x < -87.0f ? Floats{} : p * power;
}

// ---- reading streams -----------------------------------------------------------------------------------------

using Brain = uint16_t;  // the bits of a bfloat16

// How many numbers of a kind a vector holds; rows are padded with zeros to whole vectors.
template <typename E>
constexpr int64_t PER_VECTOR = std::is_same_v<E, float> ? LANES : 2 * LANES;
template <typename E>
inline int64_t padded(int64_t width) {
    return (width + PER_VECTOR<E> - 1) / PER_VECTOR<E> * PER_VECTOR<E>;
}

inline float widened(uint16_t bits, Kind kind) {
    if (kind == BFLOAT16) {
        const uint32_t wide = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return float(half);
}

void read_float16(const uint16_t *from, int64_t width, float *out) {
    int64_t i = 0;
#if LANES == 16
    for (; i + 16 <= width; i += 16)
        store(out + i, Floats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + i)))));
#elif LANES == 8
    for (; i + 8 <= width; i += 8)
        store(out + i, Floats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i)))));
#endif
    for (; i < width; i++) out[i] = widened(from[i], FLOAT16);
}

// Small integers are exact in bfloat16: the upper half of a float.
inline void put_integer(float *out, int x) { *out = float(x); }
inline void put_integer(Brain *out, int x) {
    const float wide = float(x);
    uint32_t bits;
    std::memcpy(&bits, &wide, 4);
    *out = Brain(bits >> 16);
}

#if defined(__AVX512BF16__)
inline int64_t put_integers(Brain *out, const int8_t *from, int64_t width) {
    int64_t i = 0;
    for (; i + 32 <= width; i += 32) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i));
        const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i + 16));
        const auto both = _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high)),
                                              _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low)));
        std::memcpy(out + i, &both, 64);
    }
    return i;
}
#endif

// One row of numbers, zeros behind it. Plain loops: compilers make better code of them than of their own vector
// conversions.
template <typename E>
void read_row(const void *row, Kind kind, int64_t width, E *__restrict out) {
    if (kind == INT8) {
        auto *from = static_cast<const int8_t *>(row);
        int64_t i = 0;
#if defined(__AVX512BF16__)
        if constexpr (std::is_same_v<E, Brain>) i = put_integers(out, from, width);
#endif
        for (; i < width; i++) put_integer(out + i, from[i]);
    } else if (kind == INT4) {  // byte k holds channels k and k + width/2
        auto *from = static_cast<const uint8_t *>(row);
        const int64_t half = width / 2;
        for (int64_t i = 0; i < half; i++) put_integer(out + i, int(from[i] & 15) - 8);
        for (int64_t i = 0; i < half; i++) put_integer(out + half + i, int(from[i] >> 4) - 8);
    } else if constexpr (std::is_same_v<E, Brain>) {
        std::memcpy(out, row, width * 2);
    } else if (kind == FLOAT32) {
        std::memcpy(out, row, width * 4);
    } else if (kind == FLOAT16) {
        read_float16(static_cast<const uint16_t *>(row), width, out);
    } else {
        auto *from = static_cast<const uint16_t *>(row);
        auto *bits = reinterpret_cast<LooseWord *>(out);
        for (int64_t i = 0; i < width; i++) bits[i] = uint32_t(from[i]) << 16;
    }
    for (int64_t i = width; i < padded<E>(width); i++) out[i] = 0;
}

const char *address(const Stream &stream, int64_t b, int64_t g, int64_t t) {
    const int64_t element = b * stream.stride_b + g * stream.stride_g + t * stream.stride_t;
    return static_cast<const char *>(stream.data) + element * size_of(stream.kind);
}

inline float scale_of(const Scales &scales, int64_t b, int64_t g, int64_t t, int64_t n) {
    const int64_t element = b * scales.stride_b + g * scales.stride_g + t * scales.stride_t + n;
    auto *at = static_cast<const char *>(scales.data) + element * size_of(scales.kind);
    if (scales.kind == FLOAT32) {
        float x;
        std::memcpy(&x, at, 4);
        return x;
    }
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return widened(bits, scales.kind);
}

// One scale per token multiplies scores and weights; several multiply the channels.
inline bool scales_tokens(const Stream &stream) { return stream.scales.data && stream.scales.blocks == 1; }

void scale_channels(float *row, int64_t width, const Scales &scales, int64_t b, int64_t g, int64_t t) {
    const int64_t block = width / scales.blocks;
    for (int64_t n = 0; n < scales.blocks; n++) {
        const float factor = scale_of(scales, b, g, t, n);
        for (int64_t i = n * block; i < (n + 1) * block; i++) row[i] *= factor;
    }
}

template <typename E>
struct Rows {
    const E *data;
    int64_t stride;
    Rows from(int64_t t) const { return {data + t * stride, stride}; }
};

// Tokens as rows: in place where they lie as they should, else in a buffer.
template <typename E>
Rows<E> rows_of(const Stream &stream, int64_t b, int64_t g, int64_t from, int64_t to, E *buffer) {
    const Kind ready = std::is_same_v<E, float> ? FLOAT32 : BFLOAT16;
    if (stream.kind == ready && stream.width % PER_VECTOR<E> == 0)
        return {reinterpret_cast<const E *>(address(stream, b, g, from)), stream.stride_t};
    const int64_t stride = padded<E>(stream.width);
    for (int64_t t = from; t < to; t++) {
        E *row = buffer + (t - from) * stride;
        read_row(address(stream, b, g, t), stream.kind, stream.width, row);
        if constexpr (std::is_same_v<E, float>)
            if (stream.scales.data && !scales_tokens(stream))
                scale_channels(row, stream.width, stream.scales, b, g, t);
    }
    return {buffer, stride};
}

// The part of a stream that will be wanted next, asked for a few cache lines at a time while something else is
// computed: memory that waits for a pause in the computation is slow, and so is one that is asked for all at once.
class Ahead {
  public:
    Ahead() = default;
    Ahead(const Stream &stream, int64_t b, int64_t groups, int64_t g, int64_t from, int64_t to, int64_t block) {
        const int64_t size = size_of(stream.kind);
        row_bytes = stream.width * size / (stream.kind == INT4 ? 2 : 1);
        if (from >= to) return;
        if (stream.stride_g * size == row_bytes && stream.stride_t == groups * stream.stride_g) {
            // Heads side by side: one stretch of memory, of which group g fetches its share.
            const char *begin = address(stream, b, 0, from), *end = address(stream, b, 0, to);
            next = begin + g * block * row_bytes;
            row_end = std::min(next + block * row_bytes, end);
        } else {
            next = address(stream, b, g, from);
            row_end = next + row_bytes;
            rows_left = std::min(to - from, block) - 1;
            gap = stream.stride_t * size - row_bytes;
        }
    }
    int64_t lines_per_row() const { return (row_bytes + 63) / 64; }
    INLINED void fetch(int64_t lines) {  // lest the compiler take it for having no effect
        for (; lines > 0; lines--) {
            if (next >= row_end) {
                if (rows_left <= 0) return;
                rows_left--;
                next = row_end + gap;
                row_end = next + row_bytes;
            }
            __builtin_prefetch(next);
            next += 64;
        }
    }

  private:
    const char *next = nullptr, *row_end = nullptr;
    int64_t row_bytes = 0, rows_left = 0, gap = 0;
};

// ---- the two products ----------------------------------------------------------------------------------------

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
    Rows<E> query, keys;
    int64_t width, query_step;  // from the queries of one step of the window to those of the next
    Rows<E> rope_query, rope_keys;
    int64_t rotary;
    const float *scales;  // of the keys, one per token, or null
    float factor;
    int64_t steps, window;
    const float *mixes[4];  // per row, the weights of the keys' shift; null where there is none
    int64_t starts[4];      // per row, the token from which on it may look
    int64_t earliest;       // the first token that there is
    int64_t settled;        // from this token on, a shift needs no regard to starts
};

// Products of rows and tokens t … t + N - 1, not summed yet.
template <int M, int N, typename E>
INLINED void content(Floats (&sums)[M][N], const Scoring<E> &s, int64_t t) {
    multiply<M, N>(sums, s.query, s.keys.from(t), s.width);
    if (s.scales)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[m][n] *= s.scales[t + n];
}

// Five-dimensional queries: those of step m meet the keys m tokens back. The usual case adds in registers.
template <int M, int N, typename E>
INLINED void add_settled_steps(Floats (&sums)[M][N], const Scoring<E> &s, int64_t t) {
    for (int64_t step = 1; step < s.steps; step++)
        multiply<M, N>(sums, {s.query.data + step * s.query_step, s.query.stride}, s.keys.from(t - step), s.width);
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
                multiply<1, 1>(one, query, s.keys.from(t + n - step), s.width);
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
inline void scores_tile(const Scoring<E> &s, int64_t t, Floats *before, float *out, int64_t stride) {
    Floats sums[M][N] = {};
    content<M, N>(sums, s, t);
    if constexpr (MODE == STEPS) add_settled_steps<M, N>(sums, s, t);
    if constexpr (MODE == PAIRS) mix_settled_pairs<M, N>(sums, s, before);
    if constexpr (MODE == GENERAL)
        in_memory(sums, [&](Floats *copy) {
            if (s.steps > 1) add_steps(copy, M, N, s, t);
            if (s.mixes[0]) mix(copy, M, N, s, t, before);
        });
    if (s.rotary) multiply<M, N>(sums, s.rope_query, s.rope_keys.from(t), s.rotary);
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
            if (-back >= s.earliest) content<M, 1>(one, s, -back);
            for (int m = 0; m < M; m++) before[m * (s.window - 1) + s.window - 1 - back] = one[m][0];
        }
    if constexpr (MODE != PLAIN)
        for (; t < s.settled && t + N <= tokens; t += N)
            scores_tile<M, N, GENERAL>(s, t, before, out, stride);
    for (; t + N <= tokens; t += N) {
        ahead(N);
        scores_tile<M, N, MODE>(s, t, before, out, stride);
    }
    for (; t < tokens; t++) scores_tile<M, 1, MODE == PLAIN ? PLAIN : GENERAL>(s, t, before, out, stride);
}

// Token rows and the weights with which they enter the output of each row of a tile.
template <typename E>
struct Weighted {
    const E *weights;
    int64_t stride;
    Rows<E> v;
    int64_t tokens;
    Weighted channel(int64_t i) const { return {weights, stride, {v.data + i, v.stride}, tokens}; }
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
    if (halo.tokens) accumulate<M, N>(sums, halo.weights, halo.stride, halo.v, halo.tokens);
    constexpr int64_t SOME = 4;
    for (int64_t t = 0; t < block.tokens; t += SOME) {
        ahead(SOME * N);
        accumulate<M, N>(sums, block.weights + t, block.stride, block.v.from(t), std::min(block.tokens - t, SOME));
    }
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

// ---- a task --------------------------------------------------------------------------------------------------

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
    const int64_t per_group, width, rotary, value_width, halo, block, early_reach, reach;
    int64_t b, first_query, queries, lowest, from, to;
    float *out, *maxima, *sums;
    // Scratch. Tokens start at e0 in keys, values and early, at j0 in the others.
    E *query, *rope_query, *key_rows, *value_rows, *rope_rows, *narrow, *narrow_early;
    float *flowed, *early, *weights, *key_scales, *value_scales;
    Floats *before;

    // A block of tokens j0 … j1 - 1 of a stream head; e0 is as far back as a shift reaches.
    struct Block {
        int64_t g, e0, j0, j1;
        Rows<E> k, v, r;
    };

    const Stream &values() const { return call.values.data ? call.values : call.keys; }
    int64_t rows() const { return per_group * queries; }
    int64_t start_of(int64_t row) const {
        return call.starts ? std::max<int64_t>(call.starts[b * call.queries + first_query + row % queries], 0) : 0;
    }
    int64_t own_of(int64_t row) const {
        return (call.lengths ? call.lengths[b] : call.tokens) - call.queries + first_query + row % queries;
    }
    int64_t head_of(int64_t g, int64_t row) const { return g * per_group + row / queries; }

    // What the next block needs, and how much of it is asked for per token and vector of channels, in 1/256 lines.
    Ahead next_keys, next_values, next_rope;
    int64_t rate, due;
    void look_ahead(const Block &at);
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

template <typename E>
Task<E>::Task(const Call &call, int64_t index)
    : call(call), per_group(call.heads / call.groups), width(padded<E>(call.keys.width)),
      rotary(call.rope_keys.data ? padded<E>(call.rope_keys.width) : 0), value_width(padded<E>(values().width)),
      halo(std::max({call.steps, call.key_window, call.value_window}) - 1),
      block(std::clamp<int64_t>(BLOCK_BYTES / (int64_t(sizeof(E)) * width) / 16 * 16, 2 * PER_VECTOR<E>, 128)),
      early_reach((halo + 31) / 32 * 32), reach(block + early_reach + 32) {
    const int64_t split = index % call.splits, rest = index / call.splits;
    b = rest / query_blocks(call);
    first_query = rest % query_blocks(call) * call.query_block;
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
    from = lowest + blocks * split / call.splits * block;
    to = std::min(lowest + blocks * (split + 1) / call.splits * block, end);
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
    const int64_t count = at.j1 - at.e0;
    auto *from = static_cast<const char *>(scales.data) +
                 (b * scales.stride_b + at.g * scales.stride_g + at.e0 * scales.stride_t) * size_of(scales.kind);
    const int64_t step = scales.stride_t * size_of(scales.kind);
    if (scales.kind == FLOAT32)
        for (int64_t t = 0; t < count; t++) std::memcpy(into + t, from + t * step, 4);
    else
        for (int64_t t = 0; t < count; t++) {
            uint16_t bits;
            std::memcpy(&bits, from + t * step, 2);
            into[t] = widened(bits, scales.kind);
        }
    return into;
}

// A group's share of the next block, spread evenly over the work on this one: half of that is scores, half output.
template <typename E>
void Task<E>::look_ahead(const Block &at) {
    const int64_t from = at.j0 + block;
    next_keys = Ahead(call.keys, b, call.groups, at.g, from, to, block);
    if (call.values.data) next_values = Ahead(call.values, b, call.groups, at.g, from, to, block);
    if (rotary && at.g == 0) next_rope = Ahead(call.rope_keys, b, 1, 0, from, to, block);
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
        if (rotary) at.r = rows_of(call.rope_keys, b, 0, j0, at.j1, rope_rows);
        for (at.g = 0; at.g < call.groups; at.g++) {
            at.k = rows_of(call.keys, b, at.g, at.e0, at.j1, key_rows);
            at.v = call.values.data ? rows_of(call.values, b, at.g, at.e0, at.j1, value_rows) : at.k;
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
            for (int64_t t = 0; t < behind; t++) early[m * early_reach + t] *= v_scales[t];
            for (int64_t t = 0; t < at.j1 - at.j0; t++) arriving[m * reach + t] *= own[t];
        }
    }
    const Weighted<E> halo = {narrowed(early, M, behind, early_reach, narrow_early), early_reach, at.v, behind};
    const Weighted<E> block = {narrowed(arriving, M, at.j1 - at.j0, reach, narrow), reach,
                               at.v.from(at.j0 - at.e0), at.j1 - at.j0};
    outputs<M>(out + (at.g * rows() + row) * row_width(call), row_width(call), corrections, halo, block,
               value_width, [this](int64_t vectors) { fetch(vectors); });
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
    auto ahead = [this, vectors = value_width / LANES](int64_t tokens) { fetch(tokens * vectors); };
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
        early[e] = 0;
        for (int64_t back = behind - e; back < call.value_window && at.e0 + e >= start; back++)
            early[e] += p[e + back - behind] * mix[back];
    }
}

// ---- what dispatch.cpp calls ---------------------------------------------------------------------------------

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
    const int64_t head = index % call.heads, block = index / call.heads;
    const int64_t b = block / query_blocks(call), first_query = block % query_blocks(call) * call.query_block;
    const int64_t queries = std::min(call.query_block, call.queries - first_query), width = row_width(call);
    const int64_t all_rows = call.heads * call.query_block, task = block * call.splits;
    const float *outputs = call.partials + task * all_rows * width;
    const float *maxima = call.partials + tasks(call) * all_rows * width + task * all_rows;
    const float *sums = maxima + tasks(call) * all_rows;
    const int64_t value_width = call.values.data ? call.values.width : call.keys.width;
    std::vector<float> row_out(width);
    for (int64_t row = head * queries; row < (head + 1) * queries; row++) {
        float maximum = -INFINITE, total = 0;
        for (int64_t s = 0; s < call.splits; s++) maximum = std::max(maximum, maxima[s * all_rows + row]);
        const float shift = maximum == -INFINITE ? 0 : maximum;
        std::fill(row_out.begin(), row_out.end(), 0.0f);
        for (int64_t s = 0; s < call.splits; s++) {
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
