/* Row-wise operations: norms, activations, rotary embedding and the KV write. */
#include "kernels.h"
#include "kv.h"
#include "threads.h"
#include "vector.h"

#define MAX_HEAD_DIM 1024

/* silu(gate) of up to LANES elements. */
INLINE f32v silu_some(const void *gate, int64_t index, int64_t count, int bf16) {
    f32v v = load_some(gate, index, count, bf16);
    return v / (exp_lanes(-v) + 1.0f);
}

INLINE void norm_row(const void *x, const void *gate, const void *weight, void *out,
                     int64_t first, int64_t h, float eps, int bf16, int weight_bf16) {
    float scale = inverse_rms(x, first, h, eps, bf16);
    for (int64_t i = 0; i < h; i += LANES) {
        f32v v = load_some(x, first + i, h - i, bf16) * scale;
        v *= load_some(weight, i, h - i, weight_bf16);
        if (gate) v *= silu_some(gate, first + i, h - i, bf16);
        store_some(out, first + i, h - i, bf16, v);
    }
}

INLINE void rms_norm_rows(const void *x, const void *gate, const void *weight, void *out,
                          int64_t t, int64_t h, float eps, const int bf16,
                          const int weight_bf16) {
#pragma omp parallel for schedule(static) if (t * h > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < t; row++)
        norm_row(x, gate, weight, out, row * h, h, eps, bf16, weight_bf16);
}

/* norm(x), times silu(gate) if there is a gate. */
EXPORT void rms_norm(const void *x, const void *gate, const void *weight, void *out, int64_t t,
                     int64_t h, float eps, int64_t bf16, int64_t weight_bf16) {
    if (!bf16) rms_norm_rows(x, gate, weight, out, t, h, eps, 0, 0);
    else if (weight_bf16) rms_norm_rows(x, gate, weight, out, t, h, eps, 1, 1);
    else rms_norm_rows(x, gate, weight, out, t, h, eps, 1, 0);
}

INLINE void add_rms_norm_rows(void *x, void *residual, const void *weight, int64_t t,
                              int64_t h, float eps, const int bf16, const int weight_bf16) {
#pragma omp parallel for schedule(static) if (t * h > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < t; row++) {
        int64_t first = row * h;
        for (int64_t i = 0; i < h; i += LANES) {
            f32v sum = load_some(x, first + i, h - i, bf16);
            sum += load_some(residual, first + i, h - i, bf16);
            store_some(residual, first + i, h - i, bf16, sum);
        }
        float scale = inverse_rms(residual, first, h, eps, bf16);
        for (int64_t i = 0; i < h; i += LANES) {
            f32v v = load_some(residual, first + i, h - i, bf16) * scale;
            store_some(x, first + i, h - i, bf16, v * load_some(weight, i, h - i, weight_bf16));
        }
    }
}

/* residual += x, then x = norm(residual). */
EXPORT void add_rms_norm(void *x, void *residual, const void *weight, int64_t t, int64_t h,
                         float eps, int64_t bf16, int64_t weight_bf16) {
    if (!bf16) add_rms_norm_rows(x, residual, weight, t, h, eps, 0, 0);
    else if (weight_bf16) add_rms_norm_rows(x, residual, weight, t, h, eps, 1, 1);
    else add_rms_norm_rows(x, residual, weight, t, h, eps, 1, 0);
}

/* gelu(gate) of up to LANES elements, approximated by tanh: x * sigmoid(2 sqrt(2 / pi) (...)). */
INLINE f32v gelu_some(const void *gate, int64_t index, int64_t count, int bf16) {
    f32v v = load_some(gate, index, count, bf16);
    f32v slope = (v * v * 0.044715f + 1.0f) * v * 1.5957691216057308f;
    return v / (exp_lanes(-slope) + 1.0f);
}

INLINE void gated_rows(const void *gate_up, void *out, int64_t t, int64_t size, const int gelu,
                       const int bf16) {
#pragma omp parallel for schedule(static) if (t * size > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < t; row++) {
        int64_t first = row * 2 * size;
        for (int64_t i = 0; i < size; i += LANES) {
            f32v up = load_some(gate_up, first + size + i, size - i, bf16);
            f32v gate = gelu ? gelu_some(gate_up, first + i, size - i, bf16)
                             : silu_some(gate_up, first + i, size - i, bf16);
            store_some(out, row * size + i, size - i, bf16, gate * up);
        }
    }
}

EXPORT void silu_mul(const void *gate_up, void *out, int64_t t, int64_t size, int64_t bf16) {
    if (bf16) gated_rows(gate_up, out, t, size, 0, 1);
    else gated_rows(gate_up, out, t, size, 0, 0);
}

EXPORT void gelu_mul(const void *gate_up, void *out, int64_t t, int64_t size, int64_t bf16) {
    if (bf16) gated_rows(gate_up, out, t, size, 1, 1);
    else gated_rows(gate_up, out, t, size, 1, 0);
}

