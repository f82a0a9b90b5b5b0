// Four to six rows by a panel with AVX2, instruction by instruction. A compiler moves sums from one
// register to another in this loop, since nearly all are in use, which takes a tenth of its speed.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__FMA__) && defined(__AVX2__) && !defined(__AVX512F__)
#define HAS_ROWS_BY_PANEL

constexpr int LEAST_ROWS = 4;  // fewer have registers to spare
constexpr int64_t TAKEN = 4;   // inputs at a time

// Two vectors of weights, from so many bytes of the panel on: of floats, or of bfloat16 numbers, of
// which those of the first vector and of the second lie in turns.
#define OF_FLOATS(low, high)                 \
    "vmovups " low "(%[panel]), %%ymm12\n\t" \
    "vmovups " high "(%[panel]), %%ymm13\n\t"
#define OF_HALF_FLOATS(both)                  \
    "vmovups " both "(%[panel]), %%ymm13\n\t" \
    "vpslld $16, %%ymm13, %%ymm12\n\t"        \
    "vpand %%ymm15, %%ymm13, %%ymm13\n\t"

// A number of a row times both vectors, added to the row's two sums.
#define OF_ROW(number, first, second)                  \
    "vbroadcastss " number ", %%ymm14\n\t"             \
    "vfmadd231ps %%ymm14, %%ymm12, %%ymm" first "\n\t" \
    "vfmadd231ps %%ymm14, %%ymm13, %%ymm" second "\n\t"
#define OF_ROWS_4(at)                           \
    OF_ROW(at "(%[x])", "0", "1")               \
    OF_ROW(at "(%[x], %[stride])", "2", "3")    \
    OF_ROW(at "(%[x], %[stride], 2)", "4", "5") \
    OF_ROW(at "(%[fourth])", "6", "7")
#define OF_ROWS_5(at) OF_ROWS_4(at) OF_ROW(at "(%[fourth], %[stride])", "8", "9")
#define OF_ROWS_6(at) OF_ROWS_5(at) OF_ROW(at "(%[fourth], %[stride], 2)", "10", "11")

#define FLOATS(of_rows)                          \
    OF_FLOATS("0", "32") of_rows("0")            \
    OF_FLOATS("64", "96") of_rows("4")           \
    OF_FLOATS("128", "160") of_rows("8")         \
    OF_FLOATS("192", "224") of_rows("12")        \
    "add $256, %[panel]\n\t"
#define HALF_FLOATS(of_rows)            \
    OF_HALF_FLOATS("0") of_rows("0")    \
    OF_HALF_FLOATS("32") of_rows("4")   \
    OF_HALF_FLOATS("64") of_rows("8")   \
    OF_HALF_FLOATS("96") of_rows("12")  \
    "add $128, %[panel]\n\t"

#define SUMS_4(of)                                                        \
    of("0", "0") of("32", "1") of("64", "2") of("96", "3") of("128", "4") \
    of("160", "5") of("192", "6") of("224", "7")
#define SUMS_5(of) SUMS_4(of) of("256", "8") of("288", "9")
#define SUMS_6(of) SUMS_5(of) of("320", "10") of("352", "11")
#define LOAD_SUM(at, sum) "vmovups " at "(%[sums]), %%ymm" sum "\n\t"
#define STORE_SUM(at, sum) "vmovups %%ymm" sum ", " at "(%[sums])\n\t"

#define BY_PANEL(weights, of_rows, sums_of)                                                  \
    __asm__ volatile(                                                                        \
        sums_of(LOAD_SUM)                                                                    \
        "vpcmpeqd %%ymm15, %%ymm15, %%ymm15\n\t"                                             \
        "vpslld $16, %%ymm15, %%ymm15\n\t"                                                   \
        ".p2align 6\n"                                                                       \
        "1:\n\t"                                                                             \
        "prefetcht1 (%[next])\n\t"                                                           \
        "prefetcht1 (%[next], %[step])\n\t"                                                  \
        weights(of_rows)                                                                     \
        "add $16, %[x]\n\t"                                                                  \
        "add $16, %[fourth]\n\t"                                                             \
        "lea (%[next], %[step], 2), %[next]\n\t"                                             \
        "dec %[times]\n\t"                                                                   \
        "jnz 1b\n\t"                                                                         \
        sums_of(STORE_SUM)                                                                   \
        : [x] "+r"(x), [fourth] "+r"(fourth), [panel] "+r"(panel), [times] "+r"(times),      \
          [next] "+r"(next)                                                                  \
        : [stride] "r"(stride), [step] "r"(step), [sums] "r"(sums)                           \
        : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",    \
          "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

// Adds to `sums`, [ROWS][16], what the first of some inputs give, with one rounding each, and gives
// how many these are. `first`: there are no sums yet. Rows are `stride` bytes apart. With every two
// inputs the second cache is asked for a line, from `next` on, which moves by `step` bytes with
// each input. HALF: the weights are bfloat16.
template <int ROWS, bool HALF>
static inline int64_t rows_by_panel(const char* x, int64_t stride, const void* panel,
                                    int64_t inputs, bool first, const char* next, int64_t step,
                                    float* sums) {
    int64_t times = inputs / TAKEN, taken = times * TAKEN;
    if (ROWS < LEAST_ROWS || !times) return 0;
    if (first) std::memset(sums, 0, ROWS * 64);
    const char* fourth = x + 3 * stride;
    step *= 2;
    if constexpr (ROWS == 4 && !HALF) BY_PANEL(FLOATS, OF_ROWS_4, SUMS_4);
    if constexpr (ROWS == 5 && !HALF) BY_PANEL(FLOATS, OF_ROWS_5, SUMS_5);
    if constexpr (ROWS == 6 && !HALF) BY_PANEL(FLOATS, OF_ROWS_6, SUMS_6);
    if constexpr (ROWS == 4 && HALF) BY_PANEL(HALF_FLOATS, OF_ROWS_4, SUMS_4);
    if constexpr (ROWS == 5 && HALF) BY_PANEL(HALF_FLOATS, OF_ROWS_5, SUMS_5);
    if constexpr (ROWS == 6 && HALF) BY_PANEL(HALF_FLOATS, OF_ROWS_6, SUMS_6);
    return taken;
}

#endif
