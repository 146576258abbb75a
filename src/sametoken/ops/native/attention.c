/* Causal attention over paged KV, the same for prefill, decode and verify rows.
 *
 * KV is divided into splits of SPLIT positions anchored at 0. Phase one computes, for each row,
 * head and split, the maximum score, the sum of exponentials and the weighted values;
 * phase two merges a row's splits in order. Rows of one slot share a split's packed keys
 * and values, which changes no sum: each score and each output element is added up in one
 * lane, over head_dim or over positions, in one order.
 *
 * Values may have fewer elements than keys, and lie in the same memory as they (MLA). Both may
 * be e4m3, which becomes the queries' dtype as it is packed; scales join scores and results.
 * A head's sink, if there are any, joins the merged splits as one more split, without values. */
#include "attention.h"
#include "kernels.h"
#include "threads.h"
#include "transpose.h"
#include "weigh.h"

static _Thread_local buffer partial_memory, tile_memory, unit_memory;

static void locate(const attention_job *job, const row_tile *tiles, int64_t num_tiles,
                   int64_t unit, places *found) {
    const row_tile *tile = tiles, *end = tiles + num_tiles - 1;
    while (tile < end && tile[1].first_unit <= unit) tile++;
    int64_t index = unit - tile->first_unit, start = index % tile->splits * SPLIT, count = 0;
    for (int64_t r = 0; r < tile->rows; r++) {
        span seen = visible(job, tile->first + r, start);
        if (seen.first < seen.stop) count = larger(count, seen.stop);
    }
    const int64_t *table = job->block_table + job->slots[tile->first] * job->max_blocks;
    int64_t head = index / tile->splits;
    for (int64_t i = 0; i < count;) {
        int64_t inside = (start + i) % job->block_size;
        int64_t stretch = smaller(job->block_size - inside, count - i);
        int64_t row = table[(start + i) / job->block_size] * job->kv_heads + head;
        int64_t offset = (row * job->block_size + inside) * job->dim;
        for (int64_t end = i + stretch; i < end; i++, offset += job->dim)
            found->offsets[i] = offset;
    }
    found->tile = tile;
    found->unit = unit;
    found->count = count;
}

/* Fetch a row of a unit into the second cache, since blocks of KV are too scattered for hardware
 * prefetching. The first cache would lose what the unit before it uses. */
INLINE void fetch(const attention_job *job, const places *unit, const void *base,
                  int64_t position, int64_t elements, int bf16) {
    if (position >= unit->count) return;
    int64_t size = job->e4m3 ? 1 : bf16 ? 2 : 4;
    const char *row = (const char *)base + unit->offsets[position] * size;
    for (int64_t byte = 0; byte < elements * size; byte += 64)
        __builtin_prefetch(row + byte, 0, 2);
}

/* Pack keys of `count` positions as tile columns; further columns repeat the last position. */
INLINE void pack_keys(const attention_job *job, workspace *work, int64_t count, int bf16) {
    int64_t each = bf16 ? 2 : 1, units = job->dim / each;
    for (int64_t first = 0; first < count; first += LANES) {
        for (int64_t i = first; i < first + LANES; i++)
            fetch(job, work->next, job->keys, i, job->dim, bf16);
        u32v *panel = work->keys + (first / GROUP) * units * PANELS + first / LANES % PANELS;
        for (int64_t unit = 0; unit < units; unit += LANES) {
            int64_t width = smaller(LANES, units - unit);
            int cached = !job->e4m3 && width == LANES;
            const char *rows[LANES];
            u32v copies[LANES];
            for (int i = 0; i < LANES; i++) {
                int64_t position = smaller(first + i, count - 1);
                int64_t element = work->now->offsets[position] + unit * each;
                if (!cached) copies[i] = kv_words(job->keys, element, width, bf16, job->e4m3);
                rows[i] = cached ? (const char *)job->keys + element * (4 / each)
                                 : (const char *)&copies[i];
            }
            transpose(rows, width, panel + unit * PANELS, PANELS);
        }
    }
}

