// Convolution of an image [H, W, C, L] of each member with its own kernels, and its gradients, as register tiles.
//
// An image is stored with PW columns of zeros left and right: [H, XW, C]. Rows beyond its border are skipped. The
// gradient of the output is stored with DL and DR columns of zeros: [HO, DW, O]. For one row of a kernel, its columns
// and channels are one contiguous run of RUN numbers of the image.
#pragma once
#include "rows.hpp"

constexpr int CACHE_BYTES = 16384;  // what a block of weights may take of the first-level cache

template <int H_, int W_, int C_, int O_, int KH_, int KW_, int SH_, int SW_, int PH_, int PW_> struct Conv {
    static constexpr int H = H_, W = W_, C = C_, O = O_, KH = KH_, KW = KW_, SH = SH_, SW = SW_, PH = PH_, PW = PW_;
    static constexpr int HO = (H + 2 * PH - KH) / SH + 1, WO = (W + 2 * PW - KW) / SW + 1;
    static constexpr int XW = W + 2 * PW, RUN = KW * C;
    static constexpr int DL = max_of(0, ceil_div(KW - 1 - PW, SW)), DR = max_of(0, (W - 1 + PW) / SW - (WO - 1));
    static constexpr int DW = DL + WO + DR;
    static constexpr int NUM_WEIGHTS = KH * RUN * O;
    static constexpr Tile FORWARD = choose_tile(WO, O, true), WEIGHT = choose_tile(RUN, O, false);
    static constexpr Tile INPUT = choose_tile(ceil_div(W, SW), C, true);
    // rows of a kernel that are summed before the sums leave the registers
    static constexpr int FORWARD_ROWS = max_of(1, min_of(KH, CACHE_BYTES / (RUN * FORWARD.S * (int)sizeof(V))));
    static constexpr int INPUT_ROWS = max_of(1, min_of(KH, CACHE_BYTES / (KW * O * INPUT.S * (int)sizeof(V))));
    // rows of the output, the reduction of the gradient of the weights, that stay in the cache with their image
    static constexpr int WEIGHT_ROWS = min_of(HO, max_of(2, 24576 / ((WO * O + SH * XW * C) * (int)sizeof(V))));

    // The first and the last row of a kernel that meet the image, for row r of the output.
    static int first_row(int r) { return max_of(0, PH - r * SH); }
    static int last_row(int r) { return min_of(KH, H + PH - r * SH); }
};

// Kernels [O, C, KH, KW] of each member to [KH, tiles of S output channels, RUN, S], or back where is_read is false.
template <class G, bool is_read> static void exchange_weights(const Rows& rows, int k, V* lanes, int S) {
    const long* strides = rows.strides;
    for (int n = 0; n < k; n++)
        for (int o = 0; o < G::O; o++) {
            const float* from = rows.data + n * strides[0] + o * strides[1];
            const int o0 = o / S * S, width = min_of(S, G::O - o0);
            for (int kh = 0; kh < G::KH; kh++) {
                float* lane = reinterpret_cast<float*>(lanes + (kh * G::O + o0) * G::RUN + o - o0) + n;
                for (int kw = 0; kw < G::KW; kw++)
                    for (int c = 0; c < G::C; c++) {
                        float& outside = const_cast<float&>(from[c * strides[2] + kh * strides[3] + kw * strides[4]]);
                        float& inside = lane[(kw * G::C + c) * width * LANES];
                        if (is_read) inside = outside;
                        else outside = inside;
                    }
            }
        }
}

// The same kernels to [KH, tiles of S channels, KW, O, S].
template <class G> static void read_transposed_weights(const Rows& rows, int k, V* lanes) {
    constexpr int S = G::INPUT.S;
    const long* strides = rows.strides;
    for (int n = 0; n < k; n++)
        for (int o = 0; o < G::O; o++)
            for (int kh = 0; kh < G::KH; kh++)
                for (int kw = 0; kw < G::KW; kw++)
                    for (int c = 0; c < G::C; c++) {
                        const int c0 = c / S * S, width = min_of(S, G::C - c0);
                        lanes[(kh * G::C + c0) * G::KW * G::O + (kw * G::O + o) * width + c - c0][n] =
                            rows.data[n * strides[0] + o * strides[1] + c * strides[2] + kh * strides[3] + kw * strides[4]];
                    }
}

