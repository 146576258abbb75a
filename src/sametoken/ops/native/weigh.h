/* Attention's sums of weighted values: in fp32, or in bf16 by matrix units if there are any. */
#ifndef SAMETOKEN_WEIGH_H
#define SAMETOKEN_WEIGH_H

#include "attention.h"

INLINE void pack_values(const attention_job *job, workspace *work, int64_t count, int bf16) {
    for (int64_t i = 0; i < job->v_dim; i += LANES) {
        float *panel = work->values + (i / GROUP) * SPLIT * GROUP + i % GROUP;
        for (int64_t position = 0; position < count; position++) {
            int64_t element = work->now->offsets[position] + i;
            f32v v = load_kv(job->values, element, job->v_dim - i, bf16, job->e4m3);
            store_some(panel, position * GROUP, LANES, 0, v);
        }
    }
}

/* Add the weighted values of some positions, a group of elements from `i` on, as the cache has
 * them: in the order and with the operations of a product with packed ones. */
INLINE void weigh_cached(const int rows, const attention_job *job, const workspace *work,
                         const float *weights, int64_t i, span seen, float *sums,
                         const int bf16, const int whole) {
    f32v sum[MAX_ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) memcpy(sum[r], sums + r * GROUP, sizeof *sum);
    const int64_t *offsets = work->now->offsets;
    for (int64_t position = seen.first; position < seen.stop; position++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            int64_t element = i + p * LANES, count = whole ? LANES : job->v_dim - element;
            if (count <= 0) continue;
            f32v values = load_kv(job->values, offsets[position] + element, count, bf16,
                                  whole ? 0 : job->e4m3);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++)
                sum[r][p] = multiply_add(splat(weights[r * SCORES + position]), values, sum[r][p]);
        }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) memcpy(sums + r * GROUP, sum[r], sizeof *sum);
}

/* Add the weighted values of some positions, if any. Few queries read the cache: packed values are
 * for more than one tile of them. */
INLINE void weigh_span(int64_t rows, const attention_job *job, const workspace *work,
                       const float *weights, int64_t i, span seen, float *sums, int bf16) {
    if (seen.first >= seen.stop) return;
    if (work->values) {
        const float *columns = work->values + i * SPLIT + seen.first * GROUP;
        multiply_tile(rows, weights + seen.first, SCORES * 4, columns, seen.stop - seen.first, sums,
                      GROUP, 0, 0);
        return;
    }
    int whole = !job->e4m3 && i + GROUP <= job->v_dim;
#define CASE(n)                                                                              \
    case n:                                                                                  \
        if (whole) weigh_cached(n, job, work, weights, i, seen, sums, bf16, 1);              \
        else weigh_cached(n, job, work, weights, i, seen, sums, bf16, 0);                    \
        return;
    switch (rows) {
        EACH_ROW_COUNT(CASE)
    }
#undef CASE
}

/* Weighted values: positions that all rows see in one product, those before and after by row. */
INLINE void weigh_in_fp32(const attention_job *job, const row_tile *tile, workspace *work,
                          int64_t start, int64_t group, float *partials, int64_t stride,
                          const int bf16) {
    int64_t queries = tile->rows * group;
    work->values = queries > MAX_ROWS ? work->memory_of_values : NULL;
    if (work->values) pack_values(job, work, work->now->count, bf16);
    span common = {0, SPLIT};
    for (int64_t r = 0; r < tile->rows; r++) {
        span seen = visible(job, tile->first + r, start);
        common = (span){larger(common.first, seen.first), smaller(common.stop, seen.stop)};
    }
    common.first = smaller(common.first, common.stop);
    for (int64_t i = 0; i < job->v_dim; i += GROUP)
        for (int64_t first = 0; first < queries; first += MAX_ROWS) {
            int64_t rows = smaller(MAX_ROWS, queries - first);
            float sums[MAX_ROWS * GROUP] __attribute__((aligned(64))) = {0};
            const float *weights = work->scores + first * SCORES;
            for (int64_t q = 0; q < rows && job->window; q++) {
                span before = visible(job, tile->first + (first + q) / group, start);
                before.stop = common.first;
                weigh_span(1, job, work, weights + q * SCORES, i, before, sums + q * GROUP, bf16);
            }
            weigh_span(rows, job, work, weights, i, common, sums, bf16);
            for (int64_t q = 0; q < rows; q++) {
                int64_t row = (first + q) / group, head = (first + q) % group;
                span after = visible(job, tile->first + row, start);
                after.first = larger(after.first, common.stop);
                weigh_span(1, job, work, weights + q * SCORES, i, after, sums + q * GROUP, bf16);
                float *partial = partials + (row * job->heads + head) * stride;
                memcpy(partial + LANES + i, sums + q * GROUP, GROUP * sizeof *sums);
            }
        }
}

/* Whether weights are rounded to bf16 and multiplied by matrix units. */
INLINE int has_narrow_weights(const attention_job *job, int bf16) {
#if defined(HAS_AMX)
    return bf16 && !job->e4m3;
#else
    return (void)job, (void)bf16, 0;
#endif
}

