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
#if defined(__AVX512F__)
#define MAX_ROWS 12
#else
#define MAX_ROWS 3
#endif

INLINE f32x16 add_products(f32x16 sum, u32x16 column, uint32_t x, int bf16) {
    u32x16 row = x - (u32x16){0};
    if (!bf16) return multiply_add((f32x16)row, (f32x16)column, sum);
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)column, (__m512bh)row);
#else
    sum = multiply_add((f32x16)(row << 16), (f32x16)(column << 16), sum);
    return multiply_add((f32x16)(row & 0xffff0000), (f32x16)(column & 0xffff0000), sum);
#endif
}

/* rows x GROUP sums over `depth` elements, added to `sums` (stride GROUP) in place. */
INLINE void fixed_tile(const int rows, const char *x, int64_t stride, const u32x16 *columns,
                       int64_t depth, float *sums, const int bf16) {
    f32x16 sum[MAX_ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
            memcpy(&sum[r][p], sums + r * GROUP + p * LANES, sizeof(f32x16));
    int64_t units = bf16 ? depth / 2 : depth;
    for (int64_t unit = 0; unit < units; unit++, columns += PANELS) {
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            uint32_t word;
            memcpy(&word, x + r * stride + unit * 4, sizeof word);
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; p++)
                sum[r][p] = add_products(sum[r][p], columns[p], word, bf16);
        }
    }
    if (bf16 && depth % 2) {
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            uint16_t last;
            memcpy(&last, x + r * stride + units * 4, sizeof last);
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; p++)
                sum[r][p] = add_products(sum[r][p], columns[p], last, bf16);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
            memcpy(sums + r * GROUP + p * LANES, &sum[r][p], sizeof(f32x16));
}

/* fixed_tile for any 1 <= rows <= MAX_ROWS; `stride` is in bytes. */
INLINE void multiply_tile(int rows, const void *x, int64_t stride, const void *columns,
                          int64_t depth, float *sums, int bf16) {
#define CASE(n)                                                                              \
    case n:                                                                                  \
        if (bf16) fixed_tile(n, x, stride, columns, depth, sums, 1);                         \
        else fixed_tile(n, x, stride, columns, depth, sums, 0);                              \
        return;
    switch (rows) {
        CASE(1) CASE(2) CASE(3)
#if defined(__AVX512F__)
        CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
#undef CASE
}

#endif