INLINE void clamped_swiglu_rows(const void *gate_up, void *out, int64_t t, int64_t size,
                                float alpha, float limit, const int bf16) {
#pragma omp parallel for schedule(static) if (t * size > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < t; row++) {
        int64_t first = row * 2 * size;
        for (int64_t i = 0; i < size; i += LANES) {
            f32v gate = load_some(gate_up, first + i, size - i, bf16);
            f32v up = load_some(gate_up, first + size + i, size - i, bf16);
            gate = select_lanes(gate > splat(limit), splat(limit), gate);
            up = select_lanes(up > splat(limit), splat(limit), up);
            up = select_lanes(up < splat(-limit), splat(-limit), up);
            f32v glu = gate / (exp_lanes(gate * -alpha) + 1.0f);
            store_some(out, row * size + i, size - i, bf16, glu * (up + 1.0f));
        }
    }
}

/* (up + 1) * gate * sigmoid(alpha * gate), of gates up to a limit and ups within it. */
EXPORT void clamped_swiglu(const void *gate_up, void *out, int64_t t, int64_t size, float alpha,
                           float limit, int64_t bf16) {
    if (bf16) clamped_swiglu_rows(gate_up, out, t, size, alpha, limit, 1);
    else clamped_swiglu_rows(gate_up, out, t, size, alpha, limit, 0);
}

/* cap * tanh(x / cap) of fp32 rows, as cap - 2 cap / (exp(2 x / cap) + 1). */
EXPORT void soft_cap(const void *x, void *out, int64_t t, int64_t size, float cap) {
#pragma omp parallel for schedule(static) if (t * size > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < t; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            f32v v = load_some(x, row * size + i, size - i, 0) * (2.0f / cap);
            v = cap - (2.0f * cap) / (exp_lanes(v) + 1.0f);
            store_some(out, row * size + i, size - i, 0, v);
        }
}

INLINE void sigmoid_mul_rows(const void *x, const void *gate, void *out, int64_t t,
                             int64_t size, const int bf16) {
#pragma omp parallel for schedule(static) if (t * size > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < t; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            f32v g = load_some(gate, row * size + i, size - i, bf16);
            f32v v = load_some(x, row * size + i, size - i, bf16);
            store_some(out, row * size + i, size - i, bf16, v / (exp_lanes(-g) + 1.0f));
        }
}

/* x * sigmoid(gate). */
EXPORT void sigmoid_mul(const void *x, const void *gate, void *out, int64_t t, int64_t size,
                        int64_t bf16) {
    if (bf16) sigmoid_mul_rows(x, gate, out, t, size, 1);
    else sigmoid_mul_rows(x, gate, out, t, size, 0);
}

INLINE void relu_squared_rows(const void *x, void *out, int64_t count, const int bf16) {
#pragma omp parallel for schedule(static) if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES) {
        f32v v = load_some(x, i, count - i, bf16);
        store_some(out, i, count - i, bf16, select_lanes(v < 0.0f, splat(0.0f), v * v));
    }
}

/* relu(x)^2; NaN stays NaN. */
EXPORT void relu_squared(const void *x, void *out, int64_t count, int64_t bf16) {
    if (bf16) relu_squared_rows(x, out, count, 1);
    else relu_squared_rows(x, out, count, 0);
}

/* norm(x * silu(gate)) of one group of `size` elements from `first`. */
INLINE void gated_group(const void *x, const void *gate, const void *weight, void *out,
                        int64_t first, int64_t size, float eps, int bf16, int weight_bf16) {
    f32v squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        f32v v = load_some(x, first + i, size - i, bf16);
        v *= silu_some(gate, first + i, size - i, bf16);
        squares = multiply_add(v, v, squares);
    }
    float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += LANES) {
        f32v v = load_some(x, first + i, size - i, bf16);
        v *= silu_some(gate, first + i, size - i, bf16) * scale;
        v *= load_some(weight, i, size - i, weight_bf16);
        store_some(out, first + i, size - i, bf16, v);
    }
}

INLINE void gated_group_rows(const void *x, const void *gate, const void *weight, void *out,
                             int64_t t, int64_t groups, int64_t size, float eps,
                             const int bf16, const int weight_bf16) {
    int64_t weight_size = weight_bf16 ? 2 : 4;
#pragma omp parallel for schedule(static) if (t * groups * size > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < t * groups; i++) {
        const char *own = (const char *)weight + i % groups * size * weight_size;
        gated_group(x, gate, own, out, i * size, size, eps, bf16, weight_bf16);
    }
}

/* Norm of x * silu(gate) by groups of `size` elements; `weight` is as wide as a row. */
EXPORT void gated_group_norm(const void *x, const void *gate, const void *weight, void *out,
                             int64_t t, int64_t groups, int64_t size, float eps, int64_t bf16,
                             int64_t weight_bf16) {
    if (!bf16) gated_group_rows(x, gate, weight, out, t, groups, size, eps, 0, 0);
    else if (weight_bf16) gated_group_rows(x, gate, weight, out, t, groups, size, eps, 1, 1);
    else gated_group_rows(x, gate, weight, out, t, groups, size, eps, 1, 0);
}

