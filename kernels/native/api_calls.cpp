// Calls that were put off, made one after the other without a way back to Python between them.

#include "native.h"

// list: for each of `count` calls the address of a NAME_words, how many words it takes, and these.
// 0, or what the first call that fails returns; those behind it are not made.
K3_API int k3_calls(const int64_t* list, int64_t count) {
    using ByWords = int (*)(const int64_t*);
    for (; count > 0; count--, list += 2 + list[1])
        if (int failed = reinterpret_cast<ByWords>(list[0])(list + 2)) return failed;
    return 0;
}
