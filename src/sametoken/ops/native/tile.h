/* Matrix product micro-kernel: up to MAX_ROWS rows times a group of GROUP columns.
 *
 * Columns are packed by group: [units][GROUP] words of 32 bits, each one fp32 or two
 * neighbouring bf16 elements of a column. Each column has its own lane and its sum runs over
 * the units in order, so no result depends on the number of rows in a call. */
#ifndef SAMETOKEN_TILE_H
#define SAMETOKEN_TILE_H

#include "vector.h"

#define PANELS 2
#define GROUP (PANELS * LANES)
/* The sums of a tile stay in registers: 24 of the 32 that AVX-512 and NEON have, 12 of 16. */
#if LANES == 16 || defined(__aarch64__)
#define MAX_ROWS 12
#else
#define MAX_ROWS 6
#endif

/* Bytes before it is read at which memory comes into the first cache. */
#define AHEAD (16 << 10)

INLINE void fetch_ahead(const void *from, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64)
        __builtin_prefetch((const char *)from + AHEAD + line, 0, 3);
}

INLINE u32v word_in_lanes(const char *x) {
    uint32_t word;
    memcpy(&word, x, sizeof word);
    return word - (u32v){0};
}

#if defined(__AVX512BF16__)
/* Add two bf16 elements of every row times those of every column. */
INLINE void add_pairs(const int rows, const char *x, int64_t stride, const u32v *columns,
                      f32v sum[MAX_ROWS][PANELS]) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        __m512bh row = (__m512bh)word_in_lanes(x + r * stride);
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
            sum[r][p] = (f32v)_mm512_dpbf16_ps((__m512)sum[r][p], (__m512bh)columns[p], row);
    }
}
#else
/* Add the first or the second bf16 element of every row times that of every column. */
INLINE void add_elements(const int rows, const char *x, int64_t stride, const u32v *columns,
                         f32v sum[MAX_ROWS][PANELS], const int second) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        u32v row = word_in_lanes(x + r * stride);
#if defined(__x86_64__)
        __asm__("" : "+v"(row)); /* or gcc shifts scalars and broadcasts each result */
#endif
        f32v element = (f32v)(second ? row & 0xffff0000 : row << 16);
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++) {
            u32v column = second ? columns[p] & 0xffff0000 : columns[p] << 16;
            sum[r][p] = multiply_add(element, (f32v)column, sum[r][p]);
        }
    }
    __asm__ volatile("" ::: "memory"); /* words are read again: registers hold the sums */
}
#endif

/* Add one word of every row times one word of every column. */
INLINE void add_words(const int rows, const char *x, int64_t stride, const u32v *columns,
                      f32v sum[MAX_ROWS][PANELS], const int bf16) {
    if (bf16) {
#if defined(__AVX512BF16__)
        add_pairs(rows, x, stride, columns, sum);
#else
        add_elements(rows, x, stride, columns, sum, 0);
        add_elements(rows, x, stride, columns, sum, 1);
#endif
        return;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        f32v row = (f32v)word_in_lanes(x + r * stride);
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
            sum[r][p] = multiply_add(row, (f32v)columns[p], sum[r][p]);
    }
}

/* rows x GROUP sums over `depth` elements, added in place to `sums`, whose rows are `between` floats
 * apart. Columns `from_memory` are fetched ahead. */
INLINE void fixed_tile(const int rows, const char *x, int64_t stride, const u32v *columns,
                       int64_t depth, float *sums, int64_t between, const int bf16,
                       const int from_memory) {
    f32v sum[MAX_ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
            memcpy(&sum[r][p], sums + r * between + p * LANES, sizeof(f32v));
    int64_t units = bf16 ? depth / 2 : depth;
    for (int64_t unit = 0; unit < units; unit++, columns += PANELS) {
        if (from_memory) fetch_ahead(columns, GROUP * 4);
        add_words(rows, x + unit * 4, stride, columns, sum, bf16);
    }
    if (bf16 && depth % 2) {
        uint32_t last[MAX_ROWS] = {0};
        for (int r = 0; r < rows; r++) memcpy(last + r, x + r * stride + units * 4, 2);
        add_words(rows, (const char *)last, 4, columns, sum, bf16);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
            memcpy(sums + r * between + p * LANES, &sum[r][p], sizeof(f32v));
}

/* CASE(n) for every number of rows of a tile, for code of a fixed number. */
#if MAX_ROWS > 6
#define EACH_ROW_COUNT(CASE)                                                                 \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)                                          \
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define EACH_ROW_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif

/* fixed_tile for any 1 <= rows <= MAX_ROWS; `stride` is in bytes. */
INLINE void multiply_tile(int rows, const void *x, int64_t stride, const void *columns,
                          int64_t depth, float *sums, int64_t between, int bf16,
                          const int from_memory) {
#define CASE(n)                                                                              \
    case n:                                                                                  \
        if (bf16) fixed_tile(n, x, stride, columns, depth, sums, between, 1, from_memory);   \
        else fixed_tile(n, x, stride, columns, depth, sums, between, 0, from_memory);        \
        return;
    switch (rows) {
        EACH_ROW_COUNT(CASE)
    }
#undef CASE
}

/* Columns from `column` on of rows of [.., n], the first at element `first`, `stride` apart. */
INLINE void store_tile(const float *sums, int64_t rows, int64_t first, int64_t stride,
                       int64_t column, int64_t n, const void *bias, void *out, int bf16,
                       int out_bf16) {
    for (int p = 0; p < PANELS; p++) {
        int64_t start = column + p * LANES, count = n - start;
        if (count <= 0) return;
        f32v shift = bias ? load_some(bias, start, count, bf16) : splat(0.0f);
        for (int64_t r = 0; r < rows; r++) {
            f32v sum = load_some(sums, r * GROUP + p * LANES, LANES, 0);
            if (bias) sum += shift;
            store_some(out, first + r * stride + start, count, out_bf16, sum);
        }
    }
}

#endif