// R columns and S channels of one row of the output, from kernel row `from` to `to`.
template <class G, int R, int S, class X>
INLINE void sum_outputs(const X* x, const V* w, const V* bias, V* y, int from, int to, bool is_first) {
    V sums[R][S];
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < S; j++) sums[i][j] = is_first ? bias[j] : y[i * G::O + j];
    for (int kh = from; kh < to; kh++) {
        const X* a = x + kh * G::XW * G::C;
        const V* b = w + kh * G::RUN * G::O;
        for (int at = 0; at < G::RUN; at++) multiply_add<R, S, G::SW * G::C, 1>(sums, a + at, b + at * S);
    }
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < S; j++) y[i * G::O + j] = sums[i][j];
}

template <class G, int S, class X>
INLINE void sum_output_rows(const X* x, const V* w, const V* bias, V* y, int r0, int r1, int k0, int k1) {
    constexpr int R = G::FORWARD.R, REST = G::WO % R;
    for (int r = r0; r < r1; r++) {
        const int from = max_of(k0, G::first_row(r)), to = min_of(k1, G::last_row(r));
        const X* a = x + (r * G::SH - G::PH) * G::XW * G::C;
        V* out = y + (r - r0) * G::WO * G::O;
        int c = 0;
        for (; c + R <= G::WO; c += R)
            sum_outputs<G, R, S>(a + c * G::SW * G::C, w, bias, out + c * G::O, from, to, k0 == 0);
        if constexpr (REST > 0) sum_outputs<G, REST, S>(a + c * G::SW * G::C, w, bias, out + c * G::O, from, to, k0 == 0);
    }
}

// Rows r0 to r1 of the output, to y [r1 - r0, WO, O].
template <class G, class X> static void convolve(const X* x, const V* w, const V* bias, V* y, int r0, int r1) {
    constexpr int S = G::FORWARD.S, REST = G::O % S;
    for (int k0 = 0; k0 < G::KH; k0 += G::FORWARD_ROWS) {
        const int k1 = min_of(G::KH, k0 + G::FORWARD_ROWS);
        int o = 0;
        for (; o + S <= G::O; o += S) sum_output_rows<G, S>(x, w + o * G::RUN, bias + o, y + o, r0, r1, k0, k1);
        if constexpr (REST > 0) sum_output_rows<G, REST>(x, w + o * G::RUN, bias + o, y + o, r0, r1, k0, k1);
    }
}

// R numbers of the run and S output channels of one kernel row, summed over rows r0 to r1 of the output.
template <class G, int R, int S, class X> INLINE void sum_weights(const X* x, const V* dy, V* dw, int r0, int r1) {
    V sums[R][S];
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < S; j++) sums[i][j] = dw[i * S + j];
    for (int r = r0; r < r1; r++) {
        const X* a = x + r * G::SH * G::XW * G::C;
        const V* b = dy + r * G::DW * G::O;
        for (int c = 0; c < G::WO; c++) multiply_add<R, S, 1, 1>(sums, a + c * G::SW * G::C, b + c * G::O);
    }
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < S; j++) dw[i * S + j] = sums[i][j];
}

template <class G, int S, class X> INLINE void sum_weight_rows(const X* x, const V* dy, V* dw, int r0, int r1) {
    constexpr int R = G::WEIGHT.R, REST = G::RUN % R;
    for (int kh = 0; kh < G::KH; kh++, dw += G::RUN * G::O) {
        int from = r0, to = r1;  // rows of the output whose row kh of the kernel meets the image
        while (from < to && kh < G::first_row(from)) from++;
        while (from < to && kh >= G::last_row(to - 1)) to--;
        const X* a = x + (kh - G::PH) * G::XW * G::C;
        int at = 0;
        for (; at + R <= G::RUN; at += R) sum_weights<G, R, S>(a + at, dy, dw + at * S, from, to);
        if constexpr (REST > 0) sum_weights<G, REST, S>(a + at, dy, dw + at * S, from, to);
    }
}

