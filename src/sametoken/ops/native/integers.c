/* Products of a file's integers (GGUF blocks) with activations that are rounded to 8 bits.
 *
 * 32 neighbouring activations of a row share a scale, a 127th of the largest. Codes are multiplied
 * and added as integers, which is exact, and become fp32 once for each group of the weight:
 *     (sum of codes * activations) * scale + (sum of activations) * minimum,
 * times the activations' scale. Groups are added in order. Each operation rounds by itself, none
 * is fused, so every instruction set gives the bits of ops/model/gemm/integers.py.
 *
 * Rows of the weight are columns here, as in tile.h. 32 features of a group of columns are
 * [scales][minima][words]; byte b of a word has feature 4 * word + b of a column or, of 4 bits,
 * feature 8 * word + b in its low half and 4 more in its high one. */
#include "kernels.h"
#include "scales.h"
#include "threads.h"
#include "tile.h"

/* Unsigned codes of 4 bits; signed ones of 8, with one scale for all features or for 16. */
enum { NIBBLES, BYTES, BYTES_BY_16 };

/* Features that are multiplied before anything becomes fp32: a block. */
#define DEPTH 32
/* Rows whose codes are kept in registers, and those that share them for both panels. */
#define TILE_ROWS 8
#define FEW_ROWS 4
/* Rows that are rounded at once. */
#define BLOCK_ROWS 48

/* `zero` is the code of 4 bits that stands for 0; bytes have theirs taken out. */
typedef struct {
    int64_t k, codes, scales, minima, zero;
} format;

/* Activations of a block; where one is not finite, the scale is NaN and codes are 0. */
typedef struct {
    int8_t codes[DEPTH];
    float scale;
    /* By group of the weight: the sum of the codes, and its product with the weight's zero. */
    float sums[2];
    int32_t of_zero[2];
} rounded;

/* Whether one instruction adds four products, and what it has the bytes of a column raised by. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define SUMS_OF_FOUR 1
#define RAISED 0x80
#elif defined(__ARM_FEATURE_DOTPROD)
#define SUMS_OF_FOUR 1
#define RAISED 0
#else
#define SUMS_OF_FOUR 0
#define RAISED 0
#endif

typedef int16_t i16v __attribute__((vector_size(LANES * 4)));
typedef int8_t i8v __attribute__((vector_size(LANES)));

INLINE int groups_of(int64_t codes) { return codes == BYTES_BY_16 ? 2 : 1; }
INLINE int words_of(int64_t codes) { return codes == NIBBLES ? 4 : 8; }
INLINE int64_t blocks_of(const format *f) { return ceil_div(f->k, DEPTH); }
INLINE int64_t scales_size(const format *f) {
    return groups_of(f->codes) * GROUP * scale_bytes(f->scales);
}
INLINE int64_t words_at(const format *f) { return scales_size(f) * (f->minima ? 2 : 1); }
INLINE int64_t block_bytes(const format *f) {
    return words_at(f) + words_of(f->codes) * GROUP * 4;
}

EXPORT int64_t integer_bytes(const format *f, int64_t n) {
    return ceil_div(n, GROUP) * blocks_of(f) * block_bytes(f);
}

INLINE i32v splat_integer(int32_t value) { return value - (i32v){0}; }

/* Round up to DEPTH activations; those from `count` on are 0. */
INLINE void round_block(const void *x, int64_t first, int64_t count, int bf16, int32_t zero,
                        int64_t groups, rounded *to) {
    const float least = 0x1p-100f; /* its inverse is finite */
    i32v most = (i32v)splat(least);
    f32v values[DEPTH / LANES] = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        values[i / LANES] = load_some(x, first + i, count - i, bf16);
        /* Sizes are in order as integers: numbers, infinity, NaN. */
        i32v size = (i32v)values[i / LANES] & 0x7fffffff;
        most = (i32v)select_lanes(size > most, (f32v)size, (f32v)most);
    }
    f32v sizes = (f32v)most;
    float largest = sizes[0];
    int finite = most[0] < 0x7f800000;
    for (int lane = 1; lane < LANES; lane++) {
        largest = sizes[lane] > largest ? sizes[lane] : largest;
        finite &= most[lane] < 0x7f800000;
    }
    memset(to, 0, sizeof *to);
    to->scale = finite ? largest / 127.0f : NAN;
    if (!finite) return;
    float inverse = 127.0f / largest;
    for (int64_t i = 0; i < DEPTH; i += LANES) {
        f32v magic = splat(0x1.8p23f); /* its ulp is 1: adding it rounds to the nearest even */
        i32v codes = (i32v)(values[i / LANES] * inverse + magic) - (i32v)magic;
        i8v bytes = __builtin_convertvector(codes, i8v);
        memcpy(to->codes + i, &bytes, sizeof bytes);
    }
    for (int group = 0; group < groups; group++) {
        int32_t sum = 0;
        for (int i = 0; i < DEPTH / groups; i++) sum += to->codes[group * DEPTH / groups + i];
        to->sums[group] = (float)sum;
        to->of_zero[group] = zero * sum;
    }
}

