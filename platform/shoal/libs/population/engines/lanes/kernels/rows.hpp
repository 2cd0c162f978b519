// Between a member's row, as torch has it, and lanes. A member's numbers stand `stride` behind the previous member's.
#pragma once
#include "vectors.hpp"

struct Rows {
    float* data;
    long strides[5];  // of members and of each dimension
};

// Vectors [C] of each member to [C, L]. Lanes without a member stay what they are.
INLINE void read_rows(const Rows& rows, int k, int C, V* lanes) {
    for (int n = 0; n < k; n++)
        for (int c = 0; c < C; c++) lanes[c][n] = rows.data[n * rows.strides[0] + c * rows.strides[1]];
}

INLINE void write_rows(const Rows& rows, int k, int C, const V* lanes) {
    for (int n = 0; n < k; n++)
        for (int c = 0; c < C; c++) rows.data[n * rows.strides[0] + c * rows.strides[1]] = lanes[c][n];
}

// Image b of each member, of rows [k, B, C, H, W], and lanes [H, WIDTH, C, L], whose columns stand from LEFT on.
template <int C, int H, int W, int WIDTH, int LEFT, bool is_read>
static void exchange_image(const Rows& rows, int k, int b, V* lanes) {
    const long* strides = rows.strides;
    for (int n = 0; n < k; n++) {
        float* image = rows.data + n * strides[0] + b * strides[1];
        float* lane = reinterpret_cast<float*>(lanes + LEFT * C) + n;
        for (int c = 0; c < C; c++)
            for (int h = 0; h < H; h++)
                for (int w = 0; w < W; w++) {
                    float& outside = image[c * strides[2] + h * strides[3] + w * strides[4]];
                    float& inside = lane[((h * WIDTH + w) * C + c) * LANES];
                    if (is_read) inside = outside;
                    else outside = inside;
                }
    }
}

// Image b of rows [B, C, H, W] that all members share, to [H, WIDTH, C].
template <int C, int H, int W, int WIDTH, int LEFT> static void read_shared_image(const Rows& rows, int b, float* to) {
    const long* strides = rows.strides;
    for (int h = 0; h < H; h++)
        for (int w = 0; w < W; w++)
            for (int c = 0; c < C; c++)
                to[(h * WIDTH + w + LEFT) * C + c] =
                    rows.data[b * strides[1] + c * strides[2] + h * strides[3] + w * strides[4]];
}