// Adds the gradient of the weights of one image, from dy [HO, DW, O] without its left columns of zeros.
template <class G, class X> static void differentiate_weights(const X* x, const V* dy, V* dw) {
    constexpr int S = G::WEIGHT.S, REST = G::O % S;
    for (int r0 = 0; r0 < G::HO; r0 += G::WEIGHT_ROWS) {
        const int r1 = min_of(G::HO, r0 + G::WEIGHT_ROWS);
        int o = 0;
        for (; o + S <= G::O; o += S) sum_weight_rows<G, S>(x, dy + o, dw + o * G::RUN, r0, r1);
        if constexpr (REST > 0) sum_weight_rows<G, REST>(x, dy + o, dw + o * G::RUN, r0, r1);
    }
}

// R columns, SW apart from column c on, and S channels of row r of the image's gradient.
template <class G, int R, int S> INLINE void sum_inputs(const V* dy, const V* w, V* dx, int r, int c, int k0, int k1) {
    V sums[R][S];
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < S; j++) sums[i][j] = k0 ? dx[i * G::SW * G::C + j] : V{};
    const int reach = c + (R - 1) * G::SW + G::PW, phase = (c + G::PW) % G::SW;
    // columns of the kernel through which a column of the output meets one of the tile
    const int first = max_of(phase, c + G::PW - (G::WO - 1) * G::SW), last = min_of(G::KW - 1, reach);
    for (int kh = k0; kh < k1; kh++) {
        const int row = r + G::PH - kh;
        if (row < 0 || row % G::SH || row / G::SH >= G::HO) continue;
        const V* a = dy + (row / G::SH * G::DW + (c + G::PW - first) / G::SW) * G::O;
        const V* b = w + (kh * G::C * G::KW + first * S) * G::O;
        for (int kw = first; kw <= last; kw += G::SW, a -= G::O, b += G::SW * G::O * S)
            for (int o = 0; o < G::O; o++) multiply_add<R, S, G::O, 1>(sums, a + o, b + o * S);
    }
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < S; j++) dx[i * G::SW * G::C + j] = sums[i][j];
}

template <class G, int S> INLINE void sum_input_rows(const V* dy, const V* w, V* dx, int k0, int k1) {
    constexpr int R = G::INPUT.R, REST = G::SW == 1 ? G::W % R : 0;
    for (int r = 0; r < G::H; r++, dx += G::W * G::C)
        for (int phase = 0; phase < min_of(G::SW, G::W); phase++) {
            int c = phase;
            for (; c + (R - 1) * G::SW < G::W; c += R * G::SW) sum_inputs<G, R, S>(dy, w, dx + c * G::C, r, c, k0, k1);
            if constexpr (REST > 0) sum_inputs<G, REST, S>(dy, w, dx + c * G::C, r, c, k0, k1), c += REST;
            for (; c < G::W; c += G::SW) sum_inputs<G, 1, S>(dy, w, dx + c * G::C, r, c, k0, k1);
        }
}

// The gradient of the image, dx [H, W, C], from dy without its left columns of zeros and transposed weights.
template <class G> static void differentiate_input(const V* dy, const V* w, V* dx) {
    constexpr int S = G::INPUT.S, REST = G::C % S;
    for (int k0 = 0; k0 < G::KH; k0 += G::INPUT_ROWS) {
        const int k1 = min_of(G::KH, k0 + G::INPUT_ROWS);
        int c = 0;
        for (; c + S <= G::C; c += S) sum_input_rows<G, S>(dy, w + c * G::KW * G::O, dx + c, k0, k1);
        if constexpr (REST > 0) sum_input_rows<G, REST>(dy, w + c * G::KW * G::O, dx + c, k0, k1);
    }
}
