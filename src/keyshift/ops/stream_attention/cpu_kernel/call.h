// What a call of the kernel is made of; cpu.py mirrors these structures field by field.
#pragma once

#include <cstdint>

enum Kind : int64_t { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 };

inline int64_t size_of(Kind kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 || kind == FLOAT16 ? 2 : 1; }

// Strides are counted in elements; the innermost one is 1.
struct Scales {
    const void *data;  // null: the stream is of floats
    Kind kind;
    int64_t blocks, stride_b, stride_g, stride_t;
};

struct Stream {
    const void *data;  // null: there is none
    Kind kind;
    int64_t width, stride_b, stride_g, stride_t;  // width in channels
    Scales scales;
};

struct Call {
    int64_t batch, heads, groups, queries, steps, tokens;  // steps: window of five-dimensional queries, else 1
    double scale;
    const void *query, *rope_query;  // contiguous [B, H, W, Q, S] and [B, H, Q, R]
    Kind query_kind;
    Stream keys, values, rope_keys;    // no values: the keys are the values too
    int64_t key_window, value_window;  // 1 where there are no weights
    const float *key_weights, *value_weights, *slopes;  // contiguous [H, W], [H, W], [H], or null
    const int64_t *starts, *lengths;                    // contiguous [B, Q], [B], or null
    void *out;                                          // contiguous [B, H, Q, V], of the queries' kind
    // The tasks: batch x blocks of queries x splits of the sequence.
    int64_t query_block, splits;
    // What the tasks leave: for each of them and each of H · query_block rows, an output of V padded to a whole
    // number of PADDING; then for each a maximum; then a sum.
    float *partials;
};

constexpr int64_t PADDING = 32;

inline int64_t query_blocks(const Call &call) { return (call.queries + call.query_block - 1) / call.query_block; }
inline int64_t tasks(const Call &call) { return call.batch * query_blocks(call) * call.splits; }
inline int64_t row_width(const Call &call) {
    const Stream &values = call.values.data ? call.values : call.keys;
    return (values.width + PADDING - 1) / PADDING * PADDING;
}
