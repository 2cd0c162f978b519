// One vector holds one number of LANES members. Legend: B batch, L lanes, C channels, O output channels, k members.
#pragma once
#include <cmath>
#include <cstring>

#if defined(__AVX512F__)
constexpr int WIDTH = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int WIDTH = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int WIDTH = 4, REGISTERS = 32;
#else
constexpr int WIDTH = 4, REGISTERS = 16;
#endif
#ifdef SHOAL_LANES  // another width than this CPU's, for tests: the compiler takes several registers for a vector
constexpr int LANES = SHOAL_LANES;
#else
constexpr int LANES = WIDTH;
#endif

typedef float V __attribute__((vector_size(LANES * 4), may_alias));
typedef int I __attribute__((vector_size(LANES * 4), may_alias));
typedef signed char Q __attribute__((vector_size(LANES), may_alias));

#define UNROLL _Pragma("GCC unroll 64")
#define INLINE static inline __attribute__((always_inline))

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A register tile: R x S accumulators.
struct Tile {
    int R, S;
};

// Cycles of one step of the reduction, in sixteenths: two products and two loads a cycle, four cycles until a sum is
// ready for the next one; what waits in registers is loaded apart, and rows that are not neighbours cost a little.
constexpr long step_cost(int r, int s, bool is_strided) {
    return max_of(max_of(r * s * 8, (r + s) * 8), 72) + 6 + 6 * min_of(r, s) + (is_strided ? 4 * r : 0);
}

// The tile with the lowest cost for `rows` x `columns` sums among those that fit into the registers.
constexpr Tile choose_tile(int rows, int columns, bool is_strided) {
    Tile best{1, 1};
    long lowest = -1;
    for (int r = 1; r <= min_of(rows, 12); r++)
        for (int s = 1; s <= min_of(columns, 12); s++) {
            if (r * s + min_of(r, s) + 2 > REGISTERS) continue;
            const int full_r = rows / r, full_s = columns / s, rest_r = rows % r, rest_s = columns % s;
            long cost = full_r * full_s * step_cost(r, s, is_strided);
            if (rest_r) cost += full_s * step_cost(rest_r, s, is_strided);
            if (rest_s) cost += full_r * step_cost(r, rest_s, is_strided);
            if (rest_r && rest_s) cost += step_cost(rest_r, rest_s, is_strided);
            if (lowest < 0 || cost < lowest) lowest = cost, best = Tile{r, s};
        }
    return best;
}

INLINE V widen(V value) { return value; }
INLINE V widen(float value) { return value - V{}; }  // minus zero, since plus zero would change the sign of one

// sums[i][j] += a[i * A] * b[j * B]; the narrower side waits in registers.
template <int R, int S, int A, int B, class X> INLINE void multiply_add(V (&sums)[R][S], const X* a, const V* b) {
    if constexpr (S <= R) {
        V wide[S];
        UNROLL for (int j = 0; j < S; j++) wide[j] = b[j * B];
        UNROLL for (int i = 0; i < R; i++) {
            const V value = widen(a[i * A]);
            UNROLL for (int j = 0; j < S; j++) sums[i][j] += value * wide[j];
        }
    } else {
        V tall[R];
        UNROLL for (int i = 0; i < R; i++) tall[i] = widen(a[i * A]);
        UNROLL for (int j = 0; j < S; j++) {
            const V value = b[j * B];
            UNROLL for (int i = 0; i < R; i++) sums[i][j] += tall[i] * value;
        }
    }
}