/* Sums of neighbouring pairs of products: of 4 bytes of a column and 4 activations, 2 sums. */
INLINE i16v pairs(u32v columns, u32v row, const int codes) {
#if defined(__AVX2__) && LANES == 8
    __m256i c = (__m256i)columns, x = (__m256i)row;
    if (codes == NIBBLES) return (i16v)_mm256_maddubs_epi16(c, x);
    return (i16v)_mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(x, c));
#else
    i16v even = (i16v)columns << 8 >> 8, odd = (i16v)columns >> 8;
    return even * ((i16v)row << 8 >> 8) + odd * ((i16v)row >> 8);
#endif
}

INLINE i32v fold(i16v sums) {
#if defined(__AVX2__) && LANES == 8
    return (i32v)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#else
    return ((i32v)sums << 16 >> 16) + ((i32v)sums >> 16);
#endif
}

/* Add the products of a word. Eight pairs of 4 bits fit 16 bits, and are folded at the end. */
INLINE i32v add_products(i32v sum, u32v columns, u32v row, const int codes) {
#if defined(__AVX512VNNI__)
    sum = (i32v)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)columns, (__m512i)row);
#elif defined(__AVXVNNI__)
    sum = (i32v)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)columns, (__m256i)row);
#elif defined(__ARM_FEATURE_DOTPROD)
    sum = (i32v)vdotq_s32((int32x4_t)sum, (int8x16_t)columns, (int8x16_t)row);
#else
    i16v two = pairs(columns, row, codes);
    sum = codes == NIBBLES ? (i32v)((i16v)sum + two) : sum + fold(two);
#endif
#if defined(__x86_64__)
    __asm__("" : "+v"(sum)); /* or gcc adds in a tree, and spills its branches */
#endif
    return sum;
}

/* The code that stands for 0 among those that are multiplied. */
INLINE int32_t zero_of(const format *f) {
    return f->codes == NIBBLES ? (int32_t)f->zero : RAISED;
}

/* Bytes of a column as the instructions take them. */
INLINE u32v part_of(u32v word, const int half, const int codes) {
    if (codes == NIBBLES) return (half ? word >> 4 : word) & 0x0f0f0f0f;
    return word ^ RAISED * 0x01010101u;
}

/* Add a group of features, some panels from `panel` on, to the sums of rows. */
INLINE void add_group(const int rows, const int panels, int panel, const rounded *x,
                      int64_t stride, const char *block, const format *f, const int group,
                      f32v sum[TILE_ROWS][PANELS], const int codes) {
    const int words = words_of(codes) / groups_of(codes), halves = codes == NIBBLES ? 2 : 1;
    const char *from = block + words_at(f) + (group * words * PANELS + panel) * sizeof(u32v);
    i32v products[TILE_ROWS][PANELS] = {0};
#pragma GCC unroll 8
    for (int word = 0; word < words; word++) {
        u32v column[PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++)
            memcpy(column + p, from + (word * PANELS + p) * sizeof(u32v), sizeof(u32v));
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                int place = 4 * ((group * words + word) * halves + half);
                u32v row = word_in_lanes((const char *)x[r * stride].codes + place);
#pragma GCC unroll 2
                for (int p = 0; p < panels; p++)
                    products[r][p] = add_products(products[r][p], part_of(column[p], half, codes),
                                                  row, codes);
            }
    }
#pragma GCC unroll 2
    for (int p = 0; p < panels; p++) {
        int64_t first = group * GROUP + (panel + p) * LANES;
        const char *scales = block + first * scale_bytes(f->scales);
        f32v scale = scale_lanes(scales, f->scales), minimum = {0};
        if (f->minima) minimum = scale_lanes(scales + scales_size(f), f->scales);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const rounded *own = x + r * stride;
            i32v whole = products[r][p];
            if (codes == NIBBLES && !SUMS_OF_FOUR) whole = fold((i16v)whole);
            if (!f->minima || RAISED) whole -= splat_integer(own->of_zero[group]);
            f32v value = __builtin_convertvector(whole, f32v) * scale;
            if (f->minima) value += own->sums[group] * minimum;
            sum[r][p] += value * own->scale;
        }
    }
}

