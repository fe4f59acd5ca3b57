// Streams in memory as rows that can be multiplied, and their memory asked for ahead of time.
#pragma once

#include <algorithm>
#include <type_traits>

#include "call.h"
#include "vectors.h"

namespace {

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

}  // namespace
