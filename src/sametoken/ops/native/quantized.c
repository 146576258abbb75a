/* Products of quantized weights, which stay in their bits: codes become fp32 in registers.
 *
 * An element is code * scale + offset, with the scale and offset of its row of the weight and
 * group of features. A sum runs over the features in order, in fp32, whatever the groups. Rows of
 * the weight are columns here, as in tile.h: a group of columns is [scales][offsets][words], each
 * in whole vectors. A word has neighbouring codes of a column, lowest bits first. */
#include "kernels.h"
#include "scales.h"
#include "threads.h"
#include "tile.h"

/* Codes: unsigned integers of 4 bits, e4m3 without NaN, or e2m1. */
enum { INT4, FP8, E2M1 };
/* Offsets are -zero * scale, with one zero, or a byte by group; FACTORS stand in their place: one
 * zero, and an fp32 number by column that its sums are multiplied by. */
enum { ONE_ZERO, ZEROS, FACTORS };
/* How activations are rounded to e4m3: POWERS are groups whose scales are powers of two. */
enum { AS_IS, BY_ROW, BY_GROUP, FIXED, POWERS };

/* Features that are widened at once, where rows are many. */
#define DEPTH 32
/* Rows that are multiplied with one group of columns before the next. */
#define BLOCK_ROWS 48
/* Rows whose sums leave registers for the widening of columns. */
#define FEW_ROWS 4
/* Features of activations that share a scale. */
#define ROUNDED_GROUP 128

/* `width` features share a scale: 16, a multiple of DEPTH, or all `k`. */
typedef struct {
    int64_t k, width, codes, scales, offsets, zero;
} format;

INLINE int codes_of_word(int64_t codes) { return codes == INT4 || codes == E2M1 ? 8 : 4; }
INLINE int64_t num_groups(const format *f) { return ceil_div(f->k, f->width); }
/* Elements of a row that is multiplied: whole words, zero padded. */
INLINE int64_t padded(const format *f) { return round_up(f->k, codes_of_word(f->codes)); }
INLINE int64_t scale_size(const format *f) { return scale_bytes(f->scales); }
INLINE int64_t offset_size(const format *f) {
    return f->offsets == ZEROS ? 1 : f->offsets == FACTORS ? 4 : 0;
}
INLINE int64_t num_offsets(const format *f) {
    return f->offsets == ZEROS ? num_groups(f) : f->offsets == FACTORS;
}
INLINE int64_t offsets_at(const format *f) {
    return round_up(num_groups(f) * GROUP * scale_size(f), sizeof(u32v));
}
INLINE int64_t words_at(const format *f) {
    return offsets_at(f) + round_up(num_offsets(f) * GROUP * offset_size(f), sizeof(u32v));
}
INLINE int64_t group_bytes(const format *f) {
    return words_at(f) + padded(f) / codes_of_word(f->codes) * GROUP * 4;
}

EXPORT int64_t quantized_bytes(const format *f, int64_t n) {
    return ceil_div(n, GROUP) * group_bytes(f);
}

/* Scales of LANES columns of a group of columns; `index` counts by group of features and column. */
INLINE f32v group_scale(const format *f, const char *columns, int64_t index) {
    return scale_lanes(columns + index * scale_size(f), f->scales);
}

INLINE f32v offset_lanes(const format *f, const char *offsets, int64_t index, f32v scale) {
    if (f->offsets != ZEROS) return -splat(f->zero) * scale;
    return -__builtin_convertvector((i32v)load_bytes(offsets + index), f32v) * scale;
}

/* Numbers of e2m1, from a table: as exponents and digits some would be subnormal, which is slow. */
INLINE f32v e2m1_lanes(u32v code) {
#if defined(__AVX512F__)
    f32v numbers = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
    return (f32v)_mm512_permutexvar_ps((__m512i)code, (__m512)numbers);
#else
#if defined(__AVX2__)
    f32v sizes = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    f32v size = (f32v)_mm256_permutevar8x32_ps((__m256)sizes, (__m256i)code);
#else
    i32v rest = (i32v)(code & 7);
    f32v size = select_lanes(rest < 2, __builtin_convertvector(rest, f32v) * 0.5f,
                             (f32v)((rest << 22) + 0x3f000000));
#endif
    return (f32v)((u32v)size | (code & 8) << 28);
#endif
}

/* Code `e` of each lane's word, as a number. */
INLINE f32v code_lanes(u32v word, const int e, const int codes) {
    if (codes == FP8) return e4m3_finite(word << (24 - 8 * e));
    if (codes == E2M1) return e2m1_lanes(word >> 4 * e);
    return __builtin_convertvector((i32v)(word >> 4 * e & 15), f32v);
}