/* Sums of rows and some panels from `panel` on of a group of columns, [rows][GROUP]. */
INLINE void sum_panels(const int rows, const int panels, int panel, const rounded *x,
                       const char *columns, const format *f, float *sums, const int codes) {
    int64_t blocks = blocks_of(f), bytes = block_bytes(f);
    f32v sum[TILE_ROWS][PANELS] = {0};
    for (int64_t i = 0; i < blocks; i++) {
        fetch_ahead(columns + i * bytes, bytes);
#pragma GCC unroll 2
        for (int group = 0; group < groups_of(codes); group++)
            add_group(rows, panels, panel, x + i, blocks, columns + i * bytes, f, group, sum,
                      codes);
        /* Products take the registers: sums wait in memory. */
        if (rows * panels > TILE_ROWS) __asm__ volatile("" : "+m"(sum));
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        memcpy(sums + r * GROUP + panel * LANES, sum[r], panels * sizeof(f32v));
}

/* Sums of rows and a group of columns; no order depends on the number of rows. A function for each
 * kind of codes: gcc takes 1.4 times as long for one that holds them all. */
typedef void tile_sums(int, const rounded *, const char *, const format *, float *);
#define SUMS(name, cases)                                                                    \
    static __attribute__((noinline)) void name(int rows, const rounded *x,                   \
                                               const char *columns, const format *f,         \
                                               float *sums) {                                \
        switch (rows) { cases }                                                              \
    }
#define CASE(rows, panels, codes)                                                            \
    case rows:                                                                               \
        for (int p = 0; p < PANELS; p += (panels))                                           \
            sum_panels(rows, panels, p, x, columns, f, sums, codes);                         \
        return;
#define FEW(codes)                                                                           \
    CASE(1, PANELS, codes) CASE(2, PANELS, codes) CASE(3, PANELS, codes)                     \
    CASE(4, PANELS, codes)
#define MORE(panels, codes)                                                                  \
    CASE(5, panels, codes) CASE(6, panels, codes) CASE(7, panels, codes)                     \
    CASE(8, panels, codes)
SUMS(sum_rows_NIBBLES, FEW(NIBBLES) MORE(1, NIBBLES))
SUMS(sum_rows_BYTES, FEW(BYTES) MORE(1, BYTES))
SUMS(sum_rows_BYTES_BY_16, FEW(BYTES_BY_16) MORE(1, BYTES_BY_16))
/* More than FEW_ROWS that alone read the columns, from memory: a panel at a time takes 1.2 times as
 * long, if registers hold the products of both. */
#define AT_ONCE (LANES == 16 ? PANELS : 1)
SUMS(sum_alone_NIBBLES, MORE(AT_ONCE, NIBBLES))
SUMS(sum_alone_BYTES, MORE(AT_ONCE, BYTES))
SUMS(sum_alone_BYTES_BY_16, MORE(AT_ONCE, BYTES_BY_16))

static tile_sums *const SUM_ROWS_OF[] = {sum_rows_NIBBLES, sum_rows_BYTES, sum_rows_BYTES_BY_16};
static tile_sums *const SUM_ALONE_OF[] = {sum_alone_NIBBLES, sum_alone_BYTES,
                                          sum_alone_BYTES_BY_16};

/* One thread's groups of columns; 0 without memory for its rows. */
static int64_t integer_part(const void *x, const char *packed, const format *f, const void *bias,
                            void *out, int64_t t, int64_t n, int64_t bf16, int64_t out_bf16) {
    static _Thread_local buffer own;
    range groups = own_part(ceil_div(n, GROUP));
    int64_t k = f->k, blocks = blocks_of(f);
    rounded *rows = reserve(&own, smaller(t, BLOCK_ROWS) * blocks * sizeof *rows);
    if (!rows) return 0;
    for (int64_t first = 0; first < t; first += BLOCK_ROWS) {
        int64_t count = smaller(BLOCK_ROWS, t - first), tiles = ceil_div(count, TILE_ROWS);
        for (int64_t i = 0; i < count * blocks; i++) {
            int64_t start = i % blocks * DEPTH;
            round_block(x, (first + i / blocks) * k + start, smaller(DEPTH, k - start), bf16,
                        zero_of(f), groups_of(f->codes), rows + i);
        }
        for (int64_t group = groups.first; group < groups.last; group++) {
            float sums[BLOCK_ROWS * GROUP] __attribute__((aligned(64)));
            const char *columns = packed + group * blocks * block_bytes(f);
            tile_sums *add = (tiles == 1 && count > FEW_ROWS ? SUM_ALONE_OF : SUM_ROWS_OF)[f->codes];
            for (int64_t tile = 0; tile < tiles; tile++) {
                int64_t row = count * tile / tiles, last = count * (tile + 1) / tiles;
                add(last - row, rows + row * blocks, columns, f, sums + row * GROUP);
            }
            store_tile(sums, count, first * n, n, group * GROUP, n, bias, out, bf16, out_bf16);
        }
    }
    return 1;
}

/* Returns 0 if memory for the rows is lacking. */
EXPORT int64_t integer_gemm(const void *x, const void *packed, const void *form, const void *bias,
                            void *out, int64_t t, int64_t n, int64_t bf16, int64_t out_bf16) {
    int64_t done = 1;
#pragma omp parallel reduction(&& : done)
    done = integer_part(x, packed, form, bias, out, t, n, bf16, out_bf16);
    return done;
}

/* Pack codes [n, k], a byte each, with scales and minima by row and group; the rest is 0. */
EXPORT void pack_integers(const uint8_t *codes, const char *scales, const char *minima,
                          char *packed, const format *f, int64_t n) {
    int64_t per_block = groups_of(f->codes), groups = f->k * per_block / DEPTH;
    int64_t size = scale_bytes(f->scales), bytes = block_bytes(f);
    int64_t features = DEPTH / words_of(f->codes);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < ceil_div(n, GROUP); i++) {
        char *columns = packed + i * blocks_of(f) * bytes;
        memset(columns, 0, blocks_of(f) * bytes);
        for (int64_t c = 0; c < smaller(GROUP, n - i * GROUP); c++) {
            int64_t row = i * GROUP + c;
            for (int64_t group = 0; group < groups; group++) {
                char *to = columns + group / per_block * bytes +
                           (group % per_block * GROUP + c) * size;
                memcpy(to, scales + (row * groups + group) * size, size);
                if (f->minima)
                    memcpy(to + scales_size(f), minima + (row * groups + group) * size, size);
            }
            for (int64_t j = 0; j < f->k; j++) {
                char *words = columns + j / DEPTH * bytes + words_at(f);
                int64_t word = j % DEPTH / features, place = j % features;
                uint8_t code = codes[row * f->k + j];
                words[(word * GROUP + c) * 4 + place % 4] |= place < 4 ? code : code << 4;
            }
        }
    }
}

