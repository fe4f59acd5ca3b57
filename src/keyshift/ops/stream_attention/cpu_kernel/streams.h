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

// Calls each(page, place, t, count) for the stretches of tokens from … to - 1 of a sequence that lie in one page: where
// a stretch begins, and which and how many tokens it is.
template <typename Each>
INLINED void stretches(const Call &call, int64_t b, int64_t from, int64_t to, Each each) {
    Spot spot = spot_of(call, from);
    for (int64_t t = from; t < to; spot = {spot.index + 1, 0}) {
        const int64_t count = std::min(call.page - spot.place, to - t);
        each(page_at(call, b, spot.index), spot.place, t, count);
        t += count;
    }
}

const char *address(const Stream &stream, int64_t page, int64_t g, int64_t place) {
    const int64_t element = page * stream.stride_p + g * stream.stride_g + place * stream.stride_t;
    return static_cast<const char *>(stream.data) + element * size_of(stream.kind);
}

inline float scale_of(const Scales &scales, int64_t page, int64_t g, int64_t place, int64_t n) {
    const int64_t element = page * scales.stride_p + g * scales.stride_g + place * scales.stride_t + n;
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

void scale_channels(float *row, int64_t width, const Scales &scales, int64_t page, int64_t g, int64_t place) {
    const int64_t block = width / scales.blocks;
    for (int64_t n = 0; n < scales.blocks; n++) {
        const float factor = scale_of(scales, page, g, place, n);
        for (int64_t i = n * block; i < (n + 1) * block; i++) row[i] *= factor;
    }
}

template <typename E>
struct Rows {
    const E *data;
    int64_t stride;
    INLINED Rows from(int64_t t) const { return {data + t * stride, stride}; }
};

// So many tokens are multiplied at once at most, and those of a block begin at multiples of it.
constexpr int64_t TOGETHER = 4;

// Tokens of a stream head as rows: `stride` apart, or where `places` says, in elements from `data`. Those that are
// multiplied at once are `stride` apart in any case.
template <typename E>
struct Tokens {
    const E *data;
    const int64_t *places;
    int64_t stride;
    INLINED Rows<E> rows(int64_t t) const { return {data + (places ? places[t] : t * stride), stride}; }
    INLINED Tokens from(int64_t t) const {
        return places ? Tokens{data, places + t, stride} : Tokens{data + t * stride, nullptr, stride};
    }
    INLINED Tokens channel(int64_t i) const { return {data + i, places, stride}; }
    INLINED Rows<E> evenly() const { return {data, stride}; }  // where there are no places
    INLINED bool are_even(int64_t t, int64_t count) const {
        return !places || places[t + count - 1] - places[t] == (count - 1) * stride;
    }
};

// Tokens as rows, of blocks that begin at `lowest` or a multiple of TOGETHER behind: in place where they lie as they
// should, else read into the buffer. The places are those of all heads, of which the first is read first.
template <typename E>
Tokens<E> rows_of(const Call &call, const Stream &stream, int64_t b, int64_t g, int64_t lowest, int64_t from, int64_t to,
                  E *buffer, int64_t *places) {
    if (stream.kind == (std::is_same_v<E, float> ? FLOAT32 : BFLOAT16) && stream.width % PER_VECTOR<E> == 0) {
        auto at = [&](int64_t page, int64_t head, int64_t place) {
            return reinterpret_cast<const E *>(address(stream, page, head, place));
        };
        const Spot first = spot_of(call, from);
        if (first.index == spot_of(call, to - 1).index)
            return {at(page_at(call, b, first.index), g, first.place), nullptr, stream.stride_t};
        if (call.page % TOGETHER == 0 && lowest % TOGETHER == 0) {
            if (g == 0)
                stretches(call, b, from, to, [&](int64_t page, int64_t place, int64_t t, int64_t count) {
                    const int64_t first = page * stream.stride_p + place * stream.stride_t;
                    for (int64_t i = 0; i < count; i++) places[t - from + i] = first + i * stream.stride_t;
                });
            return {at(0, g, 0), places, stream.stride_t};
        }
    }
    const int64_t stride = padded<E>(stream.width);
    stretches(call, b, from, to, [&](int64_t page, int64_t place, int64_t t, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            E *row = buffer + (t - from + i) * stride;
            read_row(address(stream, page, g, place + i), stream.kind, stream.width, row);
            if constexpr (std::is_same_v<E, float>)
                if (stream.scales.data && !scales_tokens(stream))
                    scale_channels(row, stream.width, stream.scales, page, g, place + i);
        }
    });
    return {buffer, nullptr, stride};
}

// The part of a stream that will be wanted next, asked for a few cache lines at a time while something else is
// computed: memory that waits for a pause in the computation is slow, and so is one that is asked for all at once.
class Ahead {
  public:
    Ahead() = default;
    // Of tokens from … to - 1; `share` is as many as one of the groups need fetch where it fetches for all of them.
    Ahead(const Call &call, const Stream &stream, int64_t b, int64_t groups, int64_t g, int64_t from, int64_t to,
          int64_t share)
        : call(&call), stream(&stream), b(b), g(g) {
        const int64_t size = size_of(stream.kind);
        head_bytes = row_bytes = stream.width * size / (stream.kind == INT4 ? 2 : 1);
        if (stream.stride_g * size == head_bytes) {
            // Heads side by side: a group fetches all heads of its share of the tokens.
            row_bytes *= groups;
            this->g = 0;
            from += g * share;
            to = std::min(to, from + share);
        }
        left = to - from;
        gap = stream.stride_t * size - row_bytes;
        spot = spot_of(call, from);
    }
    int64_t lines_per_row() const { return (head_bytes + 63) / 64; }
    // On to the next page, where one is done: apart from `fetch`, which has no registers to spare.
    INLINED void turn() {
        if (next >= end && rows <= 0 && left > 0) turn_page();
    }
    INLINED void fetch(int64_t lines) {  // lest the compiler take it for having no effect
        for (; lines > 0; lines--) {
            if (next >= end) {
                if (rows <= 0) return;
                rows--;
                next = end + gap;
                end = next + row_bytes;
            }
            __builtin_prefetch(next);
            next += 64;
        }
    }

  private:
    const Call *call = nullptr;
    const Stream *stream = nullptr;
    int64_t b = 0, g = 0, left = 0, head_bytes = 0, row_bytes = 0;
    Spot spot = {0, 0};
    const char *next = nullptr, *end = nullptr;  // of the row that is being fetched, or of rows side by side
    int64_t rows = 0, gap = 0;                   // that follow it in its page, and the bytes between them

    // To what is wanted of the next page.
    __attribute__((noinline)) void turn_page() {
        const int64_t count = std::min(left, call->page - spot.place);
        const bool side_by_side = gap == 0;
        next = address(*stream, page_at(*call, b, spot.index), g, spot.place);
        end = next + (side_by_side ? count : 1) * row_bytes;
        rows = side_by_side ? 0 : count - 1;
        left -= count;
        spot = {spot.index + 1, 0};
    }
};

}  // namespace
