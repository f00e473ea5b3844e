// Router scores in 8 bits and the best of each row: `quantise` and `nearest` of scheduler/hints.py,
// which define them, to the byte.
#pragma once

#include <cmath>

#include "seq_vec.h"

namespace k3 {
namespace {

constexpr int64_t COUNTED = 128;  // experts up to which comparing all with all takes least time
constexpr int64_t WIDE = K3_BYTES / 4;

// Floats as integers that sort as they do, and back.
template <class Ints>
K3_INLINE Ints sortable(Ints bits) {
    return bits ^ ((bits >> 31) & INT32_MAX);
}
K3_INLINE float float_from(int32_t number) {
    number = sortable(number);
    float x;
    memcpy(&x, &number, sizeof x);
    return x;
}
K3_INLINE Vi ints(const int32_t* from) {
    Vi r;
    memcpy(&r, from, sizeof r);
    return r;
}

// above[e]: how many of n numbers, a multiple of 16, are greater than number e.
K3_INLINE void count_above(const int32_t* numbers, int64_t n, int32_t* above) {
    for (int64_t e = 0; e < n; e += WIDE) {
        const Vi own = ints(numbers + e);
        Vi count = own ^ own;
        for (int64_t j = 0; j < n; j++) count = count - (numbers[j] > own);
        memcpy(above + e, &count, sizeof count);
    }
}

// The least of n numbers that at most `place` others are greater than.
K3_INLINE int32_t at_place(const int32_t* numbers, const int32_t* above, int64_t n, int32_t place) {
    Vi least = ints(numbers);
    least = (least ^ least) + INT32_MAX;
    for (int64_t e = 0; e < n; e += WIDE) {
        Vi x = ints(above + e) <= place ? ints(numbers + e) : least;
        least = x < least ? x : least;
    }
    int32_t found = INT32_MAX;
    for (int64_t lane = 0; lane < WIDE; lane++) found = least[lane] < found ? least[lane] : found;
    return found;
}

// The same without `above`: bit by bit, the largest number that more than `place` reach.
K3_INLINE int32_t search_place(const int32_t* numbers, int64_t n, int32_t place) {
    uint32_t found = uint32_t(INT32_MIN);
    for (int bit = 31; bit >= 0; bit--) {
        int32_t tried = int32_t(found + (uint32_t(1) << bit)), reach = 0;
        for (int64_t e = 0; e < n; e++) reach += numbers[e] >= tried;
        if (reach > place) found = uint32_t(tried);
    }
    return int32_t(found);
}

struct Scale {
    float low, cut, down, up;
};

K3_INLINE Vi codes_of(Vi numbers, const Scale& by) {
    const V s = (V)sortable(numbers), none = s - s, most = none + 127;
    V high = 128 + (s - by.cut) * by.up, deep = (s - by.low) * by.down;
    deep = deep < 0 ? none : deep;
    deep = deep > 127 ? most : deep;
    return __builtin_convertvector(s >= by.cut ? high : deep, Vi);
}

K3_INLINE void code_row(const CodesArgs& a, int64_t r, int32_t* numbers) {
    const int64_t n = a.count, wide = round_up(n);
    int32_t *above = numbers + wide, *keys = above, *some = keys + wide;
    const float* scores = a.scores + r * n;
    int32_t top = INT32_MIN;
    for (int64_t e = 0; e < n; e++) {
        float s = scores[e];
        s = std::fabs(s) <= 3.4028234663852886e38f ? s + 0.0f : 0;  // -0 equals 0
        int32_t bits;
        memcpy(&bits, &s, sizeof bits);
        bits = sortable(bits);
        numbers[e] = bits;
        top = bits > top ? bits : top;
    }
    for (int64_t e = n; e < wide; e++) numbers[e] = INT32_MIN;  // below every float
    int32_t at[3] = {int32_t(a.top_k - 1), int32_t(a.best_k - 1), int32_t(a.far)};
    if (n <= COUNTED) count_above(numbers, wide, above);
    for (int32_t& place : at)
        place = n <= COUNTED ? at_place(numbers, above, wide, place)
                             : search_place(numbers, wide, place);
    const float cut = float_from(at[0]), low = float_from(at[2]), tiny = 1e-30f;
    const float over = float_from(top) - cut, under = cut - low;
    const Scale scale{low, cut, 128 / (under > tiny ? under : tiny), 127 / (over > tiny ? over : tiny)};
    for (int64_t e = 0; e < wide; e += WIDE) {
        const Vi key = codes_of(ints(numbers + e), scale);
        memcpy(keys + e, &key, sizeof key);
    }
    if (a.chosen)
        for (int64_t i = 0; i < a.top_k; i++) keys[a.chosen[r * a.top_k + i]] += 256;
    // All that may be among the best, as numbers of which none is another: the lower expert first.
    const int32_t least = codes_of(Vi{} + at[1], scale)[0];
    int64_t count = 0;
    for (int64_t e = 0; e < n; e++) {
        some[count] = (keys[e] << 16) + int32_t(UINT16_MAX - e);
        count += keys[e] >= least;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t place = 0;
        for (int64_t j = 0; j < count; j++) place += some[j] > some[i];
        if (place >= a.best_k) continue;
        a.best[r * a.best_k + place] = uint16_t(UINT16_MAX - (some[i] & UINT16_MAX));
        a.codes[r * a.best_k + place] = uint8_t(some[i] >> 16);
    }
}

void codes(const CodesArgs& a, int64_t begin, int64_t end) {
    const size_t size = size_t(3 * round_up(a.count) + 1) * sizeof(int32_t);
    auto room = static_cast<int32_t*>(scratch(SEQ_SCRATCH, size));
    for (int64_t r = begin; r < end; r++) code_row(a, r, room);
}

}  // namespace
}  // namespace k3
