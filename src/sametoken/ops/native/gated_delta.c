/* Gated DeltaNet without its projections: convolution, gates and the gated delta rule.
 *
 * Phase one prepares every row, phase two scans a slot's rows sequentially, phase three stores
 * the raw rows that the next pass needs. Every column of a state is read and updated
 * separately, with sums over the keys in ascending order, so no bit depends on the division of
 * rows into passes, on other slots or on threads. */
#include "recurrent.h"

#define NORM_EPS 1e-6f
/* Columns of a state per panel: with 128 keys a panel fits the L1 cache. */
#define PANELS 2
#define PANEL (PANELS * LANES)

typedef struct {
    raw_rows raw;  /* [q | k | v], a and b */
    float *states; /* [slots][value_heads][key_dim][value_dim] */
    const float *A_log, *dt_bias;
    void *out;
    float *prepared; /* of one batch: [q | k | v | decay | beta] by row */
    int64_t key_heads, value_heads, key_dim, value_dim;
} rule_job;

INLINE int64_t prepared_width(const rule_job *job) {
    return job->raw.channels + 2 * job->value_heads;
}

/* x / sqrt(sum(x^2) + eps) * scale in place. */
INLINE void normalise(float *x, int64_t dim, float scale) {
    float factor = scale / sqrtf(sum_of_squares(x, 0, dim, 0) + NORM_EPS);
    for (int64_t i = 0; i < dim; i += LANES)
        store_some(x, i, dim - i, 0, load_some(x, i, dim - i, 0) * factor);
}

/* Decay and beta of one row and value head. */
INLINE void set_gates(const rule_job *job, const slot_part *part, int64_t row, int64_t head,
                      float *decay, float *beta, const int bf16) {
    float a = raw_gate(&job->raw, part, row, 0, head, bf16) + job->dt_bias[head];
    *decay = expf(-expf(job->A_log[head]) * softplus(a));
    *beta = 1.0f / (1.0f + expf(-raw_gate(&job->raw, part, row, 1, head, bf16)));
}

/* Phase one for one slot and head; heads of q, then of k, then of v with their gates. */
INLINE void prepare(const rule_job *job, const slot_part *part, int64_t head, float *rows,
                    const int bf16) {
    int64_t keys = 2 * job->key_heads, width = prepared_width(job);
    int64_t dim = head < keys ? job->key_dim : job->value_dim;
    int64_t first = head < keys ? head * dim : keys * job->key_dim + (head - keys) * dim;
    float scale = head < job->key_heads ? 1.0f / sqrtf((float)dim) : 1.0f;
    for (int64_t row = 0; row < total_rows(part); row++, rows += width) {
        convolve(&job->raw, part, row, first, dim, rows + first, bf16);
        if (head < keys) {
            normalise(rows + first, dim, scale);
        } else {
            float *decay = rows + job->raw.channels + head - keys;
            set_gates(job, part, row, head - keys, decay, decay + job->value_heads, bf16);
        }
    }
}

INLINE void load_panel(f32v *panel, const float *state, int64_t keys, int64_t stride,
                       int64_t count) {
    memset(panel, 0, keys * PANELS * sizeof *panel);
    for (int64_t i = 0; state && i < keys; i++, state += stride)
        for (int p = 0; p < PANELS && p * LANES < count; p++)
            panel[i * PANELS + p] = load_some(state, p * LANES, count - p * LANES, 0);
}

INLINE void store_panel(const f32v *panel, float *state, int64_t keys, int64_t stride,
                        int64_t count) {
    for (int64_t i = 0; i < keys; i++, state += stride)
        for (int p = 0; p < PANELS && p * LANES < count; p++)
            store_some(state, p * LANES, count - p * LANES, 0, panel[i * PANELS + p]);
}

/* Read a panel of the state with a key. */
INLINE void recall(const f32v *panel, int64_t keys, const float *key, f32v held[PANELS]) {
    for (int p = 0; p < PANELS; p++) held[p] = splat(0.0f);
    for (int64_t i = 0; i < keys; i++)
        for (int p = 0; p < PANELS; p++)
            held[p] = multiply_add(panel[i * PANELS + p], splat(key[i]), held[p]);
}