/* Features of a block in one column. */
INLINE void widen_block(const char *block, const format *f, int64_t column, int64_t count,
                        float *values) {
    int64_t features = DEPTH / words_of(f->codes), width = DEPTH / groups_of(f->codes);
    int64_t panel = column / LANES * LANES, lane = column % LANES;
    for (int64_t j = 0; j < count; j++) {
        int64_t place = j % features;
        const char *scales = block + (j / width * GROUP + panel) * scale_bytes(f->scales);
        int8_t code = block[words_at(f) + (j / features * GROUP + column) * 4 + place % 4];
        if (f->codes == NIBBLES) code = (place < 4 ? code : code >> 4) & 15;
        values[j] = (float)(code - f->zero) * scale_lanes(scales, f->scales)[lane];
        if (f->minima) values[j] += scale_lanes(scales + scales_size(f), f->scales)[lane];
    }
}

/* Rows of the weight as bf16 or fp32. Stops and returns 0 at an id outside 0 .. n - 1. */
EXPORT int64_t integer_rows(const int64_t *token_ids, const char *packed, const format *f,
                            void *out, int64_t t, int64_t n, int64_t bf16) {
    int64_t bytes = block_bytes(f), blocks = blocks_of(f);
    for (int64_t row = 0; row < t; row++) {
        int64_t id = token_ids[row];
        if (id < 0 || id >= n) return 0;
        for (int64_t i = 0; i < blocks; i++) {
            float values[DEPTH];
            int64_t first = i * DEPTH, count = smaller(DEPTH, f->k - first);
            widen_block(packed + (id / GROUP * blocks + i) * bytes, f, id % GROUP, count, values);
            for (int64_t j = 0; j < count; j += LANES)
                store_some(out, row * f->k + first + j, count - j, bf16,
                           load_some(values, j, count - j, 0));
        }
    }
    return 1;
}
