/* Sixteen-lane vectors for gcc and clang, their rounding rules, and exp and log.
 *
 * The order of additions in every sum depends on its length only. Compile with
 * -ffp-contract=off and without -ffast-math, or batch invariance is lost. */
#ifndef SAMETOKEN_VECTOR_H
#define SAMETOKEN_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define LANES 16

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

INLINE f32x16 splat(float value) { return value - (f32x16){0}; }

INLINE f32x16 select_lanes(i32x16 mask, f32x16 yes, f32x16 no) {
    return (f32x16)(((i32x16)yes & mask) | ((i32x16)no & ~mask));
}

INLINE f32x16 max_lanes(f32x16 a, f32x16 b) { return select_lanes(a > b, a, b); }

/* a * b + c, fused if the CPU has FMA; every kernel of a build uses the same form. */
INLINE f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    typedef union {
        f32x16 whole;
        __m256 half[2];
    } halves;
    halves x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
    return z.whole;
#else
    return a * b + c;
#endif
}

/* Lane l of a shuffle is lane PICK(l, s) of a, or of b from 16 on. */
#define LANE_LIST(PICK, s)                                                             \
    PICK(0, s), PICK(1, s), PICK(2, s), PICK(3, s), PICK(4, s), PICK(5, s), PICK(6, s),    \
        PICK(7, s), PICK(8, s), PICK(9, s), PICK(10, s), PICK(11, s), PICK(12, s),         \
        PICK(13, s), PICK(14, s), PICK(15, s)
#if defined(__clang__)
#define SHUFFLE(a, b, PICK, s) __builtin_shufflevector(a, b, LANE_LIST(PICK, s))
#else
#define SHUFFLE(a, b, PICK, s) __builtin_shuffle(a, b, (u32x16){LANE_LIST(PICK, s)})
#endif

/* Sum of the lanes, by pairwise halving. */
INLINE float sum_lanes(f32x16 v) {
    float lane[LANES];
    memcpy(lane, &v, sizeof lane);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

INLINE float widen(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* Round to nearest even bf16; NaN stays NaN. */
INLINE u16x16 narrow(f32x16 v) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 is_nan = (u32x16)(v != v);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), u16x16);
#endif
}

/* Up to 16 elements of a bf16 or fp32 array from `index`; the other lanes are 0. */
INLINE f32x16 load_some(const void *base, int64_t index, int64_t count, int bf16) {
    if (bf16) {
        u16x16 half = {0};
        const uint16_t *from = (const uint16_t *)base + index;
        if (count >= LANES) memcpy(&half, from, sizeof half);
        else memcpy(&half, from, count * sizeof *from);
        return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
    }
    f32x16 full = {0};
    const float *from = (const float *)base + index;
    if (count >= LANES) memcpy(&full, from, sizeof full);
    else memcpy(&full, from, count * sizeof *from);
    return full;
}

INLINE void store_some(void *base, int64_t index, int64_t count, int bf16, f32x16 v) {
    if (bf16) {
        u16x16 half = narrow(v);
        uint16_t *to = (uint16_t *)base + index;
        if (count >= LANES) memcpy(to, &half, sizeof half);
        else memcpy(to, &half, count * sizeof *to);
    } else {
        float *to = (float *)base + index;
        if (count >= LANES) memcpy(to, &v, sizeof v);
        else memcpy(to, &v, count * sizeof *to);
    }
}

/* e^x to about 1 ulp: 0 below -87, infinity above 88, NaN for NaN. */
INLINE f32x16 exp_lanes(f32x16 x) {
    f32x16 inside = select_lanes(x < -87.0f, splat(-87.0f), x);
    inside = select_lanes(inside > 88.0f, splat(88.0f), inside);
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer */
    f32x16 power = multiply_add(inside, splat(1.44269504f), splat(round)) - round;
    f32x16 r = multiply_add(power, splat(-0.693359375f), inside);
    r = multiply_add(power, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + 1.0f;
    i32x16 exponent = __builtin_convertvector(power, i32x16);
    f32x16 value = p * (f32x16)((exponent + 127) << 23);
    value = select_lanes(x < -87.0f, splat(0.0f), value);
    return select_lanes(x > 88.0f, splat(INFINITY), value);
}

/* Natural logarithm of positive normal numbers, to about 1 ulp. */
INLINE f32x16 log_lanes(f32x16 x) {
    i32x16 bits = (i32x16)x;
    i32x16 shifted = bits - 0x3f3504f3; /* sqrt(1/2): the mantissa lands in [0.707, 1.414) */
    f32x16 exponent = __builtin_convertvector(shifted >> 23, f32x16);
    f32x16 m = (f32x16)(bits - (i32x16)((u32x16)shifted & 0xff800000u)) - 1.0f;
    f32x16 p = splat(7.0376836292e-2f);
    p = multiply_add(p, m, splat(-1.1514610310e-1f));
    p = multiply_add(p, m, splat(1.1676998740e-1f));
    p = multiply_add(p, m, splat(-1.2420140846e-1f));
    p = multiply_add(p, m, splat(1.4249322787e-1f));
    p = multiply_add(p, m, splat(-1.6668057665e-1f));
    p = multiply_add(p, m, splat(2.0000714765e-1f));
    p = multiply_add(p, m, splat(-2.4999993993e-1f));
    p = multiply_add(p, m, splat(3.3333331174e-1f));
    f32x16 square = m * m;
    f32x16 low = multiply_add(exponent, splat(-2.12194440e-4f), p * m * square);
    low = multiply_add(square, splat(-0.5f), low);
    return multiply_add(exponent, splat(0.693359375f), m + low);
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#endif
