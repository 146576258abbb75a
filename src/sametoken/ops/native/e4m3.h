/* Numbers of float8 e4m3: rounding to them, and their codes. */
#ifndef SAMETOKEN_E4M3_H
#define SAMETOKEN_E4M3_H

#include "vector.h"

/* Round to the nearest even e4m3 number, of at most 448; NaN stays NaN. */
INLINE f32v round_to_e4m3(f32v v) {
    f32v size = min_lanes((f32v)((u32v)v & 0x7fffffff), splat(448.0f));
    u32v bits = (u32v)size;
    f32v normal = (f32v)((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000);
    f32v magic = splat(0x1.8p14f); /* its ulp is the distance of subnormal numbers, 2^-9 */
    f32v rounded = select_lanes(size < 0x1p-6f, size + magic - magic, normal);
    return select_lanes(v == v, (f32v)((u32v)rounded | ((u32v)v & 0x80000000)), v);
}

/* Codes of numbers rounded so, without a way over these numbers; NaN's is 0x7f. */
INLINE u32v e4m3_codes(f32v v) {
    f32v size = min_lanes((f32v)((u32v)v & 0x7fffffff), splat(448.0f));
    u32v bits = (u32v)size;
    u32v normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    f32v magic = splat(0x1.8p14f);
    u32v subnormal = (u32v)(size + magic) - (u32v)magic;
    u32v code = (u32v)select_lanes(size < 0x1p-6f, (f32v)subnormal, (f32v)normal);
    code |= (u32v)v >> 24 & 0x80;
    return (u32v)select_lanes(v == v, (f32v)code, (f32v)((u32v){0} + 0x7f));
}

/* The number of each lane's highest byte, a code that is not NaN: for weights and their scales. */
INLINE f32v e4m3_finite(u32v codes) {
    return (f32v)((u32v)((i32v)codes >> 4) & 0x87f00000) * 0x1p120f;
}

/* The number of each lane's lowest byte, which may be NaN, and is often subnormal in keys and
 * values: no subnormal fp32 number, which is slow, comes up on the way. */
INLINE f32v e4m3_numbers(u32v codes) {
    u32v size = codes & 0x7f;
    f32v subnormal = __builtin_convertvector((i32v)size, f32v) * 0x1p-9f;
    f32v normal = (f32v)((size << 20) + (120 << 23)); /* the exponent's bias is 7, here 127 */
    f32v number = select_lanes((i32v)size < 8, subnormal, normal);
    number = select_lanes(size == 0x7f, splat(NAN), number);
    return (f32v)((u32v)number | (codes & 0x80) << 24);
}

#endif
