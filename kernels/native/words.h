// Functions of the C interface whose arguments come as 64-bit words, so that calls of different
// functions can stand in one list.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "native.h"

namespace k3 {

// A float lies in the low half of its word.
template <class T>
T from_word(int64_t word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(word);
    } else if constexpr (std::is_same_v<T, float>) {
        auto bits = static_cast<uint32_t>(word);
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    } else {
        return static_cast<T>(word);
    }
}

template <class... Args, size_t... I>
int by_words(int (*f)(Args...), const int64_t* words, std::index_sequence<I...>) {
    return f(from_word<Args>(words[I])...);
}

template <class... Args>
int by_words(int (*f)(Args...), const int64_t* words) {
    return by_words(f, words, std::index_sequence_for<Args...>{});
}

}  // namespace k3

// Defines NAME_words, which is NAME of words.
#define K3_BY_WORDS(name) \
    K3_API int name##_words(const int64_t* words) { return k3::by_words(name, words); }
