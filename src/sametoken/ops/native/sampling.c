/* Keyed sampling (Gumbel-max trick): argmax of logits / T + gumbel(seed, position, token id). */
#include "threads.h"
#include "vector.h"

/* Columns per unit of work; a multiple of CHUNK. */
#define UNIT 8192
/* Token ids per batch of noise: LANES Philox counters of 4 words. */
#define CHUNK (4 * LANES)

typedef struct {
    float value;
    int64_t column;
    int has_nan; /* whether any value was NaN */
} candidate;

/* High and low words of the 64-bit products with `factor`. */
INLINE void multiply_wide(u32v a, uint32_t factor, u32v *high, u32v *low) {
#if defined(__AVX512F__)
    __m512i by = _mm512_set1_epi32((int)factor);
    u64v even = (u64v)_mm512_mul_epu32((__m512i)a, by);
    u64v odd = (u64v)_mm512_mul_epu32((__m512i)((u64v)a >> 32), by);
#elif LANES == 8
    __m256i by = _mm256_set1_epi32((int)factor);
    u64v even = (u64v)_mm256_mul_epu32((__m256i)a, by);
    u64v odd = (u64v)_mm256_mul_epu32((__m256i)((u64v)a >> 32), by);
#else
    u64v even = ((u64v)a & 0xffffffffu) * factor, odd = ((u64v)a >> 32) * factor;
#endif
    *high = (u32v)((even >> 32) | (odd & 0xffffffff00000000u));
    *low = (u32v)((even & 0xffffffffu) | (odd << 32));
}

/* Lanes of a and b in turn, from lane `from` on. */
#define ZIPPED(l, from) ((l) / 2 + (l) % 2 * LANES + (from))
#define ZIP(a, b, from) SHUFFLE(a, b, ZIPPED, from)

