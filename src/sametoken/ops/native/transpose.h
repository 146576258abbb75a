/* Squares of words in memory, transposed: keys become the columns of a tile. */
#ifndef SAMETOKEN_TRANSPOSE_H
#define SAMETOKEN_TRANSPOSE_H

#include "vector.h"

/* Of a and b, in each block of four words: the first two words of both in turn, or the last two. */
#define FIRST_WORDS(l, s) ((l) & ~3) + ((l) & 3) / 2 + ((l) & 1) * LANES
#define LAST_WORDS(l, s) FIRST_WORDS(l, s) + 2
/* Likewise the first pair of words, or the second: for these gcc 12 finds no such instruction of
 * AVX-512. */
#if defined(__AVX512F__)
#define FIRST_PAIR(a, b) (u32v)_mm512_unpacklo_epi64((__m512i)(a), (__m512i)(b))
#define SECOND_PAIR(a, b) (u32v)_mm512_unpackhi_epi64((__m512i)(a), (__m512i)(b))
#else
#define FIRST_PAIRS(l, s) ((l) & ~3) + ((l) & 1) + ((l) & 2) / 2 * LANES
#define SECOND_PAIRS(l, s) FIRST_PAIRS(l, s) + 2
#define FIRST_PAIR(a, b) SHUFFLE(a, b, FIRST_PAIRS, 0)
#define SECOND_PAIR(a, b) SHUFFLE(a, b, SECOND_PAIRS, 0)
#endif

/* Four words from `at` on of every fourth row. */
INLINE u32v load_blocks(const char *const *rows, int64_t at) {
#define FOUR_WORDS(row) _mm_loadu_si128((const __m128i *)(rows[row] + at))
#if defined(__AVX512F__)
    __m512i blocks = _mm512_castsi128_si512(FOUR_WORDS(0));
    blocks = _mm512_mask_broadcast_i32x4(blocks, 0x00f0, FOUR_WORDS(4));
    blocks = _mm512_mask_broadcast_i32x4(blocks, 0x0f00, FOUR_WORDS(8));
    return (u32v)_mm512_mask_broadcast_i32x4(blocks, 0xf000, FOUR_WORDS(12));
#elif defined(__AVX2__)
    __m256i first = _mm256_castsi128_si256(FOUR_WORDS(0));
    return (u32v)_mm256_inserti128_si256(first, FOUR_WORDS(4), 1);
#else
    u32v words;
    memcpy(&words, rows[0] + at, sizeof words);
    return words;
#endif
#undef FOUR_WORDS
}

/* LANES rows of LANES words become columns, `stride` vectors apart; the first `count` are kept. Not
 * inlined: gcc 12 would take registers from the products that follow. */
static __attribute__((noinline)) void transpose(const char *const rows[LANES], int64_t count,
                                                u32v *columns, int64_t stride) {
    for (int64_t word = 0; word < count; word += 4) {
        u32v a = load_blocks(rows, 4 * word), b = load_blocks(rows + 1, 4 * word);
        u32v c = load_blocks(rows + 2, 4 * word), d = load_blocks(rows + 3, 4 * word);
        u32v ab = SHUFFLE(a, b, FIRST_WORDS, 0), cd = SHUFFLE(c, d, FIRST_WORDS, 0);
        u32v later_ab = SHUFFLE(a, b, LAST_WORDS, 0), later_cd = SHUFFLE(c, d, LAST_WORDS, 0);
        u32v four[4] = {FIRST_PAIR(ab, cd), SECOND_PAIR(ab, cd), FIRST_PAIR(later_ab, later_cd),
                        SECOND_PAIR(later_ab, later_cd)};
        for (int i = 0; i < 4 && word + i < count; i++) columns[(word + i) * stride] = four[i];
    }
}

#endif
