/* What attention's phases share: a job, its tiles of rows, a thread's working memory. */
#ifndef SAMETOKEN_ATTENTION_H
#define SAMETOKEN_ATTENTION_H

#include "kv.h"
#include "products.h"

#define SPLIT 256
/* Query rows (rows x heads of a KV head) that share one split's packed keys and values: more where
 * packing takes longer than products, unless threads would have nothing to do. */
#define LEAST_SHARING 48
#if defined(HAS_AMX)
#define MOST_SHARING 192
#else
#define MOST_SHARING LEAST_SHARING
#endif
/* Floats from a query's scores to the next one's. Rows of a power of two would meet in few places
 * of the first cache. */
#define SCORES (SPLIT + LANES)
/* Floats of partial results held at once for each thread, as few as stay in its second cache; more
 * rows run in several batches. */
#define PARTIAL_FLOATS (1 << 18)
/* Of a tile with more than LEAST_SHARING queries, likewise. */
#define TILE_FLOATS (4 * PARTIAL_FLOATS)

typedef struct {
    const void *q, *keys, *values;
    const float *sinks; /* of each head, or NULL */
    const float *k_scales, *v_scales; /* of each KV head, or NULL: 1 */
    const int64_t *positions, *slots, *block_table;
    void *out;
    int64_t t, heads, kv_heads, dim, v_dim, block_size, max_blocks, window, e4m3;
    float scale;
} attention_job;

/* Positions of a split, relative to its first. */
typedef struct {
    int64_t first, stop;
} span;

/* Adjacent rows of one slot, and the start of their units and partial results. */
typedef struct {
    int64_t first, rows, splits, first_unit, first_partial;
} row_tile;

/* Where a unit's KV lies: of a row tile, KV head and split. */
typedef struct {
    const row_tile *tile;
    int64_t unit, count;    /* positions that a row sees are among the first `count` */
    int64_t offsets[SPLIT]; /* of each position's head in the cache, in elements */
} places;

/* One thread's working memory for one unit. */
typedef struct {
    places memory_of_places[2], *now, *next; /* of this unit, and of this thread's next one */
    u32v *keys;             /* [SPLIT / GROUP][units][GROUP] words */
    float *values;          /* [v_dim / GROUP][SPLIT][GROUP], or NULL: not packed */
    float *memory_of_values;
    char *queries;          /* [rows * group][dim] */
    float *scores;          /* [rows * group][SCORES], then the weights */
    int64_t shaped;         /* as in products.h */
} workspace;

INLINE int64_t partial_size(int64_t v_dim) { return LANES + round_up(v_dim, GROUP); }

/* Positions of this split that a row sees: its own and earlier ones, within its sliding window. */
INLINE span visible(const attention_job *job, int64_t row, int64_t start) {
    int64_t stop = larger(0, smaller(SPLIT, job->positions[row] + 1 - start));
    int64_t first = job->window ? job->positions[row] + 1 - job->window - start : 0;
    return (span){larger(0, smaller(stop, first)), stop};
}

#endif
