/* exp and log of sixteen lanes, within about one unit in the last place. */
#ifndef SAMETOKEN_ELEMENTARY_H
#define SAMETOKEN_ELEMENTARY_H

#include "vector.h"

/* e^x: 0 below -87, infinity above 88, NaN for NaN. */
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

/* Natural logarithm of positive normal numbers. */
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

#endif