/* Values are packed by pairs of positions then. Products run over whole tiles of positions, anchored
 * at 0: those that a row does not see add 0 to its sums. */

#if defined(HAS_AMX)
INLINE span whole_tiles(span seen) {
    return (span){seen.first / AMX_DEPTH * AMX_DEPTH, round_up(seen.stop, AMX_DEPTH)};
}

/* Pack a group of elements from `i` on of the positions seen, and 0 for others of their tiles. The
 * first panel has the even elements, the second the odd ones. Not inlined: gcc 12 would keep in
 * memory what the loop uses. */
static __attribute__((noinline)) void pack_pairs(const attention_job *job, workspace *work,
                                                 span seen, int64_t i) {
    const __mmask16 words = (__mmask16)((1 << smaller(LANES, (job->v_dim - i) / 2)) - 1);
    const uint16_t *values = (const uint16_t *)job->values + i;
    const int64_t *offsets = work->now->offsets;
    u32v *columns = (u32v *)work->memory_of_values;
    span tiles = whole_tiles(seen);
    for (int64_t at = tiles.first; at < tiles.stop; at += 2) {
        u32v first = {0}, second = {0};
        if (at >= seen.first && at < seen.stop)
            first = (u32v)_mm512_maskz_loadu_epi32(words, values + offsets[at]);
        if (at + 1 >= seen.first && at + 1 < seen.stop)
            second = (u32v)_mm512_maskz_loadu_epi32(words, values + offsets[at + 1]);
        columns[at] = (first & 0xffff) | second << 16;
        columns[at + 1] = first >> 16 | (second & 0xffff0000);
    }
}

/* Lane l of the even elements and of the odd ones in turn. */
#define IN_TURN(l, s) (l) / 2 + (l) % 2 * LANES + (s)

/* Store a query's sums. What underflows to -0 becomes 0: values that the row does not see have signs
 * too. */
INLINE void put_in_turn(const f32v *sums, float *to) {
    f32v even = sums[0] + 0.0f, odd = sums[1] + 0.0f;
    store_some(to, 0, LANES, 0, SHUFFLE(even, odd, IN_TURN, 0));
    store_some(to, LANES, LANES, 0, SHUFFLE(even, odd, IN_TURN, LANES / 2));
}

/* Weighted values of the positions seen, for `count` queries from `first` on. */
INLINE void sum_narrow(const attention_job *job, workspace *work, int64_t first, int64_t count,
                       span seen, int64_t group, float *partials, int64_t stride) {
    const int64_t most = MOST_ROWS(1);
    span tiles = whole_tiles(seen);
    const char *columns = (const char *)(work->memory_of_values + tiles.first / 2 * GROUP);
    for (int64_t i = 0; i < job->v_dim; i += GROUP) {
        pack_pairs(job, work, seen, i);
        for (int64_t start = first; start < first + count; start += most) {
            int64_t queries = smaller(most, first + count - start);
            f32v sums[MOST_ROWS(1) * PANELS];
            const char *weights = (const char *)(work->scores + start * SCORES) + tiles.first * 2;
            sum_products(queries, weights, SCORES * 4, columns, tiles.stop - tiles.first,
                         (float *)sums, GROUP, &work->shaped, 1, 0);
            for (int64_t q = 0; q < queries; q++) {
                int64_t row = (start + q) / group, head = (start + q) % group;
                float *partial = partials + (row * job->heads + head) * stride + LANES + i;
                put_in_turn(sums + q * PANELS, partial);
            }
        }
    }
}

INLINE int all_finite(const float *numbers, int64_t count) {
    f32v zeros = {0};
    for (int64_t i = 0; i < count; i += LANES) zeros += load_some(numbers, i, LANES, 0) * 0.0f;
    return sum_lanes(zeros) == 0.0f;
}

/* Weighted values by matrix units. One that is not finite reaches the sums of all rows, since 0 times it
 * is not 0: then each row has products of its own. */
INLINE void weigh_narrow(const attention_job *job, const row_tile *tile, workspace *work,
                         int64_t start, int64_t group, float *partials, int64_t stride) {
    span all = {SPLIT, work->now->count};
    for (int64_t r = 0; r < tile->rows; r++)
        all.first = smaller(all.first, visible(job, tile->first + r, start).first);
    sum_narrow(job, work, 0, tile->rows * group, all, group, partials, stride);
    if (tile->rows == 1 || all_finite(partials + LANES, round_up(job->v_dim, GROUP))) return;
    for (int64_t r = 0; r < tile->rows; r++) {
        span seen = visible(job, tile->first + r, start);
        if (seen.first < seen.stop)
            sum_narrow(job, work, r * group, group, seen, group, partials, stride);
    }
}
#endif

INLINE void weigh(const attention_job *job, const row_tile *tile, workspace *work, int64_t start,
                  int64_t group, float *partials, int64_t stride, const int bf16) {
#if defined(HAS_AMX)
    if (has_narrow_weights(job, bf16)) {
        weigh_narrow(job, tile, work, start, group, partials, stride);
        return;
    }
#endif
    weigh_in_fp32(job, tile, work, start, group, partials, stride, bf16);
}

#endif
