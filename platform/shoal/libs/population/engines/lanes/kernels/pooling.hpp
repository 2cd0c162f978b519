// Pooling of an image [H, W, C, L] to [HO, OW, C], whose pooled columns stand from column OL on (what the next
// convolution pads), with a factor and an offset of each channel before it where batch norm has left them to it.
#pragma once
#include "vectors.hpp"

template <int H_, int W_, int C_, int KH_, int KW_, int SH_, int SW_, int PH_, int PW_, int OW_, int OL_> struct Pool {
    static constexpr int H = H_, W = W_, C = C_, KH = KH_, KW = KW_, SH = SH_, SW = SW_, PH = PH_, PW = PW_;
    static constexpr int OW = OW_, OL = OL_;
    static constexpr int HO = (H + 2 * PH - KH) / SH + 1, WO = (W + 2 * PW - KW) / SW + 1;
    static constexpr bool is_disjoint = KH <= SH && KW <= SW && !PH && !PW;
    static constexpr bool is_exact = is_disjoint && KH == SH && KW == SW && H % KH == 0 && W % KW == 0;
};

// The largest number of each window, and which of them it was: the first, as in PyTorch, also of NaN. With
// is_rectified a largest number that is not positive becomes zero, and none of the window has it.
template <class P, bool has_factor, bool is_rectified>
static void pool_largest(const V* y, const V* factor, const V* offset, V* out, Q* chosen, int r0, int r1) {
    for (int r = r0; r < r1; r++)
        for (int w = 0; w < P::WO; w++)
            for (int c = 0; c < P::C; c++) {
                V best{};
                I index{};
                bool is_first = true;
                UNROLL for (int i = 0; i < P::KH; i++) UNROLL for (int j = 0; j < P::KW; j++) {
                    const int row = r * P::SH - P::PH + i, column = w * P::SW - P::PW + j;
                    if ((P::PH && (row < 0 || row >= P::H)) || (P::PW && (column < 0 || column >= P::W))) continue;
                    V value = y[(row * P::W + column) * P::C + c];
                    if constexpr (has_factor) value = value * factor[c] + offset[c];
                    const I is_larger = (value > best) | (value != value);
                    best = is_first ? value : is_larger ? value : best;
                    const I at = I{} + (i * P::KW + j);
                    index = is_first ? at : is_larger ? at : index;
                    is_first = false;
                }
                if constexpr (is_rectified) {
                    const I is_zero = best <= 0.f;
                    best = is_zero ? V{} : best;
                    index = is_zero ? I{} + P::KH * P::KW : index;
                }
                out[(r * P::OW + P::OL + w) * P::C + c] = best;
                chosen[(r * P::WO + w) * P::C + c] = __builtin_convertvector(index, Q);
            }
}

template <class P, int DW> INLINE void clear_columns(V* dy) {
    for (int r = 0; r < P::H; r++) memset(dy + r * DW * P::C, 0, P::W * P::C * sizeof(V));
}

// The gradient [HO, WO, C] to the numbers that were the largest, in dy [H, DW, C].
template <class P, int DW> static void unpool_largest(const V* g, const Q* chosen, V* dy) {
    if constexpr (!P::is_exact) clear_columns<P, DW>(dy);
    for (int r = 0; r < P::HO; r++)
        for (int w = 0; w < P::WO; w++)
            for (int c = 0; c < P::C; c++, g++, chosen++) {
                const I index = __builtin_convertvector(*chosen, I);
                UNROLL for (int i = 0; i < P::KH; i++) UNROLL for (int j = 0; j < P::KW; j++) {
                    const int row = r * P::SH - P::PH + i, column = w * P::SW - P::PW + j;
                    if ((P::PH && (row < 0 || row >= P::H)) || (P::PW && (column < 0 || column >= P::W))) continue;
                    V& to = dy[(row * DW + column) * P::C + c];
                    const V part = index == i * P::KW + j ? *g : V{};
                    if constexpr (P::is_disjoint) to = part;
                    else to += part;
                }
            }
}

// The mean of each window, of which zeros beyond the border are part.
template <class P, bool has_factor>
static void pool_mean(const V* y, const V* factor, const V* offset, V* out) {
    for (int r = 0; r < P::HO; r++)
        for (int w = 0; w < P::WO; w++)
            for (int c = 0; c < P::C; c++) {
                V sum{};
                for (int i = 0; i < P::KH; i++)
                    for (int j = 0; j < P::KW; j++) {
                        const int row = r * P::SH - P::PH + i, column = w * P::SW - P::PW + j;
                        if (row < 0 || row >= P::H || column < 0 || column >= P::W) continue;
                        V value = y[(row * P::W + column) * P::C + c];
                        if constexpr (has_factor) value = value * factor[c] + offset[c];
                        sum += value;
                    }
                out[(r * P::OW + P::OL + w) * P::C + c] = sum * (1.f / (P::KH * P::KW));
            }
}

template <class P, int DW> static void unpool_mean(const V* g, V* dy) {
    clear_columns<P, DW>(dy);
    for (int r = 0; r < P::HO; r++)
        for (int w = 0; w < P::WO; w++)
            for (int c = 0; c < P::C; c++, g++) {
                const V part = *g * (1.f / (P::KH * P::KW));
                for (int i = 0; i < P::KH; i++)
                    for (int j = 0; j < P::KW; j++) {
                        const int row = r * P::SH - P::PH + i, column = w * P::SW - P::PW + j;
                        if (row < 0 || row >= P::H || column < 0 || column >= P::W) continue;
                        dy[(row * DW + column) * P::C + c] += part;
                    }
            }
}
