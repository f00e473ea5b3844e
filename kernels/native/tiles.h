// Products in bfloat16: blocks of 32 weight rows times tiles of 16 rows of x, by the matrix unit (AMX)
// or by dot products of pairs (AVX-512 BF16).
//
// Weights are the left operand, 16 rows x 32 columns a tile in their natural order; x is the right
// one, packed so that a tile holds 16 pairs of columns for 16 rows of x.  A result tile C[weight
// row][row of x] is kept in float32 and continued from one block of columns to the next, so every
// result is one chain of tdpbf16ps, or of vdpbf16ps, over the pairs of columns in rising order, whatever
// the blocking.  Both take subnormal numbers as zero.
#pragma once

#include "linear.h"

namespace k3 {

constexpr int64_t TILE_ROWS = 16, TILE_COLUMNS = 32, TILE_BYTES = 1024;
constexpr int64_t BLOCK_ROWS = 32;  // weight rows packed at a time
constexpr int64_t FEW_ROWS = 64;    // of x: up to here weight rows are read whole
constexpr int64_t DEPTH = 256;      // columns at a time: packed weights stay in the first cache
constexpr int64_t ROOM_BYTES = BLOCK_ROWS * DEPTH * 2;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of x, packed: for each block of DEPTH columns, for each 16 rows, tile after tile.
struct Panel {
    uint8_t* data;
    int64_t rows, k;
    bool unit;  // whether the matrix unit multiplies it

    int64_t tiles() const { return ceil_div(rows, TILE_ROWS); }
    int64_t blocks() const { return ceil_div(k, DEPTH); }
    int64_t columns(int64_t block) const {
        return block + 1 < blocks() ? DEPTH : k - block * DEPTH;
    }
    int64_t steps(int64_t block) const { return ceil_div(columns(block), TILE_COLUMNS); }
    uint8_t* at(int64_t block, int64_t tile) const {
        return data + (block * tiles() * (DEPTH / TILE_COLUMNS) + tile * steps(block)) * TILE_BYTES;
    }
    static int64_t bytes(int64_t rows, int64_t k) {
        return ceil_div(rows, TILE_ROWS) * ceil_div(k, TILE_COLUMNS) * TILE_BYTES;
    }
};

// Result tiles of weight rows [begin, end): tile (i, j) is float [16][16] at c + (i * tiles + j)
// * 256.
struct Tiles {
    // Sixteen rows of x into a panel; missing ones (null) become zeros.
    static void pack_x(const uint16_t* const* rows, const Panel& x, int64_t tile);
    // c = weight rows [begin, end) times all of x.  room: ROOM_BYTES for packed weights.
    static void multiply(const Weight& w, int64_t begin, int64_t end, const Panel& x, float* c,
                         uint8_t* room);
    // Round the result tiles c and c + apart (of the next 16 weight rows) and write them as
    // out[row of x][weight row]; stride in elements.
    static void write(const float* c, int64_t apart, int64_t weight_rows, int64_t x_rows,
                      uint16_t* out, int64_t stride);
    // Rounded activation of two tiles of gate and up, as one packed tile of the next product.
    static void activate(const Activation& act, const float* const* gate, const float* const* up,
                         uint8_t* out);
};

}  // namespace k3
