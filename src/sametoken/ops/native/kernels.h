/* Kernels that others call; contracts are beside their definitions. */
#ifndef SAMETOKEN_KERNELS_H
#define SAMETOKEN_KERNELS_H

#include "vector.h"

EXPORT void gemm(const void *x, const void *packed, const void *bias, void *out, int64_t t,
                 int64_t n, int64_t k, int64_t bf16, int64_t out_bf16);
EXPORT int64_t quantized_gemm(const void *x, const void *packed, const void *form,
                              const void *bias, void *out, int64_t t, int64_t n, int64_t bf16,
                              int64_t out_bf16, int64_t rounding, float fixed);
EXPORT int64_t integer_gemm(const void *x, const void *packed, const void *form, const void *bias,
                            void *out, int64_t t, int64_t n, int64_t bf16, int64_t out_bf16);
EXPORT void rope_and_cache(const void *qkv, void *q, void *keys, void *values,
                           const float *cos, const float *sin, const int64_t *positions,
                           const int64_t *kv_slots, const void *q_weight,
                           const void *k_weight, const float *k_scales,
                           const float *v_scales, float eps, int64_t t, int64_t heads,
                           int64_t kv_heads, int64_t dim, int64_t half, int64_t block_size,
                           int64_t e4m3, int64_t bf16, int64_t weight_bf16);
EXPORT int64_t attention(const void *q, const void *keys, const void *values,
                         const float *sinks, const float *k_scales, const float *v_scales,
                         void *out, const int64_t *positions, const int64_t *slots,
                         const int64_t *block_table, int64_t t, int64_t heads,
                         int64_t kv_heads, int64_t dim, int64_t v_dim, int64_t block_size,
                         int64_t max_blocks, int64_t window, int64_t e4m3, float scale,
                         int64_t bf16);
EXPORT void add_rms_norm(void *x, void *residual, const void *weight, int64_t t, int64_t h,
                         float eps, int64_t bf16, int64_t weight_bf16);
EXPORT void silu_mul(const void *gate_up, void *out, int64_t t, int64_t size, int64_t bf16);

#endif
