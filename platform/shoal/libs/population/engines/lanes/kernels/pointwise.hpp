// Elementwise operations and batch norm on images [H, W, C, L].
#pragma once
#include "vectors.hpp"

// exp(x) for x <= 0, from -87 on; the error is below 2e-7 of it. Cody and Waite's reduction, a polynomial as Cephes'.
INLINE V exp_of(V x) {
    x = x < -87.f ? V{} - 87.f : x;
    const I n = __builtin_convertvector(x * 1.44269504f - .5f, I);  // towards zero: the nearest for x <= 0
    const V whole = __builtin_convertvector(n, V), r = x - whole * .693359375f + whole * 2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    return p * (V)((n + 127) << 23);  // the same bits as a float: 2 to the n
}

INLINE V sigmoid_of(V x) {
    const V power = exp_of(x > 0.f ? -x : x), below = power / (1.f + power);
    const V value = x > 0.f ? 1.f - below : below;
    return x != x ? x : value;
}

// Near zero the difference of two sigmoids has few digits: a series there.
INLINE V tanh_of(V x) {
    const V square = x * x, near = x * (1.f + square * (-1.f / 3 + square * (2.f / 15 - square * (17.f / 315))));
    const V far = 2.f * sigmoid_of(2.f * x) - 1.f;
    return square < .01f ? near : far;
}