/* Word w of each of LANES counters in words[w]. */
INLINE void philox(u32v counters, int64_t position, int64_t seed, u32v words[4]) {
    const u32v zero = {0};
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)((uint64_t)seed >> 32);
    u32v c0 = counters, c1 = zero + (uint32_t)position;
    u32v c2 = zero + (uint32_t)((uint64_t)position >> 32), c3 = zero;
    for (int round = 0; round < 10; round++) {
        u32v high0, low0, high1, low1;
        multiply_wide(c0, 0xD2511F53u, &high0, &low0);
        multiply_wide(c2, 0xCD9E8D57u, &high1, &low1);
        c0 = high1 ^ c1 ^ key0;
        c2 = high0 ^ c3 ^ key1;
        c1 = low1;
        c3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

/* Noise words of token ids first .. first + CHUNK - 1, in order; first is a multiple of 4. */
INLINE void words_from(int64_t first, int64_t position, int64_t seed, u32v words[4]) {
    const u32v lane = LANE_NUMBERS;
    u32v c[4];
    philox(lane + (uint32_t)(first / 4), position, seed, c);
    u32v even_low = ZIP(c[0], c[2], 0), even_high = ZIP(c[0], c[2], LANES / 2);
    u32v odd_low = ZIP(c[1], c[3], 0), odd_high = ZIP(c[1], c[3], LANES / 2);
    words[0] = ZIP(even_low, odd_low, 0);
    words[1] = ZIP(even_low, odd_low, LANES / 2);
    words[2] = ZIP(even_high, odd_high, 0);
    words[3] = ZIP(even_high, odd_high, LANES / 2);
}

/* Noise words of up to LANES arbitrary token ids. */
INLINE u32v words_of(const int64_t *token_ids, int64_t count, int64_t position, int64_t seed) {
    u32v id = {0}, words[4];
    for (int64_t i = 0; i < smaller(LANES, count); i++) id[i] = (uint32_t)token_ids[i];
    philox(id / 4, position, seed, words);
    u32v chosen = {0};
    for (uint32_t w = 0; w < 4; w++) chosen |= words[w] & (u32v)(id % 4 == w);
    return chosen;
}

/* -log(-log1p(-v)) for v = (word + 1/2) / 2^32, kept below 1. */
INLINE f32v gumbel(u32v word) {
    f32v v = __builtin_convertvector(word, f32v) * 0x1p-32f + 0x1p-33f;
    const float below_one = 1.0f - 0x1p-24f;
    v = select_lanes(v < below_one, v, splat(below_one));
    /* log1p(-v) = log(u) * -v / (u - 1) for u = 1 - v as rounded; -v where u is 1. */
    f32v u = 1.0f - v;
    f32v negative_log1p = select_lanes(u == 1.0f, v, log_lanes(u) * (v / (u - 1.0f)));
    return -log_lanes(negative_log1p);
}

typedef struct {
    f32v value;
    i32v column, is_nan;
} candidates;

INLINE void consider(candidates *best, f32v value, int64_t first, int64_t count) {
    const i32v lane = LANE_NUMBERS;
    i32v better = (value > best->value) & (lane < (int32_t)smaller(LANES, count));
    best->value = select_lanes(better, value, best->value);
    best->column = (better & (lane + (int32_t)first)) | (~better & best->column);
    best->is_nan |= value != value;
}

/* The best of columns first .. last-1; -infinity and `first` if all are NaN or -inf. */
static candidate best_of(const float *logits, const int64_t *token_ids, int64_t first,
                         int64_t last, float temperature, int64_t seed, int64_t position) {
    candidates best = {splat(-INFINITY), (i32v){0} + (int32_t)first, {0}};
    if (temperature == 0.0f) {
        for (int64_t i = first; i < last; i += LANES)
            consider(&best, load_some(logits, i, last - i, 0), i, last - i);
    } else if (token_ids) {
        for (int64_t i = first; i < last; i += LANES) {
            f32v scaled = load_some(logits, i, last - i, 0) / temperature;
            u32v words = words_of(token_ids + i, last - i, position, seed);
            consider(&best, scaled + gumbel(words), i, last - i);
        }
    } else {
        for (int64_t chunk = first; chunk < last; chunk += CHUNK) {
            u32v words[CHUNK / LANES];
            words_from(chunk, position, seed, words);
            for (int64_t i = chunk; i < smaller(chunk + CHUNK, last); i += LANES) {
                f32v scaled = load_some(logits, i, last - i, 0) / temperature;
                consider(&best, scaled + gumbel(words[(i - chunk) / LANES]), i, last - i);
            }
        }
    }
    candidate winner = {best.value[0], best.column[0], best.is_nan[0] != 0};
    for (int i = 1; i < LANES; i++) {
        winner.has_nan |= best.is_nan[i] != 0;
        if (best.value[i] > winner.value ||
            (best.value[i] == winner.value && best.column[i] < winner.column))
            winner = (candidate){best.value[i], best.column[i], winner.has_nan};
    }
    return winner;
}

static _Thread_local buffer candidate_memory;

/* A row's key (ops/sampling/sample.py): its logit as an ordered integer, and the token. */
static int64_t key_of(float logit, int has_nan, int64_t token) {
    int32_t bits;
    logit += 0.0f; /* -0 is 0 */
    memcpy(&bits, &logit, sizeof bits);
    int32_t rank = has_nan ? INT32_MAX : bits ^ ((bits >> 31) & INT32_MAX);
    return (int64_t)((uint64_t)(uint32_t)rank << 32) | (UINT32_MAX - token);
}

/* Row r has the parameters of slots[r], or, if NULL, its own, and samples the token of position
 * positions[r] + ahead. token_ids[i] is the token of column i, ascending; NULL: column i is token
 * i. Writes tokens, or their keys. Returns 0 if out of memory. */
EXPORT int64_t sample(const float *logits, const float *temperature, const int64_t *seeds,
                      const int64_t *slots, const int64_t *positions, const int64_t *token_ids,
                      int64_t *out, int64_t rows, int64_t columns, int64_t ahead, int64_t keys) {
    if (!rows) return 1;
    int64_t parts = ceil_div(columns, UNIT);
    candidate *found = reserve(&candidate_memory, rows * parts * sizeof *found);
    if (!found) return 0;
#pragma omp parallel for schedule(static)
    for (int64_t unit = 0; unit < rows * parts; unit++) {
        int64_t row = unit / parts, first = unit % parts * UNIT, at = slots ? slots[row] : row;
        found[unit] = best_of(logits + row * columns, token_ids, first,
                              smaller(first + UNIT, columns), temperature[at], seeds[at],
                              positions[row] + ahead);
    }
    for (int64_t row = 0; row < rows; row++) {
        candidate winner = found[row * parts];
        int has_nan = winner.has_nan;
        for (int64_t part = 1; part < parts; part++) {
            has_nan |= found[row * parts + part].has_nan;
            if (found[row * parts + part].value > winner.value)
                winner = found[row * parts + part];
        }
        int64_t token = token_ids ? token_ids[winner.column] : winner.column;
        float logit = logits[row * columns + winner.column];
        out[row] = keys ? key_of(logit, has_nan, token) : token;
    }
    return 1;
}