/* state = decay * state + key * change, then read with the query and, if any, with the next
 * row's key: the same sums as `recall`, fused into one loop. */
INLINE void change_panel(f32v *panel, int64_t keys, float decay, const float *key,
                         const float *query, const float *next_key, f32v change[PANELS],
                         f32v read[PANELS]) {
    f32v sum[PANELS], held[PANELS];
    for (int p = 0; p < PANELS; p++) sum[p] = held[p] = splat(0.0f);
    for (int64_t i = 0; i < keys; i++)
        for (int p = 0; p < PANELS; p++) {
            f32v s = panel[i * PANELS + p] * decay;
            s = multiply_add(splat(key[i]), change[p], s);
            panel[i * PANELS + p] = s;
            sum[p] = multiply_add(s, splat(query[i]), sum[p]);
            if (next_key) held[p] = multiply_add(s, splat(next_key[i]), held[p]);
        }
    for (int p = 0; p < PANELS; p++) read[p] = sum[p], change[p] = held[p];
}

/* Phase two for one slot and unit: a panel of columns of a value head. */
INLINE void advance(const rule_job *job, const slot_part *part, int64_t unit, f32v *panel,
                    const float *x, const int bf16) {
    int64_t keys = job->key_dim, dim = job->value_dim, width = prepared_width(job);
    int64_t panels = ceil_div(dim, PANEL), head = unit / panels, column = unit % panels * PANEL;
    int64_t count = smaller(PANEL, dim - column), lasting = part->lasting;
    int64_t query = head / (job->value_heads / job->key_heads) * keys;
    int64_t key = query + job->key_heads * keys;
    int64_t value = 2 * job->key_heads * keys + head * dim + column;
    int64_t gate = job->raw.channels + head;
    float *state = job->states + (part->slot * job->value_heads + head) * keys * dim + column;
    f32v held[PANELS], read[PANELS];
    load_panel(panel, part->starts ? NULL : state, keys, dim, count);
    recall(panel, keys, x + key, held);
    for (int64_t row = 0;; row++, x += width) {
        if (row == lasting && (lasting || part->starts))
            store_panel(panel, state, keys, dim, count);
        if (row == total_rows(part)) return;
        float decay = x[gate], beta = x[gate + job->value_heads];
        for (int p = 0; p < PANELS && p * LANES < count; p++) {
            f32v v = load_some(x, value + p * LANES, count - p * LANES, 0);
            held[p] = (v - held[p] * decay) * beta;
        }
        if (row + 1 < total_rows(part))
            change_panel(panel, keys, decay, x + key, x + query, x + width + key, held, read);
        else
            change_panel(panel, keys, decay, x + key, x + query, NULL, held, read);
        int64_t place = part->first_row + row - part->folded;
        place = (place * job->value_heads + head) * dim + column;
        for (int p = 0; row >= part->folded && p < PANELS && p * LANES < count; p++)
            store_some(job->out, place + p * LANES, count - p * LANES, bf16, read[p]);
    }
}

INLINE rule_units units_of(const rule_job *job) {
    int64_t panels = job->value_heads * ceil_div(job->value_dim, PANEL);
    return (rule_units){2 * job->key_heads + job->value_heads, panels, job->key_dim * PANEL};
}

#include "phases.h"

/* Returns 0 if out of memory. `out` [rows][value_heads * value_dim] has the dtype of the raw
 * rows; states and weights are fp32. */
EXPORT int64_t gated_delta(const slot_part *parts, int64_t count, const raw_rows *raw,
                           float *states, const float *A_log, const float *dt_bias, void *out,
                           int64_t key_heads, int64_t value_heads, int64_t key_dim,
                           int64_t value_dim, int64_t bf16) {
    rule_job job = {*raw, states,    A_log,       dt_bias, out,
                    NULL, key_heads, value_heads, key_dim, value_dim};
    return run_batches(&job, parts, count, bf16);
}
