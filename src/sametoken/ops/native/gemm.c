/* Linear layers, logits and embedding lookup over one packed copy of a weight. */
#include "kernels.h"
#include "products.h"
#include "threads.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Bytes of rows that stay in the second cache while all columns pass. */
#define BLOCK_BYTES (1 << 20)

INLINE int64_t units_of(int64_t depth, int bf16) { return bf16 ? ceil_div(depth, 2) : depth; }

/* Number of threads of a parallel region. */
EXPORT int64_t team_size(void) { return omp_get_max_threads(); }

EXPORT int64_t packed_bytes(int64_t n, int64_t k, int64_t bf16) {
    return round_up(n, GROUP) * units_of(k, bf16) * 4;
}

/* Advise huge pages for memory that has not been touched yet. */
EXPORT void prefer_large_pages(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t)memory + page - 1) / page * page;
    uintptr_t last = ((uintptr_t)memory + bytes) / page * page;
    if (last > first) madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

INLINE void pack_impl(const void *weight, void *packed, int64_t n, int64_t k, const int bf16) {
    int64_t size = bf16 ? 2 : 4, units = units_of(k, bf16);
#pragma omp parallel for schedule(static)
    for (int64_t column = 0; column < round_up(n, GROUP); column++) {
        char *to = (char *)packed + ((column / GROUP) * units * GROUP + column % GROUP) * 4;
        const char *from = (const char *)weight + column * k * size;
        for (int64_t unit = 0; unit < units; unit++, to += GROUP * 4) {
            int64_t left = column < n ? smaller(4, k * size - unit * 4) : 0;
            memset(to, 0, 4);
            if (left == 4) memcpy(to, from + unit * 4, 4);
            else if (left) memcpy(to, from + unit * 4, 2);
        }
    }
}

EXPORT void pack(const void *weight, void *packed, int64_t n, int64_t k, int64_t bf16) {
    if (bf16) pack_impl(weight, packed, n, k, 1);
    else pack_impl(weight, packed, n, k, 0);
}

/* Rows of the packed weight: the words of one column are GROUP words apart. Stops and returns
 * 0 at a token id outside 0 .. n - 1. */
EXPORT int64_t embedding(const int64_t *token_ids, const void *packed, void *out, int64_t t,
                         int64_t n, int64_t k, int64_t bf16) {
    int64_t units = units_of(k, bf16), bytes = k * (bf16 ? 2 : 4);
    for (int64_t row = 0; row < t; row++) {
        int64_t column = token_ids[row];
        if (column < 0 || column >= n) return 0;
        const char *from =
            (const char *)packed + ((column / GROUP) * units * GROUP + column % GROUP) * 4;
        char *to = (char *)out + row * bytes;
        for (int64_t unit = 0; unit < bytes / 4; unit++)
            memcpy(to + unit * 4, from + unit * GROUP * 4, 4);
        if (bytes % 4) memcpy(to + bytes - 2, from + (units - 1) * GROUP * 4, 2);
    }
    return 1;
}

/* Ask the system for AMX's registers, if the kernels use them, for all threads; 0 if it refuses. */
EXPORT int64_t may_use_amx(void) {
#if defined(HAS_AMX)
    const long request_permission = 0x1023, tile_data = 18; /* of Linux's asm/prctl.h */
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return 1;
#endif
}

/* One thread's groups of columns; each is multiplied with a block of rows while it is in cache. */
INLINE void gemm_part(const char *x, const char *packed, const void *bias, void *out,
                      int64_t t, int64_t n, int64_t k, const int bf16, const int out_bf16) {
    range groups = own_part(ceil_div(n, GROUP));
    int64_t units = units_of(k, bf16), stride = k * (bf16 ? 2 : 4), most = MOST_ROWS(bf16);
    int64_t block = larger(2, BLOCK_BYTES / larger(1, stride * most)) * most, shaped = 0;
    for (int64_t start = 0; start < t; start += block) {
        int64_t count = smaller(block, t - start), tiles = ceil_div(count, most);
        for (int64_t group = groups.first; group < groups.last; group++) {
            const char *columns = packed + group * units * GROUP * 4;
            for (int64_t tile = 0; tile < tiles; tile++) {
                int64_t first = start + count * tile / tiles;
                int64_t rows = start + count * (tile + 1) / tiles - first;
                float sums[MOST_ROWS(1) * GROUP] __attribute__((aligned(64)));
                sum_products(rows, x + first * stride, stride, columns, k, sums, GROUP, &shaped,
                             bf16, 1);
                store_tile(sums, rows, first * n, n, group * GROUP, n, bias, out, bf16, out_bf16);
            }
        }
    }
    end_products(bf16);
}

EXPORT void gemm(const void *x, const void *packed, const void *bias, void *out, int64_t t,
                 int64_t n, int64_t k, int64_t bf16, int64_t out_bf16) {
#pragma omp parallel
    {
        if (!bf16) gemm_part(x, packed, bias, out, t, n, k, 0, 0);
        else if (out_bf16) gemm_part(x, packed, bias, out, t, n, k, 1, 1);
        else gemm_part(x, packed, bias, out, t, n, k, 1, 0);
    }
}

/* Where the elements of heads lie: strides of rows and heads, in elements. */
typedef struct {
    int64_t row, head;
} head_strides;

INLINE void head_products_impl(const void *x, const void *packed, void *out, int64_t t,
                               int64_t heads, int64_t n, int64_t k, head_strides from,
                               head_strides to, const int bf16) {
    int64_t size = bf16 ? 2 : 4, groups = ceil_div(n, GROUP), most = MOST_ROWS(bf16);
    int64_t group_bytes = units_of(k, bf16) * GROUP * 4, tiles = ceil_div(t, most);
#pragma omp parallel if (t * heads * n > PARALLEL_ELEMENTS)
    {
        range units = own_part(heads * groups);
        int64_t shaped = 0;
        for (int64_t unit = units.first; unit < units.last; unit++) {
            int64_t head = unit / groups, column = unit % groups * GROUP;
            const char *columns = (const char *)packed + unit * group_bytes;
            for (int64_t tile = 0; tile < tiles; tile++) {
                int64_t first = t * tile / tiles, rows = t * (tile + 1) / tiles - first;
                float sums[MOST_ROWS(1) * GROUP] __attribute__((aligned(64)));
                const char *row = (const char *)x + (first * from.row + head * from.head) * size;
                sum_products(rows, row, from.row * size, columns, k, sums, GROUP, &shaped, bf16,
                             1);
                store_tile(sums, rows, first * to.row + head * to.head, to.row, column, n, NULL,
                           out, bf16, bf16);
            }
        }
        end_products(bf16);
    }
}

/* Each head's rows times its own matrix: [t, heads, k] and packed [heads][n, k] -> [t, heads, n].
 * Heads are packed one after the other; rows and heads of x and out may be strided. */
EXPORT void head_products(const void *x, const void *packed, void *out, int64_t t, int64_t heads,
                          int64_t n, int64_t k, int64_t x_row, int64_t x_head, int64_t out_row,
                          int64_t out_head, int64_t bf16) {
    head_strides from = {x_row, x_head}, to = {out_row, out_head};
    if (bf16) head_products_impl(x, packed, out, t, heads, n, k, from, to, 1);
    else head_products_impl(x, packed, out, t, heads, n, k, from, to, 0);
}
