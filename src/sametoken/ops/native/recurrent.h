/* Raw rows of a recurrent layer, for every rule: where they are, their convolution, and what the
 * next pass needs of them. */
#ifndef SAMETOKEN_RECURRENT_H
#define SAMETOKEN_RECURRENT_H

#include "threads.h"
#include "vector.h"

/* Most parts of a raw row beside the convolved one. */
#define MAX_GATES 2

/* One slot's rows: `folded` pending ones, then `rows` of the pass from `first_row`. The first
 * `lasting` advance the stored state, the others are the new pending rows. */
typedef struct {
    int64_t slot, starts, first_row, rows, folded, lasting;
    int64_t rows_before; /* folded rows and rows of the pass of all earlier slots */
} slot_part;

/* The raw rows of a layer, bf16 or fp32; weights are fp32. Strides are in elements. Each of
 * `num_gates` gates is `heads` wide; pending rows keep them side by side. */
typedef struct {
    char *history, *pending, *pending_gates;
    const char *mixed, *gates[MAX_GATES];
    int64_t mixed_stride, gate_strides[MAX_GATES];
    const float *conv_weight, *conv_bias; /* [taps][channels], [channels] or NULL */
    int64_t channels, heads, num_gates, taps, max_pending;
} raw_rows;

/* What one slot is divided into by phase, and floats of a state in a unit of phase two. */
typedef struct {
    int64_t prepared, advanced, elements;
} rule_units;

INLINE int64_t total_rows(const slot_part *part) { return part->folded + part->rows; }

/* Raw row `index` of the slot, from the oldest of its history; NULL stands for zeros. */
INLINE const char *raw_row(const raw_rows *raw, const slot_part *part, int64_t index,
                           int64_t size) {
    int64_t before = raw->taps - 1, width = raw->channels * size;
    if (index < before)
        return part->starts ? NULL : raw->history + (part->slot * before + index) * width;
    index -= before;
    if (index < part->folded)
        return raw->pending + (part->slot * raw->max_pending + index) * width;
    return raw->mixed + (part->first_row + index - part->folded) * raw->mixed_stride * size;
}

/* SiLU of the convolution at one row: `dim` channels from `first`. */
INLINE void convolve(const raw_rows *raw, const slot_part *part, int64_t row, int64_t first,
                     int64_t dim, float *out, const int bf16) {
    for (int64_t i = 0; i < dim; i += LANES) store_some(out, i, dim - i, 0, splat(0.0f));
    for (int64_t tap = 0; tap < raw->taps; tap++) {
        const char *from = raw_row(raw, part, row + tap, bf16 ? 2 : 4);
        for (int64_t i = 0; from && i < dim; i += LANES) {
            f32v sum = load_some(out, i, dim - i, 0);
            int64_t place = tap * raw->channels + first + i;
            f32v weight = load_some(raw->conv_weight, place, dim - i, 0);
            sum = multiply_add(load_some(from, first + i, dim - i, bf16), weight, sum);
            store_some(out, i, dim - i, 0, sum);
        }
    }
    for (int64_t i = 0; i < dim; i += LANES) {
        f32v sum = load_some(out, i, dim - i, 0);
        if (raw->conv_bias) sum += load_some(raw->conv_bias, first + i, dim - i, 0);
        store_some(out, i, dim - i, 0, sum / (exp_lanes(-sum) + 1.0f));
    }
}

/* A gate of one row and head. */
INLINE float raw_gate(const raw_rows *raw, const slot_part *part, int64_t row, int64_t gate,
                      int64_t head, const int bf16) {
    if (row < part->folded) {
        int64_t place = part->slot * raw->max_pending + row;
        place = (place * raw->num_gates + gate) * raw->heads + head;
        return element(raw->pending_gates, place, bf16);
    }
    int64_t of_pass = part->first_row + row - part->folded;
    return element(raw->gates[gate], of_pass * raw->gate_strides[gate] + head, bf16);
}

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* What the next pass needs of one slot: its history, then its pending rows, both in ascending
 * order, so that no row is overwritten before it is moved. */
INLINE void keep(const raw_rows *raw, const slot_part *part, const int bf16) {
    int64_t size = bf16 ? 2 : 4, before = raw->taps - 1, width = raw->channels * size;
    int64_t gate_width = raw->heads * size;
    for (int64_t i = 0; i < before; i++) {
        char *to = raw->history + (part->slot * before + i) * width;
        const char *from = raw_row(raw, part, part->lasting + i, size);
        if (!from) memset(to, 0, width);
        else if (from != to) memcpy(to, from, width);
    }
    /* Rows that stay pending are already in place. */
    for (int64_t row = larger(part->lasting, part->folded); row < total_rows(part); row++) {
        int64_t place = part->slot * raw->max_pending + row - part->lasting;
        int64_t of_pass = part->first_row + row - part->folded;
        char *to = raw->pending_gates + place * raw->num_gates * gate_width;
        memcpy(raw->pending + place * width, raw_row(raw, part, before + row, size), width);
        for (int64_t gate = 0; gate < raw->num_gates; gate++, to += gate_width)
            memcpy(to, raw->gates[gate] + of_pass * raw->gate_strides[gate] * size, gate_width);
    }
}

#endif
