/* Latent attention (MLA): norm a row's latent, rotate its key and its queries, write once. */
#include "kv.h"
#include "threads.h"

typedef struct {
    const void *q, *latent;
    void *vectors, *out;
    const float *cos, *sin;
    const int64_t *positions, *kv_slots;
    const void *norm_weight;
    const float *vector_scale; /* of e4m3, or NULL: 1 */
    int64_t t, heads, rank, half, q_row, q_head, latent_row, out_row, out_head;
    float eps;
    int weight_bf16, interleaved;
} latent_job;

/* Rotate pairs (2j, 2j + 1) if interleaved, else (j, j + half), to elements j and j + half; as
 * e4m3, divided by the scale. */
INLINE void rotate(const latent_job *job, const void *from, int64_t first, void *to,
                   int64_t place, const float *cos, const float *sin, const int bf16,
                   const int e4m3, float scale) {
    int64_t step = job->interleaved ? 2 : 1, other = job->interleaved ? 1 : job->half;
    for (int64_t j = 0; j < job->half; j++) {
        float low = element(from, first + j * step, bf16);
        float high = element(from, first + j * step + other, bf16);
        f32v turned = splat(low * cos[j] - high * sin[j]);
        store_kv(to, place + j, 1, bf16, e4m3, scale, turned);
        turned = splat(high * cos[j] + low * sin[j]);
        store_kv(to, place + job->half + j, 1, bf16, e4m3, scale, turned);
    }
}

INLINE void latent_row(const latent_job *job, int64_t row, const int bf16, const int e4m3) {
    const float *cos = job->cos + job->positions[row] * job->half;
    const float *sin = job->sin + job->positions[row] * job->half;
    int64_t first = row * job->latent_row;
    int64_t place = job->kv_slots[row] * (job->rank + 2 * job->half);
    float scale = inverse_rms(job->latent, first, job->rank, job->eps, bf16);
    float stored = scale_of(job->vector_scale, 0);
    for (int64_t i = 0; i < job->rank; i += LANES) {
        f32v v = load_some(job->latent, first + i, job->rank - i, bf16) * scale;
        v *= load_some(job->norm_weight, i, job->rank - i, job->weight_bf16);
        store_kv(job->vectors, place + i, job->rank - i, bf16, e4m3, stored, v);
    }
    rotate(job, job->latent, first + job->rank, job->vectors, place + job->rank, cos, sin, bf16,
           e4m3, stored);
    for (int64_t head = 0; head < job->heads; head++)
        rotate(job, job->q, row * job->q_row + head * job->q_head, job->out,
               row * job->out_row + head * job->out_head, cos, sin, bf16, 0, 1.0f);
}

/* q [t, heads, 2 * half] and latent [t, rank + 2 * half], both strided, to out [t, heads,
 * 2 * half], strided, and to vectors [kv_slot][rank + 2 * half], which may be e4m3. */
EXPORT void latent_rope_and_cache(const void *q, const void *latent, void *vectors, void *out,
                                  const float *cos, const float *sin, const int64_t *positions,
                                  const int64_t *kv_slots, const void *norm_weight,
                                  const float *vector_scale, float eps, int64_t t, int64_t heads,
                                  int64_t rank, int64_t half, int64_t q_row, int64_t q_head,
                                  int64_t latent_stride, int64_t out_row, int64_t out_head,
                                  int64_t e4m3, int64_t bf16, int64_t weight_bf16,
                                  int64_t interleaved) {
    latent_job job = {q,        latent,      vectors,      out,     cos,      sin,  positions,
                      kv_slots, norm_weight, vector_scale, t,       heads,    rank, half,
                      q_row,    q_head,      latent_stride, out_row, out_head, eps,
                      (int)weight_bf16, (int)interleaved};
#pragma omp parallel for schedule(static) if (t * heads * half > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < t; row++) {
        if (e4m3) latent_row(&job, row, (int)bf16, 1);
        else if (bf16) latent_row(&job, row, 1, 0);
        else latent_row(&job, row, 0, 0);
    }
}