/* Scores of all queries with `count` positions, not scaled; the next unit's values are fetched,
 * unless they lie among its keys. */
INLINE void score(const attention_job *job, workspace *work, int64_t queries, int64_t count,
                  const int bf16) {
    int64_t stride = job->dim * (bf16 ? 2 : 4);
    for (int64_t column = 0; column < count; column += GROUP) {
        for (int64_t i = column; i < column + GROUP && job->values != job->keys; i++)
            fetch(job, work->next, job->values, i, job->v_dim, bf16);
        const char *columns = (const char *)work->keys + column * stride;
        for (int64_t first = 0; first < queries; first += MOST_ROWS(bf16)) {
            int64_t rows = smaller(MOST_ROWS(bf16), queries - first);
            sum_products(rows, work->queries + first * stride, stride, columns, job->dim,
                         work->scores + first * SCORES + column, SCORES, &work->shaped, bf16, 0);
        }
    }
}

/* Replace visible scores by 2^(scale * score - maximum), the weights, others by 0; writes maximum
 * and sum. With a depth, up to which there are rows of products, weights are rounded to bf16. */
INLINE void exponentiate(float *scores, span seen, float scale, int64_t depth, float *partial) {
    const f32v lane = LANE_NUMBERS;
    f32v highest = splat(-INFINITY), sum = {0};
    for (int64_t i = 0; i < seen.stop; i += LANES) {
        f32v v = load_some(scores, i, LANES, 0);
        if (i < seen.first || i + LANES > seen.stop) {
            v = select_lanes(lane < (float)(seen.stop - i), v, splat(-INFINITY));
            v = select_lanes(lane < (float)(seen.first - i), splat(-INFINITY), v);
            store_some(scores, i, LANES, 0, v);
        }
        highest = max_lanes(v, highest);
    }
    float maximum = largest_lane(highest) * scale;
    for (int64_t i = 0; i < seen.stop; i += LANES) {
        f32v v = load_some(scores, i, LANES, 0);
        v = exp2_below(multiply_add(v, splat(scale), splat(-maximum)));
        /* Those in bf16 lie over scores that have been read. */
        store_some(scores, i, LANES, depth > 0, v);
        sum += v;
    }
    for (int64_t i = round_up(seen.stop, LANES); i < depth; i += LANES)
        store_some(scores, i, LANES, 1, splat(0.0f));
    partial[0] = maximum;
    partial[1] = sum_lanes(sum);
}

/* Phase one for one unit, which has been located. */
INLINE void attend(const attention_job *job, workspace *work, float *all_partials,
                   const int bf16) {
    const row_tile *tile = work->now->tile;
    int64_t index = work->now->unit - tile->first_unit, count = work->now->count;
    int64_t kv_head = index / tile->splits, split = index % tile->splits, start = split * SPLIT;
    int64_t group = job->heads / job->kv_heads, bytes = group * job->dim * (bf16 ? 2 : 4);
    if (!count) return;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t head = (tile->first + r) * job->kv_heads + kv_head;
        memcpy(work->queries + r * bytes, (const char *)job->q + head * bytes, bytes);
    }
    pack_keys(job, work, count, bf16);
    score(job, work, tile->rows * group, count, bf16);

    int64_t size = partial_size(job->v_dim), stride = tile->splits * size;
    float *partials = all_partials + tile->first_partial;
    partials += kv_head * group * stride + split * size;
    float scale = job->scale * scale_of(job->k_scales, kv_head) * LOG2_E;
    int64_t depth = has_narrow_weights(job, bf16) ? round_up(count, AMX_DEPTH) : 0;
    for (int64_t r = 0; r < tile->rows; r++)
        for (int64_t g = 0; g < group; g++)
            exponentiate(work->scores + (r * group + g) * SCORES,
                         visible(job, tile->first + r, start), scale, depth,
                         partials + (r * job->heads + g) * stride);
    weigh(job, tile, work, start, group, partials, stride, bf16);
}

