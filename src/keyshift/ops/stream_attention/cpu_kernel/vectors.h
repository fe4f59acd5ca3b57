// Vectors of the instruction set that is compiled for: GCC's and Clang's own, so that one source serves all.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

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

}  // namespace
