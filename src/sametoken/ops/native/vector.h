/* Vectors as wide as the CPU's registers, for gcc and clang: their rounding rules, exp and log.
 *
 * The order of additions in every sum depends on its length and on LANES only. Compile with
 * -ffp-contract=off and without -ffast-math, or batch invariance is lost. */
#ifndef SAMETOKEN_VECTOR_H
#define SAMETOKEN_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* A vector wider than a register would live on the stack: gcc takes it apart there. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float f32v __attribute__((vector_size(LANES * 4)));
typedef uint32_t u32v __attribute__((vector_size(LANES * 4)));
typedef int32_t i32v __attribute__((vector_size(LANES * 4)));
typedef uint64_t u64v __attribute__((vector_size(LANES * 4)));
typedef uint16_t u16v __attribute__((vector_size(LANES * 2)));
typedef uint8_t u8v __attribute__((vector_size(LANES)));

INLINE f32v splat(float value) { return value - (f32v){0}; }

INLINE f32v select_lanes(i32v mask, f32v yes, f32v no) {
    return (f32v)(((i32v)yes & mask) | ((i32v)no & ~mask));
}

/* The larger and the smaller; b where either is NaN. */
#if defined(__AVX512F__)
INLINE f32v max_lanes(f32v a, f32v b) { return (f32v)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE f32v min_lanes(f32v a, f32v b) { return (f32v)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE f32v max_lanes(f32v a, f32v b) { return (f32v)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE f32v min_lanes(f32v a, f32v b) { return (f32v)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE f32v max_lanes(f32v a, f32v b) { return select_lanes(a > b, a, b); }
INLINE f32v min_lanes(f32v a, f32v b) { return select_lanes(a < b, a, b); }
#endif

/* a * b + c, fused if the CPU has FMA; every kernel of a build uses the same form. */
INLINE f32v multiply_add(f32v a, f32v b, f32v c) {
#if defined(__AVX512F__)
    return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (f32v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Lane l of a shuffle is lane PICK(l, s) of a, or of b from LANES on. */
#define FOUR_LANES(PICK, l, s) PICK(l, s), PICK(l + 1, s), PICK(l + 2, s), PICK(l + 3, s)
#if LANES == 16
#define LANE_LIST(PICK, s)                                                                 \
    FOUR_LANES(PICK, 0, s), FOUR_LANES(PICK, 4, s), FOUR_LANES(PICK, 8, s),                \
        FOUR_LANES(PICK, 12, s)
#elif LANES == 8
#define LANE_LIST(PICK, s) FOUR_LANES(PICK, 0, s), FOUR_LANES(PICK, 4, s)
#else
#define LANE_LIST(PICK, s) FOUR_LANES(PICK, 0, s)
#endif
#define OWN_LANE(l, s) (l) + (s)
/* Lane l holds l. */
#define LANE_NUMBERS {LANE_LIST(OWN_LANE, 0)}
#if defined(__clang__)
#define SHUFFLE(a, b, PICK, s) __builtin_shufflevector(a, b, LANE_LIST(PICK, s))
#else
#define SHUFFLE(a, b, PICK, s) __builtin_shuffle(a, b, (u32v){LANE_LIST(PICK, s)})
#endif

/* Sum of the lanes, by pairwise halving. */
INLINE float sum_lanes(f32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lane[LANES];
    memcpy(lane, &v, sizeof lane);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
#endif
}

/* Of lanes without NaN. */
INLINE float largest_lane(f32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lane[LANES];
    memcpy(lane, &v, sizeof lane);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
#endif
}

/* Round to nearest even bf16; NaN stays NaN. */
INLINE u16v narrow(f32v v) {
#if defined(__AVX512BF16__)
    return (u16v)_mm512_cvtneps_pbh((__m512)v);
#else
    u32v bits = (u32v)v;
    u32v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32v is_nan = (u32v)(v != v);
    u32v words = (rounded & ~is_nan) | (0x7fc0 & is_nan);
#if LANES == 8
    __m128i low = _mm256_castsi256_si128((__m256i)words);
    return (u16v)_mm_packus_epi32(low, _mm256_extracti128_si256((__m256i)words, 1));
#else
    return __builtin_convertvector(words, u16v);
#endif
#endif
}

/* gcc 12 would take four instructions to widen words, and widen bytes one by one. */
INLINE u32v widen_words(u16v words) {
#if defined(__AVX512F__)
    return (u32v)_mm512_cvtepu16_epi32((__m256i)words);
#elif defined(__AVX2__)
    return (u32v)_mm256_cvtepu16_epi32((__m128i)words);
#else
    return __builtin_convertvector(words, u32v);
#endif
}

/* LANES neighbouring bytes. */
INLINE u32v load_bytes(const void *from) {
    u8v bytes;
    memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512F__)
    return (u32v)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
    return (u32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)&bytes));
#else
    return __builtin_convertvector(bytes, u32v);
#endif
}

INLINE f32v widen_lanes(u16v half) { return (f32v)(widen_words(half) << 16); }

/* Up to LANES elements of a bf16 or fp32 array from `index`; the other lanes are 0. Whole vectors
 * have variables of their own: those that are copied in part live in memory. */
INLINE f32v load_some(const void *base, int64_t index, int64_t count, int bf16) {
    if (bf16) {
        u16v half, some = {0};
        const uint16_t *from = (const uint16_t *)base + index;
        if (count >= LANES) {
            memcpy(&half, from, sizeof half);
            return widen_lanes(half);
        }
        memcpy(&some, from, count * sizeof *from);
        return widen_lanes(some);
    }
    f32v full, some = {0};
    const float *from = (const float *)base + index;
    if (count >= LANES) {
        memcpy(&full, from, sizeof full);
        return full;
    }
    memcpy(&some, from, count * sizeof *from);
    return some;
}

INLINE float element(const void *base, int64_t index, int bf16) {
    return load_some(base, index, 1, bf16)[0];
}

INLINE void store_some(void *base, int64_t index, int64_t count, int bf16, f32v v) {
    if (bf16) {
        u16v half = narrow(v), some = half;
        uint16_t *to = (uint16_t *)base + index;
        if (count >= LANES) memcpy(to, &half, sizeof half);
        else memcpy(to, &some, count * sizeof *to);
    } else {
        f32v some = v;
        float *to = (float *)base + index;
        if (count >= LANES) memcpy(to, &v, sizeof v);
        else memcpy(to, &some, count * sizeof *to);
    }
}

/* Of `size` elements from `first` on; the order of additions depends on `size` only. */
INLINE float sum_of_squares(const void *x, int64_t first, int64_t size, int bf16) {
    f32v squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        f32v v = load_some(x, first + i, size - i, bf16);
        squares = multiply_add(v, v, squares);
    }
    return sum_lanes(squares);
}

/* 1 / sqrt(mean(x^2) + eps) of these elements. */
INLINE float inverse_rms(const void *x, int64_t first, int64_t size, float eps, int bf16) {
    return 1.0f / sqrtf(sum_of_squares(x, first, size, bf16) / (float)size + eps);
}

/* Adding it and taking it away again leaves the nearest integer: 1.5 * 2^23. */
#define TO_INTEGER 12582912.0f
#define LOG2_E 1.44269504f

/* p * 2^power, 0 where x is below `lowest`; NaN for NaN. */
INLINE f32v times_power(f32v p, f32v power, f32v x, float lowest) {
#if defined(__AVX512F__)
    __mmask16 some = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(lowest), _CMP_NLT_UQ);
    return (f32v)_mm512_maskz_scalef_ps(some, (__m512)p, (__m512)power);
#else
    i32v exponent = __builtin_convertvector(power, i32v);
    f32v value = p * (f32v)((exponent + 127) << 23);
    return select_lanes(x < lowest, splat(0.0f), value);
#endif
}

/* 2^x of x up to 127, to about 1 ulp: 0 below -126, NaN for NaN. */
INLINE f32v exp2_below(f32v x) {
    f32v inside = max_lanes(splat(-126.0f), x);
    f32v power = inside + splat(TO_INTEGER) - splat(TO_INTEGER), r = inside - power;
    f32v p = splat(1.3264727029e-3f);
    p = multiply_add(p, r, splat(9.6715128782e-3f));
    p = multiply_add(p, r, splat(5.5507337459e-2f));
    p = multiply_add(p, r, splat(2.4022242082e-1f));
    p = multiply_add(p, r, splat(6.9314697760e-1f));
    return times_power(multiply_add(p, r, splat(1.0f)), power, x, -126.0f);
}

/* e^x, to about 1 ulp: 0 below -87, infinity above 88, NaN for NaN. */
INLINE f32v exp_lanes(f32v x) {
    f32v inside = max_lanes(splat(-87.0f), min_lanes(splat(88.0f), x));
    f32v power = multiply_add(inside, splat(LOG2_E), splat(TO_INTEGER)) - TO_INTEGER;
    f32v r = multiply_add(power, splat(-0.693359375f), inside);
    r = multiply_add(power, splat(2.12194440e-4f), r);
    f32v p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + 1.0f;
    return select_lanes(x > 88.0f, splat(INFINITY), times_power(p, power, x, -87.0f));
}

/* Natural logarithm of positive normal numbers, to about 1 ulp. */
INLINE f32v log_lanes(f32v x) {
    i32v bits = (i32v)x;
    i32v shifted = bits - 0x3f3504f3; /* sqrt(1/2): the mantissa lands in [0.707, 1.414) */
    f32v exponent = __builtin_convertvector(shifted >> 23, f32v);
    f32v m = (f32v)(bits - (i32v)((u32v)shifted & 0xff800000u)) - 1.0f;
    f32v p = splat(7.0376836292e-2f);
    p = multiply_add(p, m, splat(-1.1514610310e-1f));
    p = multiply_add(p, m, splat(1.1676998740e-1f));
    p = multiply_add(p, m, splat(-1.2420140846e-1f));
    p = multiply_add(p, m, splat(1.4249322787e-1f));
    p = multiply_add(p, m, splat(-1.6668057665e-1f));
    p = multiply_add(p, m, splat(2.0000714765e-1f));
    p = multiply_add(p, m, splat(-2.4999993993e-1f));
    p = multiply_add(p, m, splat(3.3333331174e-1f));
    f32v square = m * m;
    f32v low = multiply_add(exponent, splat(-2.12194440e-4f), p * m * square);
    low = multiply_add(square, splat(-0.5f), low);
    return multiply_add(exponent, splat(0.693359375f), m + low);
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }

#endif
