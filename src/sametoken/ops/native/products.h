/* Products of rows and a packed group of columns (tile.h), in bf16 by matrix units (AMX) if there
 * are any.
 *
 * Those sum up each element in one lane of a tile register, over AMX_DEPTH elements at a time, in
 * order: no result depends on the number of rows in a call. Denormals count as 0. */
#ifndef SAMETOKEN_PRODUCTS_H
#define SAMETOKEN_PRODUCTS_H

#include "tile.h"

/* The depth of a tile register in elements. */
#define AMX_DEPTH 32
#if defined(__AMX_BF16__) && GROUP == 32
#define HAS_AMX 1
/* Rows of two tile registers, and the depth of one in bytes. */
#define AMX_ROWS 32
#define AMX_BYTES 64

/* What LDTILECFG reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* Ends all stores before it: gcc does not know that tile registers are loaded from memory. */
INLINE void written(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

/* Shape this thread's registers for 1 to AMX_ROWS rows: 0 and 1 hold rows, 2 and 3 columns, 4 and 5
 * the sums of the rows in 0, 6 and 7 of those in 1. */
INLINE void shape_tiles(int64_t rows) {
    uint8_t first = (uint8_t)smaller(rows, 16), second = (uint8_t)larger(rows - 16, 1);
    tile_shapes shapes = {.palette = 1,
                          .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                          .rows = {first, second, 16, 16, first, first, second, second}};
    written(&shapes);
    _tile_loadconfig(&shapes);
}

INLINE void add_depth(const char *x, int64_t stride, const char *columns, const int both) {
    _tile_loadd(2, columns, GROUP * 4);
    _tile_loadd(3, columns + LANES * 4, GROUP * 4);
    _tile_loadd(0, x, stride);
    _tile_dpbf16ps(4, 0, 2);
    _tile_dpbf16ps(5, 0, 3);
    if (both) {
        _tile_loadd(1, x + 16 * stride, stride);
        _tile_dpbf16ps(6, 1, 2);
        _tile_dpbf16ps(7, 1, 3);
    }
}

INLINE void amx_sums(const int64_t rows, const char *x, int64_t stride, const char *columns,
                     int64_t depth, float *sums, int64_t between, const int both) {
    int64_t steps = depth / AMX_DEPTH, left = depth % AMX_DEPTH;
    written(x);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t step = 0; step < steps; step++, x += AMX_BYTES, columns += AMX_BYTES * GROUP)
        add_depth(x, stride, columns, both);
    if (left) {
        char last_x[AMX_ROWS * AMX_BYTES] = {0}, last_columns[GROUP * AMX_BYTES] = {0};
        for (int64_t r = 0; r < rows; r++) memcpy(last_x + r * AMX_BYTES, x + r * stride, left * 2);
        memcpy(last_columns, columns, ceil_div(left, 2) * GROUP * 4);
        written(last_x);
        written(last_columns);
        add_depth(last_x, AMX_BYTES, last_columns, both);
    }
    _tile_stored(4, sums, between * 4);
    _tile_stored(5, sums + LANES, between * 4);
    if (both) {
        _tile_stored(6, sums + 16 * between, between * 4);
        _tile_stored(7, sums + 16 * between + LANES, between * 4);
    }
}
#define MOST_ROWS(bf16) ((bf16) ? AMX_ROWS : MAX_ROWS)
#else
#define MOST_ROWS(bf16) MAX_ROWS
#endif

/* Sums of up to MOST_ROWS rows and one group of columns: [rows][GROUP], rows `between` floats apart.
 * `shaped` rows are those for which this thread's matrix unit was shaped last, at first 0. Columns
 * `from_memory` are fetched ahead, but by matrix units. */
INLINE void sum_products(int64_t rows, const char *x, int64_t stride, const char *columns, int64_t k,
                         float *sums, int64_t between, int64_t *shaped, const int bf16,
                         const int from_memory) {
#if defined(HAS_AMX)
    if (bf16) {
        if (rows != *shaped) shape_tiles(rows);
        *shaped = rows;
        if (rows > 16) amx_sums(rows, x, stride, columns, k, sums, between, 1);
        else amx_sums(rows, x, stride, columns, k, sums, between, 0);
        return;
    }
#endif
    for (int64_t r = 0; r < rows; r++) memset(sums + r * between, 0, GROUP * sizeof *sums);
    multiply_tile(rows, x, stride, columns, k, sums, between, bf16, from_memory);
    (void)shaped;
}

/* After the last sums of a thread. */
INLINE void end_products(const int bf16) {
#if defined(HAS_AMX)
    if (bf16) _tile_release();
#else
    (void)bf16;
#endif
}

#endif