/* Merge a sink into a row's splits: both on their common maximum, so that neither overflows. */
INLINE void add_sink(float sink, float *total, int64_t size) {
    float maximum = sink > total[0] ? sink : total[0];
    float old = exp2_below(splat(total[0] - maximum))[0];
    total[1] = total[1] * old + exp2_below(splat(sink - maximum))[0];
    for (int64_t i = LANES; i < size; i += LANES)
        store_some(total, i, LANES, 0, load_some(total, i, LANES, 0) * old);
}

/* Phase two for one row and head: its splits in order, and its sink. */
INLINE void merge(const attention_job *job, int64_t row, int64_t head, const float *partial,
                  float *total, const int bf16) {
    int64_t size = partial_size(job->v_dim), splits = job->positions[row] / SPLIT + 1;
    int64_t unseen = job->window ? larger(0, job->positions[row] + 1 - job->window) : 0;
    partial += unseen / SPLIT * size;
    memcpy(total, partial, size * sizeof *total);
    for (int64_t split = unseen / SPLIT + 1; split < splits; split++) {
        partial += size;
        float maximum = partial[0] > total[0] ? partial[0] : total[0];
        f32v factors = exp2_below((f32v){total[0] - maximum, partial[0] - maximum});
        float old = factors[0], new = factors[1];
        total[0] = maximum;
        total[1] = total[1] * old + partial[1] * new;
        for (int64_t i = LANES; i < size; i += LANES) {
            f32v a = load_some(total, i, LANES, 0), b = load_some(partial, i, LANES, 0);
            store_some(total, i, LANES, 0, a * old + b * new);
        }
    }
    if (job->sinks) add_sink(job->sinks[head] * LOG2_E, total, size);
    float scale = scale_of(job->v_scales, head / (job->heads / job->kv_heads));
    for (int64_t i = 0; i < job->v_dim; i += LANES)
        store_some(job->out, (row * job->heads + head) * job->v_dim + i, job->v_dim - i, bf16,
                   load_some(total, LANES + i, LANES, 0) / total[1] * scale);
}

/* Divide rows into tiles; returns their number. */
static int64_t make_tiles(const attention_job *job, row_tile *tiles) {
    int64_t group = job->heads / job->kv_heads, count = 0, threads = omp_get_max_threads();
    int64_t each = ceil_div(job->t * job->kv_heads, 4 * threads) * group;
    int64_t least = larger(1, LEAST_SHARING / group);
    int64_t most = larger(least, smaller(each, MOST_SHARING) / group);
    int64_t floats = job->heads * partial_size(job->v_dim);
    for (int64_t row = 0, rows; row < job->t; row += rows) {
        int64_t last = job->positions[row], limit = most;
        for (rows = 1; rows < limit && row + rows < job->t; rows++) {
            if (job->slots[row + rows] != job->slots[row]) break;
            last = larger(last, job->positions[row + rows]);
            limit = smaller(most, TILE_FLOATS * threads / (floats * (last / SPLIT + 1)));
            limit = larger(limit, least);
        }
        tiles[count++] = (row_tile){row, rows, last / SPLIT + 1, 0, 0};
    }
    return count;
}

static int64_t divide(workspace *work, const attention_job *job, int64_t size) {
    int64_t group = job->heads / job->kv_heads;
    int64_t queries = larger(MOST_SHARING, group);
    int64_t keys = SPLIT * job->dim * size, values = (partial_size(job->v_dim) - LANES) * SPLIT * 4;
    int64_t rows = round_up(queries * job->dim * size, 64), scores = queries * SCORES * 4;
    char *memory = reserve(&unit_memory, keys + values + rows + scores);
    if (!memory) return 0;
    work->now = work->memory_of_places;
    work->next = work->now + 1;
    work->now->unit = work->next->unit = -1;
    work->shaped = 0;
    work->keys = (u32v *)memory;
    work->memory_of_values = (float *)(memory + keys);
    work->queries = memory + keys + values;
    work->scores = (float *)(memory + keys + values + rows);
    return 1;
}

