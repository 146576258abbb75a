/* Mamba-2 without its projections: convolution, time steps and the state space rule.
 *
 * Phase one prepares every row, phase two scans a slot's rows sequentially, phase three stores
 * the raw rows that the next pass needs. A row of a state is updated and read separately, with
 * one order of its sum, so no bit depends on the division of rows into passes, on other slots or
 * on threads. */
#include "recurrent.h"

typedef struct {
    raw_rows raw;  /* [x | B | C], and dt */
    float *states; /* [slots][heads][head_dim][state_dim] */
    const float *A_log, *skip, *dt_bias;
    void *out;
    float *prepared; /* of one batch: [x | B | C | decay | step] by row */
    int64_t heads, head_dim, groups, state_dim;
    float least_step, largest_step;
} rule_job;

/* Channels that one unit of phase one prepares. */
#define CHANNELS 512

INLINE int64_t prepared_width(const rule_job *job) {
    return job->raw.channels + 2 * job->heads;
}

/* Decay and time step of one row, by head. */
INLINE void set_steps(const rule_job *job, const slot_part *part, int64_t row, float *decay,
                      const int bf16) {
    for (int64_t head = 0; head < job->heads; head++) {
        float step = raw_gate(&job->raw, part, row, 0, head, bf16) + job->dt_bias[head];
        step = softplus(step);
        /* NaN passes both, and reaches the logits. */
        if (step < job->least_step) step = job->least_step;
        if (step > job->largest_step) step = job->largest_step;
        decay[head] = expf(-expf(job->A_log[head]) * step);
        decay[job->heads + head] = step;
    }
}

/* Phase one for one slot and CHANNELS channels; the first unit also prepares the steps. */
INLINE void prepare(const rule_job *job, const slot_part *part, int64_t unit, float *rows,
                    const int bf16) {
    int64_t first = unit * CHANNELS, dim = smaller(CHANNELS, job->raw.channels - first);
    for (int64_t row = 0; row < total_rows(part); row++, rows += prepared_width(job)) {
        convolve(&job->raw, part, row, first, dim, rows + first, bf16);
        if (!unit) set_steps(job, part, row, rows + job->raw.channels, bf16);
    }
}

/* s = decay * s + change * b over one row of a state; returns the sum of s * c. */
INLINE float step_row(float *s, int64_t dim, float decay, float change, const float *b,
                      const float *c) {
    f32v read = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        f32v held = load_some(s, i, dim - i, 0) * decay;
        held = multiply_add(load_some(b, i, dim - i, 0), splat(change), held);
        store_some(s, i, dim - i, 0, held);
        read = multiply_add(held, load_some(c, i, dim - i, 0), read);
    }
    return sum_lanes(read);
}

/* Phase two for one slot and head, over a copy of the head's state. */
INLINE void advance(const rule_job *job, const slot_part *part, int64_t head, float *copy,
                    const float *x, const int bf16) {
    int64_t size = job->state_dim, dim = job->head_dim, inner = job->heads * dim;
    int64_t group = head / (job->heads / job->groups), shared = job->groups * size;
    int64_t bytes = dim * size * sizeof(float), gate = job->raw.channels + head;
    float *state = job->states + (part->slot * job->heads + head) * dim * size;
    if (part->starts) memset(copy, 0, bytes);
    else memcpy(copy, state, bytes);
    for (int64_t row = 0;; row++, x += prepared_width(job)) {
        if (row == part->lasting && (part->lasting || part->starts)) memcpy(state, copy, bytes);
        if (row == total_rows(part)) return;
        const float *b = x + inner + group * size, *c = b + shared;
        float decay = x[gate], step = x[gate + job->heads];
        int64_t place = (part->first_row + row - part->folded) * inner + head * dim;
        for (int64_t i = 0; i < dim; i++) {
            float in = x[head * dim + i];
            float read = step_row(copy + i * size, size, decay, in * step, b, c);
            if (row >= part->folded)
                store_some(job->out, place + i, 1, bf16, splat(read + job->skip[head] * in));
        }
    }
}

INLINE rule_units units_of(const rule_job *job) {
    int64_t channels = ceil_div(job->raw.channels, CHANNELS);
    return (rule_units){channels, job->heads, job->head_dim * job->state_dim};
}

#include "phases.h"

/* Returns 0 if out of memory. `out` [rows][heads * head_dim] has the dtype of the raw rows;
 * states and weights are fp32. */
EXPORT int64_t mamba2(const slot_part *parts, int64_t count, const raw_rows *raw, float *states,
                      const float *A_log, const float *skip, const float *dt_bias, void *out,
                      int64_t heads, int64_t head_dim, int64_t groups, int64_t state_dim,
                      float least_step, float largest_step, int64_t bf16) {
    rule_job job = {*raw,  states,   A_log,  skip,      dt_bias,    out,         NULL,
                    heads, head_dim, groups, state_dim, least_step, largest_step};
    return run_batches(&job, parts, count, bf16);
}
