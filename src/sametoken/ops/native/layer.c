/* Decoder layers of attention and a gated MLP in one call.
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
    norm after_attention, following, of_queries, of_keys; /* the latter two may lack weights */
    const float *cos, *sin, *sinks;
    int64_t heads, kv_heads, dim, half, window, bf16;
    float scale;
} layer;

/* A layer's keys and values. */
typedef struct {
    void *keys, *values;
    const float *k_scales, *v_scales;
} memory;

/* Of a pass's rows those that its last layer returns. */
typedef struct {
    const int64_t *index, *positions, *slots;
    int64_t count;
} kept_rows;

static void take_rows(void *out, const void *rows, const kept_rows *kept, int64_t row_bytes) {
    for (int64_t i = 0; i < kept->count; i++)
        memcpy((char *)out + i * row_bytes, (const char *)rows + kept->index[i] * row_bytes,
               row_bytes);
}

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

static int64_t decoder_layer(const layer *l, const memory *kv, void *x, void *residual,
                             const int64_t *positions, const int64_t *slots,
                             const int64_t *kv_slots, const int64_t *block_table,
                             int64_t max_blocks, int64_t block_size, int64_t e4m3, int64_t t,
                             const kept_rows *kept) {
    int64_t hidden = l->output.n, inner = l->down.k, bf16 = l->bf16, size = bf16 ? 2 : 4;
    /* One after the other: q, k and v; queries; attended values. Or gate and up; their product. */
    int64_t q_bytes = t * l->output.k * size, qkv_bytes = t * l->qkv.n * size;
    char *first = reserve(&own, larger(qkv_bytes + 2 * q_bytes, 3 * t * inner * size));
    if (!first) return 0;
    char *queries = first + qkv_bytes, *attended = queries + q_bytes;
    if (!product(&l->qkv, x, first, t, bf16)) return 0;
    rope_and_cache(first, queries, kv->keys, kv->values, l->cos, l->sin, positions, kv_slots,
                   l->of_queries.weight, l->of_keys.weight, kv->k_scales, kv->v_scales,
                   l->of_queries.eps, t, l->heads, l->kv_heads, l->dim, l->half, block_size, e4m3,
                   bf16, l->of_queries.bf16);
    if (kept) {
        take_rows(attended, queries, kept, l->output.k * size);
        char *taken = attended;
        attended = queries, queries = taken;
        /* No product reads x any more. */
        take_rows(x, residual, kept, hidden * size);
        memcpy(residual, x, kept->count * hidden * size);
        positions = kept->positions, slots = kept->slots, t = kept->count;
    }
    if (!t) return 1;
    if (!attention(queries, kv->keys, kv->values, l->sinks, kv->k_scales, kv->v_scales, attended,
                   positions, slots, block_table, t, l->heads, l->kv_heads, l->dim, l->dim,
                   block_size, max_blocks, l->window, e4m3, l->scale, bf16))
        return 0;
    if (!product(&l->output, attended, x, t, bf16)) return 0;
    add_rms_norm(x, residual, l->after_attention.weight, t, hidden, l->after_attention.eps, bf16,
                 l->after_attention.bf16);
    char *gated = first + 2 * t * inner * size;
    if (!product(&l->gate_up, x, first, t, bf16)) return 0;
    silu_mul(first, gated, t, inner, bf16);
    if (!product(&l->down, gated, x, t, bf16)) return 0;
    add_rms_norm(x, residual, l->following.weight, t, hidden, l->following.eps, bf16,
                 l->following.bf16);
    return 1;
}

/* x is the norm of residual; both become those of the last layer's output, of the rows in `index`, or
 * of all if num_kept is negative. Returns 0 if memory lacks. */
EXPORT int64_t decoder_layers(const layer *layers, const memory *kv, int64_t count, void *x,
                              void *residual, const int64_t *positions, const int64_t *slots,
                              const int64_t *kv_slots, const int64_t *block_table,
                              int64_t max_blocks, int64_t block_size, int64_t e4m3, int64_t t,
                              const int64_t *index, const int64_t *kept_positions,
                              const int64_t *kept_slots, int64_t num_kept) {
    kept_rows kept = {index, kept_positions, kept_slots, num_kept};
    for (int64_t i = 0; i < count; i++)
        if (!decoder_layer(layers + i, kv + i, x, residual, positions, slots, kv_slots, block_table,
                           max_blocks, block_size, e4m3, t,
                           num_kept >= 0 && i + 1 == count ? &kept : NULL))
            return 0;
    return 1;
}
