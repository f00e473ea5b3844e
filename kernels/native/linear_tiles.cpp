// The family TILES: who computes which tiles when (the kernels are in tiles.cpp).
//
// A task is a block of weight rows for all rows of x: it packs 32 weight rows by a block of columns
// at a time and continues its float32 results, which stay in the second cache.

#if defined(__x86_64__)

#include <algorithm>
#include <vector>

#include "tiles.h"

namespace k3 {

namespace {

constexpr int64_t MOST_ROWS = 512;              // rows of x for which weights are packed once
constexpr int64_t RESULT_BYTES = 1 << 20;       // float32 results of a task: half a second cache
constexpr int64_t MLP_BYTES = 32 << 20;         // packed activations of experts at a time
constexpr double READ_NS = 1.0 / 12, MAC_NS = 1.0 / 800;

enum Slot { X = 0, MIDDLE = 1, RESULT = 2, ROOM = 3, RESULT_UP = 4 };

// Weight rows of a task, `products` of which are computed side by side.
int64_t task_rows(int64_t n, int64_t x_rows, int64_t products) {
    const int64_t row = ceil_div(x_rows, TILE_ROWS) * TILE_ROWS * 4 * products;
    const int64_t most = n >= 4096 ? 512 : 256;
    return std::clamp<int64_t>(RESULT_BYTES / row / BLOCK_ROWS * BLOCK_ROWS, BLOCK_ROWS, most);
}

double cost(const Weight& w, int64_t rows) {
    return double(w.n) * std::max((w.row_bytes() + w.scale_bytes()) * READ_NS,
                                  double(w.k) * ceil_div(rows, 16) * 16 * MAC_NS);
}

template <class T>
T* room(int slot, int64_t bytes) {
    return static_cast<T*>(scratch(slot, size_t(bytes)));
}

// The result of weight rows [begin, end), in this thread's buffer `slot`.
float* result(const Weight& w, int64_t begin, int64_t end, const Panel& x, int slot) {
    const int64_t blocks = ceil_div(end - begin, BLOCK_ROWS);
    float* c = room<float>(slot, blocks * 2 * x.tiles() * TILE_BYTES);
    Tiles::multiply(w, begin, end, x, c, room<uint8_t>(ROOM, ROOM_BYTES));
    return c;
}

// Rows [begin, end) of w times x, into out [x.rows, w.n].
void product(const Weight& w, int64_t begin, int64_t end, const Panel& x, uint16_t* out) {
    const float* c = result(w, begin, end, x, RESULT);
    const int64_t across = x.tiles();
    for (int64_t j = 0; j < across; j++)
        for (int64_t i = begin; i < end; i += BLOCK_ROWS)
            Tiles::write(c + ((i - begin) / TILE_ROWS * across + j) * 256, across * 256, end - i,
                       std::min(TILE_ROWS, x.rows - 16 * j), out + 16 * j * w.n + i, w.n);
}

struct Part {  // of a job: rows [begin, begin + x.rows)
    const Job* job;
    int64_t begin;
    Panel x, middle;
};

struct Piece {  // of a part: weight rows, or one tile of x
    const Part* part;
    int64_t begin, end;
};

void pack(const Call& call, const Part& part, int64_t tile) {
    const uint16_t* rows[TILE_ROWS] = {};
    for (int64_t i = 0; i < std::min(TILE_ROWS, part.x.rows - tile * TILE_ROWS); i++) {
        const int64_t number = part.job->row(part.begin + tile * TILE_ROWS + i);
        rows[i] = static_cast<const uint16_t*>(call.row(number, part.x.k));
    }
    Tiles::pack_x(rows, part.x, tile);
}

// Gate and up of weight rows [begin, end), activated, as packed tiles of the next product.
void gate_up(const Activation& act, const Piece& p) {
    const Part& part = *p.part;
    const int64_t across = part.x.tiles();
    const float* a = result(part.job->gate, p.begin, p.end, part.x, RESULT);
    const float* b = result(part.job->up, p.begin, p.end, part.x, RESULT_UP);
    for (int64_t i = p.begin; i < p.end; i += BLOCK_ROWS) {
        const int64_t block = i / DEPTH;
        const int64_t step = i % DEPTH / TILE_COLUMNS;
        for (int64_t j = 0; j < across; j++) {
            const int64_t at = ((i - p.begin) / TILE_ROWS * across + j) * 256;
            const float* gate[2] = {a + at, a + at + across * 256};
            const float* up[2] = {b + at, b + at + across * 256};
            Tiles::activate(act, gate, up, part.middle.at(block, j) + step * TILE_BYTES);
        }
    }
}

std::vector<Piece> pieces(const std::vector<Part>& parts, int64_t (*rows)(const Part&),
                          int64_t (*step)(const Part&)) {
    std::vector<Piece> all;
    for (const Part& part : parts)
        for (int64_t n = rows(part), s = step(part), i = 0; i < n; i += s)
            all.push_back({&part, i, std::min(i + s, n)});
    return all;
}

void run(const Call& call, const Activation& act, std::vector<Part>& parts, int64_t bytes) {
    uint8_t* memory = room<uint8_t>(X, bytes);
    double first = 0, second = 0, packing = 0;
    for (Part& p : parts) {
        p.x.data = memory, memory += Panel::bytes(p.x.rows, p.x.k);
        p.middle.data = memory, memory += Panel::bytes(p.x.rows, p.middle.k);
        first += cost(p.job->gate, p.x.rows) + cost(p.job->up, p.x.rows);
        second += cost(p.job->down, p.x.rows);
        packing += double(p.x.rows * p.x.k) / 10;
    }
    const auto tiles = pieces(parts, [](const Part& p) { return p.x.tiles(); },
                              [](const Part&) -> int64_t { return 1; });
    const auto ups = pieces(parts, [](const Part& p) { return p.job->gate.n; },
                            [](const Part& p) { return task_rows(p.job->gate.n, p.x.rows, 2); });
    const auto downs = pieces(parts, [](const Part& p) { return p.job->down.n; },
                              [](const Part& p) { return task_rows(p.job->down.n, p.x.rows, 1); });
    share(call.pool, tiles.size(), packing,
          [&](int64_t i) { pack(call, *tiles[i].part, tiles[i].begin); });
    share(call.pool, ups.size(), first, [&](int64_t i) { gate_up(act, ups[i]); });
    share(call.pool, downs.size(), second, [&](int64_t i) {
        const Piece& p = downs[i];
        product(p.part->job->down, p.begin, p.end, p.part->middle,
                static_cast<uint16_t*>(p.part->job->out) + p.part->begin * p.part->job->down.n);
    });
}

}  // namespace

int64_t tiles_scratch(int threads, int64_t rows, int64_t job_rows, int64_t k, int64_t inner) {
    const int64_t most = std::min(rows, MOST_ROWS);
    const int64_t one = Panel::bytes(most, k) + Panel::bytes(most, inner);
    // Every job may be a single row, which takes a tile.
    const int64_t all = job_rows * (Panel::bytes(1, k) + Panel::bytes(1, inner));
    const int64_t result = std::max(RESULT_BYTES, ceil_div(most, TILE_ROWS) * 2 * TILE_BYTES);
    return std::max({Panel::bytes(most, k), one, std::min(all, MLP_BYTES)}) +
           threads * (2 * result + ROOM_BYTES);
}

void linear_tiles(const Call& call, const Weight& w, void* out) {
    const Job all{nullptr, call.x_rows, w, w, w, out};
    for (int64_t r = 0; r < call.x_rows; r += MOST_ROWS) {
        const int64_t rows = std::min(MOST_ROWS, call.x_rows - r);
        const Panel x{room<uint8_t>(X, Panel::bytes(rows, w.k)), rows, w.k, isa() == AMX};
        const Part part{&all, r, x, {}};
        share(call.pool, x.tiles(), double(rows * w.k) / 10,
              [&](int64_t i) { pack(call, part, i); });
        const int64_t step = task_rows(w.n, rows, 1);
        share(call.pool, ceil_div(w.n, step), cost(w, rows), [&](int64_t i) {
            product(w, i * step, std::min((i + 1) * step, w.n), x,
                    static_cast<uint16_t*>(out) + r * w.n);
        });
    }
}

void experts_tiles(const Call& call, const Job* jobs, int64_t count, const Activation& act) {
    const bool unit = isa() == AMX;
    std::vector<Part> parts;
    int64_t bytes = 0;
    for (int64_t j = 0; j < count; j++)
        for (int64_t begin = 0; begin < jobs[j].count; begin += MOST_ROWS) {
            const int64_t rows = std::min(MOST_ROWS, jobs[j].count - begin);
            const int64_t k = jobs[j].gate.k, inner = jobs[j].gate.n;
            const int64_t more = Panel::bytes(rows, k) + Panel::bytes(rows, inner);
            if (bytes && bytes + more > MLP_BYTES) {
                run(call, act, parts, bytes);
                parts.clear(), bytes = 0;
            }
            parts.push_back({&jobs[j], begin, {nullptr, rows, k, unit}, {nullptr, rows, inner, unit}});
            bytes += more;
        }
    if (bytes) run(call, act, parts, bytes);
}

}  // namespace k3

#endif