/* Features from `first` on of a group of columns: [depth][PANELS]. */
INLINE void widen_columns(const char *columns, const format *f, int64_t first, int64_t depth,
                          f32v *slab, const int codes) {
    const int each = codes_of_word(codes);
    const char *offsets = columns + offsets_at(f);
    const u32v *words = (const u32v *)(columns + words_at(f)) + first / each * PANELS;
    int64_t done = 0;
    for (int64_t group = first / f->width; done < depth; group++) {
        int64_t end = smaller(depth, (group + 1) * f->width - first);
        f32v scale[PANELS], offset[PANELS];
        for (int p = 0; p < PANELS; p++) {
            int64_t index = group * GROUP + p * LANES;
            scale[p] = group_scale(f, columns, index);
            offset[p] = offset_lanes(f, offsets, index, scale[p]);
        }
        for (; done < end; done += each, words += PANELS) {
            fetch_ahead(words, GROUP * 4);
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 8
                for (int e = 0; e < each; e++)
                    slab[(done + e) * PANELS + p] =
                        multiply_add(code_lanes(words[p], e, codes), scale[p], offset[p]);
        }
    }
}

/* The least power of two that is not below a positive number: the mantissa carries. */
INLINE float next_power(float x) {
    union { float number; uint32_t bits; } of = {.number = x};
    of.bits = (of.bits + 0x7fffff) & 0x7f800000;
    return of.number;
}

/* Activations that share a scale, rounded: their e4m3 numbers times the scale. */
INLINE void round_run(const void *x, int64_t first, int64_t count, int bf16, float fixed,
                      int powers, float *out) {
    f32v largest = splat(0x1p-100f);
    for (int64_t i = 0; i < count; i += LANES) {
        f32v v = load_some(x, first + i, count - i, bf16);
        largest = max_lanes((f32v)((u32v)v & 0x7fffffff), largest);
    }
    float scale = largest[0];
    for (int lane = 1; lane < LANES; lane++) scale = largest[lane] > scale ? largest[lane] : scale;
    scale = fixed ? fixed : scale * (1.0f / 448.0f);
    if (powers) scale = next_power(scale);
    float inverse = 1.0f / scale;
    for (int64_t i = 0; i < count; i += LANES) {
        f32v v = load_some(x, first + i, count - i, bf16) * inverse;
        store_some(out, i, count - i, 0, round_to_e4m3(v) * scale);
    }
}

INLINE void widen_row(const void *x, int64_t first, int64_t k, int bf16, int64_t rounding,
                      float fixed, float *out) {
    if (rounding == AS_IS) {
        for (int64_t i = 0; i < k; i += LANES)
            store_some(out, i, k - i, 0, load_some(x, first + i, k - i, bf16));
        return;
    }
    int powers = rounding == POWERS;
    int64_t width = rounding == BY_GROUP || powers ? ROUNDED_GROUP : k;
    for (int64_t i = 0; i < k; i += width)
        round_run(x, first + i, smaller(width, k - i), bf16, fixed, powers, out + i);
}

/* Sums of up to BLOCK_ROWS rows and one group of columns, [rows][GROUP]. */
INLINE void sum_many(const float *x, int64_t rows, const char *columns, const format *f,
                     float *sums, const int codes) {
    const int each = codes_of_word(codes);
    int64_t k = f->k, stride = padded(f), tiles = ceil_div(rows, MAX_ROWS);
    memset(sums, 0, rows * GROUP * sizeof *sums);
    for (int64_t first = 0; first < k; first += DEPTH) {
        f32v slab[DEPTH * PANELS];
        int64_t depth = smaller(DEPTH, k - first), whole = round_up(depth, each);
        widen_columns(columns, f, first, depth, slab, codes);
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t row = rows * tile / tiles, count = rows * (tile + 1) / tiles - row;
            multiply_tile(count, x + row * stride + first, stride * 4, slab, whole,
                          sums + row * GROUP, GROUP, 0, 0);
        }
    }
}

/* The same sums of FEW_ROWS rows at most and adjacent groups, [groups][rows][GROUP]. Nothing waits
 * for a slab, and a lone row's sums wait for each other less where two groups alternate. */
