/* A decoder layer of attention and a gated MLP in one call.
 *
 * It runs the kernels of separate calls, in their order, so it has their bits. What it saves is
 * the calls: of one row they take longer than the smaller kernels (ops/native/layer.py). */
#include "kernels.h"
#include "threads.h"

/* As in layer.py. */
enum { UNQUANTIZED, QUANTIZED, INTEGERS };

/* A weight and its product; `form` and what follows as the products of quantized.c take them. */
typedef struct {
    int64_t kind;
    const void *packed, *form, *bias;
    int64_t n, k, rounding;
    float fixed;
} matrix;

typedef struct {
    const void *weight;
    float eps;
    int32_t bf16;
} norm;

typedef struct {
    matrix qkv, output, gate_up, down;
    norm after_attention, of_queries, of_keys; /* the latter two may lack weights */
    const float *cos, *sin, *sinks;
    int64_t heads, kv_heads, dim, half, window, bf16;
    float scale;
} layer;

static int64_t product(const matrix *w, const void *x, void *out, int64_t t, int64_t bf16) {
    if (w->kind == QUANTIZED)
        return quantized_gemm(x, w->packed, w->form, w->bias, out, t, w->n, bf16, bf16, w->rounding,
                              w->fixed);
    if (w->kind == INTEGERS)
        return integer_gemm(x, w->packed, w->form, w->bias, out, t, w->n, bf16, bf16);
    gemm(x, w->packed, w->bias, out, t, w->n, w->k, bf16, bf16);
    return 1;
}

static _Thread_local buffer own;

/* x is the norm of residual; both become those of the layer's output. Returns 0 if memory lacks. */
EXPORT int64_t decoder_layer(const layer *l, void *x, void *residual, const void *next_weight,
                             float next_eps, int64_t next_bf16, const int64_t *positions,
                             const int64_t *slots, const int64_t *kv_slots,
                             const int64_t *block_table, int64_t max_blocks, void *keys,
                             void *values, const float *k_scales, const float *v_scales,
                             int64_t block_size, int64_t e4m3, int64_t t) {
    int64_t hidden = l->output.n, inner = l->down.k, bf16 = l->bf16, size = bf16 ? 2 : 4;
    /* One after the other: q, k and v; queries; attended values. Or gate and up; their product. */
    int64_t q_bytes = t * l->output.k * size, qkv_bytes = t * l->qkv.n * size;
    char *first = reserve(&own, larger(qkv_bytes + 2 * q_bytes, 3 * t * inner * size));
    if (!first) return 0;
    char *queries = first + qkv_bytes, *attended = queries + q_bytes;
    if (!product(&l->qkv, x, first, t, bf16)) return 0;
    rope_and_cache(first, queries, keys, values, l->cos, l->sin, positions, kv_slots,
                   l->of_queries.weight, l->of_keys.weight, k_scales, v_scales, l->of_queries.eps,
                   t, l->heads, l->kv_heads, l->dim, l->half, block_size, e4m3, bf16,
                   l->of_queries.bf16);
    if (!attention(queries, keys, values, l->sinks, k_scales, v_scales, attended, positions, slots,
                   block_table, t, l->heads, l->kv_heads, l->dim, l->dim, block_size, max_blocks,
                   l->window, e4m3, l->scale, bf16))
        return 0;
    if (!product(&l->output, attended, x, t, bf16)) return 0;
    add_rms_norm(x, residual, l->after_attention.weight, t, hidden, l->after_attention.eps, bf16,
                 l->after_attention.bf16);
    char *gated = first + 2 * t * inner * size;
    if (!product(&l->gate_up, x, first, t, bf16)) return 0;
    silu_mul(first, gated, t, inner, bf16);
    if (!product(&l->down, gated, x, t, bf16)) return 0;
    add_rms_norm(x, residual, next_weight, t, hidden, next_eps, bf16, next_bf16);
    return 1;
}
