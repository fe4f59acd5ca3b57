// What a call of the kernel is made of; cpu.py mirrors these structures field by field.
#pragma once

#include <cstdint>

enum Kind : int64_t { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 };

inline int64_t size_of(Kind kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 || kind == FLOAT16 ? 2 : 1; }

// Strides are counted in elements; the innermost one is 1. stride_p is that of pages (see Call).
struct Scales {
    const void *data;  // null: the stream is of floats
    Kind kind;
    int64_t blocks, stride_p, stride_g, stride_t;
};

struct Stream {
    const void *data;  // null: there is none
    Kind kind;
    int64_t width, stride_p, stride_g, stride_t;  // width in channels
    Scales scales;
};

// Token t of sequence b lies in page tables[b][t / page] at place t % page.
struct Call {
    int64_t batch, heads, groups, queries, steps;  // steps: window of five-dimensional queries, else 1
    const void *tables;  // of int32 or, if wide, int64; null: sequence b is page b, with all of its tokens
    int64_t wide, table_stride;
    int64_t pages, page;  // how many there are, and the tokens of one
    double scale;
    const void *query, *rope_query;  // contiguous [B, H, W, Q, S] and [B, H, Q, R]
    Kind query_kind;
    Stream keys, values, rope_keys;    // no values: the keys are the values too
    int64_t key_window, value_window;  // 1 where there are no weights
    const float *key_weights, *value_weights, *slopes;  // contiguous [H, W], [H, W], [H], or null
    const int64_t *starts, *lengths;                    // contiguous [B, Q] and [B], or null; lengths: all of a page
    void *out;                                          // contiguous [B, H, Q, V], of the queries' kind
    // The tasks: for every sequence, blocks of queries x splits, of which sequence b has splits[b + 1] - splits[b].
    int64_t query_block;
    const int64_t *splits;
    // What the tasks leave: for each of them and each of H · query_block rows, an output of V padded to a whole
    // number of PADDING; then for each a maximum; then a sum.
    float *partials;
};

constexpr int64_t PADDING = 32;

inline int64_t query_blocks(const Call &call) { return (call.queries + call.query_block - 1) / call.query_block; }
inline int64_t tasks(const Call &call) { return call.splits[call.batch] * query_blocks(call); }
inline int64_t page_at(const Call &call, int64_t b, int64_t index) {
    if (!call.tables) return b;
    const int64_t at = b * call.table_stride + index;
    return call.wide ? static_cast<const int64_t *>(call.tables)[at] : static_cast<const int32_t *>(call.tables)[at];
}

// Where a token of a sequence lies: in which of its pages, and at what place there.
struct Spot {
    int64_t index, place;
};
inline Spot spot_of(const Call &call, int64_t t) {
    if (!call.tables) return {0, t};  // without a division, of which a block of tokens would take many
    return {t / call.page, t % call.page};
}
inline int64_t row_width(const Call &call) {
    const Stream &values = call.values.data ? call.values : call.keys;
    return (values.width + PADDING - 1) / PADDING * PADDING;
}
