// Four to six rows by a panel with AVX2, instruction by instruction. A compiler moves sums from one
// register to another in this loop, since nearly all are in use, which takes a tenth of its speed.

#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__FMA__) && defined(__AVX2__) && !defined(__AVX512F__)
#define HAS_ROWS_BY_PANEL

constexpr int LEAST_ROWS = 4;  // fewer have registers to spare
constexpr int64_t TAKEN = 4;  // inputs at a time

// A number of a row times both vectors of weights, added to the row's two sums.
#define OF_ROW(number, first, second)                  \
    "vbroadcastss " number ", %%ymm14\n\t"             \
    "vfmadd231ps %%ymm14, %%ymm12, %%ymm" first "\n\t" \
    "vfmadd231ps %%ymm14, %%ymm13, %%ymm" second "\n\t"
#define OF_ROWS_4(x)                           \
    OF_ROW(x "(%[x])", "0", "1")               \
    OF_ROW(x "(%[x], %[stride])", "2", "3")    \
    OF_ROW(x "(%[x], %[stride], 2)", "4", "5") \
    OF_ROW(x "(%[fourth])", "6", "7")
#define OF_ROWS_5(x) OF_ROWS_4(x) OF_ROW(x "(%[fourth], %[stride])", "8", "9")
#define OF_ROWS_6(x) OF_ROWS_5(x) OF_ROW(x "(%[fourth], %[stride], 2)", "10", "11")

// An input of all rows. `x`, `low`, `high`: bytes from where the inputs begin.
#define OF_INPUT(of_rows, x, low, high)       \
    "vmovups " low "(%[panel]), %%ymm12\n\t"  \
    "vmovups " high "(%[panel]), %%ymm13\n\t" \
    of_rows(x)

#define SUMS_4(of)                                                         \
    of("0", "0") of("32", "1") of("64", "2") of("96", "3") of("128", "4")  \
    of("160", "5") of("192", "6") of("224", "7")
#define SUMS_5(of) SUMS_4(of) of("256", "8") of("288", "9")
#define SUMS_6(of) SUMS_5(of) of("320", "10") of("352", "11")
#define LOAD_SUM(at, sum) "vmovups " at "(%[sums]), %%ymm" sum "\n\t"
#define STORE_SUM(at, sum) "vmovups %%ymm" sum ", " at "(%[sums])\n\t"

#define BY_PANEL(of_rows, sums_of)                                                             \
    __asm__ volatile(                                                                          \
        sums_of(LOAD_SUM)                                                                      \
        ".p2align 6\n"                                                                         \
        "1:\n\t"                                                                               \
        "prefetcht1 (%[next])\n\t"                                                             \
        "prefetcht1 (%[next], %[step])\n\t"                                                    \
        OF_INPUT(of_rows, "0", "0", "32")                                                      \
        OF_INPUT(of_rows, "4", "64", "96")                                                     \
        OF_INPUT(of_rows, "8", "128", "160")                                                   \
        OF_INPUT(of_rows, "12", "192", "224")                                                  \
        "add $16, %[x]\n\t"                                                                    \
        "add $16, %[fourth]\n\t"                                                               \
        "add $256, %[panel]\n\t"                                                               \
        "lea (%[next], %[step], 2), %[next]\n\t"                                               \
        "dec %[times]\n\t"                                                                     \
        "jnz 1b\n\t"                                                                           \
        sums_of(STORE_SUM)                                                                     \
        : [x] "+r"(x), [fourth] "+r"(fourth), [panel] "+r"(panel), [times] "+r"(times),        \
          [next] "+r"(next)                                                                    \
        : [stride] "r"(stride), [step] "r"(step), [sums] "r"(sums)                             \
        : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",      \
          "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14")

// Adds to `sums`, [ROWS][16], what `times` times TAKEN inputs give, with one rounding each. Rows are
// `stride` bytes apart. With every two inputs the second cache is asked for a line, from `next` on,
// one each `step` bytes.
template <int ROWS>
static inline void rows_by_panel(const float* x, int64_t stride, const float* panel, int64_t times,
                                 const char* next, int64_t step, float* sums) {
    const char* fourth = (const char*)x + 3 * stride;
    if constexpr (ROWS == 4) BY_PANEL(OF_ROWS_4, SUMS_4);
    if constexpr (ROWS == 5) BY_PANEL(OF_ROWS_5, SUMS_5);
    if constexpr (ROWS == 6) BY_PANEL(OF_ROWS_6, SUMS_6);
}

#endif