// The share of the normal distribution below x; the error is below 2e-7 (Abramowitz and Stegun, 7.1.26).
INLINE V normal_share_of(V x) {
    const V z = (x < 0.f ? -x : x) * .70710678f, t = 1.f / (1.f + .3275911f * z);
    const V series = t * (.254829592f + t * (-.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const V tail = .5f * series * exp_of(-z * z);
    const V share = x < 0.f ? tail : 1.f - tail;
    return x != x ? x : share;
}

enum class Kind { identity, relu, tanh, sigmoid, gelu, silu };

template <Kind kind> INLINE V activate(V x) {
    if constexpr (kind == Kind::relu) return x <= 0.f ? V{} : x;
    else if constexpr (kind == Kind::tanh) return tanh_of(x);
    else if constexpr (kind == Kind::sigmoid) return sigmoid_of(x);
    else if constexpr (kind == Kind::gelu) return x * normal_share_of(x);
    else if constexpr (kind == Kind::silu) return x * sigmoid_of(x);
    else return x;
}

// The gradient g of an output, as that of its input.
template <Kind kind> INLINE V differentiate(V g, V out) {
    if constexpr (kind == Kind::relu) return out <= 0.f ? V{} : g;
    else if constexpr (kind == Kind::tanh) return g * (1.f - out * out);
    else if constexpr (kind == Kind::sigmoid) return g * out * (1.f - out);
    else return g;
}

// y [H, W, C] to out [H, OW, C], from column OL on.
template <int H, int W, int C, int OW, int OL, Kind kind, bool has_factor>
static void apply(const V* y, const V* factor, const V* offset, V* out) {
    for (int r = 0; r < H; r++)
        for (int w = 0; w < W; w++)
            for (int c = 0; c < C; c++, y++) {
                V value = *y;
                if constexpr (has_factor) value = value * factor[c] + offset[c];
                out[(r * OW + OL + w) * C + c] = activate<kind>(value);
            }
}

// The gradient g [H, W, C] to dy [H, DW, C]; out as it was stored.
template <int H, int W, int C, int OW, int OL, int DW, Kind kind>
static void unapply(const V* g, const V* out, V* dy) {
    for (int r = 0; r < H; r++)
        for (int at = 0; at < W * C; at++, g++) dy[r * DW * C + at] = differentiate<kind>(*g, out[(r * OW + OL) * C + at]);
}

// The same for operations whose gradient needs what they were given: y [H, W, C].
template <int H, int W, int C, int DW, Kind kind, bool has_factor>
static void unapply_at(const V* g, const V* y, const V* factor, const V* offset, V* dy) {
    for (int r = 0; r < H; r++, dy += DW * C)
        for (int w = 0; w < W; w++)
            for (int c = 0; c < C; c++, g++, y++) {
                V x = *y;
                if constexpr (has_factor) x = x * factor[c] + offset[c];
                V slope;
                if constexpr (kind == Kind::gelu) slope = normal_share_of(x) + x * .39894228f * exp_of(x * x * -.5f);
                else slope = sigmoid_of(x) * (1.f + x * (1.f - sigmoid_of(x)));
                dy[w * C + c] = *g * slope;
            }
}

// Adds the gradient dy [H, DW, C] of each channel.
template <int H, int W, int C, int DW> static void sum_channels(const V* dy, V* sums) {
    for (int r = 0; r < H; r++, dy += DW * C)
        for (int w = 0; w < W; w++)
            for (int c = 0; c < C; c++) sums[c] += dy[w * C + c];
}

// Merges an image y [SIZE, C] into the means and the sums of squared differences of `count` images before it
// (Chan, Golub, LeVeque 1979).
template <int SIZE, int C> static void merge_moments(const V* y, int count, V* mean, V* squares) {
    V sums[C] = {}, own[C] = {};
    for (int i = 0; i < SIZE; i++)
        for (int c = 0; c < C; c++) sums[c] += y[i * C + c];
    for (int c = 0; c < C; c++) sums[c] *= 1.f / SIZE;
    for (int i = 0; i < SIZE; i++)
        for (int c = 0; c < C; c++) {
            const V difference = y[i * C + c] - sums[c];
            own[c] += difference * difference;
        }
    for (int c = 0; c < C; c++) {
        const V difference = sums[c] - mean[c];
        mean[c] += difference * (1.f / (count + 1));
        squares[c] += own[c] + difference * difference * ((float)SIZE * count / (count + 1));
    }
}

// Per channel: what batch norm multiplies by and adds.
INLINE void find_factors(int C, const V* mean, const V* variance, float epsilon, const V* weight, const V* bias, V* inverse, V* factor, V* offset) {
    for (int c = 0; c < C; c++) {
        V root = variance[c] + epsilon;
        for (int n = 0; n < LANES; n++) root[n] = std::sqrt(root[n]);
        inverse[c] = 1.f / root;
        factor[c] = weight[c] * inverse[c];
        offset[c] = bias[c] - mean[c] * factor[c];
    }
}

// Adds dz and dz * (y - mean) of each channel: dz [H, DW, C], y [H, YW, C].
template <int H, int W, int C, int DW, int YW>
static void sum_moments(const V* dz, const V* y, const V* mean, V* sums, V* products) {
    for (int r = 0; r < H; r++, dz += DW * C, y += YW * C)
        for (int w = 0; w < W; w++)
            for (int c = 0; c < C; c++) {
                const V part = dz[w * C + c];
                sums[c] += part;
                products[c] += part * (y[w * C + c] - mean[c]);
            }
}

// dz [H, DW, C] becomes the gradient of y: scale * dz + slope * (y - mean) + level.
template <int H, int W, int C, int DW, int YW>
static void unnormalise(V* dz, const V* y, const V* mean, const V* scale, const V* slope, const V* level) {
    for (int r = 0; r < H; r++, dz += DW * C, y += YW * C)
        for (int w = 0; w < W; w++)
            for (int c = 0; c < C; c++) {
                V& value = dz[w * C + c];
                value = value * scale[c] + (y[w * C + c] - mean[c]) * slope[c] + level[c];
            }
}

// Multiplies out [H, OW, C], from column OL on, by factors [H, W, C], such as the mask of dropout.
template <int H, int W, int C, int OW, int OL> static void multiply(V* out, const V* factors) {
    for (int r = 0; r < H; r++)
        for (int at = 0; at < W * C; at++, factors++) out[(r * OW + OL) * C + at] *= *factors;
}