INLINE void sum_few(const int rows, const int groups, const float *x, const char *columns,
                    const format *f, float *sums, const int codes) {
    const int each = codes_of_word(codes), panels = groups * PANELS;
    int64_t k = f->k, stride = padded(f), bytes = group_bytes(f);
    const char *offsets = columns + offsets_at(f), *words = columns + words_at(f);
    f32v sum[FEW_ROWS][2 * PANELS] = {0};
    int64_t done = 0;
    for (int64_t group = 0; done < k; group++) {
        int64_t end = smaller(k, (group + 1) * f->width);
        f32v scale[2 * PANELS], offset[2 * PANELS];
        for (int p = 0; p < panels; p++) {
            int64_t index = group * GROUP + p % PANELS * LANES, at = p / PANELS * bytes;
            scale[p] = group_scale(f, columns + at, index);
            offset[p] = offset_lanes(f, offsets + at, index, scale[p]);
        }
        for (; done < end; done += each, words += GROUP * 4) {
            for (int at = 0; at < groups; at++) fetch_ahead(words + at * bytes, GROUP * 4);
#pragma GCC unroll 8
            for (int e = 0; e < each; e++) {
                f32v column[2 * PANELS];
#pragma GCC unroll 8
                for (int p = 0; p < panels; p++) {
                    u32v word;
                    memcpy(&word, words + p / PANELS * bytes + p % PANELS * sizeof word,
                           sizeof word);
                    column[p] = multiply_add(code_lanes(word, e, codes), scale[p], offset[p]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    f32v value = splat(x[r * stride + done + e]);
#pragma GCC unroll 8
                    for (int p = 0; p < panels; p++)
                        sum[r][p] = multiply_add(value, column[p], sum[r][p]);
                }
                __asm__ volatile("" ::: "memory"); /* words are read again, as in tile.h */
            }
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            memcpy(sums + (p / PANELS * rows + r) * GROUP + p % PANELS * LANES, &sum[r][p],
                   sizeof(f32v));
}

/* A function for each kind of codes and number of rows: gcc spills in one that holds several. */
typedef void row_sums(const float *, int64_t, const char *, const format *, float *);
#define SUMS(name, call)                                                                     \
    static __attribute__((noinline)) void name(const float *x, int64_t rows,                 \
                                               const char *columns, const format *f,         \
                                               float *sums) {                                \
        (void)rows;                                                                          \
        call;                                                                                \
    }
#define FEW(rows, groups, codes)                                                             \
    SUMS(sum_##rows##_by_##groups##_##codes, sum_few(rows, groups, x, columns, f, sums, codes))
#define ALL(codes)                                                                           \
    FEW(1, 1, codes) FEW(2, 1, codes) FEW(3, 1, codes) FEW(4, 1, codes)                      \
    SUMS(sum_many_##codes, sum_many(x, rows, columns, f, sums, codes))
ALL(INT4)
ALL(FP8)
ALL(E2M1)
/* One row and two groups, where registers hold what belongs to both. Float8 takes up to twice as
 * long by it. */
FEW(1, 2, INT4)
FEW(1, 2, E2M1)

/* By codes: of up to FEW_ROWS, and of more. */
#define SUMS_OF(codes)                                                                       \
    {sum_1_by_1_##codes, sum_2_by_1_##codes, sum_3_by_1_##codes, sum_4_by_1_##codes,         \
     sum_many_##codes}
static row_sums *const SUMS_OF_ROWS[][FEW_ROWS + 1] = {SUMS_OF(INT4), SUMS_OF(FP8), SUMS_OF(E2M1)};
static row_sums *const SUMS_OF_TWO[] = {sum_1_by_2_INT4, NULL, sum_1_by_2_E2M1};

/* Sums of rows and one group of columns or, of one row, two if there are; returns how many. */
INLINE int64_t sum_groups(const float *x, int64_t rows, const char *columns, int64_t left,
                          const format *f, float *sums) {
    row_sums *two = MAX_ROWS > 6 && rows == 1 && left > 1 ? SUMS_OF_TWO[f->codes] : NULL;
    row_sums *sum = two ? two : SUMS_OF_ROWS[f->codes][smaller(rows, FEW_ROWS + 1) - 1];
    sum(x, rows, columns, f, sums);
    return two ? 2 : 1;
}

/* Sums [rows][GROUP] of a group of columns, times its factors, if it has any. */
INLINE void apply_factors(const format *f, const char *columns, int64_t rows, float *sums) {
    if (f->offsets != FACTORS) return;
    for (int64_t i = 0; i < rows * GROUP; i += LANES) {
        f32v factors = load_some(columns + offsets_at(f), i % GROUP, LANES, 0);
        store_some(sums, i, LANES, 0, load_some(sums, i, LANES, 0) * factors);
    }
}

/* One thread's groups of columns; 0 without memory for its rows. */
static int64_t quantized_part(const void *x, const char *packed, const format *f,
                              const void *bias, void *out, int64_t t, int64_t n, int64_t bf16,
                              int64_t out_bf16, int64_t rounding, float fixed) {
    static _Thread_local buffer own;
    range groups = own_part(ceil_div(n, GROUP));
    int64_t k = f->k, stride = padded(f);
    float *rows = reserve(&own, smaller(t, BLOCK_ROWS) * stride * sizeof *rows);
    if (!rows) return 0;
    for (int64_t first = 0; first < t; first += BLOCK_ROWS) {
        int64_t count = smaller(BLOCK_ROWS, t - first);
        for (int64_t row = 0; row < count; row++) {
            float *to = rows + row * stride;
            widen_row(x, (first + row) * k, k, bf16, rounding, fixed, to);
            memset(to + k, 0, (stride - k) * sizeof *to);
        }
        for (int64_t group = groups.first, done; group < groups.last; group += done) {
            float sums[BLOCK_ROWS * GROUP] __attribute__((aligned(64)));
            const char *columns = packed + group * group_bytes(f);
            done = sum_groups(rows, count, columns, groups.last - group, f, sums);
            for (int64_t i = 0; i < done; i++) {
                float *found = sums + i * count * GROUP;
                apply_factors(f, columns + i * group_bytes(f), count, found);
                store_tile(found, count, first * n, n, (group + i) * GROUP, n, bias, out, bf16,
                           out_bf16);
            }
        }
    }
    return 1;
}

/* Returns 0 if memory for the rows is lacking. `fixed` is the scale of FIXED rounding, else 0. */
EXPORT int64_t quantized_gemm(const void *x, const void *packed, const void *form,
                              const void *bias, void *out, int64_t t, int64_t n, int64_t bf16,
                              int64_t out_bf16, int64_t rounding, float fixed) {
    int64_t done = 1;
#pragma omp parallel reduction(&& : done)
    done = quantized_part(x, packed, form, bias, out, t, n, bf16, out_bf16, rounding, fixed);
    return done;
}

/* Pack codes [n, k], a byte each, with scales and offsets by row and group; the rest is 0. */
EXPORT void pack_quantized(const uint8_t *codes, const char *scales, const char *offsets,
                           char *packed, const format *f, int64_t n) {
    int64_t each = codes_of_word(f->codes), bits = 32 / each;
    int64_t counts[2] = {num_groups(f), num_offsets(f)}, places[2] = {0, offsets_at(f)};
    int64_t sizes[2] = {scale_size(f), offset_size(f)};
    const char *sources[2] = {scales, offsets};
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < ceil_div(n, GROUP); block++) {
        char *columns = packed + block * group_bytes(f);
        uint32_t *words = (uint32_t *)(columns + words_at(f));
        memset(columns, 0, group_bytes(f));
        for (int64_t c = 0; c < smaller(GROUP, n - block * GROUP); c++) {
            int64_t row = block * GROUP + c;
            for (int kind = 0; kind < 2; kind++)
                for (int64_t group = 0; group < counts[kind]; group++)
                    memcpy(columns + places[kind] + (group * GROUP + c) * sizes[kind],
                           sources[kind] + (row * counts[kind] + group) * sizes[kind],
                           sizes[kind]);
            for (int64_t i = 0; i < f->k; i++)
                words[i / each * GROUP + c] |= (uint32_t)codes[row * f->k + i]
                                               << i % each * bits;
        }
    }
}

/* Rows of the weight as bf16 or fp32. Stops and returns 0 at an id outside 0 .. n - 1. */
EXPORT int64_t quantized_rows(const int64_t *token_ids, const char *packed, const format *f,
                              void *out, int64_t t, int64_t n, int64_t bf16) {
    for (int64_t row = 0; row < t; row++) {
        int64_t id = token_ids[row];
        if (id < 0 || id >= n) return 0;
        for (int64_t first = 0; first < f->k; first += DEPTH) {
            f32v slab[DEPTH * PANELS];
            int64_t depth = smaller(DEPTH, f->k - first);
            float own[DEPTH];
            const char *columns = packed + id / GROUP * group_bytes(f);
            if (f->codes == INT4) widen_columns(columns, f, first, depth, slab, INT4);
            else if (f->codes == FP8) widen_columns(columns, f, first, depth, slab, FP8);
            else widen_columns(columns, f, first, depth, slab, E2M1);
            for (int64_t i = 0; i < depth; i++) own[i] = ((float *)slab)[i * GROUP + id % GROUP];
            for (int64_t i = 0; i < depth; i += LANES)
                store_some(out, row * f->k + first + i, depth - i, bf16,
                           load_some(own, i, depth - i, 0));
        }
    }
    return 1;
}