/* Norm (if `weight`) and rotate one head of `dim` elements from `x` to `out`, in its dtype. */
INLINE void rotate_head(const void *x, int64_t x_first, void *out, int64_t out_first,
                        int64_t dim, const void *weight, float eps, const float *cos,
                        const float *sin, int64_t half, int bf16, int out_bf16,
                        int weight_bf16) {
    float head[MAX_HEAD_DIM + LANES];
    float scale = weight ? inverse_rms(x, x_first, dim, eps, bf16) : 1.0f;
    for (int64_t i = 0; i < dim; i += LANES) {
        f32v v = load_some(x, x_first + i, dim - i, bf16);
        if (weight) v = v * scale * load_some(weight, i, dim - i, weight_bf16);
        store_some(head, i, LANES, 0, v);
    }
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t count = smaller(LANES, half - i);
        f32v c = load_some(cos, i, count, 0), s = load_some(sin, i, count, 0);
        f32v low = load_some(head, i, count, 0), high = load_some(head, half + i, count, 0);
        store_some(out, out_first + i, count, out_bf16, low * c - high * s);
        store_some(out, out_first + half + i, count, out_bf16, high * c + low * s);
    }
    for (int64_t i = 2 * half; i < dim; i += LANES)
        store_some(out, out_first + i, dim - i, out_bf16, load_some(head, i, dim - i, 0));
}

typedef struct {
    const void *qkv;
    void *q, *keys, *values;
    const float *cos, *sin;
    const int64_t *positions, *kv_slots;
    const void *q_weight, *k_weight;
    const float *k_scales, *v_scales; /* of each KV head, or NULL: 1 */
    int64_t t, heads, kv_heads, dim, half, block_size, e4m3;
    float eps;
    int weight_bf16;
} rope_job;

/* Norm and rotate a head of keys, and divide and round it and its values. */
INLINE void round_heads(const rope_job *job, int64_t source, int64_t head, int64_t place,
                        const float *cos, const float *sin, const int bf16) {
    float key[MAX_HEAD_DIM + LANES];
    int64_t dim = job->dim, value = source + job->kv_heads * dim;
    float k_scale = scale_of(job->k_scales, head), v_scale = scale_of(job->v_scales, head);
    rotate_head(job->qkv, source, key, 0, dim, job->k_weight, job->eps, cos, sin, job->half,
                bf16, 0, job->weight_bf16);
    for (int64_t i = 0; i < dim; i += LANES) {
        store_e4m3(job->keys, place + i, dim - i, load_some(key, i, dim - i, 0) / k_scale);
        store_e4m3(job->values, place + i, dim - i,
                   load_some(job->qkv, value + i, dim - i, bf16) / v_scale);
    }
}

INLINE void rope_row(const rope_job *job, int64_t row, const int bf16) {
    int64_t dim = job->dim, size = bf16 ? 2 : 4;
    int64_t source = row * (job->heads + 2 * job->kv_heads) * dim;
    const float *cos = job->cos + job->positions[row] * job->half;
    const float *sin = job->sin + job->positions[row] * job->half;
    for (int64_t head = 0; head < job->heads; head++, source += dim)
        rotate_head(job->qkv, source, job->q, (row * job->heads + head) * dim, dim,
                    job->q_weight, job->eps, cos, sin, job->half, bf16, bf16,
                    job->weight_bf16);
    int64_t block = job->kv_slots[row] / job->block_size;
    int64_t offset = job->kv_slots[row] % job->block_size;
    for (int64_t head = 0; head < job->kv_heads; head++, source += dim) {
        int64_t place = ((block * job->kv_heads + head) * job->block_size + offset) * dim;
        if (job->e4m3) {
            round_heads(job, source, head, place, cos, sin, bf16);
            continue;
        }
        rotate_head(job->qkv, source, job->keys, place, dim, job->k_weight, job->eps, cos,
                    sin, job->half, bf16, bf16, job->weight_bf16);
        memcpy((char *)job->values + place * size,
               (const char *)job->qkv + (source + job->kv_heads * dim) * size, dim * size);
    }
}

EXPORT void rope_and_cache(const void *qkv, void *q, void *keys, void *values,
                           const float *cos, const float *sin, const int64_t *positions,
                           const int64_t *kv_slots, const void *q_weight,
                           const void *k_weight, const float *k_scales,
                           const float *v_scales, float eps, int64_t t, int64_t heads,
                           int64_t kv_heads, int64_t dim, int64_t half, int64_t block_size,
                           int64_t e4m3, int64_t bf16, int64_t weight_bf16) {
    rope_job job = {qkv,      q,        keys,     values,   cos, sin,      positions, kv_slots,
                    q_weight, k_weight, k_scales, v_scales, t,   heads,    kv_heads,  dim,
                    half,     block_size, e4m3,   eps,      (int)weight_bf16};
#pragma omp parallel for schedule(static) if (t * heads * dim > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < t; row++) {
        if (bf16) rope_row(&job, row, 1);
        else rope_row(&job, row, 0);
    }
}