/* Locate a unit, and the one that this thread is likely to have after it. */
INLINE void take(workspace *work, const attention_job *job, const row_tile *tiles,
                 int64_t num_tiles, int64_t units, int64_t unit, const int bf16) {
    places *now = work->next, *next = work->now;
    if (now->unit != unit) {
        locate(job, tiles, num_tiles, unit, now);
        for (int64_t i = 0; i < SPLIT && job->values != job->keys; i++)
            fetch(job, now, job->values, i, job->v_dim, bf16);
    }
    unit += omp_get_num_threads();
    next->count = 0;
    if (unit < units) locate(job, tiles, num_tiles, unit, next);
    work->now = now;
    work->next = next;
}

/* Both phases for `count` tiles; returns 0 if out of memory. */
INLINE int64_t run_batch(const attention_job *job, const row_tile *tiles, int64_t count,
                         float *partials, const int bf16) {
    int64_t units = tiles[count - 1].first_unit + job->kv_heads * tiles[count - 1].splits;
    int64_t size = partial_size(job->v_dim), failed = 0;
#pragma omp parallel reduction(| : failed) if (units > 1)
    {
        workspace work;
        failed = !divide(&work, job, bf16 ? 2 : 4);
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < units; unit++) {
            if (failed) continue;
            take(&work, job, tiles, count, units, unit, bf16);
            attend(job, &work, partials, bf16);
        }
        end_products(bf16);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            const row_tile *tile = tiles + i;
            for (int64_t r = 0; r < tile->rows && !failed; r++)
                for (int64_t head = 0; head < job->heads; head++)
                    merge(job, tile->first + r, head,
                          partials + tile->first_partial +
                              (r * job->heads + head) * tile->splits * size,
                          work.scores, bf16);
        }
    }
    return !failed;
}

/* Returns 0 if out of memory. */
EXPORT int64_t attention(const void *q, const void *keys, const void *values,
                         const float *sinks, const float *k_scales, const float *v_scales,
                         void *out, const int64_t *positions, const int64_t *slots,
                         const int64_t *block_table, int64_t t, int64_t heads,
                         int64_t kv_heads, int64_t dim, int64_t v_dim, int64_t block_size,
                         int64_t max_blocks, int64_t window, int64_t e4m3, float scale,
                         int64_t bf16) {
    attention_job job = {q, keys, values, sinks, k_scales, v_scales, positions, slots,
                         block_table, out, t, heads, kv_heads, dim, v_dim, block_size,
                         max_blocks, window, e4m3, scale};
    if (!t) return 1;
    row_tile *tiles = reserve(&tile_memory, t * sizeof *tiles);
    if (!tiles) return 0;
    int64_t count = make_tiles(&job, tiles), most = PARTIAL_FLOATS * omp_get_max_threads();
    for (int64_t first = 0, last; first < count; first = last) {
        int64_t floats = 0, units = 0;
        for (last = first; last < count; last++) {
            row_tile *tile = tiles + last;
            int64_t more = tile->rows * heads * tile->splits * partial_size(v_dim);
            if (last > first && floats + more > most) break;
            tile->first_unit = units;
            tile->first_partial = floats;
            units += kv_heads * tile->splits;
            floats += more;
        }
        float *partials = reserve(&partial_memory, floats * sizeof *partials);
        if (!partials) return 0;
        int64_t done = bf16 ? run_batch(&job, tiles + first, last - first, partials, 1)
                            : run_batch(&job, tiles + first, last - first, partials, 0);
        if (!done) return 0;
    }
    return 1;
}
