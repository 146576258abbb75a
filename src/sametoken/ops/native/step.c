/* A step's numbers: the rows of its requests, and which of their drafts hold.
 *
 * Contracts are those of ops/step/types.py. For torch these are some forty operations over as many
 * integers, and took a tenth of a small model's step. */
#include "vector.h"

/* Rows of a layout's table, as in types/layout.py. */
enum { SLOT, NUM_QUERY, DRAFT_LIMIT, SAMPLES, ROW_START = 6, WINDOW_START };
/* Numbers before a result's tokens, and faults, as in ops/step/types.py; the values of keys that
 * say these (ops/sampling/sample.py). */
enum { NUM_COUNTS = 5 };
enum { SOUND, HAS_NAN, NO_TOKEN };
#define NAN_RANK 0x7fffffff
#define NO_TOKEN_RANK (-0x7f800001)

/* The request that owns a row, not before `owner`; `count` behind the last. */
INLINE int64_t owner_of(int64_t row, const int64_t *starts, int64_t owner, int64_t count) {
    while (owner < count && starts[owner + 1] <= row) owner++;
    return owner;
}

/* Fills in a layout; without `num_sampled` its rows are those that are sampled.
 *
 * table: [.., width], one column more than requests. requests: [4, count] tokens, computed, proposed
 * drafts, drafts. samples: [count]. rows: [5, num_rows] slot, position, token, address, offset in
 * the request. committed: [num_rows]. sampled: [5, num_sampled] row, then as rows, without
 * addresses, offset in the window. */
EXPORT void step_rows(const int64_t *table, int64_t width, int64_t count, int64_t num_rows,
                      int64_t num_sampled, const int64_t *token_ids, int64_t max_len,
                      const int64_t *num_tokens, const int64_t *num_computed,
                      const int64_t *draft_ids, const int64_t *num_drafts, int64_t k,
                      const int64_t *block_table, int64_t max_blocks, int64_t block_size,
                      int64_t reserved_slot, int64_t *requests, uint8_t *samples, int64_t *rows,
                      uint8_t *committed, int64_t *sampled) {
    const int64_t *slots = table + SLOT * width, *num_query = table + NUM_QUERY * width;
    const int64_t *limits = table + DRAFT_LIMIT * width, *sampling = table + SAMPLES * width;
    const int64_t *row_starts = table + ROW_START * width;
    const int64_t *window_starts = table + WINDOW_START * width;
    for (int64_t b = 0; b < count; b++) {
        int64_t slot = slots[b], proposed = num_drafts[slot] * sampling[b];
        requests[b] = num_tokens[slot];
        requests[count + b] = num_computed[slot];
        requests[2 * count + b] = proposed;
        requests[3 * count + b] = smaller(proposed, limits[b]);
        samples[b] = sampling[b] != 0;
    }
    int64_t *row_slots = rows, *positions = rows + num_rows, *tokens = rows + 2 * num_rows;
    int64_t *addresses = rows + 3 * num_rows, *offsets = rows + 4 * num_rows;
    for (int64_t row = 0, owner = 0; row < num_rows; row++) {
        owner = owner_of(row, row_starts, owner, count);
        int64_t own = slots[owner], offset = row - row_starts[owner];
        int64_t drafts = smaller(num_drafts[own] * sampling[owner], limits[owner]);
        int is_query = offset < num_query[owner], live = offset < num_query[owner] + drafts;
        int64_t slot = live ? own : reserved_slot;
        int64_t position = live ? num_computed[own] + offset : 0;
        int64_t draft = smaller(offset - num_query[owner], k - 1);
        row_slots[row] = slot;
        positions[row] = position;
        offsets[row] = offset;
        tokens[row] = is_query || !k ? token_ids[slot * max_len + position]
                                     : draft_ids[slot * k + draft];
        addresses[row] = block_table[slot * max_blocks + position / block_size] * block_size +
                         position % block_size;
        committed[row] = live && is_query;
    }
    int64_t *indices = sampled, *sampled_slots = sampled + num_sampled;
    for (int64_t i = 0, owner = 0; i < num_sampled; i++) {
        owner = owner_of(i, window_starts, owner, count);
        int64_t offset = i - window_starts[owner];
        int64_t row = smaller(row_starts[owner] + num_query[owner] - 1 + offset, num_rows - 1);
        indices[i] = row;
        sampled_slots[i] = owner < count ? row_slots[row] : reserved_slot;
        sampled[2 * num_sampled + i] = owner < count ? positions[row] : 0;
        sampled[3 * num_sampled + i] = tokens[row];
        sampled[4 * num_sampled + i] = offset;
    }
}

static int64_t fault_of(int64_t key) {
    int64_t rank = key >> 32;
    return rank == NO_TOKEN_RANK ? NO_TOKEN : rank == NAN_RANK ? HAS_NAN : SOUND;
}

/* keys: [num_rows, tiles] of the sampled rows, whose tokens are row_tokens; the largest of a row is
 * written to best. tokens: [num_rows]. results: [3, count] accepted drafts, next token, fault. */
EXPORT void verify_windows(const int64_t *keys, int64_t num_rows, int64_t tiles,
                           const int64_t *row_tokens, const int64_t *window_starts, int64_t count,
                           const int64_t *num_drafts, const uint8_t *samples, int64_t *best,
                           int64_t *tokens, int64_t *results) {
    for (int64_t row = 0; row < num_rows; row++) {
        best[row] = keys[row * tiles];
        for (int64_t i = 1; i < tiles; i++)
            if (keys[row * tiles + i] > best[row]) best[row] = keys[row * tiles + i];
        tokens[row] = 0xffffffff - (best[row] & 0xffffffff);
    }
    for (int64_t b = 0; b < count; b++) {
        int64_t first = window_starts[b], accepted = 0, fault = SOUND, next = 0;
        if (samples[b]) {
            fault = fault_of(best[first]);
            /* A later row with a fault waits until it is a window's first. */
            while (accepted < num_drafts[b] &&
                   tokens[first + accepted] == row_tokens[first + accepted + 1] &&
                   fault_of(best[first + accepted + 1]) == SOUND)
                accepted++;
            if (fault == SOUND)
                next = tokens[first + accepted];
            else
                accepted = 0;
        }
        results[b] = accepted;
        results[count + b] = next;
        results[2 * count + b] = fault;
    }
}

/* A result is NUM_COUNTS numbers, of [count] each, and its window's tokens, up to `width` in all;
 * behind the last sampled row they are 0. places: [count], the result's row, below 0 for padding. */
EXPORT void deliver_results(const int64_t *step_ids, const int64_t *num_drafts,
                            const int64_t *num_proposed, const int64_t *num_accepted,
                            const int64_t *faults, const int64_t *places,
                            const int64_t *window_starts, int64_t count, const int64_t *tokens,
                            int64_t num_rows, int64_t *results, int64_t width) {
    for (int64_t b = 0; b < count; b++) {
        if (places[b] < 0) continue;
        int64_t *result = results + places[b] * width;
        *result++ = step_ids[b];
        *result++ = num_drafts[b];
        *result++ = num_proposed[b];
        *result++ = num_accepted[b];
        *result++ = faults[b];
        for (int64_t i = 0; i < width - NUM_COUNTS; i++) {
            int64_t row = window_starts[b] + i;
            result[i] = row < num_rows ? tokens[row] : 0;
        }
    }
}
